"""Rows of one length in a paged cache, layer by layer: what other caches do, in blocks."""

import copy
import pickle

import numpy as np
import pytest
from paged_scenes import KINDS, LAYERS, P, contents, holding, numbered, paged, random_call, refused
from scenes import assert_same

from kvkit import Rope, formats
from kvkit.cache import Cache, DynamicLayer, KVView, OutOfBlocksError, PagedCache, load
from kvkit.reference import cache as reference


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(("layout", "bit"), [(0, 8), (1, 0), (2, 8), (3, 0)])
def test_updates_give_all_tokens_back(layout, bit, rng):
    """Through as many layers as there are; lengths and mask sizes are those of each layer."""
    cache = PagedCache(16, P, 3, 2, 8, np.float32, quant_bit=bit, cache_layout=layout)
    whole = [[np.zeros((2, 2, 0, 8), np.float32)] * 2 for _ in range(3)]
    length = 0
    for new in (5, 1, 0, 1, 9):
        for i in range(3):
            states = [normal(rng, 2, 2, new, 8) for _ in range(2)]
            assert cache.get_mask_sizes(new, i) == (length + new, 0)
            views = cache.update(*states, i, None if i else np.arange(length, length + new))
            assert [cache.get_seq_length(j) for j in range(4)] == [
                length + new if j <= i else length if j < 3 else 0 for j in range(4)
            ]
            for side in (0, 1):
                whole[i][side] = np.concatenate([whole[i][side], states[side]], axis=2)
                view, want = views[side], whole[i][side]
                if bit:
                    want = np.array([stored(head) for head in want.reshape(-1, 8)]).reshape(want.shape)
                assert isinstance(view, KVView)
                assert (view.shape, view.dtype) == (want.shape, np.float32)
                np.testing.assert_array_equal(np.asarray(view), want)
                np.testing.assert_array_equal((cache.layers[i].keys, cache.layers[i].values)[side], want)
        length += new
    assert cache.get_max_length() == cache.layers[0].get_max_length() == -1
    assert len(cache) == len(cache.to_legacy_cache()) == 3
    np.testing.assert_array_equal(cache.to_legacy_cache()[2][1], cache.layers[2].values)


def stored(head):
    codes, scales = reference.quantize_heads(head, 8, 8)
    return reference.dequantize_heads(codes, scales.astype(np.float16), 8, np.dtype(np.float32))


SCALES = {"sides": [0.01, 0.02], "heads": [[[0.01, 0.02], [0.03, 0.04]]]}


@pytest.mark.parametrize("name", ["e4m3", "q8_0", "sides", "heads", "found"])
def test_formats(name, rng, tmp_path):
    """What comes back is what numpy makes of the format; files, copies and forks keep it."""
    how = {"scale": SCALES.get(name, name), "quant_group": 32, "scale_dtype": np.float32}
    shared, name, how = (None, name, {}) if name in ("e4m3", "q8_0") else (name, "e4m3", how)
    cache = PagedCache(16, P, 1, 2, 32, np.float16, quant_format=name, **how)
    states = [normal(rng, 2, 2, 7, 32, dtype=np.float16) for _ in range(2)]
    wanted = []
    for i, side in enumerate(states):  # [B, H, tokens, D]: scales of a token's head
        scale = {None: None, "found": "token"}.get(shared, SCALES.get(shared))
        if shared in SCALES:
            of_side = np.float32(scale).reshape(2, -1)[i]
            scale = np.ascontiguousarray(np.broadcast_to(of_side[:, None], (2, 2, 7)))
        arrays = formats.encode(side.astype(np.float32), name, scale=scale)
        wanted.append(formats.decode(arrays, name).astype(np.float16))
    for view, want in zip(cache.update(*states, 0), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(view), want)
    cache.save(tmp_path / "cache.npz")
    query = normal(rng, 2, 4, 1, 32, dtype=np.float16)
    output = cache.attend(query, 0)
    for again in (load(tmp_path / "cache.npz"), copy.deepcopy(cache)):
        np.testing.assert_array_equal(again.attend(query, 0), output)
    cache.reorder([1, 0])
    np.testing.assert_array_equal(cache.layers[0].keys, wanted[0][[1, 0]])


def test_views_become_arrays(rng):
    cache = PagedCache(4, P, 1, 1, 4, np.float16)
    key = normal(rng, 1, 1, 3, 4, dtype=np.float16)
    keys, values = cache.update(key, 2 * key, 0)
    assert np.asarray(keys).flags.c_contiguous
    np.testing.assert_array_equal(np.asarray(values, np.float32), 2 * key.astype(np.float32))
    np.testing.assert_array_equal(np.concatenate([keys, values], axis=2)[:, :, :3], key)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(keys, copy=False)


def test_views_are_valid_until_their_layer_changes():
    cache = PagedCache(8, 2, 2, 1, 1, np.float32)
    views = [cache.update(numbered(1, 2, 3), numbered(1, 2, 3), i)[0] for i in (0, 1)]
    cache.update(numbered(4), numbered(4), 0)
    assert np.asarray(views[1]).ravel().tolist() == [1, 2, 3]
    assert "an older one" in refused(np.asarray, views[0])
    view = cache.update(numbered(4), numbered(4), 1)[0]
    assert "an older one" in refused(np.asarray, views[1])
    assert np.asarray(view).ravel().tolist() == [1, 2, 3, 4]
    cache.crop(-1)
    assert "an older one" in refused(np.asarray, view)
    for i in (0, 1):
        cache.update(numbered(5), numbered(5), i)
    assert "an older one" in refused(np.asarray, view)


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
    cache.reset()
    assert cache.blocks.available == 32
    cache.update(numbered(7), numbered(7), 0)
    assert contents(cache) == [[7]]


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


COPIES = [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]


def go_on(cache, states):
    """Complete the step that layer 0 is in, and run another one; return the results of attention."""
    results = []
    for layers in (range(1, LAYERS), range(LAYERS)):
        for i in layers:
            cache.update(*states, i)
        results += [cache.attend(states[0], i) for i in range(LAYERS)]
    return results


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_copy_goes_on_by_itself(copied, kind):
    """Made in a step, between two layers; the step after it copies blocks that rows share."""
    states = np.random.default_rng(0).standard_normal((2, 2, 2, 3, 16)).astype(KINDS[kind][0])
    cache = paged(kind)
    for i in range(LAYERS):
        cache.update(*states, i)
        cache.attend(states[0], i)
    cache.reorder([0, 0])
    cache.update(*states, 0)
    again, before = copied(cache), cache.cache.copy()
    results = go_on(again, -states)
    assert_same(cache.cache, before)
    for got, expected in zip(go_on(cache, -states), results, strict=True):
        assert_same(got, expected)
    assert_same(cache.cache, again.cache)
    assert again.cache is again.store.cache


ROPE = Rope(16)


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_lose_and_move_tokens_as_those_of_a_dynamic_cache(page_size, rng, tmp_path):
    """In all layers, or after an error in none; `can` has the sentence of the error."""
    paged_cache = PagedCache(400, page_size, LAYERS, 2, 16, np.float32, rope=ROPE)
    cache, done = Cache([DynamicLayer() for _ in range(LAYERS)], rope=ROPE), {"called": 0, "refused": 0}
    for each in (paged_cache, cache):
        for i in range(LAYERS):
            each.update(*np.random.default_rng(i).standard_normal((2, 2, 2, 5, 16), np.float32), i)
    for turn in range(120):
        rows, layer = paged_cache.rows, paged_cache.layers[-1]
        name, arguments, options = random_call(rng, rows.sequences[0])
        refusal = rows.can(name, *arguments, **options)
        assert (refusal is None) == (cache.can(name, *arguments, **options) is None)
        if refusal is None:
            for each in (rows, cache):
                getattr(each, name)(*arguments, **options)
        else:
            assert refused(getattr(rows, name), *arguments, **options) == refusal
        done["called" if refusal is None else "refused"] += 1
        if turn % 10 == 9:
            indices = rng.integers(0, layer.batch_size, 2)
            left = int(rng.integers(-1, 1)) if cache.get_seq_length() else 0
            for each in (paged_cache, cache):
                each.reorder(indices)
                each.crop(left)
        if turn % 40 == 39:
            paged_cache.save(tmp_path / "rows.npz")
            paged_cache = load(tmp_path / "rows.npz")
            paged_cache.rope = ROPE
        new = int(rng.integers(1, 7))
        for i in range(LAYERS):
            states = [normal(rng, 2, 2, new, 16) for _ in range(2)]
            assert paged_cache.get_mask_sizes(new, i) == cache.get_mask_sizes(new, i)
            query, layers = normal(rng, 2, 4, new, 16), (paged_cache.layers[i], cache.layers[i])
            for view, side in zip(paged_cache.update(*states, i), cache.update(*states, i), strict=True):
                np.testing.assert_allclose(np.asarray(view), side, atol=1e-5)
            ours, theirs = (
                (x.positions.tolist(), x.rope_shifts.tolist(), x.get_seq_length()) for x in layers
            )
            assert ours == theirs
            mask = [None, rng.random((2, ours[2])) < 0.8, normal(rng, 2, 1, new, len(ours[0]))][turn % 3]
            results = (x.attend(query, mask, softcap=2.0, return_lse=True) for x in layers)
            for ours, theirs in zip(*results, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert min(done.values()) > 10, done
    used = {block for seq in paged_cache.rows.sequences for block in seq.blocks}
    assert paged_cache.blocks.available == 400 - len(used)


def test_rows_of_codes_move_as_bytes_and_windows_count_positions(rng):
    cache = paged("int8")
    for i in range(LAYERS):
        cache.update(*(normal(rng, 2, 2, 12, 16) for _ in range(2)), i)
    keys, query = cache.layers[0].keys, normal(rng, 2, 4, 1, 16)
    cache.rows.remove(3, 6)
    np.testing.assert_array_equal(cache.layers[0].keys, keys[:, :, [0, 1, 2, *range(6, 12)]])
    assert "one without holes" in refused(cache.attend, query, 0, window=(6, -1))
    assert cache.attend(query, 0, window=(4, -1)).shape == query.shape
    assert "a layer that stores all" in refused(cache.to_legacy_cache)
    assert "calls of `rows` change all rows" in cache.can("shift", cache.rows.sequences[0], 0, None, 1)


def test_all_rows_have_room_or_none_changes(rng):
    cache = PagedCache(6, P, 1, 1, 4, np.float32)
    cache.update(*(normal(rng, 3, 1, 2 * P, 4) for _ in range(2)), 0)
    cache.reorder([0, 0, 1])  # two rows share blocks, so that each needs a block for tokens 2 and 3
    other, before = cache.blocks.add(), cache.layers[0].keys
    with cache.begin_step([(other, P)]) as step:
        step.update(*normal(rng, 2, P, 1, 4), 0)
    assert cache.rows.can("remove", 1, 2) is None
    with pytest.raises(OutOfBlocksError, match=r"2 .*1"):
        cache.rows.remove(1, 2)
    np.testing.assert_array_equal(cache.layers[0].keys, before)
    assert cache.blocks.available == 1
    cache.blocks.free(other)
    cache.rows.remove(1, 2)
    np.testing.assert_array_equal(cache.layers[0].keys, before[:, :, [0, *range(2, 8)]])
