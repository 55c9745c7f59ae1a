"""Attention over static batches: whole keys and values, or a cache that the new ones are appended to."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from kvkit.calls.prepared import attend
from kvkit.calls.steps import attend_static
from kvkit.checks.arguments import CacheArguments, CacheAttention, Heads, Scoring
from kvkit.checks.attention import checked_attention
from kvkit.checks.index_tensors import Static
from kvkit.interop import returns_input_kind
from kvkit.typed import Array, Attended, Pair


@returns_input_kind
def multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    *,
    num_heads: int,
    head_dim: int,
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
    """Attend with every query to the keys and values of its sequence.

    Query head h uses key head ``h // (num_heads // num_kv_heads)``. With M keys, query i of S is at
    position M - S + i; the causal mask, ALiBi and windows count from there. A query that sees no key gives
    zeros. Arithmetic is in float32 and is rounded once.

    Parameters
    ----------
    query : ndarray, shape [B, S, num_heads, head_dim]
        float32, float16 or bfloat16.
    key : ndarray, shape [B, M, num_kv_heads, head_dim]
        Of the dtype of ``query``.
    value : ndarray, shape [B, M, num_kv_heads, Dv]
        Likewise; its heads may have another size.
    attn_mask : ndarray, optional
        Added to the scores, of the dtype of ``query`` or float32, or boolean (True may attend). Right-aligned
        to [B, num_heads, S, M], with 2 to 4 axes; the first three may be 1; columns from M on are ignored. A
        key whose mask is -inf is absent.
    num_heads, head_dim : int
        Heads of ``query`` and their size.
    is_causal : bool
        Whether a query sees no key after its own position.
    is_alibi : bool
        Whether ALiBi biases are added; they are causal.
    num_kv_heads : int
        Heads of ``key``; 0 for as many as queries have. Divides ``num_heads``.
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(head_dim) if None.
    window : tuple of int
        How many keys left and right of its own position a query sees; -1 for no limit.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)`` before masks and biases are added.
    sinks : ndarray, shape [num_heads], optional
        A score for each head that takes part in the softmax and has no value.
    return_lse : bool
        Whether the logarithms of the softmax denominators are returned too.
    out : ndarray or tuple of ndarray, optional
        Array for ``attn_output``, or arrays for both outputs; made if not given.

    Returns
    -------
    attn_output : ndarray, shape [B, S, num_heads, Dv]
        Of the dtype of ``query``.
    lse : ndarray of float32, shape [B, S, num_heads]
        With ``return_lse``: natural logarithm of the sum of exp(score), sinks included; -inf for a query
        that sees no key and has no sink.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    PMX operator ``MultiHeadAttention``; from ``softmax_scale`` on, beyond it.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> query = np.zeros((1, 2, 1, 4), np.float32)
    >>> value = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    >>> key = np.ones((1, 3, 1, 4), np.float32)
    >>> kvkit.multi_head_attention(query, key, value, num_heads=1, head_dim=4).ravel()
    array([0.5, 1. ], dtype=float32)
    """
    scoring = Scoring(attn_mask, is_causal, is_alibi, softmax_scale, window, softcap, sinks)
    heads = Heads(num_heads, head_dim, num_kv_heads)
    return attend(checked_attention(Static(), query, key, value, heads, scoring, return_lse), out)


@returns_input_kind
def multi_head_cache_attention(
    query: Array,
    current_key: Array,
    current_value: Array,
    start_pos: SupportsIndex,
    cache: Array,
    scale: Array | None = None,
    attn_mask: Array | None = None,
    *,
    num_heads: int,
    head_dim: int,
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
    """Append keys and values to a static cache and attend to the whole context, read where it lies.

    The same as `key_value_cache` and then `multi_head_attention` over what it returns, without making it:
    new tokens, too, are attended to as the cache holds them.

    What the former returns is rounded to the type of the data. Here codes are products with their scales in
    float32, rounded only where the type of scales is the coarser one, in a call of one token as in one of
    many. So a score of s may differ by 2^-11 s, for bfloat16 by 2^-8 s, and tolerances of outputs grow with
    max(1, largest score of the row, in magnitude, / 8).

    Parameters
    ----------
    query : ndarray, shape [B, S, num_heads, head_dim]
        float32, float16 or bfloat16.
    current_key, current_value : ndarray, shape [B, S, num_kv_heads, head_dim]
        Keys and values of the new tokens, of the dtype of ``query``.
    start_pos : int
        Position of the first new token.
    cache : ndarray, changed in place
        By ``cache_layout`` as in `key_value_cache`; H is ``num_kv_heads``, Dh ``head_dim``.
    scale : ndarray, optional, changed in place
        Scales of a quantized cache: its shape with last axis Dh/quant_group.
    attn_mask : ndarray, optional
        Added to the scores, or boolean (True may attend): right-aligned to [B, num_heads, S, start_pos + S].
    num_heads, head_dim, num_kv_heads : int
        Heads of ``query``, their size, and heads of the cache (0 for as many).
    is_causal, is_alibi : bool
        Whether a query sees no key after its own position; whether ALiBi biases are added.
    num_layer, layer_idx : int
        Layers in the cache, and the one to use.
    quant_bit, quant_group : int
        0 stores floats, 8 and 4 store codes with one scale for each ``quant_group`` elements of a head.
    quant_format : str, optional
        With ``quant_bit`` 0, what a uint8 cache holds: "e4m3" or "e5m2", floats of 8 bits that saturate; or
        "q8_0" or "q4_0", ggml's blocks of 34 or 18 bytes for 32 elements, with their scales inside. Floats
        of 8 bits are multiplied with ``scale``: 1 if None; given ones of keys and values of shape [2] or
        [2, H]; or, of its shape with last axis Dh/quant_group, the largest magnitudes / the largest code,
        which are written.
    softmax_scale, window, softcap, sinks, return_lse, out
        As in `multi_head_attention`.

    Returns
    -------
    attn_output : ndarray, shape [B, S, num_heads, head_dim]
        Of the dtype of ``query``.
    lse : ndarray of float32, shape [B, S, num_heads]
        With ``return_lse``: logarithms of the softmax denominators.

    Raises
    ------
    KvkitError
        If an argument is wrong; then neither ``cache`` nor ``scale`` has changed.

    Notes
    -----
    PMX operator ``MultiHeadCacheAttention``; from ``softmax_scale`` on, beyond it.

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
    heads = Heads(num_heads, head_dim, num_kv_heads)
    call = CacheAttention(
        query, current_key, current_value, cache, scale, place=place, heads=heads, scoring=scoring,
        return_lse=return_lse,
    )  # fmt: skip
    return attend_static(start_pos, call, out)
