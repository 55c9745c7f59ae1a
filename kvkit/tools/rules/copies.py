"""Check for rows of zeros, and for rows that are copies of other rows: rules D4 to D8.

Rows are compared by their `prints`: a number of 64 bits for each head of each row, 0 for a row of zeros.
"""

from __future__ import annotations

import numpy as np

from kvkit.checks import table_rules
from kvkit.tools.case import Case, CheckedSide
from kvkit.tools.findings import Seen, rule
from kvkit.tools.rules.scales import format_of_codes

LEAST_ROWS = 4  # the fewest rows of heads whose elements differ that show a copy


def listed(numbers: list[int]) -> str:
    """Return numbers as text: "3", "3 to 5", or "1, 3, 4"."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


def layer_name(side: CheckedSide, layer: int) -> str:
    """Return the name of a layer's array, as a Python expression."""
    return f"{side.label}[{layer}]" if len(side.array) > 1 else side.label


def prints_in_use(case: Case, side: CheckedSide, layer: int) -> np.ndarray:
    """Return the prints [rows, heads] of the rows of a layer that have a token."""
    found: np.ndarray = case.prints[side.name].rows[layer][case.rows_in_use]
    return found


def shows_copies(case: Case, side: CheckedSide, layer: int) -> bool:
    """Return whether enough rows of a layer have elements that differ."""
    return int(case.prints[side.name].varied[layer][case.rows_in_use].sum()) >= LEAST_ROWS


@rule(
    "D4",
    "Attention gives these tokens the weight of a score of 0. Find the call that should have written them.",
    needs="keys and values, codes without a minimum",
)
def zeros_in_use(case: Case) -> Seen:
    """Report rows of zeros that have a token. tt-metal#54413: a prompt's runs of blocks left rows empty.

    Without tables a row has a token if another row before it and one after it, or another layer, is not zero.
    """
    if case.rows_in_use is None:
        return None
    runs, looked = [], False  # (side, layer, block, row, number of rows, heads)
    for side in case.sides:
        coded = format_of_codes(case, side)
        if coded is not None and coded.format.offset:  # code 0 is the minimum of its group
            continue
        looked = True
        empty = (case.prints[side.name].rows == 0) & case.rows_in_use[:, :, None]
        for layer, block in np.argwhere(empty.any(axis=(2, 3))).tolist():
            rows = empty[layer, block]  # [rows, heads]
            ends = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=-1)) + 1
            for begin, end in zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True):
                if heads := np.flatnonzero(rows[begin]).tolist():
                    runs.append((side, layer, block, begin, end - begin, heads))

    def words(run: tuple[CheckedSide, int, int, int, int, list[int]]) -> tuple[str, str]:
        side, layer, block, row, count, heads = run
        every = len(heads) == side.array.shape[3]
        rows = f"rows {row} to {row + count - 1} are" if count > 1 else "the row is"
        of_heads = "in all heads" if every else f"in head{'s' * (len(heads) > 1)} {listed(heads)}"
        return case.row_name(side, layer, block, row), f"{rows} zero {of_heads}"

    return (runs, words) if looked else None


@rule(
    "D5",
    "Scores or outputs are computed from the wrong side. Look for one address, or one variable, of both. "
    "Some models use one array for both.",
    "warning",
    needs="keys and values, both of equal shapes, no compressed rows",
)
def keys_are_values(case: Case) -> Seen:
    """Report layers whose keys and values are equal. vllm-ascend#11021: both got the address of the keys.

    A layer of DeepSeek V4 has one array for both.
    """
    if len(case.sides) < 2 or case.rows_in_use is None:
        return None
    if "compress_ratios" in case.given or [*case.of_layers("compressed_kv", "entry_count")]:
        return None
    key, value = case.sides
    if key.array.shape != value.array.shape or np.shares_memory(key.array, value.array):
        return None
    found = []
    for layer in range(len(key.array)):
        one, two = (prints_in_use(case, side, layer) for side in (key, value))
        if shows_copies(case, key, layer) and np.array_equal(one, two):
            what = f"keys and values are equal in all {len(one)} rows in use"
            found.append((f"{layer_name(key, layer)}, {layer_name(value, layer)}", what))
    return found


@rule(
    "D6",
    "A layer's tokens were stored for another: look for an index that does not move on. Some models share "
    "rows between layers.",
    "warning",
    needs="keys and values, several layers",
)
def equal_layers(case: Case) -> Seen:
    """Report layers that are equal. FastV#49: later layers went on with the cache of one layer."""
    if case.rows_in_use is None or not case.sides or len(case.sides[0].array) < 2:
        return None
    found = []
    for side in case.sides:
        first: dict[bytes, int] = {}
        for layer in range(len(side.array)):
            rows = prints_in_use(case, side, layer)
            same = first.setdefault(rows.tobytes(), layer)
            if same != layer and shows_copies(case, side, layer):
                found.append(
                    (layer_name(side, layer), f"all {len(rows)} rows in use are those of layer {same}")
                )
    return found


@rule(
    "D7",
    "Heads were repeated for query heads before they were stored, or one head was written for all: store "
    "num_kv_heads heads, and let attention repeat them.",
    "warning",
    needs="keys and values, several heads",
)
def equal_heads(case: Case) -> Seen:
    """Report heads that are equal. vllm-ascend#3366: duplicates of heads were transferred as heads."""
    if case.rows_in_use is None or not case.sides or case.sides[0].array.shape[3] < 2:
        return None
    found = []
    for side in case.sides:
        for layer in range(len(side.array)):
            heads = np.ascontiguousarray(prints_in_use(case, side, layer).T)
            alike: dict[bytes, list[int]] = {}
            for head, rows in enumerate(heads):
                alike.setdefault(rows.tobytes(), []).append(head)
            groups = [each for each in alike.values() if len(each) > 1 and heads[each[0]].any()]
            if groups and shows_copies(case, side, layer):
                more = f", and so are {len(groups) - 1} more groups" if len(groups) > 1 else ""
                found.append((layer_name(side, layer), f"heads {listed(groups[0])} are equal{more}"))
    return found


@rule(
    "D8",
    "The page was copied to a wrong place, or written twice, as keys of other positions differ: compare the "
    "ids that the copy was given.",
    "warning",
    needs="keys and values, block_tables, full pages",
)
def copied_pages(case: Case) -> Seen:
    """Report pages with equal contents whose earlier pages differ. vllm#28951: copies went to wrong blocks.

    Pages of equal prompts that are stored twice are alike too, but so are all pages before them.
    """
    if case.used is None or case.page_tables.hits(table_rules.OUTSIDE).size:
        return None
    full: np.ndarray = np.all(case.used.rows, axis=1)
    for side in case.sides:
        full &= case.prints[side.name].varied.all(axis=(0, 2, 3))
    sums = np.zeros(len(full), np.uint64)  # a number for the contents of each page
    for i, side in enumerate(case.sides):
        rows = case.prints[side.name].rows
        factors = np.random.default_rng(i).integers(1, 2**63, rows[:, 0].shape, np.uint64) | np.uint64(1)
        for layer, each in enumerate(rows):
            sums += (each * factors[layer]).sum(axis=(1, 2))
    alone = np.arange(len(full))
    _, first, alike = np.unique(np.where(full, sums, alone), return_index=True, return_inverse=True)
    pages, starts = case.page_tables, case.page_tables.starts
    contents = table_rules.Tables(starts, first[alike][pages.ids], len(full))
    hits = [
        (
            sequence,
            column,
            pages.ids[starts[sequence] + column],
            pages.ids[starts[other] + there],
            other,
            there,
        )
        for kind in (table_rules.TWICE, table_rules.FOREIGN)
        for _, sequence, column, _, other, there in contents.hits(kind).tolist()
    ]
    hits = [hit for hit in hits if hit[2] != hit[3]]  # P2 and P3 report the same page

    def words(hit: tuple[int, int, int, int, int, int]) -> tuple[str, str]:
        sequence, column, page, twin, other, there = hit
        what = f"{case.noun} {page} has the contents of {case.noun} {twin}, which"
        return case.entry(sequence, column), f"{what} {case.place(f'sequence {other}', there)}"

    return hits, words
