"""Attend in sequences of one length: to arrays of keys and values, or to a cache after an append."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from kvkit.calls.prepared import attend_to_keys
from kvkit.calls.targets import CallTarget, repeated_operator
from kvkit.checks.arguments import CacheArguments, CacheAttention, KeyAttention, Scoring
from kvkit.checks.attention import checked_attention
from kvkit.typed import Array, Arrays, Attended, Pair


@repeated_operator
def multi_head_attention(
    on: CallTarget,
    query: Array,
    key: Array,
    value: Array,
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
    return_key_weights: bool = False,
    out: Array | Arrays | None = None,
) -> Attended:
    """Attend with every query to the keys and values of its sequence.

    Query head h uses key head ``h // (num_heads // num_kv_heads)``. With M keys, query i of S is at
    position M - S + i; the causal mask, ALiBi and windows count from there. The output of a query that
    attends to no key is 0. Arithmetic is in float32, and results are rounded once.

    Parameters
    ----------
    query : ndarray, shape [B, S, num_heads, head_dim]
        float32, float16 or bfloat16.
    key : ndarray, shape [B, M, num_kv_heads, head_dim]
        The dtype is that of ``query``.
    value : ndarray, shape [B, M, num_kv_heads, Dv]
        The dtype is that of ``query``. Dv, the size of a value head, may differ from head_dim.
    attn_mask : ndarray, optional
        Either numbers to add to the scores, float32 or of the dtype of ``query``, or boolean (True may
        attend). 2 to 4 axes, right-aligned to [B, num_heads, S, M]; each may be 1. Columns from M on are
        ignored. Keys with -inf are not attended to.
    num_heads, head_dim : int
        The number of query heads, and their size; 0: what ``query`` shows.
    is_causal : bool
        Whether a query ignores keys after its own position.
    is_alibi : bool
        Whether to add ALiBi biases, which are causal.
    num_kv_heads : int
        The number of key heads, a divisor of ``num_heads``; 0: what the array of keys shows.
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(head_dim) if None.
    window : tuple of int
        How many keys left and right of its own position a query attends to; -1 for no limit.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)`` before masks and biases are added.
    sinks : ndarray, shape [num_heads], optional
        One more score for each head, which is part of its softmax and has no value.
    return_lse : bool
        Whether to return the logarithms of the softmax denominators too.
    return_key_weights : bool
        Whether to return how much weight each key gets from all queries of a head.
    out : ndarray or tuple of ndarray, optional
        Array for ``attn_output``, or arrays for all outputs; made if not given.

    Returns
    -------
    attn_output : ndarray, shape [B, S, num_heads, Dv]
        The dtype is that of ``query``.
    lse : ndarray of float32, shape [B, S, num_heads]
        If ``return_lse``: the natural logarithm of the sum of exp(score), sinks included; -inf for a query
        that attends to no key and has no sink.
    key_weights : ndarray of float32, shape [B, num_heads, M]
        If ``return_key_weights``: the sums of the softmax weights over queries, for `kvkit.eviction`.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    PMX operator ``MultiHeadAttention``. PMX lacks the arguments from ``softmax_scale`` on.

    If all data are bfloat16 and the CPU has AVX-512 BF16, a call with more than 8 query rows for a key head
    rounds softmax weights to bfloat16. Its outputs may then have other bits than those of a step.
    ``KVKIT_CPU=avx512vnni`` in the environment keeps weights in float32.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> query = np.zeros((1, 2, 1, 4), np.float32)
    >>> value = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    >>> key = np.ones((1, 3, 1, 4), np.float32)
    >>> kvkit.multi_head_attention(query, key, value).ravel()
    array([0.5, 1. ], dtype=float32)
    """
    scoring = Scoring(attn_mask, is_causal, is_alibi, softmax_scale, window, softcap, sinks)
    heads = num_heads, head_dim, num_kv_heads
    call = KeyAttention(query, key, value, heads, scoring, return_lse, return_key_weights)
    return on.repeat(checked_attention, attend_to_keys)(call, out)


@repeated_operator
def multi_head_cache_attention(
    on: CallTarget,
    query: Array,
    current_key: Array,
    current_value: Array,
    start_pos: SupportsIndex,
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
    cache_layout: int = 0,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | Pair | None = None,
) -> Attended:
    """Append keys and values to a static cache and attend to the whole context in place.

    The result is that of `key_value_cache` and then `multi_head_attention` over the context, without a copy
    of it. New tokens, too, are attended to as they are stored.

    `key_value_cache` rounds what it returns to the dtype of the data. Here codes are multiplied with their
    scales in float32, and rounded only where scales have a coarser dtype than the data. So a score s may
    differ by 2^-11 s, and for bfloat16 by 2^-8 s. Differences of outputs therefore grow with
    max(1, largest magnitude of a score in the row / 8).

    Parameters
    ----------
    query : ndarray, shape [B, S, num_heads, head_dim]
        float32, float16 or bfloat16.
    current_key, current_value : ndarray, shape [B, S, num_kv_heads, head_dim]
        Keys and values of the new tokens, of the dtype of ``query``.
    start_pos : int
        Position of the first new token.
    cache : ndarray, changed in place
        The axes follow ``cache_layout``, as in `key_value_cache`. H is ``num_kv_heads``, Dh ``head_dim``.
    scale : ndarray, optional, changed in place
        Scales of a quantized cache. Its shape is that of ``cache``, with a last axis of Dh/quant_group.
    attn_mask : ndarray, optional
        As in `multi_head_attention`, right-aligned to [B, num_heads, S, start_pos + S].
    num_heads, head_dim, num_kv_heads, is_causal, is_alibi
        As in `multi_head_attention`.
    num_layer, layer_idx, quant_bit, quant_group, quant_format
        As in `key_value_cache`.
    softmax_scale, window, softcap, sinks, return_lse, out
        As in `multi_head_attention`.

    Returns
    -------
    attn_output : ndarray, shape [B, S, num_heads, head_dim]
        The dtype is that of ``query``.
    lse : ndarray of float32, shape [B, S, num_heads]
        If ``return_lse``: logarithms of the softmax denominators.

    Raises
    ------
    KvkitError
        If an argument is wrong; then neither ``cache`` nor ``scale`` has changed.

    Notes
    -----
    PMX operator ``MultiHeadCacheAttention``. PMX lacks the arguments from ``softmax_scale`` on. For bfloat16
    see the notes of `multi_head_attention`.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.zeros((1, 1, 2, 16, 1, 4), np.float16)
    >>> new = np.ones((1, 1, 1, 4), np.float32)
    >>> sizes = {"num_heads": 1, "head_dim": 4}
    >>> first = kvkit.multi_head_cache_attention(new, new, 2 * new, 0, cache, **sizes)
    >>> second = kvkit.multi_head_cache_attention(new, new, 4 * new, 1, cache, **sizes)
    >>> first[0, 0, 0, 0], second[0, 0, 0, 0]
    (np.float32(2.0), np.float32(3.0))
    """
    place = CacheArguments(num_layer, layer_idx, quant_bit, quant_group, quant_format, cache_layout)
    scoring = Scoring(attn_mask, is_causal, is_alibi, softmax_scale, window, softcap, sinks)
    heads = num_heads, head_dim, num_kv_heads
    call = CacheAttention(
        query, current_key, current_value, cache, scale, place=place, heads=heads, scoring=scoring,
        return_lse=return_lse,
    )  # fmt: skip
    return on.run_in_cache(start_pos, call, out)
