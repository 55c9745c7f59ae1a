"""The quantized layer: which tokens are codes, and what a step sees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantized_cache_scenes import OPTIONS, PMX, coded, coded_set, feed, states
from scenes import first_quick

import kvkit
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from kvkit.errors import KvkitError

# Which tokens are codes


def test_vector_of_eviction_along_tokens():
    spec = QuantSpec(8, "sym", "token", 8)
    layer = QuantizedLayer(spec, spec, residual_length=3, sink=2)
    sets, given = {}, states(8)
    for n in range(1, 9):
        feed(layer, given, n)
        sets[n] = coded_set(layer, 1)
        assert coded_set(layer, 0) == sets[n]
    assert [sets[n] for n in range(1, 9)] == [[]] * 5 + [[2], [2, 3], [2, 3, 4]]


def test_vector_of_eviction_along_channels():
    spec = QuantSpec(8, "sym", "channel", 2)
    layer = QuantizedLayer(spec, spec, residual_length=3, sink=2)
    sets, given = {}, states(9)
    for n in range(1, 10):
        feed(layer, given, n)
        sets[n] = coded_set(layer, 0)
    assert [sets[n] for n in range(6, 10)] == [[], [2, 3], [2, 3], [2, 3, 4, 5]]


def test_vector_of_a_crop_into_codes():
    """Blocks [2,4) and [4,6); a crop to 5 closes the second short; the next, [5,7), comes with token 10."""
    spec = QuantSpec(8, "sym", "channel", 2)
    layer = QuantizedLayer(spec, spec, residual_length=3, sink=2)
    given = states(9)
    feed(layer, given, 9)
    codes, cells = coded(layer)
    codes, cells = codes.copy(), cells.copy()
    layer.crop(5)
    assert coded_set(layer, 0) == [2, 3, 4]
    assert np.array_equal(coded(layer)[0], codes[:, :, :3])
    assert np.array_equal(coded(layer)[1], cells)
    assert layer.get_seq_length() == 5
    feed(layer, given, 9)
    assert coded_set(layer, 0) == [2, 3, 4]
    layer.update(*(x[:, :, :1] for x in given))
    assert coded_set(layer, 0) == [2, 3, 4, 5, 6]
    assert layer.store.sides[0].block_of[:5].tolist() == [0, 0, 1, 2, 2]


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 2**32 - 1))
def test_any_chunking_stores_the_same(chunks, seed):
    given = states(sum(chunks), seed=seed)
    whole, parts = QuantizedLayer(**OPTIONS), QuantizedLayer(**OPTIONS)
    feed(whole, given, sum(chunks))
    feed(parts, given, *np.cumsum(chunks or [0]))
    for side in (0, 1):
        for one, other in zip(coded(whole, side), coded(parts, side), strict=True):
            assert one.tobytes() == other.tobytes()
    assert whole.keys.tobytes() == parts.keys.tobytes()
    assert whole.values.tobytes() == parts.values.tobytes()


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


def test_a_step_sees_old_codes_and_new_tokens_exactly():
    layer, given = QuantizedLayer(**OPTIONS), states(40)
    keys, values = feed(layer, given, 30)
    assert np.array_equal(keys, given[0][:, :, :30])
    assert np.array_equal(values, given[1][:, :, :30])
    stored = layer.keys, layer.values
    assert not np.array_equal(stored[0], given[0][:, :, :30])
    views = feed(layer, given, 40)
    for view, before, x, end in zip(views, stored, given, (22, 25), strict=True):
        array = np.asarray(view)
        assert (view.shape, view.dtype) == (x.shape, x.dtype)
        assert np.array_equal(array[:, :, :end], before[:, :, :end])
        assert np.array_equal(array[:, :, end:], x[:, :, end:])


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


def test_recording_postpones_until_a_crop():
    layer, plain, given = QuantizedLayer(**OPTIONS), QuantizedLayer(**OPTIONS), states(60)
    layer.activate_past_recording()
    feed(layer, given, 20, 30)
    assert coded_set(layer, 0) == coded_set(layer, 1) == []
    layer.crop(0)
    feed(plain, given, 30)
    assert coded_set(layer, 0) == coded_set(plain, 0) != []
    draft = states(12, seed=5)
    layer.update(*draft)
    assert coded_set(layer, 0) == coded_set(plain, 0)
    layer.crop(-12)
    for side in (0, 1):
        assert all(
            np.array_equal(one, other)
            for one, other in zip(coded(layer, side), coded(plain, side), strict=True)
        )
    assert np.array_equal(layer.keys, plain.keys)
    layer.update(*(x[:, :, 30:] for x in given))
    layer.crop(0)
    feed(plain, given, 60)
    assert layer.values.tobytes() == plain.values.tobytes()
