"""Quantized layers in files: every bit comes back, tokens go on, and what cannot be is refused."""

import numpy as np
import pytest
from quantized_cache_scenes import OPTIONS, SPECS, assert_same, feed, states
from scenes import first_quick

from kvkit.cache import Cache, DynamicLayer, KVView, QuantizedCache, QuantizedLayer, QuantSpec, load
from kvkit.errors import KvkitError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.npz"


@pytest.mark.parametrize("case", first_quick(SPECS, 2))
@pytest.mark.parametrize("dtype", first_quick(["float32", "bfloat16"]))
def test_round_trip(path, case, dtype):
    """Of any length, cut blocks among them; then both go on alike."""
    given, rng = states(90, dims=(16, 16), dtype=dtype), np.random.default_rng(0)
    for ends, length in (((), 0), ((0,), 0), ((1,), 0), ((40,), 0), ((40, 41), 23), ((30, 60), 59)):
        layer = QuantizedLayer(**SPECS[case])
        feed(layer, given, *ends)
        layer.crop(length)
        Cache([layer, DynamicLayer()]).save(path)
        again = load(path).layers[0]
        assert_same(again, layer)
        query = rng.standard_normal((2, 4, 1, 16)).astype(dtype)
        if layer.get_seq_length():
            assert again.attend(query).tobytes() == layer.attend(query).tobytes()
        for end in (layer.get_seq_length() + 1, 75, 90):
            views = feed(layer, given, end)
            for a, b in zip(views, feed(again, given, end), strict=True):
                assert isinstance(b, KVView)
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            assert again.attend(query).tobytes() == layer.attend(query).tobytes()
        assert_same(again, layer)


@pytest.mark.parametrize("case", first_quick(SPECS, 2))
def test_a_prompt_that_was_just_updated(path, case):
    """What the saved one attends to from then on, and what the loaded one does from the first call on."""
    given, layer = states(90), QuantizedLayer(**SPECS[case])
    keys, _ = feed(layer, given, 80)
    exact, query = np.asarray(keys).copy(), np.ones((2, 4, 1, 16), np.float32)
    Cache([layer]).save(path)
    again = load(path).layers[0]
    assert_same(again, layer)
    assert layer.read_back or not np.array_equal(np.asarray(layer.keys), exact)
    assert again.attend(query).tobytes() == layer.attend(query).tobytes()
    for each in (layer, again):
        feed(each, given, 90)
    assert again.attend(query).tobytes() == layer.attend(query).tobytes()


@pytest.mark.parametrize(("dim", "group"), [(16, 16), (80, 16), (96, 32), (128, 32)])
def test_groups_by_default(path, dim, group):
    """Of any usual head size; those that are given have to divide it."""
    x = states(200, dims=(dim, dim))
    for cache in QuantizedCache(num_layers=1), QuantizedCache("kivi4", num_layers=1):
        cache.update(*x, 0)
        cache.save(path)
        again = load(path).layers[0]
        assert_same(again, cache.layers[0])
        assert [spec.group for spec in again.specs] == [32, group]
    if dim % 64:
        with pytest.raises(KvkitError, match=r"^value: expected a head size that groups of 64 divide"):
            QuantizedLayer(value=QuantSpec("kivi4:g64")).update(*x)


def test_a_file_is_as_small_as_the_codes(path):
    layer, x = QuantizedLayer(**OPTIONS), states(2048)
    layer.update(*x)
    Cache([layer]).save(path)
    layer._release_undo()
    ends = 8 * layer.store.sides[0].block_count
    assert layer.nbytes + ends < path.stat().st_size < layer.nbytes + ends + 8192
    assert path.stat().st_size < sum(array.nbytes for array in x) / 3
