"""Check layouts, and rows that must not change: rules L1 to L3, and W1."""

import numpy as np

from kvkit.errors import KvkitError, argument_error
from kvkit.files.members import is_extension_dtype
from kvkit.layouts import NAMED, view
from kvkit.tools.case import Case, CheckedSide
from kvkit.tools.counting import word_view
from kvkit.tools.findings import Rule, Seen, rule

LEAST_TOKENS = 16
OUTSTANDING = 2.5  # |mean| / standard deviation that channels of keys reach, and channels of values do not
AMONG = 3  # how many times the ratio of a head's median channel such a channel's is
TIMES = 1.8  # how many times the ratio of keys the ratio of values must be


@rule(
    "L1",
    "Kernels would read wrong addresses. Name the layout of the cache as it was allocated, or transpose it.",
    needs="layout",
)
def line_and_array_disagree(case: Case) -> Seen:
    """Report an array that its layout does not fit.

    vllm#46204: a connector forced one order of heads and tokens on a cache with the other order.
    """
    if case.layout is None:
        return None
    views, why = case.viewed
    return [] if views or not why else [("layout", why)]


@rule(
    "L2",
    "The shape does not determine the layout. Name it: layout=NAME, or in the file.",
    "warning",
    needs="one array of keys and values whose layout is not given",
)
def several_lines_fit(case: Case) -> Seen:
    """Report a cache whose shape several layouts fit.

    LMCache#4467: with 2 heads, the axis of keys and values and the axis of heads have equal lengths.
    """
    if case.layout is not None or case.source.contents.cache is None:
        return None
    lines: dict[str, str] = {}
    for name, named in NAMED.items():
        try:
            view(case.source.cache, named.layout, sizes=case.sizes)
        except KvkitError:
            continue
        lines.setdefault(str(named.layout), name)
    if len(lines) == 1:
        return []
    listed = ", ".join(f"'{line}' ({name})" for line, name in lines.items()) or "none that kvkit knows"
    return [("cache", f"{len(lines)} layouts fit: {listed}")]


@rule(
    "L3",
    "Scores would be computed from values. Keys come first in every engine's pairs: check the split.",
    needs=f"keys and values, {LEAST_TOKENS} tokens of finite numbers",
)
def keys_and_values_swapped(case: Case) -> Seen:
    """Report values that look like keys: only keys have channels with a mean far from 0.

    LMCache#4463: keys and values in one row were split as if they were separate arrays.
    """
    rows = case.rows_in_use
    if len(case.sides) < 2 or rows is None:
        return None
    outstanding = [each for side in case.sides if (each := outstanding_channels(side, rows)) is not None]
    if len(outstanding) < 2:
        return None
    found: list[tuple[str, str]] = []
    for layer, (key, value) in enumerate(zip(*outstanding, strict=True)):
        if value > OUTSTANDING and value > TIMES * key:
            layers = f"[{layer}]" if len(outstanding[0]) > 1 else ""
            where = ", ".join(f"{side.label}{layers}" for side in case.sides)
            spread = f"values have channels with |mean| {value:.1f} times their spread, keys have {key:.1f}"
            found.append((where, f"{spread}: usually keys have such channels"))
    return found


def outstanding_channels(side: CheckedSide, rows: np.ndarray) -> list[float] | None:
    """Return for each layer the median over heads of the largest |mean| / deviation; None for few tokens."""
    dtype = side.array.dtype
    if rows.sum() < LEAST_TOKENS or (dtype.kind not in "fi" and not is_extension_dtype(dtype)):
        return None
    found = []
    for layer in range(len(side.array)):
        numbers = side.array[layer][rows].astype(np.float32)  # [tokens, heads, content]
        scale = side.scale
        if scale is not None and scale.ndim == 5 and scale.shape[1:3] == rows.shape:
            group = numbers.shape[2] // scale.shape[4]
            numbers = numbers * scale[layer][rows].astype(np.float32).repeat(group, axis=2)
        if not np.isfinite(numbers).all():
            return None
        spread = numbers.std(axis=0)  # [heads, content]; constant channels do not count
        ratio = np.divide(np.abs(numbers.mean(axis=0)), spread, where=spread > 0, out=np.zeros_like(spread))
        most = ratio.max(axis=-1)
        most[most < AMONG * np.median(ratio, axis=-1)] = 0  # no few channels stand out
        found.append(float(np.median(most)))
    return found


def written_elsewhere(call: tuple[Case, Case, np.ndarray]) -> Seen:
    """Report rows that changed but have no slot. vllm#56734: draft tokens went through stale tables."""
    before, after, slots = call
    hits = []  # (array, shape of its rows, layer, block, row)
    for old, new in zip(before.sides, after.sides, strict=True):
        pairs = (old.label, old.array, new.array), (f"{old.name}_scale", old.scale, new.scale)
        for name, one, two in pairs:
            if one is None or two is None or one.ndim < 3 or one.shape != two.shape:
                continue
            if one.dtype != two.dtype:
                raise argument_error(f"{name} after the call", f"{one.dtype}, as before", two.dtype)
            changed = word_view(one) != word_view(two)
            rows = changed.reshape(*changed.shape[:3], -1).any(axis=-1)  # [layers, blocks, rows]
            stored = np.zeros(rows.shape[1] * rows.shape[2], bool)
            places = slots * rows.shape[2] // old.array.shape[2]  # a whole block may share a scale
            stored[places[(places >= 0) & (places < len(stored))]] = True
            rows &= ~stored.reshape(rows.shape[1:])
            hits += [(name, rows.shape, *place) for place in np.argwhere(rows).tolist()]

    def words(hit: tuple[str, tuple[int, ...], int, int, int]) -> tuple[str, str]:
        name, (layers, _, of_block), layer, block, row = hit
        at = f"{layer}, {block}, {row}" if layers > 1 else f"{block}, {row}"
        page_size = before.sides[0].array.shape[2]
        slot = block * page_size + row
        if of_block == 1 < page_size:  # a scale of all rows of a block
            return f"{name}[{at}]", f"block {block} has changed, and none of the {len(slots)} slots is in it"
        return f"{name}[{at}]", f"slot {slot} has changed, and none of the {len(slots)} slots is there"

    return hits, words


WRITTEN_ELSEWHERE = Rule(
    "W1",
    "error",
    "The call overwrote other tokens. Compare its slots with the rows that its kernel computes from them.",
    written_elsewhere,
)
