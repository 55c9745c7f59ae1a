"""Place the arrays of a call in memory of other strides and addresses."""

import numpy as np
from surroundings import carve


def strided(array):
    wide = np.full((*array.shape[:-1], 3 * array.shape[-1]), -7, array.dtype)
    wide[..., ::3] = array
    return wide[..., ::3]


def fused(array):
    """Return an array as a slice of rows that hold query, key and value side by side."""
    heads, dim = array.shape[-2:]
    rows = np.full((*array.shape[:-2], 3 * heads + 1, dim), 9, np.float32).astype(array.dtype)
    part = rows[..., heads : 2 * heads, :]
    part[...] = array
    return part


def heads_first(array):
    return array.swapaxes(-3, -2).copy().swapaxes(-3, -2)


def backwards(array):
    return np.flip(np.flip(array, (0, -2)).copy(), (0, -2))


def guarded(array):
    return carve(array)[0]
