"""Store and load rows in ggml's block formats, in which each block contains its scale and codes."""

from typing import Any

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.simd import blocks as panels
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import helper


def row(direction, packed, cache, plain):
    """Return a row function that encodes floats as blocks, or decodes blocks with products in float32."""
    block = BY_NAME[cache].block
    elements, size, packed_bytes = block.elements, block.bytes, BY_NAME[packed].bytes(block.elements)
    encodes = direction == "store"
    if plain:
        move: Any = plain_encode(packed, cache) if encodes else plain_decode(packed, cache)
    else:
        move = panels.encode(packed, cache) if encodes else panels.decode(cache, packed)

    def row(packed, cache, scale, dim):
        for i in range(dim // elements):
            if encodes:
                move(packed + i * packed_bytes, cache + i * size)
            else:
                move(cache + i * size, packed + i * packed_bytes)

    return row


def plain_encode(packed, cache):
    """Return a helper (source, target) that encodes one block with scalar code."""
    element = BY_NAME[cache]
    block, (low, high) = element.block, element.limits
    get, put_scale, put = memory.read(packed), memory.write(block.cell), memory.store(types.uint8)
    elements, at, bias, step = block.elements, block.codes_at, block.bias, BY_NAME[packed].bytes(1)
    most = low if bias else high  # the code of the element of largest magnitude; q4_0's is the lowest code

    def encode(source, target):
        top = get(source)
        for i in range(1, elements):
            x = get(source + i * step)
            top = x if abs(x) > abs(top) else top
        scale = (top if bias else abs(top)) / np.float32(most)
        put_scale(target, scale)
        factor = numeric.inverse(scale)
        if bias:
            for i in range(elements // 2):
                first = numeric.unsigned_code(get(source + i * step) * factor, bias)
                second = numeric.unsigned_code(get(source + (i + elements // 2) * step) * factor, bias)
                put(target + at + i, np.uint8(first | second << 4))
        else:
            for i in range(elements):
                put(target + at + i, np.uint8(numeric.round_half_away(get(source + i * step) * factor) & 255))

    return helper(encode)


def plain_decode(packed, cache):
    """Return a helper (source, target) that decodes one block with scalar code."""
    put, element, step = memory.write(packed), element_at(cache), BY_NAME[packed].bytes(1)
    elements = BY_NAME[cache].block.elements

    def decode(source, target):
        for i in range(elements):
            put(target + i * step, element(source, 0, i))

    return helper(decode)


def element_at(stored):
    """Return a helper (row, scales, i) that reads one element of a row of blocks as float32."""
    block = BY_NAME[stored].block
    get_scale, get = memory.read(block.cell), memory.load(types.uint8)
    elements, size, at, bias = block.elements, block.bytes, block.codes_at, block.bias

    def element(row, scales, i):
        source, i = row + i // elements * size, i % elements
        if bias:
            byte = get(source + at + i % (elements // 2))
            code = np.int32((byte >> 4 if i >= elements // 2 else byte) & 15) - bias
        else:
            code = np.int32(np.int8(get(source + at + i)))
        return np.float32(code) * get_scale(source)

    return helper(element)
