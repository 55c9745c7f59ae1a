"""Scalar numerics, written once for CPU and GPU: float bits, rounding, codes, softmax, slopes, angles.

Values are float32; 16-bit floats are uint16 bits until they are widened. Formulas: PMX specification,
KeyValueCache, ALiBiSlope, RotaryPositionEmbedding. `element` is the name of a float format. m and l are the
maximum and the sum of a softmax, as in FlashAttention.
"""

import functools
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvkit.formats.elements import BY_NAME, FLOATS
from kvkit.runtime.jit import shared

ROUNDER = 1.5 * 2.0**23  # float32 numbers of this size are integers: adding it rounds, half to even
ROUNDER64 = 1.5 * 2.0**52  # the same for float64
# Pi is the sum of three parts; the first two have at most 29 bits.
PI_HIGH, PI_MIDDLE, PI_LOW = 3.141592651605606, 1.9841871548575973e-09, 4.503483548312435e-18
MAX_ANGLE = 2.0**24  # smaller angles are less than 2^23 times pi
INF, MINUS_INF, LOWEST = np.float32(np.inf), np.float32(-np.inf), np.finfo(np.float32).min
EPS32, EPS16, EPSBF = (np.float32(fmt.smallest_scale) for fmt in FLOATS)


def _cast(result, argument, build):
    """Return an intrinsic f(argument type) -> result type; `build` emits its one or two LLVM instructions."""

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


# The CUDA simulator calls formulas as Python functions. Intrinsics cannot be called so: each has a wrapper.


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
    """Widen e4m3 bits through a half that is 256 times smaller. The code of NaN becomes a NaN of halves."""
    size = (np.uint32(bits) & np.uint32(0x7F)) << np.uint32(7)
    nan = (size + np.uint32(0x80)) & np.uint32(0x4000)
    sign = (np.uint32(bits) & np.uint32(0x80)) << np.uint32(8)
    return half_to_float(np.uint16(size | nan | sign)) * np.float32(256)


def float_to_minifloat(name):
    """Return the formula that rounds a float32 to an 8-bit float, half to even; large numbers saturate."""
    element = BY_NAME[name]
    fraction = element.significant - 1
    bias = (1 << 6 - fraction) - 1
    shift, rebias = np.uint32(23 - fraction), np.uint32(127 - bias << fraction)
    half, largest = np.uint32((1 << 22 - fraction) - 1), np.float32(element.limits[1])
    least = np.float32(2.0 ** (1 - bias))  # least normal number
    # Adding `rounder` rounds to a subnormal number: float32 numbers near it are a subnormal step apart.
    rounder = np.float32(2.0 ** (24 - bias - fraction))
    rounder_bits = np.uint32(rounder.view(np.uint32))

    @shared
    def narrow(x):
        size = min(abs(x), largest)
        bits = bits_of(size)
        code = ((bits + half + ((bits >> shift) & np.uint32(1))) >> shift) - rebias
        if size < least:
            code = bits_of(size + rounder) - rounder_bits
        code = code if x == x else np.uint32(0x7F)
        return np.uint8(code | ((bits_of(x) >> np.uint32(24)) & np.uint32(0x80)))

    return narrow


float_to_e4m3, float_to_e5m2 = map(float_to_minifloat, ("e4m3", "e5m2"))


@shared
def unrounded(x):
    return x


@shared
def round_to_half(x):
    return half_to_float(float_to_half(x))


@shared
def round_to_bfloat16(x):
    return bfloat16_to_float(float_to_bfloat16(x))


def rounding(element):
    """Return the formula that rounds a float32 to an element format."""
    return {"float16": round_to_half, "bfloat16": round_to_bfloat16}.get(element, unrounded)


@functools.cache
def group_scaling(element):
    """Return the formula f(largest, qmax) of the scale of a group whose largest magnitude is `largest`."""
    rounded = rounding(element)
    smallest = EPS16 if element == "float16" else (EPSBF if element == "bfloat16" else EPS32)

    @shared
    def group_scale(largest, qmax):
        return max(rounded(largest / np.float32(qmax)), smallest)

    return group_scale


@functools.cache
def quantizing(element):
    """Return f(x, scale, qmax), the code of x: x / scale, rounded to the element, then to an integer."""
    rounded = rounding(element)

    @shared
    def quantize(x, scale, qmax):
        ratio = min(max(rounded(x / scale), np.float32(-qmax)), np.float32(qmax))
        return np.int8(bits_of(ratio + np.float32(ROUNDER)) & np.uint32(0xFF))

    return quantize


@functools.cache
def dequantizing(element, scale_element):
    """Return f(code, scale) = code * scale, rounded to the scale's format, then to the element's."""
    rounded, product = rounding(element), rounding(scale_element)

    @shared
    def dequantize(code, scale):
        return rounded(product(np.float32(code) * scale))

    return dequantize


@functools.cache
def largest_scaling(scale_element):
    """Return f(largest, limit), the stored scale of numbers up to `largest`; 1 in place of 0."""
    rounded = rounding(scale_element)

    @shared
    def largest_scale(largest, limit):
        scale = rounded(largest / np.float32(limit))
        return scale if scale != np.float32(0) else np.float32(1)

    return largest_scale


@shared
def nearest_code(x):
    """Return the int8 nearest to x, half to even; NaN gives -128."""
    x = x if x > np.float32(-128) else np.float32(-128)
    x = x if x < np.float32(127) else np.float32(127)
    return np.int8(bits_of(x + np.float32(ROUNDER)) & np.uint32(0xFF))


@shared
def inverse(scale):
    """Return 1 / scale, or 0 for a scale of 0."""
    return np.float32(1) / scale if scale != np.float32(0) else np.float32(0)


@shared
def round_half_away(x):
    """Return the integer nearest to x; a half is rounded away from zero."""
    size = abs(x)
    whole = np.float32(int(size))
    whole += np.float32(1) if size - whole >= np.float32(0.5) else np.float32(0)
    return np.int32(whole if x > np.float32(0) else -whole)


@shared
def unsigned_code(x, zero):
    """Return the code of x, 0 to 2 * zero - 1; `zero` is the code of x = 0, and a half is rounded up."""
    return np.int32(min(x + (np.float32(zero) + np.float32(0.5)), np.float32(2 * zero - 1)))


@shared
def pack_nibbles(low, high):
    return np.int8((low & 15) | ((high & 15) << 4))


@shared
def int8_to_float(code):
    return code


@shared
def low_nibble(byte):
    return np.int8(np.int8(byte << 4) >> 4)


@shared
def high_nibble(byte):
    return np.int8(byte >> 4)


def widening(element):
    """Return the formula from an element's bits to float32."""
    return globals()[BY_NAME[element].widen]


def narrowing(element):
    """Return the formula from float32 to an element's bits."""
    return globals()[BY_NAME[element].narrow]


@shared
def weight(score, m):
    """Return p = exp(score - m), 0 for a score of -inf."""
    return np.float32(math.exp(score - max(m, LOWEST)))


@shared
def add_sink(m, l, sink):
    """Return (m, l, alpha) of a softmax with the sink as one more score; alpha rescales its sums."""
    if sink == INF:  # the sink takes all weight
        return sink, np.float32(1), np.float32(0)
    new = max(m, sink)
    alpha = weight(m, new)
    return new, l * alpha + weight(sink, new), alpha


@shared
def add_bias(score, bias):
    """Return score + bias. A bias of -inf hides the key, even if its score is NaN or inf."""
    return MINUS_INF if bias == MINUS_INF else score + bias


@shared
def apply_softcap(score, cap):
    """Return cap * tanh(score / cap), or the score for a cap of 0."""
    return cap * np.float32(math.tanh(score / cap)) if cap != np.float32(0) else score


@shared
def add_split_sum(l, m, split_l, split_m):
    """Rescale one split's softmax sum to the common maximum m and add it to l."""
    return l + split_l * weight(split_m, m)


@shared
def normalizer(alpha, l, grow):
    """Return alpha / l * grow, the factor from sums of weighted values to an output; 0 if l is 0."""
    return alpha / l * grow if l != np.float32(0) else np.float32(0)


@shared
def log_sum(m, l):
    """Return m + log(l), the logarithm of a softmax denominator."""
    return m + np.float32(math.log(l)) if l != np.float32(0) else MINUS_INF


@shared
def alibi_slope(head, num_heads):
    """Return the ALiBi slope of a head; powers of two are exact."""
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    exponent = -8.0 * (head + 1) / power if head < power else -4.0 * (2 * (head - power) + 1) / power
    return np.float32(2.0**exponent)


@shared
def alibi_bias(slope, distance):
    """Return slope * distance."""
    return slope * np.float32(distance)


@shared
def product(a, b):
    """Return a * b, rounded. On the CPU no product is fused with a sum; GPUs have a formula of their own."""
    return a * b


@functools.cache
def rotation(product):
    """Return the formula that rotates a pair (even, odd) by an angle, with products that are rounded."""

    @shared
    def rotate(even, odd, cosine, sine):
        return product(even, cosine) - product(odd, sine), product(odd, cosine) + product(even, sine)

    return rotate


@shared
def rotary_theta(theta, dims, end, longest, factor):
    """Return the base of a sequence's frequencies; 'dynamic' scaling enlarges it if `end` > `longest`."""
    stretched = theta
    if end > longest and dims > 2:  # a pair alone has frequency 1, whatever the base
        stretched = theta * (factor * end / longest - (factor - 1.0)) ** (dims / (dims - 2))
    return stretched


@shared
def rotary_frequency(theta, pair, dims):
    """Return theta ** (-2 * pair / dims)."""
    return np.float32(theta ** (-2.0 * pair / dims))


@shared
def rotary_angle(position, divisor, frequency):
    """Return position / divisor * frequency in float32."""
    return np.float32(position) / np.float32(divisor) * frequency


@shared
def cos_sin(angle):
    """Return the cosine and sine of a float32 angle below MAX_ANGLE, without branches.

    Results are the nearest float32, except for rare ties. A multiple of pi is subtracted, so that the angle
    lies within pi/2. The product of a multiple below 2^23 and 29 bits of pi is exact in float64, so no angle
    loses bits. The series stop where the next term is below the precision of float64.
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
