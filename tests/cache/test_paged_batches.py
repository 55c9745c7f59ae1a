"""Rows of one length in a paged cache: tokens go, the batch changes, updates fail."""

import numpy as np
import pytest
from paged_scenes import contents, holding, numbered, refused

from kvkit.cache import OutOfBlocksError, PagedCache


def test_crop_vectors():
    """Those of the specification."""
    cache = holding(1, 2, 3, 4, 5, 6)
    for length, left in ((4, [1, 2, 3, 4]), (-1, [1, 2, 3]), (0, [1, 2, 3]), (9, [1, 2, 3])):
        cache.crop(length)
        assert contents(cache) == [left]
    assert refused(cache.crop, -4).startswith("length: ")
    cache.update(numbered(70), numbered(70), 0)
    assert contents(cache) == [[1, 2, 3, 70]]
    assert cache.get_seq_length() == 4


def test_batch_vectors():
    """Those of the specification: three rows of two tokens."""
    two, rows = (0, 1), [[0, 1], [10, 11], [20, 21]]
    cache = holding(*two, rows=3)
    for name, indices in (
        ("reorder", [2, 0, 0]),
        ("select", [1]),
        ("reorder_cache", np.array([1, 1, 2, 0, 2])),
    ):
        cache = holding(*two, rows=3)
        getattr(cache, name)(indices)
        assert contents(cache) == [rows[i] for i in indices]
    cache = holding(*two, rows=3)
    cache.batch_repeat_interleave(2)
    assert contents(cache) == [rows[i] for i in (0, 0, 1, 1, 2, 2)]


def test_rows_that_were_reordered_share_blocks_and_grow_apart():
    cache = holding(0, 1, 2, rows=2)
    before = cache.cache.copy()
    cache.reorder([1, 1, 0])
    np.testing.assert_array_equal(cache.cache, before)
    assert cache.blocks.available == 32 - 4
    cache.update(numbered(5, rows=3), numbered(5, rows=3), 0)
    assert contents(cache) == [[10, 11, 12, 5], [10, 11, 12, 15], [0, 1, 2, 25]]
    cache.reorder([0, 2])
    cache.crop(-2)
    assert contents(cache) == [[10, 11], [0, 1]]
    assert cache.blocks.available == 32 - 2


def test_wrong_indices():
    cache = holding(1, 2, rows=2)
    for indices in ([-1], [2], [], [0.5], [[0]], 0):
        assert refused(cache.reorder, indices).startswith("indices: expected ")
    for repeats in (0, -1, 1.5):
        assert refused(cache.repeat, repeats).startswith("repeats: expected ")
    assert contents(cache) == [[1, 2], [11, 12]]


def test_reset_releases_blocks_and_forgets_the_batch():
    cache = holding(1, 2, 3, rows=2)
    cache.reset()
    assert (cache.blocks.available, cache.get_seq_length(), cache.layers[0].keys) == (32, 0, None)
    cache.update(numbered(7), numbered(7), 0)
    assert contents(cache) == [[7]]


# Errors


def test_a_failing_update_leaves_the_layer_alone():
    cache = holding(1, 2, 3, rows=2, num_blocks=4)
    query = np.ones((2, 1, 1, 1), np.float32)
    output = cache.attend(query, 0)
    with pytest.raises(OutOfBlocksError):
        cache.update(numbered(4, 5, rows=2), numbered(4, 5, rows=2), 0)
    right = numbered(4, rows=2)
    wrong = [numbered(4, rows=1), right[..., :0], right.repeat(2, 1), right.astype(np.float16), right[0], [1]]
    for states in wrong:
        assert refused(cache.update, states, states, 0).startswith("key_states: expected ")
        refused(cache.update, right, states, 0)
    assert "overlap" in refused(cache.update, cache.cache[0, 0, 0, :2].reshape(right.shape), right, 0)
    for positions in ([2], [4], [3, 4], [], [[3]], [3.0]):
        message = refused(cache.update, right, right, 0, positions)
        assert message.startswith("cache_position: expected ")
    assert contents(cache) == [[1, 2, 3], [11, 12, 13]]
    np.testing.assert_array_equal(cache.attend(query, 0), output)
    cache.update(right, right, 0, [3])
    assert contents(cache) == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_the_first_update_may_fail():
    cache = PagedCache(2, 2, 1, 1, 1, np.float32)
    with pytest.raises(OutOfBlocksError):
        cache.update(numbered(1, rows=3), numbered(1, rows=3), 0)
    cache.update(numbered(1, rows=2), numbered(1, rows=2), 0)
    assert contents(cache) == [[1], [11]]


def test_reserve():
    """After it succeeds the next update cannot fail for want of blocks; an error changes nothing."""
    cache = holding(1, 2, 3, rows=2, num_blocks=5)
    cache.repeat(1)
    cache.reserve(1)
    with pytest.raises(OutOfBlocksError):
        cache.reserve(4)
    assert contents(cache) == [[1, 2, 3], [11, 12, 13]]
    cache.update(numbered(4, rows=2), numbered(4, rows=2), 0)
    assert contents(cache) == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_layers_take_turns():
    cache = PagedCache(8, 2, 3, 1, 1, np.float32)
    cache.update(numbered(1), numbered(1), 2)
    assert "has not written" in refused(cache.update, numbered(2), numbered(2), 2)
    assert "as in other layers" in refused(cache.update, numbered(1, 2), numbered(1, 2), 0)
    assert [cache.get_seq_length(i) for i in range(3)] == [0, 0, 1]
    assert [layer.keys.shape[2] for layer in cache.layers] == [0, 0, 1]
    for i in (0, 1):
        cache.update(numbered(1), numbered(1), i)
    assert [cache.get_seq_length(i) for i in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(("change", "left"), [(("crop", -1), [1, 2]), (("reorder", [0]), [1, 2, 3])], ids=str)
def test_what_changes_rows_takes_back_what_some_layers_have_not_seen(change, left):
    cache = PagedCache(8, 2, 2, 1, 1, np.float32)
    for i in (0, 1):
        cache.update(numbered(1, 2, 3), numbered(1, 2, 3), i)
    cache.update(numbered(4), numbered(4), 0)
    name, argument = change
    refused(getattr(cache, name), -9 if name == "crop" else [1])  # an error takes nothing back
    assert [cache.get_seq_length(i) for i in (0, 1)] == [4, 3]
    getattr(cache, name)(argument)
    assert [layer.keys.ravel().tolist() for layer in cache.layers] == [left, left]
