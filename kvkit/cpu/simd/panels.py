"""The micro-kernels that move rows between packed tensors and a cache, a panel of elements at a time.

Each is made for its formats and stands beside a plain sibling in `rows.py`, bit for bit the same.
"""

import functools

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import (
    F32,
    I8,
    I16,
    I32,
    RAW,
    Lanes,
    micro_kernel,
    narrow,
    pairs,
    read,
    widen,
    write,
)
from kvkit.formats.elements import BY_NAME
from kvkit.numeric import ROUNDER

LANES = 16
WIDEST = 128  # elements of a quantizing panel, unless a single group is wider: what fits in the registers
FACTOR_BYTES = 2 * 4 * LANES  # of the factors of a panel's groups: reciprocals, then scales


def lanes_divide(group):
    """Whether panels of 16 lanes can hold whole groups, or groups whole panels."""
    return group in (2, 4, 8) or group % LANES == 0


@functools.cache
def move(source, target, stream=False):
    """(source, target): 16 elements from one format to another; the same format keeps the bits."""

    @micro_kernel(2)
    def move(b, source_address, target_address):
        values = read(b, source_address, RAW[source], LANES)
        if source != target:
            values = narrow(widen(values, source), target)
        write(b, target_address, values, stream)

    return move


@functools.cache
def dequantize(codes, cell, group, rounded, target, stream=False):
    """(codes, cells, target): 16 codes, each times the scale of its group.

    It is rounded to a format, then to that of the target.
    """
    cells = max(1, LANES // group) if group else 1
    floats = BY_NAME[codes].minifloat

    @micro_kernel(3)
    def dequantize(b, code_address, cell_address, target_address):
        scale = widen(read(b, cell_address, RAW[cell], cells), cell)
        scale = scale.pick(lane * cells // LANES for lane in range(LANES))
        if codes == "int4":
            values = lanes.unpack_nibbles(read(b, code_address, I8, LANES // 2))
        else:
            values = read(b, code_address, I8, LANES)
        product = narrow(widen(values, codes if floats else "int8") * scale, rounded)
        if rounded != target:
            product = narrow(widen(product, rounded), target)
        write(b, target_address, product, stream)

    return dequantize


def groups_in_panel(group, groups):
    """How many of a row's `groups` a quantizing panel takes: at least 16 elements, a divisor if it can."""
    fewest = max(1, LANES // group)
    fitting = [n for n in (16, 8, 4, 2, 1) if n >= fewest and n * group <= WIDEST and groups % n == 0]
    return fitting[0] if fitting else fewest


def panel_lanes(b, address, source, group, groups):
    size = BY_NAME[source].bytes(1)
    offsets = range(0, groups * group * size, LANES * size)
    return [widen(read(b, at(b, address, offset), RAW[source], LANES), source) for offset in offsets]


@functools.cache
def scales(source, codes, group, groups):
    """(source, factors): of each group of a panel the reciprocal of its scale, then the scale, in float32."""
    qmax = float(BY_NAME[codes].limits[1])

    @micro_kernel(2)
    def scales(b, source_address, factor_address):
        if source == "float32" or group >= LANES:
            largest = group_maxima(
                [abs(x) for x in panel_lanes(b, source_address, source, group, groups)], group
            )
        else:
            largest = group_maxima_16bit(b, source_address, source, group, groups)
        scale = round_to(source, largest / qmax).max(BY_NAME[source].smallest_scale)
        write(b, factor_address, 1.0 / scale)
        write(b, at(b, factor_address, FACTOR_BYTES // 2), scale)

    return scales


@functools.cache
def quantize(source, codes, cell, group, groups):
    """(source, factors, codes, cells): the codes and the stored scales of a panel.

    Quotients come from products with the reciprocal of the scale and equal true division bit for bit. For
    16-bit sources the rounding to 11 or 8 bits absorbs the error of the product (`test_numeric.py`
    tries all pairs of significands); for float32 two corrections round it as Markstein's theorem says
    (IBM J. Res. Dev. 34, 1990).
    """
    qmax = float(BY_NAME[codes].limits[1])

    @micro_kernel(4)
    def quantize(b, source_address, factor_address, code_address, cell_address):
        inverse = read(b, factor_address, F32, groups)
        scale = read(b, at(b, factor_address, FACTOR_BYTES // 2), F32, groups)
        write(b, cell_address, narrow(scale, cell))
        integers = []
        for i, x in enumerate(panel_lanes(b, source_address, source, group, groups)):
            own = [(i * LANES + lane) // group for lane in range(LANES)]
            ratio = quotient(source, x, scale.pick(own), inverse.pick(own))
            if source == "bfloat16":  # no finite group of the others leaves [-qmax, qmax]
                ratio = ratio.max(-qmax).min(qmax)
            integers.append(ratio + ROUNDER)
        packed = lanes.low_bytes(integers)
        for i, vector in enumerate(lanes.pack_nibbles(packed) if codes == "int4" else packed):
            write(b, at(b, code_address, i * vector.count), vector)

    return quantize


def at(b, address, offset):
    return b.add(address, address.type(offset))


def round_to(element, x):
    return widen(narrow(x, element), element)


def quotient(element, x, scale, inverse):
    """x / scale as a number of the element format, exact where it can round to a code other than 0."""
    ratio = x * inverse
    if element != "float32":  # Veltkamp's split keeps the leading bits; no ratio here is half way between two
        product = ratio * (2.0 ** (24 - BY_NAME[element].significant) + 1)
        return product - (product - ratio)
    for _ in range(2):
        ratio = (-ratio).fma(scale, x).fma(inverse, ratio)
    return ratio


def group_maxima(vectors, group):
    """The largest of each group of neighbouring lanes, one lane a group."""
    wide = max(1, group // LANES)
    vectors = [functools.reduce(Lanes.max, vectors[i : i + wide]) for i in range(0, len(vectors), wide)]
    for _ in range(min(group, LANES).bit_length() - 1):
        if len(vectors) > 1:
            vectors = [larger_neighbours(x, y) for x, y in pairs(vectors)]
        else:
            vectors = [larger_neighbours(vectors[0])]
    return vectors[0]


def larger_neighbours(x, y=None):
    """Of lanes 0 and 1, 2 and 3, ... of one vector or two in a row, the larger each."""
    count = x.count if y is None else 2 * x.count
    even, odd = x.pick(range(0, count, 2), y), x.pick(range(1, count, 2), y)
    if x.type.element == I32:  # two 16-bit numbers a lane
        return even.as_bits(16).max(odd.as_bits(16)).as_bits(32)
    return even.max(odd)


def group_maxima_16bit(b, address, source, group, groups):
    """`group_maxima` of magnitudes in memory: their bits compare as integers, two of them a lane."""
    lanes = min(LANES, groups * group // 2)
    words = [
        read(b, at(b, address, i * lanes * 4), I32, lanes) & 0x7FFF7FFF
        for i in range(groups * group // 2 // lanes)
    ]
    both = group_maxima(words, group // 2)
    largest = both.as_bits(16).max((both >> 16).as_bits(16)).as_bits(32).cast("trunc", I16)
    return widen(largest.cast("bitcast", RAW[source]), source)
