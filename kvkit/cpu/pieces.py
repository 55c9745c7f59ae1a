"""Rows between packed tensors and blocks, piece by piece (see `slots`): the walk beside `transfer`'s.

It calls the same machine code for runs of rows. Nothing is converted, so that code is chosen by the bytes
that rows hold, not by their formats.
"""

import functools

import numba
import numpy as np
from numba import prange, types

from kvkit.checks.slots import COUNT, HEAD, MEAN, SLOT, TOKEN
from kvkit.cpu import memory
from kvkit.cpu.attention import Arena
from kvkit.cpu.launches import Launch, address, threads
from kvkit.cpu.records import Record
from kvkit.cpu.rows import STORE, rows
from kvkit.cpu.simd import means, panels
from kvkit.cpu.simd.fractals import fractals
from kvkit.cpu.transfer import SMALL_BYTES, aligned
from kvkit.index import page_of, rest_of_page, row_of, sequence_of, share
from kvkit.jit import callback, helper, kernel
from kvkit.layouts.places import FRACTAL_BYTES

MOVES = {4: "float32", 2: "float16", 1: "int8"}  # a format whose elements have as many bytes
STREAM_BYTES = 4 * 2**20  # more than stays near a core: single slots are stored three times as fast around it
TILE = 16  # tokens that are moved head by head, where a head's tokens are neighbours in the cache
SIDE = Record(
    "packed token head cache block row",
    "outer packed_outer cache_outer inner packed_inner cache_inner dim",
    "by_head by_fractal elements line_bytes stores",
    "cells cell_block cell_row cell_outer cell_inner",
)
NO_CELLS = dict.fromkeys(("cells", "cell_block", "cell_row", "cell_outer", "cell_inner"), 0)
FORM = "outer", "packed_outer", "cache_outer", "inner", "packed_inner", "cache_inner"
INT, INDEX1, INDEX2 = types.int64, types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
SIDES = types.Array(numba.from_dtype(SIDE.dtype), 1, "C")
SIGNATURE = types.void(INT, INT, INT, INDEX2, INDEX1, SIDES, INT, INT)

call_rows, call_mean = memory.call(13), memory.call(5)


def move(rows_code, mean_code, chunks, pieces, starts, sides, block_size, lines):
    """Move the pieces to or from their slots: for each array an equal share of all tokens a worker.

    `starts` [pieces + 1] are the tokens before each piece, `sides` where a packed array and its cache lie. A
    mean takes shape in the line of its worker on its way.
    """
    total = starts[-1]
    for item in prange(sides.shape[0] * chunks):
        worker = np.int64(item)
        at, chunk = sides[worker // chunks], worker % chunks
        token, end = share(total, chunk, chunks), share(total, chunk + 1, chunks)
        piece = sequence_of(starts, token)
        while token < end:
            while token >= starts[piece + 1]:
                piece += 1
            done, slot = token - starts[piece], pieces[piece, SLOT]
            source = at.packed + (pieces[piece, TOKEN] + done) * at.token + pieces[piece, HEAD] * at.head
            if pieces[piece, MEAN]:
                if done == 0:
                    line = lines + worker * at.line_bytes
                    call_mean(mean_code, source, at.token, pieces[piece, COUNT], line, at.elements)
                    move_run(rows_code, at, line, slot, 1, block_size)
                token = starts[piece + 1]
            else:
                run = min(min(end, starts[piece + 1]) - token, rest_of_page(slot + done, block_size))
                run = min(run, TILE) if at.by_head else run
                move_run(rows_code, at, source, slot + done, run, block_size)
                token += run


@helper
def move_run(code, at, packed, slot, run, block_size):
    """Neighbouring rows of a block."""
    page, row = page_of(slot, block_size), row_of(0, slot, block_size)
    cache, cells = at.cache + page * at.block + row * at.row, at.cells + page * at.cell_block
    cells += row * at.cell_row
    for outer in range(at.outer):
        source, target = packed + outer * at.packed_outer, cache + outer * at.cache_outer
        cell = cells + outer * at.cell_outer
        if at.by_fractal:
            if at.stores:
                fractals(
                    source, at.token, at.packed_inner, target, at.row, at.cache_inner, run, at.inner
                )  # fmt: skip
            else:
                fractals(
                    target, at.row, at.cache_inner, source, at.token, at.packed_inner, run, at.inner
                )  # fmt: skip
        elif at.by_head:
            call_rows(
                code, source, at.packed_inner, at.token, target, at.cache_inner, at.row,
                cell, at.cell_inner, at.cell_row, at.inner, run, 1, at.dim,
            )  # fmt: skip
        else:
            call_rows(
                code, source, at.token, at.packed_inner, target, at.row, at.cache_inner,
                cell, at.cell_row, at.cell_inner, run, at.inner, 1, at.dim,
            )  # fmt: skip


@functools.cache
def compiled(parallel):
    return kernel(move, SIGNATURE, parallel, parallel=parallel)


@functools.cache
def mean(element):
    """Machine code (source, step, count, target, dim): the mean of `count` rows of a format."""
    average = means.mean(element)

    def mean(source, step, count, target, dim):
        average(source, step, count, target, dim)

    return callback(mean, types.void(*[types.int64] * 5), ("mean", element))


lines = Arena()


def prepare(direction, packed, caches, pieces, block_size, element=None):
    """A launch that moves pieces between packed arrays and caches, one or a pair of each.

    packed: [tokens, heads, dim]. Caches: [blocks, rows, heads, dim], of any strides; with one head where
    pieces name the heads. `element` is the format of means, if there are any.
    """
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces[:, COUNT], out=starts[1:])
    tokens = int(starts[-1])
    forms = [row_form(array, cache) for array, cache in zip(packed, caches, strict=True)]
    unit = min(unit_of(form[6]) for form in forms)
    sides, moved, line_bytes = [], 0, 0
    for array, cache, form in zip(packed, caches, forms, strict=True):
        (_, _, heads, dim), size = cache.shape, cache.itemsize
        line_bytes = max(line_bytes, dim * size)
        moved += tokens * heads * dim * size
        *strides, row_bytes = form
        sides.append(SIDE.filled({
            "packed": address(array), "token": array.strides[0], "head": array.strides[1],
            "cache": address(cache), "block": cache.strides[0], "row": cache.strides[1],
            **dict(zip(FORM, strides, strict=True)), "dim": row_bytes // unit,
            "by_head": abs(form[5]) > abs(cache.strides[1]), "by_fractal": row_bytes == FRACTAL_BYTES,
            "elements": dim, "line_bytes": dim * size, "stores": direction == STORE, **NO_CELLS,
        }))  # fmt: skip
    numbers = np.concatenate(sides)
    workers = threads() if moved >= SMALL_BYTES else 1
    written = caches if direction == STORE else packed
    stream = moved >= STREAM_BYTES and all(map(aligned, written))
    code = rows(direction, MOVES[unit], MOVES[unit], stream=stream).address
    averages = mean(element).address if element else 0
    kernel, records = compiled(workers > 1), numbers.view(SIDE.dtype)

    def run():
        memory = lines.at_least(len(forms) * workers * line_bytes) if averages else 0
        kernel(code, averages, workers, pieces, starts, records, block_size, memory)

    return Launch(numbers, {}, run, alive=(*packed, *caches))


def encode(side, pieces):
    """A launch that stores tokens as codes of a pool, each head with its scale, given or found."""
    tokens, pool, cells = side.tokens, side.pool, side.cells
    _, block_size, heads, dim = pool.shape
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces[:, COUNT], out=starts[1:])
    groups = (
        panels.groups_in_panel(side.group, dim // side.group) if side.group and side.stored == "int8" else 0
    )
    code = rows(STORE, side.packed, side.stored, side.cell, side.group, groups).address
    block = row = head = 0
    if cells is not None:
        block, row, head = cells.strides[:3] if side.group else (0, 0, cells.strides[0] if heads > 1 else 0)
        head = 0 if cells.shape == (1,) else head
    (token, packed_head, size), (pool_head, step) = tokens.strides, pool.strides[2:]
    form = 1, 0, 0, heads, packed_head, pool_head
    ends = {"cell_outer": 0, "cell_inner": head}
    if dim > 1 and step != pool.itemsize:
        form, dim = (heads, packed_head, pool_head, dim, size, step), 1
        ends = {"cell_outer": head, "cell_inner": 0}
    numbers = SIDE.filled({
        "packed": address(tokens), "token": token, "head": packed_head,
        "cache": address(pool), "block": pool.strides[0], "row": pool.strides[1],
        **dict(zip(FORM, form, strict=True)), "dim": dim,
        "by_head": abs(form[5]) > abs(pool.strides[1]), "by_fractal": 0, "elements": dim, "line_bytes": 0,
        "stores": 1, "cells": 0 if cells is None else address(cells), "cell_block": block, "cell_row": row,
        **ends,
    })  # fmt: skip
    workers = threads() if tokens.nbytes >= SMALL_BYTES else 1
    kernel, records = compiled(workers > 1), numbers.view(SIDE.dtype)

    def run():
        kernel(code, 0, workers, pieces, starts, records, block_size, 0)

    return Launch(numbers, {}, run, alive=(tokens, pool, cells))


def row_form(packed, cache):
    """(outer, packed stride, cache stride, inner, packed stride, cache stride, bytes) of a token's row."""
    (_, _, heads, dim), size = cache.shape, cache.itemsize
    (packed_head, packed_step), (cache_head, cache_step) = packed.strides[1:], cache.strides[2:]
    if dim > 1 and (packed_step != size or cache_step != size):
        return heads, packed_head, cache_head, dim, packed_step, cache_step, size
    if heads == 1 or packed_head == cache_head == dim * size:
        return 1, 0, 0, 1, 0, 0, heads * dim * size
    return 1, 0, 0, heads, packed_head, cache_head, dim * size


def unit_of(size):
    """The bytes to move at a time: 16 of them fill a vector, if they can."""
    for unit in (4, 2, 1):
        if size % (16 * unit) == 0:
            return unit
    return 4 if size % 4 == 0 else 2 if size % 2 == 0 else 1
