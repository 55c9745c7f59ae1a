"""Quantized layers of two kinds of codes, their tokens, and what of them is stored."""

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from kvkit.cache.layers.quant_spec import QuantSpec

KEY, VALUE = QuantSpec(4, "asym", "channel", 4), QuantSpec(2, "asym", "token", 8)
PMX = ("float32", "float16"), ("float16", "float16"), ("bfloat16", "float32")  # of data, of scales
OPTIONS = {"key": KEY, "value": VALUE, "residual_length": 5, "sink": 2}


def states(tokens, batch=2, heads=2, dims=(16, 24), dtype=np.float32, seed=0):
    """Keys and values [B, H, tokens, D]."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, heads, tokens, dim)).astype(dtype) for dim in dims]


def feed(layer, given, *ends):
    """Update with tokens up to each end in turn; the last result."""
    begin = result = None
    for end in ends:
        begin = layer.get_seq_length()
        result = layer.update(*(x[:, :, begin:end] for x in given))
    return result


def coded_set(layer, side):
    side = layer.store.sides[side]
    first = min(side.sink, side.length)
    return list(range(first, first + side.coded))


def coded(layer, side=0):
    """(bytes of codes, cells) of a layer's keys or values."""
    side = layer.store.sides[side]
    return side.codes[:, :, : side.coded], side.cells[:, :, : side.blocks]
