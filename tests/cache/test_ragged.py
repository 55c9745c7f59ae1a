"""Layers whose heads keep different tokens, beside attention that hides from each head what it lost."""

import copy

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError, Rope, cpu, eviction
from kvkit.cache import (
    Cache,
    DynamicCache,
    DynamicLayer,
    QuantizedLayer,
    SharedLayer,
    SlidingWindowLayer,
    StaticLayer,
    load,
)

ROPE, B, HEADS, GROUP, DIM = Rope(8), 2, 3, 2, 16


def normal(tokens, heads=HEADS, seed=0, dtype=np.float32, batch=B):
    return np.random.default_rng(seed).standard_normal((batch, heads, tokens, DIM)).astype(dtype)


def masked(query, keys, values, positions, shown=None, sinks=None, softcap=0.0):
    """Return float64 outputs and lse of the last queries, which see some of a head's keys."""
    new, tokens, group = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    keys, values = (np.repeat(side.astype(float), group, 1) for side in (keys, values))
    scores = query.astype(float) @ keys.swapaxes(2, 3) * query.shape[3] ** -0.5
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    hidden = np.ones(scores.shape, bool)
    for b, head in np.ndindex(scores.shape[:2]):
        own = positions[b, head // group]
        hidden[b, head, :, own[own >= 0]] = False
    hidden |= np.arange(tokens) > tokens - new + np.arange(new)[:, None]
    if shown is not None:
        hidden |= ~shown[:, None, None]
    scores[hidden] = -np.inf
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(float)[:, None, None] - top)
    return weights / total @ values, (np.log(total) + top)[..., 0], (weights / total).sum(2)


class Scene:
    """Holds a cache of one layer beside all tokens that were appended to it."""

    def __init__(self, tokens=90, dtype=np.float32, **options):
        self.cache, self.dtype, self.steps = Cache([DynamicLayer()], rope=ROPE), dtype, 0
        self.keys = self.values = np.empty((B, HEADS, 0, DIM), dtype)
        self.decode(tokens)
        if options:
            self.report = self.cache.compress("knorm", **options)

    @property
    def layer(self):
        return self.cache.layers[0]

    def decode(self, count):
        self.steps += 1
        new = [normal(count, seed=10 * self.steps + i, dtype=self.dtype) for i in b"ab"]
        self.keys, self.values = (
            np.concatenate(both, 2) for both in zip((self.keys, self.values), new, strict=True)
        )
        return self.cache.update(*new, 0)

    def check(self, new=1, tolerance=2e-6, **options):
        """Check attention of the last tokens by all keys under a mask for each head."""
        query = normal(new, HEADS * GROUP, seed=5, dtype=self.dtype)
        out, lse = self.cache.attend(query, 0, options.get("shown"), return_lse=True, **{
            name: given for name, given in options.items() if name != "shown"})  # fmt: skip
        expected, expected_lse, _ = masked(query, self.keys, self.values, self.layer.positions, **options)
        np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=max(tolerance, 5e-6))


def test_the_vector_of_ada():
    h, s, c = np.meshgrid(range(2), range(8), range(4), indexing="ij")
    keys = ((3 * s + 5 * h + 2 * c + s * c) % 7 - 3).astype(np.float32)[None]
    values = ((s + 2 * h + 3 * c + s * c * c) % 5 - 2).astype(np.float32)[None]
    a, i, c = np.meshgrid(range(4), range(8), range(4), indexing="ij")
    queries = ((2 * i + 3 * a + c + i * c) % 5 - 2).astype(np.float32)[None]
    cache = DynamicCache()
    cache.update(keys, values, 0)
    report = cache.compress("snapkv", keep=0.5, budget="ada", queries=[queries], window=2, kernel=3)
    assert (report.tokens_before, report.tokens) == ([8], [[[3, 5]]])
    assert (report.bytes_before, report.bytes_after) == (2 * 16 * 16, 8 * 2 * 16)
    assert cache.layers[0].positions.tolist() == [[[2, 6, 7, -1, -1], [0, 1, 2, 6, 7]]]
    out = cache.attend(queries[:, :, -1:], 0)[0, :, 0]
    np.testing.assert_allclose(out[0], [-0.000045, -0.000091, -1, 2], atol=1e-6)
    np.testing.assert_allclose(out[2], [1.000273, 0.000546, 1, -1], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_is_that_under_a_mask_for_each_head_and_goes_on(dtype):
    scene = Scene(dtype=np.dtype(dtype), keep=0.3, budget="ada")
    tolerance = 2e-6 if dtype == "float32" else 2e-3
    scores = eviction.scores("knorm", scene.keys)
    kept = eviction.select(scores, keep=0.3, budget="ada")
    lengths = scene.layer.lengths
    assert len(set(lengths.ravel().tolist())) > 2
    np.testing.assert_array_equal(lengths.ravel(), np.diff(kept.starts))
    np.testing.assert_array_equal(scene.layer.positions[scene.layer.positions >= 0], kept.rows)
    for count in (1, 1, 3, 20, 1, 40, 1):
        keys, values = scene.decode(count)
        scene.check(count, tolerance)
        scene.check(1, tolerance)
    assert keys.shape == (B, HEADS, scene.layer.lengths.max(), DIM)
    own = scene.layer.positions
    for side, whole in ((keys, scene.keys), (values, scene.values)):
        dense = np.take_along_axis(whole, np.maximum(own, 0)[..., None], 2)
        np.testing.assert_array_equal(np.asarray(side), np.where(own[..., None] >= 0, dense, 0))
    assert scene.cache.get_seq_length() == scene.keys.shape[2]


def test_steps_run_the_launch_of_the_first(monkeypatch):
    """It is prepared again only where pages move or the work is split otherwise."""
    scene, made, prepare = Scene(keep=0.3, budget="ada"), [], cpu.attention.prepare.prepare_attention
    monkeypatch.setattr(
        cpu.attention.prepare,
        "prepare_attention",
        lambda *given, **more: made.append(1) or prepare(*given, **more),
    )
    for step in range(40):
        scene.decode(1)
        scene.check(shown=None if step % 3 else np.arange(91 + step) % 7 > np.array([[1], [3]]))
    assert 0 < len(made) <= 5


def test_sinks_caps_padding_and_weights_of_keys():
    scene = Scene(budget=[[7, 70, 30]])
    scene.decode(3)
    sinks, shown = np.linspace(-2, 2, HEADS * GROUP).astype(np.float32), np.ones((B, 93), bool)
    shown[1, :20] = False
    for new in (1, 3):
        scene.check(new, sinks=sinks)
        scene.check(new, shown=shown, sinks=sinks, softcap=3.0)
        query = normal(new, HEADS * GROUP)
        sums = scene.cache.attend(query, 0, return_key_weights=True)[1]
        expected = masked(query, scene.keys, scene.values, scene.layer.positions)[2]
        own = np.repeat(scene.layer.positions, GROUP, 1)
        dense = np.where(own >= 0, np.take_along_axis(expected, np.maximum(own, 0), 2), 0)
        np.testing.assert_allclose(sums, dense, rtol=1e-5, atol=1e-6)


def test_memory_is_freed_by_head():
    scene = Scene(2000, budget=[[20, 1000, 100]])
    assert scene.report.bytes_after == scene.layer.nbytes == B * 1120 * DIM * 8
    assert scene.report.bytes_before == B * HEADS * 2000 * DIM * 8
    assert scene.layer.pool.cache.nbytes < 1.15 * scene.report.bytes_after
    scene.cache.retain(scene.layer.positions[:, :, :20])
    assert scene.layer.pool.cache.nbytes < 3 * scene.layer.nbytes
    assert scene.layer.lengths.tolist() == [[20] * 3] * B


BUDGETS = {
    "uniform": ({"keep": 0.25, "per_head": True}, lambda scores: eviction.select(scores, keep=0.25)),
    "ada": ({"keep": 0.25, "budget": "ada"}, lambda scores: eviction.select(scores, keep=0.25, budget="ada")),
    "counts": ({"budget": [[1, 2, 3], [4, 5, 0]]}, None),
    "threshold": ({"threshold": [[-3.5, -4, -5]] * 2, "last": 2},
                  lambda scores: eviction.select(scores, threshold=np.array([-3.5, -4, -5]), last=2)),
    "threshold of nobody": ({"threshold": 1e9, "first": 2, "last": 1},
                            lambda scores: eviction.select(scores, threshold=1e9, first=2, last=1)),
    "first": ({"count": 9, "per_head": True, "first": 3, "last": 2},
              lambda scores: eviction.select(scores, count=9, first=3, last=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_of_heads(name):
    given, select = BUDGETS[name]
    cache = Cache([DynamicLayer(), DynamicLayer(), SlidingWindowLayer(8)][: 2 + (name == "ada")])
    for i in range(len(cache)):
        cache.update(normal(60, seed=i), normal(60, seed=i + 5), i)
    keys = [layer.keys.copy() for layer in cache.layers]
    report = cache.compress("knorm", **given)
    assert report.skipped == ({2: "a window evicts already"} if name == "ada" else {})
    for i in range(2):
        scores, own = eviction.scores("knorm", keys[i]), cache.layers[i].positions
        wanted = (
            eviction.select(scores, budget=np.array(given["budget"][i])) if select is None else select(scores)
        )
        rows = wanted.ravel() if isinstance(wanted, np.ndarray) else wanted.rows
        np.testing.assert_array_equal(own[own >= 0], rows)
        assert report.tokens[i] == cache.layers[i].lengths.tolist()


@pytest.mark.parametrize("bound", [{"threshold": 1.0}, {"count": 3, "per_head": True}])
def test_infinite_and_large_scores_do_not_push_out_the_protected(bound):
    cache = Cache([DynamicLayer()])
    cache.update(normal(9), normal(9), 0)
    scores = np.zeros((B, HEADS, 9), np.float32)
    scores[..., 4:6] = np.inf
    cache.compress([scores], **bound, first=1, last=1)
    rows = [4, 5] if "threshold" in bound else [4]
    assert (cache.layers[0].positions == [0, *rows, 8]).all()


def test_a_budget_over_all_layers_and_a_table_of_retrieval_heads():
    cache, scores = DynamicCache(), []
    for i in range(3):
        cache.update((i + 1) * normal(60, seed=i), normal(60), i)
        scores.append(eviction.scores("knorm", cache.layers[i].keys))
    other = copy.deepcopy(cache)
    cache.compress("knorm", keep=0.5, budget="global")
    counts = eviction.budgets("global", scores=scores, keep=0.5)
    np.testing.assert_array_equal([layer.lengths for layer in cache.layers], counts)
    table = np.array([[True, False, False]] * 2 + [[False] * 3])
    counts = eviction.budgets("duo", table=table, tokens=60, first=4, last=10)
    other.compress("knorm", budget=counts, first=4, last=10)
    recent = [*range(4), *range(50, 60)]
    for layer, retrieves in zip(other.layers, table.repeat(B, 0).reshape(3, B, 3), strict=True):
        for own, whole in zip(
            layer.positions.reshape(-1, 60 if retrieves.any() else 14), retrieves.ravel(), strict=True
        ):
            assert own[own >= 0].tolist() == (list(range(60)) if whole else recent)


def test_tokens_of_all_heads_are_removed_and_shifted():
    """Attention is that over keys that were rotated for the positions that they have now."""
    cache, raw, values = Cache([DynamicLayer()]), normal(60), normal(60, seed=1)
    cache.update(ROPE.rotate(raw, np.arange(60)), values, 0)
    cache.compress("knorm", budget=[[10, 50, 30]], rope=ROPE)
    held = cache.layers[0].positions
    cache.remove(5, 20, close=True)
    cache.shift(0, 5, -2)
    layer, position = cache.layers[0], np.arange(60)
    moved = np.where(position < 5, position - 2, np.where(position < 20, -1, position - 15))
    assert layer.get_seq_length() == 45
    for b, h in np.ndindex(held.shape[:2]):
        own = moved[held[b, h][held[b, h] >= 0]]
        assert layer.positions[b, h][layer.positions[b, h] >= 0].tolist() == own[own >= 0].tolist()
    assert set(layer.rope_shifts[:, 4].tolist()) == {-2, -15}
    new, shown, sinks = normal(1, seed=4), np.ones((B, 46), bool), np.linspace(-1, 1, 6).astype(np.float32)
    shown[0, :9] = False
    cache.update(ROPE.rotate(new, [45]), new, 0)
    order = np.flatnonzero(moved >= 0)
    keys = np.zeros((B, HEADS, 46, DIM), np.float32)
    keys[:, :, moved[order]], keys[:, :, 45:] = (
        ROPE.rotate(raw[:, :, order], moved[order]),
        ROPE.rotate(new, [45]),
    )
    wide = np.zeros_like(keys)
    wide[:, :, moved[order]], wide[:, :, 45:] = values[:, :, order], new
    query = normal(1, HEADS * GROUP, seed=6)
    for _ in "ab":
        for options in ({}, {"shown": shown, "sinks": sinks}):
            out = cache.attend(query, 0, options.get("shown"), sinks=options.get("sinks"))
            expected = masked(query, keys, wide, layer.positions, **options)[0]
            np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6)
        cache.flatten()
        assert not cache.layers[0].rope_shifts[:, 4].any()


def test_batches_crops_and_copies(tmp_path):
    scene = Scene(keep=0.4, budget="ada")
    scene.decode(5)
    scene.cache.crop(-7)
    scene.keys, scene.values = scene.keys[:, :, :88], scene.values[:, :, :88]
    scene.check()
    scene.cache.reorder([1, 0])
    scene.keys, scene.values = scene.keys[::-1], scene.values[::-1]
    scene.decode(1)
    scene.check()
    scene.cache.shift(0, None, 3)
    query, layer = normal(1, HEADS * GROUP), scene.layer
    scene.cache.save(tmp_path / "ragged.npz")
    for other in (load(tmp_path / "ragged.npz"), copy.deepcopy(scene.cache)):
        again = other.layers[0]
        assert again.positions.tolist() == layer.positions.tolist()
        assert again.rope_shifts.tolist() == layer.rope_shifts.tolist()
        assert [side.tobytes() for side in again._stored()] == [side.tobytes() for side in layer._stored()]
        assert other.attend(query, 0).tobytes() == scene.cache.attend(query, 0).tobytes()
        other.update(normal(1), normal(1), 0)
        assert other.get_seq_length() == scene.cache.get_seq_length() + 1
    lengths = scene.layer.lengths
    scene.cache.repeat(2)
    assert scene.layer.lengths.tolist() == lengths.repeat(2, 0).tolist()
    scene.cache.update(normal(1, batch=4), normal(1, batch=4), 0)
    scene.cache.crop(-scene.cache.get_seq_length())
    assert scene.layer.nbytes == scene.cache.get_seq_length() == 0
    scene.cache.reset()
    with pytest.raises(KvkitError, match=r"value_states: expected heads of 16 elements, .* got 8"):
        scene.cache.update(normal(2), normal(2)[..., :8], 0)
    scene.cache.update(normal(2), normal(2), 0)
    assert scene.layer.lengths.tolist() == [[2] * 3] * 2


def test_a_layer_whose_holes_were_closed_is_saved_and_loaded(tmp_path):
    """Keys that kept their positions and got a rope shift count as moved, also when the pool shrinks."""
    cache, keys = DynamicCache(), normal(14, 2, batch=1)
    cache.update(keys, keys, 0)
    cache.compress("knorm", budget=[[13, 13]])
    cache.layers[0].remove(5, 11, close=True, rope=ROPE)
    cache.save(tmp_path / "closed.npz")
    saved, loaded = cache.layers[0], load(tmp_path / "closed.npz").layers[0]
    assert loaded.positions.tolist() == saved.positions.tolist()
    assert loaded.rope_shifts.tolist() == saved.rope_shifts.tolist()
    assert [seq._intact for seq in loaded.sequences] == [seq._intact for seq in saved.sequences]


def test_heads_are_compressed_again():
    """Heads of a ragged layer are scored one by one; the least share of a head stays legal."""
    scene = Scene(keep=0.4, budget="ada")
    scene.decode(30)
    queries, lengths = normal(8, HEADS * GROUP), scene.layer.lengths
    for scorer, given in {"keydiff": {}, "snapkv": {"queries": [queries], "window": 4}}.items():
        again, before = copy.deepcopy(scene.cache), scene.layer.positions
        report = again.compress(scorer, keep=0.5, **given)
        assert report.tokens_before == [lengths.tolist()]
        count = int(int(lengths.mean()) * 0.5)
        for b, h in np.ndindex(lengths.shape):
            own, more = before[b, h, : lengths[b, h]], {}
            if "queries" in given:
                more = {"queries": queries[b : b + 1, GROUP * h : GROUP * (h + 1)], "window": 4}
            scores = eviction.scores(scorer, scene.keys[b : b + 1, h : h + 1, own], **more)
            rows = eviction.select(scores, count=count)[0, 0]
            kept = again.layers[0].positions[b, h]
            assert kept[kept >= 0].tolist() == own[rows].tolist()
    newest = scene.cache.compress(lambda i, keys, values, _: np.ones(keys.shape[:3]), count=12, last=12)
    assert newest.tokens == [[[12] * 3] * 2]
    assert (scene.layer.positions == np.arange(108, 120)).all()
    evict = eviction.decoding("keydiff", interval=4, target=10, budget="ada")
    for _ in range(8):
        scene.decode(1)
        report = evict(scene.cache)
    assert np.mean(report.tokens) == 10


WRONG = {
    "renumber": (lambda cache: cache.compress("knorm", keep=0.5, renumber=True), "renumber: expected False"),
    "retain": (lambda cache: cache.retain([3]), "positions: expected integers [2, 3, 'm'], -1 after the"),
    "uneven": (lambda cache: cache.retain([[[1], [1, 2]]]), "positions: expected integers [2, 3, 'm'], -1 a"),
    "absent": (lambda cache: cache.retain(np.full((2, 3, 1), 99)), "positions: expected positions that are"),
    "mask": (lambda cache: cache.attend(normal(1, 6), 0, np.ones((2, 1, 1, 90), bool)),
             "attn_mask: expected bool [2, 90], a padding mask by position"),
    "old queries": (lambda cache: cache.attend(normal(50, 6), 0), "query: expected one query, because some"),
    "query": (lambda cache: cache.attend(normal(1, 4), 0), "query: expected shape [batch, heads"),
    "keys": (lambda cache: cache.update(normal(1, 4), normal(1, 4), 0), "key_states: expected [batch, heads"),
    "position": (lambda cache: cache.update(normal(1), normal(1), 0, [3]), "cache_position: expected"),
    "legacy": (lambda cache: cache.to_legacy_cache(), "layers[0]: expected a layer that stores all"),
    "shift": (lambda cache: cache.shift(40, None, -30), "positions: expected positions that stay ascending"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refusals_change_nothing(case):
    (call, message), cache = WRONG[case], Scene(keep=0.4, budget="ada").cache
    layer = cache.layers[0]
    before = layer.positions.tolist(), *(side.tobytes() for side in layer._stored())
    with pytest.raises(KvkitError) as caught:
        call(cache)
    assert str(caught.value).startswith(message)
    assert before == (layer.positions.tolist(), *(side.tobytes() for side in layer._stored()))


def test_a_layer_that_reads_the_rows_of_another_goes_on_with_it():
    cache = Cache([DynamicLayer(), SharedLayer(0)])
    cache.update(normal(30), normal(30), 0)
    report = cache.compress("knorm", keep=0.5, budget="ada")
    assert report.skipped == {1: "it reads the rows of layer 0"}
    query = normal(1, HEADS * GROUP)
    np.testing.assert_array_equal(cache.attend(query, 1), cache.attend(query, 0))


def test_layers_that_cannot_have_heads_of_their_own_are_refused():
    for layer, dim in ((QuantizedLayer(), DIM), (StaticLayer(40), DIM), (DynamicLayer(), 8)):
        cache = Cache([layer])
        cache.update(normal(30), normal(30)[..., :dim], 0)
        with pytest.raises(
            KvkitError, match=r"budget: expected (a DynamicLayer or RaggedLayer|'uniform' .* values of 8 el)"
        ):
            cache.compress("knorm", keep=0.5, budget="ada")
        assert cache.layers == [layer]
    assert kvkit.cache.RaggedLayer().positions.shape == (0, 1, 0)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_without_tokens_have_their_sinks(moved, batch):
    """Their output is 0, and lse is the sink."""
    keys, sinks = normal(6, heads=2, batch=batch), np.array([1.5, 0.5, -1.0, 2.0], np.float32)
    cache = DynamicCache(1, rope=ROPE)
    cache.update(keys, keys, 0)
    cache.compress([np.zeros((batch, 2, 6))], budget=[[0, 4]])
    if moved:
        cache.shift(0, None, 2)
    output, lse = cache.attend(normal(1, 4, batch=batch), 0, sinks=sinks, return_lse=True)
    np.testing.assert_array_equal(lse[:, :2, 0], np.broadcast_to(sinks[:2], (batch, 2)))
    assert not output[:, :2].any()
    assert output[:, 2:].any()
    plain = cache.attend(normal(1, 4, batch=batch), 0, return_lse=True)[1]
    assert (plain[:, :2] == -np.inf).all()
    np.testing.assert_allclose(lse[:, 2:, 0], np.logaddexp(plain[:, 2:, 0], sinks[2:]), rtol=1e-6)
