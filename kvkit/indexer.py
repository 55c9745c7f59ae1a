"""The indexer of sparse attention (DSA): which rows of a latent cache each query attends to."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike

from kvkit.calls.latent import gather_rows, slots_of
from kvkit.checks.index_tensors import index
from kvkit.checks.latent import LatentPool, float_part
from kvkit.checks.paged import starts_of
from kvkit.checks.pools import checked_table
from kvkit.checks.values import checked_format, integer, positive_number
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS
from kvkit.formats.elements import E4M3
from kvkit.interop import returns_input_kind
from kvkit.typed import Array

KEYS = 512  # that are scored at a time, so that products stay near the core
Table = ArrayLike | tuple[ArrayLike, ArrayLike]


@returns_input_kind
def indexer_scores(
    query: Array,
    keys: Array,
    weights: Array,
    block_tables: Table,
    context_lens: ArrayLike,
    query_starts: ArrayLike | None = None,
    *,
    key_scale: Array | None = None,
    scale: float | None = None,
) -> Array:
    """Score every position of a context for each query, as DeepSeek's indexer does.

    score[t, s] = sum over heads h of weights[t, h] * max(0, scale * query[t, h] . keys[s])

    Parameters
    ----------
    query : ndarray, shape [tokens, H, D]
        float32, float16 or bfloat16, rotated; the tokens of all sequences, one after the other.
    keys : ndarray, shape [blocks, page_size, D]
        A pool of index keys, floats or ml_dtypes' float8_e4m3fn, with any strides.
    weights : ndarray, shape [tokens, H]
        The heads' weights; DeepSeek's are ``weights_proj(h) * H ** -0.5``.
    block_tables, context_lens, query_starts : array_like
        As in `paged_attention`.
    key_scale : ndarray of float32, shape [blocks, page_size], optional
        The scale of each key; required for codes.
    scale : float, optional
        Factor of the products; D ** -0.5 if None.

    Returns
    -------
    ndarray of float32, shape [tokens, longest context]
        -inf for positions after the query's own, and behind its context. Products and sums are float32.

    Raises
    ------
    KvkitError
        If an argument is wrong, or a page that a context needs is not in the pool.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> query = np.array([[[1, 2], [-1, 1]]], np.float32)
    >>> keys = np.array([[[1, 0], [0, 1], [-2, 1], [1, 1]]], np.float32)
    >>> weights = np.array([[0.5, 2]], np.float32) * 2**-0.5
    >>> kvkit.indexer_scores(query, keys, weights, [[0]], [4]).round(4)
    array([[0.25, 1.5 , 3.  , 0.75]], dtype=float32)
    """
    checked_format("query", query, FLOATS, 3)
    checked_format("weights", weights, FLOATS, 2)
    tokens, heads, dim = query.shape
    if weights.shape != (tokens, heads):
        raise argument_error("weights", f"shape {(tokens, heads)}, as query has", weights.shape)
    pool = pool_of_keys(keys, key_scale, dim)
    lengths = index("context_lens", context_lens)
    starts = starts_of(query_starts, len(lengths), tokens)
    pages = checked_table(block_tables, lengths, len(keys), pool.page_size)
    factor = dim**-0.5 if scale is None else positive_number("scale", scale)
    scores = np.full((tokens, int(lengths.max(initial=0))), -np.inf, np.float32)
    rows = np.ascontiguousarray(query, np.float32) * np.float32(factor)  # [tokens, H, D]
    share = weights.astype(np.float32)[:, None]  # [tokens, 1, H]
    for sequence, length in enumerate(lengths.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        for first in range(0, length, KEYS):
            last = min(first + KEYS, length)
            found = gather_rows(pool, slots_of(pages, pool.page_size, sequence, first, last))
            key = found[:, :dim].astype(np.float32, copy=False)
            products = rows[begin:end].reshape(-1, dim) @ key.T  # [queries * H, keys]
            if key_scale is not None:
                products *= found[:, dim]
            np.maximum(products, 0, out=products)
            by_head = products.reshape(end - begin, heads, last - first)
            scores[begin:end, first:last] = (share[begin:end] @ by_head)[:, 0]
        own = np.arange(length - (end - begin), length)  # positions of the queries
        hidden = np.arange(scores.shape[1]) > own[:, None]
        scores[begin:end][hidden] = -np.inf
    return scores


def pool_of_keys(keys: Array, key_scale: Array | None, dim: int) -> LatentPool:
    """Return the checked pool of index keys; with scales, these are a last element of each row."""
    if key_scale is None:
        parts: tuple[Array, ...] = (float_part("keys", keys),)
    else:
        checked_format("keys", keys, (E4M3,), 3)
        checked_format("key_scale", key_scale, FLOATS[:1], 2)
        if key_scale.shape != keys.shape[:2]:
            raise argument_error("key_scale", f"shape {keys.shape[:2]}, as keys have", key_scale.shape)
        parts = keys, key_scale[..., None]
    if keys.shape[2] != dim:
        raise argument_error("keys", f"rows of {dim} elements, as query has", describe(keys))
    return LatentPool(parts, None, dim)


@returns_input_kind
def topk_rows(
    scores: Array, k: int, block_tables: Table, page_size: int, query_starts: ArrayLike | None = None
) -> Array:
    """Return the slots of the k best positions of each query, as `mla_attention` takes them in `indices`.

    Parameters
    ----------
    scores : ndarray of float32, shape [tokens, N]
        What `indexer_scores` returns. -inf is never chosen. Of equal scores the earlier position comes first.
    k : int
        How many; DeepSeek's models take 2,048.
    block_tables, query_starts : array_like
        As in `indexer_scores`.
    page_size : int
        The tokens of a block of the latent cache.

    Returns
    -------
    ndarray of int32, shape [tokens, k]
        ``block * page_size + offset``, by ascending position; -1 behind the last.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> scores = np.array([[0.25, 1.5, 3, 0.75]], np.float32)
    >>> kvkit.topk_rows(scores, 2, [[7, 5]], page_size=2)
    array([[15, 10]], dtype=int32)
    """
    checked_format("scores", scores, FLOATS[:1], 2)
    k, page_size = integer("k", k, 1), integer("page_size", page_size, 1)
    if np.isnan(scores).any():
        raise argument_error("scores", "numbers", "NaN")
    seen = scores > -np.inf
    lengths = np.where(seen.any(axis=1), scores.shape[1] - seen[:, ::-1].argmax(axis=1), 0)
    if isinstance(block_tables, tuple):
        batch = len(index("block_tables", block_tables[0])) - 1
    else:
        batch = len(index("block_tables", block_tables, 2))
    starts = starts_of(query_starts, batch, len(scores))
    longest = np.array([lengths[a:b].max(initial=0) for a, b in itertools.pairwise(starts)], np.int64)
    pages = checked_table(block_tables, longest, 2**31 // page_size, page_size)
    chosen = np.full((len(scores), k), -1, np.int32)
    for sequence, length in enumerate(longest.tolist()):
        slots = slots_of(pages, page_size, sequence, 0, length)
        for token in range(starts[sequence], starts[sequence + 1]):
            best = best_positions(scores[token, :length], k)
            chosen[token, : len(best)] = slots[best]
    return chosen


def best_positions(scores: Array, k: int) -> Array:
    """Return the ascending positions of the k largest numbers above -inf; of equal ones the first."""
    count = min(k, len(scores))
    if not count:
        return np.zeros(0, np.int64)
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    chosen = scores > least
    equal = np.flatnonzero(scores == least) if least > -np.inf else np.zeros(0, np.int64)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
