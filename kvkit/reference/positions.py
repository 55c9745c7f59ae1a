"""Define PMX's position indices and rotary embedding.

Numbers are float64. Only angles are computed in `kind`: float32, as PMX specifies, or float64 for exact
results.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy import ndarray as Array

__all__ = ["dynamic_position_index", "dynamic_rotary_position_embedding", "rotary_position_embedding"]


def dynamic_position_index(
    sequences: Array, seqstarts: Array, start_pos: Array, max_seqlen: Any = None
) -> Array:
    """Return the position of each packed token."""
    counts = np.diff(seqstarts)
    return np.array([p + i for p, n in zip(start_pos, counts, strict=True) for i in range(n)], np.int64)


def rotate_token(
    x: Array, t: int, end: int, *, rotary_dim: int = 0, interleaved: bool = True, cos: Any = None,
    sin: Any = None, theta: float = 1e4, max_position_embeddings: int = 2048, scaling_type: str = "",
    scaling_factor: float = 1.0, kind: Any = np.float32,
) -> Array:  # fmt: skip
    """Rotate the heads x [heads, D] of the token at position t of a sequence that ends before `end`."""
    dims, longest, factor = rotary_dim or x.shape[-1], max_position_embeddings, scaling_factor
    if scaling_type == "dynamic" and end > longest and dims > 2:
        theta = theta * (factor * end / longest - (factor - 1)) ** (dims / (dims - 2))
    position = kind(t) / kind(factor) if scaling_type == "linear" else kind(t)
    out = x.astype(np.float64)
    for h, i in np.ndindex(x.shape[0], dims // 2):
        if cos is None or sin is None:
            angle = float(position * kind(theta ** (-2 * i / dims)))
            cosine, sine = math.cos(angle), math.sin(angle)
        else:
            cosine, sine = float(cos[t, i]), float(sin[t, i])
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, dims // 2 + i)  # the elements of pair i
        out[h, a] = float(x[h, a]) * cosine - float(x[h, b]) * sine
        out[h, b] = float(x[h, b]) * cosine + float(x[h, a]) * sine
    return out


def rotate_tokens(array: Array, tokens: Iterable[tuple[Any, int, int]], **attributes: Any) -> Array:
    """Rotate tokens, each given as (index, position, end of its sequence)."""
    out = array.astype(np.float64)
    for index, t, end in tokens:
        out[index] = rotate_token(array[index], t, end, **attributes)
    return out


def rotary_position_embedding(
    query: Array, key: Array, start_pos: int, pad_len: Any = None, *, bypass_key: bool = False,
    **attributes: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Rotate the queries and keys of sequences of equal lengths."""
    batch, length = query.shape[:2]
    pads = [0] * batch if pad_len is None else [int(pad) for pad in pad_len]
    tokens = [
        ((b, s), start_pos + s - pads[b], start_pos + length - pads[b])
        for b, s in np.ndindex(batch, length)
    ]  # fmt: skip
    key_tokens = [] if bypass_key else tokens
    return rotate_tokens(query, tokens, **attributes), rotate_tokens(key, key_tokens, **attributes)


def dynamic_rotary_position_embedding(
    query: Array, key: Array, seqstarts: Array, start_pos: Array, max_seqlen: Any, *,
    bypass_key: bool = False, **attributes: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Rotate the queries and keys of packed sequences."""
    tokens: list[tuple[Any, int, int]] = []
    for b, first in enumerate(map(int, start_pos)):
        n = int(seqstarts[b + 1] - seqstarts[b])
        tokens += [((int(seqstarts[b]) + i,), first + i, first + n) for i in range(n)]
    key_tokens = [] if bypass_key else tokens
    return rotate_tokens(query, tokens, **attributes), rotate_tokens(key, key_tokens, **attributes)
