"""The way back from blocks, and copies of blocks."""

from dataclasses import dataclass

import numpy as np

from kvkit import check, cpu
from kvkit.ascend import tensors
from kvkit.check import describe, wrong
from kvkit.formats import Format

RESULTS = "key", "value"


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
    call = checked_load(key_cache, value_cache, block_tables, seq_lens, seq_starts, cache_format)
    results = outputs(out, call)
    pieces = pieces_of(call)
    if out is not None and pieces[:, cpu.slots.COUNT].sum() < call.tokens:
        for array in results:
            array[...] = 0
    if len(pieces):
        packed = [
            array.reshape(call.tokens, *cache.shape[2:])
            for array, cache in zip(results, call.caches, strict=True)
        ]
        cpu.launches.start(cpu.pieces.prepare("load", packed, call.caches, pieces, call.caches[0].shape[1]))
    return tuple(results) if len(results) == 2 else (*results, None)


@dataclass(frozen=True, slots=True)
class Load:
    """A checked call of `paged_cache_load`, but for its outputs."""

    given: list[tuple[str, np.ndarray]]
    caches: list[np.ndarray]  # [blocks, rows, heads or groups, dim]
    formats: list[Format]
    table: np.ndarray
    lengths: np.ndarray
    columns: np.ndarray  # of the table, where sequences begin
    tokens: int
    shapes: list[tuple[int, ...]]  # of the results


def checked_load(key_cache, value_cache, block_tables, seq_lens, seq_starts, cache_format):
    """The checked call."""
    tensors.text("cache_format", cache_format, tensors.FORMATS)
    given = named(key_cache, value_cache)
    formats, views = zip(
        *(tensors.cache(name, a, cache_format, written=False) for name, a in given), strict=True
    )
    tensors.same_types(formats, cache_format)
    _, block_size = tensors.same_blocks([(name, v) for (name, _), v in zip(given, views, strict=True)])
    table = tensors.index("block_tables", block_tables, ndim=2)
    lengths = context_lengths(seq_lens, len(table))
    columns = np.zeros(len(table), np.int64)
    if seq_starts is not None:
        starts = tensors.index("seq_starts", seq_starts, len(table))
        if len(starts) and starts.min() < 0:
            raise wrong("seq_starts", "at least 0", starts.min())
        columns = np.minimum(starts // block_size, table.shape[1])  # what begins behind it stays there
    tokens = sum(lengths.tolist())
    shapes = [
        (tokens, v.shape[2] * v.shape[3]) if cache_format == "NZ" else (tokens, *v.shape[2:]) for v in views
    ]
    for shape, fmt in zip(shapes, formats, strict=True):
        check.holdable("seq_lens", shape, fmt)
    return Load(given, list(views), list(formats), table, lengths, columns, tokens, shapes)


def named(key_cache, value_cache):
    """[(name, cache)] of keys and, if they are there, of values."""
    given = [("key_cache", key_cache), ("value_cache", value_cache)]
    return given if value_cache is not None else given[:1]


def pieces_of(call):
    """The pieces of a load; tokens of blocks that are not there have none."""
    blocks, block_size = call.caches[0].shape[:2]
    pieces = np.empty((int((-(-call.lengths // block_size)).sum()), len(cpu.slots.FIELDS)), np.int64)
    made = cpu.slots.compiled(cpu.slots.table)(
        call.table, call.lengths, call.columns, block_size, blocks, pieces
    )
    return pieces[:made]


def context_lengths(seq_lens, batch):
    """Lengths, from lengths or from their sums."""
    lengths = tensors.index("seq_lens", seq_lens)
    if len(lengths) == batch + 1:
        if lengths[0] != 0:
            raise wrong("seq_lens", f"{batch} lengths, or {batch + 1} sums from 0 on", f"{lengths[0]} first")
        lengths = steps_up("seq_lens", lengths)[1:]
    if len(lengths) != batch:
        raise wrong("seq_lens", f"{batch} lengths, or {batch + 1} sums from 0 on", f"{len(lengths)} entries")
    if batch and lengths.min() < 0:
        raise wrong("seq_lens", "no length below 0", lengths.min())
    return lengths


def steps_up(name, sums):
    """How much sums grow, the first from 0 on."""
    before = np.append(0, sums[:-1])[: len(sums)]
    down = np.flatnonzero(sums < before)  # compared, for a difference may wrap
    if len(down):
        raise wrong(
            f"{name}[{down[0]}]", f"at least {before[down[0]]}: sums that never decrease", sums[down[0]]
        )
    return sums - before


def outputs(out, call):
    """New arrays of zeros, or those given."""
    shapes, formats = call.shapes, call.formats
    if out is None:
        return [np.zeros(shape, fmt.dtype) for shape, fmt in zip(shapes, formats, strict=True)]
    names = RESULTS[: len(shapes)]
    if not isinstance(out, (tuple, list)) or len(out) < len(shapes):
        raise wrong("out", f"a tuple of {len(shapes)} arrays ({', '.join(names)})", describe(out))
    given = list(out[: len(shapes)])
    for name, array, shape, fmt in zip(names, given, shapes, formats, strict=True):
        label = f"out ({name})"
        check.tensor(label, array, (fmt,), len(shape))
        if array.shape != shape:
            raise wrong(label, f"shape {shape}", array.shape)
        check.in_out(label, array)
        check.apart(label, array, call.given)
    if len(given) == 2:
        check.apart("out (key)", given[0], [("out (value)", given[1])])
    return given


def block_copy(key_cache, value_cache, src, dst, cum_sum):
    """Copy blocks within a cache: ``dst[cum_sum[i - 1]:cum_sum[i]]`` become as block ``src[i]``.

    Parameters
    ----------
    key_cache, value_cache : ndarray, shape [num_blocks, ...]
        Of any type that caches have, with any axes behind the first. They change in place, apart from each
        other. `value_cache` may be None.
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
    given = named(key_cache, value_cache)
    src, dst = checked_copy(given, src, dst, cum_sum)
    for _, array in given:
        array[dst] = array[src]
    return key_cache, value_cache


def checked_copy(given, src, dst, cum_sum):
    """(source, destination) of every block that is written."""
    for name, array in given:
        check.tensor(name, array, tensors.DATA, max(getattr(array, "ndim", 1), 1))
        check.written(name, array)
    tensors.caches_apart(given)
    blocks = len(given[0][1])
    if len(given[-1][1]) != blocks:
        raise wrong("value_cache", f"{blocks} blocks, as key_cache", len(given[-1][1]))
    src, dst = tensors.index("src", src), tensors.index("dst", dst)
    ends = tensors.index("cum_sum", cum_sum, len(src))
    counts = steps_up("cum_sum", ends)
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
    return np.repeat(src, counts), dst
