"""Choose the k largest scores of each row, by the digits of floats as ordered integers.

A float whose bits are x is ordered as the integer ~x if it is negative, else x with its first bit set. Counts
of the leading 11 bits of all scores say in which bin the k-th largest score is; counts of the next 11 bits of
its bin's scores, then of the last 10, say what it is. Of scores equal to it the first ones are chosen.
"""

import functools

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.launches import WORKER, Launch, Record, Workspace, run_in_scratch, threads
from kvkit.formulas.index import share
from kvkit.runtime.jit import compiled, helper

PARAMS = Record(
    "workers tokens k scores score_token lengths pages of_token page_size rows row_token",
    "scratch scratch_bytes",
)
BINS = 1 << 11
NEVER_CHOSEN = np.uint32(0x007FFFFF)  # -inf as an ordered integer, which is never chosen
SMALL_WORK = 2**16  # scores below which one thread does it all
record, integers = memory.record(PARAMS), memory.integers
get_bits, put_count = memory.load(types.uint32), memory.store(types.int64)
get_count, put_row = memory.load(types.int64), memory.store(types.int32)
workspace = Workspace()


@helper
def ordered(address):
    """Return the float at an address as an integer in the order of floats; -0 counts as 0."""
    bits = get_bits(address)
    if bits == np.uint32(0x80000000):
        bits = np.uint32(0)
    return ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)


@helper
def kth_largest(scores, count, k, bins):
    """Return the k-th largest of the scores above -inf, ordered, and how many equal ones are chosen.

    If there are at most k of them, it is -inf, of which none is chosen.
    """
    prefix, shift, left = np.uint32(0), 32, k
    for digit in range(3):
        width = 11 if digit < 2 else 10
        above = shift
        shift -= width
        for i in range(BINS):
            put_count(bins + 8 * i, 0)
        for s in range(count):
            x = ordered(scores + 4 * s)
            if digit == 0 or x >> np.uint32(above) == prefix:
                at = bins + 8 * np.int64((x >> np.uint32(shift)) & np.uint32((1 << width) - 1))
                put_count(at, get_count(at) + 1)
        if digit == 0:
            # Positions with -inf share their bin with no number: the next ones are NaN and -3.4e38.
            at = bins + 8 * np.int64(NEVER_CHOSEN >> np.uint32(21))
            put_count(at, 0)
        i = (1 << width) - 1
        while i >= 0 and get_count(bins + 8 * i) < left:
            left -= get_count(bins + 8 * i)
            i -= 1
        if i < 0:
            return NEVER_CHOSEN, 0
        prefix = (prefix << np.uint32(width)) | np.uint32(i)
    return prefix, left


@compiled(WORKER)
def choose(worker, params_at):
    """Write the slots of the k largest scores of a worker's tokens, then -1."""
    params = record(params_at)
    bins = params.scratch + worker * params.scratch_bytes
    for token in range(
        share(params.tokens, worker, params.workers), share(params.tokens, worker + 1, params.workers)
    ):
        scores, row = params.scores + token * params.score_token, params.rows + token * params.row_token
        count = integers(params.lengths)[token]
        pages = params.pages + 8 * integers(params.of_token)[token]
        least, equal = kth_largest(scores, count, params.k, bins)
        chosen = 0
        for s in range(count):
            x = ordered(scores + 4 * s)
            if x < least or x == NEVER_CHOSEN:
                continue
            if x == least:
                if not equal:
                    continue
                equal -= 1
            page = integers(pages)[s // params.page_size]
            put_row(row + 4 * chosen, np.int32(page * params.page_size + s % params.page_size))
            chosen += 1
        for i in range(chosen, params.k):
            put_row(row + 4 * i, np.int32(-1))


def prepare_choice(call, rows):
    """Return a launch that writes the slots [tokens, k] of a checked call of `topk_rows`."""
    contexts, scores, tokens = call.contexts, call.scores, len(call.scores)
    if scores.strides[1] != scores.itemsize:
        scores = np.ascontiguousarray(scores)
    counts = np.diff(contexts.starts)
    begins = contexts.table_starts
    begins = np.arange(len(counts)) * contexts.table.shape[1] if begins is None else begins[:-1]
    of_token, lengths = (np.repeat(x, counts).astype(np.int64) for x in (begins, contexts.lengths))
    pages = np.ascontiguousarray(contexts.table, np.int64)
    workers = 1 if scores.size < SMALL_WORK else min(threads(), max(1, tokens))
    params = PARAMS.filled({
        "workers": workers, "tokens": tokens, "k": call.k, "scores": scores,
        "score_token": scores.strides[0], "lengths": lengths, "pages": pages, "of_token": of_token,
        "page_size": contexts.page_size, "rows": rows, "row_token": rows.strides[0], "scratch": 0,
        "scratch_bytes": 8 * BINS,
    })  # fmt: skip
    place = PARAMS.at["scratch"], workspace, 8 * BINS
    run = functools.partial(run_in_scratch, choose.code, workers, params, *place)
    return Launch(params, {}, run, alive=(call, scores, of_token, lengths, pages))
