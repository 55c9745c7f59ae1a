"""Attend to dask arrays of keys and values that are chunked along batch, tokens and heads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import dask
import dask.array as da
import numpy as np

from kvkit.checks.arguments import Scoring
from kvkit.checks.attention import Weights, checked_weights
from kvkit.checks.masks import check_mask_type
from kvkit.checks.records import NO_MASK
from kvkit.checks.values import float_format
from kvkit.errors import argument_error, describe
from kvkit.formats.elements import BY_NAME
from kvkit.integrations.dask import partial_attention
from kvkit.static.positions import alibi_slope
from kvkit.typed import Array

MERGED_BYTES = 2**20  # one task merges partial results of at most this size, or two larger ones


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
    r"""Attend with every query to keys and values that are chunked along tokens, heads and batch.

    The worker that has a chunk attends to it. `kvkit.merge_attention_states` merges the results as a tree, in
    groups of up to 1 MiB, at least two::

        chunk 0    chunk 1    chunk 2    chunk 3     keys and values
             \       /             \       /
            merge 0, 1            merge 2, 3         on any worker
                   \                 /
                 attn_output, lse of all keys

    The tree depends on chunks only, so results have the same bits for any workers. A worker needs memory for
    its chunks and, for each chunk of queries, for the partial results of one merge.

    Parameters
    ----------
    query : dask array or ndarray, shape [B, S, Hq, Dk]
        float32, float16 or bfloat16. With M keys, query i is at position M - S + i. Its tokens may be in
        chunks; batch and heads follow the chunks of ``key``.
    key : dask array, shape [B, M, Hkv, Dk]
        The dtype is that of ``query``. No chunk may split the axis ``Dk``; chunks may have no tokens.
    value : dask array, shape [B, M, Hkv, Dv]
        The dtype is that of ``query``. It is rechunked like ``key``.
    attn_mask : ndarray, optional
        Boolean (True may attend), or added to the scores: [S, M], [Hq, S, M] or [B, Hq, S, M]; any axis
        but M may be 1.
    is_causal, is_alibi, softmax_scale, window, softcap, sinks
        As in `kvkit.multi_head_attention`. ALiBi and windows count positions in the whole context.
    return_lse : bool
        Whether the logarithms of the softmax denominators are returned too.

    Returns
    -------
    attn_output : dask array, shape [B, S, Hq, Dv]
        A lazy array with the dtype of ``query``.
    lse : dask array of float32, shape [B, S, Hq]
        With ``return_lse``.

    Raises
    ------
    KvkitError
        If shapes do not fit; tasks check the values of numbers.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from kvkit.integrations.dask import attend
    >>> key = da.ones((1, 1000, 2, 16), chunks=(1, 300, 2, 16), dtype=np.float32)
    >>> query = np.ones((1, 1, 4, 16), np.float32)
    >>> attend(query, key, 3 * key).compute()[0, 0, :, 0]
    array([3., 3., 3., 3.], dtype=float32)
    """
    query, key, value = _checked_arrays(query, key, value)
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    query = query.rechunk((key.chunks[0], query.chunks[1], tuple(c * group for c in key.chunks[2]), -1))
    mask = _checked_mask(attn_mask, query, key)
    scoring = Scoring(None, is_causal, is_alibi, softmax_scale, window, softcap, sinks)
    weights = checked_weights(query, NO_MASK, scoring)
    slopes = alibi_slope(num_heads=heads) if weights.alibi else None
    graph = _Chunks(query, key, value, mask, weights, slopes)
    batches, rows, groups = (range(count) for count in query.numblocks[:3])
    chunks = [[[graph.attend(b, s, h) for h in groups] for s in rows] for b in batches]
    attn_output, lse = (
        da.block([[[chunk[i] for chunk in of_rows] for of_rows in of_batch] for of_batch in chunks])
        for i in range(2)
    )
    return (attn_output, lse) if return_lse else attn_output


class _Chunks:
    """Builds the lazy attention of each chunk of queries."""

    def __init__(
        self, query: Any, key: Any, value: Any, mask: Array | None, weights: Weights, slopes: Array | None
    ) -> None:
        self._query, self._value, self._mask = query, value, mask
        self._sinks, self._slopes = weights.sinks, slopes
        # chunks by (batch, tokens, heads); the last axis is one chunk
        self._queries, self._keys, self._values = (x.to_delayed()[..., 0] for x in (query, key, value))
        self._batches, self._tokens = (_ranges(key.chunks[axis]) for axis in (0, 1))
        self._past = key.shape[1] - query.shape[1]
        right = 0 if weights.causal or weights.alibi else weights.right
        self._window = weights.left, right  # how many earlier and later tokens a query sees; -1: no limit
        self._options = {"is_causal": weights.causal, "window": (weights.left, weights.right)}
        self._options |= {"softmax_scale": weights.scale, "softcap": weights.softcap}

    def attend(self, b: int, s: int, h: int) -> tuple[Any, Any]:
        """Return the lazy output and lse of a chunk of queries, over the chunks of keys that it sees."""
        attend_chunk, merge_chunks = (
            dask.delayed(function, pure=False) for function in (_attend_chunk, _merge_chunks)
        )
        rows, heads = _ranges(self._query.chunks[1])[s], _ranges(self._query.chunks[2])[h]
        options = self._options | ({} if self._slopes is None else {"slopes": self._slopes[heads]})
        parts = [
            attend_chunk(
                self._queries[b, s, h],
                self._keys[b, m, h],
                self._values[b, m, h],
                self._past + rows.start,
                tokens.start,
                self._mask_of(self._batches[b], heads, rows, tokens),
                sinks=self._sinks[heads] if self._sinks is not None and m == 0 else None,
                **options,
            )
            for m, tokens in enumerate(self._tokens)
            if m == 0 or self._is_visible(rows, tokens)  # the first chunk always runs: it counts the sinks
        ]
        sizes = tuple(chunks[i] for chunks, i in zip(self._query.chunks, (b, s, h), strict=False))
        result_bytes = math.prod(sizes) * (self._value.shape[3] * self._query.dtype.itemsize + 4)
        group = max(2, MERGED_BYTES // max(1, result_bytes))
        while len(parts) > 1:
            parts = [merge_chunks(*parts[i : i + group]) for i in range(0, len(parts), group)]
        output, lse = parts[0][0], parts[0][1]
        return (  # the output is in a list, so that `da.block` sees its fourth axis
            [da.from_delayed(output, (*sizes, self._value.shape[3]), self._query.dtype)],
            da.from_delayed(lse, sizes, np.float32),
        )

    def _mask_of(self, *ranges: slice) -> Array | None:
        """Return the part of the mask in the ranges of batch, heads, queries and keys of a chunk."""
        if self._mask is None:
            return None
        sizes = zip(self._mask.shape, ranges, strict=True)
        return self._mask[tuple(slice(None) if size == 1 else at for size, at in sizes)]

    def _is_visible(self, rows: slice, tokens: slice) -> bool:
        """Return whether a query in `rows` sees a key in `tokens`."""
        first, last = self._past + rows.start, self._past + rows.stop - 1
        left, right = self._window
        if tokens.start == tokens.stop or (left >= 0 and tokens.stop <= first - left):
            return False
        return right < 0 or tokens.start <= last + right


def _checked_arrays(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return query, key and value as checked dask arrays; value has the chunks of key."""
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


def _checked_mask(mask: Any, query: Any, key: Any) -> Array | None:
    """Return a checked mask with four axes; None without one."""
    if mask is not None:
        check_mask_type(BY_NAME[query.dtype.name], mask)
    if mask is None or not mask.size:
        return None
    full_shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])  # [B, Hq, S, M]
    if not 2 <= mask.ndim <= 4:
        raise argument_error("attn_mask", "2 to 4 axes", describe(mask))
    mask = mask[(None,) * (4 - mask.ndim)]
    fits = (size in (1, full) for size, full in zip(mask.shape[:3], full_shape[:3], strict=True))
    if not all(fits) or mask.shape[3] != full_shape[3]:
        raise argument_error("attn_mask", f"shape {full_shape}, where all but the last may be 1", mask.shape)
    return mask


def _ranges(sizes: tuple[int, ...]) -> list[slice]:
    """Return the range [begin, end) of each chunk."""
    starts = np.cumsum((0, *sizes)).tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(starts)]


def _attend_chunk(*arguments: Any, **options: Any) -> tuple[Array, Array]:
    """Attend to one chunk on the threads of this worker."""
    with partial_attention.kernel_threads(partial_attention.worker_threads()):
        return partial_attention.attend_part(*arguments, **options)


def _merge_chunks(*states: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merge the outputs and lse of chunks."""
    return partial_attention.merge_parts(states, BY_NAME[states[0][0].dtype.name])
