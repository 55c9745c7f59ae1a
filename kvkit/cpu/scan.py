"""One pass over the index tensors of a step: the first rule they break, as numbers."""

import functools

import numpy as np
from numba import types

from kvkit.jit import kernel

FINE, STARTS, LENGTHS, HINT, PAGES, ROW, STORED_TWICE, STORED_AND_LOADED = range(8)

INDEX1, INDEX2 = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
SIGNATURE = types.UniTuple(types.int64, 4)(INDEX1, INDEX1, INDEX2, INDEX1, *[types.int64] * 4)


def scan(seqstarts, kvstarts, table, start_pos, page_size, rows, max_seqlen, max_kvlen):
    """(rule, sequence, and two numbers for the message); no sum here can overflow.

    Rows stored by this step are sorted as runs; each run of rows that is only loaded is then looked up.
    """
    count = start_pos.shape[0]
    runs = 0
    for b in range(count):
        for which, starts in enumerate((seqstarts, kvstarts)):
            if starts[b + 1] < starts[b]:
                return STARTS, b, which, starts[b + 1]
        seqlen, kvlen = seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        if start_pos[b] < 0 or kvlen - seqlen != start_pos[b]:
            return LENGTHS, b, seqlen, kvlen
        if seqlen > max_seqlen:
            return HINT, b, 0, seqlen
        if kvlen > max_kvlen:
            return HINT, b, 1, kvlen
        pages = (kvlen - 1) // page_size + 1 if kvlen else 0
        if pages > table.shape[1]:
            return PAGES, b, pages, kvlen
        for page in range(pages):
            first, used = table[b, page], min(page_size, kvlen - page * page_size)
            if first < 0:
                return ROW, b, page * page_size, first
            if first > rows - used:
                inside = max(rows - first, 0)
                return ROW, b, page * page_size + inside, first + inside
        if seqlen:
            runs += pages - start_pos[b] // page_size

    begins, ends, owners = np.empty(runs, np.int64), np.empty(runs, np.int64), np.empty(runs, np.int64)
    run = 0
    for b in range(count):
        position, kvlen = start_pos[b], start_pos[b] + seqstarts[b + 1] - seqstarts[b]
        while position < kvlen:
            page = position // page_size
            stop = min(kvlen - page * page_size, page_size)
            begins[run] = table[b, page] + position - page * page_size
            ends[run] = table[b, page] + stop
            owners[run] = b
            position = page * page_size + stop
            run += 1
    order = np.argsort(begins)
    begins, ends, owners = begins[order], ends[order], owners[order]
    for run in range(1, runs):
        if begins[run] < ends[run - 1]:
            return STORED_TWICE, owners[run - 1], owners[run], begins[run]
    for b in range(count):
        for page in range((start_pos[b] - 1) // page_size + 1 if runs else 0):
            first = table[b, page]
            last = first + min(page_size, start_pos[b] - page * page_size)
            run = np.searchsorted(begins, last) - 1
            if run >= 0 and ends[run] > first:
                return STORED_AND_LOADED, owners[run], b, max(begins[run], first)
    return FINE, 0, 0, 0


@functools.cache
def compiled():
    return kernel(scan, SIGNATURE)
