"""Multiply matrices without the threads of BLAS.

Callers run in threads of their own. Those of OpenBLAS spin while they wait, which takes as much processor
time again.
"""

import numpy as np

from kvkit.typed import Array

ONE_THREAD = 2**18  # OpenBLAS runs products of at most so many multiplications on one thread
ONE_THREAD_VECTOR = 2**13  # products of a matrix of so many elements and a vector
DEPTH = 128  # terms of a sum that are added at a time in float32


def product(left: Array, right: Array) -> Array:
    """Multiply float32 [.., m, k] by [.., k, n], in tiles for which BLAS starts no threads."""
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    (rows, depth), columns = left.shape[-2:], right.shape[-1]
    out = np.empty((*batch, rows, columns), np.float32)
    limit = ONE_THREAD_VECTOR if 1 in (rows, columns) else ONE_THREAD
    height = max(min(rows, 64, limit // max(depth, 1)), 1)
    width = max(min(columns, limit // max(depth * height, 1)), 1)
    height = max(min(rows, limit // max(depth * width, 1)), 1)
    for begin, end, tall in tiles(rows, height):
        for first, last, wide in tiles(columns, width):
            down, across = (end - begin) // tall, (last - first) // wide
            own = left[..., begin:end, :].reshape(*left.shape[:-2], down, 1, tall, depth)
            other = right[..., first:last].reshape(*right.shape[:-1], across, wide)
            other = np.moveaxis(other, -2, -3)[..., None, :, :, :]  # [.., 1, across, k, wide]
            target = out[..., begin:end, first:last].reshape(*batch, down, tall, across, wide)
            np.matmul(own, other, out=target.swapaxes(-3, -2))
    return out


def tiles(count: int, size: int) -> list[tuple[int, int, int]]:
    """Return (begin, end, size of a tile) of the whole tiles of `count` elements, and of what they leave."""
    whole = count - count % size
    return [each for each in ((0, whole, size), (whole, count, count - whole)) if each[0] < each[1]]


def long_product(left: Array, right: Array, dtype: type = np.float32) -> Array:
    """Multiply float32 [.., m, k] by [.., k, n] for a large k; sums of `DEPTH` terms are added in `dtype`."""
    depth, total = left.shape[-1], np.zeros((*left.shape[:-1], right.shape[-1]), dtype)
    for begin, end, size in tiles(depth, DEPTH):
        for first in range(begin, end, 32 * size):  # a few at a time stay in the processor's cache
            last = min(first + 32 * size, end)
            count = (last - first) // size
            own = np.moveaxis(left[..., first:last].reshape(*left.shape[:-1], count, size), -2, -3)
            other = right[..., first:last, :].reshape(*right.shape[:-2], count, size, right.shape[-1])
            total += product(own, other).sum(-3, dtype=dtype)
    return total
