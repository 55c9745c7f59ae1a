"""Scorers that read no keys or values: by position, and by chance."""

import numpy as np

from kvkit.checks.values import integer
from kvkit.errors import TooFewTokensError, argument_error
from kvkit.eviction.inputs import Inputs
from kvkit.eviction.scorers import scorer
from kvkit.typed import Array


@scorer()
def streaming(given: Inputs, *, budget: int, sinks: int = 4) -> Array:
    """score = 1 for the first `sinks` tokens and the last budget - sinks, else 0 (arXiv 2309.17453)."""
    budget, sinks = integer("budget", budget, 1), integer("sinks", sinks, 0)
    if budget < sinks:
        raise argument_error("budget", f"at least sinks, {sinks}", budget, TooFewTokensError)
    result = np.zeros(given.keys.shape[:3])
    result[..., :sinks] = 1
    result[..., max(0, given.tokens - (budget - sinks)) :] = 1
    return result


@scorer()
def random(given: Inputs, *, seed: int = 0) -> Array:
    """Score each token by a uniform number, the same for each row of a batch: a baseline."""
    _, heads, tokens, _ = given.keys.shape
    drawn = np.random.default_rng(integer("seed", seed, 0)).random((1, heads, tokens))
    return np.broadcast_to(drawn, given.keys.shape[:3])
