"""Attend in packed sequences: to packed keys and values, or to a cache after an append."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.calls.prepared import attend
from kvkit.calls.targets import CallTarget, operator, repeated_operator
from kvkit.checks.arguments import (
    CacheArguments,
    CacheAttention,
    ContextArguments,
    KeyAttention,
    Scoring,
    StepArguments,
)
from kvkit.checks.attention import checked_attention
from kvkit.checks.index_tensors import packed_with_keys
from kvkit.typed import Array, Attended, Pair


@operator
def multi_head_attention(
    on: CallTarget,
    query: Array,
    key: Array,
    value: Array,
    seqstarts: ArrayLike,
    kvstarts: ArrayLike,
    decoding_batches: SupportsIndex,
    max_seqlen: SupportsIndex | None,
    max_kvlen: SupportsIndex | None,
    attn_mask: Array | None = None,
    *,
    num_heads: int = 0,
    head_dim: int = 0,
    is_causal: bool = True,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | Pair | None = None,
) -> Attended:
    """Attend with every query to the keys and values of its own sequence; sequences are packed.

    Each sequence is computed as by `kvkit.multi_head_attention`. In a sequence with n queries and m keys,
    query i is at position m - n + i.

    Parameters
    ----------
    query : ndarray, shape [seqstarts[B], num_heads, head_dim]
        float32, float16 or bfloat16.
    key : ndarray, shape [kvstarts[B], num_kv_heads, head_dim]
        The dtype is that of ``query``.
    value : ndarray, shape [kvstarts[B], num_kv_heads, Dv]
        The dtype is that of ``query``. Dv, the size of a value head, may differ from head_dim.
    seqstarts, kvstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins in ``query``, and in ``key`` and ``value``: first 0, last their length.
    decoding_batches : int
        How many sequences, counted from the first, ignore ``is_causal``.
    max_seqlen, max_kvlen : int or None
        Upper bounds of a sequence's queries, and of its keys. They are checked, and change no result.
    attn_mask : ndarray, optional
        Shape [seqstarts[B], kvstarts[B]], perhaps with a first axis of num_heads or 1. Either numbers to add
        to the scores, float32 or of the dtype of ``query``, or boolean (True may attend). Only the blocks on
        the diagonal, where a sequence's queries meet its keys, are read. More columns are ignored; one column
        is for all keys.
    num_heads, head_dim, is_causal, is_alibi, num_kv_heads, softmax_scale, window, softcap, sinks
        As in `kvkit.multi_head_attention`.
    return_lse, out
        As in `kvkit.multi_head_attention`.

    Returns
    -------
    attn_output : ndarray, shape [seqstarts[B], num_heads, Dv]
        The dtype is that of ``query``.
    lse : ndarray of float32, shape [seqstarts[B], num_heads]
        If ``return_lse``: logarithms of the softmax denominators.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    PMX operator ``dynamic_batching.MultiHeadAttention``. PMX lacks the arguments from ``softmax_scale`` on.
    For bfloat16 see the notes of `kvkit.multi_head_attention`.

    Examples
    --------
    Two sequences, of one query and three keys, and of two and two:

    >>> import numpy as np, kvkit
    >>> query, key = np.zeros((3, 1, 4), np.float32), np.zeros((5, 1, 4), np.float32)
    >>> value = np.arange(5, dtype=np.float32).reshape(5, 1, 1)
    >>> kvkit.dynamic_batching.multi_head_attention(
    ...     query, key, value, [0, 1, 3], [0, 3, 5], 1, None, None, num_heads=1, head_dim=4).ravel()
    array([1. , 3. , 3.5], dtype=float32)
    """
    contexts = ContextArguments(seqstarts, kvstarts, decoding_batches, max_seqlen, max_kvlen)
    scoring = Scoring(attn_mask, is_causal, is_alibi, softmax_scale, window, softcap, sinks)
    heads = num_heads, head_dim, num_kv_heads
    call = KeyAttention(query, key, value, heads, scoring, return_lse)
    return attend(on.check(checked_attention, call, packed_with_keys(contexts)), out)


@repeated_operator
def multi_head_cache_attention(
    on: CallTarget,
    query: Array,
    current_key: Array,
    current_value: Array,
    seqstarts: ArrayLike,
    kvstarts: ArrayLike,
    cachestarts: ArrayLike,
    start_pos: ArrayLike,
    decoding_batches: SupportsIndex,
    max_seqlen: SupportsIndex | None,
    max_kvlen: SupportsIndex | None,
    cache: Array,
    scale: Array | None = None,
    attn_mask: Array | None = None,
    *,
    num_heads: int = 0,
    head_dim: int = 0,
    is_causal: bool = True,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: Literal[0, 4, 8] = 0,
    quant_group: int = 8,
    quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None,
    cache_mode: Literal[0, 1] = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | Pair | None = None,
) -> Attended:
    """Append packed keys and values to a shared cache and attend to each context in place.

    The result is that of `key_value_cache` and then `multi_head_attention` over the contexts, without a copy
    of them. New tokens, too, are attended to as they are stored. For many layers, see `plan`.

    As in `kvkit.multi_head_cache_attention`, codes are multiplied with their scales in float32. Products are
    not rounded to the dtype of the data, but to that of the scales where this is coarser (float16 scales of
    float32 data: an error of up to 2^-11 of each number).

    Parameters
    ----------
    query : ndarray, shape [seqstarts[B], num_heads, head_dim]
        float32, float16 or bfloat16.
    current_key, current_value : ndarray, shape [seqstarts[B], num_kv_heads, head_dim]
        Keys and values of the new tokens, of the dtype of ``query``.
    seqstarts, kvstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins among the new tokens, and among all contexts: first 0, last the total.
    cachestarts : ndarray of int64, shape [B] or [B, MaxP]
        The first row of each sequence (``cache_mode`` 0) or of each of its pages (1).
    start_pos : ndarray of int64, shape [B]
        Position of each sequence's first new token.
    decoding_batches : int
        How many sequences, counted from the first, ignore ``is_causal``.
    max_seqlen, max_kvlen : int or None
        Upper bounds of a sequence's new tokens, and of its context. They are checked, and change no result.
    cache : ndarray, changed in place
        The axes follow ``cache_layout``, as in `key_value_cache`. H is ``num_kv_heads``, Dh ``head_dim``.
    scale : ndarray, optional, changed in place
        Scales of a quantized cache. Its shape is that of ``cache``, with a last axis of Dh/quant_group.
    attn_mask : ndarray, optional
        Shape [seqstarts[B], kvstarts[B]], perhaps with a first axis of heads; as in `multi_head_attention`.
    num_heads, head_dim, num_kv_heads, is_causal, is_alibi
        As in `multi_head_attention`.
    num_layer, layer_idx, quant_bit, quant_group, quant_format, cache_mode, page_size
        As in `key_value_cache`.
    softmax_scale, window, softcap, sinks, return_lse, out
        As in `multi_head_attention`.

    Returns
    -------
    attn_output : ndarray, shape [seqstarts[B], num_heads, head_dim]
        The dtype is that of ``query``.
    lse : ndarray of float32, shape [seqstarts[B], num_heads]
        If ``return_lse``: logarithms of the softmax denominators.

    Raises
    ------
    KvkitError
        If an argument is wrong; then neither ``cache`` nor ``scale`` has changed.

    Notes
    -----
    PMX operator ``dynamic_batching.MultiHeadCacheAttention``. PMX lacks arguments from ``softmax_scale`` on.
    For bfloat16 see the notes of `kvkit.multi_head_attention`.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.zeros((16, 1, 2, 2, 8), np.float16)
    >>> new = np.arange(4, dtype=np.float32)[:, None, None] * np.ones((4, 2, 8), np.float32)
    >>> output = kvkit.dynamic_batching.multi_head_cache_attention(
    ...     np.zeros((4, 4, 8), np.float32), new, new, np.array([0, 3, 4]), np.array([0, 3, 4]),
    ...     np.array([[8], [4]]), np.array([0, 0]), 0, None, None, cache,
    ...     num_heads=4, head_dim=8, num_kv_heads=2, cache_mode=1, page_size=4)
    >>> output[:, 0, 0]
    array([0. , 0.5, 1. , 3. ], dtype=float32)
    """
    index = StepArguments(
        seqstarts, kvstarts, cachestarts, start_pos, decoding_batches, max_seqlen=max_seqlen,
        max_kvlen=max_kvlen, cache_mode=cache_mode, page_size=page_size,
    )  # fmt: skip
    place = CacheArguments(num_layer, layer_idx, quant_bit, quant_group, quant_format, cache_layout)
    scoring = Scoring(attn_mask, is_causal, is_alibi, softmax_scale, window, softcap, sinks)
    heads = num_heads, head_dim, num_kv_heads
    call = CacheAttention(
        query, current_key, current_value, cache, scale, place=place, heads=heads, scoring=scoring,
        return_lse=return_lse,
    )  # fmt: skip
    return on.run_in_cache(index, call, out)
