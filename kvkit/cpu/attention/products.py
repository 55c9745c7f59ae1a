"""The two products of attention over a block of tokens, as machine code for each format.

`scores(...)` multiplies queries with keys, `sums(...)` weights with values. What `simd/attention.py` calls
narrow depends on the formats; wide takes float32 only. The plain forms are the tests' siblings.
"""

import functools

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.copy import blocks
from kvkit.cpu.simd import attention, panels
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import callback, helper

SCORES = types.void(*[types.int64] * 11)
SUMS = types.void(*[types.int64] * 12)
NARROW, WIDE = attention.NARROW, attention.WIDE


def in_place(cell, group, dims):
    """Whether narrow products read these rows where they lie: whole vectors, which hold whole groups."""
    return all(dim % attention.LANES == 0 for dim in dims) and (not cell or panels.lanes_divide(group))


@functools.cache
def orders(stored, cell, group, dim):
    """[rows, dim]: the elements of a row in the order that narrow scores of so many rows want queries in.

    None if it is always their own.
    """
    element = BY_NAME[stored]
    if not (cell or element.minifloat or element.block):
        return None
    table = np.zeros((NARROW + 1, dim), np.int64)
    for rows in (1, 2, 4, 8):
        table[rows] = attention.order(rows, stored, cell, group, dim)
    return table


@functools.cache
def scores(rows, stored="float32", cell=None, group=0, exact=False, near=False, plain=False):
    """(queries, keys, key_row, cells, cell_row, numbers, ahead, shift, count, dim, scores).

    For 1, 2, 4, 8 or 32 rows. `ahead`, `shift` and `near` are hints (see `narrow_scores`).

    Narrow: queries [dim / LANES, row, LANES], ordered (see `orders`), for the plain form [row, dim] as they
    are; keys in the cache, token t at keys + numbers[t] * key_row. Wide: queries [dim, row], keys in scratch,
    token t at keys + t * key_row.
    """
    key = ("scores", rows, stored, cell, group, exact, near, plain)
    if plain:
        return callback(plain_scores(rows, stored, cell, group, exact), SCORES, key)
    if rows == WIDE:
        wide = attention.wide_scores

        def scores(queries, keys, key_row, cells, cell_row, numbers, ahead, shift, count, dim, scores):
            wide(queries, keys, key_row, count, dim, scores)

    else:
        rounds = (cell,) if exact else ()
        scores = passed_on(attention.narrow_scores(rows, stored, cell, group, rounds, near=near))
    return callback(scores, SCORES, key)


@functools.cache
def sums(rows, stored="float32", cell=None, group=0, exact=False, near=False, plain=False):
    """(weights, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors).

    sums = sums * factors + weights times values; narrow sums are [row, dim], wide ones [dim, row].
    """
    key = ("sums", rows, stored, cell, group, exact, near, plain)
    if plain:
        return callback(plain_sums(rows, stored, cell, group, exact), SUMS, key)
    if rows == WIDE:
        wide = attention.wide_sums

        def sums(
            weights, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors
        ):
            wide(weights, values, value_row, count, dim, sums, factors)

    else:
        rounds = (cell,) if exact else ()
        narrow = attention.narrow_sums(rows, stored, cell, group, rounds, near=near)

        def sums(
            weights, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors
        ):
            narrow(
                weights, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors
            )

    return callback(sums, SUMS, key)


def passed_on(narrow):
    def scores(queries, keys, key_row, cells, cell_row, numbers, ahead, shift, count, dim, scores):
        narrow(queries, keys, key_row, cells, cell_row, numbers, ahead, shift, count, dim, scores)

    return scores


def element_at(stored, cell, group, exact):
    """(row, cells, i) -> one element of a row, as float32."""
    if BY_NAME[stored].block:
        return blocks.element_at(stored)
    if cell and BY_NAME[stored].minifloat:
        number, get_scale, step = memory.read(stored), memory.read(cell), BY_NAME[cell].bytes(1)
        return helper(
            lambda row, cells, i: number(row + i) * get_scale(cells + (i // group * step if group else 0))
        )
    if cell is None:
        get, size = memory.read(stored), BY_NAME[stored].bytes(1)
        return helper(lambda row, cells, i: get(row + i * size))
    get_code, get_cell = memory.load(types.int8), memory.read(cell)
    bits, cell_size, rounded = BY_NAME[stored].bits, BY_NAME[cell].bytes(1), cell if exact else "float32"

    def element(row, cells, i):
        code = get_code(row + i * bits // 8)
        if bits == 4:
            code = numeric.high_nibble(code) if i % 2 else numeric.low_nibble(code)
        return numeric.dequantize("float32", rounded, code, get_cell(cells + i // group * cell_size))

    return helper(element)


def plain_scores(rows, stored, cell, group, exact):
    element, get, put = (
        element_at(stored, cell, group, exact),
        memory.read("float32"),
        memory.write("float32"),
    )
    number, is_wide = memory.load(types.int64), rows == WIDE

    def scores(queries, keys, key_row, cells, cell_row, numbers, ahead, shift, count, dim, scores):
        for token in range(count):
            at = token if is_wide else number(numbers + 8 * token)
            for row in range(rows):
                total = types.float32(0)
                for i in range(dim):
                    query = get(queries + 4 * (i * rows + row if is_wide else row * dim + i))
                    total += query * element(keys + at * key_row, cells + at * cell_row, i)
                put(scores + 4 * (token * rows + row), total)

    return scores


def plain_sums(rows, stored, cell, group, exact):
    element, get, put = (
        element_at(stored, cell, group, exact),
        memory.read("float32"),
        memory.write("float32"),
    )
    number, is_wide = memory.load(types.int64), rows == WIDE

    def sums(weights, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors):
        for row in range(rows):
            for i in range(dim):
                place = sums + 4 * (i * rows + row if is_wide else row * dim + i)
                total = get(place) * get(factors + 4 * row)
                for token in range(count):
                    at = token if is_wide else number(numbers + 8 * token)
                    value = element(values + at * value_row, cells + at * cell_row, i)
                    total += get(weights + 4 * (token * rows + row)) * value
                put(place, total)

    return sums
