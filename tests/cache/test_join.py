"""Joined caches, against float64 over keys that are rotated at their new places."""

import copy

import numpy as np
import pytest

from kvkit import KvkitError, Rope
from kvkit.cache import (
    Cache,
    ChunkedLayer,
    DynamicCache,
    DynamicLayer,
    GatedDeltaLayer,
    IndexedLayer,
    LatentLayer,
    PagedCache,
    QuantizedLayer,
    QuantSpec,
    SharedLayer,
    SlidingWindowLayer,
    StateLayer,
    StaticLayer,
    load,
)

HEADS, DIM = 2, 16
ROPE = Rope(DIM, theta=1e4)
BY_TOKEN, BY_CHANNEL, TURNED = map(QuantSpec, ("uint8:g16", "uint8:channel:g4", "uint8:g16+hadamard"))
KINDS = {
    "dynamic": DynamicLayer,
    "static": lambda: StaticLayer(120),
    "window": lambda: SlidingWindowLayer(40),
    "chunks": lambda: ChunkedLayer(200),
    "codes": lambda: QuantizedLayer(key=BY_TOKEN, value=BY_TOKEN, residual_length=5, sink=2),
    "codes, no sinks": lambda: QuantizedLayer(key=BY_TOKEN, value=BY_TOKEN, residual_length=0, sink=0),
    "channels": lambda: QuantizedLayer(key=BY_CHANNEL, value=BY_TOKEN, residual_length=6, sink=2),
    "rotated codes": lambda: QuantizedLayer(key=TURNED, value=TURNED, residual_length=4, sink=2),
}
CODED = "codes", "codes, no sinks", "channels", "rotated codes"
LENGTHS = 23, 17, 3, 30


def states(rng, *lengths):
    """Return (keys before rotation, values) of each fragment."""
    return [rng.standard_normal((2, 2, HEADS, count, DIM)).astype(np.float32) for count in lengths]


def filled(kind, fragment, rope=ROPE):
    cache = Cache([KINDS[kind]()], rope=rope)
    key, value = fragment
    at = 0
    for count in (key.shape[2] // 2, key.shape[2] - key.shape[2] // 2):
        new = slice(at, at + count)
        cache.update(ROPE.rotate(key[:, :, new], np.arange(at, at + count)), value[:, :, new], 0)
        at += count
    return cache


def exact(rng_query, keys, values, window=None):
    """Return attention of a query behind all keys, in float64; keys are rotated at 0, 1, 2, ..."""
    count = keys.shape[2]
    heads = np.arange(2 * HEADS) // 2
    turned = ROPE.rotate(keys.astype(np.float64), np.arange(count))[:, heads]
    query = ROPE.rotate(rng_query.astype(np.float64), np.array([count - 1]))
    scores = (query @ turned.swapaxes(2, 3)) * DIM**-0.5
    if window is not None:
        scores[..., : count - window] = -np.inf
    weights = np.exp(scores - scores.max(3, keepdims=True))
    return weights / weights.sum(3, keepdims=True) @ values[:, heads]


def check(cache, rng, keys, values, atol):
    """Check positions, and attention of the last token."""
    layer, count = cache.layers[0], keys.shape[2]
    assert cache.get_seq_length() == count
    assert layer.positions.tolist() == list(range(count))[-layer.stored_tokens :]
    for _ in range(2):
        query = rng.standard_normal((2, 2 * HEADS, 1, DIM)).astype(np.float32)
        found = cache.attend(ROPE.rotate(query, np.array([count - 1])), 0)
        window = layer.window if layer.chunk_size is None else None
        np.testing.assert_allclose(found, exact(query, keys, values, window), atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_fragments_behind_one_another(rng, kind, tmp_path):
    parts = states(rng, *LENGTHS)
    cache = filled(kind, parts[0])
    atol = 0.05 if kind in CODED else 3e-6
    for i, part in enumerate(parts[1:], 2):
        other = filled(kind, part)
        before = [array.tobytes() for array in other.layers[0]._arrays().values()]
        cache.append(other)
        assert [array.tobytes() for array in other.layers[0]._arrays().values()] == before
        keys, values = (np.concatenate([each[side] for each in parts[:i]], 2) for side in (0, 1))
        check(cache, rng, keys, values, atol)
    assert len(cache.layers[0].rope_shifts) == (3 if kind == "window" else len(parts))
    new = rng.standard_normal((2, 2, HEADS, 4, DIM)).astype(np.float32)  # the model goes on
    count = keys.shape[2]
    cache.update(ROPE.rotate(new[0], np.arange(count, count + 4)), new[1], 0)
    keys, values = np.concatenate((keys, new[0]), 2), np.concatenate((values, new[1]), 2)
    check(cache, rng, keys, values, atol)
    cache.save(tmp_path / "cache.npz")
    check(load(tmp_path / "cache.npz"), rng, keys, values, atol)
    if kind != "window":
        cache.crop(-3)
        check(cache, rng, keys[:, :, :-3], values[:, :, :-3], atol)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("window", "chunks")])
@pytest.mark.parametrize("at", [0, 1, 2, 9, 20, 22])
def test_a_fragment_between_tokens(rng, kind, at):
    first, second = states(rng, 23, 17)
    cache = filled(kind, first)
    cache.append(filled(kind, second), at)
    keys, values = (
        np.concatenate((first[side][:, :, :at], second[side], first[side][:, :, at:]), 2) for side in (0, 1)
    )
    check(cache, rng, keys, values, 0.05 if kind in CODED else 3e-6)
    cache.remove(at, at + 17, close=True)
    check(cache, rng, *first, 0.05 if kind in CODED else 3e-6)


def test_codes_are_copied_as_bytes(rng):
    first, second = (filled("channels", part) for part in states(rng, 23, 30))
    own, theirs = (each.layers[0]._arrays() for each in (first, second))
    first.append(second)
    joined = first.layers[0]._arrays()
    for name in "keys.codes", "values.codes":
        a, b = own[name].shape[2], theirs[name].shape[2]
        assert joined[name][:, :, :a].tobytes() == own[name].tobytes()
        assert joined[name][:, :, -b:].tobytes() == theirs[name].tobytes()
        assert joined[name].shape[2] == 23 - 2 + 2 + b  # tails and sinks between them are codes now
    assert joined["keys.tail"].tobytes() == theirs["keys.tail"].tobytes()
    assert (np.diff(joined["keys.ends"], prepend=0) <= 4).all()


@pytest.mark.parametrize("kind", ["dynamic", "static", "codes"])
def test_more_fragments_than_pieces(rng, kind):
    """Floats are rotated in memory, codes are not."""
    parts = states(rng, *[5] * 12)
    cache, refused = filled(kind, parts[0]), 0
    for part in parts[1:]:
        other = filled(kind, part)
        if kind == "codes" and (why := cache.can("append", other)) is not None:
            with pytest.raises(KvkitError, match="at most 8 pieces of rope shifts") as error:
                cache.append(other)
            assert str(error.value) == why
            refused += 1
            continue
        cache.append(other)
    assert refused == (5 if kind == "codes" else 0)
    count = len(parts) - refused
    keys, values = (np.concatenate([each[side] for each in parts[:count]], 2) for side in (0, 1))
    check(cache, rng, keys, values, 0.05 if kind == "codes" else 3e-6)


def test_latent_rows(rng):
    rope = Rope(8)
    rows = [rng.standard_normal((2, 1, 1, count, 8)).astype(np.float32) for count in (9, 6)]
    query = rng.standard_normal((2, 1, 4, 1, 8)).astype(np.float32)
    whole, first, second = (Cache([LatentLayer(8, 8)], rope=rope) for _ in range(3))
    latent, rotated = (np.concatenate(sides, 2) for sides in zip(*rows, strict=True))
    whole.update(latent, rope.rotate(rotated, np.arange(15)), 0)
    for cache, (part, key) in zip((first, second), rows, strict=True):
        cache.update(part, rope.rotate(key, np.arange(part.shape[2])), 0)
    first.append(second)
    asked = query[0], rope.rotate(query[1], np.array([14]))
    np.testing.assert_allclose(
        first.attend(asked, 0, softmax_scale=0.3), whole.attend(asked, 0, softmax_scale=0.3), atol=3e-6
    )
    codes = Cache([LatentLayer(512, 64, "ds_mla")], rope=Rope(64))
    codes.update(*(np.ones((1, 1, 3, dim), np.float32) for dim in (512, 64)), 0)
    assert "codes cannot be rotated" in codes.can("append", copy.deepcopy(codes))
    assert codes.can("append", copy.deepcopy(codes), rope="none") == (
        "rope: expected one rotation of all keys, none, got " + f"{codes.layers[0].rope} of the other ones"
    )


def test_layers_of_many_kinds_are_joined_whole_or_not_at_all(rng):
    def make(count):
        cache = Cache([DynamicLayer(), SlidingWindowLayer(9), SharedLayer(0)], rope=ROPE)
        for i in range(2):
            cache.update(*rng.standard_normal((2, 1, HEADS, count, DIM)).astype(np.float32), i)
        return cache

    first = make(30)
    first.append(make(5))
    assert [layer.get_seq_length() for layer in first.layers] == [35] * 3
    assert first.layers[1].stored_tokens == 8
    slid = make(12)
    said = first.can("append", slid)
    assert said.startswith("other: expected all tokens of a window of 9, before the first has left it")
    with pytest.raises(KvkitError) as error:
        first.append(slid)
    assert str(error.value) == said
    assert [layer.get_seq_length() for layer in first.layers] == [35] * 3


def test_what_cannot_be_joined(rng):
    part, other = states(rng, 6, 4)
    cache = filled("dynamic", part)
    ragged = DynamicCache(1, rope="none")
    ragged.update(*part, 0)
    ragged.compress("knorm", budget=[[2, 4]])
    state = Cache([StateLayer()])
    state.update({"s": np.ones((2, 3), np.float32)}, 3, 0)
    for target, source, options, why in (
        (cache, cache, {}, "other: expected another cache of layers .* got the cache itself"),
        (cache, None, {}, "other: expected another cache of layers"),
        (cache, PagedCache(4, 4, 1, HEADS, DIM, np.float32), {}, "of pages"),
        (cache, Cache([DynamicLayer(), DynamicLayer()]), {}, "other: expected a cache of 1 layers, got 2"),
        (cache, filled("static", other), {}, "other: expected a layer of one kind and format"),
        (filled("codes", part), filled("channels", other), {}, "other: expected a layer of one kind"),
        (cache, filled("dynamic", other, Rope(DIM, 5.0)), {}, "rope: expected one rotation of all keys"),
        (cache, filled("dynamic", [x[:1] for x in other]), {}, "other: expected rows of"),
        (cache, filled("dynamic", other), {"at": 7}, "at: expected an integer from 0 to 6"),
        (filled("dynamic", part, None), filled("dynamic", other, None), {}, "rope: expected how keys"),
        (filled("window", part), filled("window", other), {"at": 3}, "at: expected 6, the end"),
        (state, copy.deepcopy(state), {}, "a recurrent state, which has no rows"),
        (Cache([GatedDeltaLayer(2, 4, 4, 16, 4)]), state, {}, "a recurrent state, which has no rows"),
        (ragged, copy.deepcopy(ragged), {}, "heads that keep different tokens"),
    ):
        length = target.get_seq_length()
        said = target.can("append", source, **options)
        with pytest.raises(KvkitError, match=why) as error:
            target.append(source, **options)
        assert str(error.value) == said
        assert target.get_seq_length() == length
    indexed = Cache([IndexedLayer(LatentLayer(8, 8), 4)], rope=Rope(8))
    indexed.update(*np.ones((2, 1, 1, 3, 8), np.float32), 0)
    assert "index keys are rotated" in indexed.can("append", copy.deepcopy(indexed))


def test_empty_caches(rng):
    (part,) = states(rng, 6)
    for kind in KINDS:
        cache, full = Cache([KINDS[kind]()], rope=ROPE), filled(kind, part)
        full.append(Cache([KINDS[kind]()], rope=ROPE))
        check(full, rng, *part, 0.05 if kind in CODED else 3e-6)
        cache.append(full)
        check(cache, rng, *part, 0.05 if kind in CODED else 3e-6)
        assert cache.layers[0].rope_shifts.tolist() == [[0, 6, 0]]


# Sequences in blocks


def grown(cache, seq, fragment, at=0):
    key, value = (side[0].swapaxes(0, 1) for side in fragment)  # [tokens, heads, dim]
    count = len(key)
    turned = ROPE.rotate(key.swapaxes(0, 1), np.arange(at, at + count)).swapaxes(0, 1)
    with cache.begin_step([(seq, count)]) as step:
        step.update(turned, value, 0)


@pytest.mark.parametrize("at", [None, 0, 3, 4, 8, 9])
@pytest.mark.parametrize("options", [{}, {"quant_bit": 8}])
def test_sequences_in_blocks(rng, at, options):
    first, second, more = states(rng, 10, 7, 3)
    cache = PagedCache(60, 4, 1, HEADS, DIM, np.float32, rope=ROPE, **options)
    one, two = cache.blocks.add(list(range(10))), cache.blocks.add(list(range(50, 57)))
    grown(cache, one, first)
    grown(cache, two, second)
    assert cache.can("append", one, two, at) is None
    cache.append(one, two, at)
    place = 10 if at is None else at
    ids = list(range(10))
    assert one.token_ids.tolist() == ids[:place] + list(range(50, 57)) + ids[place:]
    assert one.positions.tolist() == list(range(17))
    grown(cache, one, more, 17)
    grown(cache, two, more, 7)
    head, tail = ([side[:, :, part] for side in first] for part in (slice(place), slice(place, None)))
    for seq, parts in (one, (head, second, tail, more)), (two, (second, more)):
        keys, values = (np.concatenate([part[side] for part in parts], 2)[:1] for side in (0, 1))
        count = keys.shape[2]
        query = rng.standard_normal((1, 2 * HEADS, 1, DIM)).astype(np.float32)
        new = rng.standard_normal((2, 1, HEADS, 1, DIM)).astype(np.float32)
        grown_query = ROPE.rotate(query, np.array([count]))[0].swapaxes(0, 1)
        turned = ROPE.rotate(new[0], np.array([count]))[0].swapaxes(0, 1)
        with cache.begin_step([(seq, 1)]) as step:
            step.update(turned, new[1][0].swapaxes(0, 1), 0)
            found = step.attend(grown_query, 0)
        keys, values = np.concatenate((keys, new[0]), 2), np.concatenate((values, new[1]), 2)
        wanted = exact(query, keys, values)[0].swapaxes(0, 1)
        np.testing.assert_allclose(found, wanted, atol=0.05 if options else 3e-6)
    references = cache.blocks.references
    for seq in (one, two):
        cache.blocks.free(seq)
    assert cache.blocks.references.sum() == 0
    assert references.max() <= 2


def test_blocks_are_shared_and_common_ones_refused(rng):
    first, second = states(rng, 8, 8)
    cache = PagedCache(60, 4, 1, HEADS, DIM, np.float32, rope=ROPE)
    one, two = cache.blocks.add(), cache.blocks.add()
    grown(cache, one, first)
    grown(cache, two, second)
    free = cache.blocks.available
    branch = cache.blocks.fork(one)
    cache.append(one, two)
    assert cache.blocks.available == free
    assert one.blocks == branch.blocks + two.blocks
    said = cache.can("append", one, branch)
    assert "without a common block" in said
    with pytest.raises(KvkitError, match="without a common block"):
        cache.append(one, branch)
    assert cache.can("append", one, cache).startswith("seq: expected a live sequence")
    with cache.begin_step([(one, 1)]) as step:
        assert "between steps" in cache.can("append", branch, two)
        step.update(*np.ones((2, 1, HEADS, DIM), np.float32), 0)


@pytest.mark.parametrize("at", [None, 0, 2])
def test_index_keys_come_with_their_rows(rng, at):
    caches = [Cache([IndexedLayer(LatentLayer(8, 8), 4)], rope="none") for _ in "ab"]
    own = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    for cache, keys in zip(caches, own, strict=True):
        cache.update(*np.ones((2, 2, 1, 3, 8), np.float32), 0)
        cache.layers[0].update_index(keys)
    caches[0].append(caches[1], at)
    expected = np.insert(own[0], [3 if at is None else at] * 3, own[1], axis=1)
    np.testing.assert_array_equal(caches[0].layers[0].index_keys, expected)


@pytest.mark.parametrize("make", [SlidingWindowLayer, ChunkedLayer])
def test_a_layer_without_tokens_changes_nothing_of_a_window_of_one(make, rng):
    layer, new = make(1), rng.standard_normal((1, 2, 1, DIM), np.float32)
    layer.update(new, new)
    before = layer.attend(new)
    layer.append(make(1), rope="none")
    np.testing.assert_array_equal(layer.attend(new), before)
    layer.update(new[:, :, :0], new[:, :, :0])
    with pytest.raises(KvkitError, match="at: expected 1, the end of a layer with a window, got 0"):
        layer.append(make(1), at=0, rope="none")
