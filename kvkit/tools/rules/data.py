"""Check the data in caches and results: rules D1 to D3."""

import numpy as np

from kvkit.checks import table_rules
from kvkit.formats.elements import is_float
from kvkit.tools.case import Case, CheckedSide
from kvkit.tools.findings import Seen, rule
from kvkit.tools.rules.scales import format_of_codes, saved_not_finite

BASE_2 = np.log(2.0)


def not_finite(case: Case, side: CheckedSide) -> np.ndarray | None:
    """Return a mask of elements that are NaN or infinity; None if the format has no such codes."""
    coded = format_of_codes(case, side)
    if coded is not None and side.array.dtype.itemsize == 1:
        bad = ~np.isfinite(coded.format.code.table)
        return bad[side.array.view(np.uint8)] if bad.any() else None
    return ~np.isfinite(side.array) if is_float(side.array.dtype) else None


def rows_not_finite(case: Case, which: np.ndarray) -> Seen:
    """Report rows within a mask [blocks, rows] that have an element that is not finite."""
    found: list[tuple[str, str]] = []
    looked = False
    for side in case.sides:
        bad = not_finite(case, side)
        if bad is None:
            continue
        looked = True
        rows = bad.any(axis=(3, 4)) & which
        for layer, block, row in np.argwhere(rows).tolist():
            heads = np.flatnonzero(bad[layer, block, row].any(axis=-1)).tolist()
            shown = case.row_name(side, layer, block, row)
            elements = int(bad[layer, block, row].sum())
            found.append((shown, f"{elements} elements are NaN or infinity, in heads {heads}"))
    return found if looked else None


@rule(
    "D1",
    "Every query that sees this token becomes NaN. Find the call that wrote the row, which is in use.",
    needs="keys and values, floats",
)
def nan_in_use(case: Case) -> Seen:
    """Report NaN and infinities in use. vllm#39444: dummy runs left NaN in block 0, which others read."""
    if not case.sides:
        return saved_not_finite(case, scales=False)
    return rows_not_finite(case, np.ones((1, 1), bool) if case.used is None else case.used.rows)


@rule(
    "D2",
    "The row has no token, but a kernel that multiplies a masked row by 0 gets NaN: clear pages before they "
    "are allocated.",
    "warning",
    needs="keys and values, block_tables, floats",
)
def nan_after_the_end(case: Case) -> Seen:
    """Report NaN and infinities after the end of a sequence. vllm#43990: stale fp8 blocks had NaN."""
    if not case.sides or case.used is None:
        return None
    rows, blocks = case.used
    return rows_not_finite(case, blocks[:, None] & ~rows)


@rule(
    "D3",
    "Parts merged with it get wrong weights. Multiply base 2 by ln 2, and write -inf for an empty context.",
    needs="lse, block_tables",
)
def other_base(case: Case) -> Seen:
    """Report log-sum-exps of base 2, or +inf for an empty context. flash-attention#2573: the latter."""
    lse = case.given.get("lse")
    if lse is None or case.table_name is None:
        return None
    lse = np.asarray(lse, np.float64)
    found = []
    for b in np.flatnonzero((case.lengths[: len(lse)] == 0) & (lse == np.inf).any(axis=-1)).tolist():
        found.append((f"lse[{b}]", "+inf for a context of 0 tokens"))
    expected = log_sum_exp(case)
    if expected is not None and expected.shape == lse.shape:
        there = np.isfinite(expected) & np.isfinite(lse)
        got, meant = lse[there], expected[there]
        tolerance = 0.01 * (1 + np.abs(meant))
        apart = np.abs(got - meant) > tolerance
        factors = {"base 2": BASE_2, "the sign reversed": -1.0, "base 2, the sign reversed": -BASE_2}
        for what, factor in factors.items():
            if apart.any() and (np.abs(got * factor - meant) <= tolerance).all():
                b, h = np.argwhere(there)[apart.argmax()].tolist()
                found.append((f"lse[{b}, {h}]", f"{lse[b, h]:.6g}: all are those of this cache with {what}"))
                break
    return found


def log_sum_exp(case: Case) -> np.ndarray | None:
    """Return the log-sum-exp [sequences, heads] of one query for each sequence; None without queries."""
    query = case.given.get("query")
    keys = next((side for side in case.sides if side.name == "key"), None)
    if query is None or keys is None or case.page_tables is None or not case.aligned:
        return None
    if not_finite(case, keys) is None:
        return None
    query = np.asarray(query, np.float64)  # [sequences, query heads, content]
    starts, ids = case.page_tables.starts, case.page_tables.ids
    if query.ndim != 3 or len(query) != len(starts) - 1 or case.page_tables.hits(table_rules.OUTSIDE).size:
        return None
    repeat = query.shape[1] // keys.array.shape[3]
    scale = case.given.get("softmax_scale")
    scale = query.shape[2] ** -0.5 if scale is None else float(np.asarray(scale))
    found = np.full(query.shape[:2], -np.inf)
    for b, length in enumerate(case.lengths.tolist()):
        if length:
            rows = keys.array[0, ids[starts[b] : starts[b + 1]]].reshape(-1, *keys.array.shape[3:])[:length]
            scores = np.einsum("hd,nhd->hn", query[b], rows.astype(np.float64).repeat(repeat, axis=1)) * scale
            top = scores.max(axis=1, keepdims=True)
            found[b] = top[:, 0] + np.log(np.exp(scores - top).sum(axis=1))
    return found
