"""Rules of the scales of codes."""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from kvkit.checks.tensors import FORMATS
from kvkit.formats import NAMED, Format, named
from kvkit.tools.findings import rule

MOST_SATURATED = 0.001


@dataclass(frozen=True)
class Codes:
    """What rules ask of a format."""

    format: Format

    @cached_property
    def largest(self):
        """Which bytes are the least or the largest codes; none where each group has both by its minimum."""
        code = self.format.code
        if code.bits != 8 or self.format.beside or self.format.order:  # blocks hold scales, too
            return np.zeros(256, bool)
        low, high = code.limits
        return np.isfinite(code.table) & ((code.table <= low) | (code.table >= high))

    @property
    def signed(self):
        """Whether scales may be negative."""
        return bool(self.format.beside) or self.format.find == "signed"

    @property
    def of_group(self):
        """Whether a scale is made of the largest element of its group, which then saturates."""
        return self.format.find != "given"

    def at_the_limit(self, array):
        return self.largest[array.view(np.uint8)]


@cache
def known(name):
    """The `Codes` of a format by its name, or None."""
    return Codes(named(name)) if name and name.partition(":")[0] in NAMED else None


def codes(case, side):
    """(the name of the format, its `Codes`) of keys or values; None of floats, and of what nobody named."""
    by_dtype = FORMATS.get(side.array.dtype)
    name = (case.source.text("format") or case.source.contents.description.format) or (
        by_dtype.name if by_dtype else None
    )
    return (name, known(name)) if known(name) else None


def used_of(case, side, array):
    """A mask of what belongs to rows in use, as wide as an array of scales or codes; all without tables."""
    if case.used is None or (array.ndim != 5 and array.ndim != 4):
        return np.ones(array.shape, bool)
    rows = case.used[0]
    if array.shape[1:3] != rows.shape:
        return np.ones(array.shape, bool)
    return np.broadcast_to(rows.reshape(1, *rows.shape, *[1] * (array.ndim - 3)), array.shape)


def scales(case):
    """(side, its scales as float32, which of them are in use) of keys and values that have some."""
    for side in case.sides:
        if side.scale is not None and side.scale.size:
            yield side, side.scale.astype(np.float32), used_of(case, side, side.scale)


def each(case, name, find):
    """The hits of `find` in every array of scales, with the place of the first one."""
    found, looked = [], False
    for side, scale, used in scales(case):
        looked = True
        bad = find(side, scale, used)
        if bad is None or not bad.any():
            continue
        first = tuple(np.argwhere(bad)[0].tolist()) if bad.ndim else ()
        where = f"{side.name}_scale{list(first) if first else ''}"
        what = f"{scale[first]:g}: {bad.sum()} of {int(used.sum())} scales in use {name}"
        found.append((where, what))
    return (found, lambda hit: hit) if looked else None


@rule(
    "Q1", "All elements of the group become NaN or infinity. Look for a division by 0, or a float16 overflow."
)
def not_finite(case):
    """sglang#40243: infinite scales of a checkpoint were copied into layers, and NaN gave an error without
    words.
    """
    return each(case, "are not finite", lambda side, scale, used: used & ~np.isfinite(scale))


@rule("Q2", "Nobody calibrated them: 1.0 is what stands there without a checkpoint's scales.", "warning")
def all_ones(case):
    """vllm#54705: fp8 with scales of 1 was 4.2 points worse on MATH-500 than with calibrated ones."""
    found, looked = [], False
    for side, scale, used in scales(case):
        kind = codes(case, side)
        if kind is None or kind[0] not in ("e4m3", "e5m2"):
            continue
        looked = True
        if used.any() and (scale[used] == 1).all():
            found.append(
                (f"{side.name}_scale", f"all {int(used.sum())} scales of {kind[0]} codes are exactly 1.0")
            )
    return (found, lambda hit: hit) if looked else None


@rule("Q3", "Larger values were cut off. The scale was fixed before they came: measure it over more tokens.")
def saturated(case):
    """transformers#48677: an fp8 cache keeps the scale of its first update, and later outliers saturate in
    silence.
    """
    found, looked = [], False
    for side in case.sides:
        kind = codes(case, side)
        if kind is None or not kind[1].largest.any() or side.array.dtype.itemsize != 1:
            continue
        looked = True
        limit = kind[1].at_the_limit(side.array)
        used = used_of(case, side, side.array)
        scale_count = 0 if side.scale is None else side.scale.size
        per_group = scale_count / side.array.size if kind[1].of_group else 0
        most = MOST_SATURATED + (2 * per_group if per_group > 1e-3 else per_group)
        total = np.maximum(used.sum(axis=(1, 2, 4)), 1)
        share = (limit & used).sum(axis=(1, 2, 4)) / total
        for layer, head in np.argwhere(share > most).tolist():
            layers = f"layer {layer}, " if len(side.array) > 1 else ""
            found.append((
                f"{side.label} ({layers}head {head})",
                f"{share[layer, head]:.2%} of its {kind[0]} codes are the largest there is "
                f"(at most {most:.2%})",
            ))  # fmt: skip
    return (found, lambda hit: hit) if looked else None


@rule("Q4", "Everything there reads as 0, or with the wrong sign. Keep scales above the format's smallest.")
def zero(case):
    """onnxruntime#32515: what scales of 0, below 0 and subnormal ones mean was open, and passes treated them
    apart.
    """

    def find(side, scale, used):
        kind = codes(case, side)
        bad = scale == 0
        if kind is not None and not kind[1].signed:
            bad |= scale < 0
        return used & bad & ~empty(side, scale)

    return each(case, "are 0 or below", find)


def empty(side, scale):
    """Which scales have codes of 0 alone, for which formats write 0: ggml, and FlashInfer's NVFP4."""
    array = side.array
    if scale.ndim < 4 or scale.shape[:4] != array.shape[:4] or array.dtype.kind == "f":
        return np.zeros(scale.shape, bool)
    bits = array.view(np.uint8) if array.dtype.itemsize == 1 else array
    groups = scale.shape[4] if scale.ndim == 5 else 1
    if bits.shape[-1] % groups:
        return np.zeros(scale.shape, bool)
    none = (bits.reshape(*bits.shape[:4], groups, -1) == 0).all(axis=-1)
    return none if scale.ndim == 5 else none[..., 0]
