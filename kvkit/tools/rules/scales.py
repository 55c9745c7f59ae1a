"""Check scales and codes of quantized caches: rules Q1 to Q5."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from kvkit.checks.values import FORMATS
from kvkit.formats import NAMED, Format, named
from kvkit.formats.elements import is_float
from kvkit.tools.case import Case, CheckedSide
from kvkit.tools.findings import Seen, rule

MOST_SATURATED = 0.001  # the largest share of codes at a limit that is not reported
UNLIKE = 16  # a page's mean scale is reported if it is so many times its neighbours', or so many times less


@dataclass(frozen=True)
class CodedFormat:
    """Adds to a format the properties that rules need."""

    name: str
    format: Format

    @cached_property
    def is_limit(self) -> np.ndarray:
        """Return a mask over all bytes, bool [256]: codes at a limit of the range.

        It is empty for formats with a minimum, whose groups always reach both limits, and for block formats.
        """
        code = self.format.code
        if code.bits != 8 or self.format.offset or self.format.order:  # some bytes of blocks are scales
            return np.zeros(256, bool)
        low, high = code.limits
        return np.isfinite(code.table) & ((code.table <= low) | (code.table >= high))

    @property
    def signed(self) -> bool:
        """Return whether scales may be negative."""
        return bool(self.format.offset) or self.format.rule == "ggml_signed"


@cache
def known_format(name: str) -> CodedFormat | None:
    """Return a format by its name; None for unknown names."""
    return CodedFormat(name, named(name)) if name.partition(":")[0] in NAMED else None


def format_of_codes(case: Case, side: CheckedSide) -> CodedFormat | None:
    """Return the format of keys or values; None for floats and unknown formats."""
    by_dtype = FORMATS.get(side.array.dtype)
    stated = case.source.text("format") or case.source.contents.description.format
    name = stated or (by_dtype.name if by_dtype else None)
    return known_format(name) if name else None


def used_of(case: Case, array: np.ndarray) -> np.ndarray:
    """Return a mask of the scales or codes that belong to rows in use; all True without page tables."""
    rows = None if case.used is None else case.used.rows
    if rows is None or array.ndim not in (4, 5) or array.shape[1:3] != rows.shape:
        return np.ones(array.shape, bool)
    return np.broadcast_to(rows.reshape(1, *rows.shape, *[1] * (array.ndim - 3)), array.shape)


def scales_in_use(case: Case) -> Iterator[tuple[CheckedSide, np.ndarray, np.ndarray]]:
    """Yield (side, scales as float32, mask of scales in use) for each side that has scales."""
    for side in case.sides:
        if side.scale is not None and side.scale.size:
            yield side, side.scale.astype(np.float32), used_of(case, side.scale)


def scales_found(
    case: Case, what: str, find: Callable[[CheckedSide, np.ndarray, np.ndarray], np.ndarray]
) -> Seen:
    """Report `what` is wrong with each scale array in which `find` marks entries, and the first of these."""
    found, looked = [], False
    for side, scale, used in scales_in_use(case):
        looked = True
        bad = find(side, scale, used)
        if not bad.any():
            continue
        first = tuple(np.argwhere(bad)[0].tolist()) if bad.ndim else ()
        where = f"{side.name}_scale{list(first) if first else ''}"
        found.append((where, f"{scale[first]:g}: {bad.sum()} of {int(used.sum())} scales in use {what}"))
    return found if looked else None


@rule(
    "Q1",
    "All elements of the group become NaN or infinity. Look for a division by 0, or a float16 overflow.",
    needs="scales",
)
def not_finite(case: Case) -> Seen:
    """Report NaN and infinite scales. sglang#40243: a checkpoint's NaN scales were loaded silently."""
    found = scales_found(case, "are not finite", lambda side, scale, used: used & ~np.isfinite(scale))
    return saved_not_finite(case, scales=True) if found is None else found


def saved_not_finite(case: Case, scales: bool) -> Seen:
    """Report NaN and infinities in the layers of a saved cache: in scales of codes, or else in other arrays.

    Return None if the file has no such arrays. Scales are named as ``layers.0.keys.cells``.
    """
    found, looked = [], False
    for name, array in case.given.items():
        if not name.startswith("layers.") or name.endswith(".cells") != scales:
            continue
        if not is_float(array.dtype):
            continue
        looked, bad = True, ~np.isfinite(array)
        if bad.any():
            first = np.argwhere(bad)[0].tolist()
            found.append((f"{name}{first}", f"{int(bad.sum())} of {bad.size} numbers are NaN or infinity"))
    return found if looked else None


@rule(
    "Q2",
    "They are not calibrated: 1.0 is the default without scales in a checkpoint.",
    "warning",
    needs="scales, fp8 codes",
)
def all_ones(case: Case) -> Seen:
    """Report scales that are all 1. vllm#54705: fp8 with them lost 4.2 points on MATH-500."""
    found, looked = [], False
    for side, scale, used in scales_in_use(case):
        coded = format_of_codes(case, side)
        if coded is None or coded.name not in ("e4m3", "e5m2"):
            continue
        looked = True
        if used.any() and (scale[used] == 1).all():
            what = f"all {int(used.sum())} scales of {coded.name} codes are exactly 1.0"
            found.append((f"{side.name}_scale", what))
    return found if looked else None


@rule(
    "Q3",
    "Larger values were clipped. The scale was fixed before they occurred: calibrate it with more tokens.",
    needs="codes of 8 bits with limits",
)
def saturated(case: Case) -> Seen:
    """Report codes at a limit. transformers#48677: the scale of the first update was kept for all."""
    found, looked = [], False
    for side in case.sides:
        coded = format_of_codes(case, side)
        if coded is None or not coded.is_limit.any() or side.array.dtype.itemsize != 1:
            continue
        looked = True
        limit = coded.is_limit[side.array.view(np.uint8)]
        used = used_of(case, side.array)
        # A computed scale puts the amax of its group at the limit; in small groups two codes may be there.
        computed = coded.format.rule != "given"
        of_amax = side.scale.size / side.array.size if computed and side.scale is not None else 0
        most = MOST_SATURATED + (2 * of_amax if of_amax > 1e-3 else of_amax)
        total = np.maximum(used.sum(axis=(1, 2, 4)), 1)
        share = (limit & used).sum(axis=(1, 2, 4)) / total
        for layer, head in np.argwhere(share > most).tolist():
            layers = f"layer {layer}, " if len(side.array) > 1 else ""
            what = f"{share[layer, head]:.2%} of its {coded.name} codes are the largest code"
            found.append((f"{side.label} ({layers}head {head})", f"{what} (at most {most:.2%})"))
    return found if looked else None


@rule(
    "Q4",
    "All elements of the group are read as 0, or with the wrong sign. Keep scales above the smallest one.",
    needs="scales",
)
def zero(case: Case) -> Seen:
    """Report scales that are 0 or below. onnxruntime#32515: passes handled such scales differently."""

    def find(side: CheckedSide, scale: np.ndarray, used: np.ndarray) -> Any:
        coded = format_of_codes(case, side)
        bad = scale == 0
        if coded is not None and not coded.signed:
            bad |= scale < 0
        return used & bad & ~empty(side, scale)

    return scales_found(case, "are 0 or below", find)


@rule(
    "Q5",
    "Codes were stored with one scale and are read with another, or the page was encoded from other data. "
    "Check which code writes scales, and whether scales move with their page.",
    "warning",
    needs="scales, pages with neighbours",
)
def unlike_the_neighbours(case: Case) -> Seen:
    """Report pages with scales unlike their neighbours'. imp#1189: a prefix was saved without its scales."""
    found, looked = [], False
    for side, scale, used in scales_in_use(case):
        if scale.ndim not in (4, 5) or scale.shape[1:3] != side.array.shape[1:3]:
            continue
        sizes = np.where(used & np.isfinite(scale), np.abs(scale), 0).reshape(*scale.shape[:3], -1)
        rows = np.maximum((sizes > 0).sum(axis=(2, 3)), 1)
        means = sizes.sum(axis=(2, 3)) / rows  # [layers, pages]
        for before, page, after in neighbours(case, means.shape[1]):
            looked = True
            beside = np.sort(means[:, [before, after]], axis=1)
            large = (beside[:, 0] > 0) & (means[:, page] >= UNLIKE * beside[:, 1])
            small = (means[:, page] > 0) & (means[:, page] * UNLIKE <= beside[:, 0])
            for layer in np.flatnonzero(large | small).tolist():
                where = f"{side.name}_scale[{f'{layer}, ' if len(scale) > 1 else ''}{page}]"
                near = f"{beside[layer, 0]:.3g} and {beside[layer, 1]:.3g} in pages {before} and {after}"
                found.append((where, f"{means[layer, page]:.3g} in the mean, but {near} beside it"))
    return found if looked else None


def neighbours(case: Case, pages: int) -> Iterator[tuple[int, int, int]]:
    """Yield (before, page, after) for each page of a sequence; at its ends, the two nearest pages.

    The pages 7 3 9 5 yield (3, 7, 9), (7, 3, 9), (3, 9, 5) and (3, 5, 9).
    """
    if case.page_tables is None:
        return
    starts, seen = case.page_tables.starts, set()
    for begin, end in pairwise(starts.tolist()):
        row = [page for page in case.page_tables.ids[begin:end].tolist() if 0 <= page < pages]
        for i, page in enumerate(row) if len(row) > 2 else ():
            first = min(max(i - 1, 0), len(row) - 3)
            before, after = [other for other in row[first : first + 3] if other != page][:2] or (page, page)
            if page not in seen and before != after:
                seen.add(page)
                yield before, page, after


def empty(side: CheckedSide, scale: np.ndarray) -> Any:
    """Return a mask of scales whose codes are all 0. ggml and FlashInfer's NVFP4 write scale 0 for them."""
    array = side.array
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 1
    if scale.ndim < 4 or scale.shape[:4] != array.shape[:4] or wide:
        return np.zeros(scale.shape, bool)
    bits = array.view(np.uint8) if array.dtype.itemsize == 1 else array
    groups = scale.shape[4] if scale.ndim == 5 else 1
    if bits.shape[-1] % groups:
        return np.zeros(scale.shape, bool)
    none = (bits.reshape(*bits.shape[:4], groups, -1) == 0).all(axis=-1)
    return none if scale.ndim == 5 else none[..., 0]
