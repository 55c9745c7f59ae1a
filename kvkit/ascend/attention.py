"""Attend with one query token per sequence over a cache in blocks (Ascend ATB PagedAttention)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvkit import cpu
from kvkit.calls.prepared import attention_launches, one_or_all
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.arguments import BlockAttention, Scoring
from kvkit.checks.ascend.attention import checked_block_attention, folded_shape, with_bias
from kvkit.checks.values import one_piece
from kvkit.typed import Array, Attended, Pair


@operator
def paged_attention(
    on: CallTarget,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: ArrayLike,
    context_lens: ArrayLike,
    *,
    razor_offset: Array | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | Pair | None = None,
) -> Attended:
    """Attend to contexts in a cache in blocks, with one query token for each sequence.

    A compressed cache has one head, and a block table for each pair of sequence and key head: the query heads
    of key head h in sequence b use entry ``b * num_kv_head + h``.

    Parameters
    ----------
    query : ndarray, shape [B, num_head, D]
        float32, float16 or bfloat16.
    key_cache, value_cache : ndarray, shapes [num_blocks, block_size, num_kv_head, D] and [..., Dv]
        In the dtype of `query`, with any strides; a compressed cache is [num_blocks, block_size, 1, D].
    block_tables : ndarray of int32 or int64, shape [B, M] or [B * num_kv_head, M]
        The blocks of each context; entries after its last block are not read.
    context_lens : ndarray of int32 or int64, shape [B] or [B * num_kv_head]
        The rows of each context.
    razor_offset : ndarray of float32, shape [num_blocks, block_size], optional
        Added to q @ k before scaling: the score is softmax_scale * (q @ k + offset). `softcap` limits only
        softmax_scale * q @ k. With ln(N) / softmax_scale the mean of N tokens counts N times (see `Slots`).
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(D) if None.
    window : tuple of int
        (left, right): how many rows before and after the last row a query sees; -1 for no limit.
    softcap, sinks, return_lse
        As in `kvkit.multi_head_attention`.
    out : ndarray or tuple of ndarray, optional
        Array for ``attn_output``, or arrays for both outputs; made if not given.

    Returns
    -------
    attn_output : ndarray, shape [B, num_head, Dv]
        In the dtype of `query`; zeros for an empty context.
    lse : ndarray of float32, shape [B, num_head]
        With `return_lse`.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    Ascend ATB PagedAttention. Scores and sums are float32.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> keys, values = np.zeros((2, 2, 1, 1), np.float32), np.array([7, 99, 1, 3], np.float32)
    >>> one_head = np.ones((1, 1, 1), np.float32)
    >>> table, lens = np.array([[1]]), np.array([2])
    >>> kvkit.ascend.paged_attention(one_head, keys, values.reshape(2, 2, 1, 1), table, lens)
    array([[[2.]]], dtype=float32)
    """
    arguments = BlockAttention(
        query, key_cache, value_cache, block_tables, context_lens, razor_offset,
        scoring=Scoring(None, False, False, softmax_scale, window, softcap, sinks), return_lse=return_lse,
    )  # fmt: skip
    call = on.check(checked_block_attention, arguments)
    results, (contexts, heads), weights = call.results.arrays(out), folded_shape(call), call.weights
    if call.row_bias is not None:
        offsets, blocks = call.row_bias
        bias = offsets[blocks] * np.float32(weights.scale)  # [contexts, blocks, rows]
        weights = with_bias(weights, bias)
    folded = [array.reshape(contexts, heads, *array.shape[2:]) for array in (call.query, *results)]
    call = call._replace(query=one_piece(folded[0]), weights=weights)
    cpu.launches.start(*attention_launches(call, folded[1:]))
    for result, array in zip(results, folded[1:], strict=True):
        if not np.may_share_memory(result, array):  # no view of `out` had this shape
            result[...] = array.reshape(result.shape)
    return one_or_all(results)
