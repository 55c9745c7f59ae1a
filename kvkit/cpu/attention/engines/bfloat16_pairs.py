"""The wide engine of bfloat16: pairs of numbers are multiplied, and added in float32 (AVX-512 BF16).

S = scale K Q^T              [tokens, rows], queries [dim / 2, rows, 2], keys as they are
O = O alpha + P V            [dim, rows], weights [tokens / 2, rows, 2], values in panels
"""

import functools

from kvkit.cpu.attention.engines.code import step_code
from kvkit.cpu.attention.engines.load import copy_rows
from kvkit.cpu.attention.params import block_at, params_at, tile_at, whole_tiles
from kvkit.cpu.simd import pairs
from kvkit.runtime.jit import helper


@helper
def panels_of(params, block):
    """Return the address of the value panels, which follow the values, and the bytes of one panel."""
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
    copy_rows(params.copy_row, values, block, tile.head, block.value_row_ids, block.wide_values, value_row)
    target, panel = panels_of(params, block)
    pairs.pair_values(block.wide_values, value_row, block.count, values.padded_dim, target, panel)


def multiply_keys(params_address, block_address, tile_address):
    """S = scale K Q^T."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    tokens, dim = whole_tiles(tile.count), params.keys.padded_dim
    pairs.scores(tile.engine_queries, block.wide_keys, 2 * dim, tokens, dim, tile.scores, tile.factor)


def add_values(params_address, block_address, tile_address):
    """O = O alpha + P V."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    values, panel = panels_of(params, block)
    pairs.pair_rows(tile.scores, tile.count, tile.scores)
    pairs.sums(
        tile.scores, values, panel, (tile.count + 1) // 2, params.values.padded_dim, tile.o, tile.alpha
    )


STEPS = {"queries": pair_queries, "load": load, "scores": multiply_keys, "sums": add_values}


@functools.cache
def step(name):
    """Compile a step of the engine."""
    return step_code(STEPS[name], name)


def engine():
    """Return the engine of bfloat16 pairs."""
    return {name: step(name).address for name in STEPS}
