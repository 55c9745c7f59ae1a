"""Matrices in groups of columns, and back, on the device."""

import numpy as np

from kvkit.checks.ascend import matrices, tensors

ZEROS = -1  # the source row of what is not there


def nd_to_nz(x, *, out=None, stream=None):
    """`kvkit.ascend.nd_to_nz` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    x, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    y : shape [b, ceil(n / n0), 16 * ceil(m / 16), n0]
        `out`, or a new array where ``x`` is: numpy's, torch's, CuPy's or else numba's.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has changed.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> kvkit_cuda.ascend.nd_to_nz(np.arange(20, dtype=np.float32).reshape(2, 10))[0, 1, :2]
    array([[ 8.,  9.,  0.,  0.,  0.,  0.,  0.,  0.],
           [18., 19.,  0.,  0.,  0.,  0.,  0.,  0.]], dtype=float32)
    """
    from kvkit_cuda.calls import arrays
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    here = arrays.operand("x", x, stream)
    call = matrices.checked_nd(here.seen)
    each, rows, whole = np.arange(call.shape[0]), call.source.shape[1], call.shape[2]
    moves = [(each * rows, each * whole, rows), (ZEROS, each * whole + rows, whole - rows)]

    def pair(x, y):
        return (x[None] if x.ndim == 2 else x)[:, :, None], tensors.rows(y, "NZ")

    return convert((x, here), call, moves, pair, out, stream)


def nz_to_nd(y, m, n, *, out=None, stream=None):
    """`kvkit.ascend.nz_to_nd` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    y, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    m, n : int
        Rows and columns of a matrix.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    x : shape [b, m, n]
        `out`, or a new array where ``y`` is: numpy's, torch's, CuPy's or else numba's.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has changed.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> x = np.arange(20, dtype=np.float32).reshape(1, 2, 10)
    >>> np.array_equal(kvkit_cuda.ascend.nz_to_nd(kvkit_cuda.ascend.nd_to_nz(x), 2, 10), x)
    True
    """
    from kvkit_cuda.calls import arrays
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    here = arrays.operand("y", y, stream)
    call = matrices.checked_nz(here.seen, m, n)
    each, rows, whole = np.arange(call.shape[0]), call.shape[1], call.source.shape[2]

    def pair(y, x):
        return tensors.rows(y, "NZ"), x[:, :, None]

    moves = [(each * whole, each * rows, rows)]
    return convert((y, here), call, moves, pair, out, stream)


def convert(source, call, moves, pair, out, stream):
    """Move rows of `source` to the result, which are a `pair` of arrays in blocks."""
    from kvkit_cuda.calls import results
    from kvkit_cuda.moves import pieces

    made, returned = results.outputs(out, call.results, source, stream)
    there, copy = source[1].moved(stream), made[0].moved(stream, contents=False)
    numbers = [np.stack(np.broadcast_arrays(*move, np.zeros_like(move[1]))[:3], axis=1) for move in moves]
    pieces.prepare([pair(there.seen, copy.seen)], np.concatenate(numbers), stream)()
    made[0].take(copy, stream)
    return returned
