"""Products over codes by integers as machine code, which only some processors have (see `machine`)."""

import functools

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.products import SCORES
from kvkit.cpu.simd import integers, wide_integers
from kvkit.formats.elements import BY_NAME
from kvkit.runtime.jit import callback, helper

WIDTHS = 128, 64  # elements of a row at a time
STORED = {"int8": WIDTHS, "int4": WIDTHS[:1], "q8_0": WIDTHS, "q4_0": WIDTHS[:1]}
QUERIES = types.void(*[types.int64] * 3)
SUMS = types.void(*[types.int64] * 15)
UNFOLDED = types.void(*[types.int64] * 8)
WIDE_SCORES = types.void(*[types.int64] * 5)

get_float, put_float = memory.load(types.float32), memory.store(types.float32)


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
    """`products.sums` of scores, with `top` and `total` of the online softmax, and memory to work in.

    Where scales are too uneven it leaves all as it is, but for -1 in the second vector of factors. Scores of
    whole vectors are overwritten; the memory is 256 * dim bytes, at least 32768.
    """
    fixed_scales, softmax = integers.fixed_scales(*form), integers.softmax(rows)
    of_block = integers.sums(rows, near, *form)

    def sums(
        scores, values, value_row, cells, cell_row, numbers, ahead, shift, count, dim, sums, factors,
        top, total, scratch,
    ):  # fmt: skip
        fixed_scales(values, value_row, cells, cell_row, numbers, count, dim, scratch)
        if get_float(scratch) < 0:
            put_float(factors + 4 * integers.LANES, np.float32(-1))
            return
        softmax(scores, -(-count * rows // integers.LANES), top, total, factors)
        of_block(
            scores, values, value_row, numbers, ahead, shift, count, dim, sums, factors, scratch,
            scratch + 64 + 40 * dim,
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


@functools.cache
def wide_queries(*form):
    """(queries [dim, WIDE], dim, target): as `wide_scores` want them, in 64 * dim + 128 bytes."""

    fixed = wide_integers.fixed_queries(*form)

    def queries(queries, dim, target):
        fixed(queries, dim, target)

    return callback(queries, QUERIES, ("wide integer queries", *form))


@functools.cache
def wide_keys(*form):
    """(keys, key_row, cells, cell_row, numbers, count, dim, target): 4 * dim bytes for each token."""
    unfolded = wide_integers.unfolded_keys(*form)

    def keys(keys, key_row, cells, cell_row, numbers, count, dim, target):
        unfolded(keys, key_row, cells, cell_row, numbers, count, dim, target)

    return callback(keys, UNFOLDED, ("wide integer keys", *form))


@helper
def scales_of(values, dim):
    """Where the scales of wide values are."""
    return values + (4 * dim + 64) * (integers.MOST_TOKENS // 2)


@functools.cache
def wide_values(*form):
    """(values, value_row, cells, cell_row, numbers, count, dim, target): in 512 * dim bytes.

    The float32 at their `scales_of` is -1 where these are too uneven, and nothing else is there.
    """
    fixed_scales, unfolded = integers.fixed_scales(*form), wide_integers.unfolded_values(*form)

    def values(values, value_row, cells, cell_row, numbers, count, dim, target):
        scales = scales_of(target, dim)
        fixed_scales(values, value_row, cells, cell_row, numbers, count, dim, scales)
        if get_float(scales) >= 0:
            unfolded(values, value_row, numbers, count, dim, target)

    return callback(values, UNFOLDED, ("wide integer values", *form))


@functools.cache
def wide_scores(*form):
    """(queries, keys, count, dim, scores): [token, WIDE], of a multiple of 8 tokens."""
    of_block = wide_integers.scores(*form)

    def scores(queries, keys, count, dim, scores):
        of_block(queries, keys, count, dim, scores)

    return callback(scores, WIDE_SCORES, ("wide integer scores", *form))


@functools.cache
def wide_sums(*form):
    """(scores, values, count, dim, sums, factors, top, total): sums [dim, WIDE]; scores are overwritten."""
    of_block = wide_integers.sums(*form)

    def sums(scores, values, count, dim, sums, factors, top, total):
        wide_integers.softmax(scores, count, top, total, factors)
        of_block(scores, values, scales_of(values, dim), count, dim, sums, factors)

    return callback(sums, UNFOLDED, ("wide integer sums", *form))


def wide_addresses(stored, form):
    """The addresses of the five, by the names of the task's fields."""
    key, value = stored
    codes = {
        "queries": wide_queries(key, *form), "keys": wide_keys(key, *form),
        "values": wide_values(value, *form),
        "scores": wide_scores(key, *form), "sums": wide_sums(value, *form),
    }  # fmt: skip
    return {"integer_" + name: code.address for name, code in codes.items()}
