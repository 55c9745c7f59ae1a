"""Wrong arguments change nothing; sizes; caches of quantized layers."""

import numpy as np
from quantized_cache_scenes import KEY, OPTIONS, VALUE, feed, states

from kvkit.cache import Cache, QuantizedCache, QuantizedLayer, SlidingWindowLayer


def test_sizes():
    layer, given = QuantizedLayer(**OPTIONS), states(20)
    assert layer.get_mask_sizes(3) == (3, 0)
    assert (layer.keys, layer.get_max_length(), layer.nbytes) == (None, -1, 0)
    layer.update(*given, cache_position=range(20))
    assert layer.get_mask_sizes(3) == (23, 0)
    assert layer.get_seq_length() == 20
    layer.update(*(x[:, :, :0] for x in given))
    assert layer.get_seq_length() == 20
    sides = layer.store.sides
    coded_bytes = [(12, 16 / 2 + 16 * 4 / 4), (13, 24 / 4 + 24 / 8 * 4)]
    exact = [(20 - count) * dim * 4 for (count, _), dim in zip(coded_bytes, (16, 24), strict=True)]
    assert layer.nbytes == 4 * sum(exact) + 4 * sum(count * size for count, size in coded_bytes)
    assert sides[0].tail.shape[2] <= 20 + 5 + 4 + 16


def test_the_tail_stays_small():
    """A long prefill's originals go with the next token; a thousand tokens more make no new memory."""
    layer, given = QuantizedLayer(**OPTIONS), states(5000, batch=1)
    feed(layer, given, 4000, 4001)
    tails = {id(side.tail) for side in layer.store.sides}
    for n in range(4002, 5001):
        feed(layer, given, n)
        assert {id(side.tail) for side in layer.store.sides} == tails
    assert max(side.tail.shape[2] for side in layer.store.sides) < 60


def test_a_cache_of_quantized_and_sliding_layers():
    types = ["full_attention", "sliding_attention"]
    cache = QuantizedCache(2, KEY, VALUE, 5, 2, layer_types=types, sliding_window=4)
    assert [type(layer) for layer in cache.layers] == [QuantizedLayer, SlidingWindowLayer]
    given = states(20)
    for i in (0, 1):
        cache.update(*given, i)
    cache.reserve(5)
    cache.reorder([1, 0])
    assert cache.attend(given[0][:, :, :1], 0).shape == (2, 2, 1, 24)
    growing = QuantizedCache(key=KEY, value=VALUE, residual_length=5, sink=2)
    for i in range(3):
        growing.update(*given, i)
    legacy = growing.to_legacy_cache()
    assert len(legacy) == 3
    assert np.array_equal(legacy[2][0], growing.layers[2].keys)
    assert isinstance(growing, Cache)
