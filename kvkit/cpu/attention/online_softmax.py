"""The steps between the two products of a block: masks and biases, and the online softmax.

    m' = max(m, max S)     alpha = exp(m - m')
    P = exp(S - m')        l' = l alpha + sum P

S and P are [tokens, rows]; m and l pass from block to block. Narrow tiles keep partial sums of l (`fold`).
"""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.params import WIDE_BLOCK, rows_computed
from kvkit.cpu.simd import attention
from kvkit.formulas import numeric
from kvkit.formulas.index import visible_range
from kvkit.runtime.jit import helper

LANES, WIDE = attention.LANES, attention.WIDE
MINUS_INF = numeric.MINUS_INF

get, get_bool = memory.load(types.int64), memory.load(types.int8)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
get_half, get_bfloat16 = memory.read("float16"), memory.read("bfloat16")
online_softmax, cap = attention.online_softmax, attention.apply_softcap
widen_floats, widen_halves, widen_bfloat16 = map(attention.widen_numbers, ("float32", "float16", "bfloat16"))


@helper
def visible(params, block, token):
    """Return the range (begin, end) of positions that the causal rule and the window let a query see."""
    causal = params.alibi != 0 or (params.causal != 0 and block.sequence >= params.decoding)
    return visible_range(block.seqlen, block.kvlen, token, params.left, params.right, causal)


@helper
def softmax(scores, rows, computed, count, m, l, alpha):
    """Turn scores [tokens, rows] into weights P, in place; update m and l, and set alpha.

    Of a wide tile only the first `computed` rows, 16 or 32.
    """
    if rows == WIDE:
        for half in range(0, 4 * computed, 4 * LANES):
            online_softmax(scores + half, count, 4 * WIDE, WIDE, m + half, l + half, alpha + half)
        return
    vectors = fill_vector(scores, count * rows)
    online_softmax(scores, vectors, 4 * LANES, rows, m, l, alpha)


@helper
def fill_vector(scores, count):
    """Pad `count` scores with -inf to whole vectors, and return the number of vectors."""
    vectors = -(-count // LANES)
    for i in range(count, vectors * LANES):
        put_float(scores + 4 * i, MINUS_INF)
    return vectors


@helper
def fold(m, l, row, rows):
    """Return (m, l) of a query row; l is summed over the lanes of the row."""
    whole, lane = np.float32(0), row
    while lane < max(rows, LANES):
        whole += get_float(l + 4 * lane)
        lane += rows
    return get_float(m + 4 * row), whole


@helper
def needs_bias_or_mask(params, block, tile):
    """Return whether `apply_bias_and_mask` has anything to do."""
    return (
        params.cap != 0
        or params.alibi != 0
        or params.slopes != 0
        or params.mask != 0
        or block.begin < visible(params, block, (tile.first + tile.live - 1) // params.group)[0]
        or block.begin + tile.count > visible(params, block, tile.first // params.group)[1]
    )


@helper
def apply_bias_and_mask(params, block, tile):
    """Cap the scores, then apply the causal rule, window, ALiBi and mask: a hidden key scores -inf."""
    step, line = 4 * block.rows, 4 * WIDE_BLOCK
    lines = block.workspace + params.workspace.lines  # numbers of a wide tile's mask         [rows, tokens]
    size = 4 if params.mask_kind == 1 else 2 if params.mask_kind in (2, 3) else 0
    in_lines = block.wide and size and params.mask_column == size
    if in_lines:
        attention.clear(lines, WIDE * WIDE_BLOCK)
    if params.cap:
        cap(tile.scores, -(-tile.count * block.rows // LANES), params.cap_at)
    for r in range(tile.live):
        token = (tile.first + r) // params.group
        head = tile.head * params.group + (tile.first + r) % params.group
        low, high = visible(params, block, token)
        low = min(max(low - block.begin, 0), tile.count)
        high = max(min(high - block.begin, tile.count), low)
        at = tile.scores + 4 * r
        for t in range(low):
            put_float(at + t * step, MINUS_INF)
        for t in range(high, tile.count):
            put_float(at + t * step, MINUS_INF)
        if params.alibi or params.slopes:
            if params.slopes:
                slope = get_float(params.slopes + block.sequence * params.slopes_sequence + 4 * head)
            else:
                slope = numeric.alibi_slope(head, params.heads * params.group)
            position = block.kvlen - block.seqlen + token
            for t in range(low, high):
                distance = block.begin + t - position
                bias = numeric.alibi_bias(slope, min(distance, -distance))
                put_float(at + t * step, get_float(at + t * step) + bias)
        if params.mask:
            mask = mask_of_block(params, block, head, token)
            if in_lines:
                attention.prefetch_bytes(mask + block.size * size, block.size * size)  # of the next block
                widen_mask(params, mask + low * params.mask_column, lines + r * line + 4 * low, high - low)
            else:
                add_mask(params, at, step, mask, low, high)
    if in_lines:
        whole = -(-tile.count // LANES) * LANES
        attention.add_biases(lines, line, rows_computed(params, block, tile), whole, tile.scores)


@helper
def mask_of_block(params, block, head, token):
    """Return where a query row's mask of the block begins."""
    row, column = token, block.begin
    if params.mask_packed:
        row += get(params.seqstarts + 8 * block.sequence)
    if params.mask_packed == 1:  # if 2, columns count within each sequence
        column += get(params.kvstarts + 8 * block.sequence)
    mask = params.mask + block.sequence * params.mask_sequence + head * params.mask_head
    return mask + row * params.mask_row + column * params.mask_column


@helper
def widen_mask(params, source, target, count):
    """Widen numbers of a mask, which are adjacent, to float32."""
    if params.mask_kind == 1:
        widen_floats(source, target, count)
    elif params.mask_kind == 2:
        widen_halves(source, target, count)
    else:
        widen_bfloat16(source, target, count)


@helper
def add_mask(params, scores, step, mask, low, high):
    """Add tokens low..high of a mask's row to the scores of a query row."""
    column = params.mask_column
    if params.mask_kind == 1:
        for t in range(low, high):
            add(scores + t * step, get_float(mask + t * column))
    elif params.mask_kind == 2:
        for t in range(low, high):
            add(scores + t * step, get_half(mask + t * column))
    elif params.mask_kind == 3:
        for t in range(low, high):
            add(scores + t * step, get_bfloat16(mask + t * column))
    else:
        for t in range(low, high):
            if get_bool(mask + t * column) == 0:
                put_float(scores + t * step, MINUS_INF)


@helper
def add(place, bias):
    """Add a bias to the score at an address."""
    put_float(place, numeric.add_bias(get_float(place), bias))
