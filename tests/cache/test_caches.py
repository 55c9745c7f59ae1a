"""Layers: the specification's vectors, tables and rules."""

import copy

import numpy as np
import pytest
from cache_scenes import LAYERS, any_kind, append, filled, stored, tokens

import kvkit
from kvkit.cache import DynamicLayer, SlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

# Vectors


ROWS = [  # (new tokens, returned and stored by the dynamic layer, by the static one, sizes of both before)
    [
        ((1, 2), [1, 2], [1, 2], [1, 2, 0, 0], [1, 2], (2, 0), (4, 0)),
        ((3,), [1, 2, 3], [1, 2, 3], [1, 2, 3, 0], [1, 2, 3], (3, 0), (4, 0)),
        ((4,), [1, 2, 3, 4], [2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], (4, 0), (4, 0)),
        ((5,), [2, 3, 4, 5], [3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5], (4, 1), (4, 1)),
        ((6, 7, 8), [3, 4, 5, 6, 7, 8], [6, 7, 8], [3, 4, 5, 6, 7, 8], [5, 6, 7, 8], (6, 2), (6, 2)),
    ],
    [
        ((1, 2, 3, 4, 5, 6), [1, 2, 3, 4, 5, 6], [4, 5, 6], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6], (6, 0), (6, 0)),
        ((7, 8), [4, 5, 6, 7, 8], [6, 7, 8], [4, 5, 6, 7, 8], [5, 6, 7, 8], (5, 3), (5, 3)),
    ],
    [
        ((1, 2, 3), [1, 2, 3], [1, 2, 3], [1, 2, 3, 0], [1, 2, 3], (3, 0), (4, 0)),
        ((4, 5), [1, 2, 3, 4, 5], [3, 4, 5], [1, 2, 3, 4, 5], [2, 3, 4, 5], (5, 0), (5, 0)),
    ],
]


@pytest.mark.parametrize("rows", ROWS, ids=["one by one", "long, then two", "across"])
def test_sliding_vectors(rows):
    dynamic, static, seen = SlidingWindowLayer(4), StaticSlidingWindowLayer(4, 4), 0
    for new, returned, kept, static_returned, static_kept, sizes, static_sizes in rows:
        for layer, before in ((dynamic, sizes), (static, static_sizes)):
            assert layer.get_mask_sizes(len(new)) == before
        assert append(dynamic, *new) == returned
        assert stored(dynamic) == kept
        assert append(static, *new) == static_returned
        assert stored(static) == static_kept
        seen += len(new)
        assert dynamic.get_seq_length() == static.get_seq_length() == seen


def test_crop_of_a_dynamic_layer():
    layer = DynamicLayer()
    append(layer, 1, 2, 3, 4, 5, 6)
    for x, left in ((4, [1, 2, 3, 4]), (-1, [1, 2, 3]), (0, [1, 2, 3]), (9, [1, 2, 3])):
        layer.crop(x)
        assert stored(layer) == left
    with pytest.raises(ValueError, match="length: expected at most 3 tokens to drop, those seen, got 4"):
        layer.crop(-4)
    assert append(layer, 70) == [1, 2, 3, 70]


def test_crop_of_a_recording_layer():
    layer = SlidingWindowLayer(4)
    layer.activate_past_recording()
    assert append(layer, 1, 2, 3, 4, 5, 6) == [1, 2, 3, 4, 5, 6]
    layer.crop(-1)
    assert (layer.get_seq_length(), stored(layer)) == (5, [3, 4, 5])
    assert layer.get_mask_sizes(2) == (5, 2)
    assert append(layer, 60, 70) == [3, 4, 5, 60, 70]
    layer.crop(0)
    assert (layer.get_seq_length(), stored(layer)) == (7, [5, 60, 70])


def test_crop_without_recording():
    layer = SlidingWindowLayer(4)
    append(layer, 1, 2, 3, 4, 5, 6)
    with pytest.raises(
        RuntimeError, match=r"crop of SlidingWindowLayer: .* call activate_past_recording\(\)"
    ):
        layer.crop(-1)
    assert (layer.get_seq_length(), stored(layer)) == (6, [4, 5, 6])
    for recording in (False, True):
        layer = SlidingWindowLayer(4)
        append(layer, 1, 2, 3)
        if recording:
            layer.activate_past_recording()
        layer.crop(-2)
        assert (layer.get_seq_length(), stored(layer)) == (1, [1])


def test_crop_of_a_static_sliding_layer():
    layer = StaticSlidingWindowLayer(4, 4)
    for value in range(1, 6):
        append(layer, value)
    with pytest.raises(RuntimeError):
        layer.crop(-2)
    assert stored(layer) == [2, 3, 4, 5]
    layer.crop(-1)
    assert layer.get_seq_length() == 4
    assert append(layer, 50) == [2, 3, 4, 50]


def test_batch_vectors():
    rows = np.array([[0, 1], [10, 11], [20, 21]], np.float32)[:, None, :, None]
    for change, expected in (
        (lambda layer: layer.reorder([2, 0, 0]), [[20, 21], [0, 1], [0, 1]]),
        (lambda layer: layer.repeat(2), [[0, 1], [0, 1], [10, 11], [10, 11], [20, 21], [20, 21]]),
        (lambda layer: layer.select([1]), [[10, 11]]),
    ):
        layer = DynamicLayer()
        layer.update(rows, -rows)
        change(layer)
        assert layer.keys[:, 0, :, 0].tolist() == expected
        assert np.array_equal(layer.values, -layer.keys)


@any_kind
def test_aliases(kind):
    kind = type(LAYERS[kind]())
    assert kind.reorder_cache is kind.reorder
    assert kind.batch_select_indices is kind.select
    assert kind.batch_repeat_interleave is kind.repeat


# Rules


@any_kind
def test_lengths_are_ints(kind):
    layer = LAYERS[kind]()
    assert layer.get_seq_length() == 0
    for length in (layer.get_seq_length(), *layer.get_mask_sizes(2), layer.get_max_length()):
        assert type(length) is int
    layer = filled(kind)
    assert type(layer.get_seq_length()) is int
    assert layer.get_max_length() == {"dynamic": -1, "sliding": 4, "static": 12, "static sliding": 4}[kind]


@any_kind
def test_no_tokens_are_legal(kind):
    layer = LAYERS[kind]()
    none = np.ones((2, 3, 0, 4), np.float32)
    keys, _ = layer.update(none, none)
    assert keys.shape == (2, 3, layer.get_mask_sizes(0)[0], 4)
    assert not keys.any()
    with pytest.raises(kvkit.KvkitError, match="key_states"):
        layer.update(none[:1], none[:1])
    assert layer.attend(np.ones((2, 6, 0, 4), np.float32)).shape == (2, 6, 0, 4)


@any_kind
def test_what_a_layer_returned_can_be_its_input(kind):
    layer = LAYERS[kind]()
    append(layer, 1, 2)
    for _ in range(40 if kind != "static" else 8):
        keys, values = layer.keys, layer.values
        before = keys.ravel().tolist()
        layer.update(keys[:, :, -1:], values[:, :, -1:])
        assert stored(layer)[-2:] == [before[-1]] * 2


def test_a_static_layer_overwrites_with_its_own_tokens():
    layer = StaticLayer(6)
    append(layer, 1, 2, 3, 4)
    keys, values = layer.keys, layer.values
    assert layer.update(keys[:, :, 2:], values[:, :, 2:], cache_position=[1, 2])[0].ravel().tolist() == [
        1, 3, 4, 0, 0, 0,
    ]  # fmt: skip
    assert np.array_equal(layer.values, -layer.keys)


def test_a_static_layer_returns_its_memory():
    layer = StaticLayer(4)
    assert append(layer, 1, 2) == [1, 2, 0, 0]
    assert append(layer, 3) == [1, 2, 3, 0]
    assert append(layer, 30, 40, cache_position=[2, 3]) == [1, 2, 30, 40]
    assert append(layer, 20, cache_position=np.array([1])) == [1, 20, 0, 0]
    assert (layer.get_seq_length(), stored(layer), layer.get_mask_sizes(1)) == (2, [1, 20], (4, 0))
    layer.reset()
    assert layer.keys.shape == (1, 1, 0, 1)
    assert append(layer, 5) == [5, 0, 0, 0]


@pytest.mark.parametrize("kind", ["dynamic", "sliding"])
def test_reset_of_a_growing_layer_forgets_its_shape(kind):
    layer = filled(kind)
    layer.activate_past_recording()
    layer.reset()
    assert (layer.keys, layer.values, layer.get_seq_length(), layer.record_past) == (None, None, 0, False)
    assert append(layer, 1, 2) == [1, 2]


def test_a_narrowed_window_is_said_once():
    with pytest.warns(UserWarning, match="max_cache_len 3 narrows the sliding window of 8") as warned:
        layer = StaticSlidingWindowLayer(3, 8)
    assert len(warned) == 1
    assert layer.get_max_length() == 3
    assert append(layer, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert stored(layer) == [2, 3, 4]


def test_a_window_of_one_stores_nothing():
    layer = SlidingWindowLayer(1)
    for new in ((1, 2), (3,), (4,)):
        assert layer.get_mask_sizes(len(new))[0] == len(new)
        assert append(layer, *new) == list(new)
        assert stored(layer) == []
    assert layer.get_mask_sizes(2) == (2, 4)
    assert layer.attend(tokens(1)).ravel().tolist() == [-4]


@any_kind
def test_copies_go_their_own_way(kind):
    """A deep copy, for another continuation of a prompt; attention calls prepared before are not shared."""
    layer = filled(kind, 3)
    query, rng = np.ones((2, 3, 1, 4), np.float16), np.random.default_rng(0)
    one, other = (rng.standard_normal((2, 3, 1, 10)).astype(np.float16) for _ in range(2))
    layer.attend(query)
    again = copy.deepcopy(layer)
    again.update(other[..., :4], other[..., 4:])
    layer.update(one[..., :4], one[..., 4:])
    assert layer.attend(query).tobytes() == layer.attend(query).tobytes()
    fresh = filled(kind, 3)
    fresh.update(other[..., :4], other[..., 4:])
    assert again.attend(query).tobytes() == fresh.attend(query).tobytes()
    assert again.keys.tobytes() == fresh.keys.tobytes() != layer.keys.tobytes()
