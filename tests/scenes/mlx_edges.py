"""Make prompt caches that mlx-lm writes of unusual layers: empty ones, lists, states, codes beside floats."""

import numpy as np


def filled(mx, cache, tokens=20, dim=64, sign=1):
    """Return an empty layer of mlx-lm after a prompt whose rows tell their token."""
    keys = rows(tokens, dim, sign)
    cache.update_and_fetch(mx.array(keys), mx.array(-keys))
    return cache


def rows(tokens=20, dim=64, sign=1):
    """Return keys [1, 2, tokens, dim] of float16."""
    h, t, c = np.ogrid[:2, :tokens, :dim]
    return (sign * (t + 32 * h + c / dim)).astype(np.float16)[None]


def states(mx, classes):
    """Return the state of a recurrent layer."""
    cache = classes.ArraysCache(2)
    cache[0], cache[1] = mx.zeros((1, 3, 8)), mx.ones((1, 2, 4, 4))
    return cache
