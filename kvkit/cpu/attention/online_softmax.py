"""The steps between the two products of a block: causal rule and window, and the online softmax.

    m' = max(m, max S)     alpha = exp(m - m')
    P = exp(S - m')        l' = l alpha + sum P

S and P are [tokens, rows]; m and l pass from block to block. Narrow tiles keep partial sums of l (`fold`).
"""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.simd import attention
from kvkit.formulas import numeric
from kvkit.formulas.index import visible_range
from kvkit.runtime.jit import helper

LANES, WIDE = attention.LANES, attention.WIDE
MINUS_INF = numeric.MINUS_INF

get_float, put_float = memory.load(types.float32), memory.store(types.float32)
put_int = memory.store(types.int32)
online_softmax, hide_rows = attention.online_softmax, attention.hide_rows


@helper
def visible(params, block, token):
    """Return the range (begin, end) of positions that the causal rule and the window let a query see."""
    causal = params.alibi != 0 or (params.causal != 0 and block.sequence >= params.decoding)
    return visible_range(block.seqlen, block.kvlen, token, params.left, params.right, causal)


@helper
def softmax(scores, rows, computed, count, m, l, alpha):
    """Turn scores [tokens, rows] into weights P, in place; update m and l, and set alpha.

    In a wide tile only the first `computed` rows, 16 or 32, are used.
    """
    if rows == WIDE:
        for half in range(0, 4 * computed, 4 * LANES):
            online_softmax(scores + half, count, 4 * WIDE, WIDE, m + half, l + half, alpha + half)
        return
    vectors = fill_vector(scores, count * rows)
    online_softmax(scores, vectors, 4 * LANES, rows, m, l, alpha)


@helper
def fill_vector(scores, count):
    """Pad `count` scores with -inf to whole vectors; return the number of vectors."""
    vectors = -(-count // LANES)
    for i in range(count, vectors * LANES):
        put_float(scores + 4 * i, MINUS_INF)
    return vectors


@helper
def fold(m, l, row, rows):
    """Return (m, l) of a query row; l is the sum of the partial sums in the row's lanes."""
    whole, lane = np.float32(0), row
    while lane < max(rows, LANES):
        whole += get_float(l + 4 * lane)
        lane += rows
    return get_float(m + 4 * row), whole


@helper
def hides(block, tile):
    """Return whether the causal rule or the window hides a token of the block from a query of the tile."""
    return block.begin < tile.seen_from or block.begin + tile.count > tile.seen_to


@helper
def visible_in_block(params, block, tile, token):
    """Return the range (begin, end) of the block's tokens that a query sees."""
    low, high = visible(params, block, token)
    low = min(max(low - block.begin, 0), tile.count)
    return low, max(min(high - block.begin, tile.count), low)


@helper
def hide(params, block, tile):
    """Set the scores of keys that the causal rule or the window hides to -inf."""
    if block.wide:
        hide_in_wide_tile(params, block, tile)
        return
    step = 4 * block.rows
    for r in range(tile.live):
        low, high = visible_in_block(params, block, tile, (tile.first + r) // params.group)
        at = tile.scores + 4 * r
        for t in range(low):
            put_float(at + t * step, MINUS_INF)
        for t in range(high, tile.count):
            put_float(at + t * step, MINUS_INF)


@helper
def hide_in_wide_tile(params, block, tile):
    """Set the scores of hidden keys to -inf, token by token from the first that some row does not see."""
    ranges, first = block.workspace + params.workspace.lines, tile.count
    for r in range(WIDE):
        low, high = np.int64(0), tile.count
        if r < tile.live:
            low, high = visible_in_block(params, block, tile, (tile.first + r) // params.group)
        put_int(ranges + 4 * r, np.int32(low))
        put_int(ranges + 4 * (WIDE + r), np.int32(high))
        first = min(first, np.int64(0) if low else high)
    hide_rows(tile.scores, ranges, first, tile.count)
