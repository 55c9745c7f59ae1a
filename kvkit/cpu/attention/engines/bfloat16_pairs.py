"""The wide engine of bfloat16: pairs of numbers are multiplied, and added in float32 (AVX-512 BF16).

S = scale K Q^T              [tokens, rows], queries [dim / 2, rows, 2], keys as they are
O = O alpha + P V            [dim, rows], weights [tokens / 2, rows, 2], values in panels
"""

import functools

from kvkit.cpu.attention.engines.code import step_code
from kvkit.cpu.attention.engines.load import copy_rows, row_at, rows_of_head
from kvkit.cpu.attention.params import block_at, params_at, rows_computed, tile_at, whole_tiles
from kvkit.cpu.simd import attention, pairs
from kvkit.runtime.jit import helper


@helper
def panels_of(params, block):
    """Return the address of the value panels, after the values, and the bytes of a panel (8 elements)."""
    return block.wide_values + block.size * 2 * params.values.padded_dim, block.size * 16


def pair_queries(params_address, block_address, tile_address):
    """Convert the queries of a tile to pairs of bfloat16, which is exact."""
    params, tile = params_at(params_address), tile_at(tile_address)
    pairs.pair_rows(tile.queries, params.keys.padded_dim, tile.engine_queries)


def load(params_address, block_address, tile_address):
    """Copy the keys and values of a block, and arrange the values in pairs of tokens."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    keys, values, value_row = params.keys, params.values, 2 * params.values.padded_dim
    copy_rows(
        params.copy_row, keys, block, tile.head, block.key_row_ids, block.wide_keys, 2 * keys.padded_dim
    )
    rows = block.wide_keys
    if block.values_in_keys:
        value_row = 2 * keys.padded_dim
    else:
        rows = block.wide_values
        copy_rows(params.copy_row, values, block, tile.head, block.value_row_ids, rows, value_row)
    target, panel = panels_of(params, block)
    pairs.pair_values(rows, value_row, block.count, values.padded_dim, target, panel)


def multiply_keys(params_address, block_address, tile_address):
    """S = scale K Q^T."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    tokens, dim = whole_tiles(tile.count), params.keys.padded_dim
    rows, first, some = rows_computed(params, block, tile), 0, tokens
    while first < tokens:
        if block.values_in_keys and not tile.index:  # latent rows are long: prefetch those of the next block
            some = pairs.TILE
            prefetch_next(params, block, first, some)
        keys, scores = block.wide_keys + first * 2 * dim, tile.scores + first * pairs.PAIRED
        pairs.scores(
            tile.engine_queries,
            keys,
            2 * dim,
            count=some,
            dim=dim,
            target=scores,
            scale=tile.factor,
            rows=rows,
        )
        first += some


@helper
def prefetch_next(params, block, first, count):
    """Prefetch the keys of some tokens of the next block, from its token `first` on."""
    side, position = params.keys, block.begin + block.size + first
    for token in range(position, min(position + count, block.end)):
        row = row_at(params, block, side, token) * side.row
        attention.prefetch_bytes(rows_of_head(side, block, block.head)[0] + row, side.bytes)


def add_values(params_address, block_address, tile_address):
    """O = O alpha + P V."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    (values, panel), dim = panels_of(params, block), params.values.padded_dim
    pairs.pair_rows(tile.scores, tile.count, tile.scores)
    count, rows = (tile.count + 1) // 2, rows_computed(params, block, tile)
    pairs.sums(tile.scores, values, panel, count, dim, target=tile.o, factors=tile.alpha, rows=rows)


STEPS = {"queries": pair_queries, "load": load, "scores": multiply_keys, "sums": add_values}


@functools.cache
def step(name):
    """Compile a step of the engine."""
    return step_code(STEPS[name], name)


def engine():
    """Return the engine of bfloat16 pairs."""
    return {name: step(name).address for name in STEPS} | {"scales_scores": True}
