"""Move rows of numbers between arrays of any float format and float32 in a worker's memory."""

import functools

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.simd.lanes import F32, I64, LANES, RAW, loop, micro_kernel, narrow, read, widen, write
from kvkit.formats.elements import BY_NAME
from kvkit.runtime.jit import callback, helper

INT = types.int64
ROW = types.void(INT, INT, INT)
ZERO = types.float32(0)
put_float = memory.store(types.float32)
get_float = memory.load(types.float32)


@memory.machine_code
def move_row(code, source, target, count):
    """Call the machine code of `load_row` or `store_row`."""


@functools.cache
def load_row(element):
    """Compile (source, target, count): widen numbers to float32, and fill the last vector with zeros."""
    size, get = BY_NAME[element].bytes(1), memory.read(element)

    @micro_kernel
    def widen_vectors(b, source, target, count):
        with loop(b, count, LANES) as i:
            x = read(b, b.add(source, b.mul(i, I64(size))), RAW[element], LANES)
            write(b, b.add(target, b.mul(i, I64(4))), widen(x, element))

    def load(source, target, count):
        whole = count - count % LANES
        widen_vectors(source, target, whole)
        for i in range(whole, count):
            put_float(target + 4 * i, get(source + size * i))
        for i in range(count, -(-count // LANES) * LANES):
            put_float(target + 4 * i, ZERO)

    return callback(load, ROW, element)


@functools.cache
def store_row(element):
    """Compile (source, target, count): round float32 numbers once to a float format."""
    size, put = BY_NAME[element].bytes(1), memory.write(element)

    @micro_kernel
    def narrow_vectors(b, source, target, count):
        with loop(b, count, LANES) as i:
            x = read(b, b.add(source, b.mul(i, I64(4))), F32, LANES)
            write(b, b.add(target, b.mul(i, I64(size))), narrow(x, element))

    def store(source, target, count):
        whole = count - count % LANES
        narrow_vectors(source, target, whole)
        for i in range(whole, count):
            put(target + size * i, get_float(source + 4 * i))

    return callback(store, ROW, element)


@helper
def load_state(load, state, size, shape, target):
    """Widen a state to float32 with padded rows, of which the last are zeros.

    `size` is the bytes of an element; `shape` is (rows, columns, whether the target is transposed).
    """
    rows, columns, transposed = shape
    wide = -(-columns // LANES) * LANES
    high = -(-rows // LANES) * LANES
    if not transposed:
        for i in range(rows):
            move_row(load, state + i * columns * size, target + 4 * wide * i, columns)
        for i in range(rows * wide, high * wide):
            put_float(target + 4 * i, ZERO)
        return
    line = target + 4 * wide * high
    for i in range(high):
        if i < rows:
            move_row(load, state + i * columns * size, line, columns)
        for j in range(wide):
            put_float(target + 4 * (j * high + i), get_float(line + 4 * j) if i < rows else ZERO)


@helper
def store_state(store, source, state, size, shape):
    """Write back a state that `load_state` has loaded."""
    rows, columns, transposed = shape
    wide = -(-columns // LANES) * LANES
    high = -(-rows // LANES) * LANES
    line = source + 4 * wide * high
    for i in range(rows):
        if transposed:
            for j in range(columns):
                put_float(line + 4 * j, get_float(source + 4 * (j * high + i)))
            move_row(store, line, state + i * columns * size, columns)
        else:
            move_row(store, source + 4 * wide * i, state + i * columns * size, columns)
