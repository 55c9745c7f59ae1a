"""The wide products of bfloat16 in pairs as machine code, which only some processors have (see `machine`)."""

import functools

from numba import types

from kvkit.cpu.simd import pairs
from kvkit.runtime.jit import callback


def pair_rows(source, rows, target):
    pairs.pair_rows(source, rows, target)


def pair_values(source, row, tokens, dim, target, panel):
    pairs.pair_values(source, row, tokens, dim, target, panel)


def scores(queries, keys, key_row, count, dim, target, scale):
    pairs.scores(queries, keys, key_row, count, dim, target, scale)


def sums(weights, values, panel, count, dim, target, factors):
    pairs.sums(weights, values, panel, count, dim, target, factors)


FUNCTIONS = {
    "pair_rows": (pair_rows, 3),
    "pair_values": (pair_values, 6),
    "pair_scores": (scores, 7),
    "pair_sums": (sums, 7),
}


@functools.cache
def code(name):
    function, count = FUNCTIONS[name]
    return callback(function, types.void(*[types.int64] * count), name)


def codes():
    """Addresses, by the names of the task's fields."""
    return {name: code(name).address for name in FUNCTIONS}
