"""Oracle of the attention operators: loops over sequences, heads and queries, legal inputs only, in float64.

Operators take what the package takes and return (attn_output, lse). `kind` is the type of the arithmetic:
float64 for the truth, a narrower one for what plain code in that type would give.
"""

import math

import numpy as np
import reference


def alibi_slopes(num_heads):
    powers = 1
    while powers * 2 <= num_heads:
        powers *= 2
    slopes = []
    for h in range(num_heads):
        exponent = -8 * (h + 1) / powers if h < powers else -4 * (2 * (h - powers) + 1) / powers
        slopes.append(2.0**exponent)
    return slopes


def visible(n, m, i, causal, window):
    """Which of m keys query i of n may see, but for the mask."""
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


def softmax(scores, sink):
    """Weights of the scores and the log of the sum; a sink is one more score, whose weight is dropped."""
    everything = list(scores) if sink is None else [*scores, sink]
    top = max(everything, default=-math.inf)
    if top == -math.inf:
        return np.zeros_like(scores), -math.inf
    total = np.exp(scores - top).sum() + (0 if sink is None else math.exp(float(sink) - float(top)))
    return np.exp(scores - top) / total, float(top) + math.log(total)


def attend(
    query,
    key,
    value,
    mask,
    *,
    head_dim,
    causal,
    is_alibi,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    slopes=None,
    kind=np.float64,
):
    """One sequence: query [n, H, Dh], key [m, KVH, Dh], value [m, KVH, Dv], mask [H, n, >= m] or None.

    ALiBi's `slopes` [H], if given, are of distances to either side.
    """
    work = np.float64 if kind == np.float64 else np.float32

    def rounded(x):
        return np.asarray(x, work) if kind == np.float64 else np.asarray(x, work).astype(kind).astype(work)

    (n, heads), m = query.shape[:2], key.shape[0]
    factor = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    alibi = alibi_slopes(heads) if is_alibi else slopes
    output, lse = np.zeros((n, heads, value.shape[2]), work), np.zeros((n, heads), np.float64)
    for i in range(n):
        unmasked = visible(n, m, i, causal or is_alibi, window)
        for h in range(heads):
            seen, bias = unmasked, np.zeros(m, work)
            if mask is not None:
                row = mask[h, i, :m]
                if row.dtype == bool:
                    seen = seen & row
                else:
                    row = row.astype(work)
                    seen, bias = seen & (row != -math.inf), row
            if alibi is not None:
                bias = bias - work(alibi[h]) * abs(np.arange(m) - (m - n + i)).astype(work)
            g = h // (heads // key.shape[1])
            k, v, q = key[seen, g].astype(work), value[seen, g].astype(work), query[i, h].astype(work)
            scores = rounded(k @ q * work(factor))
            if softcap > 0:
                scores = rounded(work(softcap) * np.tanh(scores / work(softcap)))
            scores = rounded(scores + bias[seen])
            weights, lse[i, h] = softmax(scores, None if sinks is None else sinks[h].astype(work))
            output[i, h] = rounded(rounded(weights) @ v)
    return output, lse


def multi_head_attention(
    query,
    key,
    value,
    attn_mask=None,
    *,
    num_heads,
    head_dim,
    is_causal=True,
    is_alibi=False,
    num_kv_heads=0,
    kind=np.float64,
    **beyond,
):
    """Static MultiHeadAttention."""
    batch, n, heads, _ = query.shape
    m = key.shape[1]
    output, lse = np.zeros((*query.shape[:3], value.shape[3])), np.zeros(query.shape[:3])
    mask = None
    if attn_mask is not None and attn_mask.size:
        mask = np.broadcast_to(attn_mask, (batch, heads, n, attn_mask.shape[-1]))
    for b in range(batch):
        output[b], lse[b] = attend(
            query[b],
            key[b, :m],
            value[b, :m],
            None if mask is None else mask[b],
            head_dim=head_dim,
            causal=is_causal,
            is_alibi=is_alibi,
            kind=kind,
            **beyond,
        )
    return output, lse


def dynamic_multi_head_attention(
    query,
    key,
    value,
    seqstarts,
    kvstarts,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    attn_mask=None,
    *,
    num_heads,
    head_dim,
    is_causal=True,
    is_alibi=False,
    num_kv_heads=0,
    kind=np.float64,
    **beyond,
):
    """Dynamic MultiHeadAttention."""
    output, lse = np.zeros((*query.shape[:2], value.shape[2])), np.zeros(query.shape[:2])
    mask = None
    if attn_mask is not None and attn_mask.size:
        mask = np.broadcast_to(attn_mask, (query.shape[1], *attn_mask.shape[-2:]))
    for b in range(len(seqstarts) - 1):
        rows = slice(int(seqstarts[b]), int(seqstarts[b + 1]))
        columns = slice(int(kvstarts[b]), int(kvstarts[b + 1]))
        output[rows], lse[rows] = attend(
            query[rows],
            key[columns],
            value[columns],
            None if mask is None else mask[:, rows, columns],
            head_dim=head_dim,
            causal=is_causal and b >= int(decoding_batches),
            is_alibi=is_alibi,
            kind=kind,
            **beyond,
        )
    return output, lse


CACHE = ("num_layer", "layer_idx", "quant_bit", "quant_group", "cache_layout", "cache_mode", "page_size")


def split(attrs):
    """The attributes of the cache, and those of attention."""
    cache = {name: value for name, value in attrs.items() if name in CACHE}
    return cache, {name: value for name, value in attrs.items() if name not in CACHE}


def multi_head_cache_attention(
    query, current_key, current_value, start_pos, cache, scale=None, attn_mask=None, **attrs
):
    """Static MultiHeadCacheAttention; cache and scale change in place."""
    cached, attention = split(attrs)
    key, value = reference.key_value_cache(current_key, current_value, start_pos, cache, scale, **cached)
    return multi_head_attention(query, key, value, attn_mask, **attention)


def dynamic_multi_head_cache_attention(
    query,
    current_key,
    current_value,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    cache,
    scale=None,
    attn_mask=None,
    **attrs,
):
    """Dynamic MultiHeadCacheAttention; cache and scale change in place."""
    cached, attention = split(attrs)
    steps = seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen
    key, value = reference.dynamic_key_value_cache(current_key, current_value, *steps, cache, scale, **cached)
    hints = decoding_batches, max_seqlen, max_kvlen
    return dynamic_multi_head_attention(
        query, key, value, seqstarts, kvstarts, *hints, attn_mask, **attention
    )


def merge(outputs, lses):
    """Attention over parts of a context -> (attn_output, lse) over all of it."""
    shape = outputs[0].shape
    output, lse = np.zeros(shape), np.zeros(shape[:-1])
    for at in np.ndindex(shape[:-1]):
        parts = [(float(s[at]), o[at].astype(np.float64)) for o, s in zip(outputs, lses, strict=True)]
        parts = [part for part in parts if part[0] != -math.inf]
        weights, lse[at] = softmax(np.array([s for s, _ in parts]), None)
        for weight, (_, part) in zip(weights, parts, strict=True):
            output[at] += weight * part
    return output, lse
