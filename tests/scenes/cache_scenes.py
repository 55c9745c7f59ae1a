"""Make layers of every kind and tokens for them, and describe the whole state of a layer."""

import numpy as np
import pytest
from cache_model import KINDS
from quantized_cache_scenes import OPTIONS

from kvkit.cache import (
    Cache,
    ChunkedLayer,
    DynamicLayer,
    PagedCache,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticChunkedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from kvkit.runtime.arrays import ALIGNED

LAYERS = {
    "dynamic": DynamicLayer,
    "sliding": lambda: SlidingWindowLayer(4),
    "chunked": lambda: ChunkedLayer(4),
    "static": lambda: StaticLayer(12),
    "static sliding": lambda: StaticSlidingWindowLayer(12, 4),
    "static chunked": lambda: StaticChunkedLayer(12, 4),
    "quantized": lambda: QuantizedLayer(**OPTIONS),
    "paged": lambda: PagedCache(16, 4, 1, 3, 8, np.float16),
}
any_kind = pytest.mark.parametrize("kind", KINDS)


def tokens(*values):
    """Return the given numbers as [1, 1, q, 1]."""
    return np.array(values, np.float32).reshape(1, 1, -1, 1)


def append(layer, *values, **more):
    """Append tokens with the given keys, and values of the opposite sign; return what the layer returns."""
    keys, negatives = layer.update(tokens(*values), -tokens(*values), **more)
    assert np.array_equal(keys, -negatives)
    return keys.ravel().tolist()


def stored(layer):
    assert np.array_equal(layer.keys, -layer.values)
    return layer.keys.ravel().tolist()


def room(keys):
    """Return how many rows fit the memory that keys are a view of."""
    return (keys.base.nbytes - ALIGNED) // (keys.nbytes // keys.shape[2])


def cache_of(kind):
    """Return a cache of one layer."""
    made = LAYERS[kind]()
    return made if kind == "paged" else Cache([made])


def filled(kind, count=5, batch=2, heads=3, dims=(4, 6), dtype=np.float16):
    """Return a cache of one layer with some random tokens."""
    cache, rng = cache_of(kind), np.random.default_rng(count)
    cache.update(*(rng.standard_normal((batch, heads, count, dim)).astype(dtype) for dim in dims), 0)
    return cache


def state(cache):
    """Return everything that can be seen of the layer of a cache."""
    (layer,) = cache.layers
    sizes = [layer.get_mask_sizes(q) for q in range(6)]
    bits = [(side.dtype, side.shape, side.tobytes()) for side in (layer.keys, layer.values)]
    attention = layer.attend(np.ones((*layer.keys.shape[:2], 1, layer.keys.shape[3]), layer.keys.dtype))
    room = cache.blocks.available if isinstance(cache, PagedCache) else None
    return layer.get_seq_length(), sizes, bits, layer._record_past, attention.tobytes(), room
