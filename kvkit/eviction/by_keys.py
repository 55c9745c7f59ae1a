"""Score tokens by their keys, and some scorers by values too, without queries."""

from typing import Any

import numpy as np

from kvkit.checks.values import flag, integer, text
from kvkit.errors import argument_error
from kvkit.eviction.arithmetic import norms
from kvkit.eviction.inputs import Inputs, finite_floats, softmax_in_place
from kvkit.eviction.scorers import scorer
from kvkit.typed import Array


@scorer()
def knorm(inputs: Inputs) -> Array:
    """score = -|k| (arXiv 2406.11430)."""
    return -norms(inputs.keys)


@scorer()
def keydiff(inputs: Inputs) -> Array:
    """score = -cos(k, mean of k / |k|) (arXiv 2504.15364)."""
    lengths = norms(inputs.keys)
    units = inputs.keys / np.maximum(lengths, 1e-12)[..., None].astype(np.float32)
    anchor = units.mean(2, keepdims=True, dtype=np.float64).astype(np.float32)  # [B, Hkv, 1, D]
    products = np.einsum("bhsd,bhd->bhs", inputs.keys, anchor[:, :, 0])
    return -products / np.maximum(lengths * norms(anchor), 1e-8)


@scorer()
def qfilter(inputs: Inputs, *, filters: Array) -> Array:
    """score = -<f, k> with a filter f of each key head, `filters` [Hkv, D] (arXiv 2503.02812)."""
    filters = finite_floats("filters", filters, 2)
    wanted = inputs.heads, inputs.keys.shape[3]
    if filters.shape != wanted:
        raise argument_error("filters", f"shape {wanted}", filters.shape)
    return -(inputs.keys @ filters[:, :, None])[..., 0]


@scorer("values")
def lagkv(inputs: Inputs, *, sinks: int = 4, lag: int = 128, cross: bool = False) -> Array:
    """Score a token by how its channels spread in the range of the next chunk (arXiv 2504.04704).

    z = (x - min') / (max' - min') with the next chunk's min' and max' of each channel; t = softmax over the
    chunk of the deviation of z over channels; score = (t of keys + t of values) / 2. Unless `cross`, the
    score is its rank in the chunk / lag.
    """
    sinks, lag, cross = integer("sinks", sinks, 0), integer("lag", lag, 1), flag("cross", cross)
    batch, heads, tokens, _ = inputs.keys.shape
    result = np.ones((batch, heads, tokens))  # the sinks, the last whole chunk and the rest after it keep 1
    if tokens < sinks + 2 * lag:  # no chunk has a next one: newer tokens score higher
        result[..., sinks:] = np.arange(max(tokens - sinks, 0)) / max(tokens - sinks, 1)
        return result
    end = sinks + (tokens - sinks) // lag * lag
    keys, values = (lag_weights(side[:, :, sinks:end], lag) for side in inputs[:2])
    means = (keys + values) / 2
    if not cross:
        means = np.argsort(np.argsort(means, -1, kind="stable"), -1, kind="stable") / lag  # ranks
    result[..., sinks : end - lag] = means.reshape(batch, heads, -1)
    return result


def lag_weights(states: Array, lag: int) -> Array:
    """Return t of `lagkv` for all chunks except the last, [B, Hkv, chunks - 1, lag]."""
    chunks = states.reshape(*states.shape[:2], -1, lag, states.shape[3])
    own, following = chunks[:, :, :-1], chunks[:, :, 1:]
    low, high = following.min(3, keepdims=True), following.max(3, keepdims=True)  # min', max'
    z = (own - low) / np.where(high > low, high - low, np.float32(np.inf))  # 0 where a range is empty
    z -= z.mean(-1, dtype=np.float64, keepdims=True).astype(np.float32)
    squares = np.square(z, out=z).sum(-1, dtype=np.float64)
    return softmax_in_place(np.sqrt(squares / max(z.shape[-1] - 1, 1)).astype(np.float32))


@scorer("values")
def cur(inputs: Inputs, *, sinks: int = 4, window: int = 16, leverage: str = "kv_product") -> Array:
    """score = |k|^2 |v|^2, each divided by its sum over a block of `window` tokens (arXiv 2509.15038).

    `leverage` is "kv_product", "kv_avg", "key" or "value". Scores are divided by their sum; sinks score 1.
    """
    sinks, window = integer("sinks", sinks, 0), integer("window", window, 1)
    text("leverage", leverage, ("kv_product", "kv_avg", "key", "value"))
    keys, values = (shares(np.square(side).sum(-1, dtype=np.float64), window) for side in inputs[:2])
    result: Any = {"key": keys, "value": values, "kv_avg": (keys + values) / 2}.get(leverage, keys * values)
    total = result.sum(-1, keepdims=True)
    result = np.divide(result, total, out=np.zeros_like(result), where=total > 0)
    result[..., :sinks] = 1
    return result


def shares(sizes: Array, window: int) -> Array:
    """Return numbers [.., S] divided by their sums in blocks of `window`, 0 where a sum is 0."""
    starts = np.arange(0, sizes.shape[-1], window)
    sums = np.add.reduceat(sizes, starts, axis=-1)
    sums = np.repeat(sums, window, axis=-1)[..., : sizes.shape[-1]]
    return np.divide(sizes, sums, out=np.zeros_like(sizes), where=sums > 0)
