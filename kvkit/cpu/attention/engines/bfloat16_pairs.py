"""The wide engine of bfloat16: pairs of numbers are multiplied, and added in float32 (AVX-512 BF16).

S = scale K Q^T              [tokens, rows], queries [dim / 2, rows, 2]
O = O alpha + P V            [rows, dim], weights [tokens / 2, rows, 2]

Engines read each row of keys and values by its address. Latent rows, keys and values at once, stay in place.
"""

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.engines.load import find_next_rows, load_rows, rows_of_head
from kvkit.cpu.attention.params import STEP, block_at, params_at, rows_computed, tile_at, whole_tiles
from kvkit.cpu.simd import attention, pairs
from kvkit.runtime.jit import compiled, helper

put = memory.store(types.int64)


@compiled(STEP)
def pair_queries(params_address, block_address, tile_address):
    """Convert the queries of a tile to pairs of bfloat16, which is exact."""
    params, tile = params_at(params_address), tile_at(tile_address)
    pairs.pair_rows(tile.queries, params.keys.padded_dim, tile.engine_queries)


@compiled(STEP)
def load(params_address, block_address, tile_address):
    """Write the addresses of the block's rows; copy the rows first, unless they can be read in place."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    keys, values = params.keys, params.values
    if block.values_in_keys:
        find_next_rows(params, block, params.keys, tile.head, block.value_addresses)
    if block.values_in_keys and keys.bytes == 2 * keys.padded_dim and values.dim == values.padded_dim:
        rows, _ = rows_of_head(keys, block, tile.head)
        attention.addresses(rows, keys.row, block.key_row_ids, block.count + 1, block.key_addresses)
        return
    copy_side(params, block, tile, keys, block.key_row_ids, block.wide_keys, block.key_addresses)
    if not block.values_in_keys:
        copy_side(params, block, tile, values, block.value_row_ids, block.wide_values, block.value_addresses)


@helper
def copy_side(params, block, tile, side, row_ids, rows, addresses):
    """Load the keys or the values of a block as bfloat16; write the rows' addresses, the last one twice."""
    row = 2 * side.padded_dim
    load_rows(side.to_bfloat16, side, block, tile.head, row_ids, target=rows, target_row=row, element=2)
    attention.write_sequence(rows, row, block.count, addresses)
    put(addresses + 8 * block.count, rows + (block.count - 1) * row)


@compiled(STEP)
def multiply_keys(params_address, block_address, tile_address):
    """S = scale K Q^T."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    ahead = block.value_addresses if block.values_in_keys and not tile.index else 0
    pairs.scores(
        tile.engine_queries, block.key_addresses, ahead,
        count=whole_tiles(tile.count), dim=params.keys.padded_dim, target=tile.scores, scale=tile.factor,
        rows=rows_computed(params, block, tile),
    )  # fmt: skip


@compiled(STEP)
def add_values(params_address, block_address, tile_address):
    """O = O alpha + P V."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    pairs.pair_rows(tile.scores, tile.count, tile.scores)
    pairs.sums(
        tile.scores, block.key_addresses if block.values_in_keys else block.value_addresses,
        pairs=(tile.count + 1) // 2, dim=params.values.padded_dim, target=tile.o, factors=tile.alpha,
        rows=-(-tile.live // pairs.TILE) * pairs.TILE,
    )  # fmt: skip


def engine():
    """Return the engine of bfloat16 pairs."""
    steps = {"queries": pair_queries, "load": load, "scores": multiply_keys, "sums": add_values}
    addresses = {name: step.code.address for name, step in steps.items()}
    return addresses | {"scales_scores": True, "interleaves": True}
