"""One pass over the index tensors of a step: the first rule they break, as numbers."""

import functools

import numpy as np
from numba import types

from kvkit.index import filled, inside, met, page_of
from kvkit.jit import helper, kernel

FINE, STARTS, LENGTHS, HINT, PAGES, ROW, STORED_TWICE, STORED_AND_LOADED = range(8)

INT, INDEX1, INDEX2 = types.int64, types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
FOUND = types.UniTuple(INT, 4)


def scan_lengths(seqstarts, kvstarts, start_pos, columns, page_size, max_seqlen, max_kvlen):
    """`lengths` for Python."""
    return lengths(seqstarts, kvstarts, start_pos, columns, page_size, max_seqlen, max_kvlen)


@helper
def lengths(seqstarts, kvstarts, start_pos, columns, page_size, max_seqlen, max_kvlen):
    """What `scan` finds in all but a page table of so many columns; if fine, (FINE, stored runs, 0, 0)."""
    stored_runs = 0
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
        if pages > columns:
            return PAGES, b, pages, kvlen
        if seqlen:
            stored_runs += pages - page_of(start_pos[b], page_size)
    return FINE, stored_runs, 0, 0


def scan(seqstarts, kvstarts, table, start_pos, page_size, rows, max_seqlen, max_kvlen):
    """(rule, sequence, and two numbers for the message); if fine, (FINE, rows in use, 0, 0).

    No sum here can overflow.
    """
    found = lengths(seqstarts, kvstarts, start_pos, table.shape[1], page_size, max_seqlen, max_kvlen)
    if found[0]:
        return found
    stored_runs, last = found[1], 0
    for b in range(start_pos.shape[0]):
        kvlen = kvstarts[b + 1] - kvstarts[b]
        for page in range(page_of(kvlen - 1, page_size) + 1):
            first, used = table[b, page], filled(kvlen, page, page_size)
            if first < 0:
                return ROW, b, page * page_size, first
            if not inside(first, used, rows):
                outside = max(rows - first, 0)
                return ROW, b, page * page_size + outside, first + outside
            last = max(last, first + used)
    found = conflicts(kvstarts, table, start_pos, page_size, stored_runs)
    return found if found[0] else (FINE, last, 0, 0)


@helper
def conflicts(kvstarts, table, start_pos, page_size, stored_runs):
    """Whether a stored row holds two tokens: runs of stored rows are sorted, past pages looked up in them."""
    begins, ends = np.empty(stored_runs, np.int64), np.empty(stored_runs, np.int64)
    owners = np.empty(stored_runs, np.int64)
    run = 0
    for b in range(start_pos.shape[0]):
        kvlen = kvstarts[b + 1] - kvstarts[b]
        for page in range(page_of(start_pos[b], page_size), page_of(kvlen - 1, page_size) + 1):
            past, used = filled(start_pos[b], page, page_size), filled(kvlen, page, page_size)
            if past < used:
                begins[run], ends[run], owners[run] = table[b, page] + past, table[b, page] + used, b
                run += 1
    order = np.argsort(begins)
    begins, ends, owners = begins[order], ends[order], owners[order]
    for run in range(1, stored_runs):
        if begins[run] < ends[run - 1]:
            return STORED_TWICE, owners[run - 1], owners[run], begins[run]

    for b in range(start_pos.shape[0] if stored_runs else 0):
        for page in range(page_of(start_pos[b] - 1, page_size) + 1):
            first = table[b, page]
            run = met(begins, ends, stored_runs, first, first + filled(start_pos[b], page, page_size))
            if run >= 0:
                return STORED_AND_LOADED, owners[run], b, max(begins[run], first)
    return FINE, 0, 0, 0


@functools.cache
def compiled():
    return kernel(scan, FOUND(INDEX1, INDEX1, INDEX2, INDEX1, *[INT] * 4))


@functools.cache
def compiled_lengths():
    return kernel(scan_lengths, FOUND(INDEX1, INDEX1, INDEX1, *[INT] * 4))
