"""Convert matrices between row-major order (ND) and Ascend's NZ format."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np

from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.ascend import matrices
from kvkit.typed import Array


@operator
def nd_to_nz(on: CallTarget, x: Array, *, out: Array | None = None) -> Array:
    """Convert matrices to the NZ format: groups of columns of 32 bytes, with rows padded to a multiple of 16.

    Parameters
    ----------
    x : ndarray, shape [m, n] or [b, m, n]
        float32, float16, bfloat16 or int8.
    out : ndarray, optional
        An array for the result; made if not given.

    Returns
    -------
    y : ndarray, shape [b, ceil(n / n0), 16 * ceil(m / 16), n0]
        n0 is the number of elements in 32 bytes; b is 1 for a single matrix. The padding is zero.

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
    call = on.check(matrices.checked_nd, x)
    (y,) = call.results.arrays(out)
    x, (_, groups, _, n0) = call.source, call.shape
    batch, rows, columns = x.shape
    padded = np.zeros((batch, rows, groups * n0), x.dtype)
    padded[:, :, :columns] = x
    y[:, :, rows:] = 0
    y[:, :, :rows] = padded.reshape(batch, rows, groups, n0).transpose(0, 2, 1, 3)
    return y


@operator
def nz_to_nd(
    on: CallTarget, y: Array, m: SupportsIndex, n: SupportsIndex, *, out: Array | None = None
) -> Array:
    """Convert matrices from the NZ format to row-major order: the inverse of `nd_to_nz`.

    Parameters
    ----------
    y : ndarray, shape [b, ceil(n / n0), 16 * ceil(m / 16), n0]
        float32, float16, bfloat16 or int8. n0 is the number of elements in 32 bytes.
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
    call = on.check(matrices.checked_nz, y, m, n)
    (x,) = call.results.arrays(out)
    batch, rows, columns = call.shape
    padded = y[:, :, :rows].transpose(0, 2, 1, 3).reshape(batch, rows, y.shape[1] * y.shape[3])
    x[...] = padded[:, :, :columns]
    return x
