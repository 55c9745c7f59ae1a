"""What happens to the scores of a block between the two products: masks, and the online softmax.

Scores lie as [token, row]; a running top and total for each row go from block to block.
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

get, get_bool = memory.load(types.int64), memory.load(types.int8)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
get_half, get_bfloat16 = memory.read("float16"), memory.read("bfloat16")
online_softmax, cap = attention.online_softmax, attention.cap
careful_wide_sums = attention.careful_wide_sums


@helper
def visible(task, b, seqlen, kvlen, token):
    """The positions that a query token of a sequence may see, as far as they are a range."""
    causal = task.alibi != 0 or (task.causal != 0 and b >= task.decoding)
    return visible_range(seqlen, kvlen, token, task.left, task.right, causal)


@helper
def softmax(scores, tile, count, top, total, factor):
    """Scores to weights, in place; `factor` is what the sums so far shrink by."""
    if tile == WIDE:
        for half in range(0, 4 * WIDE, 4 * LANES):
            online_softmax(scores + half, count, 4 * WIDE, WIDE, top + half, total + half, factor + half)
        return
    vectors = fill_vector(scores, count * tile)
    online_softmax(scores, vectors, 4 * LANES, tile, top, total, factor)


@helper
def fill_vector(scores, count):
    """Absent keys behind so many scores, up to whole vectors; the number of these."""
    vectors = -(-count // LANES)
    for i in range(count, vectors * LANES):
        put_float(scores + 4 * i, MINUS_INF)
    return vectors


@helper
def fold(top, total, row, tile):
    """(top, total) of a row: lanes of a narrow tile hold its total in parts."""
    whole, lane = np.float32(0), row
    while lane < max(tile, LANES):
        whole += get_float(total + 4 * lane)
        lane += tile
    return get_float(top + 4 * row), whole


@helper
def adjusts(task, b, live, first, begin, count, seqlen, kvlen):
    """Whether `adjust` has anything to do."""
    return (
        task.cap != 0
        or task.alibi != 0
        or task.slopes != 0
        or task.mask != 0
        or begin < visible(task, b, seqlen, kvlen, (first + live - 1) // task.group)[0]
        or begin + count > visible(task, b, seqlen, kvlen, first // task.group)[1]
    )


@helper
def adjust(task, b, scores, tile, live, first, kv, begin, count, seqlen, kvlen):
    """Cap the scores, then add what hides or weighs keys: a score of -inf is an absent key."""
    if task.cap:
        cap(scores, -(-count * tile // LANES), task.cap_at)
    for r in range(live):
        token = (first + r) // task.group
        head = kv * task.group + (first + r) % task.group
        position = kvlen - seqlen + token
        low, high = visible(task, b, seqlen, kvlen, token)
        low = min(max(low - begin, 0), count)
        high = max(min(high - begin, count), low)
        at = scores + 4 * r
        for t in range(low):
            put_float(at + 4 * t * tile, MINUS_INF)
        for t in range(high, count):
            put_float(at + 4 * t * tile, MINUS_INF)
        if task.alibi or task.slopes:
            if task.slopes:
                slope = get_float(task.slopes + b * task.slopes_sequence + 4 * head)
            else:
                slope = numeric.alibi_slope(head, task.heads * task.group)
            for t in range(low, high):
                place, distance = at + 4 * t * tile, begin + t - position
                bias = numeric.alibi_bias(slope, min(distance, -distance))
                put_float(place, get_float(place) + bias)
        if task.mask:
            row, column = token, begin
            if task.mask_packed:
                row += get(task.seqstarts + 8 * b)
            if task.mask_packed == 1:  # 2: columns are a sequence's own
                column += get(task.kvstarts + 8 * b)
            mask = task.mask + b * task.mask_sequence + head * task.mask_head
            mask += row * task.mask_row + column * task.mask_column
            add_mask(task, at, 4 * tile, mask, low, high)


@helper
def add_mask(task, scores, step, mask, low, high):
    column = task.mask_column
    if task.mask_kind == 1:
        for t in range(low, high):
            add(scores + t * step, get_float(mask + t * column))
    elif task.mask_kind == 2:
        for t in range(low, high):
            add(scores + t * step, get_half(mask + t * column))
    elif task.mask_kind == 3:
        for t in range(low, high):
            add(scores + t * step, get_bfloat16(mask + t * column))
    else:
        for t in range(low, high):
            if get_bool(mask + t * column) == 0:
                put_float(scores + t * step, MINUS_INF)


@helper
def add(place, bias):
    put_float(place, numeric.biased(get_float(place), bias))


@helper
def careful_scores(queries, keys, key_row, count, dim, scores, tile):
    """Scores of a narrow tile: queries [row, dim] in their own order times widened keys."""
    for r in range(tile):
        attention.dots(queries + 4 * r * dim, keys, key_row, count, dim, scores + 4 * r, 4 * tile)


@helper
def careful_sums(weights, values, value_row, count, dim, sums, factors, tile):
    """The sums again, over the values that have a weight: one of 0 hides NaN and infinity.

    `dim` is a multiple of 16.
    """
    if tile == WIDE:
        careful_wide_sums(weights, values, value_row, count, dim, sums, factors)
        return
    for r in range(tile):
        row = sums + 4 * r * dim
        attention.times(row, row, dim, factors + 4 * r)
        for t in range(count):
            at = weights + 4 * (t * tile + r)
            if get_float(at) != np.float32(0):
                attention.plus_times(values + t * value_row, row, dim, at)
