"""Scalar numerics, written once for both targets: float bits, rounding, codes, nibbles; slopes and angles.

Values are float32; 16-bit floats are uint16 bits until they are widened. Formulas: PMX specification,
KeyValueCache, ALiBiSlope, RotaryPositionEmbedding; `element` is the name of a float format and always a
constant of the kernel.
"""

import functools
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvkit.formats.elements import BY_NAME, FLOATS
from kvkit.runtime.jit import shared

ROUNDER = 1.5 * 2.0**23  # float32 numbers of this size are integers: adding it rounds, ties to even
ROUNDER64 = 1.5 * 2.0**52  # the same for float64
PI_HIGH, PI_MIDDLE, PI_LOW = 3.141592651605606, 1.9841871548575973e-09, 4.503483548312435e-18  # their sum
TURNS = 2.0**24  # angles below it turn less than 2^23 times by pi
MINUS_INF, LOWEST = np.float32(-np.inf), np.finfo(np.float32).min
EPS32, EPS16, EPSBF = (np.float32(fmt.smallest_scale) for fmt in FLOATS)


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
def e5m2_to_float(bits):
    return half_to_float(np.uint16(np.uint16(bits) << np.uint16(8)))


@shared
def e4m3_to_float(bits):
    """The fraction and exponent of a half 256 times smaller; the code of NaN carries into its exponent."""
    size = (np.uint32(bits) & np.uint32(0x7F)) << np.uint32(7)
    nan = (size + np.uint32(0x80)) & np.uint32(0x4000)
    sign = (np.uint32(bits) & np.uint32(0x80)) << np.uint32(8)
    return half_to_float(np.uint16(size | nan | sign)) * np.float32(256)


def float_to_minifloat(name):
    """The formula for an element of 8 bits: rounded once, ties to even; what is too large saturates."""
    element = BY_NAME[name]
    fraction = element.significant - 1
    bias = (1 << 6 - fraction) - 1
    shift, rebias = np.uint32(23 - fraction), np.uint32(127 - bias << fraction)
    half, largest = np.uint32((1 << 22 - fraction) - 1), np.float32(element.limits[1])
    least = np.float32(2.0 ** (1 - bias))  # normal number
    rounder = np.float32(2.0 ** (24 - bias - fraction))  # its neighbours are a subnormal step apart
    rounder_bits = np.uint32(rounder.view(np.uint32))

    @shared
    def narrowed(x):
        size = min(abs(x), largest)
        bits = bits_of(size)
        code = ((bits + half + ((bits >> shift) & np.uint32(1))) >> shift) - rebias
        if size < least:
            code = bits_of(size + rounder) - rounder_bits
        code = code if x == x else np.uint32(0x7F)
        return np.uint8(code | ((bits_of(x) >> np.uint32(24)) & np.uint32(0x80)))

    return narrowed


float_to_e4m3, float_to_e5m2 = map(float_to_minifloat, ("e4m3", "e5m2"))


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
def largest_scale(cell, largest, limit):
    """The scale of numbers up to `largest`, as it is stored; 1 where that is 0."""
    scale = round_to(cell, largest / np.float32(limit))
    return scale if scale != np.float32(0) else np.float32(1)


@shared
def nearest_code(x):
    """The int8 next to x, half way the even one; NaN is the least."""
    x = x if x > np.float32(-128) else np.float32(-128)
    x = x if x < np.float32(127) else np.float32(127)
    return np.int8(bits_of(x + np.float32(ROUNDER)) & np.uint32(0xFF))


@shared
def inverse(scale):
    return np.float32(1) / scale if scale != np.float32(0) else np.float32(0)


@shared
def half_away(x):
    """The integer next to x, half way the one away from zero."""
    size = abs(x)
    whole = np.float32(int(size))
    whole += np.float32(1) if size - whole >= np.float32(0.5) else np.float32(0)
    return np.int32(whole if x > np.float32(0) else -whole)


@shared
def half_up(x, less):
    """The code, from 0 on, of a number of which `less` is code 0, half way the one above."""
    return np.int32(min(x + (np.float32(less) + np.float32(0.5)), np.float32(2 * less - 1)))


@shared
def pack_nibbles(low, high):
    return np.int8((low & 15) | ((high & 15) << 4))


@shared
def as_it_is(code):
    return code


@shared
def low_nibble(byte):
    return np.int8(np.int8(byte << 4) >> 4)


@shared
def high_nibble(byte):
    return np.int8(byte >> 4)


def widening(element):
    """The formula that makes a number of an element's word."""
    return globals()[BY_NAME[element].widen]


def narrowing(element):
    """The formula that makes an element's word of a float32."""
    return globals()[BY_NAME[element].narrow]


@shared
def weight(score, top):
    """Return exp(score - top), 0 for a score of -inf."""
    return np.float32(math.exp(score - max(top, LOWEST)))


@shared
def with_sink(top, total, sink):
    """Return (top, total) of a row with one more score, and the factor of its sums."""
    new = max(top, sink)
    shrink = weight(top, new)
    return new, total * shrink + weight(sink, new), shrink


@shared
def biased(score, bias):
    """A score and what is added to it: -inf hides a key, whatever its score."""
    return MINUS_INF if bias == MINUS_INF else score + bias


@shared
def capped(score, cap):
    return cap * np.float32(math.tanh(score / cap)) if cap != np.float32(0) else score


@shared
def with_total(total, top, part_total, part_top):
    """Rescale one split's softmax sum to the common maximum `top` and add it to a total."""
    return total + part_total * weight(part_top, top)


@shared
def share_of(part, total, grow):
    """Return the factor that gives sums their share of a total, times `grow`; 0 if the total is 0."""
    return part / total * grow if total != np.float32(0) else np.float32(0)


@shared
def log_sum(top, total):
    """The logarithm of a softmax denominator."""
    return top + np.float32(math.log(total)) if total != np.float32(0) else MINUS_INF


@shared
def alibi_slope(head, num_heads):
    """The factor of a head's distances; powers of two are exact."""
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    exponent = -8.0 * (head + 1) / power if head < power else -4.0 * (2 * (head - power) + 1) / power
    return np.float32(2.0**exponent)


@shared
def alibi_bias(slope, distance):
    return slope * np.float32(distance)


@shared
def product(a, b):
    """Rounded: on the CPU no product becomes part of a fused sum. Devices have one of their own."""
    return a * b


@functools.cache
def rotation(product):
    """(even, odd, cosine, sine) -> a pair turned, by products that are rounded."""

    @shared
    def rotated(even, odd, cosine, sine):
        return product(even, cosine) - product(odd, sine), product(odd, cosine) + product(even, sine)

    return rotated


@shared
def rotary_theta(theta, dims, end, longest, factor):
    """The base of a sequence's frequencies: larger ('dynamic' scaling) if it ends beyond `longest`."""
    stretched = theta
    if end > longest and dims > 2:  # two elements turn with frequency 1, whatever the base
        stretched = theta * (factor * end / longest - (factor - 1.0)) ** (dims / (dims - 2))
    return stretched


@shared
def rotary_frequency(theta, pair, dims):
    return np.float32(theta ** (-2.0 * pair / dims))


@shared
def rotary_angle(position, divisor, frequency):
    return np.float32(position) / np.float32(divisor) * frequency


@shared
def cos_sin(angle):
    """Both of a float32 angle below TURNS, to the nearest float32 but for rare ties; without branches.

    The angle less a multiple of pi lies within pi/2. A multiple below 2^23 times a part of pi with 29 bits
    is exact in float64, so no angle loses bits. The series stop where float64 cannot see the next term.
    """
    x = np.float64(angle)
    half_turns = (x * (1 / np.pi) + ROUNDER64) - ROUNDER64
    odd = half_turns - 2.0 * ((half_turns * 0.5 + ROUNDER64) - ROUNDER64)  # -1, 0 or 1
    sign = 1.0 - 2.0 * odd * odd
    x = ((x - half_turns * PI_HIGH) - half_turns * PI_MIDDLE) - half_turns * PI_LOW
    y = x * x
    cosine = 1 / 2432902008176640000 * y - 1 / 6402373705728000
    cosine = (cosine * y + 1 / 20922789888000) * y - 1 / 87178291200
    cosine = cosine * y + 1 / 479001600
    cosine = (cosine * y - 1 / 3628800) * y + 1 / 40320
    cosine = ((cosine * y - 1 / 720) * y + 1 / 24) * y - 0.5
    sine = 1 / 355687428096000 * y - 1 / 1307674368000
    sine = (sine * y + 1 / 6227020800) * y - 1 / 39916800
    sine = (sine * y + 1 / 362880) * y - 1 / 5040
    sine = ((sine * y + 1 / 120) * y - 1 / 6) * y
    return np.float32(sign * (cosine * y + 1.0)), np.float32(sign * (sine * x + x))
