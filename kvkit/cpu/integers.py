"""Narrow products over codes by integers as machine code, which only some processors have (see `machine`)."""

import functools

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.products import SCORES
from kvkit.cpu.simd import integers
from kvkit.formats.elements import BY_NAME
from kvkit.jit import callback

WIDTHS = 128, 64  # elements of a row at a time
STORED = {"int8": WIDTHS, "int4": WIDTHS[:1], "q8_0": WIDTHS, "q4_0": WIDTHS[:1]}
MOST_TOKENS = 64  # of a block
QUERIES = types.void(*[types.int64] * 3)
SUMS = types.void(*[types.int64] * 14)


def width(stored, cell, group, dims):
    """Elements that these products take at a time; None if they do not fit rows of such codes."""
    if stored not in STORED or (cell is None) != (BY_NAME[stored].block is not None):
        return None
    group = group or 8
    fit = (
        width
        for width in STORED[stored]
        if not any(dim % width for dim in dims)
        and group % 8 == 0
        and (width % group == 0 or group % width == 0)
    )
    return next(fit, None)


@functools.cache
def queries(rows, *form):
    """(queries [row, dim], dim, target): as `scores` wants them, in at most (4 * dim + 64) * rows bytes."""
    fixed, scratch = integers.fixed_queries(rows, *form), memory.scratch(2 * rows * form[-1])

    def queries(queries, dim, target):
        fixed(queries, dim, target, scratch())

    return callback(queries, QUERIES, ("integer queries", rows, *form))


@functools.cache
def scores(rows, near, *form):
    """`products.scores` of such queries; `form` is of the codes: (stored, cell, group, width)."""
    of_block = integers.scores(rows, near, *form)

    def scores(queries, keys, key_row, cells, cell_row, numbers, ahead, shift, count, dim, scores):
        of_block(queries, keys, key_row, cells, cell_row, numbers, ahead, shift, count, dim, scores)

    return callback(scores, SCORES, ("integer scores", rows, near, *form))


@functools.cache
def sums(rows, near, *form):
    """`products.sums` of scores, with `top` and `total` of the online softmax behind the other arguments.

    Scores of whole vectors are overwritten.
    """
    softmax, of_block = integers.softmax(rows), integers.sums(rows, near, *form)
    scratch = memory.scratch(integers.scratch_bytes(rows, MOST_TOKENS, *form))

    def sums(
        scores, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors,
        top, total,
    ):  # fmt: skip
        softmax(scores, -(-count * rows // integers.LANES), top, total, factors)
        of_block(
            scores, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors,
            scratch(),
        )  # fmt: skip

    return callback(sums, SUMS, ("integer sums", rows, near, *form))


def addresses(rows, near, stored, form):
    """The addresses of the three, over keys and values `stored` as two formats."""
    key, value = stored
    return (
        queries(rows, key, *form).address,
        scores(rows, near, key, *form).address,
        sums(rows, near, value, *form).address,
    )
