"""Scalar numerics, written once for both targets: float bits, rounding, quantization codes, nibbles.

Values are float32; 16-bit floats are uint16 bits until they are widened. Formulas: PMX specification,
KeyValueCache; `element` is the name of a float format and always a constant of the kernel.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvkit.formats import SMALLEST_SCALE
from kvkit.jit import shared

ROUNDER = 1.5 * 2.0**23  # float32 numbers of this size are integers: adding it rounds, ties to even
EPS32, EPS16, EPSBF = (np.float32(SMALLEST_SCALE[name]) for name in ("float32", "float16", "bfloat16"))


def _cast(result, argument, build):
    """An intrinsic of one LLVM instruction or two."""

    @intrinsic
    def cast(typingctx, x):
        def codegen(context, builder, signature, values):
            return build(builder, values[0])

        return result(argument), codegen

    return cast


F16, F32, I16, I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
_widen_half = _cast(types.float32, types.uint16, lambda b, x: b.fpext(b.bitcast(x, F16), F32))
_narrow_half = _cast(types.uint16, types.float32, lambda b, x: b.bitcast(b.fptrunc(x, F16), I16))
_bits_of = _cast(types.uint32, types.float32, lambda b, x: b.bitcast(x, I32))
_float_of = _cast(types.float32, types.uint32, lambda b, x: b.bitcast(x, F32))


# The CUDA simulator calls helpers from Python, which intrinsics do not allow: each has a helper round it.


@shared
def half_to_float(bits):
    return _widen_half(bits)


@shared
def float_to_half(x):
    return _narrow_half(x)


@shared
def bits_of(x):
    return _bits_of(x)


@shared
def float_of(bits):
    return _float_of(bits)


@shared
def bfloat16_to_float(bits):
    return float_of(np.uint32(bits) << np.uint32(16))


@shared
def float_to_bfloat16(x):
    bits = bits_of(x)
    high = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded if x == x else high | np.uint32(0x40))


@shared
def round_to(element, x):
    if element == "float16":
        return half_to_float(float_to_half(x))
    if element == "bfloat16":
        return bfloat16_to_float(float_to_bfloat16(x))
    return x


@shared
def group_scale(element, largest, qmax):
    """The scale of a group whose largest magnitude is `largest`."""
    scale = round_to(element, largest / np.float32(qmax))
    smallest = EPS16 if element == "float16" else (EPSBF if element == "bfloat16" else EPS32)
    return max(scale, smallest)


@shared
def quantize(element, x, scale, qmax):
    """The code of x: the quotient is rounded to the element format first, then to an integer."""
    ratio = round_to(element, x / scale)
    ratio = min(max(ratio, np.float32(-qmax)), np.float32(qmax))
    return np.int8(bits_of(ratio + np.float32(ROUNDER)) & np.uint32(0xFF))


@shared
def dequantize(element, scale_element, code, cell):
    return round_to(element, round_to(scale_element, np.float32(code) * cell))


@shared
def pack_nibbles(low, high):
    return np.int8((low & 15) | ((high & 15) << 4))


@shared
def low_nibble(byte):
    return np.int8(np.int8(byte << 4) >> 4)


@shared
def high_nibble(byte):
    return np.int8(byte >> 4)
