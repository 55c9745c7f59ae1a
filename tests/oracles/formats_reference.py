"""Formulas of cache formats, transcribed as plain loops over lists of float32; nothing is checked."""

import math
from fractions import Fraction

import numpy as np

F32, F16 = np.float32, np.float16


# Code tables


def float_of(code, exponent_bits, fraction_bits, bias):
    """The finite number of a float's code: a sign, an exponent, a fraction."""
    fraction, code = code % 2**fraction_bits, code // 2**fraction_bits
    exponent, sign = code % 2**exponent_bits, code // 2**exponent_bits
    size = fraction * 2.0 ** (1 - bias - fraction_bits)
    if exponent:
        size = (1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias)
    return math.copysign(size, -1.0 if sign else 1.0)


TABLES = {
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


def float_code(x, table):
    """The code of the nearest finite number of a table with signs; half way the even code."""
    half = len(table) // 2
    sign, size = half if math.copysign(1, x) < 0 else 0, abs(float(x))
    if math.isnan(x):
        return sign + 127
    finite = [code for code in range(half) if math.isfinite(table[code])]
    if size > table[finite[-1]]:
        return sign + finite[-1]
    return sign + min(finite, key=lambda code: (abs(table[code] - size), code % 2))  # exact where it is near


def lower_code(x, table):
    """The code of the nearest number of a table, the first of them."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - float(x)), code))


def half_away(x):
    return int(math.copysign(math.floor(Fraction(abs(float(x))) + Fraction(1, 2)), x))


def clamp(x, low, high):
    return min(max(x, low), high)


# Bytes


def little(number, size):
    return list(int(number).to_bytes(size, "little"))


def bits16(x):
    return list(np.asarray(x, F16).tobytes())


def bits32(x):
    return list(np.asarray(x, F32).tobytes())


def halves(codes):
    """The first half in low nibbles, the second in high ones."""
    half = len(codes) // 2
    return [codes[i] + 16 * codes[i + half] for i in range(half)]


def low_first(codes, bits):
    whole = sum(code << bits * i for i, code in enumerate(codes))
    return little(whole, len(codes) * bits // 8)


# Blocks of ggml: 32 numbers to bytes


def inverse(d):
    return F32(0) if d == 0 else F32(1) / d


def q8_0(x):
    d = max(abs(v) for v in x) / F32(127)
    return bits16(d) + [half_away(v * inverse(d)) % 256 for v in x]


def q4_0(x):
    top = x[0]
    for v in x:
        if abs(v) > abs(top):
            top = v
    d = top / F32(-8)
    return bits16(d) + halves([min(15, int(v * inverse(d) + F32(8.5))) for v in x])


def q4_1(x):
    d = (max(x) - min(x)) / F32(15)
    return (
        bits16(d) + bits16(min(x)) + halves([min(15, int((v - min(x)) * inverse(d) + F32(0.5))) for v in x])
    )


def q5_1(x):
    d = (max(x) - min(x)) / F32(31)
    codes = [min(31, int((v - min(x)) * inverse(d) + F32(0.5))) for v in x]
    high = low_first([code // 16 for code in codes], 1)
    return bits16(d) + bits16(min(x)) + high + halves([code % 16 for code in codes])


def exponent_floor(top, largest_exponent):
    if top == 0:
        return 0
    return clamp(math.floor(math.log2(Fraction(float(top)))) - largest_exponent + 127, 0, 254)


def ggml_mxfp4(x):
    e = exponent_floor(max(abs(v) for v in x), 2)
    unit = 2.0 ** (e - 127)
    return [e, *halves([lower_code(float(v) / unit, TABLES["e2m1"]) for v in x])]


# What others write: lists of numbers to (codes in bytes, scale, what is beside it)


def token_head(x, code, rounding):
    """vLLM: the row with its scale behind."""
    scale = max(max(abs(v) for v in x) / F32(127 if code == "int8" else 448), F32(1e-6))
    numbers = [v * (F32(1) / scale) for v in x]
    if code == "int8":
        whole = {"trunc": int, "even": round}[rounding]
        codes = [clamp(whole(v), -128, 127) % 256 for v in numbers]
    else:
        codes = [float_code(v, TABLES["e4m3"]) for v in numbers]
    return codes + bits32(scale)


def lmdeploy(x, bits):
    most = F32(2**bits - 1)
    scale = (max(x) - min(x)) / most
    if scale == 0:
        return None
    zero = -min(x) / scale
    codes = [clamp(int(v / scale + zero + F32(0.5)), 0, 2**bits - 1) for v in x]
    return codes if bits == 8 else halves(codes), scale, zero


def mlx_affine(x, bits):
    most = 2**bits - 1
    below = abs(min(x)) > abs(max(x))
    scale = max((max(x) - min(x)) / F32(most), F32(1e-7))
    scale, edge = (scale, min(x)) if below else (-scale, max(x))
    bias, code = F32(0), round(edge / scale)
    if code:
        scale, bias = edge / F32(code), edge
    return low_first([clamp(round((v - bias) / scale), 0, most) for v in x], bits), scale, bias


def kivi(x, bits):
    low, scale = min(x), (max(x) - min(x)) / F32(2**bits - 1)
    codes = [clamp(round((v - low) / scale), 0, 2**bits - 1) if scale else 0 for v in x]
    return low_first(codes, bits), F16(scale), F16(low)


def exponent_ceil(top, largest):
    if top == 0:
        return 127
    ratio, e = F32(top) / F32(largest), -200
    while Fraction(2) ** e < Fraction(float(ratio)):
        e += 1
    return clamp(e + 127, 0, 254)


def mx(x, code, exponent, rounding="even"):
    """MX blocks: codes, and the exponent's byte."""
    top, table = max(abs(v) for v in x), TABLES[code]
    if exponent == "floor":
        e = exponent_floor(top, 2 if code == "e2m1" else 8)
    else:
        e = exponent_ceil(top, 6 if code == "e2m1" else 448)
    find = float_code if rounding == "even" else lower_code
    codes = [find(float(v) / 2.0 ** (e - 127), table) for v in x]
    return codes if code == "e4m3" else low_first(codes, 4), e


def nvfp4(x, whole, rounding="even"):
    scale = float_code(max(abs(v) for v in x) / F32(6) / F32(whole), TABLES["e4m3"])
    unit = F32(TABLES["e4m3"][scale]) * F32(whole)
    find = float_code if rounding == "even" else lower_code
    return low_first([find(v / unit, TABLES["e2m1"]) if unit else 0 for v in x], 4), scale


def ds_mla(x):
    """512 numbers in four groups, then 64 as bfloat16."""
    codes, scales = [], []
    for first in range(0, 512, 128):
        group = x[first : first + 128]
        scale = max(max(abs(v) for v in group) / F32(448), F32(2.0**-126))
        codes += [float_code(v / scale, TABLES["e4m3"]) for v in group]
        scales += bits32(scale)
    return codes + scales + [byte for v in x[512:] for byte in bfloat16(v)]


def bfloat16(x):
    bits = int(np.asarray(x, F32).view(np.uint32))
    return little((bits + 0x7FFF + (bits >> 16) % 2) >> 16, 2)
