"""Micro-kernels of ggml's blocks, which contain their scale. Plain forms are in `cpu/copy/blocks.py`."""

import functools

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import F32, I8, I32, RAW, micro_kernel, narrow, read, where, widen, write
from kvkit.cpu.simd.minifloats import max_over_lanes
from kvkit.cpu.simd.panels import LANES, at
from kvkit.formats.elements import BY_NAME


@functools.cache
def encode(source, target):
    """Return f(source, target), which encodes 32 numbers as a block."""
    block = BY_NAME[target].block
    step = BY_NAME[source].bytes(LANES)
    find = signed_scale if block.bias else largest_scale

    @micro_kernel
    def encode(b, source_address, target_address):
        x = [widen(read(b, at(b, source_address, i * step), RAW[source], LANES), source) for i in (0, 1)]
        scale = find(x, BY_NAME[target].limits)
        factor = where(scale, "==", 0.0, 0.0, 1.0 / scale)
        write(b, target_address, narrow(scale.pick([0]), block.cell))
        codes = [code_bytes(vector * factor, block.bias) for vector in x]
        if block.halves:
            write(b, at(b, target_address, block.codes_at), codes[0] | (codes[1] << 4))
        else:
            write(b, at(b, target_address, block.codes_at), lanes.concatenate(codes))

    return encode


def largest_scale(vectors, limits):
    """Return the largest magnitude / the largest code."""
    x, y = map(abs, vectors)
    return max_over_lanes(x.max(y)) / float(limits[1])


def signed_scale(vectors, limits):
    """Return the scale with which the first number of largest magnitude has the lowest code."""
    top = max_over_lanes(abs(vectors[0]).max(abs(vectors[1])))
    places = []
    for i, x in enumerate(vectors):
        # 2 * element + sign of an element of largest magnitude, more for the others
        place = (x.as_bits() >> 31) | [2 * (LANES * i + lane) for lane in range(LANES)]
        places.append(where(abs(x), "==", top, place, place.full(4 * LANES)))
    first = places[0].min(places[1])
    for distance in (8, 4, 2, 1):
        first = first.min(first.pick(lane ^ distance for lane in range(LANES)))
    signed = (top.as_bits() | (first << 31)).cast("bitcast", F32)
    return signed / float(limits[0])


def code_bytes(ratio, bias):
    """Round to codes as bytes: halves away from zero, or, of codes that are stored plus `bias`, up."""
    if bias:
        return (ratio + (bias + 0.5)).min(2.0 * bias - 1).cast("fptosi", I32).cast("trunc", I8)
    size = abs(ratio)
    whole = size.cast("fptosi", I32)
    rest = size - whole.cast("sitofp", F32)
    whole = whole.plus(where(rest, ">=", 0.5, 1, whole.full(0)))
    sign = ratio.as_bits().signed_rshift(31)  # -1 if negative, else 0; (n - 1) xor -1 is -n
    return whole.plus(sign).apply("xor", sign).cast("trunc", I8)


@functools.cache
def decode(source, target):
    """Return f(source, target), which decodes a block to 32 numbers."""
    block = BY_NAME[source].block
    step = BY_NAME[target].bytes(LANES)

    @micro_kernel
    def decode(b, source_address, target_address):
        scale = widen(read(b, source_address, RAW[block.cell], 1), block.cell).pick([0] * LANES)
        if block.halves:
            pairs = read(b, at(b, source_address, block.codes_at), I8, LANES)
            codes = [(x.cast("zext", I32) & 15).plus(-block.bias % 2**32) for x in (pairs, pairs >> 4)]
            numbers = [x.cast("sitofp", F32) for x in codes]
        else:
            places = (block.codes_at, block.codes_at + LANES)
            numbers = [widen(read(b, at(b, source_address, i), I8, LANES), "int8") for i in places]
        for i, x in enumerate(numbers):
            write(b, at(b, target_address, i * step), narrow(x * scale, target))

    return decode
