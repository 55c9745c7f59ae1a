"""Apply a format's rotation to rows: keys and values that are stored, queries, and outputs of attention."""

import functools
from typing import Any

import numpy as np
from numba import types

from kvkit.cpu import launches, memory
from kvkit.cpu.copy.codes import prepare_codes
from kvkit.cpu.copy.rows import SIGNATURE, row_by_row
from kvkit.cpu.simd import rotations as panels
from kvkit.cpu.simd.lanes import LANES
from kvkit.formats.elements import BY_NAME
from kvkit.runtime.jit import callback, helper


@functools.cache
def rotation_code(element, block, plain=False):
    """Compile the rotation of rows, with the arguments of `rows`: target, source, factors [2, dim]."""
    size = BY_NAME[element].bytes(1)
    vector = LANES <= block <= panels.MOST and not plain
    rotate_block: Any = panels.rotate_block(element, block) if vector else plain_rotation(element, block)

    def row(target, source, factors, dim):
        for i in range(0, dim, block):
            rotate_block(source + i * size, target + i * size, factors + 4 * i, factors + 4 * (dim + i))

    return callback(row_by_row(row), SIGNATURE, ("rotation", element, block, plain))


def plain_rotation(element, block):
    """Return a helper that rotates a block with scalar code."""
    get, put, factor = memory.read(element), memory.write(element), memory.load(types.float32)
    size = BY_NAME[element].bytes(1)

    def rotate_block(source, target, before, after):
        for i in range(block):
            total = types.float32(0)
            for j in range(block):
                x = get(source + j * size) * factor(before + 4 * j)
                odd, both = 0, i & j  # H[i, j] is -1 if i and j have an odd number of bits in common
                while both:
                    odd, both = odd ^ 1, both & (both - 1)
                total += -x if odd else x
            put(target + i * size, total * factor(after + 4 * i))

    return helper(rotate_block)


def rotated_rows(x, rotation, what, value=False):
    """Return rotated rows [sequences, tokens, heads, dim] of floats; `what` is as in `formats.rotations`."""
    dim, rotated = x.shape[-1], np.empty(x.shape, x.dtype)
    if x.strides[-1] != x.itemsize:
        x = np.ascontiguousarray(x)
    factors = rotation.factors(dim, what, value)
    sides: list[int] = []  # address and strides of sequences, tokens and heads, as in `COPY_SIDE`
    for array in (rotated, x):
        sides += launches.address(array), *array.strides[:3]
    sides += launches.address(factors), 0, 0, 0
    batch, tokens, heads, _ = x.shape
    code = rotation_code(x.dtype.name, rotation.size(dim, value)).address
    launches.start(prepare_codes(code, batch, tokens, sides, heads, dim, x.size))
    return rotated
