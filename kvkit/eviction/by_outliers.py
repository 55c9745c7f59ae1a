"""Compactor: keep keys that other keys cannot replace, and keys that a chunk's queries attend to.

arXiv 2507.08143. Both parts are z-scored over all heads of a row of the batch.
"""

from typing import Any

import numpy as np

from kvkit.checks.index_tensors import index
from kvkit.checks.values import finite_number, integer
from kvkit.eviction.arithmetic import mean_of_groups, norms, pooled, protected, z_scored
from kvkit.eviction.by_statistics import checked_rope
from kvkit.eviction.inputs import Inputs, softmax_in_place
from kvkit.eviction.scorers import scorer
from kvkit.rope import NO_ROTATION, Rope
from kvkit.typed import Array


@scorer()
def leverage(
    inputs: Inputs, *, rope: Rope | str | None = None, positions: Any = None, jitter: float = 0.01
) -> Array:
    """score = z-score of max(0, x (X'X + jitter I)^-1 x), x = k - mean, keys before rotation.

    With `rope`, stored keys are first rotated back from their `positions`, by default 0, 1, 2, ...
    """
    keys, positions = inputs.keys, np.arange(inputs.tokens) if positions is None else positions
    positions = index("positions", positions, 1, inputs.tokens)
    if rope is not None and rope != NO_ROTATION:
        rope = checked_rope(rope, keys.shape[3])
        keys = rope.shift(keys, -positions) / np.float32(rope.attention_factor)
    return z_scored(raw_leverage(keys, finite_number("jitter", jitter)))


def raw_leverage(keys: Array, jitter: float) -> Array:
    """Return the leverage of keys before the z-score; without jitter its sum is the rank of a head's keys."""
    result = np.empty(keys.shape[:3])
    for b, h in np.ndindex(keys.shape[:2]):
        x = keys[b, h] - keys[b, h].mean(0, dtype=np.float64)
        gram = x.T @ x + jitter * np.eye(x.shape[1])
        result[b, h] = np.maximum(np.einsum("sd,ds->s", x, np.linalg.solve(gram, x.T)), 0)
    return result


@scorer("queries", "values")
def non_causal(inputs: Inputs, *, chunk: int = 256) -> Array:
    """score = z-score of the mean over 3 neighbours of |v| * (sum over a chunk's queries of softmax(q k)).

    The softmax is over the chunk's keys, without scale and without the causal rule.
    """
    chunk, tokens = integer("chunk", chunk, 1), inputs.tokens
    queries = inputs.last_queries(tokens)
    sums = np.empty((*queries.shape[:3], tokens))
    for head in np.ndindex(queries.shape[:3]):
        for begin in range(0, tokens, chunk):
            part = slice(begin, begin + chunk)
            weights = softmax_in_place(queries[head][part] @ inputs.keys[head[:2]][part].T)
            sums[head][part] = weights.sum(0, dtype=np.float64)
    means = mean_of_groups(sums.reshape(len(sums), -1, tokens), inputs.heads)
    return z_scored(pooled(means * norms(inputs.values), 3, "avg"))


@scorer("queries", "values")
def compactor(
    inputs: Inputs, *, blend: float, rope: Rope | str | None = None, positions: Any = None, chunk: int = 256,
    first: int = 8, last: int = 4,
) -> Array:  # fmt: skip
    """score = blend * leverage + non_causal; the first 8 and the last 4 tokens stay.

    The paper sets `blend` to the share of tokens that are evicted.
    """
    outliers = leverage(inputs, rope=rope, positions=positions)
    blended = finite_number("blend", blend) * outliers + non_causal(inputs, chunk=chunk)
    first, last = integer("first", first, 0), integer("last", last, 0)
    inner = blended[..., first : inputs.tokens - last]
    return protected(inner, first, last) if inner.shape[-1] else np.ones_like(blended)
