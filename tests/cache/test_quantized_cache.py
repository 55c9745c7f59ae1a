"""The quantized layer: which tokens are codes, and what a step sees."""

import numpy as np
import pytest
from quantized_cache_scenes import OPTIONS, PMX, coded, feed, states
from scenes import first_quick

import kvkit
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from kvkit.errors import KvkitError

# Which tokens are codes


def test_codes_never_change():
    """Hundreds of tokens come one by one: what has become codes stays as it is, to the bit."""
    layer, given = QuantizedLayer(**OPTIONS), states(460)
    before = None
    for n in range(1, 461):
        feed(layer, given, n)
        now = [each.copy() for side in (0, 1) for each in coded(layer, side)]
        if before is not None:
            for old, new in zip(before, now, strict=True):
                assert np.array_equal(new[:, :, : old.shape[2]], old)
        before = now
    assert now[0].shape[2] == 452
    assert now[2].shape[2] == 453


# What a step sees


def test_a_view_is_good_until_the_layer_changes():
    layer, given = QuantizedLayer(**OPTIONS), states(40)
    keys, _ = feed(layer, given, 30)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(keys, copy=False)
    assert np.asarray(keys, np.float64).dtype == np.float64
    layer.reserve(10)
    assert np.array_equal(keys, given[0][:, :, :30])
    feed(layer, given, 31)
    with pytest.raises(KvkitError, match="KVView: expected"):
        np.asarray(keys)


@pytest.mark.parametrize(("dtype", "param"), first_quick(PMX))
def test_read_back_is_the_pmx_operator(dtype, param):
    spec = QuantSpec(8, "sym", "token", 8, param)
    layer = QuantizedLayer(spec, spec, residual_length=0, sink=0, read_back=True)
    given = states(20, dims=(16, 16), dtype=dtype)
    cache = np.zeros((2, 1, 2, 32, 2, 16), np.int8)
    scale = np.zeros((2, 1, 2, 32, 2, 2), param)
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        views = feed(layer, given, end)
        new = [np.ascontiguousarray(x[:, :, begin:end].swapaxes(1, 2)) for x in given]
        pmx = kvkit.key_value_cache(*new, begin, cache, scale, quant_bit=8)
        for view, array in zip(views, pmx, strict=True):
            assert np.asarray(view).tobytes() == np.ascontiguousarray(array.swapaxes(1, 2)).tobytes()
    codes = coded(layer)[0].view(np.int8).swapaxes(1, 2)
    assert np.array_equal(codes, cache[:, 0, 0, :20])
