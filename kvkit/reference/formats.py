"""Define cache formats by plain loops over lists of float32, from numbers to codes, bytes and scales."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np

F32, F16 = np.float32, np.float16
Floats = Any  # a list or an array of float32


# Code tables


def float_of(code: int, exponent_bits: int, fraction_bits: int, bias: int) -> float:
    """Return the finite number of a float's code, whose bits are sign, exponent and fraction."""
    fraction, code = code % 2**fraction_bits, code // 2**fraction_bits
    exponent, sign = code % 2**exponent_bits, code // 2**exponent_bits
    size = fraction * 2.0 ** (1 - bias - fraction_bits)
    if exponent:
        size = (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)
    return math.copysign(size, -1.0 if sign else 1.0)


TABLES: dict[str, list[Any]] = {
    "e4m3": [math.nan if code % 128 == 127 else float_of(code, 4, 3, 7) for code in range(256)],
    "e5m2": [
        (math.nan if code % 4 else math.copysign(math.inf, 127.5 - code)) if code % 128 >= 124
        else float_of(code, 5, 2, 15)
        for code in range(256)
    ],
    "e2m1": [float_of(code, 2, 1, 1) for code in range(16)],
    "e8m0": [2.0 ** (code - 127) for code in range(255)] + [math.nan],
    "iq4": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}  # fmt: skip


def float_code(x: Any, table: Floats) -> int:
    """Return the code of the nearest finite number in a table of floats; a tie gives the even code."""
    half = len(table) // 2
    sign, size = half if math.copysign(1, x) < 0 else 0, abs(float(x))
    if math.isnan(x):
        return sign + 127
    finite = [code for code in range(half) if math.isfinite(table[code])]
    if size > table[finite[-1]]:
        return sign + finite[-1]
    return sign + min(finite, key=lambda code: (abs(table[code] - size), code % 2))


def lower_code(x: Any, table: Floats) -> int:
    """Return the code of the nearest number of a table; a tie gives the lower code."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - float(x)), code))


def round_half_away(x: Any) -> int:
    """Round to the nearest integer, a half away from zero."""
    return int(math.copysign(math.floor(Fraction(abs(float(x))) + Fraction(1, 2)), x))


def clamp(x: int, low: int, high: int) -> int:
    """Return the number in low..high that is nearest to x."""
    return min(max(x, low), high)


# Bytes


def little_endian(number: Any, size: int) -> list[int]:
    """Return the bytes of an integer, the lowest first."""
    return list(int(number).to_bytes(size, "little"))


def bits16(x: Any) -> list[int]:
    """Return the bytes of x as float16."""
    return list(np.asarray(x, F16).tobytes())


def bits32(x: Any) -> list[int]:
    """Return the bytes of x as float32."""
    return list(np.asarray(x, F32).tobytes())


def pack_halves(codes: list[int]) -> list[int]:
    """Pack codes of 4 bits: the first half in low nibbles, the second in high ones."""
    half = len(codes) // 2
    return [codes[i] + 16 * codes[i + half] for i in range(half)]


def pack_low_first(codes: list[int], bits: int) -> list[int]:
    """Pack codes, the first one in the lowest bits."""
    joined = sum(code << bits * i for i, code in enumerate(codes))
    return little_endian(joined, len(codes) * bits // 8)


# Blocks of ggml: 32 numbers to bytes


def inverse(d: Any) -> Any:
    """Return 1 / d, or 0 for 0."""
    return F32(0) if d == 0 else F32(1) / d


def q8_0(x: Floats) -> list[int]:
    """Return ggml's block q8_0: a scale, then codes of 8 bits."""
    d = max(abs(v) for v in x) / F32(127)
    return bits16(d) + [round_half_away(v * inverse(d)) % 256 for v in x]


def q4_0(x: Floats) -> list[int]:
    """Return ggml's block q4_0: a scale with the sign of minus the largest number, then codes."""
    d = max(x, key=abs) / F32(-8)
    return bits16(d) + pack_halves([min(15, int(v * inverse(d) + F32(8.5))) for v in x])


def q4_1(x: Floats) -> list[int]:
    """Return ggml's block q4_1: a scale, the minimum, then codes of 4 bits."""
    d = (max(x) - min(x)) / F32(15)
    codes = [min(15, int((v - min(x)) * inverse(d) + F32(0.5))) for v in x]
    return bits16(d) + bits16(min(x)) + pack_halves(codes)


def q5_0(x: Floats) -> list[int]:
    """Return ggml's block q5_0: a scale (as for q4_0), fifth bits of the codes, then the low four."""
    d = max(x, key=abs) / F32(-16)
    codes = [min(31, int(v * inverse(d) + F32(16.5))) for v in x]
    high = pack_low_first([code // 16 for code in codes], 1)
    return bits16(d) + high + pack_halves([code % 16 for code in codes])


def q5_1(x: Floats) -> list[int]:
    """Return ggml's block q5_1: a scale, the minimum, the fifth bits, then the low four."""
    d = (max(x) - min(x)) / F32(31)
    codes = [min(31, int((v - min(x)) * inverse(d) + F32(0.5))) for v in x]
    high = pack_low_first([code // 16 for code in codes], 1)
    return bits16(d) + bits16(min(x)) + high + pack_halves([code % 16 for code in codes])


def exponent_floor(amax: Any, largest_exponent: int) -> int:
    """Return the exponent byte of a group: the exponent of amax less the largest exponent of the codes."""
    if amax == 0:
        return 0
    return clamp(math.floor(math.log2(Fraction(float(amax)))) - largest_exponent + 127, 0, 254)


def ggml_mxfp4(x: Floats) -> list[int]:
    """Return ggml's block of MXFP4: an exponent byte, then codes of E2M1."""
    e = exponent_floor(max(abs(v) for v in x), 2)
    unit = 2.0 ** (e - 127)
    return [e, *pack_halves([lower_code(float(v) / unit, TABLES["e2m1"]) for v in x])]


# Formats of other projects. If scales are stored apart: (codes in bytes, scale, zero or minimum)


def token_head(x: Floats, code: str, rounding: str) -> list[int]:
    """Return vLLM's row of a token and head: codes, then the scale."""
    scale = max(max(abs(v) for v in x) / F32(127 if code == "int8" else 448), F32(1e-6))
    numbers = [v * (F32(1) / scale) for v in x]
    if code == "int8":
        to_integer: Any = {"away": round_half_away, "trunc": int, "even": round}[rounding]
        codes = [clamp(to_integer(v), -128, 127) % 256 for v in numbers]
    else:
        codes = [float_code(v, TABLES["e4m3"]) for v in numbers]
    return codes + bits32(scale)


def int4_token_head(x: Floats) -> list[int]:
    """Return vLLM's row of a rotated token and head: codes, then the scale with the zero in its last bits."""
    scale = max((max(x) - min(x)) / F32(15), F32(1e-6))
    zero = clamp(round_half_away(-min(x) / scale), 0, 15)
    codes = [clamp(round_half_away(v * (F32(1) / scale) + F32(zero)), 0, 15) for v in x]
    return [*pack_low_first(codes, 4), bits32(scale)[0] & 0xF0 | zero, *bits32(scale)[1:]]


def lmdeploy(x: Floats, bits: int) -> Any:
    """Return LMDeploy's codes, scale and zero; None if all numbers are equal."""
    most = F32(2**bits - 1)
    scale = (max(x) - min(x)) / most
    if scale == 0:
        return None
    zero = -min(x) / scale
    codes = [clamp(int(v / scale + zero + F32(0.5)), 0, 2**bits - 1) for v in x]
    return codes if bits == 8 else pack_halves(codes), scale, zero


def openvino(x: Floats, bits: int, side: str) -> tuple[list[int], Any, Any]:
    """Return OpenVINO's codes, scale and zero."""
    span, most = max(x) - min(x), 2**bits - 1
    scale = (span * (F32(1) / F32(most)) if side == "key" else span / F32(most)) or F32(1e-4)
    zero = -min(x) / scale
    codes = [clamp(round(F32(float(v) * float(F32(1) / scale) + float(zero))), 0, most) for v in x]
    pairs = zip(codes[1::2], codes[::2], strict=True)  # the first of two codes is in the high nibble
    packed = codes if bits == 8 else [low + 16 * high for low, high in pairs]
    return packed, scale, zero


def mlx_affine(x: Floats, bits: int) -> tuple[list[int], Any, Any]:
    """Return MLX's codes, scale and bias."""
    most = 2**bits - 1
    low_is_larger = abs(min(x)) > abs(max(x))
    scale = max((max(x) - min(x)) / F32(most), F32(1e-7))
    scale, edge = (scale, min(x)) if low_is_larger else (-scale, max(x))
    bias, steps = F32(0), round(edge / scale)
    if steps:  # then a whole number of steps leads from the edge to 0
        scale, bias = edge / F32(steps), edge
    return pack_low_first([clamp(round((v - bias) / scale), 0, most) for v in x], bits), scale, bias


def kivi(x: Floats, bits: int) -> tuple[list[int], Any, Any]:
    """Return KIVI's codes, scale and minimum."""
    low, scale = min(x), (max(x) - min(x)) / F32(2**bits - 1)
    codes = [clamp(round((v - low) / scale), 0, 2**bits - 1) if scale else 0 for v in x]
    return pack_low_first(codes, bits), F16(scale), F16(low)


LEVELS = {  # {bits: the levels above 0, for normal numbers}
    3: (0.24498359, 0.75564550, 1.34318001, 2.15034955),
    4: (0.12842766, 0.38813779, 0.65687992, 0.94244824, 1.25625757, 1.61788176, 2.06844712, 2.73092222),
}


def turbo_key(x: Floats, bits: int) -> list[int]:
    """Return TurboQuant's row of a key: indices of the levels of its rotated elements, then its length."""
    levels = [F32(v) for v in (*(-level for level in LEVELS[bits][::-1]), *LEVELS[bits])]
    dim, root = len(x), F32(math.sqrt(len(x)))
    rotated = [  # by the Hadamard matrix, whose entry i, j is -1 to the number of bits that both have
        F32(sum((-1) ** (i & j).bit_count() * float(v) for j, v in enumerate(x))) * (F32(1) / root)
        for i in range(dim)
    ]
    length = F32(math.sqrt(sum(float(v) ** 2 for v in rotated)))
    scaled = [v * inverse(length) * root for v in rotated]
    codes = [sum(float(v) >= (a + b) / 2 for a, b in itertools.pairwise(map(float, levels))) for v in scaled]
    return pack_low_first(codes, bits) + bits16(length)


def turbo_value(x: Floats, bits: int) -> list[int]:
    """Return TurboQuant's row of a value: codes, scale and minimum."""
    low, most = min(x), 2**bits - 1
    scale = max((max(x) - low) / F32(most), F32(1e-8))
    codes = [clamp(int((v - low) / scale + F32(0.5)), 0, most) for v in x]
    return pack_low_first(codes, bits) + bits16(scale) + bits16(low)


def exponent_ceil(amax: Any, largest: int) -> int:
    """Return the smallest exponent byte with amax / 2^exponent within the range of the codes."""
    if amax == 0:
        return 127
    ratio, e = F32(amax) / F32(largest), -200  # below every exponent of float32
    while Fraction(2) ** e < Fraction(float(ratio)):
        e += 1
    return clamp(e + 127, 0, 254)


def mx(x: Floats, code: str, exponent: str, rounding: str = "even") -> tuple[list[int], int]:
    """Return (codes in bytes, exponent byte) of an MX block."""
    top, table = max(abs(v) for v in x), TABLES[code]
    if exponent == "floor":
        e = exponent_floor(top, 2 if code == "e2m1" else 8)
    else:
        e = exponent_ceil(top, 6 if code == "e2m1" else 448)
    find: Any = float_code if rounding == "even" else lower_code
    codes = [find(float(v) / 2.0 ** (e - 127), table) for v in x]
    return codes if code == "e4m3" else pack_low_first(codes, 4), e


def nvfp4(x: Floats, tensor_scale: Any, rounding: str = "even") -> tuple[list[int], int]:
    """Return (codes in bytes, scale in E4M3) of an NVFP4 block, with a tensor-wide scale."""
    scale = float_code(max(abs(v) for v in x) / F32(6) / F32(tensor_scale), TABLES["e4m3"])
    unit = F32(TABLES["e4m3"][scale]) * F32(tensor_scale)
    find: Any = float_code if rounding == "even" else lower_code
    return pack_low_first([find(v / unit, TABLES["e2m1"]) if unit else 0 for v in x], 4), scale


def ds_mla(x: Floats) -> list[int]:
    """Return DeepSeek's row for MLA: 512 codes in four groups, their scales, then 64 bfloat16 numbers."""
    codes: list[int] = []
    scales: list[int] = []
    for first in range(0, 512, 128):
        group = x[first : first + 128]
        scale = max(max(abs(v) for v in group) / F32(448), F32(2.0**-126))
        codes += [float_code(v / scale, TABLES["e4m3"]) for v in group]
        scales += bits32(scale)
    return codes + scales + [byte for v in x[512:] for byte in bfloat16(v)]


def bfloat16(x: Any) -> list[int]:
    """Return the bytes of x as bfloat16."""
    bits = int(np.asarray(x, F32).view(np.uint32))
    return little_endian((bits + 0x7FFF + (bits >> 16) % 2) >> 16, 2)
