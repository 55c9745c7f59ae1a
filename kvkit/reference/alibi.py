"""Define PMX's ALiBi: slopes of heads, and masks that add slope times distance. Everything is float32."""

import math
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from numpy import ndarray as Array

__all__ = ["alibi_mask", "alibi_slope", "dynamic_alibi_mask"]

f32 = np.float32


def slope(h: int, num_heads: int) -> float:
    """Return the slope of head h, exactly."""
    power = 2 ** math.floor(math.log2(num_heads))
    return 2.0 ** (-8 * (h + 1) / power if h < power else -4 * (2 * (h - power) + 1) / power)


def alibi_slope(*, num_heads: int) -> Array:
    """Return the slope of each head."""
    return np.array([slope(h, num_heads) for h in range(num_heads)], f32)


def pad16(count: int) -> int:
    """Round up to a multiple of 16."""
    return 16 * math.ceil(count / 16)


def as_bias(x: Any) -> np.float32:
    """Return a mask's element as a number to add."""
    if isinstance(x, np.bool_):
        return f32(0) if x else f32(-np.inf)
    return f32(x)


def alibi_bias(h: int, num_heads: int, i: int, j: int, n: int, m: int) -> np.float32:
    """Return the bias of key j of m for query i of n, which is at position m - n + i."""
    distance = j - (m - n + i)
    return f32(slope(h, num_heads)) * f32(distance) if distance <= 0 else f32(-np.inf)


def alibi_mask(
    seqlen_q: int, seqlen_kv: int, attn_mask: Any = None, *, num_heads: int, data_type: Any = "float32"
) -> Array:
    """Return a mask [num_heads, n, m padded to 16], after an axis for the batch if `attn_mask` has one."""
    n, m = seqlen_q, seqlen_kv
    four_axes = attn_mask is not None and attn_mask.ndim == 4
    batch = attn_mask.shape[0] if four_axes else 1
    result = np.full((batch, num_heads, n, pad16(m)), -np.inf, f32)
    if attn_mask is not None:
        attn_mask = np.broadcast_to(attn_mask, (batch, num_heads, n, attn_mask.shape[-1]))
    for b, h, i, j in np.ndindex(batch, num_heads, n, m):
        result[b, h, i, j] = alibi_bias(h, num_heads, i, j, n, m)
        if attn_mask is not None:
            result[b, h, i, j] += as_bias(attn_mask[b, h, i, j])
    return (result if four_axes else result[0]).astype(data_type)


def dynamic_alibi_mask(
    seqstarts: Array, kvstarts: Array, attn_mask: Any = None, *, num_heads: int, data_type: Any = "float32"
) -> Array:
    """Return the mask of packed sequences: biases in blocks on the diagonal, zeros elsewhere."""
    tokens, keys = seqstarts[-1], kvstarts[-1]
    result = np.zeros((num_heads, tokens, pad16(keys)), f32)
    for b in range(len(seqstarts) - 1):
        n, m = seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        for h, i, j in np.ndindex(num_heads, n, m):
            result[h, seqstarts[b] + i, kvstarts[b] + j] = alibi_bias(h, num_heads, i, j, n, m)
    if attn_mask is not None:
        attn_mask = np.broadcast_to(attn_mask, (num_heads, tokens, attn_mask.shape[-1]))
        for h, i, j in np.ndindex(num_heads, tokens, keys):
            result[h, i, j] += as_bias(attn_mask[h, i, j])
    return result.astype(data_type)
