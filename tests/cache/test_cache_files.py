"""`Cache.save` and `load`: everything comes back, and what is not what it says is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from cache_model import KINDS
from folder_scenes import assert_same, filled, four_layers, random

import kvkit
from kvkit.cache import (
    Cache,
    DynamicCache,
    DynamicLayer,
    GatedDeltaLayer,
    IndexedLayer,
    LatentLayer,
    QuantizedLayer,
    RaggedLayer,
    SharedLayer,
    SlidingWindowLayer,
    StateLayer,
    StaticLayer,
    load,
)
from kvkit.cache.layers.pooled import PooledLayer
from kvkit.files import npz

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = np.dtype(np.float32), np.dtype(np.float16), BF16


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.npz"


def test_a_layer_without_tokens_beside_others(path):
    cache = Cache(four_layers())
    cache.update(*random(np.float32, 3), 2)
    cache.save(path)
    assert_same(load(path), cache)
    assert "description" not in npz.read(path).metadata  # which would say how all layers lie


def test_what_was_loaded_is_in_memory(path):
    """The file may go; changing the cache changes no file."""
    cache = filled()
    cache.save(path)
    before = path.read_bytes()
    again = load(path)
    for layer in again.layers:
        layer.keys[...] = 7
        layer.reorder([1, 1])
    assert path.read_bytes() == before
    path.write_bytes(b"")
    assert (again.layers[0].keys == 7).all()


def test_equal_caches_are_equal_files(path, tmp_path):
    """However the tokens came: nothing of capacities or earlier tokens is in a file."""
    one, other = Cache([DynamicLayer()]), Cache([DynamicLayer()])
    keys, values = random(BF16, 9)
    one.update(keys, values, 0)
    for i in range(9):
        other.update(keys[:, :, i : i + 1], values[:, :, i : i + 1], 0)
    other.update(keys, values, 0)
    other.crop(9)
    one.save(path)
    other.save(tmp_path / "other.npz")
    assert path.read_bytes() == (tmp_path / "other.npz").read_bytes()


def test_numpy_reads_it(path):
    cache = filled(np.float16)
    cache.save(path)
    with np.load(path) as file:
        assert np.array_equal(file["layers.0.keys"], cache.layers[0].keys)
        about = json.loads(file["kvkit.json"].item())["cache"]
    assert about["layers"][1] == {
        "kind": "SlidingWindowLayer", "arguments": {"sliding_window": 4}, "length": 7, "record_past": False,
    }  # fmt: skip
    assert about["arrays"]["layers.1.values"] == ["float16", 2, 3, 3, 6]
    assert len(about["fingerprint"]) == 64


# The legacy form


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_legacy_round_trip(dtype):
    legacy = tuple(tuple(random(dtype, 5, seed)) for seed in range(3))
    cache = DynamicCache.from_legacy_cache(legacy)
    again = cache.to_legacy_cache()
    assert isinstance(again, tuple)
    for one, other in zip(again, legacy, strict=True):
        assert isinstance(one, tuple)
        for got, expected in zip(one, other, strict=True):
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            assert got.tobytes() == expected.tobytes()
            assert got.flags.owndata
    keys = np.array([keys for keys, _ in legacy])
    stacked = DynamicCache.from_legacy_cache(np.stack([keys, keys], axis=1))  # [layers, 2, ...]
    assert stacked.layers[2].values.tobytes() == legacy[2][0].tobytes()
    again[0][0][...] = 0
    assert cache.layers[0].keys.tobytes() == legacy[0][0].tobytes()
    legacy[0][0][...] = 0
    assert cache.layers[0].keys.any()


def test_legacy_form_of_other_layers():
    cache = Cache([StaticLayer(20), SlidingWindowLayer(9)])
    for i in range(2):
        cache.update(*random(np.float32, 8), i)
    legacy = cache.to_legacy_cache()
    assert [side.shape for side in legacy[0]] == [(2, 3, 8, 4), (2, 3, 8, 6)]
    assert legacy[1][0].tobytes() == cache.layers[1].keys.tobytes()
    cache.update(*random(np.float32, 1), 1)
    with pytest.raises(kvkit.KvkitError, match=r"layers\[1\]: expected a layer that stores all its tokens"):
        cache.to_legacy_cache()
    with pytest.raises(kvkit.KvkitError, match=r"layers\[0\]: expected a layer that stores all its tokens"):
        DynamicCache(num_layers=1).to_legacy_cache()
    assert DynamicCache().to_legacy_cache() == ()


def test_every_kind_is_saved():
    from kvkit.cache.layers.kinds import LAYER_KINDS as FILED

    assert len(FILED) == len(KINDS) + 9  # quantized ones; the others have tests of their own
    more = LatentLayer(), IndexedLayer(LatentLayer()), RaggedLayer(), GatedDeltaLayer(2, 4, 4, 16, 4)
    more += kvkit.cache.CompressedLayer(), PooledLayer()
    more += kvkit.cache.ChunkedLayer(4), kvkit.cache.StaticChunkedLayer(20, 4)
    saved = (*four_layers(), QuantizedLayer(), SharedLayer(0), StateLayer(), *more)
    assert {type(layer) for layer in saved} == set(FILED.values())


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("recording", [False, True])
def test_a_loaded_window_answers_the_last_query(moved, recording, tmp_path):
    """The file has the tokens that the last query attends to, one more than the next one needs."""
    layer = kvkit.cache.SlidingWindowLayer(4)
    cache, states = kvkit.cache.Cache([layer], rope="none"), random(np.float32, 9, dims=(4,))[0]
    if recording:
        cache.activate_past_recording()
    cache.update(states, states, 0)
    if moved and not recording:
        cache.shift(0, None, 3)
    expected = cache.attend(states[:, :, -1:], 0)
    cache.save(tmp_path / "cache.npz")
    again = load(tmp_path / "cache.npz")
    assert again.attend(states[:, :, -1:], 0).tobytes() == expected.tobytes()
    assert again.layers[0].stored_tokens == layer.stored_tokens
    assert again.layers[0].positions.tolist() == layer.positions.tolist()
    for each in cache, again:
        each.update(states[:, :, :2], states[:, :, :2], 0)
    answers = [each.attend(states[:, :, 3:5], 0).tobytes() for each in (cache, again)]
    assert answers[0] == answers[1]
