"""Define operators over pools of pages, as inference engines keep them."""

from typing import Any

import numpy as np
from numpy import ndarray as Array

from kvkit.reference.attention import attend_sequence
from kvkit.reference.positions import rotate_token

__all__ = ["paged_append", "paged_attention", "swap_blocks"]


def tokens_before_heads(pool: Any, layout: str) -> Any:
    """Return a view [pages, tokens, heads, elements] of a pool whose layout is "b n h c" or "b h n c"."""
    return pool if pool is None or layout == "b n h c" else pool.swapaxes(1, 2)


def attend_pages(
    query: Array, keys: Array, values: Array, pages: Any, lengths: Any, starts: Any, mask: Any = None, *,
    key_scale: Array, value_scale: Array, alibi_slopes: Any = None, **scoring: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Attend over the pages of each sequence; return (attn_output, lse).

    `keys` and `values` are [pages, tokens, heads, elements], `pages[b]` the pages of sequence b. Scales are
    [B, key heads], slopes [B, query heads] or None.
    """
    rows = keys.shape[1]
    output = np.zeros((*query.shape[:2], values.shape[3]))
    lse = np.full(query.shape[:2], -np.inf)
    for b, length in enumerate(lengths):
        tokens = slice(starts[b], starts[b + 1])
        context = []
        for pool, scale in ((keys, key_scale), (values, value_scale)):
            found = [pool[pages[b][j // rows], j % rows] for j in range(length)]
            context.append(np.array(found, np.float64).reshape(length, *pool.shape[2:]) * scale[b, :, None])
        key, value = context
        own = None if mask is None else np.broadcast_to(mask, (query.shape[1], *mask.shape[-2:]))[:, tokens]
        slopes = None if alibi_slopes is None else alibi_slopes[b]
        output[tokens], lse[tokens] = attend_sequence(
            query[tokens], key, value, own, slopes=slopes, **scoring
        )
    return output, lse


def paged_attention(
    query: Array, key_cache: Array, value_cache: Array, block_tables: Any, context_lens: Any,
    query_starts: Any = None, attn_mask: Any = None, *, layout: str = "b n h c", key_scale: Any = 1.0,
    value_scale: Any = 1.0, is_causal: bool = True, alibi_slopes: Any = None, **scoring: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Attend over pages. The last query of a sequence is at the position of its last key."""
    batch = len(context_lens)
    keys, values = tokens_before_heads(key_cache, layout), tokens_before_heads(value_cache, layout)
    starts = np.arange(batch + 1) if query_starts is None else query_starts

    def of_sequences(x: Any, heads: int) -> Array:
        return np.broadcast_to(np.asarray(x, np.float64), (batch, heads))

    return attend_pages(
        query,
        keys,
        values,
        block_tables,
        context_lens,
        starts,
        attn_mask,
        key_scale=of_sequences(key_scale, keys.shape[2]),
        value_scale=of_sequences(value_scale, values.shape[2]),
        alibi_slopes=None if alibi_slopes is None else of_sequences(alibi_slopes, query.shape[1]),
        causal=is_causal,
        **scoring,
    )


def store_in_pages(tokens: Array, pool: Array, slots: Any) -> None:
    """Write tokens [tokens, heads, elements] into a view [pages, rows, heads, elements]."""
    rows = pool.shape[1]
    for token, slot in zip(tokens, slots, strict=True):
        if slot >= 0:
            pool[slot // rows, slot % rows] = token


def paged_append(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *, layout: str = "b n h c",
    positions: Any = None, rope: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Write tokens into their slots, except tokens with a negative slot; return the caches.

    `rope` has keywords of `rotate_token`, and perhaps `begin`, the first element of a head that rotates.
    """
    if rope is not None:
        how, key = {"interleaved": False, **rope}, key.astype(np.float64)
        begin = how.pop("begin", 0)
        for token, position in enumerate(positions):
            key[token, :, begin:] = rotate_token(key[token, :, begin:], position, end=position, **how)
    for tokens, pool in ((key, key_cache), (value, value_cache)):
        if tokens is not None:
            store_in_pages(tokens, tokens_before_heads(pool, layout), slot_mapping)
    return key_cache, value_cache


def swap_blocks(source: Array, target: Array, pairs: Any) -> Array:
    """Copy block s of the source to block d of the target for each pair (s, d); return the target."""
    for s, d in pairs:
        target[d] = source[s]
    return target
