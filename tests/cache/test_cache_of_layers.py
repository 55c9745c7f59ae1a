"""`Cache` and its constructors: which layers there are, and calls that concern all of them."""

import copy
import doctest
import importlib
import pickle
import pkgutil
import subprocess
import sys

import numpy as np
import pytest
from cache_scenes import room
from surroundings import in_threads

import kvkit.cache
from kvkit.cache import (
    Cache,
    CapacityError,
    DynamicCache,
    DynamicLayer,
    PagedCache,
    QuantizedCache,
    SlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

HYBRID = ["full_attention", "sliding_attention", "full_attention"]


def tokens(*values):
    return np.array(values, np.float32).reshape(1, 1, -1, 1)


def step(cache, *values, layers=None):
    for i in range(len(cache)) if layers is None else layers:
        cache.update(tokens(*values), -tokens(*values), i)


def kept(cache):
    return [None if layer.keys is None else layer.keys.ravel().tolist() for layer in cache.layers]


# Which layers


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: DynamicCache(), []),
        (lambda: DynamicCache(2), [DynamicLayer] * 2),
        (lambda: DynamicCache(2, window=4), [SlidingWindowLayer] * 2),
        (lambda: DynamicCache(None, HYBRID, 4), [DynamicLayer, SlidingWindowLayer, DynamicLayer]),
        (lambda: DynamicCache(3, HYBRID, 4), [DynamicLayer, SlidingWindowLayer, DynamicLayer]),
        (lambda: DynamicCache(layer_types=["full_attention"]), [DynamicLayer]),
        (lambda: StaticCache(8, 2), [StaticLayer] * 2),
        (lambda: StaticCache(8, 2, window=4), [StaticSlidingWindowLayer] * 2),
        (lambda: StaticCache(8, 3, HYBRID, 4), [StaticLayer, StaticSlidingWindowLayer, StaticLayer]),
    ],
)
def test_constructors(make, kinds):
    cache = make()
    assert [type(layer) for layer in cache.layers] == kinds
    assert len(cache) == len(kinds)
    assert [layer.name for layer in cache.layers] == [f"layers[{i}]" for i in range(len(kinds))]
    sliding = [layer for layer in cache.layers if "Sliding" in type(layer).__name__]
    assert all(layer.model_window == 4 for layer in sliding)
    assert all(layer.max_cache_len == 8 for layer in cache.layers if isinstance(layer, StaticLayer))


@pytest.mark.parametrize(("window", "kind"), [(None, DynamicLayer), (3, SlidingWindowLayer)])
def test_layers_are_made_on_first_use(window, kind):
    cache = DynamicCache(window=window)
    assert (len(cache), cache.get_seq_length(), cache.get_seq_length(5)) == (0, 0, 0)
    assert cache.get_mask_sizes(3, 0) == (3, 0)
    with pytest.raises(kvkit.KvkitError, match="value_states"):
        cache.update(tokens(1), tokens(1, 2), 0)
    with pytest.raises(
        kvkit.KvkitError, match="layer_idx: expected at most 0, as layers are made in order, from 0, got 1"
    ):
        cache.update(tokens(1), tokens(1), 1)
    assert len(cache) == 0
    step(cache, 1, 2, layers=(0, 1))
    assert [type(layer) for layer in cache.layers] == [kind] * 2
    assert (cache.get_seq_length(1), cache.get_seq_length(2)) == (2, 0)


# All layers at once


def test_lengths():
    cache = DynamicCache(layer_types=HYBRID, window=4)
    assert cache.get_max_length() == -1
    assert cache.get_max_length(1) == 4
    assert DynamicCache(2, window=4).get_max_length() == 4
    assert StaticCache(8, 3, HYBRID, 4).get_max_length() == 8
    assert DynamicCache().get_max_length() == -1
    step(cache, 1, 2, 3, 4, 5)
    assert [cache.get_seq_length(i) for i in range(3)] == [5] * 3
    assert [cache.get_mask_sizes(1, i) for i in range(3)] == [(6, 0), (4, 2), (6, 0)]


def test_reserve_asks_all_layers_before_any_has_its_tokens():
    cache = Cache([DynamicLayer(), StaticLayer(9), StaticLayer(4)])
    step(cache, 1, 2, 3)
    places = [layer.keys.base for layer in cache.layers]
    with pytest.raises(CapacityError, match=r"layers\[2\]: expected room for 2 new tokens after 3"):
        cache.reserve(2)
    assert [layer.keys.base for layer in cache.layers] == places
    cache.reserve(1)
    step(cache, 4)
    with pytest.raises(CapacityError):
        step(cache, 5)
    assert kept(cache) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4]]


def test_a_crop_that_one_layer_cannot_make_is_made_by_none():
    cache = DynamicCache(layer_types=HYBRID, window=3)
    step(cache, 1, 2, 3, 4, 5)
    with pytest.raises(RuntimeError, match=r"layers\[1\]"):
        cache.crop(-1)
    assert kept(cache) == [[1, 2, 3, 4, 5], [4, 5], [1, 2, 3, 4, 5]]
    cache.crop(0)
    cache.crop(5)
    cache.activate_past_recording()
    step(cache, 6, 7)
    cache.crop(-2)
    assert kept(cache) == [[1, 2, 3, 4, 5], [4, 5], [1, 2, 3, 4, 5]]


def test_indices_that_one_layer_lacks_change_none():
    cache = Cache([DynamicLayer(), DynamicLayer()])
    many = np.arange(3, dtype=np.float32).reshape(3, 1, 1, 1)
    cache.update(many, many, 0)
    cache.update(many[:2], many[:2], 1)
    for change in (cache.reorder, cache.reorder, cache.reorder_cache, cache.batch_select_indices):
        with pytest.raises(kvkit.KvkitError, match="indices: expected rows of the batch, 0 to 1, got 2"):
            change([2, 0])
    assert kept(cache) == [[0, 1, 2], [0, 1]]
    cache.reorder([1, 0])
    cache.batch_repeat_interleave(2)
    assert kept(cache) == [[1, 1, 0, 0]] * 2
    with pytest.raises(kvkit.KvkitError, match="repeats: expected at least 1"):
        cache.repeat(0)


def test_changes_of_a_cache_without_tokens():
    cache = DynamicCache(2)
    cache.reorder([3])
    cache.repeat(2)
    cache.reserve(10)
    cache.crop(0)
    cache.reset()
    with pytest.raises(kvkit.KvkitError, match="length: expected at most 0 tokens to drop"):
        cache.crop(-1)
    assert kept(cache) == [None, None]


def test_long_updates_of_sliding_layers_leave_no_memory_behind():
    """While a prompt goes through the layers, one of them at a time holds more than its window."""
    cache = DynamicCache(4, window=16)
    prompt = np.ones((1, 2, 5000, 8), np.float32)
    for i in range(4):
        cache.update(prompt, prompt, i)
        cache.attend(prompt, i)
        sizes = [room(layer.keys) for layer in cache.layers if layer.keys is not None]
        assert sizes[i] >= 5000
        assert max(sizes[:i], default=0) < 64


# Threads


@pytest.mark.parametrize("kind", ["dynamic", "first use", "sliding", "static", "quantized", "paged"])
@pytest.mark.parametrize("of", ["cache", "layer"])
def test_threads_lose_no_tokens(kind, of):
    """Each takes its turn; without one, most tokens were lost."""
    token = np.ones((1, 2, 1, 32), np.float32)
    cache = {
        "dynamic": lambda: DynamicCache(1),
        "first use": DynamicCache,
        "sliding": lambda: DynamicCache(1, window=8),
        "static": lambda: Cache([StaticLayer(900)]),
        "quantized": lambda: QuantizedCache(num_layers=1, residual_length=8),
        "paged": lambda: PagedCache(128, 16, 1, 2, 32, np.float32),
    }[kind]()

    def work(_):
        for _ in range(100):
            if of == "cache" or not len(cache):
                cache.update(token, token, 0)
            else:
                cache.layers[0].update(token, token)

    in_threads(work, 8)
    assert cache.get_seq_length() == 800
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        again.update(token, token, 0)
        assert again.get_seq_length() == 801


# Names


def test_public_names():
    assert kvkit.cache.__all__ == sorted(kvkit.cache.__all__)
    for name in kvkit.cache.__all__:
        assert ">>> " in (getattr(kvkit.cache, name).__doc__ or "") or "Error" in name


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.walk_packages(kvkit.cache.__path__, "kvkit.cache.")]
)
def test_examples(name):
    options = doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=options).failed == 0


def test_numba_is_not_needed_to_hold_tokens():
    """Neither importing nor updating a cache loads it; attention does."""
    script = """
import sys, numpy as np
from kvkit.cache import DynamicCache
cache, new = DynamicCache(), np.ones((1, 1, 1, 4), np.float32)
cache.update(new, new, 0)
assert "numba" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
