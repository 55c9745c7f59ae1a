"""Rows between packed tensors and a cache: the loops over tokens, heads and elements, for every format.

`rows(...)` is the machine code that `walk` calls for each run of neighbouring rows. It is made from a
row function, which moves one head of one token: the panel form where the group size allows vectors, the
plain form otherwise and for what is left at the end of a row. Both forms give the same bits.
"""

import functools
from typing import Any

from numba import types

from kvkit import numeric
from kvkit.cpu import memory
from kvkit.cpu.simd import panels
from kvkit.formats import BY_NAME, QMAX
from kvkit.jit import callback, helper

LANES = panels.LANES
SIGNATURE = types.void(*[types.int64] * 13)
STORE, LOAD = "store", "load"


@functools.cache
def rows(direction, packed, cache, scale=None, group=0, stream=False, plain=False):
    """Compile the transfer of rows between format names `packed` and `cache`.

    With quantization `scale` names the format of the cells and `group` the elements that share one.
    `stream` writes around the caches; `plain` leaves the vectors out, for the tests. The result's
    `address` is what `walk` calls.
    """
    if scale is None:
        transfer = row_by_row(moved_row(direction, packed, cache, stream, plain))
    elif direction == LOAD:
        transfer = row_by_row(dequantized_row(packed, cache, scale, group, stream, plain))
    elif plain or not panels.lanes_divide(group):
        transfer = row_by_row(quantized_row(packed, cache, scale, group))
    else:
        transfer = quantized_pairs(packed, cache, scale, group)
    return callback(transfer, SIGNATURE, (direction, packed, cache, scale, group, stream, plain))


def row_by_row(row):
    """The loops over tokens, heads and repeats around a row function."""
    row = helper(row)

    def transfer(
        packed, packed_token, packed_head, cache, cache_token, cache_head,
        scale, scale_token, scale_head, tokens, heads, repeat, dim,
    ):  # fmt: skip
        for token in range(tokens):
            for head in range(heads):
                for copy in range(repeat):
                    row(
                        packed + token * packed_token + (head * repeat + copy) * packed_head,
                        cache + token * cache_token + head * cache_head,
                        scale + token * scale_token + head * scale_head,
                        dim,
                    )

    return transfer


def moved_row(direction, packed, cache, stream, plain):
    """The same elements in another format, or the same bits in the same one."""
    source, target = (packed, cache) if direction == STORE else (cache, packed)
    if source == target:
        get, put = memory.load(memory.BITS[source]), memory.store(memory.BITS[target])
    else:
        get, put = memory.read(source), memory.write(target)
    panel, stores = panels.move(source, target, stream), direction == STORE
    source_bytes, target_bytes = BY_NAME[source].bytes(1), BY_NAME[target].bytes(1)

    def row(packed, cache, scale, dim):
        source, target = (packed, cache) if stores else (cache, packed)
        whole = 0 if plain else dim // LANES * LANES
        for i in range(0, whole, LANES):
            panel(source + i * source_bytes, target + i * target_bytes)
        for i in range(whole, dim):
            put(target + i * target_bytes, get(source + i * source_bytes))

    return row


def dequantized_row(packed, cache, scale, group, stream, plain):
    """Codes times the scale of their group."""
    get_cell, put = memory.read(scale), memory.write(packed)
    get_code, code_bits = memory.load(types.int8), BY_NAME[cache].bits
    packed_bytes, cell_bytes = BY_NAME[packed].bytes(1), BY_NAME[scale].bytes(1)
    vector = panels.lanes_divide(group) and not plain
    panel: Any = panels.dequantize(cache, scale, group, packed, stream) if vector else None

    def one(packed_address, cache, cell, i):
        byte = get_code(cache + i * code_bits // 8)
        if code_bits == 4:
            byte = numeric.high_nibble(byte) if i % 2 else numeric.low_nibble(byte)
        put(packed_address + i * packed_bytes, numeric.dequantize(packed, scale, byte, cell))

    one = helper(one)

    def row(packed, cache, scale, dim):
        whole = 0
        if vector:
            whole = dim // LANES * LANES
            for i in range(0, whole, LANES):
                panel(cache + i * code_bits // 8, scale + i // group * cell_bytes, packed + i * packed_bytes)
        for i in range(whole, dim):
            one(packed, cache, get_cell(scale + i // group * cell_bytes), i)

    return row


def quantized_row(packed, cache, scale, group):
    """One scale for each group, and each element's code."""
    get, put_cell, put_code = memory.read(packed), memory.write(scale), memory.store(types.int8)
    code_bits, qmax = BY_NAME[cache].bits, QMAX[cache]
    packed_bytes, cell_bytes = BY_NAME[packed].bytes(1), BY_NAME[scale].bytes(1)

    def row(packed_address, cache, scale, dim):
        for first in range(0, dim, group):
            source, target = packed_address + first * packed_bytes, cache + first * code_bits // 8
            largest = abs(get(source))
            for i in range(1, group):
                largest = max(largest, abs(get(source + i * packed_bytes)))
            step = numeric.group_scale(packed, largest, qmax)
            put_cell(scale + first // group * cell_bytes, step)
            if code_bits == 8:
                for i in range(group):
                    put_code(target + i, numeric.quantize(packed, get(source + i * packed_bytes), step, qmax))
            else:
                for i in range(0, group, 2):
                    low = numeric.quantize(packed, get(source + i * packed_bytes), step, qmax)
                    high = numeric.quantize(packed, get(source + (i + 1) * packed_bytes), step, qmax)
                    put_code(target + i // 2, numeric.pack_nibbles(low, high))

    return row


def quantized_pairs(packed, cache, scale, group):
    """`quantized_row` in panels, two rows at a time; an odd last row keeps itself company."""
    many, few = LANES if group < LANES else 1, max(1, LANES // group)
    large, small = (panels.quantize(packed, cache, scale, group, groups) for groups in (many, few))
    large_step, small_step = many * group, few * group
    plain = helper(quantized_row(packed, cache, scale, group))
    packed_bits, code_bits, cell_bits = (BY_NAME[name].bits for name in (packed, cache, scale))

    def address(base, token_stride, head_stride, row, heads):
        token = row // heads
        return base + token * token_stride + (row - token * heads) * head_stride

    address = helper(address)

    def transfer(
        packed, packed_token, packed_head, cache, cache_token, cache_head,
        scale, scale_token, scale_head, tokens, heads, repeat, dim,
    ):  # fmt: skip
        for one in range(0, tokens * heads, 2):
            two = min(one + 1, tokens * heads - 1)
            x1 = address(packed, packed_token, packed_head, one, heads)
            x2 = address(packed, packed_token, packed_head, two, heads)
            c1 = address(cache, cache_token, cache_head, one, heads)
            c2 = address(cache, cache_token, cache_head, two, heads)
            s1 = address(scale, scale_token, scale_head, one, heads)
            s2 = address(scale, scale_token, scale_head, two, heads)
            i = 0
            while i + small_step <= dim:
                x, c, s = i * packed_bits // 8, i * code_bits // 8, i // group * cell_bits // 8
                if i + large_step <= dim:
                    large(x1 + x, c1 + c, s1 + s, x2 + x, c2 + c, s2 + s)
                    i += large_step
                else:
                    small(x1 + x, c1 + c, s1 + s, x2 + x, c2 + c, s2 + s)
                    i += small_step
            x, c, s = i * packed_bits // 8, i * code_bits // 8, i // group * cell_bits // 8
            plain(x1 + x, c1 + c, s1 + s, dim - i)
            plain(x2 + x, c2 + c, s2 + s, dim - i)

    return transfer
