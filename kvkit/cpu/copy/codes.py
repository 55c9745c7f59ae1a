"""Encode and widen rows of the codes of quantized layers; `attention/segmented.py` attends to them.

Codes of 8, 4 or 2 bits are packed along the head. A group is `group` neighbouring elements of a token, or one
element of each of `tokens` tokens. It has a scale and, if codes are asymmetric, a minimum. A block of tokens
has all its scales, then all its minima. So one form of code widens rows whose scales belong to a token, and
rows whose scales belong to a block.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.copy.rows import READ, SIGNATURE, STORE, call_rows, copy_side_at, row_by_row, rows
from kvkit.cpu.launches import WORKER, Launch, Record, address, run_workers, threads
from kvkit.cpu.simd import codes as panels
from kvkit.cpu.simd.lanes import LANES
from kvkit.cpu.simd.panels import leaves_rest
from kvkit.formats.elements import BY_NAME, CODES, coarser
from kvkit.formulas import numeric
from kvkit.formulas.index import share
from kvkit.runtime.jit import callback, compiled, helper, shared

SMALL = 2**15  # elements; one thread finishes fewer before a second one is awake


@dataclass(frozen=True)
class Codes:
    """The format of codes, which decides the machine code."""

    element: str  # the format of the numbers that are encoded
    bits: int
    symmetric: bool
    scale_format: str  # the format of scales and minima
    group: int
    tokens: int  # tokens of a block; group or tokens is 1
    cache_format: str = ""  # a format that operators store too; bits and symmetric are then unused


@shared
def asymmetric_code(x, minimum, scale, most):
    """Return the code of x, 0 to `most`: (x - minimum) / scale, rounded half to even."""
    ratio = min(max((x - minimum) / scale, np.float32(0)), np.float32(most))
    return np.int8(numeric.bits_of(ratio + np.float32(numeric.ROUNDER)) & np.uint32(0xFF))


def scale_format_of(codes):
    """Return (scale format, group) of a format that operators store; (None, 0) if blocks contain scales."""
    return (None, 0) if BY_NAME[codes.cache_format].block else (codes.scale_format, codes.group)


@functools.cache
def widen(codes, plain=False, rounds=True):
    """Compile the widening of rows to float32, rounded to the element format that was encoded.

    Without `rounds`, numbers are not rounded, as attention reads them (see `segmented.stored_as`). The code
    takes (target, target_row, target_head, codes, code_row, code_head, scales, scale_row, scale_head,
    tokens, heads, 1, dim). Tokens of one block share scales: their `scale_row` is 0.
    """
    if codes.cache_format:
        return rows(READ, "float32", codes.cache_format, *scale_format_of(codes))
    element, product = codes.element, codes.scale_format
    if not rounds:
        element, product = "float32", product if coarser(product, element) else "float32"
    return widen_row(replace(codes, element=element, tokens=1), product, plain)


@functools.cache
def widen_row(codes, product, plain):
    """Compile `widen` for codes of any block size; code * scale is rounded to the format `product` first."""
    element, bits, symmetric, scale_format, group = (
        codes.element, codes.bits, codes.symmetric, codes.scale_format, codes.group,
    )  # fmt: skip
    get_byte, get_scale, put = memory.load(types.int8), memory.read(scale_format), memory.write("float32")
    scale_bytes, mask, most = BY_NAME[scale_format].bytes(1), (1 << bits) - 1, (1 << bits - 1) - 1
    vector = panels.whole_panels(group) and not plain
    dequantize, rounded = numeric.dequantizing(element, product), numeric.rounding(element)
    panel: Any = panels.widen(bits, symmetric, scale_format, group, product, element) if vector else None
    partial = not vector or leaves_rest(group)

    def row(target, codes, scales, dim):
        minima, whole = scales + dim // group * scale_bytes, 0
        if vector:
            whole = dim // LANES * LANES
            for i in range(0, whole, LANES):
                at = i // group * scale_bytes
                panel(codes + i * bits // 8, scales + at, minima + at, target + 4 * i)
        if partial:
            for i in range(whole, dim):
                at = i // group * scale_bytes
                code = (get_byte(codes + i * bits // 8) >> (i * bits % 8)) & mask
                if symmetric:
                    code -= (mask + 1) if code > most else 0
                    number = dequantize(code, get_scale(scales + at))
                else:
                    number = rounded(np.float32(code) * get_scale(scales + at) + get_scale(minima + at))
                put(target + 4 * i, number)

    return callback(row_by_row(row), SIGNATURE, ("widen", codes, product, plain))


@functools.cache
def encoder(codes, plain=False):
    """Compile the encoding of blocks of tokens; each block is contiguous.

    The code takes (source, source_block, source_head, codes, code_block, code_head, scales, scale_block,
    scale_head, blocks, heads, 1, dim).
    """
    if codes.cache_format:
        return rows(STORE, codes.element, codes.cache_format, *scale_format_of(codes))
    element, bits, scale_format = codes.element, codes.bits, codes.scale_format
    group, tokens = codes.group, codes.tokens
    size, width = BY_NAME[element].bytes(1), min(group, LANES)
    vector = panels.whole_panels(group) and not plain
    panel: Any = panels.encode(bits, codes.symmetric, scale_format, width, element) if vector else None
    partial, step = not vector or leaves_rest(group), max(group, LANES)
    rest: Any = encoded_groups(codes) if partial else None
    scale_bytes = BY_NAME[scale_format].bytes(1)
    count = tokens if tokens > 1 else step // LANES  # vectors of a group

    def encode_block(source, codes, scales, dim):
        minima, whole = scales + dim // group * scale_bytes, 0
        if vector:
            whole = dim // step * step
            stride = dim if tokens > 1 else LANES
            for i in range(0, whole, step):
                at = i // group * scale_bytes
                panel(
                    source + i * size, stride * size, count, codes + i * bits // 8, stride * bits // 8,
                    scales + at, minima + at,
                )  # fmt: skip
        if partial:
            rest(source, codes, scales, minima, whole // group, dim)

    passes = "few" if vector else "all"
    return callback(row_by_row(encode_block), SIGNATURE, ("encode", codes, plain), passes=passes)


def encoded_groups(codes):
    """Return a helper that encodes the groups of a block from `first` on, one by one, with scalar code."""
    element, bits, symmetric, scale_format = codes.element, codes.bits, codes.symmetric, codes.scale_format
    group, tokens = codes.group, codes.tokens
    get, put_scale = memory.read(element), memory.write(scale_format)
    get_byte, put_byte = memory.load(types.int8), memory.store(types.int8)
    size, scale_bytes, mask = BY_NAME[element].bytes(1), BY_NAME[scale_format].bytes(1), (1 << bits) - 1
    _, most = CODES[bits, symmetric].limits
    group_scale, quantize = numeric.group_scaling(element), numeric.quantizing(element)
    rounded = numeric.rounding(scale_format)

    def encode_groups(source, codes, scales, minima, first, dim):
        for g in range(first, dim // group):
            low = high = get(source + g * group * size)
            for t in range(tokens):
                for i in range(g * group, (g + 1) * group):
                    x = get(source + (t * dim + i) * size)
                    low, high = min(low, x), max(high, x)
            if symmetric:
                scale = group_scale(max(high, -low), most)
            else:
                low = rounded(low) + np.float32(0)  # turns -0 into +0
                scale = rounded(max((high - low) / np.float32(most), numeric.EPS32))
                put_scale(minima + g * scale_bytes, low)
            put_scale(scales + g * scale_bytes, scale)
            for t in range(tokens):
                for i in range(g * group, (g + 1) * group):
                    x = get(source + (t * dim + i) * size)
                    code = quantize(x, scale, most) if symmetric else asymmetric_code(x, low, scale, most)
                    place, shift = codes + (t * dim + i) * bits // 8, i * bits % 8
                    byte = get_byte(place) & ~(mask << shift)
                    put_byte(place, np.int8(byte | (code & mask) << shift))

    return helper(encode_groups)


PARAMS = Record("rows_code chunks items workers units side heads dim")
record = memory.record(PARAMS)


@compiled(WORKER)
def transfer_units(worker, params_at):
    """Call the machine code of rows for equal shares of the units (tokens or blocks) of every sequence.

    `side` is the address of a `COPY_SIDE`: addresses and byte strides of packed rows, codes and scales.
    """
    params = record(params_at)
    at, item = copy_side_at(params.side), worker
    while item < params.items:
        b, chunk = item // params.chunks, item % params.chunks
        first, end = share(params.units, chunk, params.chunks), share(params.units, chunk + 1, params.chunks)
        if first < end:
            call_rows(
                params.rows_code,
                packed=at.packed + b * at.packed_sequence + first * at.packed_token,
                packed_token=at.packed_token, packed_head=at.packed_head,
                cache=at.cache + b * at.cache_sequence + first * at.cache_row,
                cache_token=at.cache_row, cache_head=at.cache_head,
                scale=at.scale + b * at.scale_sequence + first * at.scale_row,
                scale_token=at.scale_row, scale_head=at.scale_head,
                tokens=end - first, heads=params.heads, dim=params.dim,
            )  # fmt: skip
        item += params.workers


def prepare_codes(code, batch, units, side, heads, dim, elements):
    """Return a launch that runs the machine code of rows over all units, in one thread if there are few.

    `side` lists the fields of a `COPY_SIDE`.
    """
    chunks, numbers = threads() if elements >= SMALL else 1, np.array(side, np.int64)
    items = batch * chunks
    workers = items if chunks > 1 else 1
    params = PARAMS.filled({
        "rows_code": code, "chunks": chunks, "items": items, "workers": workers,
        "units": units, "side": numbers, "heads": heads, "dim": dim,
    })  # fmt: skip
    run = functools.partial(run_workers, transfer_units.code, workers, address(params))
    return Launch(numbers, {}, run, alive=(params,))
