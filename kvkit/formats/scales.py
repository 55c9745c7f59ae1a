"""Compute a group's scale from its numbers, by the rule of each engine, and round to codes.

Each rule (named in `Format.rule`) takes groups x, float32 [..., group], the format, the dtype of the data,
and the tensor-wide scale. It returns

    ratio     [..., group]  codes before rounding: x / scale, (x - minimum) / scale or x / scale + zero
    scale     [..., 1]      the scale in float32, before it is rounded to the type that stores it
    offset    [..., 1]      the minimum or the zero point; None without one

amax is the largest magnitude of a group. For example, `ggml_largest` of [-1, 0.5, 2] for int8: the scale is
amax / 127 = 2 / 127, the ratio is [-63.5, 31.75, 127].
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kvkit.formats.elements import E4M3, Element
from kvkit.formats.known import IQ4, VLLM, Format
from kvkit.typed import Array

ScaledGroups = tuple[Array, Array, Array | None]  # ratio, scale, offset
ScaleRule = Callable[[Array, Format, DTypeLike, Any], ScaledGroups]
SCALE_RULES: dict[str, ScaleRule] = {}

SMALLEST_SCALE = np.float32(1e-5)  # PMX: the smallest scale
TINY = np.finfo(np.float32).tiny  # DeepSeek: the smallest scale
LEAST_POWER = np.float32(1e-4)  # DeepSeek: the smallest scale (FlashMLA) or amax (vLLM) before a power of two


def scale_rule(rule: ScaleRule) -> ScaleRule:
    """Decorate a rule, whose name is the one in `Format.rule`."""
    SCALE_RULES[rule.__name__] = rule
    return rule


def round_to(x: Array | np.float32, dtype: DTypeLike) -> Array:
    """Round to a dtype; return float32."""
    rounded: Array = x.astype(dtype).astype(np.float32)
    return rounded


def reduced(rule: np.ufunc, x: Array) -> Array:
    """Return the minimum or maximum of each group [..., n], as [..., 1]."""
    while x.shape[-1] and not x.shape[-1] % 2:  # by halves: numpy is slow along short axes
        x = rule(x[..., ::2], x[..., 1::2])
    result: Array = rule.reduce(x, -1, keepdims=True)
    return result


def magnitude(x: Array) -> Array:
    """Return amax of each group; 0 for no numbers."""
    return reduced(np.maximum, np.abs(x)) if x.shape[-1] else np.zeros((*x.shape[:-1], 1), x.dtype)


def extremes(x: Array) -> tuple[Array, Array]:
    """Return (minimum, maximum) of each group."""
    x = x if x.shape[-1] else np.zeros((*x.shape[:-1], 1), x.dtype)  # no tokens: the extremes are 0
    return reduced(np.minimum, x), reduced(np.maximum, x)


def inverse(scale: Array) -> Array:
    """Return 1 / scale, and 0 where a scale is 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def exponent_above(x: Array) -> Array:
    """Return the exponent of the smallest power of two that is not below x."""
    fraction, exponent = np.frexp(x)
    above: Array = exponent - (fraction == np.float32(0.5))
    return above


def largest_code(format: Format) -> np.float32:
    """Return the largest number of the format's code table."""
    return np.float32(format.code.limits[1])


@scale_rule
def pmx(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as PMX: max(amax / largest code, 1e-5). Scale and quotient are rounded to the data's dtype."""
    scale = np.maximum(round_to(magnitude(x) / largest_code(format), dtype), round_to(SMALLEST_SCALE, dtype))
    return round_to(x / scale, dtype), scale, None


@scale_rule
def kvkit_minimum(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as kvkit's caches: minimum and scale (at least 1e-5) are rounded to their dtype before use."""
    (low, high), stored = extremes(x), format.scale_type().dtype
    low = round_to(low, stored) + np.float32(0)  # -0.0 becomes +0.0
    scale = round_to(np.maximum((high - low) / largest_code(format), SMALLEST_SCALE), stored)
    return (x - low) / scale, scale, low


@scale_rule
def ggml_largest(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as ggml's q8_0: amax / largest code. Codes use the scale before it is rounded."""
    scale = magnitude(x) / largest_code(format)
    return x * inverse(scale), scale, None


@scale_rule
def ggml_signed(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as ggml's q4_0 and q5_0: the element of largest magnitude, with its sign, gets the least code."""
    at = np.abs(x).argmax(-1)[..., None]
    scale = np.take_along_axis(x, at, -1) / np.float32(format.code.limits[0])
    return x * inverse(scale), scale, None


@scale_rule
def ggml_minimum(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as ggml's q4_1 and q5_1: (max - min) / largest code, with the minimum as offset."""
    low, high = extremes(x)
    scale = (high - low) / largest_code(format)
    return (x - low) * inverse(scale), scale, low


@scale_rule
def ggml_searched(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as ggml's iq4_nl: the best of 16 scales by the squared error, weighted with w = x * x.

    A trial scales x so that its element of largest magnitude becomes 127, or one of -134 to -120, and finds
    the codes c. For these the best scale is s = sum(w c x) / sum(w c c), and the weighted squared error of
    s * c is sum(w x x) - gain, with gain = sum(w c x)**2 / sum(w c c).
    """
    table = format.code.table
    # The element of IQ4 nearest to each multiple of 1/2; None for another table
    numbers = table[codes_of_halves(False)] if is_iq4(table) else None
    top = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best_gain = np.full_like(top, -1)
    scale = np.full_like(top, np.inf)  # makes all codes 0; it stays if all gains are NaN
    w, inverse_top = x * x, inverse(top)
    for end in (-table[0], *(table[0] + np.float32(step) for step in range(-7, 8))):
        if numbers is None:
            c = table[nearest_codes(x * (end * inverse_top), table)]
        else:
            c = numbers[index_of_halves(x * (2 * end * inverse_top), False)]
        wc = w * c
        wcx, wcc = (np.einsum("...i,...i->...", wc, other)[..., None] for other in (x, c))
        gain = wcx * wcx * inverse(wcc)
        better = gain > best_gain
        best_gain, scale = np.where(better, gain, best_gain), np.where(better, wcx * inverse(wcc), scale)
    return x * inverse(scale), scale, None


@scale_rule
def mx_power(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as the MX formats: a power of two.

    OCP's "floor" clips a magnitude by up to 25% (e2m1) or 12.5% (e4m3); MLX's "ceil" never clips.
    """
    amax = magnitude(x)
    if format.exponent == "ceil":
        exponent = np.where(amax > 0, exponent_above(amax / largest_code(format)), 0)
    else:
        exponents = np.frexp(amax)[1] - np.frexp(largest_code(format))[1]  # floors of log2, plus 1
        exponent = np.where(amax > 0, exponents, -127)
    scale = np.ldexp(np.float32(1), exponent.clip(-127, 127)).astype(np.float32)
    return x / scale, scale, None


@scale_rule
def nvfp4(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as NVFP4: e4m3(amax / 6 / tensor-wide scale)."""
    scale = magnitude(x) / largest_code(format) / tensor_scale
    scale = round_to(np.minimum(scale, np.float32(E4M3.limits[1])), E4M3.dtype)
    unit = scale * tensor_scale
    return np.divide(x, unit, out=np.zeros_like(x), where=unit != 0), scale, None


@scale_rule
def vllm_token(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as vLLM's formats per token and head: at least 1e-6. The quotient is x * (1 / scale)."""
    scale = np.maximum(magnitude(x) / largest_code(format), np.float32(1e-6))
    return x * (np.float32(1) / scale), scale, None


@scale_rule
def vllm_int4(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as vLLM's 4 bits per token and head, whose zero point is in the lowest 4 bits of the scale."""
    (low, high), top_code = extremes(x), largest_code(format)
    scale = np.maximum((high - low) / top_code, np.float32(1e-6))
    zero = np.clip(half_away(-low / scale), 0, top_code)
    ratio = x * (np.float32(1) / scale) + zero
    stored = (scale.view(np.uint32) & np.uint32(0xFFFFFFF0) | zero.astype(np.uint32)).view(np.float32)
    return ratio, stored, zero


def zero_in_scale(stored: Array) -> tuple[Array, Array]:
    """Return (scales without their lowest 4 bits, zero points that these bits are) of `vllm_int4`."""
    bits = np.ascontiguousarray(stored, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFFFF0)).view(np.float32), (bits & np.uint32(15)).astype(np.float32)


@scale_rule
def deepseek(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as DeepSeek: at least the smallest normal float32.

    Powers of two are at least 2**-13 in FlashMLA: 1e-4, rounded up. In vLLM amax is at least 1e-4, so they
    are at least 2**-22.
    """
    amax = magnitude(x)
    if format.exponent == VLLM:
        amax = np.maximum(amax, LEAST_POWER)
    scale = amax / largest_code(format)
    if format.exponent == VLLM:
        scale = np.ldexp(np.float32(1), exponent_above(scale)).astype(np.float32)
    elif format.exponent:
        scale = np.ldexp(np.float32(1), exponent_above(np.maximum(scale, LEAST_POWER))).astype(np.float32)
    scale = np.maximum(scale, TINY)
    return x / scale, scale, None


@scale_rule
def lmdeploy(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as LMDeploy, with a zero point in units of codes that is not rounded.

    If all numbers are equal, the scale is 1 and the zero point is -x, where LMDeploy stores NaN or infinity.
    """
    low, high = extremes(x)
    scale = (high - low) / largest_code(format)
    scale = np.where(scale > 0, scale, np.float32(1))
    zero = -low / scale
    return x / scale + zero, scale, zero


@scale_rule
def openvino(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as OpenVINO, with a zero point in units of codes. The scale of equal numbers is 1e-4."""
    (low, high), top_code = extremes(x), largest_code(format)
    # OpenVINO multiplies keys by the reciprocal, but divides values: results differ in the last bit.
    scale = (high - low) * (1 / top_code) if format.per == "channel" else (high - low) / top_code
    scale = np.where(scale == 0, np.float32(1e-4), scale)
    zero = -low / scale
    ratio = x * np.float64(inverse(scale)) + zero  # in float64, so that float32 rounds once, as an FMA does
    return ratio.astype(np.float32), scale, zero


@scale_rule
def mlx_affine(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as MLX's affine formats: the extreme of larger magnitude, `end`, has code 0 and is the minimum.

    If that is the maximum, the scale is negative. The scale is changed a little, so that a whole number of
    steps leads from `end` to 0, and 0 is exact too. If `end` is below half a step, the minimum is 0 instead.
    """
    low, high = extremes(x)
    low_is_end = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / largest_code(format), np.float32(1e-7))
    scale, end = np.where(low_is_end, scale, -scale), np.where(low_is_end, low, high)
    steps = np.rint(end / scale)
    scale = np.where(steps != 0, end / np.where(steps != 0, steps, np.float32(1)), scale)
    minimum = np.where(steps != 0, end, np.float32(0))
    return (x - minimum) / scale, scale, minimum


@scale_rule
def kivi(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as KIVI: (max - min) / largest code. Equal numbers have code 0."""
    low, high = extremes(x)
    scale = (high - low) / largest_code(format)
    return np.divide(x - low, scale, out=np.zeros_like(x), where=scale != 0), scale, low


@scale_rule
def turbo_key(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as TurboQuant's keys: the scale is the row's length; the ratio has a mean square of 1."""
    length = np.sqrt(np.square(x, dtype=np.float64).sum(-1, keepdims=True)).astype(np.float32)
    return x * inverse(length) * np.sqrt(np.float32(x.shape[-1])), length, None


@scale_rule
def turbo_value(x: Array, format: Format, dtype: DTypeLike, tensor_scale: Any) -> ScaledGroups:
    """Scale as TurboQuant's values: (max - min) / largest code, at least 1e-8."""
    low, high = extremes(x)
    scale = np.maximum((high - low) / largest_code(format), np.float32(1e-8))
    return (x - low) / scale, scale, low


def calibrate_scale(x: Array, format: Format) -> Array:
    """Return amax / largest code per group, [..., 1], or 1 for groups of zeros."""
    scale = magnitude(x) / largest_code(format)
    return np.where(scale > 0, scale, np.float32(1))


def nearest_codes(x: Array, table: Array, upper: bool = False) -> Array:
    """Return the index of the table entry nearest to each x; ties take the lower, or higher if `upper`.

    Ties of the integers of `IQ4` are multiples of 1/2, so all numbers between two multiples have the code of
    one of them: of the lower one if ties take the higher code. A table has these codes.
    """
    if is_iq4(table):
        return codes_of_halves(upper)[index_of_halves(np.multiply(x, 2, dtype=np.float32), upper)]
    return codes_by_distance(x, table, upper)


def is_iq4(table: Array) -> bool:
    """Return whether a table of codes is that of IQ4, whose codes another table finds."""
    return np.array_equal(table, IQ4.table)


def index_of_halves(doubled: Array, upper: bool) -> Array:
    """Return the index in `codes_of_halves` of each x, from 2 x, which is overwritten."""
    low, high = 2 * IQ4.table[0], 2 * IQ4.table[-1]
    (np.floor if upper else np.ceil)(doubled, out=doubled)
    np.fmax(np.fmin(doubled, high, out=doubled), low, out=doubled)  # NaN: the last code
    doubled -= low
    return doubled.astype(np.int16)


@cache
def codes_of_halves(upper: bool) -> Array:
    """Return the code of IQ4 nearest to each multiple of 1/2, from its first number to the last."""
    table = IQ4.table
    halves = np.arange(2 * table[0], 2 * table[-1] + 1, dtype=np.float32) / 2
    return codes_by_distance(halves, table, upper).astype(np.uint8)


def codes_by_distance(x: Array, table: Array, upper: bool) -> Array:
    """Return the codes of `nearest_codes` by the distances to both neighbours."""
    ascending, codes = np.unique(table, return_index=True)  # if +0 and -0 have codes, the first of them
    right = np.searchsorted(ascending, x).clip(1, len(ascending) - 1)
    to_low, to_high = x - ascending[right - 1], ascending[right] - x  # the distances to both neighbours
    low, high = codes[right - 1], codes[right]
    tie = np.maximum(low, high) if upper else np.minimum(low, high)
    nearest: Array = np.where(to_low == to_high, tie, np.where(to_low < to_high, low, high))
    return nearest


@cache
def codes_by_upper_half(element: Element) -> Array:
    """Return a lookup table from the upper half of a float32's bits to its code, uint8 [2^16].

        float32   s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
        index     s eeeeeeee mmmmmmM                    M: set if it, or any bit after it, is set

    A code has at most 3 bits of the mantissa. So a number just above a tie has another index than the tie,
    and rounding by the table equals rounding the float32.
    """
    x = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    if element.bits < 8:
        magnitudes = element.table[: len(element.table) // 2]  # codes of negative numbers follow
        ties = (magnitudes[1:] + magnitudes[:-1]) / 2
        below, above = (np.searchsorted(ties, np.abs(x), side) for side in ("left", "right"))
        codes = np.where(below % 2, above, below)  # at a tie they differ: the even one
        return np.asarray(codes + np.signbit(x) * len(magnitudes), np.uint8)
    low, high = map(np.float32, element.limits)
    codes = np.clip(x, low, high).astype(element.dtype).view(np.uint8)
    return np.where(np.isnan(x), np.signbit(x) * np.uint8(128) + np.uint8(127), codes)


def half_away(ratio: Array) -> Array:
    """Round to integers, ties away from zero."""
    size = np.abs(ratio)
    whole = np.floor(size)
    rounded: Array = np.copysign(whole + (size - whole >= np.float32(0.5)), ratio)
    return rounded


def round_codes(ratio: Array, format: Format) -> Array:
    """Round quotients by `Format.rounding` to codes; return their bits in uint8."""
    code, rounding = format.code, format.rounding
    if rounding in ("lower", "upper"):
        return nearest_codes(ratio, code.table, rounding == "upper").astype(np.uint8)
    if code.significant:
        bits = np.ascontiguousarray(ratio).view(np.uint32)
        codes: Array = codes_by_upper_half(code)[bits >> 16 | (bits & 0xFFFF != 0)]
        return codes
    low, high = code.limits
    # Elements with a list of numbers store code - least code: q4_0 stores -8..7 as 0..15. Others store the
    # code itself, in two's complement.
    least = low if code.numbers else 0
    if rounding == "up":
        rounded = np.trunc(ratio + np.float32(0.5 - least)) + np.float32(least)
    elif rounding == "away":
        rounded = half_away(ratio)
    else:
        rounded = np.trunc(ratio) if rounding == "trunc" else np.rint(ratio)
    return ((rounded.clip(low, high) - least).astype(np.int32) & ((1 << code.bits) - 1)).astype(np.uint8)
