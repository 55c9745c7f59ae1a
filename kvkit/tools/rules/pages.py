"""Check page tables: rules P1 to P7. A rule returns None if it lacks its inputs.

PMX's ``cachestarts`` hold the first row of each page. Entries of neighbouring pages differ by `case.unit`.
`case.aligned` says whether all entries are multiples of it, and so begin whole pages of the pool.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvkit.checks import table_rules
from kvkit.tools.case import Case
from kvkit.tools.findings import Seen, rule

WITHOUT_TOP_BIT = 2**31 - 1  # a mask: some engines mark ids of a second pool by the top bit of 32


def hits_of_kind(case: Case, kind: int, words: Callable[[str, int, int], str]) -> Seen:
    """Report hits of one kind; `words` gets the page, another sequence that has it, and its column there."""
    if case.page_tables is None:
        return None
    # A hit is (rule, sequence, column, page, other sequence, column there): `table_rules.HIT_FIELDS`.
    hits = case.page_tables.hits(kind).tolist()
    return hits, lambda hit: (case.entry(*hit[1:3]), words(f"{case.noun} {hit[3]}", *hit[4:]))


@rule(
    "P1",
    "A kernel reads or writes outside the cache. Check num_blocks, and the code that filled the table.",
    needs="block_tables",
)
def outside_the_pool(case: Case) -> Seen:
    """Report pages that the pool lacks. onnxruntime#32391: ids were checked against 0 only."""

    def words(hit: Any) -> tuple[str, str]:
        _, sequence, column, page, *_ = hit
        row = slice(*case.pages.starts[sequence : sequence + 2])
        some, count = int((case.pages.ids[row] >= 0).sum()), case.page_tables.num_blocks
        what = f"outside the pool, {f'0 to {count - 1}' if count else 'which is empty'}"
        if page < 0 and not isinstance(case.raw_table, tuple) and case.noun == "page":
            needed, tokens = row.stop - row.start, case.lengths[sequence]
            what = (
                f"no page: {tokens} tokens (context_lens[{sequence}]) need {needed} pages, the row has {some}"
            )
        return case.entry(sequence, column), f"{case.noun} {page} is {what}"

    seen = hits_of_kind(case, table_rules.OUTSIDE, lambda *_: "")
    return seen and (seen[0], words)


@rule(
    "P2",
    "Tokens of one column overwrite tokens of the other. The allocator gave a page that was not free.",
    needs="block_tables",
)
def twice_in_a_sequence(case: Case) -> Seen:
    """Report pages that a sequence has twice. vllm-rbln#41: tables after a preemption."""
    return hits_of_kind(
        case, table_rules.TWICE, lambda page, _, at: f"{page} {case.place('the same sequence', at)}"
    )


@rule(
    "P3",
    "One sequence reads tokens of the other. Only pages of an equal prefix may be shared: look for a page "
    "that was freed while in use, or a row of the table that belongs to another sequence.",
    needs="block_tables",
)
def in_two_sequences(case: Case) -> Seen:
    """Report pages of two sequences. sparkinfer#289: tables were looked up by row, not by sequence.

    Forks of a `PagedCache` share rows after other tokens were removed. There a row is wrong if its token has
    one id in one sequence and another id in the other.
    """
    why = "which has another id" if case.token_ids else "whose earlier pages differ"

    def words(page: str, other: int, there: int) -> str:
        return f"{page} {case.place(f'sequence {other}', there)}, {why}"

    seen: Any = hits_of_kind(case, table_rules.FOREIGN, words)
    if seen is None or not case.token_ids:
        return seen
    found, ids, (hits, name) = [], case.token_ids, seen
    for hit in hits:
        _, sequence, column, _, other, there = hit
        known = column < len(ids[sequence]) and there < len(ids[other])
        if known and ids[sequence][column] != ids[other][there]:
            found.append(hit)
    return found, name


@rule(
    "P4",
    "The other sequences will read these tokens as their own. Copy the page before it is written.",
    needs="block_tables, slot_mapping",
)
def shared_and_written(case: Case) -> Seen:
    """Report shared pages that a step writes. atlas#1193: a shared last page was not copied first."""
    if case.page_tables is None or case.slots is None or not case.aligned:
        return None
    stored = case.slots[case.slots >= 0]
    shared = case.page_tables.shared(stored // case.page_size)
    hits = np.flatnonzero((case.slots >= 0) & np.isin(case.slots // case.page_size, shared))

    def words(i: int) -> tuple[str, str]:
        page = int(case.slots[i]) // case.page_size
        owners = ", ".join(map(str, case.page_tables.owners(page)))
        return f"slot_mapping[{i}]", f"slot {case.slots[i]} is in page {page}, which sequences {owners} have"

    return hits, words


@rule(
    "P5",
    "A kernel reads past the table, or leaves tokens out. Take lengths, sums and tables from the same step.",
    needs="block_tables",
)
def lengths_disagree(case: Case) -> Seen:
    """Report lengths that do not fit tables or sums. flash-attention#2711: more than the columns."""
    if case.table_name is None:
        return None
    return list(disagreements(case))


def disagreements(case: Case) -> Iterator[tuple[str, str]]:
    """Yield (where, what) for all lengths that disagree."""
    lengths, table = case.lengths, case.raw_table
    rows = max(len(table[0]) - 1, 0) if isinstance(table, tuple) else len(table)
    if len(lengths) != rows:
        yield "context_lens", f"{len(lengths)} lengths for the {rows} sequences of {case.table_name}"
    for b in np.flatnonzero(lengths < 0).tolist():
        yield f"context_lens[{b}]", f"{lengths[b]} tokens"
    needed = table_rules.pages_of(lengths, case.page_size)
    if not isinstance(table, tuple):
        for b in np.flatnonzero(needed > table.shape[1]).tolist():
            has = f"{case.table_name} has {table.shape[1]} columns"
            yield f"context_lens[{b}]", f"{lengths[b]} tokens need {needed[b]} pages, {has}"
        return
    starts, pages = table
    if not len(starts) or starts[0] != 0:
        yield "kv_indptr[0]", f"{starts[0] if len(starts) else 'nothing'}, not 0"
        return
    for b in np.flatnonzero(np.diff(starts) < 0).tolist():
        yield f"kv_indptr[{b + 1}]", f"{starts[b + 1]}, less than the {starts[b]} before it"
    if starts[-1] > len(pages):
        yield f"kv_indptr[{len(starts) - 1}]", f"{starts[-1]} pages, kv_indices has {len(pages)}"
    last = case.index("kv_last_page_len", 1)
    if last is not None and len(last) != rows:
        yield "kv_last_page_len", f"{len(last)} entries for {rows} sequences"
        return
    counts = np.diff(starts)
    if last is not None:
        for b in np.flatnonzero((counts > 0) & ((last < 1) | (last > case.page_size))).tolist():
            yield f"kv_last_page_len[{b}]", f"{last[b]} rows, not 1 to {case.page_size}"
    if not {"context_lens", "kvstarts"} & case.given.keys():  # `lengths` are computed from these arrays
        return
    for b in np.flatnonzero(counts[: len(lengths)] != needed[:rows]).tolist():
        yield f"kv_indptr[{b + 1}]", f"{counts[b]} pages for {lengths[b]} tokens, which need {needed[b]}"
    if last is not None and "context_lens" in case.given and len(lengths) == rows:
        meant = np.where(counts > 0, (counts - 1) * case.page_size + last, 0)
        for b in np.flatnonzero((meant != lengths) & (counts == needed)).tolist():
            what = f"{last[b]} rows make {meant[b]} tokens, context_lens has {lengths[b]}"
            yield f"kv_last_page_len[{b}]", what


@rule(
    "P6",
    "Legal, but a kernel that reads a whole row, or one column too many, finds pages of other sequences: "
    "fill the rest of a row with -1.",
    "warning",
    needs="block_tables, rows of it",
)
def live_after_the_end(case: Case) -> Seen:
    """Report pages after the end of a sequence. vllm#42494: a kernel may read such entries."""
    if case.table_name is None or isinstance(case.raw_table, tuple):
        return None
    rows = min(len(case.raw_table), len(case.lengths))
    table = case.raw_table[:rows]
    needed = table_rules.pages_of(case.lengths[:rows], case.page_size)
    after = np.arange(table.shape[1]) >= needed[:, None]
    live = after & (table > 0) & (table < case.num_blocks * case.unit)
    for padding in (case.placeholder, case.reserved_block):
        if padding is not None:
            live &= table != padding * case.unit
    hits = np.argwhere(live)

    def words(hit: Any) -> tuple[str, str]:
        b, c = hit.tolist()
        page = f"{case.noun} {table[b, c] // (case.unit if case.aligned else 1)}"
        return case.entry(b, c), f"{page} after the {needed[b]} pages of sequence {b}"

    return hits, words


@rule(
    "P7",
    "These ids belong to another pool or rank. Translate them before they are used with this cache.",
    needs="block_tables",
)
def of_another_pool(case: Case) -> Seen:
    """Report tables of another pool. vllm-ascend#14534: replicated and rank-local tables were mixed."""
    if case.page_tables is None:
        return None
    ids, pool, noun = case.page_tables.ids, case.page_tables.num_blocks, case.noun
    hits = case.page_tables.hits(table_rules.OUTSIDE)
    if not len(hits):
        return []
    outside = hits[:, table_rules.PAGE]

    def inside(pages: np.ndarray) -> bool:
        return bool(((pages >= 0) & (pages < pool)).all())

    if inside(outside & WITHOUT_TOP_BIT):
        page = outside[0] & WITHOUT_TOP_BIT
        what = f"{noun} {outside[0]} is {noun} {page} with its top bit set, like all outside the pool"
    elif len(outside) == len(ids) > 1 and inside(ids - ids.min()) and ids.min() >= pool:
        what = f"all {len(ids)} {noun}s are {ids.min()} or more: the pool's numbers begin elsewhere"
    else:
        return []
    return [(case.entry(hits[0, table_rules.SEQUENCE], hits[0, table_rules.COLUMN]), what)]
