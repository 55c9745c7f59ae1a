"""The matrix of scores that ONNX `Attention` may give as its fourth output, in float32."""

import numpy as np

from kvkit.checks.values import choice


def scores(query, key, sight, scale, softcap, mode):
    """`mode` 0: scaled products, 1: after softcap, 2: plus bias, 3: probabilities. In query's dtype."""
    choice("qk_matmul_output_mode", mode, (0, 1, 2, 3))
    batch, rows, heads, dim = query.shape
    context, kv_heads = key.shape[1:3]
    grouped = query.astype(np.float32).reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    products = grouped.transpose(0, 2, 3, 1, 4) @ key.astype(np.float32).transpose(0, 2, 3, 1)[:, :, None]
    result = products.reshape(batch, heads, rows, context) * np.float32(scale)
    if mode >= 1 and softcap:
        result = np.float32(softcap) * np.tanh(result / np.float32(softcap))
    if mode >= 2:
        added = bias(rows, context, sight)
        result = np.where(np.isneginf(added), added, result + added)
    if mode == 3:
        top = result.max(axis=-1, keepdims=True, initial=np.finfo(np.float32).min)
        weights = np.exp(result - top)
        result = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        return result.astype(query.dtype)


def bias(rows, context, sight):
    """What is added to scores, [B or 1, H or 1, rows, context]: the mask, and -inf where a key is hidden."""
    key = np.arange(context)
    position = sight.offset[:, None, None, None] + np.arange(rows)[:, None]
    seen = key < sight.valid[:, None, None, None]
    if sight.left >= 0:
        seen = seen & (key >= position - sight.left)
    if sight.right >= 0:
        seen = seen & (key <= position + sight.right)
    if sight.mask is None:
        return np.where(seen, np.float32(0), np.float32(-np.inf))
    mask = sight.mask
    if mask.dtype == bool:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    added = np.full((*mask.shape[:3], context), -np.inf, np.float32)
    added[..., : mask.shape[3]] = mask
    return np.where(seen, added, np.float32(-np.inf))
