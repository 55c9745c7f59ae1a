"""The way back from blocks, and copies of blocks, on the device."""

import numpy as np

from kvkit import checks
from kvkit.checks.ascend import blocks, tensors

ZEROS = -1  # the source row of what is not there


def paged_cache_load(
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    seq_starts=None,
    *,
    cache_format="ND",
    out=None,
    stream=None,
):
    """`kvkit.ascend.paged_cache_load` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    key_cache, value_cache, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    block_tables, seq_lens, seq_starts
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    cache_format : str
        "ND" or "NZ".
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    key, value : shape [tokens, num_head, D], for NZ [tokens, C]
        `out`, or new arrays where ``key_cache`` is: numpy's, torch's, CuPy's or else numba's. value is None
        if value_cache is.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has changed.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> cache = np.arange(1, 9, dtype=np.float16).reshape(4, 2, 1, 1)
    >>> table, lengths = np.array([[2, 0], [3, -1]]), np.array([3, 4])
    >>> key, _ = kvkit_cuda.ascend.paged_cache_load(cache, None, table, lengths)
    >>> key[:, 0, 0]
    array([5., 6., 1., 7., 8., 0., 0.], dtype=float16)
    """
    from kvkit_cuda.calls import arrays, results
    from kvkit_cuda.ground import device
    from kvkit_cuda.moves import pieces

    device.require()
    stream = device.stream(stream)
    caches = [arrays.operand(name, array, stream) for name, array in blocks.named(key_cache, value_cache)]
    call = blocks.checked_load(
        caches[0].seen,
        caches[1].seen if len(caches) > 1 else None,
        arrays.host("block_tables", block_tables, stream),
        arrays.host("seq_lens", seq_lens, stream),
        arrays.host("seq_starts", seq_starts, stream),
        cache_format=cache_format,
    )
    if isinstance(out, (tuple, list)) and value_cache is None:
        out = out[:1]  # behind keys alone there may be anything
    made, returned = results.outputs(out, call.results, (key_cache, caches[0]), stream)
    there = [cache.moved(stream) for cache in caches]
    copies = [result.moved(stream, contents=False) for result in made]
    pairs = []
    for cache, copy in zip(there, copies, strict=True):
        view = tensors.rows(cache.seen, cache_format)
        pairs.append((view, copy.seen.reshape(1, call.tokens, *view.shape[2:])))
    pieces.prepare(pairs, moves_of(call), stream)()
    for result, copy in zip(made, copies, strict=True):
        result.take(copy, stream)
    return returned if len(returned) == 2 else (*returned, None)


def moves_of(call):
    """The pieces of a load as kernels take them, with zeros for tokens that have none."""
    slots, found = checks.slots, blocks.pieces_of(call)
    token, count = found[:, slots.TOKEN], found[:, slots.COUNT]
    begins, ends = np.append(0, token + count), np.append(token, call.tokens)
    gaps = np.stack([np.full_like(begins, ZEROS), begins, ends - begins], axis=1)
    return np.concatenate([np.stack([found[:, slots.SLOT], token, count], axis=1), gaps])


def block_copy(key_cache, value_cache, src, dst, cum_sum, *, stream=None):
    """`kvkit.ascend.block_copy` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    key_cache, value_cache
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back).
    src, dst, cum_sum
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    key_cache, value_cache
        The arrays given.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has changed.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> cache = np.array([10, 11, 12, 13, 14], np.float32).reshape(5, 1, 1, 1)
    >>> src, dst, cum_sum = np.array([4, 0]), np.array([1, 3, 2]), np.array([2, 3])
    >>> _ = kvkit_cuda.ascend.block_copy(cache, None, src, dst, cum_sum)
    >>> cache.ravel()
    array([10., 14., 10., 14., 14.], dtype=float32)
    """
    from kvkit_cuda.calls import arrays
    from kvkit_cuda.ground import device
    from kvkit_cuda.moves import pieces

    device.require()
    stream = device.stream(stream)
    here = [
        (name, arrays.operand(name, array, stream)) for name, array in blocks.named(key_cache, value_cache)
    ]
    indices = {"src": src, "dst": dst, "cum_sum": cum_sum}
    src, dst = blocks.checked_copy(
        [(name, operand.seen) for name, operand in here],
        **{name: arrays.host(name, index, stream) for name, index in indices.items()},
    )
    there = [operand.moved(stream) for _, operand in here]
    launches = []
    views = [view for copy in there for view in in_four_axes(copy.seen)]
    for rows in sorted({view.shape[1] for view in views}):  # keys and values of NZ may differ
        moves = np.stack([src * rows, dst * rows, np.full_like(dst, rows)], axis=1)
        pairs = [(view, view) for view in views if view.shape[1] == rows]
        launches += [pieces.prepare(pairs[i : i + 2], moves, stream) for i in range(0, len(pairs), 2)]
    for launch in launches:  # nothing has been written so far, and nothing can fail any more
        launch()
    for (_, operand), copy in zip(here, there, strict=True):
        operand.take(copy, stream)
    return key_cache, value_cache


def in_four_axes(cache):
    """Views [blocks, rows, heads, dim] of a cache with any axes behind the first."""
    if cache.ndim < 4:
        return [cache.reshape(len(cache), *[1] * (4 - cache.ndim), *cache.shape[1:])]
    return [cache[(slice(None), *at)] for at in np.ndindex(cache.shape[1:-3])]
