"""Attention over dask arrays whose keys and values are chunked along batch, tokens and heads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import dask
import dask.array as da
import numpy as np

import kvkit
from kvkit.checks.attention import weights
from kvkit.checks.masks import no_mask
from kvkit.checks.tensors import float_format
from kvkit.errors import argument_error, describe
from kvkit.formats.elements import BY_NAME
from kvkit.integrations.dask import partial_attention
from kvkit.typed import Array

MERGED_BYTES = 2**20  # of results of chunks, which are put together in one task; two of any size


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Array | None = None,
    *,
    is_causal: bool = True,
    is_alibi: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of every query to keys and values that are chunked along tokens, heads and batch.

    Each chunk is attended to apart, where it lies, and what comes of it is put together by
    `kvkit.merge_attention_states`, as a tree: as many at a time as take 1 MiB, but two at least. The tree
    depends on the chunks alone, so results are the same bits whatever the workers do. A worker holds its
    chunks, and of each query chunk a partial result besides those that are merged with it.

    Parameters
    ----------
    query : dask array or ndarray, shape [B, S, Hq, Dk]
        float32, float16 or bfloat16. With M keys, query i is at position M - S + i. Its tokens may be in
        chunks; batch and heads follow the chunks of ``key``.
    key : dask array, shape [B, M, Hkv, Dk]
        Of the dtype of ``query``, in chunks of whole ``Dk``; chunks without tokens are empty parts.
    value : dask array, shape [B, M, Hkv, Dv]
        Likewise; it is put into the chunks of ``key``.
    attn_mask : ndarray, optional
        Boolean (True may attend), or added to the scores: [S or 1, M], with up to two axes before, which
        are 1 or B and Hq.
    is_causal, is_alibi, softmax_scale, window, softcap, sinks
        As in `kvkit.multi_head_attention`. ALiBi and windows count positions in the whole context.
    return_lse : bool
        Whether the logarithms of the softmax denominators are returned too.

    Returns
    -------
    attn_output : dask array, shape [B, S, Hq, Dv]
        Of the dtype of ``query``, lazy.
    lse : dask array of float32, shape [B, S, Hq]
        With ``return_lse``.

    Raises
    ------
    KvkitError
        If shapes do not fit; values are checked by the tasks.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from kvkit.integrations.dask import attend
    >>> key = da.ones((1, 1000, 2, 16), chunks=(1, 300, 2, 16), dtype=np.float32)
    >>> query = np.ones((1, 1, 4, 16), np.float32)
    >>> attend(query, key, 3 * key).compute()[0, 0, :, 0]
    array([3., 3., 3., 3.], dtype=float32)
    """
    query, key, value = _checked(query, key, value)
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    query = query.rechunk((key.chunks[0], query.chunks[1], tuple(c * group for c in key.chunks[2]), -1))
    mask = _mask(attn_mask, query, key)
    how = weights(
        query,
        None,
        is_causal=is_causal,
        is_alibi=is_alibi,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    slopes = kvkit.alibi_slope(num_heads=heads) if how.alibi else None
    options = {"is_causal": how.causal, "window": (how.left, how.right)}
    options |= {"softmax_scale": how.scale, "softcap": how.softcap}
    past = key.shape[1] - query.shape[1]
    seen = slice(how.left, 0 if how.causal or how.alibi else how.right)  # before and behind a query
    partial, merge = dask.delayed(_attend_chunk, pure=False), dask.delayed(_merge_chunks, pure=False)
    queries, keys, values = (array.to_delayed()[..., 0] for array in (query, key, value))
    starts = [_ranges(key.chunks[axis]) for axis in (0, 1)]

    def chunk(b, s, h):
        """What a chunk of queries gets of the chunks of tokens that it may see, merged as a tree."""
        rows, part = _ranges(query.chunks[1])[s], _ranges(query.chunks[2])[h]
        own = {} if slopes is None else {"slopes": slopes[part]}
        found = []
        for m, tokens in enumerate(starts[1]):
            if m and not _sees(rows, tokens, past, seen):
                continue
            found.append(
                partial(
                    queries[b, s, h],
                    keys[b, m, h],
                    values[b, m, h],
                    past + rows.start,
                    tokens.start,
                    None if mask is None else _piece(mask, starts[0][b], part, rows, tokens),
                    sinks=None if sinks is None or m else sinks[part],
                    **own,
                    **options,
                )
            )
        sizes = tuple(chunks[i] for chunks, i in zip(query.chunks, (b, s, h), strict=False))
        several = max(
            2, MERGED_BYTES // max(1, math.prod(sizes) * (value.shape[3] * query.dtype.itemsize + 4))
        )
        while len(found) > 1:
            found = [merge(*found[i : i + several]) for i in range(0, len(found), several)]
        return (
            [da.from_delayed(found[0][0], (*sizes, value.shape[3]), query.dtype)],
            da.from_delayed(found[0][1], sizes, np.float32),
        )

    counts = query.numblocks[:3]
    chunks = {at: chunk(*at) for at in np.ndindex(counts)}
    results = [
        da.block(
            [
                [[chunks[b, s, h][i] for h in range(counts[2])] for s in range(counts[1])]
                for b in range(counts[0])
            ]
        )
        for i in range(2)
    ]
    return tuple(results) if return_lse else results[0]


def _checked(query, key, value):
    """All as dask arrays that fit, in chunks that do."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if getattr(array, "ndim", 0) != 4:
            raise argument_error(name, "an array of 4 axes: batch, tokens, heads, elements", describe(array))
    if not isinstance(key, da.Array):
        raise argument_error("key", "a dask array; kvkit.multi_head_attention takes others", describe(key))
    query = query if isinstance(query, da.Array) else da.from_array(query, chunks=-1)
    value = value if isinstance(value, da.Array) else da.from_array(value, chunks=-1)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if any(map(math.isnan, array.shape)):
            raise argument_error(name, "chunks of known sizes (compute_chunk_sizes)", describe(array))
    if value.shape[:3] != key.shape[:3]:
        raise argument_error("value", f"shape {key.shape[:3]} before its elements, as key has", value.shape)
    batch, _, heads, dim = key.shape
    if (query.shape[0], query.shape[3]) != (batch, dim) or not heads or query.shape[2] % heads:
        raise argument_error("query", f"shape [{batch}, S, a multiple of {heads}, {dim}]", query.shape)
    float_format("query", query.dtype.name)
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise argument_error(name, f"dtype {query.dtype}, that of query", array.dtype)
    key = key.rechunk({3: -1})
    return query, key, value.rechunk((*key.chunks[:3], -1))


def _mask(mask, query, key):
    """A mask with all its axes, the last two of which may not be guessed."""
    if no_mask(BY_NAME[query.dtype.name], mask):
        return None
    wanted = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if not 2 <= mask.ndim <= 4:
        raise argument_error("attn_mask", "2 to 4 axes", describe(mask))
    mask = mask[(None,) * (4 - mask.ndim)]
    fits = (size in (1, whole) for size, whole in zip(mask.shape[:3], wanted[:3], strict=True))
    if not all(fits) or mask.shape[3] != wanted[3]:
        raise argument_error("attn_mask", f"shape {wanted}, where all but the last may be 1", mask.shape)
    return mask


def _piece(mask, *ranges):
    return mask[tuple(slice(None) if n == 1 else at for n, at in zip(mask.shape, ranges, strict=True))]


def _ranges(sizes):
    starts = np.cumsum((0, *sizes)).tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(starts)]


def _sees(rows, tokens, past, seen):
    """Whether some query sees some of the tokens; below 0 nothing bounds what is seen on that side."""
    first, last = past + rows.start, past + rows.stop - 1
    if tokens.start == tokens.stop:
        return False
    if seen.start >= 0 and tokens.stop <= first - seen.start:
        return False
    return seen.stop < 0 or tokens.start <= last + seen.stop


def _attend_chunk(*arguments: Any, **options: Any) -> tuple[Array, Array]:
    """Attend to one chunk on the threads of this worker."""
    with partial_attention.kernel_threads(partial_attention.worker_threads()):
        return partial_attention.attend_part(*arguments, **options)


def _merge_chunks(*states: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merge the outputs and lse of chunks."""
    return partial_attention.merge_parts(states, BY_NAME[states[0][0].dtype.name])
