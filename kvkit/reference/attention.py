"""Define attention, alone and over a cache, by loops over sequences, queries and heads, in float64.

Operators return (attn_output, lse). `scoring` has softmax_scale, window, softcap, sinks and `kind`, the type
of the arithmetic: float64 for exact results, a narrower type to round as a plain implementation in it does.
"""

import math
from typing import Any

import numpy as np
from numpy import ndarray as Array

from kvkit.reference.alibi import slope
from kvkit.reference.cache import CACHE_ATTRIBUTES, dynamic_key_value_cache, key_value_cache

__all__ = [
    "dynamic_multi_head_attention",
    "dynamic_multi_head_cache_attention",
    "merge_attention_states",
    "multi_head_attention",
    "multi_head_cache_attention",
]

OutputAndLse = tuple[Array, Array]


def visible_keys(n: int, m: int, i: int, causal: bool, window: tuple[int, int]) -> Array:
    """Return which of m keys query i of n sees, bool [m]. The query is at position m - n + i."""
    keys, position = np.arange(m), m - n + i
    left, right = window
    seen = np.ones(m, bool)
    if causal:
        seen &= keys <= position
    if left >= 0:
        seen &= keys >= position - left
    if right >= 0:
        seen &= keys <= position + right
    return seen


def softmax(scores: Array, sink: Any) -> tuple[Array, float]:
    """Return (weights, log-sum-exp). A sink is one more score, whose weight is not returned."""
    m = scores.max(initial=-math.inf)
    if sink is not None and m == m and not sink <= m:  # NaN of either stays
        m = sink
    if m == -math.inf:
        return np.zeros_like(scores), -math.inf
    if sink == math.inf:  # the sink takes all weight
        return np.zeros_like(scores), math.inf
    p = np.exp(scores - m)
    total = p.sum() + (0 if sink is None else math.exp(float(sink) - float(m)))
    return p / total, float(m) + math.log(total)


def attend_sequence(
    query: Array, key: Array, value: Array, mask: Any = None, *, causal: bool = True, slopes: Any = None,
    softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    sinks: Any = None, kind: Any = np.float64,
) -> OutputAndLse:  # fmt: skip
    """Attend over one sequence: query [n, H, D], key [m, KVH, D], value [m, KVH, Dv], mask [H, n, m or more].

    ALiBi's `slopes` [H] multiply the distance to keys before and after the query.
    """
    work = np.float64 if kind == np.float64 else np.float32  # numbers of `kind` are computed in this type

    def rounded(x: Any) -> Array:
        return np.asarray(x, work) if kind == np.float64 else np.asarray(x, work).astype(kind).astype(work)

    (n, heads, dim), m = query.shape, key.shape[0]
    factor = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    output, lse = np.zeros((n, heads, value.shape[2]), work), np.zeros((n, heads), np.float64)
    keys, values = ([x[:, h].astype(work) for h in range(x.shape[1])] for x in (key, value))
    for i, h in np.ndindex(n, heads):
        seen, bias = visible_keys(n, m, i, causal, window), np.zeros(m, work)
        if mask is not None:
            row = mask[h, i, :m]
            if row.dtype == bool:
                seen = seen & row
            else:
                row = row.astype(work)
                seen, bias = seen & (row != -math.inf), row
        if slopes is not None:
            bias = bias - work(slopes[h]) * abs(np.arange(m) - (m - n + i)).astype(work)
        kv_head = h // (heads // key.shape[1])
        q, k, v = query[i, h].astype(work), keys[kv_head][seen], values[kv_head][seen]
        s = rounded(k @ q * work(factor))
        if softcap > 0:
            s = rounded(work(softcap) * np.tanh(s / work(softcap)))
        s = rounded(s + bias[seen])
        p, lse[i, h] = softmax(s, None if sinks is None else sinks[h].astype(work))
        output[i, h] = rounded(rounded(p) @ v)
    return output, lse


def slopes_of(heads: int, is_alibi: bool) -> list[float] | None:
    """Return ALiBi's slopes, or None without ALiBi."""
    return [slope(h, heads) for h in range(heads)] if is_alibi else None


def multi_head_attention(
    query: Array, key: Array, value: Array, attn_mask: Any = None, *, num_heads: int = 0,
    head_dim: int = 0, is_causal: bool = True, is_alibi: bool = False, num_kv_heads: int = 0, **scoring: Any,
) -> OutputAndLse:  # fmt: skip
    """Attend over sequences of equal lengths: query [B, n, H, D], key and value [B, m, KVH, D]."""
    batch, n, heads, _ = query.shape
    output, lse = np.zeros((*query.shape[:3], value.shape[3])), np.zeros(query.shape[:3])
    mask = None
    if attn_mask is not None and attn_mask.size:
        mask = np.broadcast_to(attn_mask, (batch, heads, n, attn_mask.shape[-1]))
    scoring |= {"causal": is_causal or is_alibi, "slopes": slopes_of(heads, is_alibi)}
    for b in range(batch):
        own = None if mask is None else mask[b]
        output[b], lse[b] = attend_sequence(query[b], key[b], value[b], own, **scoring)
    return output, lse


def dynamic_multi_head_attention(
    query: Array, key: Array, value: Array, seqstarts: Array, kvstarts: Array, decoding_batches: Any,
    max_seqlen: int | None, max_kvlen: int | None, attn_mask: Any = None, *, num_heads: int = 0,
    head_dim: int = 0, is_causal: bool = True, is_alibi: bool = False, num_kv_heads: int = 0, **scoring: Any,
) -> OutputAndLse:  # fmt: skip
    """Attend over packed sequences: query [tokens, H, D]. The first `decoding_batches` are not causal."""
    output, lse = np.zeros((*query.shape[:2], value.shape[2])), np.zeros(query.shape[:2])
    heads, mask = query.shape[1], None
    if attn_mask is not None and attn_mask.size:
        mask = np.broadcast_to(attn_mask, (heads, *attn_mask.shape[-2:]))
    for b in range(len(seqstarts) - 1):
        rows = slice(int(seqstarts[b]), int(seqstarts[b + 1]))
        columns = slice(int(kvstarts[b]), int(kvstarts[b + 1]))
        output[rows], lse[rows] = attend_sequence(
            query[rows],
            key[columns],
            value[columns],
            None if mask is None else mask[:, rows, columns],
            causal=(is_causal and b >= int(decoding_batches)) or is_alibi,
            slopes=slopes_of(heads, is_alibi),
            **scoring,
        )
    return output, lse


def split_attributes(attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (attributes of the cache, attributes of attention)."""
    cache = {name: value for name, value in attributes.items() if name in CACHE_ATTRIBUTES}
    return cache, {name: value for name, value in attributes.items() if name not in CACHE_ATTRIBUTES}


def multi_head_cache_attention(
    query: Array, current_key: Array, current_value: Array, start_pos: Any, cache: Array, scale: Any = None,
    attn_mask: Any = None, **attributes: Any,
) -> OutputAndLse:  # fmt: skip
    """Append to a static cache, then attend over it."""
    cached, attention = split_attributes(attributes)
    key, value = key_value_cache(current_key, current_value, start_pos, cache, scale, **cached)
    return multi_head_attention(query, key, value, attn_mask, **attention)


def dynamic_multi_head_cache_attention(
    query: Array, current_key: Array, current_value: Array, seqstarts: Array, kvstarts: Array,
    cachestarts: Array, start_pos: Array, decoding_batches: Any, max_seqlen: int | None,
    max_kvlen: int | None, cache: Array, scale: Any = None, attn_mask: Any = None, **attributes: Any,
) -> OutputAndLse:  # fmt: skip
    """Append packed sequences to a dynamic cache, then attend over it."""
    cached, attention = split_attributes(attributes)
    index = seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen
    key, value = dynamic_key_value_cache(current_key, current_value, *index, cache, scale, **cached)
    hints = decoding_batches, max_seqlen, max_kvlen
    return dynamic_multi_head_attention(
        query, key, value, seqstarts, kvstarts, *hints, attn_mask, **attention
    )


def merge_attention_states(outputs: Any, lses: Any) -> OutputAndLse:
    """Merge attention over parts of a context into attention over the whole context."""
    shape = outputs[0].shape
    output, lse = np.zeros(shape), np.zeros(shape[:-1])
    for at in np.ndindex(shape[:-1]):
        parts = [(float(s[at]), o[at].astype(np.float64)) for o, s in zip(outputs, lses, strict=True)]
        parts = [(s, o) for s, o in parts if s != -math.inf]  # a part without keys has no weight
        weights, lse[at] = softmax(np.array([s for s, _ in parts]), None)
        for weight, (_, o) in zip(weights, parts, strict=True):
            output[at] += weight * o
    return output, lse
