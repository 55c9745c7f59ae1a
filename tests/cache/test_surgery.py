"""Tokens that are removed and moved: positions by a model of cells, attention by moved keys in float64."""

import copy
import time

import numpy as np
import pytest
from cell_model import exact

from kvkit import KvkitError, Rope
from kvkit.cache import (
    Cache,
    DynamicCache,
    DynamicLayer,
    PagedCache,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticCache,
    StaticSlidingWindowLayer,
    load,
)

ROPE = Rope(8)
ATTENDED = {"float32": 2e-6, "float16": 2e-3}


def tokens(count, heads=2, dim=8, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((1, heads, count, dim)).astype(dtype)


def filled(layer, count=8, dtype=np.float32):
    """Fill a layer with rotated keys; return the keys before rotation, and the values."""
    keys, values = tokens(count, seed=1, dtype=dtype), tokens(count, seed=2, dtype=dtype)
    layer.update(ROPE.rotate(keys, np.arange(count)), values)
    return keys, values


def test_the_vectors_of_llama_cpp_with_the_sign_of_a_division_that_means_what_it_says():
    layer = DynamicLayer()
    filled(layer)
    layer.remove(2, 5)
    assert layer.positions.tolist() == [0, 1, 5, 6, 7]
    layer.shift(5, None, -3, ROPE)
    assert layer.positions.tolist() == [0, 1, 2, 3, 4]
    assert layer.rope_shifts.tolist() == [[0, 2, 0], [2, 5, -3]]
    layer.divide(2, None, 2)
    assert layer.positions.tolist() == [0, 1, 1, 1, 2]
    assert layer.rope_shifts.tolist() == [[0, 2, 0], [2, 3, -4], [3, 5, -5]]
    layer.shift(0, None, -2)
    assert layer.positions.tolist() == [0]
    assert layer.rope_shifts.tolist() == [[0, 1, -7]]
    assert layer.get_seq_length() == 1


def test_the_vectors_of_attention_over_pieces():
    head, row, channel = np.meshgrid(np.arange(1), np.arange(8), np.arange(4), indexing="ij")
    keys = ((3 * row + 5 * head + 2 * channel + row * channel) % 7 - 3)[None].astype(np.float32)
    values = ((row + 2 * head + 3 * channel + row * channel * channel) % 5 - 2)[None].astype(np.float32)
    query = ((2 * row + channel + row * channel) % 5 - 2)[None, :, 7:].astype(np.float32)
    rope, closed, holed = Rope(4), DynamicLayer(), DynamicLayer()
    for layer in closed, holed:
        layer.update(keys, values)
        layer.remove(2, 5, close=layer is closed, rope=rope)
    output, lse = closed.attend(rope.rotate(query, 5), return_lse=True)
    np.testing.assert_allclose(output[0, 0, 0], [-1.25856, -1.057427, -1, 2], atol=1e-5)
    assert lse[0, 0, 0] == pytest.approx(np.logaddexp(2.931935, 2.750091), abs=1e-5)
    output = holed.attend(rope.rotate(query, 8))
    np.testing.assert_allclose(output[0, 0, 0], [-1.000435, -1.671774, -1, 2], atol=1e-5)
    assert (closed.get_seq_length(), holed.get_seq_length()) == (5, 8)
    assert (closed.get_mask_sizes(2), holed.get_mask_sizes(2)) == ((7, 0), (7, 3))


@pytest.mark.parametrize("dtype", ATTENDED)
@pytest.mark.parametrize("new", [1, 2, 5, 9])
@pytest.mark.parametrize("masked", ["no", "padding", "bool", "bias"])
def test_attention_is_that_over_moved_keys(dtype, new, masked):
    """Queries may reach back over the borders of pieces."""
    layer = DynamicLayer()
    keys, values = filled(layer, 12, dtype)
    layer.remove(2, 5, close=True, rope=ROPE)
    layer.remove(4, 6, close=True)
    more = tokens(2, seed=3, dtype=dtype)
    places, kept = np.arange(9), [0, 1, 5, 6, 9, 10, 11]
    layer.update(ROPE.rotate(more, [7, 8]), more)
    assert layer.positions.tolist() == places.tolist()
    keys, values = (np.concatenate((side[:, :, kept], more), 2) for side in (keys, values))
    raw = tokens(9, heads=4, seed=4, dtype=dtype)[:, :, 9 - new :]
    mask, visible = None, np.arange(9) != (3 if masked != "no" else -1)
    if masked == "padding":
        mask = visible[None]
    elif masked != "no":
        mask = visible[None, None, None]
        mask = np.where(mask, 0, -np.inf).astype(dtype) if masked == "bias" else mask
    query = ROPE.rotate(raw, places[9 - new :])
    output, lse = layer.attend(query, mask, return_lse=True)
    wide = ROPE.rotate(keys.astype(float), places)
    expected, total = exact(query, wide, values, visible)
    np.testing.assert_allclose(output, expected, atol=ATTENDED[dtype], rtol=0)
    np.testing.assert_allclose(lse, total, atol=ATTENDED[dtype], rtol=0)
    layer.flatten()
    assert layer.rope_shifts.tolist() == [[0, 9, 0]]
    np.testing.assert_allclose(layer.attend(query, mask), expected, atol=ATTENDED[dtype], rtol=0)


def test_steps_over_pieces_repeat_what_a_copy_computes():
    """A prepared launch follows longer contexts, masks and other pieces, for each row of a batch."""
    layer, batch = DynamicLayer(), 3
    rows = np.random.default_rng(0).standard_normal((2, batch, 2, 1300, 8)).astype(np.float32)
    layer.update(*rows[:, :, :, :900])
    layer.remove(4, 20, close=True, rope=ROPE)
    for at in range(900, 1300, 8):
        layer.update(*rows[:, :, :, at : at + 8])
        if at == 1100:
            layer.remove(100, 500, close=True)
        length, new = layer.get_seq_length(), 1 + at // 8 % 2
        seen = np.arange(length) % (3 + at // 8 % 5 + np.arange(batch)[:, None]) > 0
        query = rows[0, :, [0, 1, 1, 0], at : at + new].swapaxes(0, 1)
        for mask in None, seen:
            results = (one.attend(query, mask, return_lse=True) for one in (layer, copy.deepcopy(layer)))
            for output, fresh in zip(*results, strict=True):
                assert output.tobytes() == fresh.tobytes()


def test_pieces_that_another_rotation_moved_are_attended_to_by_it():
    layer, query = DynamicLayer(), tokens(1)
    filled(layer)
    layer.remove(2, 5, close=True, rope=ROPE)
    layer.attend(query)
    layer.flatten()
    layer.shift(2, None, 3)
    layer.flatten()
    layer.shift(2, None, -3, Rope(4))
    assert layer.rope_shifts.tolist() == [[0, 2, 0], [2, 5, -3]]
    assert layer.attend(query).tobytes() == copy.deepcopy(layer).attend(query).tobytes()


@pytest.mark.perf
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_step_over_two_pieces_costs_at_most_1_15_of_one_over_one(dtype):
    layers, query = [DynamicLayer(), DynamicLayer()], tokens(1, heads=9, dim=64, dtype=dtype)
    for layer, count in zip(layers, (8192, 8256), strict=True):
        layer.update(*[tokens(count, heads=3, dim=64, dtype=dtype)] * 2)
    layers[1].remove(4, 68, close=True, rope=Rope(64))
    times = np.zeros((600, 2))
    for turn in range(len(times)):
        for i in (0, 1) if turn % 2 else (1, 0):  # what slows the machine for a while slows both
            begin = time.perf_counter()
            layers[i].attend(query)
            times[turn, i] = time.perf_counter() - begin
    assert np.median(times[:, 1] / times[:, 0]) < 1.15


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_sinks_count_once_and_softcap_sees_moved_scores(softcap):
    layer = DynamicLayer()
    keys, values = filled(layer)
    layer.remove(2, 5, close=True, rope=ROPE)
    query, sinks = ROPE.rotate(tokens(1, heads=2, seed=4), 4), np.array([0.5, -1], np.float32)
    other = DynamicLayer()
    kept = [0, 1, 5, 6, 7]
    other.update(ROPE.rotate(keys[:, :, kept], np.arange(5)), values[:, :, kept])
    output, expected = (one.attend(query, softcap=softcap, sinks=sinks) for one in (layer, other))
    np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.parametrize(("new", "begin", "end"), [(1, 0, 128), (1, 128, 256), (1, 172, 300), (4, 128, 256)])
def test_whole_blocks_removed_leave_the_bits_of_a_mask(new, begin, end):
    """Later rows keep their places in blocks of 128 tokens, and the order in which they are added."""
    holed, whole = DynamicLayer(), DynamicLayer()
    for layer in holed, whole:
        filled(layer, 300)
    holed.remove(begin, end)
    query, mask = tokens(new, seed=4), np.ones((1, 300), bool)
    mask[:, begin:end] = False
    np.testing.assert_array_equal(holed.attend(query), whole.attend(query, mask))


def layers():
    """Return layers of 40 tokens by kind."""
    token = "uint4:g8"
    return {
        "dynamic": DynamicLayer(),
        "keys by channel": QuantizedLayer(key="kivi4:g4", value=token, residual_length=5, sink=3),
        "values by channel": QuantizedLayer(key=token, value="uint2:g8:channel", residual_length=5, sink=3),
        "blocks, rotated": QuantizedLayer("e4m3:g8+hadamard", residual_length=4),
        "window": SlidingWindowLayer(12),
        "static window": StaticSlidingWindowLayer(64, 12),
    }


def codes_of(layer, tokens):
    """Return the bytes that some tokens of a quantized layer lie in, with their scales."""
    found = []
    for side in layer.store.sides:
        for token in tokens:
            code = token - side.sink
            if 0 <= code < side.coded:
                found += [side.codes[:, :, code].tobytes(), side.cells[:, :, side.block_of[code]].tobytes()]
    return found


@pytest.mark.parametrize("kind", layers())
def test_attention_after_a_call_is_that_under_a_mask_and_codes_stay(kind):
    """A removal hides tokens, a shift of all changes nothing but where the query is."""
    moved, whole = layers()[kind], layers()[kind]
    keys, values = tokens(46, seed=1), tokens(46, seed=2)
    keys = ROPE.rotate(keys, np.arange(46))
    for layer in moved, whole:
        layer.update(keys[:, :, :33], values[:, :, :33])
        layer.update(keys[:, :, 33:40], values[:, :, 33:40])
        if hasattr(layer.store, "attend_to_codes"):
            layer.store.attend_to_codes()
        layer._release_undo()
    gone = np.zeros(46, bool)
    if moved.window is None:
        gone[[1, *range(6, 17), 20, 22, 38]] = True
        moved.retain(np.flatnonzero(~gone[:40]))
    else:
        gone[3:9] = True
        moved.remove(3, 9)
    kept = np.flatnonzero(~gone[:40])
    coded = isinstance(moved, QuantizedLayer)
    if coded:
        assert codes_of(moved, range(len(kept))) == codes_of(whole, kept) != []
        blocks = [len(np.unique(side.block_of[kept[(kept >= 3) & (kept < 3 + side.coded)] - 3]))
                  for side in whole.store.sides] if "channel" in kind else []  # fmt: skip
        assert [side.block_count for side in moved.store.sides][: len(blocks)] == blocks
    query = tokens(1, heads=4, seed=5)
    mask = ~gone[None, :40]
    near = {"atol": 1e-6, "rtol": 1e-6}
    np.testing.assert_allclose(moved.attend(query), whole.attend(query, mask), **near)
    before = codes_of(moved, range(len(kept))) if coded else None
    moved.shift(0, None, 7, ROPE)
    assert moved.get_seq_length() == 47
    later = ROPE.shift(query, 7)
    np.testing.assert_allclose(moved.attend(later), whole.attend(query, mask), atol=2e-6, rtol=1e-5)
    if coded:
        assert codes_of(moved, range(len(kept))) == before
        assert "codes are not rotated" in moved.can("flatten")
    for at in range(40, 46):  # a piece for the new tokens, and codes of older ones
        new = keys[:, :, at : at + 1], values[:, :, at : at + 1]
        moved.update(ROPE.shift(new[0], 7), new[1])
        whole.update(*new)
    if moved.window is not None or kind == "dynamic":
        np.testing.assert_allclose(moved.attend(later), whole.attend(query, ~gone[None]), atol=2e-6)
    assert moved.attend(later).shape == query.shape
    assert moved.get_seq_length() == 53


def check_keys(layer, raw, places, atol=1e-5):
    """Check that stored keys, moved by their shifts, are those of the places."""
    shifts = np.zeros(len(places), int)
    for begin, end, shift in layer.rope_shifts:
        shifts[begin:end] = shift
    keys = layer.keys[:, :, : len(places)]
    np.testing.assert_allclose(ROPE.shift(keys, shifts), ROPE.rotate(raw, places), atol=atol)


def test_a_ninth_piece_rotates_keys_in_memory():
    """The next token, which is not shifted, has a piece too."""
    layer, kept = DynamicLayer(), list(range(30))
    keys, _ = filled(layer, 30)
    for i in range(7):
        layer.remove(1 + 2 * i, 2 + 2 * i, close=True, rope=ROPE)
        kept.pop(1 + 2 * i)
        assert len(layer.rope_shifts) == (i + 2 if i < 6 else 1)
    assert layer.rope_shifts.tolist() == [[0, 23, 0]]
    np.testing.assert_allclose(layer.keys, ROPE.rotate(keys[:, :, kept], np.arange(23)), atol=1e-6)


def test_a_static_layer_closes_up_and_has_its_room_again():
    cache = StaticCache(8, 1)
    keys, _ = filled(cache.layers[0])
    with pytest.raises(KvkitError, match="close=True"):
        cache.remove(2, 5)
    cache.remove(2, 5, close=True, rope=ROPE)
    layer = cache.layers[0]
    assert not layer.store.keys[:, :, 5:].any()
    assert not layer.store.values[:, :, 5:].any()
    assert cache.get_mask_sizes(1, 0) == (8, 0)
    new = tokens(3, seed=9)
    cache.update(ROPE.rotate(new, [5, 6, 7]), new, 0, cache_position=np.arange(5, 8))
    cache.update(ROPE.rotate(new[:, :, :1], [3]), new[:, :, :1], 0, cache_position=[3])  # back into a piece
    assert layer.rope_shifts.tolist() == [[0, 2, 0], [2, 3, -3], [3, 4, 0]]
    check_keys(layer, np.concatenate((keys[:, :, [0, 1, 5]], new[:, :, :1]), 2), range(4))
    cache.reset()
    assert layer.positions.tolist() == []


@pytest.mark.parametrize(
    "cache", [DynamicCache(1), PagedCache(8, 4, 1, 2, 8, np.float32)], ids=["dynamic", "paged"]
)
def test_columns_of_a_mask_are_rows_where_positions_have_holes(cache):
    layer = cache.layers[0]
    filled(layer)
    getattr(cache, "rows", cache).remove(3, 5)
    visible = np.array([[True] * 5 + [False] * 2 + [True]])  # by position
    by_row = layer.attend(tokens(1), visible[:, None, None, [0, 1, 2, 5, 6, 7]])
    assert layer.attend(tokens(1), visible).tobytes() == by_row.tobytes()
    for count in 7, 8:
        with pytest.raises(KvkitError, match=r"attn_mask: expected bool \[1, 8\], or .*, 6\], got"):
            layer.attend(tokens(1), visible[:, None, None, :count])


def test_crop_update_and_masks_count_positions():
    cache = DynamicCache(2, rope=["none", ROPE])
    for layer in cache.layers:
        filled(layer)
    cache.remove(3, 5)
    cache.shift(5, None, 10)
    assert [layer.rope_shifts.tolist() for layer in cache.layers] == [[[0, 6, 0]], [[0, 3, 0], [3, 6, 10]]]
    assert cache.get_seq_length() == 18
    with pytest.raises(KvkitError, match="positions from 18 on"):
        cache.update(tokens(1), tokens(1), 0, cache_position=[6])
    for i in range(2):
        cache.update(tokens(1), tokens(1), i, cache_position=[18])
    cache.crop(17)
    assert cache.layers[1].positions.tolist() == [0, 1, 2, 15, 16]
    cache.crop(-16)
    assert cache.layers[1].positions.tolist() == [0]
    assert cache.layers[1]._row_positions is None  # the fast path again
    cache.shift(0, None, 2)
    with pytest.raises(KvkitError, match="attn_mask"):
        cache.attend(tokens(1), 1, np.ones((1, 2), bool))


def test_all_layers_change_or_none():
    cache = Cache([DynamicLayer(), SlidingWindowLayer(16)])
    for layer in cache.layers:
        filled(layer)
    assert "no hole in its window of 16" in cache.can("remove", 6, 7)
    with pytest.raises(KvkitError, match="layers\\[1\\]"):
        cache.remove(6, 7)
    assert cache.layers[0].stored_tokens == 8
    cache.remove(7)
    assert [layer.get_seq_length() for layer in cache.layers] == [7, 7]


@pytest.mark.parametrize(
    ("call", "arguments", "sentence"),
    [
        ("remove", (3, 2), "end"), ("remove", (-1,), "begin"),
        ("retain", ([3, 9],), "positions that are stored, got 9"), ("retain", ([3, 3],), "each once"),
        ("shift", (0, 4, 1), "ascending positions|stay ascending"),
        ("shift", (4, None, -1), "stay ascending"), ("shift", (0, 4, "a"), "delta"),
        ("divide", (0, 4, 1), "d: expected"), ("divide", (4, None, 2), "stay ascending"),
        ("shift", (0, None, 1, "half"), "how keys were rotated"),
        ("shift", (0, None, 1, Rope(16)), "at most 8 rotated elements"),
        ("shift", (4, 8, 8, Rope(8, 5e5)), "the rotation of earlier shifts"),
    ],
)  # fmt: skip
def test_illegal_calls_are_refused_and_change_nothing(call, arguments, sentence):
    layer = DynamicLayer()
    filled(layer)
    layer.rope = ROPE
    if "earlier" in sentence:
        layer.shift(0, None, 1)
    state = layer._row_positions
    options = {"rope": arguments[3]} if len(arguments) > 3 else {}
    with pytest.raises(KvkitError, match=sentence) as error:
        getattr(layer, call)(*arguments[:3], **options)
    assert layer.can(call, *arguments[:3], **options) == str(error.value) == layer.can(call, *arguments)
    assert layer._row_positions is state
    with pytest.raises(KvkitError, match="one of remove, retain"):
        layer.can("update")


def test_what_is_not_there_is_refused_in_a_sentence():
    paged = PagedCache(8, 4, 1, 2, 8, np.float32)
    assert "in all layers: PagedCache.rows.shift, or PagedCache.shift(seq, ...)" in paged.layers[0].can(
        "shift", 0, None, 1
    )
    cache = DynamicCache(1, rope=ROPE)
    filled(cache.layers[0])
    cache.remove(2, 3)
    with pytest.raises(KvkitError, match="stores all its tokens"):
        cache.to_legacy_cache()
    cache = Cache([DynamicLayer(), SlidingWindowLayer(4)])
    cache.activate_past_recording()
    for layer in cache.layers:
        filled(layer)
    assert "no past that is recorded" in cache.can("remove", 2, 3)
    assert cache.can("remove", 5) is None  # a crop


@pytest.mark.parametrize("rope", [ROPE, Rope(8, scaling={"rope_type": "linear", "factor": 2.0}), "none"])
def test_files_say_how_keys_were_rotated(tmp_path, rope):
    cache = DynamicCache(2, rope=rope)
    for layer in cache.layers:
        filled(layer)
    cache.save(tmp_path / "plain.npz")
    plain = load(tmp_path / "plain.npz")
    assert plain.layers[0]._row_positions is None
    assert [layer.rope for layer in plain.layers] == [rope, rope]
