"""Attend with one query token per sequence over a cache in blocks (Ascend ATB PagedAttention)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvkit import cpu
from kvkit.calls.prepared import one_or_all
from kvkit.checks import pools
from kvkit.checks.arguments import BlockAttention, Scoring
from kvkit.checks.ascend import attention
from kvkit.checks.values import one_piece
from kvkit.interop import returns_input_kind
from kvkit.typed import Array, Attended, Pair


@returns_input_kind
def paged_attention(
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
    call = attention.checked_block_attention(arguments)
    results = call.results.arrays(out)
    attend_to_blocks(call, *results)
    return one_or_all(results)


def attend_to_blocks(call: attention.BlockAttentionCall, out: Array, lse: Array | None = None) -> None:
    """Run checked attention, where each entry of the block tables is a sequence with one query token."""
    entries, heads = attention.folded_shape(call)
    query = one_piece(call.query).reshape(entries, heads, call.query.shape[2])
    entry_out = out.reshape(entries, heads, out.shape[2])
    entry_lse = None if lse is None else lse.reshape(entries, heads)
    context, steps = pools.context_of(call.fmt, *call.caches), attention.entry_steps(call)
    bias = bias_of(call)
    weights = call.weights if bias is None else attention.with_bias(call.weights, bias)
    prepare = cpu.attention.prepare.prepare_attention
    cpu.launches.start(prepare(query, entry_out, entry_lse, context, steps, entries, weights))
    if not np.may_share_memory(out, entry_out):  # no view of `out` had this shape
        out[...] = entry_out.reshape(out.shape)
    if lse is not None and entry_lse is not None and not np.may_share_memory(lse, entry_lse):
        lse[...] = entry_lse.reshape(lse.shape)


def bias_of(call: attention.BlockAttentionCall) -> Array | None:
    """Return razor_offset * scale for the rows of each block table, [entries, rows]; None without it."""
    if call.razor_offset is None:
        return None
    bias = call.razor_offset.take(call.table, 0, mode="clip") * np.float32(call.weights.scale)
    return bias.reshape(len(bias), attention.context_rows(call))
