"""Compute a group's scale from its numbers, by the rule of each engine, and round to codes.

Each rule (named in `Format.rule`) takes groups x, float32 [..., group], the format, the dtype of the data,
and the tensor-wide scale. It returns

    ratio     [..., group]  codes before rounding, x / scale or (x - minimum) / scale
    scale     [..., 1]      the stored scale, in float32
    offset    [..., 1]      the minimum or zero point, or None

amax is the largest magnitude of a group.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kvkit.formats.elements import E4M3, Element
from kvkit.formats.known import Format
from kvkit.typed import Array

Scaled = tuple[Array, Array, Array | None]  # ratio, scale, offset

SMALLEST = np.float32(1e-5)  # PMX: the smallest scale
TINY = np.finfo(np.float32).tiny
LEAST_POWER = np.float32(1e-4)  # DeepSeek: scales that are powers of two are not below it


def round_to(x: Array | np.float32, dtype: DTypeLike) -> Array:
    rounded: Array = x.astype(dtype).astype(np.float32)
    return rounded


def magnitude(x: Array) -> Array:
    """Return amax of each group."""
    x = np.abs(x)
    while x.shape[-1] in (2, 4, 8, 16):  # by halves: numpy is slow along short axes
        x = np.maximum(x[..., ::2], x[..., 1::2])
    largest: Array = x.max(-1, keepdims=True, initial=0)
    return largest


def extremes(x: Array) -> tuple[Array, Array]:
    """Return (minimum, maximum) of each group."""
    x = x if x.shape[-1] else np.zeros((*x.shape[:-1], 1), x.dtype)  # no tokens: the extremes are 0
    return x.min(-1, keepdims=True), x.max(-1, keepdims=True)


def inverse(scale: Array) -> Array:
    """Return 1 / scale, and 0 where a scale is 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def exponent_above(x: Array) -> Array:
    """Return the exponent of the smallest power of two that is not below x."""
    fraction, exponent = np.frexp(x)
    above: Array = exponent - (fraction == np.float32(0.5))
    return above


def largest_code(format: Format) -> np.float32:
    return np.float32(format.code.limits[1])


def pmx(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as PMX: max(amax / largest code, 1e-5). Scale and quotient are rounded to the data's dtype."""
    scale = np.maximum(round_to(magnitude(x) / largest_code(format), dtype), round_to(SMALLEST, dtype))
    return round_to(x / scale, dtype), scale, None


def kvkit_minimum(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as kvkit's caches: minimum and scale (at least 1e-5) are rounded to their dtype before use."""
    (low, high), stored = extremes(x), format.scale_type().dtype
    low = round_to(low, stored) + np.float32(0)  # -0.0 becomes +0.0
    scale = round_to(np.maximum((high - low) / largest_code(format), SMALLEST), stored)
    return (x - low) / scale, scale, low


def largest(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as ggml's q8_0: amax / largest code. Codes use the scale before it is rounded."""
    scale = magnitude(x) / largest_code(format)
    return x * inverse(scale), scale, None


def signed(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as ggml's q4_0 and q5_0: the element of largest magnitude, with its sign, gets the least code."""
    at = np.abs(x).argmax(-1)[..., None]
    scale = np.take_along_axis(x, at, -1) / np.float32(format.code.limits[0])
    return x * inverse(scale), scale, None


def ggml_minimum(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as ggml's q4_1 and q5_1: (max - min) / largest code, with the minimum as offset."""
    low, high = extremes(x)
    scale = (high - low) / largest_code(format)
    return (x - low) * inverse(scale), scale, low


def searched(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as ggml's iq4_nl: the best of 16 scales by the squared error, weighted with x * x."""
    table = format.code.table
    at = np.abs(x).argmax(-1)[..., None]
    top = np.take_along_axis(x, at, -1)
    best, chosen = (
        np.full_like(top, -1),
        np.full_like(top, np.inf),
    )  # inf makes all codes 0: it stays if all gains are NaN
    weight = x * x
    for start in (-table[0], *(table[0] + np.float32(step) for step in range(-7, 8))):
        code = table[nearest_codes(x * (start * inverse(top)), table)]
        share, norm = (
            (weight * code * x).sum(-1, keepdims=True),
            (weight * code * code).sum(-1, keepdims=True),
        )
        gain = share * share * inverse(norm)
        better = gain > best
        best, chosen = np.where(better, gain, best), np.where(better, share * inverse(norm), chosen)
    return x * inverse(chosen), chosen, None


def power(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as the MX formats: a power of two.

    OCP's "floor" clips a magnitude by up to 25% (e2m1) or 12.5% (e4m3); MLX's "ceil" never clips.
    """
    top = magnitude(x)
    if format.exponent == "ceil":
        exponent = np.where(top > 0, exponent_above(top / largest_code(format)), 0)
    else:
        _, exponent = np.frexp(top)
        _, own = np.frexp(largest_code(format))
        exponent = np.where(top > 0, exponent - own, -127)
    scale = np.ldexp(np.float32(1), exponent.clip(-127, 127)).astype(np.float32)
    return x / scale, scale, None


def blocks16(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as NVFP4: e4m3(amax / 6 / tensor-wide scale)."""
    scale = round_to(
        np.minimum(magnitude(x) / largest_code(format) / tensor_scale, np.float32(E4M3.limits[1])), E4M3.dtype
    )
    unit = scale * tensor_scale
    return np.divide(x, unit, out=np.zeros_like(x), where=unit != 0), scale, None


def vllm_token(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as vLLM's formats per token and head: at least 1e-6. The quotient is x * (1 / scale)."""
    scale = np.maximum(magnitude(x) / largest_code(format), np.float32(1e-6))
    return x * (np.float32(1) / scale), scale, None


def deepseek(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as DeepSeek: at least the smallest normal float32; powers of two are at least 2**-13."""
    scale = magnitude(x) / largest_code(format)
    if format.exponent:
        scale = np.ldexp(np.float32(1), exponent_above(np.maximum(scale, LEAST_POWER))).astype(np.float32)
    scale = np.maximum(scale, TINY)
    return x / scale, scale, None


def zero(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as LMDeploy, with a zero point in units of codes that is not rounded.

    If all numbers are equal, the scale is 1 and the zero point is -x, where LMDeploy stores NaN or infinity.
    """
    low, high = extremes(x)
    scale = (high - low) / largest_code(format)
    scale = np.where(scale > 0, scale, np.float32(1))
    point = -low / scale
    return x / scale + point, scale, point


def shifted(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as OpenVINO, with a zero point in units of codes. The scale of equal numbers is 1e-4."""
    (low, high), most = extremes(x), largest_code(format)
    scale = (high - low) * (1 / most) if format.per == "channel" else (high - low) / most
    scale = np.where(scale == 0, np.float32(1e-4), scale)
    point = -low / scale
    code = x * np.float64(inverse(scale)) + point  # rounded once
    return code.astype(np.float32), scale, point


def mlx_affine(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as MLX's affine formats: the extreme of larger magnitude is represented exactly.

    If the maximum has the larger magnitude, the scale is negative.
    """
    low, high = extremes(x)
    below = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / largest_code(format), np.float32(1e-7))
    scale, end = np.where(below, scale, -scale), np.where(below, low, high)
    code = np.rint(end / scale)
    scale = np.where(code != 0, end / np.where(code != 0, code, np.float32(1)), scale)
    bias = np.where(code != 0, end, np.float32(0))
    return (x - bias) / scale, scale, bias


def kivi(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as KIVI: (max - min) / largest code. Equal numbers have code 0."""
    low, high = extremes(x)
    scale = (high - low) / largest_code(format)
    return np.divide(x - low, scale, out=np.zeros_like(x), where=scale != 0), scale, low


def length(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as TurboQuant's keys: the scale is the row's length; the ratio has a mean square of 1."""
    size = np.sqrt(np.square(x, dtype=np.float64).sum(-1, keepdims=True)).astype(np.float32)
    return x * inverse(size) * np.sqrt(np.float32(x.shape[-1])), size, None


def ranged(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> Scaled:
    """Scale as TurboQuant's values: (max - min) / largest code, at least 1e-8."""
    low, high = extremes(x)
    scale = np.maximum((high - low) / largest_code(format), np.float32(1e-8))
    return (x - low) / scale, scale, low


def calibrate_scale(x: Array, format: Format) -> Array:
    """Return amax / largest code per group, [..., 1], or 1 for groups of zeros."""
    scale = magnitude(x) / largest_code(format)
    return np.where(scale > 0, scale, np.float32(1))


RULES = {
    rule.__name__: rule
    for rule in (
        pmx, kvkit_minimum, largest, signed, ggml_minimum, searched, power, blocks16, vllm_token, deepseek,
        zero, shifted, mlx_affine, kivi, length, ranged,
    )
}  # fmt: skip


def nearest_codes(x: Array, table: Array, upper: bool = False) -> Array:
    """Return the index of the table entry nearest to each x; ties take the lower, or higher if `upper`."""
    ascending, places = np.unique(table, return_index=True)  # of the codes of +0 and -0, the first
    right = np.searchsorted(ascending, x).clip(1, len(ascending) - 1)
    below, above = x - ascending[right - 1], ascending[right] - x
    low, high = places[right - 1], places[right]
    tie = np.maximum(low, high) if upper else np.minimum(low, high)
    nearer: Array = np.where(below == above, tie, np.where(below < above, low, high))
    return nearer


@cache
def codes_by_upper_half(element: Element) -> Array:
    """Return a lookup table from the upper 16 bits of a float32 to its code, uint8 [2^16].

    Callers set the last of the 16 bits if any lower bit is set (a sticky bit). The 16 bits hold 7 bits of
    the mantissa, a code at most 3. So a number just above a tie differs from the tie in the sticky bit, and
    rounding by the table equals rounding the float32.
    """
    x = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    low, high = map(np.float32, element.limits)
    codes = np.clip(x, low, high).astype(element.dtype).view(np.uint8)
    return np.where(np.isnan(x), np.signbit(x) * np.uint8(128) + np.uint8(127), codes)


def round_to_floats(x: Array, element: Element) -> Array:
    """Round to the nearest codes of a float element, ties to the even code. Larger numbers saturate."""
    if element.bits == 8:
        bits = np.ascontiguousarray(x).view(np.uint32)
        codes: Array = codes_by_upper_half(element)[bits >> 16 | (bits & 0xFFFF != 0)]
        return codes
    table = element.table[: len(element.table) // 2]
    middles = (table[1:] + table[:-1]) / 2
    below, above = (np.searchsorted(middles, np.abs(x), side) for side in ("left", "right"))
    even: Array = np.where(below % 2, above, below) + np.signbit(x) * len(table)
    return even


def round_codes(ratio: Array, format: Format) -> Array:
    """Round quotients to codes; return their bits in uint8."""
    code, rounding = format.code, format.rounding
    if rounding in ("lower", "upper"):
        return nearest_codes(ratio, code.table, rounding == "upper").astype(np.uint8)
    if code.significant:
        return round_to_floats(ratio, code).astype(np.uint8)
    low, high = code.limits
    stored_from_zero = bool(code.numbers)  # as in q4_0: bits of 0 stand for the least code
    origin = low if stored_from_zero else 0
    if rounding == "up":
        whole = np.trunc(ratio + np.float32(0.5 - origin)) + np.float32(origin)
    elif rounding == "away":
        size = np.abs(ratio)
        whole = np.floor(size)
        whole = np.copysign(whole + (size - whole >= np.float32(0.5)), ratio)
    else:
        whole = np.trunc(ratio) if rounding == "trunc" else np.rint(ratio)
    return ((whole.clip(low, high) - origin).astype(np.int32) & ((1 << code.bits) - 1)).astype(np.uint8)
