"""The micro-kernel that averages rows."""

import functools

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.chunks import for_chunks
from kvkit.cpu.simd.lanes import F32, I64, LANES, RAW, loop, micro_kernel, read, write
from kvkit.formats.elements import BY_NAME

VECTORS = 8, 4, 1  # that are added at a time; their sums stay in registers


@functools.cache
def mean(element):
    """Return f(source, step, count, target, dim), which writes the mean of rows that are `step` bytes apart.

    Rows are added in order in float32 and divided once. `dim` is a multiple of 16.
    """
    size = BY_NAME[element].bytes(1)

    @micro_kernel
    def mean(b, source, step, count, target, dim):
        divisor = lanes.fill(b, b.sitofp(count, F32), LANES)

        def columns(first, vectors):
            offset = b.mul(first, I64(size))
            sums = lanes.StackSlots(b, lanes.zeros(b, LANES, vectors))
            with loop(b, count) as token:
                row = b.add(b.add(source, offset), b.mul(token, step))
                for m in range(vectors):
                    at = b.add(row, I64(m * LANES * size))
                    sums[m] = sums[m] + lanes.widen(read(b, at, RAW[element], LANES), element)
            for m in range(vectors):
                at = b.add(b.add(target, offset), I64(m * LANES * size))
                write(b, at, lanes.narrow(sums[m] / divisor, element))

        for_chunks(b, dim, VECTORS, columns)

    return mean
