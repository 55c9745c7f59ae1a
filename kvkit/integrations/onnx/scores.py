"""Compute the fourth output of ONNX `Attention`, the matrix of scores, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit.checks.values import choice
from kvkit.typed import Array


def score_matrix(query: Array, key: Array, visibility: Any, scale: float, softcap: float, mode: int) -> Array:
    """Return scores [B, H, rows, context] in the dtype of query.

    With `mode` 0 they are scaled products; 1: after softcap; 2: with bias and mask; 3: probabilities.
    """
    choice("qk_matmul_output_mode", mode, (0, 1, 2, 3))
    batch, rows, heads, dim = query.shape
    context, kv_heads = key.shape[1:3]
    grouped = query.astype(np.float32).reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    products = grouped.transpose(0, 2, 3, 1, 4) @ key.astype(np.float32).transpose(0, 2, 3, 1)[:, :, None]
    result = products.reshape(batch, heads, rows, context) * np.float32(scale)
    if mode >= 1 and softcap:
        result = np.float32(softcap) * np.tanh(result / np.float32(softcap))
    if mode >= 2:
        added = score_bias(rows, context, visibility)
        result = np.where(np.isneginf(added), added, result + added)
    if mode == 3:
        top = result.max(axis=-1, keepdims=True, initial=np.finfo(np.float32).min)
        weights = np.exp(result - top)
        result = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        return result.astype(query.dtype)


def score_bias(rows: int, context: int, visibility: Any) -> Array:
    """Return the bias of scores, [B or 1, H or 1, rows, context]: the mask, and -inf for hidden keys."""
    key = np.arange(context)
    position = visibility.offset[:, None, None, None] + np.arange(rows)[:, None]
    seen = key < visibility.valid[:, None, None, None]
    if visibility.left >= 0:
        seen = seen & (key >= position - visibility.left)
    if visibility.right >= 0:
        seen = seen & (key <= position + visibility.right)
    if visibility.mask is None:
        return np.where(seen, np.float32(0), np.float32(-np.inf))
    mask = visibility.mask
    if mask.dtype == bool:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    added = np.full((*mask.shape[:3], context), -np.inf, np.float32)
    added[..., : mask.shape[3]] = mask
    return np.where(seen, added, np.float32(-np.inf))
