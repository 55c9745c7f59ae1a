"""Score tokens by attention weights or their sums; rescale the scores of another scorer."""

import numpy as np

from kvkit.checks.values import finite_number, flag, integer
from kvkit.errors import TooFewTokensError, argument_error, describe
from kvkit.eviction.arithmetic import mean_of_groups, protected, window_sums
from kvkit.eviction.inputs import Inputs, finite_floats, scores_array
from kvkit.eviction.scorers import scorer
from kvkit.eviction.selection import best, kept_count
from kvkit.typed import Array


def sums_of_all(inputs: Inputs) -> tuple[Array, int]:
    """Return the sums of the weights over all queries, [B, Hkv, S], and the number of queries."""
    array = inputs.weights if inputs.queries is None else inputs.queries
    count = inputs.tokens if array.ndim == 3 else array.shape[2]
    return mean_of_groups(window_sums(inputs, count), inputs.heads), count


@scorer("weights or queries")
def observed(inputs: Inputs, *, normalised: bool = True) -> Array:
    """score = sum of weights / number of queries that see the key; without `normalised` the sum.

    Sums that are passed as `weights` count as sums over a whole prompt, where S - s queries see key s.
    """
    sums, count = sums_of_all(inputs)
    seen = np.minimum(np.arange(inputs.tokens, 0, -1), count)
    return sums / seen if flag("normalised", normalised) else sums


@scorer("weights or queries")
def h2o(inputs: Inputs, *, recent: int = 512) -> Array:
    """score = sum of the weights of a key so far; the last `recent` tokens stay (arXiv 2306.14048).

    `H2O` computes this token by token.
    """
    recent, (sums, _) = integer("recent", recent, 0), sums_of_all(inputs)
    if inputs.tokens <= recent:
        wanted = f"fewer than the {inputs.tokens} tokens"
        raise argument_error("recent", wanted, recent, TooFewTokensError)
    return protected(sums[..., : inputs.tokens - recent], last=recent)


@scorer("weights")
def kvzip(inputs: Inputs, *, sinks: int = 4) -> Array:
    """score = largest weight over the queries of a reconstruction pass; sinks stay (arXiv 2505.23416)."""
    sinks = integer("sinks", sinks, 0, inputs.tokens - 1)
    if inputs.weights.ndim != 4:
        raise argument_error("weights", "weights [B, Hq, W, S] of each query", describe(inputs.weights))
    batch, query_heads, count, tokens = inputs.weights.shape
    shape = batch, inputs.heads, query_heads // inputs.heads, count, tokens
    largest = inputs.weights.reshape(shape).max((2, 3))
    return protected(largest[..., sinks:], first=sinks) if sinks else largest


@scorer("values")
def critical(
    inputs: Inputs, *, scores: Array, output_weights: Array, keep: float, first: float = 0.5
) -> Array:
    """score = (s + 1e-4) * mean over the group of |v W|_1, where s are the `scores` of another scorer.

    arXiv 2502.03805.

    `output_weights` [Hq, D, width] is the output projection. The tokens of the int(keep * S * first) best s
    stay: they score infinity.
    """
    scores, weights = scores_array("scores", scores), finite_floats("output_weights", output_weights, 3)
    first, (batch, heads, tokens, dim) = finite_number("first", first), inputs.values.shape
    if scores.shape != (batch, heads, tokens):
        raise argument_error("scores", f"shape {(batch, heads, tokens)}", scores.shape)
    if not len(weights) or len(weights) % heads or weights.shape[1] != dim:
        wanted = f"shape (a multiple of {heads}, {dim}, width)"
        raise argument_error("output_weights", wanted, weights.shape)
    kept_count(tokens, keep, None)
    if not 0 <= first <= 1:
        raise argument_error("first", "a share from 0 to 1", first)
    group = len(weights) // heads
    sizes = np.zeros((batch, heads, tokens))
    for b, h in np.ndindex(batch, heads):
        for projection in weights[h * group : (h + 1) * group]:
            sizes[b, h] += np.abs(inputs.values[b, h] @ projection).sum(-1, dtype=np.float64) / group
    result = np.where(np.isposinf(scores), np.inf, (scores + 1e-4) * sizes)
    np.put_along_axis(result, best(scores, int(keep * tokens * first)), np.inf, -1)
    return result
