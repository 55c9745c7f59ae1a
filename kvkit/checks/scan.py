"""Check the index tensors of a step in one compiled pass, which returns the first broken rule as numbers."""

import numpy as np
from numba import types

from kvkit.checks.records import ENDLESS, StepIndex
from kvkit.checks.sorting import ascending
from kvkit.errors import KvkitError, argument_error
from kvkit.formulas.index import filled_rows, overlapping_run, page_of, rows_inside
from kvkit.runtime.arrays import addresses_of
from kvkit.runtime.jit import INDEX, Integers, compiled, helper
from kvkit.typed import Array

# The verdict of a pass: a rule, and three numbers for the message.
FINE = 0  # rows in use, or runs of stored rows if no table is read; 0; 0
STARTS = 1  # sequence, the array (0: seqstarts, 1: kvstarts), its entry below the one before
LENGTHS = 2  # sequence, new tokens, tokens of the context
HINT = 3  # sequence, the limit (0: max_seqlen, 1: max_kvlen), the length above it
PAGES = 4  # sequence, pages that it needs, tokens of its context
ROW = 5  # sequence, position, its row, which is outside the cache
STORED_TWICE = 6  # sequence, another sequence, a row that both store
STORED_AND_LOADED = 7  # sequence that stores, sequence that has a past token there, the row
INT64_MAX = np.iinfo(np.int64).max
VERDICT, WORKSPACE = 4, 5  # numbers in a verdict; numbers of workspace for each stored run
STARTS_AND_LIMITS = [INDEX] * 3 + [types.int64] * 5  # the arguments of `check_lengths`


def scan_step(step: StepIndex, rows: int) -> list[int]:
    """Check the index tensors of a step in a cache of `rows` rows; return the verdict."""
    table, sizes = np.asarray(step.table), (*step.table.shape, step.page_size, *step.limits)
    runs = min(table.size, max(step.tokens, 0))
    numbers = np.empty(VERDICT + WORKSPACE * runs, np.int64)
    at, table_at, *starts = addresses_of((numbers, table, step.seqstarts, step.kvstarts, step.start_pos))
    begin, size = at + 8 * VERDICT, 8 * max(runs, 1)
    workspace = range(begin, begin + WORKSPACE * size, size)  # an address for each array
    scan_rows.code.ctypes(at, *starts, *sizes, table_at, rows, *workspace)
    verdict: list[int] = numbers[:VERDICT].tolist()
    return verdict


def scan_lengths(step: StepIndex) -> list[int]:
    """Check lengths as `scan_step` does, without the page table; return the verdict."""
    verdict = np.empty(VERDICT, np.int64)
    arrays = verdict, step.seqstarts, step.kvstarts, step.start_pos
    sizes = *step.table.shape, step.page_size, *step.limits  # the last arguments of `check_lengths`
    scan_starts.code.ctypes(*addresses_of(arrays), *sizes)
    return verdict.tolist()


def scan_contexts(
    lengths: Array, table: Array, starts: Array | None, blocks: int, page_size: int
) -> tuple[list[int], Array]:
    """Check contexts in pages; return (verdict, largest page in use), and where contexts begin [B + 1].

    Pages are a table [B, M], or a list, in which those of sequence b begin at ``starts[b]``. A verdict has a
    rule, a sequence, a number of the table's entries, and that of entries, or of the wrong entry.
    """
    numbers = np.empty(VERDICT + 2 + len(lengths), np.int64)
    places = addresses_of((numbers, lengths, table, table, starts))
    sizes = len(lengths), table.shape[-1], blocks, page_size, starts is not None, table.itemsize == 4
    scan_pages.code.ctypes(*places, *sizes)
    return numbers[: VERDICT + 1].tolist(), numbers[VERDICT + 1 :]


def contexts_error(
    verdict: list[int], lengths: Array, table: Array, starts: Array | None, blocks: int
) -> KvkitError:
    """Return the error for the rule of contexts in pages that a verdict says is broken."""
    rule, b, need, third, _ = verdict
    if rule == STARTS:
        wanted = f"indptr that never decreases, within the {len(table)} of indices"
        return argument_error("block_tables", wanted, f"{third} as entry {b}")
    if rule == LENGTHS:
        return argument_error("context_lens", "no length below 0", lengths[b])
    if rule == PAGES:
        held = third if starts is None else f"{third} of indices"
        return argument_error(
            "block_tables", f"{need} blocks for the {lengths[b]} tokens of sequence {b}", held
        )
    at = f"[{b}, {third}]" if starts is None else f"[1][{third}]"
    page = table[b, third] if starts is None else table[third]
    wanted = f"a block from 0 to {blocks - 1}, one of {need} for {lengths[b]} tokens of sequence {b}"
    return argument_error(f"block_tables{at}", wanted, page)


def step_error(verdict: list[int], step: StepIndex, rows: int) -> KvkitError:
    """Return the error for the rule that a verdict says is broken, in a cache of `rows` rows."""
    rule, b, second, third = verdict
    table, page_size = step.table, step.page_size
    if rule == STARTS:
        name = ("seqstarts", "kvstarts")[second]
        return argument_error(name, f"never to decrease (entry {b + 1})", third)
    if rule == LENGTHS:
        start = step.start_pos[b]
        if start < 0:
            return argument_error("start_pos", f"at least 0 for sequence {b}", start)
        need = f"start_pos + new tokens = {start} + {second} for sequence {b}"
        return argument_error("kvstarts", f"a length of {need}", third)
    if rule == HINT:
        name = ("max_seqlen", "max_kvlen")[second]
        return argument_error(name, f"at least {third}, the length of sequence {b}", step.limits[second])
    if rule == PAGES:
        need = f"{second} pages for the {third} tokens of sequence {b} (page_size {page_size})"
        return argument_error("cachestarts", need, table.shape[1])
    # A hint, because page tables of other engines hold page numbers, not rows.
    paged = page_size != ENDLESS
    pages = f" (a page begins at its number * page_size, which is {page_size})" if paged else ""
    if rule == ROW:
        column = second // page_size if paged else 0
        entry = f"cachestarts[{b}, {column}]" if paged else f"cachestarts[{b}]"
        wanted = "rows from 0 on" if rows == INT64_MAX else f"rows within the {rows} of the cache"
        got = f"{table[b, column]}: position {second} is in row {third}{pages}"
        return argument_error(entry, wanted, got)
    if rule == STORED_TWICE:
        who = f"sequence {b} stores twice" if b == second else f"sequences {b} and {second} both store"
        return argument_error("cachestarts", "rows stored once", f"row {third}, which {who}{pages}")
    return argument_error(
        "cachestarts",
        "stored rows that hold no other token",
        f"row {third}, which holds position {position_in(step, second, third, False)} of sequence {second} "
        f"and would get position {position_in(step, b, third, True)} of sequence {b}{pages}",
    )


def position_in(step: StepIndex, b: int, row: int, is_new: bool) -> int:
    """Return the position of a new or a past token of a sequence that its page table puts in a row."""
    start, kvlen = step.start_pos[b], step.kvstarts[b + 1] - step.kvstarts[b]
    begin, end = (start, kvlen) if is_new else (0, start)
    offsets = row - np.asarray(step.table)[b].astype(np.int64)  # [pages]
    positions = offsets + np.arange(len(offsets)) * step.page_size
    in_page = (offsets >= 0) & (offsets < step.page_size)
    return int(positions[in_page & (positions >= begin) & (positions < end)][0])


@helper
def check_lengths(
    seqstarts: Integers, kvstarts: Integers, start_pos: Integers, batch: int, columns: int, page_size: int,
    max_seqlen: int, max_kvlen: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Check lengths for a page table with `columns` columns; return the verdict of `scan_lengths`."""
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


@compiled(types.void(INDEX, *STARTS_AND_LIMITS))
def scan_starts(
    verdict: Integers, seqstarts: Integers, kvstarts: Integers, start_pos: Integers, batch: int, columns: int,
    page_size: int, max_seqlen: int, max_kvlen: int,
) -> None:  # fmt: skip
    """Write the verdict of `scan_lengths`."""
    put_verdict(verdict, check_lengths(
        seqstarts, kvstarts, start_pos, batch, columns, page_size, max_seqlen, max_kvlen
    ))  # fmt: skip


@compiled(types.void(INDEX, *STARTS_AND_LIMITS, INDEX, types.int64, *[INDEX] * WORKSPACE))
def scan_rows(
    verdict: Integers, seqstarts: Integers, kvstarts: Integers, start_pos: Integers, batch: int, columns: int,
    page_size: int, max_seqlen: int, max_kvlen: int, table: Integers, rows: int, begins: Integers, ends:
    Integers, owners: Integers, order: Integers, merged: Integers,
) -> None:  # fmt: skip
    """Write the verdict of `scan_step`. No sum here can overflow."""
    of_lengths = check_lengths(
        seqstarts, kvstarts, start_pos, batch, columns, page_size, max_seqlen, max_kvlen
    )
    put_verdict(verdict, of_lengths)
    if of_lengths[0] != FINE:
        return
    stored_runs, rows_in_use = of_lengths[1], 0
    for b in range(batch):
        kvlen = kvstarts[b + 1] - kvstarts[b]
        for page in range(page_of(kvlen - 1, page_size) + 1):
            first, used = table[b * columns + page], filled_rows(kvlen, page, page_size)
            if first < 0:
                put_verdict(verdict, (ROW, b, page * page_size, first))
                return
            if not rows_inside(first, used, rows):
                outside = max(rows - first, 0)
                put_verdict(verdict, (ROW, b, page * page_size + outside, first + outside))
                return
            rows_in_use = max(rows_in_use, first + used)
    put_verdict(verdict, find_conflict(
        kvstarts, table, start_pos, batch, columns, page_size, stored_runs, begins, ends, owners, order,
        merged,
    ))  # fmt: skip
    if verdict[0] == FINE:
        verdict[1] = rows_in_use


@helper
def put_verdict(verdict: Integers, numbers: tuple[int, int, int, int]) -> None:
    """Write a rule and its three numbers."""
    verdict[0], verdict[1], verdict[2], verdict[3] = numbers


@helper
def find_conflict(
    kvstarts: Integers, table: Integers, start_pos: Integers, batch: int, columns: int, page_size: int,
    stored_runs: int, begins: Integers, ends: Integers, owners: Integers, order: Integers, merged: Integers,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Find a stored row that holds two tokens; return the verdict.

    The rows that each page stores are a run, [begin, end) of a sequence (its owner). Runs are sorted, so that
    two runs with a common row are neighbours, and past tokens are looked up among them.
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
    ascending(begins, 0, 1, stored_runs, order, 0, stored_runs)  # `merged` follows `order` in memory
    # Put the runs in order. Each array goes to memory whose numbers are no longer needed.
    for run in range(stored_runs):
        merged[run] = begins[order[run]]
    for run in range(stored_runs):
        begins[run] = ends[order[run]]
    for run in range(stored_runs):
        ends[run] = owners[order[run]]
    begins, ends, owners = merged, begins, ends
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


@compiled(types.void(*[INDEX] * 3, types.CPointer(types.int32), INDEX, *[types.int64] * 6), passes="few")
def scan_pages(
    numbers: Integers, lengths: Integers, table: Integers, narrow_table: Integers, starts: Integers,
    batch: int, columns: int, blocks: int, page_size: int, listed: int, narrow: int,
) -> None:  # fmt: skip
    """Write the numbers of `scan_contexts`. Without a broken rule no sum can overflow."""
    begins, largest = VERDICT + 1, np.int64(-1)
    put_verdict(numbers, (FINE, 0, 0, 0))
    if listed:
        for b in range(batch + 1):
            if starts[b] < (starts[b - 1] if b else 0) or starts[b] > columns:
                put_verdict(numbers, (STARTS, b, 0, starts[b]))
                return
    numbers[begins] = 0
    for b in range(batch):
        if lengths[b] < 0:
            put_verdict(numbers, (LENGTHS, b, 0, 0))
            return
        numbers[begins + b + 1] = numbers[begins + b] + lengths[b]
    for b in range(batch):
        need, first = page_of(lengths[b] - 1, page_size) + 1, starts[b] if listed else b * columns
        held = starts[b + 1] - first if listed else columns
        if need > held:
            put_verdict(numbers, (PAGES, b, need, held))
            return
    for b in range(batch):
        need, first = page_of(lengths[b] - 1, page_size) + 1, starts[b] if listed else b * columns
        for i in range(first, first + need):
            page = np.int64(narrow_table[i]) if narrow else table[i]
            if page < 0 or page >= blocks:
                put_verdict(numbers, (ROW, b, need, i if listed else i - first))
                return
            largest = max(largest, page)
    numbers[VERDICT] = largest
