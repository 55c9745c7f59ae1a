"""Oracle of attention over pools of pages: contexts gathered token by token, then one sequence at a time."""

import attention_reference
import numpy as np


def paged_attention(query, keys, values, pages, lengths, starts, mask=None, *, key_scale, value_scale, **how):
    """(attn_output, lse) in float64; pools are views [pages, tokens, heads, elements], `pages` a list each.

    Scales are float64 [B, heads of a pool], slopes [B, query heads] or None.
    """
    rows, slopes = keys.shape[1], how.pop("alibi_slopes", None)
    output = np.zeros((*query.shape[:2], values.shape[3]))
    lse = np.full(query.shape[:2], -np.inf)
    for b, length in enumerate(lengths):
        tokens = slice(starts[b], starts[b + 1])
        key, value = (
            np.array([pool[pages[b][j // rows], j % rows] for j in range(length)], np.float64).reshape(
                length, *pool.shape[2:]
            )
            * scale[b, :, None]
            for pool, scale in ((keys, key_scale), (values, value_scale))
        )
        own = None if mask is None else np.broadcast_to(mask, (query.shape[1], *mask.shape[-2:]))[:, tokens]
        output[tokens], lse[tokens] = attention_reference.attend(
            query[tokens],
            key,
            value,
            own,
            head_dim=query.shape[2],
            is_alibi=False,
            slopes=None if slopes is None else slopes[b],
            **how,
        )
    return output, lse


def paged_append(tokens, pool, slots):
    """Tokens [tokens, heads, elements] into a view [pages, rows, heads, elements]."""
    rows = pool.shape[1]
    for token, slot in zip(tokens, slots, strict=True):
        if slot >= 0:
            pool[slot // rows, slot % rows] = token
