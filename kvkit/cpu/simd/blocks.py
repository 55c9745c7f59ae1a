"""Micro-kernels of ggml's blocks, which contain their scale. Plain forms are in `cpu/copy/blocks.py`."""

import functools

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import F32, I8, I32, RAW, Lanes, micro_kernel, narrow, read, widen, write
from kvkit.cpu.simd.minifloats import max_over_lanes
from kvkit.cpu.simd.panels import LANES, at
from kvkit.formats.elements import BY_NAME


@functools.cache
def encode(source, target):
    """Return f(source, target), which encodes 32 numbers as a block."""
    block = BY_NAME[target].block
    step = BY_NAME[source].bytes(LANES)
    find = signed_scale if block.less else largest_scale

    @micro_kernel(2)
    def encode(b, source_address, target_address):
        x = [widen(read(b, at(b, source_address, i * step), RAW[source], LANES), source) for i in (0, 1)]
        scale = find(x, BY_NAME[target].limits)
        factor = where(scale, "==", 0.0, scale.of(0.0), 1.0 / scale)
        write(b, target_address, narrow(scale.pick([0]), block.cell))
        codes = [code_bytes(vector * factor, block.less) for vector in x]
        if block.halves:
            write(b, at(b, target_address, block.codes_at), codes[0] | (codes[1] << 4))
        else:
            write(b, at(b, target_address, block.codes_at), lanes.concatenate(codes))

    return encode


def where(x, relation, number, then, other):
    """Return `then` in lanes where the relation of x to a number holds, `other` in the rest."""
    true = x.builder.fcmp_ordered(relation, x.value, x.of(number))
    return Lanes(x.builder, x.builder.select(true, then, other.value))


def largest_scale(vectors, limits):
    x, y = map(abs, vectors)
    return max_over_lanes(x.max(y)) / float(limits[1])


def signed_scale(vectors, limits):
    """Return the scale with which the first number of largest magnitude has the lowest code."""
    top = max_over_lanes(abs(vectors[0]).max(abs(vectors[1])))
    places = []
    for i, x in enumerate(vectors):
        place = (x.as_bits() >> 31) | [2 * (LANES * i + lane) for lane in range(LANES)]
        largest = x.builder.fcmp_ordered("==", abs(x).value, top.value)
        places.append(Lanes(x.builder, x.builder.select(largest, place.value, place.of(4 * LANES))))
    first = places[0].min(places[1])
    for distance in (8, 4, 2, 1):
        first = first.min(first.pick(lane ^ distance for lane in range(LANES)))
    signed = (top.as_bits() | (first << 31)).cast("bitcast", F32)
    return signed / float(limits[0])


def code_bytes(ratio, less):
    """Return codes as bytes, rounding halves away from zero, or, with `less`, up to unsigned codes."""
    if less:
        return (ratio + (less + 0.5)).min(2.0 * less - 1).cast("fptosi", I32).cast("trunc", I8)
    size = abs(ratio)
    whole = size.cast("fptosi", I32)
    rest = size - whole.cast("sitofp", F32)
    more = where(rest, ">=", 0.5, whole.of(1), Lanes(ratio.builder, whole.of(0)))
    whole = whole.plus(more)
    sign = ratio.as_bits().signed_rshift(31)
    return whole.plus(sign).apply("xor", sign).cast("trunc", I8)


@functools.cache
def decode(source, target):
    """Return f(source, target), which decodes a block to 32 numbers."""
    block = BY_NAME[source].block
    step = BY_NAME[target].bytes(LANES)

    @micro_kernel(2)
    def decode(b, source_address, target_address):
        scale = widen(read(b, source_address, RAW[block.cell], 1), block.cell).pick([0] * LANES)
        if block.halves:
            pairs = read(b, at(b, source_address, block.codes_at), I8, LANES)
            codes = [(x.cast("zext", I32) & 15).plus(-block.less % 2**32) for x in (pairs, pairs >> 4)]
            numbers = [x.cast("sitofp", F32) for x in codes]
        else:
            places = (block.codes_at, block.codes_at + LANES)
            numbers = [widen(read(b, at(b, source_address, i), I8, LANES), "int8") for i in places]
        for i, x in enumerate(numbers):
            write(b, at(b, target_address, i * step), narrow(x * scale, target))

    return decode
