"""The way back from blocks, and copies of blocks."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks, cpu
from kvkit.calls.pools import copy_blocks
from kvkit.checks.arguments import BlockLoad
from kvkit.checks.ascend import blocks
from kvkit.interop import returns_input_kind
from kvkit.typed import Array, Values


@returns_input_kind
def paged_cache_load(
    key_cache: Array,
    value_cache: Values,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    seq_starts: ArrayLike | None = None,
    *,
    cache_format: Literal["ND", "NZ"] = "ND",
    out: tuple[Array, ...] | None = None,
) -> tuple[Array, Values]:
    """Gather the contexts of sequences from a cache in blocks.

    They are packed one after the other.

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
    call = blocks.checked_load(
        BlockLoad(key_cache, value_cache, block_tables, seq_lens, seq_starts, cache_format)
    )
    if isinstance(out, (tuple, list)) and value_cache is None:
        out = out[:1]  # behind keys alone there may be anything
    results: Any = call.results.arrays(out, new=np.zeros)
    pieces = blocks.pieces_of(call)
    if out is not None and pieces[:, checks.slots.COUNT].sum() < call.tokens:
        for array in results:
            array[...] = 0
    if len(pieces):
        packed = [
            array.reshape(call.tokens, *cache.shape[2:])
            for array, cache in zip(results, call.caches, strict=True)
        ]
        cpu.launches.start(
            cpu.copy.pieces.prepare_pieces("load", packed, call.caches, pieces, call.caches[0].shape[1])
        )
    return (*results, None)[:2]


@returns_input_kind
def block_copy(
    key_cache: Array, value_cache: Values, src: ArrayLike, dst: ArrayLike, cum_sum: ArrayLike
) -> tuple[Array, Values]:
    """Copy blocks of a cache onto others of it.

    Blocks ``dst[cum_sum[i - 1]:cum_sum[i]]`` become as block ``src[i]``.

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
    given = blocks.named_caches(key_cache, value_cache)
    src, dst = blocks.checked_copy(given, src, dst, cum_sum)
    for _, array in given:
        copy_blocks(array, array, src, dst)
    return key_cache, value_cache
