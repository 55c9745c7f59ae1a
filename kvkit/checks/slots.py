"""One pass over slots: the pieces they ask to be moved, or the first rule they break, as numbers.

A piece is `count` tokens of a packed tensor, from `token` and `head` on, that lie in as many slots from
`slot` on; or it is one slot that gets the mean of them.
"""

import functools

import numpy as np
from numba import types

from kvkit.jit import helper, kernel

FINE, CAPACITY, TWICE, WINDOW, OFFSET, RANGE = range(6)
PLAIN, KVHEAD, ROPE, OMNI = range(4)

INDEX1, INDEX2 = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
FOUND = types.UniTuple(types.int64, 4)
PLAIN_SIGNATURE = FOUND(INDEX1, types.int64, INDEX2)
COMPRESSED_SIGNATURE = FOUND(*[types.int64] * 2, INDEX1, INDEX1, INDEX1, INDEX1, *[types.int64] * 2, INDEX2)
TABLE_SIGNATURE = types.int64(INDEX2, INDEX1, INDEX1, types.int64, types.int64, INDEX2)
FIELDS = TOKEN, HEAD, SLOT, COUNT, MEAN = range(5)


def plain(slots, capacity, pieces):
    """(FINE, pieces, 0, 0) of tokens that have a slot each, or (rule, token, slot, 0)."""
    made = 0
    for token in range(slots.shape[0]):
        slot = slots[token]
        if slot < 0:
            continue
        if slot >= capacity:
            return CAPACITY, token, slot, 1
        last = pieces[made - 1, COUNT] if made else 0
        if last and token == pieces[made - 1, TOKEN] + last and slot == pieces[made - 1, SLOT] + last:
            pieces[made - 1, COUNT] += 1
            continue
        add(pieces, made, token, 0, slot, 1, 0)
        made += 1
    first, second, slot = overlapping(pieces[:made])
    if first >= 0:
        one = pieces[first, TOKEN] + slot - pieces[first, SLOT]
        two = pieces[second, TOKEN] + slot - pieces[second, SLOT]
        return TWICE, one, two, slot
    return FINE, made, 0, 0


def compressed(mode, copies_empty, slots, wins, offsets, starts, heads, capacity, pieces):
    """(FINE, pieces, 0, 0) of a run for each sequence and head, or (rule, entry, and two numbers)."""
    made, runs = 0, 0
    spans = np.empty((slots.shape[0], 5), np.int64)
    for i in range(slots.shape[0]):
        slot, begin, head = slots[i], starts[i // heads], i % heads
        if slot < 0:
            continue
        length = starts[i // heads + 1] - begin
        window, offset = wins[i], -1
        if mode == KVHEAD:
            if window < 0 or window > length:
                return WINDOW, i, window, length
        else:
            offset = offsets[i]
            if offset < -1:
                return OFFSET, i, offset, length
            if offset >= 0 and (window < 0 or window > length):
                return WINDOW, i, window, length
            if offset > length - window and offset >= 0:
                return RANGE, i, offset, window
        first = made
        if mode == KVHEAD:
            kept = window if window or not copies_empty else length
            made = add(pieces, made, begin + length - kept, head, slot, kept, 0)
        elif offset == -1 or window == 0:
            made = add(pieces, made, begin, head, slot, length, 0)
        else:
            made = add(pieces, made, begin, head, slot, offset, 0)
            slot += offset
            if mode == ROPE:
                made = add(pieces, made, begin + offset, head, slot, window, 1)
                slot += 1
            made = add(pieces, made, begin + offset + window, head, slot, length - offset - window, 0)
        written = 0
        for p in range(first, made):
            written += 1 if pieces[p, MEAN] else pieces[p, COUNT]
        if written > capacity - slots[i]:
            return CAPACITY, i, slots[i], written
        if written:
            add(spans, runs, i, 0, slots[i], written, 0)
            runs += 1
    first, second, slot = overlapping(spans[:runs])
    if first >= 0:
        return TWICE, spans[first, TOKEN], spans[second, TOKEN], slot
    return FINE, made, 0, 0


@helper
def add(pieces, made, token, head, slot, count, mean):
    """One more piece, unless it is empty; how many there are."""
    if count == 0:
        return made
    pieces[made, TOKEN], pieces[made, HEAD], pieces[made, SLOT] = token, head, slot
    pieces[made, COUNT], pieces[made, MEAN] = count, mean
    return made + 1


@helper
def overlapping(pieces):
    """Two pieces and a slot they share, or -1: runs that ascend are seen to be apart, others are sorted."""
    ascending = True
    for p in range(1, pieces.shape[0]):
        if pieces[p, SLOT] < pieces[p - 1, SLOT] + pieces[p - 1, COUNT]:
            ascending = False
            break
    if ascending:
        return -1, -1, -1
    begins = pieces[:, SLOT].copy()
    order = np.argsort(begins)
    for k in range(1, order.shape[0]):
        first, second = order[k - 1], order[k]
        if pieces[second, SLOT] < pieces[first, SLOT] + pieces[first, COUNT]:
            return min(first, second), max(first, second), pieces[second, SLOT]
    return -1, -1, -1


def table(blocks, lengths, first_columns, block_size, block_count, pieces):
    """The pieces of contexts that lie in blocks; tokens of blocks that are not there have none."""
    made, token = 0, np.int64(0)
    for b in range(lengths.shape[0]):
        column, end = first_columns[b], token + lengths[b]
        while token < end:
            count = min(block_size, end - token)
            if column < blocks.shape[1] and 0 <= blocks[b, column] < block_count:
                made = add(pieces, made, token, 0, blocks[b, column] * block_size, count, 0)
            column += 1
            token += count
    return made


@functools.cache
def compiled(function):
    signature = {plain: PLAIN_SIGNATURE, compressed: COMPRESSED_SIGNATURE, table: TABLE_SIGNATURE}[function]
    return kernel(function, signature)
