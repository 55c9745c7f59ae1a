"""Score tokens by position, or by chance, without reading keys or values."""

import numpy as np

from kvkit.checks.values import integer
from kvkit.errors import TooFewTokensError, argument_error
from kvkit.eviction.inputs import Inputs
from kvkit.eviction.scorers import scorer
from kvkit.typed import Array


@scorer()
def streaming(inputs: Inputs, *, budget: int, sinks: int = 4) -> Array:
    """score = 1 for the first `sinks` tokens and the last budget - sinks, else 0 (arXiv 2309.17453)."""
    budget, sinks = integer("budget", budget, 1), integer("sinks", sinks, 0)
    if budget < sinks:
        raise argument_error("budget", f"at least sinks, {sinks}", budget, TooFewTokensError)
    result = np.zeros(inputs.keys.shape[:3])
    result[..., :sinks] = 1
    result[..., max(0, inputs.tokens - (budget - sinks)) :] = 1
    return result


@scorer()
def random(inputs: Inputs, *, seed: int = 0) -> Array:
    """Score each token by a uniform random number, the same in all rows of the batch: a baseline."""
    _, heads, tokens, _ = inputs.keys.shape
    drawn = np.random.default_rng(integer("seed", seed, 0)).random((1, heads, tokens))
    return np.broadcast_to(drawn, inputs.keys.shape[:3])
