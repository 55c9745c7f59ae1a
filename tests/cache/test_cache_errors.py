"""What a wrong call of a layer says, and that it leaves the layer as it was."""

import numpy as np
import pytest
from cache_scenes import LAYERS, any_kind, append, filled, state

import kvkit
from kvkit.cache import (
    CapacityError,
    DynamicLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


def wrong_updates():
    """(what is wrong, arguments) of calls for a layer of [2, 3, ., 4 and 8] float16 with 5 tokens."""
    key, value = np.ones((2, 3, 2, 4), np.float16), np.ones((2, 3, 2, 8), np.float16)
    yield "key_states: expected a numpy array, got list", (key.tolist(), value)
    yield "key_states: expected dtype", (key.astype(np.float64), value)
    yield "value_states: expected the dtype of key_states", (key, value.astype(np.float32))
    yield "key_states: expected keys and values as at", (key.astype(np.float32), value.astype(np.float32))
    yield "key_states: expected 4 axes", (key[0], value[0])
    yield "value_states: expected 4 axes", (key, value[0])
    yield "value_states: expected shape", (key, value[:1])
    yield "value_states: expected shape", (key, value[:, :2])
    yield "value_states: expected shape", (key, value[:, :, :1])
    yield "as at the first update", (key[:1], value[:1])
    yield "as at the first update", (key[:, :1], value[:, :1])
    yield "as at the first update", (key[..., :3], value)
    yield "as at the first update", (key, value[..., :3])
    yield "cache_position: expected 2 positions", (key, value, [5])
    yield "cache_position: expected consecutive positions from 5 on", (key, value, [5, 7])
    yield "cache_position: expected positions from 5 on", (key, value, [6, 7])
    yield "cache_position: expected positions from 5 on", (key, value, [-1, 0])
    yield "cache_position: expected integers", (key, value, [5.0, 6.0])
    yield "cache_position: expected 1 axis", (key, value, [[5, 6]])


def other_wrong_calls():
    yield "query_length: expected at least 0", "reserve", (-1,)
    yield "query_length: expected at least 0", "get_mask_sizes", (-1,)
    yield "length: expected an integer", "crop", (1.5,)
    yield "length: expected at most 5 tokens to drop", "crop", (-6,)
    yield "indices: expected at least one", "reorder", ([],)
    yield "indices: expected rows of the batch, 0 to 1, got 2", "reorder", ([0, 2],)
    yield "indices: expected rows of the batch, 0 to 1, got -1", "select", ([-1],)
    yield "indices: expected integers", "select", ([0.5],)
    yield "repeats: expected at least 1", "repeat", (0,)


@pytest.mark.parametrize("kind", LAYERS)
def test_errors_leave_a_layer_as_it_was(kind):
    layer = filled(kind, dims=(4, 8))
    before = state(layer)
    calls = [(message, "update", arguments) for message, arguments in wrong_updates()]
    for message, name, arguments in (*calls, *other_wrong_calls()):
        with pytest.raises(kvkit.KvkitError) as error:
            getattr(layer, name)(*arguments)
        assert message in str(error.value)
        assert state(layer) == before
    if kind != "static":
        with pytest.raises(kvkit.KvkitError, match="cache_position: expected positions from 5 on"):
            layer.update(np.ones((2, 3, 2, 4), np.float16), np.ones((2, 3, 2, 8), np.float16), [4, 5])
        assert state(layer) == before


@any_kind
def test_no_memory_leaves_a_layer_as_it_was(kind, monkeypatch):
    layer = filled(kind)
    before = state(layer)
    new = [np.ones((2, 3, 60, dim), np.float16) for dim in (4, 6)]
    real, left = np.zeros, 1  # the keys find memory, the values do not

    def zeros(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return real(*arguments)

    calls = [lambda: layer.repeat(2), lambda: layer.select([1])]
    if kind != "static":
        calls += [lambda: layer.update(*new)]
    if kind in ("dynamic", "sliding"):
        calls += [lambda: layer.reserve(60)]
    for call in calls:
        left = 1
        with monkeypatch.context() as patch:
            patch.setattr("kvkit.cache.stores.memory.np.zeros", zeros)
            with pytest.raises(MemoryError):
                call()
        assert left < 0
        assert state(layer) == before


def test_a_full_layer_says_so():
    layer = StaticLayer(4)
    append(layer, 1, 2, 3)
    before = state(layer)
    for call in (lambda: append(layer, 4, 5), lambda: layer.reserve(2)):
        with pytest.raises(CapacityError) as error:
            call()
        wanted = "StaticLayer: expected room for 2 new tokens after 3 (max_cache_len 4), got 1"
        assert str(error.value) == wanted
        assert isinstance(error.value, kvkit.KvkitError)
        assert state(layer) == before
    layer.reserve(1)
    assert append(layer, 4) == [1, 2, 3, 4]
    with pytest.raises(CapacityError):
        StaticLayer(3).reserve(4)


@pytest.mark.parametrize("make", [lambda: StaticLayer(0), lambda: SlidingWindowLayer(0),
                                  lambda: SlidingWindowLayer(None), lambda: StaticSlidingWindowLayer(4, 0),
                                  lambda: StaticLayer(2.5)])  # fmt: skip
def test_sizes_of_layers_are_checked(make):
    with pytest.raises(kvkit.KvkitError, match=r"max_cache_len|sliding_window"):
        make()


def wrong_attention():
    """(message, arguments, options) for a layer of 5 tokens, 2 key heads of 16."""
    query = np.ones((2, 6, 2, 16), np.float32)
    yield "query: expected a numpy array", (query.tolist(),), {}
    yield "query: expected dtype", (query.astype(np.float64),), {}
    yield "query: expected 4 axes", (query[0],), {}
    yield "query: expected shape [2, a multiple of 2, q, 16]", (query[:1],), {}
    yield "query: expected shape", (query[:, :3],), {}
    yield "query: expected shape", (query[:, :0],), {}
    yield "query: expected shape", (query[..., :8],), {}
    yield "query: expected tokens", (np.ones((2, 6, 6, 16), np.float32),), {}
    yield "attention_mask: expected a numpy array", (query, [[True] * 5] * 2), {}
    yield "attention_mask: expected bool [2, 5]", (query, np.ones((2, 5))), {}
    yield "attention_mask: expected bool [2, 5]", (query, np.ones((2, 4), bool)), {}
    yield "attention_mask: expected bool [2, 5]", (query, np.ones((1, 5), bool)), {}
    yield "attention_mask: expected", (query, np.ones((2, 2, 5), bool)), {}
    yield "attention_mask: expected", (query, np.ones((2, 6, 2, 4), bool)), {}
    yield "attn_mask: expected", (query, np.ones((2, 6, 3, 5), bool)), {}
    yield "attn_mask: expected dtype", (query, np.ones((2, 6, 2, 5), np.float16)), {}
    yield "softmax_scale: expected a finite number", (query,), {"softmax_scale": np.nan}
    yield "softmax_scale: expected a finite number", (query,), {"softmax_scale": True}
    yield "softmax_scale: expected a finite number", (query,), {"softmax_scale": np.ones(2)}
    yield "softcap: expected 0", (query,), {"softcap": -1.0}
    yield "sinks: expected shape (6,)", (query,), {"sinks": np.zeros(2, np.float32)}
    yield "return_lse: expected", (query,), {"return_lse": "yes"}


def test_attention_says_what_is_wrong():
    layer, query = DynamicLayer(), np.ones((2, 6, 2, 16), np.float32)
    with pytest.raises(kvkit.KvkitError, match="DynamicLayer: expected keys and values: update comes first"):
        layer.attend(query)
    layer.update(np.ones((2, 2, 5, 16), np.float32), np.ones((2, 2, 5, 24), np.float32))
    layer.attend(query, softmax_scale=1)
    for message, arguments, options in wrong_attention():
        with pytest.raises(kvkit.KvkitError) as error:
            layer.attend(*arguments, **options)
        assert message in str(error.value)
