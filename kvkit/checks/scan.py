"""Check the index tensors of a step in one compiled pass, which returns the first broken rule as numbers."""

import functools

import numpy as np
from numba import types

from kvkit.checks.records import StepIndex
from kvkit.checks.sorting import ascending
from kvkit.formulas.index import filled_rows, overlapping_run, page_of, rows_inside
from kvkit.runtime.arrays import addresses_of
from kvkit.runtime.jit import INDEX, Code, Integers, callback, helper

FINE, STARTS, LENGTHS, HINT, PAGES, ROW, STORED_TWICE, STORED_AND_LOADED = range(8)
FOUND, SPARE = 4, 5  # numbers in the result of a pass; numbers of workspace for each stored run


def scan_step(step: StepIndex, rows: int) -> list[int]:
    """Return (broken rule, sequence, two numbers for the message), or (FINE, rows in use, 0, 0)."""
    table, sizes = np.asarray(step.table), sizes_of(step)
    runs = min(table.size, max(step.tokens, 0))
    found = np.empty(FOUND + SPARE * runs, np.int64)
    at, table_at, *starts = addresses_of((found, table, step.seqstarts, step.kvstarts, step.start_pos))
    spare = range(at + 8 * FOUND, at + 8 * (FOUND + SPARE * runs), 8 * runs) if runs else [at] * SPARE
    scan_code().ctypes(at, *starts, *sizes, table_at, rows, *spare)
    verdict: list[int] = found[:FOUND].tolist()
    return verdict


def scan_lengths(step: StepIndex) -> list[int]:
    """Check lengths as `scan_step` does, without the page table; if legal return (FINE, runs, 0, 0)."""
    found = np.empty(FOUND, np.int64)
    arrays = found, step.seqstarts, step.kvstarts, step.start_pos
    lengths_code().ctypes(*addresses_of(arrays), *sizes_of(step))
    return found.tolist()


def sizes_of(step: StepIndex) -> tuple[int, ...]:
    """Return the last arguments of `check_lengths`: batch, columns, page_size, max_seqlen, max_kvlen."""
    return *step.table.shape, step.page_size, *step.limits


@helper
def check_lengths(
    seqstarts: Integers, kvstarts: Integers, start_pos: Integers, batch: int, columns: int, page_size: int,
    max_seqlen: int, max_kvlen: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Check lengths for a page table with `columns` columns; return the result of `scan_lengths`."""
    stored_runs = 0
    for b in range(batch):
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


def scan_starts(
    found: Integers, seqstarts: Integers, kvstarts: Integers, start_pos: Integers, batch: int, columns: int,
    page_size: int, max_seqlen: int, max_kvlen: int,
) -> None:  # fmt: skip
    """Write the result of `scan_lengths` to the address `found`."""
    put_found(
        found, check_lengths(seqstarts, kvstarts, start_pos, batch, columns, page_size, max_seqlen, max_kvlen)
    )


def scan_rows(
    found: Integers, seqstarts: Integers, kvstarts: Integers, start_pos: Integers, batch: int, columns: int,
    page_size: int, max_seqlen: int, max_kvlen: int, table: Integers, rows: int, begins: Integers, ends:
    Integers, owners: Integers, order: Integers, spare: Integers,
) -> None:  # fmt: skip
    """Write the result of `scan_step` to the address `found`. No sum here can overflow."""
    first_rule = check_lengths(
        seqstarts, kvstarts, start_pos, batch, columns, page_size, max_seqlen, max_kvlen
    )
    put_found(found, first_rule)
    if first_rule[0]:
        return
    stored_runs, last = first_rule[1], 0
    for b in range(batch):
        kvlen = kvstarts[b + 1] - kvstarts[b]
        for page in range(page_of(kvlen - 1, page_size) + 1):
            first, used = table[b * columns + page], filled_rows(kvlen, page, page_size)
            if first < 0:
                put_found(found, (ROW, b, page * page_size, first))
                return
            if not rows_inside(first, used, rows):
                outside = max(rows - first, 0)
                put_found(found, (ROW, b, page * page_size + outside, first + outside))
                return
            last = max(last, first + used)
    put_found(found, find_conflict(
        kvstarts, table, start_pos, batch, columns, page_size, stored_runs, begins, ends, owners, order, spare
    ))  # fmt: skip
    if found[0] == FINE:
        found[1] = last


@helper
def put_found(found: Integers, numbers: tuple[int, int, int, int]) -> None:
    found[0], found[1], found[2], found[3] = numbers


@helper
def find_conflict(
    kvstarts: Integers, table: Integers, start_pos: Integers, batch: int, columns: int, page_size: int,
    stored_runs: int, begins: Integers, ends: Integers, owners: Integers, order: Integers, spare: Integers,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Find stored rows that hold two tokens: sort the runs of stored rows, and look up past pages among them.

    Return (rule, sequence, other sequence, row), or (FINE, 0, 0, 0).
    """
    run = 0
    for b in range(batch):
        kvlen = kvstarts[b + 1] - kvstarts[b]
        for page in range(page_of(start_pos[b], page_size), page_of(kvlen - 1, page_size) + 1):
            past, used = filled_rows(start_pos[b], page, page_size), filled_rows(kvlen, page, page_size)
            if past < used:
                first = table[b * columns + page]
                begins[run], ends[run], owners[run] = first + past, first + used, b
                run += 1
    ascending(begins, 0, 1, stored_runs, order, 0, stored_runs)  # `spare` follows `order`
    for run in range(stored_runs):
        spare[run] = begins[order[run]]
    for run in range(stored_runs):
        begins[run] = ends[order[run]]
    for run in range(stored_runs):
        ends[run] = owners[order[run]]
    begins, ends, owners = spare, begins, ends
    for run in range(1, stored_runs):
        if begins[run] < ends[run - 1]:
            return STORED_TWICE, owners[run - 1], owners[run], begins[run]

    for b in range(batch if stored_runs else 0):
        for page in range(page_of(start_pos[b] - 1, page_size) + 1):
            first = table[b * columns + page]
            run = overlapping_run(
                begins, ends, stored_runs, first, first + filled_rows(start_pos[b], page, page_size)
            )
            if run >= 0:
                return STORED_AND_LOADED, owners[run], b, max(begins[run], first)
    return FINE, 0, 0, 0


STARTS_AND_LIMITS = [INDEX] * 3 + [types.int64] * 5


@functools.cache
def scan_code() -> Code:
    return callback(scan_rows, types.void(INDEX, *STARTS_AND_LIMITS, INDEX, types.int64, *[INDEX] * SPARE))


@functools.cache
def lengths_code() -> Code:
    return callback(scan_starts, types.void(INDEX, *STARTS_AND_LIMITS))
