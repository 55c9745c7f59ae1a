"""Copy rows between packed tensors and a cache: the loops over tokens, heads and elements, for every format.

`rows(...)` compiles the machine code that `copy_tokens` calls for each run of neighbouring rows. It loops
over a row function, which moves one head of one token: with vectors (panels) where the group size allows,
with scalar code otherwise and at the end of a row. Both give the same bits.
"""

import functools
from typing import Any

from numba import types

from kvkit.cpu import machine, memory
from kvkit.cpu.copy import blocks, minifloats
from kvkit.cpu.launches import Record
from kvkit.cpu.simd import panels
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import callback, helper

LANES = panels.LANES
MANY = 16  # panels whose scales are computed before their codes: their 4 KB stay in the L1 cache
SIGNATURE = types.void(*[types.int64] * 13)  # the arguments of `call_rows` after `code`
STORE, LOAD, READ = "store", "load", "read"

# Byte addresses and strides of packed rows, of rows in the cache, and of their scales.
COPY_SIDE = Record(
    "packed packed_sequence packed_token packed_head",
    "cache cache_sequence cache_row cache_head scale scale_sequence scale_row scale_head",
)
copy_side_at = memory.record(COPY_SIDE)


@memory.machine_code
def call_rows(
    code, packed=0, packed_token=0, packed_head=0, cache=0, cache_token=0, cache_head=0,
    scale=0, scale_token=0, scale_head=0, tokens=1, heads=1, repeat=1, dim=0,
):  # fmt: skip
    """Call the machine code of `rows`: addresses, and byte strides of tokens and heads."""


@functools.cache
def rows(
    direction, data_dtype, cache_format, scale_format=None, group=0, groups=0, stream=False, plain=False
):
    """Compile the transfer of rows between the formats `data_dtype` and `cache_format`.

    For codes, `scale_format` is the format of scales, `group` elements share one, rows are whole groups, and
    a panel of a store has `groups` groups (see `panels.groups_in_panel`). A group of 0 means one scale for a
    row; a store reads it.
    `stream` uses non-temporal stores; `plain` uses scalar code only (tests). READ, which attention uses,
    differs from LOAD only in that it does not round code * scale to the format of the scales. For 8-bit
    floats neither rounds. A row function (packed, cache, scale, dim) copies one head of one token.
    """
    element, formats = BY_NAME[cache_format], (data_dtype, cache_format, scale_format)
    if element.block:
        transfer = row_by_row(blocks.row(direction, data_dtype, cache_format, plain))
    elif scale_format is None:
        transfer = row_by_row(moved_row(direction, data_dtype, cache_format, stream, plain))
    elif direction == STORE and (element.minifloat or not group):
        transfer = row_by_row(minifloats.scaled_row(*formats, group, plain))
    elif direction != STORE:
        product = scale_format if direction == LOAD and not element.minifloat else "float32"
        transfer = row_by_row(dequantized_row(*formats, group, product, stream, plain))
    elif plain or not panels.lanes_divide(group):
        transfer = row_by_row(quantized_row(*formats, group))
    else:
        transfer = quantized_panels(*formats, group, groups)
    key = direction, *formats, group, groups, stream, plain
    return callback(transfer, SIGNATURE, (*key, machine.has_integers()), passes="few")  # panels are vectors


def row_by_row(row):
    """Return a function that calls a row function for all tokens and heads; packed may repeat each head."""
    row = helper(row)

    def transfer(
        packed, packed_token, packed_head, cache, cache_token, cache_head,
        scale, scale_token, scale_head, tokens, heads, repeat, dim,
    ):  # fmt: skip
        while tokens > 0:
            packed_at, cache_at, scale_at, head = packed, cache, scale, heads
            while head > 0:
                copy = repeat
                while copy > 0:
                    row(packed_at, cache_at, scale_at, dim)
                    packed_at, copy = packed_at + packed_head, copy - 1
                cache_at, scale_at, head = cache_at + cache_head, scale_at + scale_head, head - 1
            packed, cache, scale = packed + packed_token, cache + cache_token, scale + scale_token
            tokens -= 1

    return transfer


def moved_row(direction, data_dtype, cache_format, stream, plain):
    """Return a row function that converts elements, or copies their bits between equal formats."""
    source, target = (data_dtype, cache_format) if direction == STORE else (cache_format, data_dtype)
    if source == target:
        get, put = memory.load(memory.BITS[source]), memory.store(memory.BITS[target])
    else:
        get, put = memory.read(source), memory.write(target)
    panel, stores = panels.move(source, target, stream), direction == STORE
    source_bytes, target_bytes = BY_NAME[source].bytes(1), BY_NAME[target].bytes(1)
    panel_source, panel_target = source_bytes * LANES, target_bytes * LANES

    def row(packed, cache, scale, dim):
        source, target = (packed, cache) if stores else (cache, packed)
        left = 0 if plain else dim // LANES  # LLVM unrolls loops that count
        dim -= left * LANES
        while left > 0:
            panel(source, target)
            source, target, left = source + panel_source, target + panel_target, left - 1
        while dim > 0:
            put(target, get(source))
            source, target, dim = source + source_bytes, target + target_bytes, dim - 1

    return row


def dequantized_row(data_dtype, cache_format, scale_format, group, product, stream, plain):
    """Return a row function that writes code * scale, rounded to `product`, then to `data_dtype`."""
    get_scale, put = memory.read(scale_format), memory.write(data_dtype)
    code_bits, minifloat = BY_NAME[cache_format].bits, BY_NAME[cache_format].minifloat
    get_code = memory.read(cache_format) if minifloat else memory.load(types.int8)
    packed_bytes, scale_bytes = BY_NAME[data_dtype].bytes(1), BY_NAME[scale_format].bytes(1)
    vector = panels.lanes_divide(group) and not plain
    formats, dequantize = (
        (cache_format, scale_format, group, product, data_dtype),
        numeric.dequantizing(data_dtype, product),
    )
    panel: Any = panels.dequantize(*formats, stream) if vector else None
    partial = not vector or panels.leaves_rest(group)

    def element(packed, cache, scale, i):
        code = get_code(cache + i * code_bits // 8)
        if code_bits == 4:
            code = numeric.high_nibble(code) if i % 2 else numeric.low_nibble(code)
        put(packed + i * packed_bytes, dequantize(code, scale))

    element = helper(element)

    step = max(group, LANES)  # elements that have whole scales, or one scale
    scale_step = step // group * scale_bytes if group else 0

    def row(packed, cache, scale, dim):
        i, shared = 0, group if group else dim  # elements that vectors move, and that share a scale
        target, end = packed, packed + dim * packed_bytes
        if vector:
            codes, scales, left = cache, scale, dim // step
            i = left * step
            while left > 0:
                for lane in range(0, step, LANES):
                    panel(codes + lane * code_bits // 8, scales, target + lane * packed_bytes)
                codes, scales = codes + step * code_bits // 8, scales + scale_step
                target, left = target + step * packed_bytes, left - 1
        if partial:
            while target < end:  # ends at an address: LLVM neither unrolls it nor prepares for it in each row
                element(packed, cache, get_scale(scale + i // shared * scale_bytes), i)
                target, i = target + packed_bytes, i + 1

    return row


def quantized_row(data_dtype, cache_format, scale_format, group):
    """Return a row function that computes and writes one scale for each group, and each element's code."""
    get, put_scale, put_code = memory.read(data_dtype), memory.write(scale_format), memory.store(types.int8)
    code_bits, (_, qmax) = BY_NAME[cache_format].bits, BY_NAME[cache_format].limits
    packed_bytes, scale_bytes = BY_NAME[data_dtype].bytes(1), BY_NAME[scale_format].bytes(1)
    group_scale, quantize = numeric.group_scaling(data_dtype), numeric.quantizing(data_dtype)

    def row(packed, cache, scale, dim):
        for first in range(0, dim, group):
            source, target = packed + first * packed_bytes, cache + first * code_bits // 8
            largest = abs(get(source))
            for i in range(1, group):
                largest = max(largest, abs(get(source + i * packed_bytes)))
            step = group_scale(largest, qmax)
            put_scale(scale + first // group * scale_bytes, step)
            if code_bits == 8:
                for i in range(group):
                    x = get(source + i * packed_bytes)
                    put_code(target + i, quantize(x, step, qmax))
            else:
                for i in range(0, group, 2):
                    low = quantize(get(source + i * packed_bytes), step, qmax)
                    high = quantize(get(source + (i + 1) * packed_bytes), step, qmax)
                    put_code(target + i // 2, numeric.pack_nibbles(low, high))

    return row


@functools.cache
def panel_maxima(data_dtype, group, groups):
    """Return a helper that finds the largest magnitude of each group of some panels, token by token.

    `across` is the number of neighbouring panels of a head.
    """
    maxima, packed_step = panels.maxima(data_dtype, group, groups), BY_NAME[data_dtype].bytes(groups * group)
    largest_step = groups * BY_NAME[data_dtype].bytes(1)

    def find_maxima(packed, packed_token, packed_head, tokens, heads, across, largest):
        for token in range(tokens):
            for head in range(heads):
                source = packed + token * packed_token + head * packed_head
                for _ in range(across):
                    maxima(source, largest)
                    source += packed_step
                    largest += largest_step

    return helper(find_maxima, separate=True)


def panel_codes(data_dtype, cache_format, scale_format, group, groups, room):
    """Return a helper that writes the codes and scales of some panels, head by head.

    At `divisors` are the scales of all groups, `room` bytes later their reciprocals, then stored scales.
    """
    quantize, step = panels.quantize(data_dtype, cache_format, scale_format, group, groups), groups * group
    packed_step, code_step = BY_NAME[data_dtype].bytes(step), BY_NAME[cache_format].bytes(step)
    scale_step = groups * BY_NAME[scale_format].bytes(1)

    def write_codes(
        packed, packed_token, packed_head, cache, cache_token, cache_head,
        scale, scale_token, scale_head, tokens, heads, across, divisors,
    ):  # fmt: skip
        for head in range(heads):
            for token in range(tokens):
                source = packed + token * packed_token + head * packed_head
                target = cache + token * cache_token + head * cache_head
                scale_at = scale + token * scale_token + head * scale_head
                first = (token * heads + head) * across
                for panel in range(first, first + across):
                    divisor = divisors + 4 * groups * panel
                    new = divisors + 2 * room + scale_step * panel
                    quantize(source, divisor, divisor + room, new, target, scale_at)
                    source += packed_step
                    target += code_step
                    scale_at += scale_step

    return helper(write_codes, separate=True)


def quantized_panels(data_dtype, cache_format, scale_format, group, groups):
    """Return the transfer of `quantized_row` with vectors: panels of `groups` groups, MANY panels at a time.

    It computes the maxima of all groups, then the scales, 16 at a time across panels, then the codes. Panels
    are read token by token, as they are packed. They are written head by head, because the tokens of a head
    may be neighbours in the cache.
    """
    scales = panels.scales(data_dtype, cache_format, scale_format)
    partial = panels.leaves_rest(group)
    rest: Any = helper(quantized_row(data_dtype, cache_format, scale_format, group)) if partial else None
    step = groups * group
    packed_step, code_step = BY_NAME[data_dtype].bytes(step), BY_NAME[cache_format].bytes(step)
    largest_bytes, scale_bytes = BY_NAME[data_dtype].bytes(1), BY_NAME[scale_format].bytes(1)
    scale_step = groups * scale_bytes
    room = 4 * (MANY * groups + LANES)  # bytes for a number of each group
    scratch = memory.scratch(4 * room)
    find_maxima = panel_maxima(data_dtype, group, groups)
    write_codes = panel_codes(data_dtype, cache_format, scale_format, group, groups, room)

    def transfer(
        packed, packed_token, packed_head, cache, cache_token, cache_head,
        scale, scale_token, scale_head, tokens, heads, repeat, dim,
    ):  # fmt: skip
        in_row, largest = dim // step, scratch()
        divisors = largest + room  # scales as float32, then their reciprocals, then scales as stored
        # MANY panels are `across` neighbours of a head, of `most_heads` heads, of `most_tokens` tokens.
        across = max(1, min(in_row, MANY))
        most_heads = max(1, min(heads, MANY // across))
        most_tokens = MANY // (across * most_heads)
        token = 0
        while token < tokens:
            head = 0
            while head < heads:
                panel = 0
                while panel < in_row:
                    source = packed + token * packed_token + head * packed_head + panel * packed_step
                    here = min(most_tokens, tokens - token), min(most_heads, heads - head)
                    neighbours = min(across, in_row - panel)
                    find_maxima(source, packed_token, packed_head, *here, neighbours, largest)
                    for i in range(0, here[0] * here[1] * neighbours * groups, LANES):
                        scales(largest + i * largest_bytes, divisors + 4 * i, divisors + room + 4 * i,
                               divisors + 2 * room + i * scale_bytes)  # fmt: skip
                    write_codes(
                        source, packed_token, packed_head,
                        cache=cache + token * cache_token + head * cache_head + panel * code_step,
                        cache_token=cache_token, cache_head=cache_head,
                        scale=scale + token * scale_token + head * scale_head + panel * scale_step,
                        scale_token=scale_token, scale_head=scale_head,
                        tokens=here[0], heads=here[1], across=neighbours, divisors=divisors,
                    )  # fmt: skip
                    panel += across
                head += most_heads
            token += most_tokens
        if partial and in_row * step < dim:
            for token in range(tokens):
                for head in range(heads):
                    rest(
                        packed + token * packed_token + head * packed_head + in_row * packed_step,
                        cache + token * cache_token + head * cache_head + in_row * code_step,
                        scale + token * scale_token + head * scale_head + in_row * scale_step,
                        dim - in_row * step,
                    )

    return transfer
