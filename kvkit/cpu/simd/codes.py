"""Micro-kernels of a cache's codes of 8, 4 or 2 bits: 16 lanes along the head.

The plain forms in `cpu/copy/codes.py` give the same bits.
"""

import functools

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import F32, I8, I32, I64, RAW, StackSlots, loop, micro_kernel, narrow, read, write
from kvkit.cpu.simd.panels import LANES, lanes_divide, round_to
from kvkit.formats.elements import BY_NAME, CODES, FLOAT32
from kvkit.formulas.numeric import ROUNDER

WORD = 32  # bits that a lane extracts its code from


def whole_panels(group):
    """Return whether 16 lanes hold whole groups, or groups whole panels; 1 is a scale per element."""
    return group == 1 or lanes_divide(group)


@functools.cache
def widen(bits, symmetric, scale_format, group, product, element):
    """Return f(codes, scales, minima, target), which writes 16 rounded elements as float32."""
    scale_count, codes_in_word = max(1, LANES // group), WORD // bits

    @micro_kernel
    def widen(b, code_address, scale_address, minimum_address, target_address):
        def of_groups(address):
            each = lanes.widen(read(b, address, RAW[scale_format], scale_count), scale_format)
            return each.pick(lane * scale_count // LANES for lane in range(LANES))

        words = read(b, code_address, I32, LANES // codes_in_word)
        code = words.pick(lane // codes_in_word for lane in range(LANES))
        code = code << [WORD - bits - bits * (lane % codes_in_word) for lane in range(LANES)]
        code = code.signed_rshift(WORD - bits) if symmetric else code >> (WORD - bits)
        number = code.cast("sitofp", F32) * of_groups(scale_address)
        number = round_to(product, number) if symmetric else number + of_groups(minimum_address)
        write(b, target_address, round_to(element, number))

    return widen


@functools.cache
def encode(bits, symmetric, scale_format, width, element):
    """Return f(source, step, count, codes, code_step, scales, minima), which encodes `count` vectors.

    Vectors are `step` bytes apart. `width` neighbouring lanes of all vectors are one group; with a width of
    1, a group is one element of each vector.
    """
    least, most = CODES[bits, symmetric].limits

    @micro_kernel
    def encode(b, source, step, count, codes, code_step, scales, minima):
        def elements(i):
            return lanes.widen(read(b, b.add(source, b.mul(i, step)), RAW[element], LANES), element)

        def over_group(vector, larger):
            for distance in (1, 2, 4, 8):
                if distance < width:
                    vector = larger(vector, vector.pick(lane ^ distance for lane in range(LANES)))
            return vector

        def write_scales(address, numbers):
            write(b, address, narrow(numbers.pick(range(0, LANES, width)), scale_format))

        start = elements(I64(0))
        ends = StackSlots(b, [abs(start)] if symmetric else [start, start])
        with loop(b, count) as i:
            x = elements(i)
            ends[0] = ends[0].max(abs(x) if symmetric else x)
            if not symmetric:
                ends[1] = ends[1].min(x)
        largest = over_group(ends[0], lanes.Lanes.max)
        if symmetric:
            scale = round_to(element, largest / float(most)).max(BY_NAME[element].smallest_scale)
        else:
            minimum = round_to(scale_format, over_group(ends[1], lanes.Lanes.min)) + 0.0  # makes -0 +0
            scale = ((largest - minimum) / float(most)).max(FLOAT32.smallest_scale)
            scale = round_to(scale_format, scale)
            write_scales(minima, minimum)
        write_scales(scales, scale)
        with loop(b, count) as i:
            x = elements(i)
            ratio = round_to(element, x / scale) if symmetric else (x - minimum) / scale
            code = (ratio.max(float(least)).min(float(most)) + ROUNDER).as_bits() & ((1 << bits) - 1)
            in_byte = 8 // bits  # codes, the first one lowest
            parts = [code.pick(range(k, LANES, in_byte)) << bits * k for k in range(in_byte)]
            packed = functools.reduce(lanes.Lanes.__or__, parts).cast("trunc", I8)
            write(b, b.add(codes, b.mul(i, code_step)), packed)

    return encode
