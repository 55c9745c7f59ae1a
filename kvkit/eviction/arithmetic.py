"""Compute what several scorers use: sums over queries, means over heads, pooling, protected tokens."""

import numpy as np

from kvkit.checks.values import integer
from kvkit.errors import TooFewTokensError, argument_error
from kvkit.eviction.inputs import Inputs, weight_blocks
from kvkit.typed import Array


def window_sums(inputs: Inputs, window: int, factors: Array | None = None) -> Array:
    """Return the sums over the last `window` queries of weights times `factors` [window], float64 [B, Hq, S].

    Weights that are sums over queries already are returned as they are.
    """
    if inputs.queries is None and inputs.weights.ndim == 3:
        return inputs.weights.astype(np.float64)
    batch, heads, tokens, _ = inputs.keys.shape
    group = inputs.query_heads // heads
    sums = np.zeros((batch, heads, group, tokens))
    for b, h, first, block in weight_blocks(inputs, window):  # [G, queries from `first` on, S]
        if factors is not None:
            block = block * factors[first : first + block.shape[1], None].astype(np.float32)
        sums[b, h] += block.sum(1, dtype=np.float64)
    return sums.reshape(batch, heads * group, tokens)


def mean_of_groups(states: Array, heads: int) -> Array:
    """Return the means over the query heads of each key head: [B, Hq, ...] to [B, Hkv, ...]."""
    batch, query_heads, *rest = states.shape
    return states.reshape(batch, heads, query_heads // heads, *rest).mean(2, dtype=np.float64)


def pooled(scores: Array, kernel: int, pool: str) -> Array:
    """Return the mean or maximum of each `kernel` neighbours; beyond the ends a mean counts zeros."""
    if kernel % 2 == 0:
        raise argument_error("kernel", "an odd number", kernel)
    half, tokens = kernel // 2, scores.shape[-1]
    widths = [(0, 0)] * (scores.ndim - 1) + [(half, half)]
    padded = np.pad(scores, widths, constant_values=0 if pool == "avg" else -np.inf)
    result = padded[..., :tokens].copy()
    for i in range(1, kernel):
        (np.add if pool == "avg" else np.maximum)(result, padded[..., i : i + tokens], out=result)
    return result / kernel if pool == "avg" else result


def protected(scores: Array, first: int = 0, last: int = 0) -> Array:
    """Add scores of protected tokens before and after others, above the batch row's largest by 1 or more.

    With first=1 and last=2, [1, 3] -> [4, 1, 3, 4, 4].
    """
    largest = scores.max((1, 2), keepdims=True)
    next_float = np.nextafter(largest.astype(np.float32), np.float32(np.inf))  # results become float32
    top = np.maximum(largest + 1, next_float)
    ends = [np.broadcast_to(top, (*scores.shape[:2], count)) for count in (first, last)]
    return np.concatenate((ends[0], scores, ends[1]), -1)


def z_scored(scores: Array) -> Array:
    """Return scores shifted and scaled to mean 0 and deviation 1 (divisor n - 1) in each row of the batch."""
    deviation = scores.std((1, 2), ddof=1, keepdims=True) if scores[0].size > 1 else np.zeros((1, 1, 1))
    return (scores - scores.mean((1, 2), keepdims=True)) / np.maximum(deviation, 1e-6)


def norms(states: Array) -> Array:
    """Return the Euclidean norms of keys or values, float64 [B, H, S]."""
    return np.sqrt(np.square(states).sum(-1, dtype=np.float64))


def checked_window(inputs: Inputs, window: int) -> int:
    """Check that a protected window has fewer tokens than there are; return its length."""
    window = integer("window", window, 1)
    if inputs.tokens <= window:
        smaller = f" (window={inputs.tokens // 2}, say)" if inputs.tokens > 1 else ""
        wanted = f"fewer than the {inputs.tokens} tokens{smaller}"
        raise argument_error("window", wanted, window, TooFewTokensError)
    return window
