"""Make masks for operators of positions."""

import numpy as np

INF = np.inf


def random_mask(rng, shape, dtype):
    """Return a mask with some -inf in it."""
    if dtype is bool:
        return rng.random(shape) < 0.6
    values = rng.standard_normal(shape) * 4
    values[rng.random(shape) < 0.1] = -INF
    return values.astype(dtype)
