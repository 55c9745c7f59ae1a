"""Caches of layers with other things than rows of their own: recurrent states, and rows of another layer."""

import copy
import functools

import numpy as np
import pytest

from kvkit import KvkitError
from kvkit.cache import (
    Cache,
    DynamicCache,
    DynamicLayer,
    PagedCache,
    SharedLayer,
    SlidingWindowLayer,
    StateLayer,
    load,
)


def states(total, batch=2):
    """Return a state that tells how many tokens it has seen, and its row of the batch."""
    rows = 100 * np.arange(batch, dtype=np.float32) + total
    return {
        "conv": np.broadcast_to(rows[:, None, None], (batch, 3, 4)),
        "ssm.0": rows[:, None].astype(np.float16),
    }


def hybrid():
    return Cache(
        [StateLayer(checkpoint_every=4, max_checkpoints=2), DynamicLayer(), SharedLayer(1), StateLayer()]
    )


def step(cache, tokens, layers=4):
    total, batch = cache.get_seq_length(1) + tokens, cache.layers[1].batch_size or 2
    rows = np.random.default_rng(total).standard_normal((batch, 2, tokens, 8), np.float32)
    calls = [(states(total, batch), tokens), (rows, rows), None, (states(total, batch), tokens)]
    for i, call in enumerate(calls[:layers]):
        if call is not None:
            cache.update(*call, i)


@pytest.fixture
def cache():
    made = hybrid()
    for tokens in (5, 1, 1, 1, 1, 1, 1):
        step(made, tokens)
    return made


def seen(layer):
    """Return how many tokens each row's state has seen."""
    numbers = layer.states["conv"][:, 0, 0] % 100
    assert (layer.states["conv"] % 100 == numbers[:, None, None]).all()
    assert (layer.states["ssm.0"][:, 0] % 100 == numbers).all()
    return numbers.tolist()


def test_a_state_goes_back_to_checkpoints_and_can_names_them(cache):
    state = cache.layers[0]
    assert (state.checkpoints, seen(state)) == ([5, 9], [11, 11])
    said = "layers[0]: expected 0, 5, 9 or 11 tokens to stay, which it has states of, got 7"
    assert cache.can("remove", 7) == said
    for call in (lambda: cache.remove(7), lambda: cache.crop(7), lambda: state.crop(-4)):
        with pytest.raises(KvkitError, match="5, 9 or 11 tokens to stay"):
            call()
    assert cache.can("remove", 9).startswith("layers[3]: expected 0 or 11 tokens to stay")
    assert "in the middle" in cache.can("remove", 2, 4)
    assert "rows" in cache.can("retain", [1])
    assert cache.can("remove", 11) is cache.can("remove", 3, 3) is cache.can("flatten") is None
    assert state.can("remove", 9, 11) is None  # to the end, by its number
    assert (cache.get_seq_length(3), cache.get_seq_length(1)) == (11, 11)
    state.remove(9)
    assert (state.get_seq_length(), seen(state), state.checkpoints) == (9, [9, 9], [5, 9])
    state.update(states(10), 1)
    state.crop(9)
    assert seen(state) == [9, 9]
    state.crop(5)
    state.update(states(20), 15)
    assert (state.checkpoints, seen(state)) == ([5, 20], [20, 20])
    state.crop(-20)
    assert (state.states, state.checkpoints, state.get_seq_length()) == ({}, [], 0)


def test_positions_move_and_states_stay(cache):
    cache.shift(9, None, 3, "none")
    assert (cache.layers[0].checkpoints, [layer.get_seq_length() for layer in cache.layers]) == (
        [5, 9],
        [14] * 4,
    )
    cache.shift(0, None, 2, "none")
    assert (cache.layers[0].checkpoints, seen(cache.layers[0])) == ([7, 11], [11, 11])
    cache.layers[0].crop(7)
    assert seen(cache.layers[0]) == [5, 5]


def test_the_batch(cache):
    cache.reorder([1, 0, 1])
    cache.repeat(2)
    rows = [101, 101, 1, 1, 101, 101]
    state = cache.layers[0]
    assert state.states["conv"][:, 0, 0].tolist() == [row + 10 for row in rows]
    assert [layer.batch_size for layer in cache.layers] == [6] * 4
    state.crop(9)
    assert state.states["conv"][:, 0, 0].tolist() == [row + 8 for row in rows]
    cache.layers[3].reorder([2])
    assert seen(cache.layers[3]) == [11]


def same(one, other):
    assert one.get_seq_length() == other.get_seq_length()
    assert one.layers[0].checkpoints == other.layers[0].checkpoints
    for i in (0, 3):
        for name, array in one.layers[i].states.items():
            np.testing.assert_array_equal(array, other.layers[i].states[name])
    query = np.ones((one.layers[1].batch_size, 4, 1, 8), np.float32)
    np.testing.assert_array_equal(one.attend(query, 2), other.attend(query, 1))


def test_copies_and_files(cache, tmp_path):
    cache.save(tmp_path / "cache.npz")
    for other in (copy.deepcopy(cache), load(tmp_path / "cache.npz")):
        same(cache, other)
        step(other, 1)
        assert seen(cache.layers[0]) == [11, 11]
        other.layers[0].crop(9)
        assert seen(other.layers[0]) == [9, 9]
        assert [layer.nbytes for layer in other.layers[2:]] == [0, cache.layers[3].nbytes]


def test_recording_keeps_every_state_until_a_crop(cache):
    cache.activate_past_recording()
    for tokens in (1, 2, 1, 1, 3):
        step(cache, tokens)
    assert cache.layers[3].checkpoints == [12, 14, 15, 16, 19]
    cache.crop(14)
    assert [seen(cache.layers[i]) for i in (0, 3)] == [[14, 14]] * 2
    assert cache.layers[3].checkpoints == []
    step(cache, 1)
    assert cache.layers[3].checkpoints == [15]


def test_arrays_may_come_later_and_be_changed_in_place():
    layer = StateLayer(checkpoint_every=2)
    layer.update({"conv": np.ones((1, 2), np.float32)}, 2)
    layer.update({"ssm": np.full((1, 3), 5, np.float32)}, 0)
    assert layer.checkpoints == [2]
    now = layer.advance(1)
    now["conv"] += 1
    assert layer.get_seq_length() == 3
    assert (layer.states["conv"] == 2).all()
    assert (layer.states["ssm"] == 5).all()
    layer.crop(2)
    assert (layer.states["conv"] == 1).all()
    assert (layer.states["ssm"] == 5).all()


def test_a_shared_layer_reads_the_prompt_of_a_window_after_other_layers():
    cache = Cache([SlidingWindowLayer(3), DynamicLayer(), SharedLayer(0)])
    states = np.random.default_rng(0).standard_normal((1, 2, 50, 8), np.float32)
    for tokens in (50, 1, 1):
        for i in (0, 1):
            cache.update(states[:, :, :tokens], states[:, :, :tokens], i)
            if not i:
                wanted = cache.attend(states[:, :, :tokens], 0)
        np.testing.assert_array_equal(cache.attend(states[:, :, :tokens], 2), wanted)
    assert cache.layers[0].store.capacity < 40  # the prompt's memory is freed


def paged(others, num_layers=4):
    return PagedCache(
        32, 4, num_layers=num_layers, num_kv_heads=2, head_dim=8, dtype=np.float32, others=others
    )


def test_lists_for_layers_count_those_without_blocks(rng):
    cache, states = paged({1: SharedLayer(0)}, 3), rng.standard_normal((1, 2, 16, 8)).astype(np.float32)
    for i in (0, 2):
        cache.update(states, states, i)
    found = cache.rows.compress("snapkv", keep=0.5, queries=[states, None, states], window=4)
    assert found.tokens == [8, 8]
    with pytest.raises(KvkitError, match="queries: expected a list of 3, one for each layer"):
        cache.rows.compress("snapkv", keep=0.5, queries=[states, states], window=4)


def test_blocks_beside_states_and_shared_rows(tmp_path):
    """The batch does what it does with rows that are in no blocks, or after an error nothing."""
    state = functools.partial(StateLayer, checkpoint_every=4, max_checkpoints=2)
    both = (
        paged({0: state(), 2: SharedLayer(1), 3: state()}),
        Cache([state(), DynamicLayer(), SharedLayer(1), state()]),
    )
    query = np.ones((2, 4, 1, 8), np.float32)

    def outputs():
        caches = *both, copy.deepcopy(both[0])
        found = [(seen(each.layers[0]), seen(each.layers[3]), each.attend(query, 2)) for each in caches]
        for one in found[:2]:
            assert one[:2] == found[2][:2]
            np.testing.assert_allclose(one[2], found[2][2], atol=1e-6)
        assert len({tuple(layer.get_seq_length() for layer in each.layers) for each in caches}) == 1

    for cache in both:
        for tokens in (5, 1, 1, 1, 1, 1, 1):
            step(cache, tokens)
    outputs()
    assert both[0].nbytes - sum(both[0].layers[i].nbytes for i in (0, 3)) == 6 * 4 * 2 * 2 * 8 * 4
    for cache in both:
        with pytest.raises(KvkitError, match=r"layers\[0\]: expected 0, 5, 9 or 11 tokens to stay"):
            cache.crop(7)
    outputs()
    for cache in both:
        cache.crop(9)
        cache.repeat(2)
        cache.reorder([3, 0])
        step(cache, 2)
    outputs()
    assert both[0].rows.can("remove", 2, 3) == (
        "rows: expected crop, in a cache with recurrent states, got remove"
    )
    with pytest.raises(KvkitError, match="cache: expected layers that all have blocks"):
        both[0].save(tmp_path / "cache.npz")
    both[0].reset()
    assert {layer.get_seq_length() for layer in both[0].layers} == {0}
    assert both[0].nbytes == 0


def test_what_is_refused():
    cache = hybrid()
    rows = np.ones((1, 1, 1, 4), np.float32)
    for call in (lambda: cache.update(rows, rows, 2), lambda: cache.layers[2].remove(0)):
        with pytest.raises(KvkitError, match="of layer 1, whose rows it reads"):
            call()
    with pytest.raises(KvkitError, match="a layer with keys and values, got a recurrent state"):
        cache.attend(rows, 0)
    cache.update(states(1), 1, 0)
    for given, message in (
        ({}, "a dict of arrays by name"),
        ({"conv": np.ones((2, 3, 5), np.float32)}, r"= \[2, 3, 4\], got \(2, 3, 5\)"),
        ({"conv": np.ones((1, 3, 4), np.float32)}, r"= \[2, 3, 4\], got \(1, 3, 4\)"),
        ({"a/b": np.ones((2, 3), np.float32)}, "names of letters"),
        ({"x": np.ones((2, 3), np.int32)}, "float32"),
    ):
        with pytest.raises(KvkitError, match=message):
            cache.update(given, 1, 0)
    assert (cache.get_seq_length(), seen(cache.layers[0])) == (1, [1, 1])
    assert cache.compress("knorm", keep=0.5).skipped[0] == "a recurrent state holds all tokens"
    kinds = [type(layer) for layer in DynamicCache(layer_types=["conv", "full_attention"]).layers]
    assert kinds == [StateLayer, DynamicLayer]


def test_a_state_of_no_tokens_at_a_position_is_saved_and_loaded(tmp_path):
    """After all tokens were removed, and the position of the next one was moved."""
    cache = Cache([StateLayer(), DynamicLayer()], rope="none")
    cache.update(states(3), 3, 0)
    cache.update(*np.ones((2, 2, 1, 3, 4), np.float32), 1)
    cache.remove(0)
    cache.shift(0, None, 2)
    for _ in range(2):
        cache.save(tmp_path / "cache.npz")
        cache = load(tmp_path / "cache.npz")
        assert [layer.get_seq_length() for layer in cache.layers] == [2, 2]
    cache.shift(0, None, 1)
    cache.update(states(4), 4, 0)
    cache.update(*np.ones((2, 2, 1, 4, 4), np.float32), 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [7, 7]
    assert cache.layers[0].states["ssm.0"][0, 0] == 4


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_checkpoint_stays_as_it_is_when_tokens_have_moved(tokens, in_place):
    layer = StateLayer(checkpoint_every=1)
    layer.update(states(3), 3)
    layer.shift(3, None, 1)
    if in_place:
        for name, array in layer.advance(tokens).items():
            array[...] = states(7)[name]
    else:
        layer.update(states(7), tokens)
    assert layer.states["ssm.0"][0, 0] == 7
    assert layer.get_seq_length() == 4 + tokens
    layer.crop(3)
    assert layer.states["ssm.0"][0, 0] == 3


def test_an_update_of_no_tokens_replaces_the_checkpoint_of_its_length():
    layer = StateLayer(checkpoint_every=1)
    layer.update(states(3), 3)
    layer.update(states(5), 0)
    layer.update(states(7), 1)
    layer.crop(3)
    assert layer.states["ssm.0"][0, 0] == 5
