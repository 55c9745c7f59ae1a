"""The way back from blocks, copies of blocks, and the NZ format of matrices."""

import numpy as np

from kvkit import check, cpu
from kvkit.ascend import tensors
from kvkit.check import describe, integer, wrong

FRACTAL_ROWS = 16


def paged_cache_load(
    key_cache, value_cache, block_tables, seq_lens, seq_starts=None, *, cache_format="ND", out=None
):
    """Gather the contexts of sequences from a cache in blocks, packed one after the other.

    Parameters
    ----------
    key_cache, value_cache : ndarray
        [num_blocks, block_size, num_head, D], or for NZ [num_blocks, C / n0, block_size, n0], of any strides.
        `value_cache` may be None: keys alone.
    block_tables : ndarray of int32 or int64, shape [B, M]
        The blocks of each sequence. A block that is not there (negative, or num_blocks or more) reads as
        zeros, and so do tokens behind the M blocks.
    seq_lens : ndarray of int32 or int64, shape [B] or [B + 1]
        The length of each sequence; or the sums of lengths, from 0 on.
    seq_starts : ndarray of int32 or int64, shape [B], optional
        Where each sequence begins in its blocks, in tokens, a multiple of block_size (what exceeds one is
        left out).
    cache_format : str
        "ND" or "NZ".
    out : tuple of ndarray, optional
        Arrays for both results; made if not given.

    Returns
    -------
    key, value : ndarray
        [tokens, num_head, D], for NZ [tokens, C]; value is None if value_cache is.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    Ascend ATB PagedCacheLoad. Bits are moved as they are.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.arange(1, 9, dtype=np.float16).reshape(4, 2, 1, 1)
    >>> key, _ = kvkit.ascend.paged_cache_load(cache, None, np.array([[2, 0], [3, -1]]), np.array([3, 4]))
    >>> key[:, 0, 0]
    array([5., 6., 1., 7., 8., 0., 0.], dtype=float16)
    """
    tensors.text("cache_format", cache_format, tensors.FORMATS)
    given = [("key_cache", key_cache), *([("value_cache", value_cache)] if value_cache is not None else [])]
    formats, views = zip(
        *(tensors.cache(name, a, cache_format, written=False) for name, a in given), strict=True
    )
    tensors.same_types(formats, cache_format)
    blocks, block_size = tensors.same_blocks([(name, v) for (name, _), v in zip(given, views, strict=True)])
    table = tensors.index("block_tables", block_tables, ndim=2)
    lengths = context_lengths(seq_lens, len(table))
    columns = np.zeros(len(table), np.int64)
    if seq_starts is not None:
        starts = tensors.index("seq_starts", seq_starts, len(table))
        if len(starts) and starts.min() < 0:
            raise wrong("seq_starts", "at least 0", starts.min())
        columns = starts // block_size
    tokens = sum(lengths.tolist())
    shapes = [
        (tokens, v.shape[2] * v.shape[3]) if cache_format == "NZ" else (tokens, *v.shape[2:]) for v in views
    ]
    results = outputs(out, shapes, formats, given)
    pieces = np.empty((int((-(-lengths // block_size)).sum()), len(cpu.slots.FIELDS)), np.int64)
    made = cpu.slots.compiled(cpu.slots.table)(table, lengths, columns, block_size, blocks, pieces)
    pieces = pieces[:made]
    if out is not None and pieces[:, cpu.slots.COUNT].sum() < tokens:
        for array in results:
            array[...] = 0
    if made:
        packed = [array.reshape(tokens, *v.shape[2:]) for array, v in zip(results, views, strict=True)]
        cpu.launches.start(cpu.pieces.prepare("load", packed, views, pieces, block_size))
    return tuple(results) if len(results) == 2 else (*results, None)


def context_lengths(seq_lens, batch):
    """Lengths, from lengths or from their sums."""
    lengths = tensors.index("seq_lens", seq_lens)
    if len(lengths) == batch + 1:
        if lengths[0] != 0:
            raise wrong("seq_lens", f"{batch} lengths, or {batch + 1} sums from 0 on", f"{lengths[0]} first")
        lengths = np.diff(lengths)
    if len(lengths) != batch:
        raise wrong("seq_lens", f"{batch} lengths, or {batch + 1} sums from 0 on", f"{len(lengths)} entries")
    if batch and lengths.min() < 0:
        raise wrong("seq_lens", "no length below 0", lengths.min())
    return lengths


def outputs(out, shapes, formats, caches):
    """New arrays of zeros, or those given."""
    if out is None:
        try:
            return [np.zeros(shape, fmt.dtype) for shape, fmt in zip(shapes, formats, strict=True)]
        except ValueError:
            raise wrong("seq_lens", "outputs that an array can hold", f"shape {shapes[0]}") from None
    names = ["key", "value"][: len(shapes)]
    if not isinstance(out, (tuple, list)) or len(out) < len(shapes):
        raise wrong("out", f"a tuple of {len(shapes)} arrays ({', '.join(names)})", describe(out))
    given = list(out[: len(shapes)])
    for name, array, shape, fmt in zip(names, given, shapes, formats, strict=True):
        label = f"out ({name})"
        check.tensor(label, array, (fmt,), len(shape))
        if array.shape != shape:
            raise wrong(label, f"shape {shape}", array.shape)
        check.in_out(label, array)
        check.apart(label, array, caches)
    if len(given) == 2:
        check.apart("out (key)", given[0], [("out (value)", given[1])])
    return given


def block_copy(key_cache, value_cache, src, dst, cum_sum):
    """Copy blocks within a cache: ``dst[cum_sum[i - 1]:cum_sum[i]]`` become as block ``src[i]``.

    Parameters
    ----------
    key_cache, value_cache : ndarray, shape [num_blocks, ...]
        Of any type that caches have, ND or NZ. They change in place. `value_cache` may be None.
    src : ndarray of int32 or int64, shape [S]
        Blocks to copy.
    dst : ndarray of int32 or int64, shape [N]
        Blocks to write, each once, none of them in `src`.
    cum_sum : ndarray of int32 or int64, shape [S]
        Where the destinations of each source end in `dst`.

    Returns
    -------
    key_cache, value_cache : ndarray
        The arrays given.

    Raises
    ------
    KvkitError
        If an argument is wrong. Nothing is written then.

    Notes
    -----
    Ascend ATB BlockCopy.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.array([10, 11, 12, 13, 14], np.float32).reshape(5, 1, 1, 1)
    >>> _ = kvkit.ascend.block_copy(cache, None, np.array([4, 0]), np.array([1, 3, 2]), np.array([2, 3]))
    >>> cache.ravel()
    array([10., 14., 10., 14., 14.], dtype=float32)
    """
    given = [("key_cache", key_cache), *([("value_cache", value_cache)] if value_cache is not None else [])]
    for name, array in given:
        check.tensor(name, array, tensors.DATA, 4)
        check.written(name, array)
    blocks = len(key_cache)
    if value_cache is not None and len(value_cache) != blocks:
        raise wrong("value_cache", f"{blocks} blocks, as key_cache", len(value_cache))
    src, dst = tensors.index("src", src), tensors.index("dst", dst)
    ends = tensors.index("cum_sum", cum_sum, len(src))
    counts = np.diff(ends, prepend=0)
    if len(counts) and counts.min() < 0:
        raise wrong("cum_sum", "never to decrease, from 0 on", ends.tolist())
    if (ends[-1] if len(ends) else 0) != len(dst):
        raise wrong(
            "cum_sum", f"to end with {len(dst)}, the destinations", ends[-1] if len(ends) else "nothing"
        )
    for name, ids in (("src", src), ("dst", dst)):
        outside = np.flatnonzero((ids < 0) | (ids >= blocks))
        if len(outside):
            raise wrong(f"{name}[{outside[0]}]", f"a block from 0 to {blocks - 1}", ids[outside[0]])
    if len(np.unique(dst)) < len(dst):
        raise wrong("dst", "blocks that are written once", dst.tolist())
    both = np.intersect1d(src, dst)
    if len(both):
        raise wrong("dst", "no block of src", f"block {both[0]}")
    for _, array in given:
        array[dst] = array[np.repeat(src, counts)]
    return key_cache, value_cache


def nd_to_nz(x, *, out=None):
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
    if isinstance(x, np.ndarray) and x.ndim == 2:
        x = x[None]
    fmt = check.tensor("x", x, tensors.DATA, 3)
    batch, rows, columns = x.shape
    size = tensors.fractal(fmt)
    groups, whole = -(-columns // size), -(-rows // FRACTAL_ROWS) * FRACTAL_ROWS
    y = result(out, (batch, groups, whole, size), fmt, x)
    padded = np.zeros((batch, rows, groups * size), fmt.dtype)
    padded[:, :, :columns] = x
    y[:, :, rows:] = 0
    y[:, :, :rows] = padded.reshape(batch, rows, groups, size).transpose(0, 2, 1, 3)
    return y


def nz_to_nd(y, m, n, *, out=None):
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
    fmt = check.tensor("y", y, tensors.DATA, 4)
    rows, columns = integer("m", m, 0), integer("n", n, 0)
    size = tensors.fractal(fmt)
    want = (-(-columns // size), -(-rows // FRACTAL_ROWS) * FRACTAL_ROWS, size)
    if y.shape[1:] != want:
        raise wrong(
            "y", f"shape [b, {', '.join(map(str, want))}] for {rows} rows and {columns} columns", y.shape
        )
    x = result(out, (len(y), rows, columns), fmt, y)
    whole = y[:, :, :rows].transpose(0, 2, 1, 3).reshape(len(y), rows, want[0] * size)
    x[...] = whole[:, :, :columns]
    return x


def result(out, shape, fmt, source):
    if out is None:
        return np.empty(shape, fmt.dtype)
    check.tensor("out", out, (fmt,), len(shape))
    if out.shape != shape:
        raise wrong("out", f"shape {shape}", out.shape)
    check.written("out", out)
    check.apart("out", out, [("the input", source)])
    return out
