"""Matrices in groups of columns, and back."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from kvkit import check
from kvkit.ascend import tensors
from kvkit.check import integer, wrong
from kvkit.typed import Array

FRACTAL_ROWS = 16


def nd_to_nz(x: Array, *, out: Array | None = None) -> Array:
    """Matrices in groups of columns: NZ, whose groups are 32 bytes wide and whose rows come in sixteens.

    Parameters
    ----------
    x : ndarray, shape [m, n] or [b, m, n]
        float32, float16, bfloat16 or int8.
    out : ndarray, optional
        An array for the result; made if not given.

    Returns
    -------
    y : ndarray, shape [b, ceil(n / n0), 16 * ceil(m / 16), n0]
        Where n0 elements are 32 bytes, b is 1 for one matrix, and what is not in `x` is zero.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    Ascend ATB TransData.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> kvkit.ascend.nd_to_nz(np.arange(20, dtype=np.float32).reshape(2, 10))[0, 1, :2]
    array([[ 8.,  9.,  0.,  0.,  0.,  0.,  0.,  0.],
           [18., 19.,  0.,  0.,  0.,  0.,  0.,  0.]], dtype=float32)
    """
    x, fmt, shape = checked_nd(x)
    y = result(out, shape, fmt, x)
    batch, rows, columns = x.shape
    padded = np.zeros((batch, rows, shape[1] * shape[3]), fmt.dtype)
    padded[:, :, :columns] = x
    y[:, :, rows:] = 0
    y[:, :, :rows] = padded.reshape(batch, rows, shape[1], shape[3]).transpose(0, 2, 1, 3)
    return y


def checked_nd(x):
    """(matrices [b, m, n], their format, the shape of the result)."""
    if isinstance(x, np.ndarray) and x.ndim == 2:
        x = x[None]
    fmt = check.tensor("x", x, tensors.DATA, 3)
    return x, fmt, (len(x), *fractals(x.shape[1], x.shape[2], fmt))


def nz_to_nd(y: Array, m: SupportsIndex, n: SupportsIndex, *, out: Array | None = None) -> Array:
    """Matrices back from NZ: the inverse of `nd_to_nz`.

    Parameters
    ----------
    y : ndarray, shape [b, ceil(n / n0), 16 * ceil(m / 16), n0]
        float32, float16, bfloat16 or int8, where n0 elements are 32 bytes.
    m, n : int
        Rows and columns of a matrix.
    out : ndarray, optional
        An array for the result; made if not given.

    Returns
    -------
    x : ndarray, shape [b, m, n]

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    Ascend ATB TransData.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> x = np.arange(20, dtype=np.float32).reshape(1, 2, 10)
    >>> np.array_equal(kvkit.ascend.nz_to_nd(kvkit.ascend.nd_to_nz(x), 2, 10), x)
    True
    """
    fmt, shape = checked_nz(y, m, n)
    x = result(out, shape, fmt, y)
    batch, rows, columns = shape
    whole = y[:, :, :rows].transpose(0, 2, 1, 3).reshape(batch, rows, y.shape[1] * y.shape[3])
    x[...] = whole[:, :, :columns]
    return x


def checked_nz(y, m, n):
    """(format, shape of the result)."""
    fmt = check.tensor("y", y, tensors.DATA, 4)
    rows, columns = integer("m", m, 0), integer("n", n, 0)
    want = fractals(rows, columns, fmt)
    if y.shape[1:] != want:
        sizes = f"shape [b, {', '.join(map(str, want))}] for {rows} rows and {columns} columns"
        raise wrong("y", sizes, y.shape)
    return fmt, (len(y), rows, columns)


def fractals(rows, columns, fmt):
    """(groups, rows, elements of a group) of a matrix in NZ."""
    size = tensors.fractal(fmt)
    return -(-columns // size), -(-rows // FRACTAL_ROWS) * FRACTAL_ROWS, size


def result(out, shape, fmt, source):
    """A new array, or the one given."""
    if out is None:
        return np.empty(shape, fmt.dtype)
    check.tensor("out", out, (fmt,), len(shape))
    if out.shape != shape:
        raise wrong("out", f"shape {shape}", out.shape)
    check.written("out", out)
    check.apart("out", out, [("the input", source)])
    return out
