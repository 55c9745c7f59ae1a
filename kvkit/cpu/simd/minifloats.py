"""The micro-kernels of floats of 8 bits with scales, beside their plain siblings in `cpu/minifloats.py`."""

import functools

from numba import types
from numba.extending import intrinsic

from kvkit.cpu.simd.lanes import (
    I8,
    I32,
    I64,
    RAW,
    StackSlots,
    loop,
    micro_kernel,
    narrow,
    read,
    widen,
    write,
    zeros,
)
from kvkit.cpu.simd.panels import LANES
from kvkit.formats.elements import BY_NAME
from kvkit.formulas.numeric import ROUNDER


@functools.cache
def largest(element):
    """(address, count) -> float32: the largest magnitude of numbers, a multiple of 16."""
    size = BY_NAME[element].bytes(1)

    @intrinsic
    def largest(typingctx, address, count):
        def codegen(context, b, signature, values):
            address, count = values
            top = StackSlots(b, zeros(b, LANES))
            with loop(b, count, LANES) as i:
                x = widen(read(b, b.add(address, b.mul(i, I64(size))), RAW[element], LANES), element)
                top[0] = top[0].max(abs(x))
            return b.extract_element(over_lanes(top[0]).value, I32(0))

        return types.float32(types.int64, types.int64), codegen

    return largest


def over_lanes(x):
    """The largest lane, in all of them."""
    for distance in (8, 4, 2, 1):
        x = x.max(x.pick(lane ^ distance for lane in range(LANES)))
    return x


@functools.cache
def quotients(source, target, cell):
    """(source, cell, target): 16 numbers, divided by the scale at an address."""

    @micro_kernel(3)
    def quotients(b, source_address, cell_address, target_address):
        scale = widen(read(b, cell_address, RAW[cell], 1), cell).pick([0] * LANES)
        x = widen(read(b, source_address, RAW[source], LANES), source) / scale
        write(b, target_address, narrow(x, target) if BY_NAME[target].minifloat else nearest_codes(x))

    return quotients


def nearest_codes(x):
    """See `numeric.nearest_code`."""
    return (x.max(-128.0).min(127.0) + float(ROUNDER)).as_bits().cast("trunc", I8)
