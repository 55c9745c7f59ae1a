"""Micro-kernels that copy rows between packed tensors and a cache, a panel of 16 or more elements at a time.

Each is compiled for its formats. The plain forms in `cpu/copy/rows.py` give the same bits.
"""

import functools

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import F32, I8, I16, I32, LANES, RAW, micro_kernel, narrow, read, widen, write
from kvkit.formats.elements import BY_NAME

WIDEST = 128  # elements of a quantizing panel, unless a group is wider: they fit in registers


def lanes_divide(group):
    """Return whether panels of 16 lanes can hold whole groups, or groups whole panels."""
    return group in (2, 4, 8) or group % LANES == 0


def leaves_rest(group):
    """Return whether a row of whole groups may end in elements that fill no panel of 16 lanes."""
    return group == 0 or group % LANES != 0


@functools.cache
def move(source, target, stream=False):
    """Return f(source, target), which converts 16 elements; the same format keeps the bits."""

    @micro_kernel
    def move(b, source_address, target_address):
        values = read(b, source_address, RAW[source], LANES)
        if source != target:
            values = narrow(widen(values, source), target)
        write(b, target_address, values, stream)

    return move


@functools.cache
def dequantize(codes, scale_format, group, rounded, target, stream=False):
    """Return f(codes, scales, target), which writes code * scale for 16 codes.

    Products are rounded to the format `rounded`, then to that of the target.
    """
    scale_count = max(1, LANES // group) if group else 1
    floats = BY_NAME[codes].minifloat

    @micro_kernel
    def dequantize(b, code_address, scale_address, target_address):
        scale = widen(read(b, scale_address, RAW[scale_format], scale_count), scale_format)
        scale = scale.pick(lane * scale_count // LANES for lane in range(LANES))
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
    """Return how many of a row's groups a quantizing panel takes; 0 if no panels fit the groups."""
    if not lanes_divide(group):
        return 0
    fewest = max(1, LANES // group)
    fitting = [n for n in (16, 8, 4, 2, 1) if n >= fewest and n * group <= WIDEST and groups % n == 0]
    return fitting[0] if fitting else fewest


@functools.cache
def maxima(source, group, groups):
    """Return f(source, target), which writes the largest magnitude of each group of a panel."""

    @micro_kernel
    def maxima(b, source_address, target_address):
        if source == "float32":
            vectors = panel_lanes(b, source_address, source, group * groups)
            largest = group_maxima([abs(x) for x in vectors], group)
        else:  # 16-bit magnitudes are compared as integers, two in a lane
            odd = group > LANES and group % (2 * LANES)  # a group is some vectors of 16 lanes and a half
            lanes = LANES // 2 if odd else min(LANES, groups * group // 2)
            places = [at(b, source_address, 4 * i) for i in range(0, groups * group // 2, lanes)]
            words = [read(b, place, I32, lanes) & 0x7FFF7FFF for place in places]
            both = group_maxima(words, group // 2)
            largest = larger(both, both >> 16).cast("trunc", I16)
        write(b, target_address, largest)

    return maxima


@functools.cache
def scales(source, codes, scale_format):
    """Return f(maxima, scales, reciprocals, stored scales), which finds the scales of 16 groups.

    For 16-bit sources, rounding absorbs the error of maximum * (1 / qmax) (`test_numeric.py` tries all
    maxima), and only the reciprocals are needed.
    """
    qmax = float(BY_NAME[codes].limits[1])

    @micro_kernel
    def scales(b, maxima_address, scale_address, inverse_address, stored_address):
        largest = widen(read(b, maxima_address, RAW[source], LANES), source)
        scale = largest / qmax if source == "float32" else largest * (1 / qmax)
        scale = round_to(source, scale).max(BY_NAME[source].smallest_scale)
        write(b, inverse_address, 1.0 / scale)
        write(b, stored_address, narrow(scale, scale_format))
        if source == "float32":
            write(b, scale_address, scale)

    return scales


@functools.cache
def quantize(source, codes, scale_format, group, groups):
    """Return f(source, scales, reciprocals, new scales, codes, cache's scales), which encodes a panel.

    Quotients are products with the reciprocal of the scale, but equal true division bit for bit: for 16-bit
    sources, rounding to 11 or 8 bits absorbs the error (`test_numeric.py` tries all pairs of significands);
    for float32, two corrections round correctly by Markstein's theorem (IBM J. Res. Dev. 34, 1990).
    """
    qmax, code_bytes = BY_NAME[codes].limits[1], BY_NAME[codes].bytes(group * groups)

    @micro_kernel
    def quantize(
        b, source_address, scale_address, inverse_address, new_address, code_address, stored_address
    ):
        write(b, stored_address, read(b, new_address, RAW[scale_format], groups))
        integers = []
        for i, x in enumerate(panel_lanes(b, source_address, source, group * groups)):
            scale = of_groups(b, scale_address, i, group, groups)
            inverse = of_groups(b, inverse_address, i, group, groups)
            ratio = quotient(source, x, scale, inverse)
            integers.append(ratio.call("rint").cast("fptosi", I32))
        packed = lanes.pack_codes(integers, qmax, codes == "int4")
        for i, vector in enumerate(packed):
            write(b, at(b, code_address, i * code_bytes // len(packed)), vector)

    return quantize


def of_groups(b, address, i, group, groups):
    """Read the number of each lane's group, for the lanes from i * LANES on."""
    if group >= LANES:
        return lanes.broadcast(b, at(b, address, i * LANES // group * 4), LANES)
    own = [(i * LANES + lane) // group for lane in range(LANES)]
    return read(b, address, F32, groups).pick(own)


def panel_lanes(b, address, source, count):
    size = BY_NAME[source].bytes(1)
    return [
        widen(read(b, at(b, address, i * size), RAW[source], LANES), source) for i in range(0, count, LANES)
    ]


def at(b, address, offset):
    return b.add(address, address.type(offset))


def round_to(element, x):
    return widen(narrow(x, element), element)


def quotient(element, x, scale, inverse):
    """Return x / scale rounded to the element format, exactly if it can round to a code other than 0."""
    ratio = x * inverse
    if element != "float32":  # no ratio here is a tie
        cut = 24 - BY_NAME[element].significant
        return (ratio.as_bits().plus(1 << cut - 1) & -(1 << cut)).cast("bitcast", F32)
    for _ in range(2):
        ratio = (-ratio).fma(scale, x).fma(inverse, ratio)
    return ratio


def group_maxima(vectors, group):
    """Return the largest of each group of neighbouring lanes, one lane for each group."""
    wide = max(1, group // vectors[0].count)
    vectors = [functools.reduce(larger, vectors[i : i + wide]) for i in range(0, len(vectors), wide)]
    for _ in range(min(group, vectors[0].count).bit_length() - 1):
        if len(vectors) > 1:
            vectors = [larger_neighbours(x, y) for x, y in lanes.pairs(vectors)]
        else:
            vectors = [larger_neighbours(vectors[0])]
    return vectors[0]


def larger_neighbours(x, y=None):
    """Return the larger of lanes 0 and 1, 2 and 3, ... of one vector or two in a row."""
    count = x.count if y is None else 2 * x.count
    return larger(x.pick(range(0, count, 2), y), x.pick(range(1, count, 2), y))


def larger(x, y):
    if x.type.element == I32:  # two 16-bit numbers a lane
        return x.as_bits(16).max(y.as_bits(16)).as_bits(32)
    return x.max(y)
