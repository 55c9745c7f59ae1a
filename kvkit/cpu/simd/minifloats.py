"""Micro-kernels of 8-bit floats with scales. Plain forms are in `cpu/copy/minifloats.py`."""

import functools

from numba import types
from numba.extending import intrinsic

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.lanes import I8, I32, I64, RAW, loop, micro_kernel, read, write
from kvkit.cpu.simd.panels import LANES
from kvkit.formats.elements import BY_NAME
from kvkit.formulas.numeric import ROUNDER


@functools.cache
def largest(element):
    """Return f(address, count) -> float32, the largest magnitude of elements; count is a multiple of 16."""
    size = BY_NAME[element].bytes(1)

    @intrinsic
    def largest(typingctx, address, count):
        def codegen(context, b, signature, values):
            address, count = values
            top = lanes.StackSlots(b, lanes.zeros(b, LANES))
            with loop(b, count, LANES) as i:
                x = lanes.widen(read(b, b.add(address, b.mul(i, I64(size))), RAW[element], LANES), element)
                top[0] = top[0].max(abs(x))
            return b.extract_element(max_over_lanes(top[0]).value, I32(0))

        return types.float32(types.int64, types.int64), codegen

    return largest


def max_over_lanes(x):
    """Return the largest lane, in every lane."""
    for distance in (8, 4, 2, 1):
        x = x.max(x.pick(lane ^ distance for lane in range(LANES)))
    return x


@functools.cache
def quotients(source, target, scale_format):
    """Return f(source, scale, target), which writes 16 elements / scale as codes."""

    @micro_kernel
    def quotients(b, source_address, scale_address, target_address):
        scale = lanes.widen(read(b, scale_address, RAW[scale_format], 1), scale_format).pick([0] * LANES)
        x = lanes.widen(read(b, source_address, RAW[source], LANES), source) / scale
        write(b, target_address, lanes.narrow(x, target) if BY_NAME[target].minifloat else nearest_codes(x))

    return quotients


def nearest_codes(x):
    """Round float32 lanes to int8 codes, as `numeric.nearest_code` does."""
    return (x.max(-128.0).min(127.0) + float(ROUNDER)).as_bits().cast("trunc", I8)
