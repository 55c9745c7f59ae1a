"""Choose the rows of a latent cache that each query attends to: the indexer of sparse attention (DSA)."""

from __future__ import annotations

from numpy.typing import ArrayLike

from kvkit.calls.indexer import choose_rows, score_positions
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import ChoiceArguments, IndexerArguments
from kvkit.checks.contexts import BlockTables
from kvkit.checks.indexer import checked_choice, checked_scores
from kvkit.typed import Array


@operator
def indexer_scores(
    on: CallTarget,
    query: Array,
    keys: Array,
    weights: Array,
    block_tables: BlockTables,
    context_lens: ArrayLike,
    query_starts: ArrayLike | None = None,
    *,
    key_scale: Array | None = None,
    softmax_scale: float | None = None,
    out: Array | None = None,
) -> Array:
    """Score every position of a context for each query, as DeepSeek's indexer does.

    score[t, s] = sum over heads h of weights[t, h] * max(0, softmax_scale * query[t, h] . keys[s])

    Parameters
    ----------
    query : ndarray, shape [tokens, H, D]
        float32, float16, bfloat16 or float8, rotated; the tokens of all sequences, one after the other.
    keys : ndarray, shape [blocks, page_size, D]
        A pool of index keys, floats or ml_dtypes' float8_e4m3fn, with any strides.
    weights : ndarray, shape [tokens, H]
        The heads' weights; DeepSeek's are ``weights_proj(h) * H ** -0.5``.
    block_tables : array_like of int, shape [B, M], or a tuple (indptr [B + 1], indices)
        The pages of each context, as in `paged_attention`.
    context_lens, query_starts : array_like of int, shapes [B] and [B + 1]
        The length of each context, and where its queries begin, as in `paged_attention`.
    key_scale : ndarray of float32, shape [blocks, page_size], optional
        The scale of each key; required for codes.
    softmax_scale : float, optional
        Factor of the products; D ** -0.5 if None.
    out : ndarray, optional
        An array for the result; allocated if None.

    Returns
    -------
    scores : ndarray of float32, shape [tokens, longest context]
        -inf for positions after the query's own, and after the end of its context.

    Raises
    ------
    KvkitError
        If an argument is wrong, or a page that a context needs is not in the pool.

    Notes
    -----
    DeepSeek multiplies queries and keys with a Hadamard matrix before both become codes, which does not
    change their products. Products and sums are float32.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> query = np.array([[[1, 2], [-1, 1]]], np.float32)
    >>> keys = np.array([[[1, 0], [0, 1], [-2, 1], [1, 1]]], np.float32)
    >>> weights = np.array([[0.5, 2]], np.float32) * 2**-0.5
    >>> kvkit.indexer_scores(query, keys, weights, [[0]], [4]).round(4)
    array([[0.25, 1.5 , 3.  , 0.75]], dtype=float32)
    """
    call = IndexerArguments(
        query, keys, weights, block_tables, context_lens, query_starts, key_scale=key_scale,
        softmax_scale=softmax_scale,
    )  # fmt: skip
    return score_positions(on.check(checked_scores, call), out)


@operator
def topk_rows(
    on: CallTarget,
    scores: Array,
    k: int,
    block_tables: BlockTables,
    page_size: int,
    query_starts: ArrayLike | None = None,
    *,
    out: Array | None = None,
) -> Array:
    """Return the slots of each query's k positions with the highest scores, for `indices` of `mla_attention`.

    Parameters
    ----------
    scores : ndarray of float32, shape [tokens, N]
        The result of `indexer_scores`. -inf is never chosen. Of equal scores the earlier position is chosen.
    k : int
        How many positions to choose; DeepSeek's models take 2,048.
    block_tables : array_like of int, shape [B, M], or a tuple (indptr [B + 1], indices)
        As in `indexer_scores`.
    page_size : int
        The tokens of a block of the latent cache.
    query_starts : array_like of int, shape [B + 1], optional
        As in `indexer_scores`.
    out : ndarray, optional
        An array for the result; allocated if None.

    Returns
    -------
    rows : ndarray of int32, shape [tokens, k]
        ``block * page_size + offset``, by ascending position; -1 after the last.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    Attention does not depend on the order of its rows. Ascending rows are read from memory in order.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> scores = np.array([[0.25, 1.5, 3, 0.75]], np.float32)
    >>> kvkit.topk_rows(scores, 2, [[7, 5]], page_size=2)
    array([[15, 10]], dtype=int32)
    """
    call = ChoiceArguments(scores, k, block_tables, page_size, query_starts)
    return choose_rows(on.check(checked_choice, call), out)
