"""Read and write ggml's blocks, which contain their scale; blocks may have any alignment."""

import functools

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, memory

load_byte, store_byte = memory.load(1, 1), memory.store(1, 1)


@shared
def byte_at(address):
    low, _ = load_byte(address)
    return np.uint32(low)


@shared
def scale_at(address):
    """Read a float16 scale."""
    return numeric.half_to_float(np.uint16(byte_at(address) | byte_at(address + 1) << np.uint32(8)))


@shared
def put_scale(address, scale):
    bits = np.uint64(numeric.float_to_half(scale))
    store_byte(address, bits, np.uint64(0))
    store_byte(address + 1, bits >> np.uint64(8), np.uint64(0))


@functools.cache
def code_of(stored):
    """Return f(address of a block, i) -> code i of the block."""
    block = BY_NAME[stored].block
    at, bias, half = block.codes_at, block.bias, block.elements // 2

    @shared
    def nibble(address, i):
        byte = byte_at(address + at + i % half)
        return np.int32(byte >> np.uint32(4) if i >= half else byte & np.uint32(15)) - np.int32(bias)

    @shared
    def byte(address, i):
        return np.int32(np.int8(byte_at(address + at + i)))

    return nibble if block.halves else byte


@functools.cache
def widen(stored, span):
    """Return f(row of blocks, first, elements), which loads `span` elements from `first` on as float32."""
    block, code = BY_NAME[stored].block, code_of(stored)
    elements_of, size = block.elements, block.bytes

    @shared
    def widen(row, first, elements):
        address = row + first // elements_of * size
        scale = scale_at(address)
        for i in range(span):
            elements[i] = np.float32(code(address, first % elements_of + i)) * scale

    return widen


@functools.cache
def load(packed, stored):
    """Return f(packed address, cache address), which loads the numbers of a block."""
    block, code = BY_NAME[stored].block, code_of(stored)
    write, step, elements = chunks.write(packed), BY_NAME[packed].bytes(1), block.elements

    @shared
    def load(packed, cache):
        scale = scale_at(cache)
        for i in range(elements):
            write(packed + i * step, np.float32(code(cache, i)) * scale)

    return load


@functools.cache
def store(packed, stored):
    """Return f(packed address, cache address), which stores numbers as a block."""
    block, (low, high) = BY_NAME[stored].block, BY_NAME[stored].limits
    read, step, elements = chunks.read(packed), BY_NAME[packed].bytes(1), block.elements
    at, bias, half, halves = block.codes_at, block.bias, elements // 2, block.halves
    most, product = np.float32(low if bias else high), device.product

    @shared
    def top_of(packed):
        """Return the element of largest magnitude; without its sign if codes have no bias."""
        top = read(packed)
        for i in range(1, elements):
            x = read(packed + i * step)
            top = x if abs(x) > abs(top) else top
        return top if bias else abs(top)

    @shared
    def store(packed, cache):
        scale = top_of(packed) / most
        put_scale(cache, scale)
        factor = numeric.inverse(scale)
        for i in range(half if halves else elements):
            x = product(read(packed + i * step), factor)
            if halves:
                y = product(read(packed + (i + half) * step), factor)
                code = numeric.unsigned_code(x, bias) | numeric.unsigned_code(y, bias) << 4
            else:
                code = numeric.round_half_away(x) & 255
            store_byte(cache + at + i, np.uint64(code), np.uint64(0))

    return store
