"""Scorers that read attention weights or their sums, and one that rescales other scores."""

import numpy as np

from kvkit.checks.values import finite_number, flag, integer
from kvkit.errors import TooFewTokensError, argument_error, describe
from kvkit.eviction.inputs import Inputs, finite_floats, scores_array
from kvkit.eviction.parts import mean_of_groups, protected, window_sums
from kvkit.eviction.scorers import scorer
from kvkit.eviction.selection import best, kept_count
from kvkit.typed import Array


def sums_of_all(given: Inputs) -> tuple[Array, int]:
    """Return the weights summed over all queries [B, Hkv, S], and how many queries there are."""
    array = given.weights if given.queries is None else given.queries
    count = given.tokens if array.ndim == 3 else array.shape[2]
    return mean_of_groups(window_sums(given, count), given.heads), count


@scorer("weights or queries")
def observed(given: Inputs, *, normalised: bool = True) -> Array:
    """score = sum of weights / number of queries that see the key; without `normalised` the sum.

    Sums over queries count as those of a whole prompt, where S - s queries see key s.
    """
    sums, count = sums_of_all(given)
    seen = np.minimum(np.arange(given.tokens, 0, -1), count)
    return sums / seen if flag("normalised", normalised) else sums


@scorer("weights or queries")
def h2o(given: Inputs, *, recent: int = 512) -> Array:
    """score = sum of the weights of a key so far; the last `recent` stay (arXiv 2306.14048).

    `H2O` does the same token by token.
    """
    recent, (sums, _) = integer("recent", recent, 0), sums_of_all(given)
    if given.tokens <= recent:
        wanted = f"fewer than the {given.tokens} tokens"
        raise argument_error("recent", wanted, recent, TooFewTokensError)
    return protected(sums[..., : given.tokens - recent], last=recent)


@scorer("weights")
def kvzip(given: Inputs, *, sinks: int = 4) -> Array:
    """score = largest weight over the queries of a reconstruction pass; sinks stay (arXiv 2505.23416)."""
    sinks = integer("sinks", sinks, 0, given.tokens - 1)
    if given.weights.ndim != 4:
        raise argument_error("weights", "weights [B, Hq, W, S] of each query", describe(given.weights))
    batch, query_heads, count, tokens = given.weights.shape
    shape = batch, given.heads, query_heads // given.heads, count, tokens
    largest = given.weights.reshape(shape).max((2, 3))
    return protected(largest[..., sinks:], first=sinks) if sinks else largest


@scorer("values")
def critical(
    given: Inputs, *, scores: Array, output_weights: Array, keep: float, first: float = 0.5
) -> Array:
    """score = (s + 1e-4) * mean over the group of |v W|_1, for given scores s (arXiv 2502.03805).

    `output_weights` [Hq, D, width] is the output projection. The int(keep * S * first) best of the given
    scores stay: they score infinity.
    """
    scores, weights = scores_array("scores", scores), finite_floats("output_weights", output_weights, 3)
    first, (batch, heads, tokens, dim) = finite_number("first", first), given.values.shape
    if scores.shape != (batch, heads, tokens):
        raise argument_error("scores", f"shape {(batch, heads, tokens)}", scores.shape)
    if not len(weights) or len(weights) % heads or weights.shape[1] != dim:
        wanted = f"shape (a multiple of {heads}, {dim}, width)"
        raise argument_error("output_weights", wanted, weights.shape)
    kept_count(tokens, keep, None)
    group = len(weights) // heads
    sizes = np.zeros((batch, heads, tokens))
    for b, h in np.ndindex(batch, heads):
        for projection in weights[h * group : (h + 1) * group]:
            sizes[b, h] += np.abs(given.values[b, h] @ projection).sum(-1, dtype=np.float64) / group
    result = (scores + 1e-4) * sizes
    np.put_along_axis(result, best(scores, int(keep * tokens * first)), np.inf, -1)
    return result
