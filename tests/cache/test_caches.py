"""Layers: the specification's vectors, tables and rules."""

import pytest
from cache_scenes import LAYERS, any_kind, append, filled, stored

from kvkit.cache import SlidingWindowLayer, StaticSlidingWindowLayer

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


@any_kind
def test_aliases(kind):
    kind = type(LAYERS[kind]())
    assert kind.reorder_cache is kind.reorder
    assert kind.batch_select_indices is kind.reorder
    assert kind.batch_repeat_interleave is kind.repeat


# Rules


@any_kind
def test_lengths_are_ints(kind):
    layer = LAYERS[kind]()
    assert layer.get_seq_length() == 0
    for length in (layer.get_seq_length(), *layer.get_mask_sizes(2), layer.get_max_length()):
        assert type(length) is int
    (layer,) = filled(kind).layers
    assert type(layer.get_seq_length()) is int
    assert layer.get_max_length() == {"dynamic": -1, "static": 12}.get(kind, 4)


def test_a_narrowed_window_is_said_once():
    with pytest.warns(UserWarning, match="max_cache_len 3 narrows the sliding window of 8") as warned:
        layer = StaticSlidingWindowLayer(3, 8)
    assert len(warned) == 1
    assert layer.get_max_length() == 3
    assert append(layer, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert stored(layer) == [2, 3, 4]
