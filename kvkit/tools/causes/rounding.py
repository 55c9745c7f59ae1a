"""Guess causes in the encoding of codes and scales, which are recomputed from the inputs."""

from typing import Any

import numpy as np

from kvkit.formats import BY_DTYPE
from kvkit.tools.causes.evidence import Guess
from kvkit.tools.causes.inputs import quantized_input
from kvkit.tools.causes.trial import Guesses, Trial, cause


def rounded(x: np.ndarray, how: str) -> Any:
    """Round numbers to integers: by "truncation", "half away" from zero, or half to even."""
    if how == "truncation":
        return np.trunc(x)
    if how == "half away":
        return np.trunc(x + np.copysign(np.float32(0.5), x))
    return np.rint(x)


def quantized(
    x: np.ndarray, group: int, bits: int, rounding: str = "even", reciprocal: bool = False,
    exact: bool = False, wide: bool = False, smallest: bool = True,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return (codes, scales) of x [..., content], by PMX's rule or with some of its steps changed.

    `reciprocal` multiplies by 1 / scale. `exact` does not round quotients to the type of x. `wide` divides by
    the scale before it is rounded. Without `smallest`, scales may be less than 1e-5.
    """
    dtype, most = x.dtype, np.float32(2 ** (bits - 1) - 1)
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / most
    if not wide:
        scale = scale.astype(dtype)
    if smallest:
        scale = np.maximum(scale, np.float32(1e-5).astype(scale.dtype))
    divisor = scale.astype(np.float32)
    if reciprocal:
        inverse = np.float32(1) / divisor
        quotient = groups * (inverse if wide else inverse.astype(dtype).astype(np.float32))
    else:
        quotient = groups / divisor
    if not exact:
        quotient = quotient.astype(dtype).astype(np.float32)
    codes = np.clip(np.nan_to_num(rounded(quotient, rounding)), -most, most).astype(np.int8).reshape(x.shape)
    if bits == 4:
        codes = ((codes[..., ::2] & 15) | ((codes[..., 1::2] & 15) << 4)).astype(np.int8)
    return codes, scale[..., 0].astype(dtype)


def guess_steps(trial: Trial, bits: float = 0, detail: str = "", **change: Any) -> Guesses:
    """Yield the codes or scales of PMX's rule with changed steps, the arguments of `quantized`."""
    given = quantized_input(trial)
    if given is None:
        return
    usual, changed = (
        quantized(given.floats, given.group, given.bits, **steps)[given.of_scales]
        .astype(trial.expected.dtype, copy=False)
        for steps in ({}, change)
    )  # fmt: skip
    # Rows that the rule does not yield were not written by this call, and are predicted as they are.
    written = (usual == trial.expected).mean(axis=-1, keepdims=True) >= 0.5
    yield Guess(detail, np.where(written, changed, trial.expected), bits)


@cause("truncation")
def truncation(trial: Trial) -> Guesses:
    """Quotients were truncated, as in vLLM's first kernels per token and head; or floats were."""
    yield from guess_steps(trial, rounding="truncation")
    yield from narrowed(trial, "truncation")


@cause("rounding half away from zero")
def half_away(trial: Trial) -> Guesses:
    """Ties were rounded away from zero, as by C's round and in ggml, not to even."""
    yield from guess_steps(trial, rounding="half away")
    yield from narrowed(trial, "half away")


def narrowed(trial: Trial, how: str) -> Guesses:
    """Yield 16-bit floats made from float32 with another rounding."""
    x = trial.like.get(trial.name)
    fmt = BY_DTYPE.get(trial.expected.dtype)
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.shape != trial.expected.shape:
        return
    if fmt is None or fmt.bits != 16 or not fmt.significant:
        return
    near = x.astype(fmt.dtype)
    if how == "truncation":
        over = np.abs(near.astype(np.float32)) > np.abs(x)  # the next number towards 0 is one word less
        yield Guess("", (near.view(np.uint16) - over).view(fmt.dtype))
        return
    bits = near.view(np.uint16)
    up = (bits + np.uint16(1)).view(fmt.dtype).astype(np.float32)
    middle = (near.astype(np.float64) + up) / 2  # a tie that was rounded towards 0, to an even number
    yield Guess("", (bits + (x == middle)).astype(np.uint16).view(fmt.dtype))


@cause("reciprocal instead of division")
def reciprocal(trial: Trial) -> Guesses:
    """x * (1 / s) was computed instead of x / s, which differs near ties."""
    yield from guess_steps(trial, reciprocal=True)
    yield from guess_steps(trial, 1, "in float32", reciprocal=True, exact=True, wide=True)


@cause("quotient not rounded to the data's type")
def quotient(trial: Trial) -> Guesses:
    """x / s was rounded from float32 to an integer, without rounding to the type of x first."""
    yield from guess_steps(trial, exact=True)


@cause("float32 scale for a 16-bit one")
def wide_scale(trial: Trial) -> Guesses:
    """Codes were computed with the scale before it was rounded to its stored type."""
    yield from guess_steps(trial, wide=True)
    yield from guess_steps(trial, 1, "quotient in float32 too", wide=True, exact=True)


@cause("missing smallest scale")
def smallest_scale(trial: Trial) -> Guesses:
    """Groups of tiny numbers have a scale below PMX's minimum, 1e-5."""
    yield from guess_steps(trial, smallest=False)
