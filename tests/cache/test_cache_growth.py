"""What tokens cost: how often a store moves, how large it is, and the time of a call."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from cache_scenes import filled, room

from kvkit.cache import (
    Cache,
    DynamicLayer,
    QuantizedCache,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    load,
)
from kvkit.cpu.attention.prepare import FIELD


def addresses(views):
    return [view.__array_interface__["data"][0] for view in views]


def test_growth_doubles_and_returns_views():
    """N appends of a token move the store O(log N) times; between that keys stay where they are."""
    layer, new = DynamicLayer(), np.ones((1, 2, 1, 8), np.float32)
    places, capacities = [], []
    for i in range(3000):
        returned = layer.update(new * i, new)
        assert not any(view.flags.owndata for view in returned)
        places.append(tuple(addresses(returned)))
        capacities.append(room(layer.keys))
    moves = sum(a != b for a, b in itertools.pairwise(places))
    assert moves <= 12
    assert sorted(set(capacities)) == [2**i for i in range(13)]
    assert all(n < capacity <= 2 * n + 1 for n, capacity in enumerate(capacities))
    assert layer.keys[0, 1, :, 3].tolist() == list(range(3000))


def test_reserved_room_is_not_moved_to_again():
    (layer,) = filled("dynamic").layers
    layer.reserve(100)
    place = addresses([layer.keys])
    for _ in range(100):
        layer.update(np.ones((2, 3, 1, 4), np.float16), np.ones((2, 3, 1, 6), np.float16))
    assert addresses([layer.keys]) == place


@pytest.mark.parametrize("kind", ["sliding", "static sliding"])
def test_a_window_does_not_grow(kind):
    """Memory is that of the window and some slack, after long updates too; old rows are seldom copied."""
    layer = SlidingWindowLayer(64) if kind == "sliding" else StaticSlidingWindowLayer(500, 64)
    bases = []
    for q in [1] * 500 + [300] + [1] * 500:
        returned, _ = layer.update(np.ones((1, 1, q, 8), np.float32), np.ones((1, 1, q, 8), np.float32))
        bases.append(returned.base)
    moves = sum(a is not b for a, b in itertools.pairwise(bases))
    assert moves <= 2 * 1000 // 32 + 12
    assert room(returned) <= 64 + 2 * 32


@pytest.mark.perf
def test_an_append_costs_the_same_at_any_length():
    """The fastest of some appends of a token after 32,768 against that after none."""

    def fastest(length):
        layer, new = DynamicLayer(), np.ones((1, 8, 1, 64), np.float16)
        if length:
            layer.update(*[np.ones((1, 8, length, 64), np.float16)] * 2)
        layer.reserve(200)
        times = []
        for _ in range(100):
            begin = time.perf_counter()
            layer.update(new, new)
            times.append(time.perf_counter() - begin)
        return min(times)

    fastest(0)
    assert fastest(32_768) < 3 * fastest(0) + 2e-6


@pytest.mark.perf
def test_a_token_takes_under_60_microseconds(microsecond):
    """Update and attention of a small layer, kernels included."""
    layer, new = DynamicLayer(), np.ones((1, 2, 1, 32), np.float32)
    query, times = np.ones((1, 4, 1, 32), np.float32), []
    for _ in range(400):
        begin = time.perf_counter()
        layer.update(new, new)
        layer.attend(query)
        times.append(time.perf_counter() - begin)
    assert min(times[200:]) < 60 * microsecond


@pytest.mark.parametrize(
    "make",
    [
        DynamicLayer,
        lambda: StaticLayer(40_000),
        lambda: SlidingWindowLayer(20_000),
        lambda: StaticSlidingWindowLayer(40_000, 20_000),
    ],
    ids=["dynamic", "static", "sliding", "static sliding"],
)
def test_nothing_of_the_size_of_the_context_is_made(make):
    """Keys alone are 2.5 MB; strides of the store are no reason for a copy."""
    layer, new = make(), np.ones((2, 2, 1, 16), np.float16)
    layer.update(*[np.ones((2, 2, 20_000, 16), np.float16)] * 2)
    query = np.ones((2, 6, 1, 16), np.float16)
    layer.update(new, new)
    layer.attend(query)
    tracemalloc.start()
    try:
        layer.update(new, new)
        layer.attend(query)
        layer.attend(query, np.ones((2, layer.get_seq_length()), bool))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 150_000 < layer.keys.nbytes // 10


def test_a_static_layer_costs_what_is_filled():
    """Poison behind the filled part is never read: it would be seen in every sum of products."""
    layer = StaticLayer(4096)
    tokens = np.ones((1, 2, 100, 16), np.float32)
    whole, values = layer.update(tokens, tokens)
    query = np.ones((1, 4, 100, 16), np.float32)
    clean = layer.attend(query)
    whole[:, :, 100:] = values[:, :, 100:] = np.nan
    assert layer.attend(query).tobytes() == clean.tobytes()
    [prepared] = layer._attention._calls.values()
    assert prepared._attention.params[FIELD["products"]] == 4 * 100 * 100


def allocated():
    return tracemalloc.get_traced_memory()[0]


def test_a_quantized_prompt_is_let_go_when_the_next_layer_is_updated():
    """And as long as it is held, nbytes says so."""
    prompt = np.ones((1, 2, 4096, 64), np.float32)

    def first_step(cache):
        for i in range(3):
            cache.update(prompt, prompt, i)
            assert cache.layers[i].nbytes > 2 * prompt.nbytes
            cache.attend(prompt[:, :, -2:], i)
        return cache

    first_step(QuantizedCache(num_layers=3, residual_length=16))  # compiles
    tracemalloc.start()
    try:
        cache = first_step(QuantizedCache(num_layers=3, residual_length=16))
        assert max(layer.nbytes for layer in cache.layers[:2]) < prompt.nbytes / 2
        assert allocated() < 5 * prompt.nbytes
        cache.layers[2]._release_undo()
        assert allocated() < 2 * prompt.nbytes
    finally:
        tracemalloc.stop()
    layer = QuantizedLayer(residual_length=16, read_back=True)
    layer.update(prompt, prompt)
    assert layer.nbytes < prompt.nbytes / 2


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("layer", [DynamicLayer, lambda: QuantizedLayer(residual_length=16)])
def test_the_first_tokens_after_a_prompt_copy_nothing(tmp_path, layer, loaded):
    prompt = np.ones((1, 2, 4096, 64), np.float32)

    def prefilled(layer):
        layer.update(prompt, prompt)
        layer._release_undo()
        if not loaded:
            return layer
        Cache([layer]).save(tmp_path / "cache.npz")
        return load(tmp_path / "cache.npz").layers[0]

    def steps(layer):
        for _ in range(100):
            layer.update(prompt[:, :, :1], prompt[:, :, :1])

    steps(prefilled(layer()))  # compiles
    layer = prefilled(layer())
    tracemalloc.start()
    try:
        steps(layer)
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
