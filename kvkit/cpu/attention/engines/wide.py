"""The wide engine: 32 query rows, over keys and values of a block that are widened to float32 first.

    S = K Q^T                    [tokens, rows], queries [dim, rows]
    O = O alpha + P V            [dim, rows]

Lanes are query rows.
"""

from kvkit.cpu.attention.params import STEP, block_at, params_at, tile_at, whole_tiles
from kvkit.cpu.simd import attention
from kvkit.runtime.jit import compiled

wide_scores, wide_sums = attention.wide_scores, attention.wide_sums


@compiled(STEP)
def multiply_keys(params_address, block_address, tile_address):
    """S = K Q^T."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    tokens, dim = whole_tiles(tile.count), params.keys.padded_dim
    wide_scores(tile.queries, tile.keys, block.key_row, tokens, dim, tile.scores)


@compiled(STEP)
def add_values(params_address, block_address, tile_address):
    """O = O alpha + P V."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    dim = params.values.padded_dim
    wide_sums(tile.scores, tile.values, block.value_row, tile.count, dim, tile.o, tile.alpha)


def engine():
    """Return the wide engine; `walk.load_block` widens the rows first."""
    return {"scores": multiply_keys.code.address, "sums": add_values.code.address}
