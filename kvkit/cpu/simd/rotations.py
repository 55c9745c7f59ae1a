"""The micro-kernel of rotations: a block of a row times a Hadamard matrix, in log2(block) steps of sums."""

import functools

from kvkit.cpu.simd.lanes import F32, RAW, micro_kernel, narrow, read, widen, write
from kvkit.cpu.simd.panels import LANES, at
from kvkit.formats.elements import BY_NAME

MOST = 512  # elements of a block: they fit in registers and a little stack


@functools.cache
def rotate_block(element, block):
    """Return f(source, target, before, after): target = after * (H @ (before * source))."""
    size = BY_NAME[element].bytes(1)

    @micro_kernel
    def rotate_block(b, source, target, before, after):
        def factor(address, i):
            return read(b, at(b, address, 4 * i), F32, LANES)

        x = [
            widen(read(b, at(b, source, i * size), RAW[element], LANES), element) * factor(before, i)
            for i in range(0, block, LANES)
        ]
        for step in (1, 2, 4, 8):
            signs = [-1.0 if lane & step else 1.0 for lane in range(LANES)]
            x = [y.fma(signs, y.pick(lane ^ step for lane in range(LANES))) for y in x]
        step = 1
        while step < len(x):
            x = [x[i ^ step] - x[i] if i & step else x[i] + x[i ^ step] for i in range(len(x))]
            step *= 2
        for i, y in enumerate(x):
            write(b, at(b, target, i * LANES * size), narrow(y * factor(after, i * LANES), element))

    return rotate_block
