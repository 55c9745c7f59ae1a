"""Load contexts from a cache in blocks, and copy blocks."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks, cpu
from kvkit.calls.pools import copy_blocks
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import BlockLoad
from kvkit.checks.ascend import blocks
from kvkit.typed import Array, Values


@operator
def paged_cache_load(
    on: CallTarget,
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

    The results are packed, one sequence after the other.

    Parameters
    ----------
    key_cache, value_cache : ndarray
        [num_blocks, block_size, num_head, D], or for NZ [num_blocks, C / n0, block_size, n0], of any strides.
        If `value_cache` is None, only keys are loaded.
    block_tables : ndarray of int32 or int64, shape [B, M]
        The blocks of each sequence. Blocks that do not exist (negative, or num_blocks or more) give zeros,
        and so do tokens beyond the M blocks.
    seq_lens : ndarray of int32 or int64, shape [B] or [B + 1]
        The length of each sequence; or the prefix sums of the lengths, first 0.
    seq_starts : ndarray of int32 or int64, shape [B], optional
        The first token of each sequence in its blocks; it is rounded down to a multiple of block_size.
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
    Ascend ATB PagedCacheLoad. Bits are copied unchanged.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.arange(1, 9, dtype=np.float16).reshape(4, 2, 1, 1)
    >>> key, _ = kvkit.ascend.paged_cache_load(cache, None, np.array([[2, 0], [3, -1]]), np.array([3, 4]))
    >>> key[:, 0, 0]
    array([5., 6., 1., 7., 8., 0., 0.], dtype=float16)
    """
    arguments = BlockLoad(key_cache, value_cache, block_tables, seq_lens, seq_starts, cache_format)
    call = on.check(blocks.checked_load, arguments)
    if isinstance(out, (tuple, list)) and value_cache is None:
        out = out[:1]  # an array for values is ignored
    results: Any = call.results.arrays(out, new=np.zeros)
    pieces = blocks.pieces_of(call)
    lacks_blocks = pieces[:, checks.slots.COUNT].sum() < call.tokens  # tokens without a block are zeros
    if out is not None and lacks_blocks:
        for array in results:
            array[...] = 0
    if len(pieces):
        packed = [
            array.reshape(call.tokens, *cache.shape[2:])
            for array, cache in zip(results, call.caches, strict=True)
        ]
        rows = call.caches[0].shape[1]
        cpu.launches.start(cpu.copy.pieces.prepare_pieces("load", packed, call.caches, pieces, rows))
    return results[0], None if value_cache is None else results[1]


@operator
def block_copy(
    on: CallTarget, key_cache: Array, value_cache: Values, src: ArrayLike, dst: ArrayLike, cum_sum: ArrayLike
) -> tuple[Array, Values]:
    """Copy blocks of a cache over other blocks of the same cache.

    Block ``src[i]`` is copied to the blocks ``dst[cum_sum[i - 1]:cum_sum[i]]``.

    Parameters
    ----------
    key_cache, value_cache : ndarray, shape [num_blocks, ...]
        Caches of any supported dtype, with any axes after the first. They change in place and may not
        overlap. `value_cache` may be None.
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
        If an argument is wrong; then nothing has been written.

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
    copy_blocks(on.check(blocks.checked_copy, key_cache, value_cache, src, dst, cum_sum))
    return key_cache, value_cache
