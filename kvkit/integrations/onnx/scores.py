"""Compute the fourth output of ONNX `Attention`, the matrix of scores, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvkit.checks.values import choice
from kvkit.typed import Array


@dataclass(frozen=True)
class Visibility:
    """Says which keys queries see. `valid` and `offset` have one entry for all sequences, or one for each."""

    valid: np.ndarray  # how many first keys are valid
    offset: np.ndarray  # the position of the first query
    left: int  # how many keys a query sees before its position; -1 for no limit
    right: int  # and after its position
    mask: np.ndarray | None  # [B or 1, H or 1, rows or 1, keys]


def score_matrix(
    query: Array, key: Array, visibility: Visibility, scale: float, softcap: float, mode: int
) -> Array:
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
        bias = score_bias(rows, context, visibility)
        result = np.where(np.isneginf(bias), bias, result + bias)
    if mode == 3:
        m = result.max(axis=-1, keepdims=True, initial=np.finfo(np.float32).min)
        weights = np.exp(result - m)
        l = np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
        result = weights / l
    with np.errstate(over="ignore"):
        return result.astype(query.dtype)


def score_bias(rows: int, context: int, visibility: Visibility) -> Array:
    """Return the bias of scores, [B or 1, H or 1, rows, context]: the mask, and -inf for hidden keys."""
    key = np.arange(context)
    position = visibility.offset[:, None, None, None] + np.arange(rows)[:, None]
    visible = key < visibility.valid[:, None, None, None]
    if visibility.left >= 0:
        visible = visible & (key >= position - visibility.left)
    if visibility.right >= 0:
        visible = visible & (key <= position + visibility.right)
    if visibility.mask is None:
        return np.where(visible, np.float32(0), np.float32(-np.inf))
    mask = visibility.mask
    if mask.dtype == bool:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    bias = np.full((*mask.shape[:3], context), -np.inf, np.float32)  # keys after the last column are hidden
    bias[..., : mask.shape[3]] = mask
    return np.where(visible, bias, np.float32(-np.inf))
