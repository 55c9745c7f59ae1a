"""Rows that lie in segments, floats, then codes, then floats again, and attention over them.

A table describes the segments of a side. Attention numbers rows by position, then sequence, then head, from
the address of the table on, so that the address of a row says which one it is.
"""

import functools
from dataclasses import replace

import numpy as np
from numba import types

from kvkit.checks.records import Context, Side
from kvkit.cpu import machine, memory
from kvkit.cpu.attention import prepare, products
from kvkit.cpu.attention.products import SCORES, SUMS
from kvkit.cpu.copy.codes import cells_of
from kvkit.cpu.copy.rows import LOAD, SIGNATURE, rows
from kvkit.cpu.launches import address
from kvkit.cpu.simd import attention as simd
from kvkit.cpu.simd.codes import whole_panels
from kvkit.formats.elements import CODES, coarser
from kvkit.runtime.jit import callback, helper

SEGMENT = (
    "end code address sequence head row",
    "cells cell_sequence cell_head cell_block blocks",
)
FIELDS = [name for line in SEGMENT for name in line.split()]
HEADS, PLANES, COUNTING, CLAMPED, ONES = range(0, 40, 8)  # then come the segments
START, SEGMENT_BYTES = 40, 8 * len(FIELDS)
END, CODE, ADDRESS, SEQUENCE, HEAD, ROW, CELLS, CELL_SEQUENCE, CELL_HEAD, CELL_BLOCK, BLOCKS = range(
    0, SEGMENT_BYTES, 8
)
FEW = 8  # more tokens than any tile leaves over
CLAMPS = np.minimum(np.arange(FEW), np.arange(-1, FEW - 1)[:, None]).clip(0)  # [tokens, FEW]
UNITS = np.ones(simd.NARROW, np.float32)

get, call_rows = memory.load(types.int64), memory.call(13)


def new_table(heads, planes):
    """A description of three segments, still to be filled in behind its head."""
    table = np.zeros(START // 8 + 3 * len(FIELDS), np.int64)
    table[: START // 8] = heads, planes, address(prepare.COUNTING), address(CLAMPS), address(UNITS)
    return table


@helper
def run_at(table, segment, plane, position, end):
    """The tokens from a position on that lie in one segment and share their scales or have their own.

    (segment, first position behind, address of a row, of its scales, and the steps of both)
    """
    sequence, head = divmod(plane, get(table + HEADS))
    while get(segment + END) <= position:
        segment += SEGMENT_BYTES
    stop, blocks = min(end, get(segment + END)), get(segment + BLOCKS)
    block, cell_row = position, get(segment + CELL_BLOCK)
    if blocks:
        block, cell_row, last = get(blocks + 8 * position), 0, stop
        stop = position + 1
        while stop < last and get(blocks + 8 * stop) == block:
            stop += 1
    row, step = get(segment + ADDRESS), get(segment + ROW)
    row += sequence * get(segment + SEQUENCE) + head * get(segment + HEAD) + position * step
    cells = get(segment + CELLS) + sequence * get(segment + CELL_SEQUENCE) + head * get(segment + CELL_HEAD)
    cells += block * get(segment + CELL_BLOCK)  # floats have cells at 0
    return segment, stop, row, cells, step, cell_row


def widen_segments(
    target, target_row, target_head, row, row_step, row_head, table, table_row, table_head,
    tokens, heads, repeat, dim,
):  # fmt: skip
    """Rows as float32, wherever they lie, from the one at the address `row` on."""
    position, plane = divmod(row - table, get(table + PLANES))
    segment, end = table + START, position + tokens
    while position < end:
        segment, stop, source, cells, step, cell_row = run_at(table, segment, plane, position, end)
        call_rows(
            get(segment + CODE), target, target_row, 0, source, step, 0, cells, cell_row, 0,
            stop - position, 1, 1, dim,
        )  # fmt: skip
        target += (stop - position) * target_row
        position = stop


@functools.cache
def widen_code():
    """`widen_segments` as machine code."""
    return callback(widen_segments, SIGNATURE)


@functools.cache
def floats_code(element):
    """Machine code that widens rows of floats."""
    return rows(LOAD, "float32", element).address


# Products where rows lie


def stored_as(codes):
    """(stored, cell, group, rounds) of codes, as micro-kernels name them.

    Numbers of 16 bits are not rounded to them, as a read array's are: of a decode step that would take half
    of its time again for float16, and all of it for bfloat16. And a call of many rows does as one of few.
    """
    if codes.stored:
        return codes.stored, *cells_of(codes), ()
    exact = codes.symmetric and coarser(codes.cell, codes.element)
    stored = CODES[codes.bits, codes.symmetric].name
    return stored, codes.cell, codes.group, (codes.cell,) if exact else ()


@functools.cache
def scores(count, codes):
    """`products.scores` of so many rows: queries in the order that the codes want them in."""
    (*like, rounds), ahead = stored_as(codes), machine.ahead()
    floats = simd.narrow_scores(count, codes.element, None, 0, like=tuple(like), near=ahead.near)
    coded = simd.narrow_scores(count, *like, rounds, tuple(like), near=ahead.near)
    tile, shared, shift = simd.tile_tokens(count), codes.tokens > 1, ahead.bytes

    @helper
    def of_run(queries, row, step, cells, cell_row, numbers, tokens, dim, scores):
        if cells == 0:
            floats(queries, row, step, 0, 0, numbers, 0, shift, tokens, dim, scores)
        else:  # scales that all tokens share are then read once for a tile
            coded(
                queries, row, step, cells, np.int64(0) if shared else cell_row, numbers, 0, shift,
                tokens, dim, scores,
            )  # fmt: skip

    def scores(queries, keys, key_row, table, table_row, numbers, ahead, shift, tokens, dim, scores):
        position, end = get(numbers), get(numbers + 8 * (tokens - 1)) + 1
        segment, plane = table + START, keys - table
        while position < end:
            segment, stop, row, cells, step, cell_row = run_at(table, segment, plane, position, end)
            live = stop - position
            few = live < tile
            whole = tile if few else live - live % tile
            numbers = get(table + CLAMPED) + 8 * FEW * live if few else get(table + COUNTING)
            of_run(queries, row, step, cells, cell_row, numbers, whole, dim, scores)
            done = live if few else whole
            scores += 4 * count * done
            position += done

    return callback(scores, SCORES, ("segment scores", count, codes))


@functools.cache
def sums(count, codes):
    """`products.sums` of so many rows."""
    ahead = machine.ahead()
    floats = simd.narrow_sums(count, codes.element, None, 0, neighbours=True, near=ahead.near)
    coded = simd.narrow_sums(count, *stored_as(codes), neighbours=True, near=ahead.near)
    shared, shift = codes.tokens > 1, ahead.bytes

    @helper
    def of_run(weights, row, step, cells, cell_row, numbers, tokens, dim, sums, factors):
        if cells == 0:
            floats(weights, row, step, 0, 0, numbers, 0, shift, tokens, dim, sums, factors)
        else:
            coded(
                weights, row, step, cells, np.int64(0) if shared else cell_row, numbers, 0, shift,
                tokens, dim, sums, factors,
            )  # fmt: skip

    def sums(weights, values, value_row, table, table_row, numbers, ahead, shift, tokens, dim, sums, factors):
        position, end = get(numbers), get(numbers) + tokens
        segment, plane, numbers = table + START, values - table, get(table + COUNTING)
        while position < end:
            segment, stop, row, cells, step, cell_row = run_at(table, segment, plane, position, end)
            of_run(weights, row, step, cells, cell_row, numbers, stop - position, dim, sums, factors)
            weights += 4 * count * (stop - position)
            factors = get(table + ONES)
            position = stop

    return callback(sums, SUMS, ("segment sums", count, codes))


@functools.cache
def reader(key, value, dims):
    """How attention reads keys and values of such codes: in place where vectors fit their rows."""
    key, value = (replace(side, tokens=min(side.tokens, 2)) for side in (key, value))  # as many or one
    vectors = all(side.stored or whole_panels(side.group) for side in (key, value))
    if not vectors or any(dim % simd.LANES for dim in dims):
        return prepare.Reader(widen_code().address, None, None)

    def product(count):
        return scores(count, key).address, sums(count, value).address

    stored, cell, group, _ = stored_as(key)
    return prepare.Reader(widen_code().address, product, products.orders(stored, cell, group, dims[0]))


def context(packed, batch, heads, dims, forms, tables):
    """A `Context` of keys and values that lie in segments."""
    key, value = (Side(address(table), heads, batch * heads, 1, scales=address(table)) for table in tables)
    dim, value_dim = dims
    return Context(
        packed, "float32", None, 0, heads, dim, value_dim, (key, value), 4 * dim, 4 * value_dim,
        as_loaded=False, reader=reader(*forms, dims),
    )  # fmt: skip
