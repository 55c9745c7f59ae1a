"""One pass over the index tensors of a step: the first rule they break, as numbers."""

import functools

import numpy as np
from numba import types

from kvkit.index import page_of
from kvkit.jit import helper, kernel

FINE, STARTS, LENGTHS, HINT, PAGES, ROW, STORED_TWICE, STORED_AND_LOADED = range(8)

INDEX1, INDEX2 = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
SIGNATURE = types.UniTuple(types.int64, 4)(INDEX1, INDEX1, INDEX2, INDEX1, *[types.int64] * 4)


def scan(seqstarts, kvstarts, table, start_pos, page_size, rows, max_seqlen, max_kvlen):
    """(rule, sequence, and two numbers for the message); if fine, (FINE, rows in use, 0, 0).

    No sum here can overflow.
    """
    stored_runs, last = 0, 0
    for b in range(start_pos.shape[0]):
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
        pages = page_of(kvlen - 1, page_size) + 1
        if pages > table.shape[1]:
            return PAGES, b, pages, kvlen
        for page in range(pages):
            first, used = table[b, page], min(page_size, kvlen - page * page_size)
            if first < 0:
                return ROW, b, page * page_size, first
            if first > rows - used:
                inside = max(rows - first, 0)
                return ROW, b, page * page_size + inside, first + inside
            last = max(last, first + used)
        if seqlen:
            stored_runs += pages - page_of(start_pos[b], page_size)
    found = conflicts(seqstarts, table, start_pos, page_size, rows, stored_runs)
    return found if found[0] else (FINE, last, 0, 0)


@helper
def conflicts(seqstarts, table, start_pos, page_size, rows, stored_runs):
    """Whether a stored row holds two tokens: runs of stored rows are sorted, past pages looked up in them."""
    begins, ends = np.empty(stored_runs, np.int64), np.empty(stored_runs, np.int64)
    owners = np.empty(stored_runs, np.int64)
    run = 0
    for b in range(start_pos.shape[0]):
        position, kvlen = start_pos[b], start_pos[b] + seqstarts[b + 1] - seqstarts[b]
        while position < kvlen:
            page = page_of(position, page_size)
            stop = min(kvlen - page * page_size, page_size)
            begins[run], ends[run] = table[b, page] + position - page * page_size, table[b, page] + stop
            owners[run] = b
            position = page * page_size + stop
            run += 1
    order = np.argsort(begins)
    begins, ends, owners = begins[order], ends[order], owners[order]
    for run in range(1, stored_runs):
        if begins[run] < ends[run - 1]:
            return STORED_TWICE, owners[run - 1], owners[run], begins[run]

    for b in range(start_pos.shape[0] if stored_runs else 0):
        for page in range(page_of(start_pos[b] - 1, page_size) + 1):
            first = table[b, page]
            last = first + min(page_size, start_pos[b] - page * page_size)
            run = np.searchsorted(begins, last) - 1
            if run >= 0 and ends[run] > first:
                return STORED_AND_LOADED, owners[run], b, max(begins[run], first)
    return FINE, 0, 0, 0


@functools.cache
def compiled():
    return kernel(scan, SIGNATURE)
