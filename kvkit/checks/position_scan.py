"""One pass over the positions of packed sequences: the first rule they break, as numbers."""

import functools

import numpy as np
from numba import types

from kvkit.jit import kernel

INT64_MAX = np.iinfo(np.int64).max
INDEX1 = types.Array(types.int64, 1, "C")
FINE, STARTS, FIRST, LAST, HINT = range(5)
SIGNATURE = types.UniTuple(types.int64, 3)(INDEX1, INDEX1, types.int64)


def scan(starts, first, longest):
    """(rule, sequence, its length): the first rule that sequences break."""
    for b in range(first.shape[0]):
        if starts[b + 1] < starts[b]:
            return STARTS, b, 0
        length = starts[b + 1] - starts[b]
        if first[b] < 0:
            return FIRST, b, length
        if first[b] > INT64_MAX - length:
            return LAST, b, length
        if length > longest:
            return HINT, b, length
    return FINE, 0, 0


@functools.cache
def compiled():
    return kernel(scan, SIGNATURE)
