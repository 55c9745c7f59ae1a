"""Scalar formulas of recurrent states, written once for CPU and GPU: gates, decays and errors."""

import math

import numpy as np

from kvkit.runtime.jit import shared

ZERO, ONE, MOST = np.float32(0), np.float32(1), np.float32(87)


@shared
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    return ONE / (ONE + np.float32(math.exp(-min(max(x, -MOST), MOST)))) if x == x else x


@shared
def softplus(x):
    """Return log(1 + e^x)."""
    return max(x, ZERO) + np.float32(math.log1p(np.float32(math.exp(-min(abs(x), MOST)))))


@shared
def decay_gate(x, rate, bound, bounded):
    """Return g of x = a + dt_bias and rate = e^A_log: bound * sigmoid(rate x), or -rate softplus(x)."""
    if x != x:
        return x
    return bound * sigmoid(rate * x) if bounded else -rate * softplus(x)


@shared
def decay(g):
    """Return e^g; 0 below -87, where vectors have no smaller number."""
    return np.float32(math.exp(g)) if not g < -MOST else ZERO


@shared
def error(v, product, beta, erase):
    """Return delta = beta v - erase S'k, the change that a token writes for its key."""
    return beta * v - erase * product
