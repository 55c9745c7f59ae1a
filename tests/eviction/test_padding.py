"""Eviction beside padding: each row keeps what it keeps alone, and padding never stays."""

import itertools

import numpy as np
import pytest

import kvkit
from kvkit import KvkitError, eviction
from kvkit.cache import DynamicCache, LatentLayer, PagedCache
from kvkit.cache.caches import Cache
from kvkit.errors import TooFewTokensError

B, HEADS, GROUP, S, D = 3, 2, 2, 60, 8
ROPE = kvkit.Rope(D)
LEFT = np.arange(S) >= np.array([20, 0, 33])[:, None]
MASKS = {
    "left": LEFT,
    "right": LEFT[:, ::-1].copy(),
    "holes": np.random.default_rng(1).random((B, S)) < 0.7,
    "a row of padding": LEFT & (np.arange(B) != 2)[:, None],
}
OPTIONS = {
    "streaming": {"budget": 12, "sinks": 2},
    "snapkv": {"window": 6},
    "finch": {"window": 6},
    "rkv": {"window": 6},
    "lagkv": {"lag": 8},
    "h2o": {"recent": 5},
    "qfilter": {"filters": np.random.default_rng(2).standard_normal((HEADS, D)).astype(np.float32)},
    "expected": {"rope": ROPE},
    "triattention": {"rope": ROPE},
    "compactor": {"blend": 0.5, "rope": "none", "chunk": 16},
    "non_causal": {"chunk": 16},
    "think": {"window": 6},
    "quest": {"page": 4},
}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


KEYS, VALUES, QUERIES = (
    draw(B, HEADS, S, D),
    draw(B, HEADS, S, D, seed=1),
    draw(B, HEADS * GROUP, S, D, seed=2),
)


def spoiled(states, mask):
    """Return states whose padding holds what no scorer may read."""
    return np.where(mask[:, None, :, None], states, np.float32(np.nan))


def alone(b, mask):
    """Return keys, values and queries of a row without its padding."""
    return [side[b : b + 1][:, :, mask[b]] for side in (KEYS, VALUES, QUERIES)]


def inputs_of(name, queries, keys):
    if name == "kvzip":
        weights = np.abs(queries @ np.repeat(keys, GROUP, 1).swapaxes(2, 3))
        return {"weights": weights}
    return {"queries": queries} if any("queries" in need for need in eviction.SCORERS[name].needs) else {}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("name", eviction.SCORERS)
def test_each_row_has_the_scores_that_it_has_alone(name, form):
    mask, options = MASKS[form], dict(OPTIONS.get(name, {}))
    if name == "critical":
        output = draw(HEADS * GROUP, D, 5, seed=3)
        options = {"scores": -np.abs(KEYS[..., 0]), "output_weights": output, "keep": 0.5}
    many = inputs_of(name, QUERIES, KEYS)
    sides = [spoiled(side, mask) for side in (KEYS, VALUES)]
    found = eviction.scores(name, *sides, **many, **options, attn_mask=mask)
    for b in np.flatnonzero(mask.any(1)):
        keys, values, queries = alone(b, mask)
        own = options | (
            {"scores": options["scores"][b : b + 1][:, :, mask[b]]} if name == "critical" else {}
        )
        if name != "quest":
            expected = eviction.scores(name, keys, values, **inputs_of(name, queries, keys), **own)[0]
            at = found[b] if name == "think" else found[b][:, mask[b]]
            np.testing.assert_array_equal(at, expected)
    if name not in ("quest", "think"):
        assert (found.swapaxes(1, 2)[~mask] == -np.inf).all()


def test_pages_have_the_bounds_of_their_tokens():
    mask = MASKS["left"]
    found = eviction.scores("quest", KEYS, queries=QUERIES, page=4, attn_mask=mask)
    products = QUERIES[:, :, -1:] @ np.repeat(KEYS, GROUP, 1).swapaxes(2, 3)
    products = np.where(mask[:, None], products[:, :, 0], -np.inf).reshape(B, -1, S // 4, 4).max(3)
    assert (found >= products - 1e-5).all()
    assert (found[0, :, :5] == -np.inf).all()
    assert (found[0, :, 5:] > -np.inf).all()


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize(
    "options",
    [{"keep": 0.3}, {"count": 25}, {"keep": 0.4, "budget": "ada"}, {"budget": [9, 30]}, {"threshold": -2.5},
     {"keep": 0.5, "first": 3, "last": 2}],
    ids=str,
)  # fmt: skip
def test_each_row_selects_what_it_selects_alone(form, options):
    mask = MASKS[form]
    scores = eviction.scores("knorm", KEYS, attn_mask=mask)
    kept = eviction.select(scores, **options, attn_mask=mask)
    rows = (
        np.split(kept.rows, kept.starts[1:-1])
        if isinstance(kept, eviction.Kept)
        else kept.reshape(-1, kept.shape[2])
    )
    for b in range(B):
        own, real = dict(options), np.flatnonzero(mask[b])
        if "budget" in own and own["budget"] != "ada":
            own["budget"] = np.minimum(own["budget"], len(real))
        if "count" in own:
            own["count"] = min(own["count"], len(real))
        for h in range(HEADS) if len(real) else ():
            expected = eviction.select(scores[b : b + 1][:, :, real], **own)
            if isinstance(expected, eviction.Kept):
                expected = np.split(expected.rows, expected.starts[1:-1])[h]
            else:
                expected = expected[0, h]
            np.testing.assert_array_equal(rows[b * HEADS + h], real[expected])
        assert len(real) or not sum(map(len, rows[b * HEADS : (b + 1) * HEADS]))


def test_budgets_and_chunks_count_tokens():
    mask = MASKS["left"]
    scores = eviction.scores("knorm", KEYS, attn_mask=mask)
    counts = eviction.budgets("ada", scores=scores, keep=0.5, attn_mask=mask)
    assert counts.sum(1).tolist() == [40, 60, 26]
    counts = eviction.budgets("global", scores=[scores, scores], keep=0.5, attn_mask=mask)
    assert counts.sum((0, 2)).tolist() == [80, 120, 52]
    kept = eviction.chunks(scores, 10, keep=0.5, attn_mask=mask)
    assert np.diff(kept.starts).tolist() == [20, 20, 30, 30, 10, 10]
    assert kept.rows.min() >= 0
    assert (kept.rows[kept.starts[4] :] >= 33).all()


def test_heavy_hitters_are_no_padding():
    h2o, mask = eviction.H2O(heavy=2, recent=2), np.arange(8) >= np.array([4, 0])[:, None]
    weights = np.ones((2, 1, 8), np.float32)
    weights[..., :3] = 5
    h2o.add(weights, mask)
    assert h2o.positions.tolist() == [[[4, 5, 6, 7]], [[0, 1, 6, 7]]]


def cache_of(kind, keys=KEYS, values=VALUES):
    cache = {
        "dynamic": lambda: DynamicCache(1, rope=ROPE),
        "paged": lambda: PagedCache(64, 4, 1, HEADS, D, np.float32, rope=ROPE),
        "latent": lambda: Cache([LatentLayer(D, D)], rope="none"),
    }[kind]()
    sides = (keys[:, :1], values[:, :1]) if kind == "latent" else (keys, values)
    cache.update(*sides, 0)
    return cache


def arguments_of(name, queries):
    """Return the arguments of `compress` by a scorer of one layer."""
    options = {key: value for key, value in OPTIONS.get(name, {}).items() if key not in ("budget", "blend")}
    given = {"queries": [queries]} if "queries" in str(eviction.SCORERS[name].needs) else {}
    return options | given | {"scorer": name}


SCORED = [
    name
    for name, rule in eviction.SCORERS.items()
    if rule.scored == "tokens" and name not in ("kvzip", "critical")
]


@pytest.mark.parametrize("name", SCORED)
def test_all_rows_keep_the_columns_that_most_of_them_need(name):
    """A row beside 33 columns of padding loses none of its 27 tokens where 30 columns stay."""
    mask = MASKS["left"]
    for kind in "dynamic", "paged":
        cache = cache_of(kind)
        target = getattr(cache, "rows", cache)
        target.compress(**arguments_of(name, QUERIES), count=30, attn_mask=mask)
        positions = cache.layers[0].positions
        assert len(positions) == 30
        assert (positions >= 33).sum() == 27
        assert (positions >= 20).all()
    cache = cache_of("dynamic")
    mask = np.arange(S) >= np.full((B, 1), 40)
    cache.compress(**arguments_of(name, QUERIES), keep=0.5, attn_mask=mask)
    assert len(cache.layers[0].positions) == 10  # half of 20 tokens
    assert (cache.layers[0].positions >= 40).all()


BUDGETS = {
    "uniform": {"keep": 0.5, "per_head": True}, "count": {"count": 30, "per_head": True},
    "ada": {"keep": 0.5, "budget": "ada"}, "global": {"keep": 0.5, "budget": "global"},
    "counts": {"budget": [[12, 40]]}, "ends": {"keep": 0.6, "per_head": True, "first": 2, "last": 3},
}  # fmt: skip


# Every scorer, and every budget over every mask: scores, and what is selected of them, were compared above.
CASES = [(name, "uniform", "left") for name in SCORED]
CASES += itertools.product(("knorm", "snapkv"), BUDGETS, ("left", "right", "holes"))


@pytest.mark.parametrize(("name", "budget", "form"), dict.fromkeys(CASES))
def test_heads_keep_what_they_keep_in_a_row_alone(name, budget, form):
    """Once, and again when heads have tokens of their own already."""
    mask, taken = MASKS[form], BUDGETS[budget]
    cache = cache_of("dynamic", spoiled(KEYS, mask), spoiled(VALUES, mask))
    cache.compress(**arguments_of(name, QUERIES), **taken, attn_mask=mask)
    rows = []
    for b in range(B):
        keys, values, queries = alone(b, mask)
        rows.append(cache_of("dynamic", keys, values))
        own = dict(taken)
        if budget == "counts":
            own["budget"] = np.minimum(own["budget"], keys.shape[2])
        if budget == "count":
            own["count"] = min(30, keys.shape[2])
        rows[-1].compress(**arguments_of(name, queries), **own)
    check_rows(cache, rows, mask)
    if form != "left" or name in ("non_causal", "compactor", "observed", "h2o"):
        return  # these read queries of all tokens; and no query of the last tokens is padding
    again = {"keep": 0.6, "per_head": True}
    last = QUERIES[:, :, -6:]
    for b, row in enumerate(rows):
        row.compress(**arguments_of(name, last[b : b + 1]), **again)
    cache.compress(**arguments_of(name, last), **again, attn_mask=mask)
    check_rows(cache, rows, mask)


def check_rows(cache, rows, mask):
    """Check that each row of a cache stores what it stores alone, at its own positions."""
    for b, row in enumerate(rows):
        columns = np.flatnonzero(mask[b])
        for h in range(HEADS):
            here, there = (each.layers[0].positions[at, h] for each, at in ((cache, b), (row, 0)))
            np.testing.assert_array_equal(here[here >= 0], columns[there[there >= 0]])


def test_a_row_too_short_for_a_scorer_stays_whole():
    mask = np.arange(S) >= np.array([55, 0, 20])[:, None]
    cache = cache_of("dynamic")
    cache.compress("snapkv", keep=0.5, per_head=True, window=8, queries=[QUERIES], attn_mask=mask)
    assert cache.layers[0].lengths.tolist() == [[5, 5], [30, 30], [20, 20]]
    cache = cache_of("dynamic")
    cache.compress("snapkv", count=10, window=8, queries=[QUERIES], attn_mask=mask)
    assert cache.layers[0].positions[-5:].tolist() == list(range(55, 60))
    with pytest.raises(TooFewTokensError, match="window"):
        cache.compress("snapkv", keep=0.5, window=8, queries=[QUERIES[:, :, -6:]],
                       attn_mask=np.arange(S) >= np.full((B, 1), 55))  # fmt: skip


def test_functions_and_lists_of_scores_see_rows_without_padding():
    mask, seen = MASKS["left"], []

    def function(layer_idx, keys, values, queries):
        seen.append((keys.shape, queries.shape))
        return keys[..., 0]

    cache, other = cache_of("dynamic"), cache_of("dynamic")
    cache.compress(function, keep=0.5, per_head=True, queries=[QUERIES], attn_mask=mask)
    assert seen == [((1, 2, n, D), (1, 4, n, D)) for n in (40, 60, 27)]
    keys = ROPE.rotate(KEYS, 0)
    other.compress([keys[..., 0]], keep=0.5, per_head=True, attn_mask=mask)
    np.testing.assert_array_equal(cache.layers[0].positions, other.layers[0].positions)


def test_moved_tokens_and_masks_by_position():
    """A mask has a column for each position, also for those that have no token any more."""
    cache = cache_of("dynamic")
    cache.remove(30, 34)
    cache.compress("knorm", count=20, attn_mask=MASKS["left"])
    positions = cache.layers[0].positions
    assert len(positions) == 20
    assert (positions >= 34).all()
    assert cache.attend(QUERIES[:, :, -1:], 0, MASKS["left"]).shape == (B, HEADS * GROUP, 1, D)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (LEFT[:, 1:], r"attn_mask: expected bool \[3, 60\], a padding mask of all positions"),
        (LEFT.astype(int), r"attn_mask: expected bool.*attn_mask.astype\(bool\)"),
        (np.zeros_like(LEFT), "attn_mask: expected a token that is not padding"),
        ([[True]], "attn_mask: expected bool"),
    ],
)
def test_wrong_masks_change_nothing(mask, message):
    for kind in "dynamic", "paged":
        cache = cache_of(kind)
        with pytest.raises(KvkitError, match=message):
            getattr(cache, "rows", cache).compress("knorm", keep=0.5, attn_mask=mask)
        assert cache.layers[0].stored_tokens == S
    with pytest.raises(KvkitError, match=message.replace("all positions", "stored tokens")):
        eviction.scores("knorm", KEYS, attn_mask=mask)


def test_each_layer_has_the_rope_of_its_own():
    """Heads with tokens of their own are scored with the rotation of their layer."""
    ropes, queries = [kvkit.Rope(D), kvkit.Rope(D, 100.0)], [QUERIES] * 2
    both = DynamicCache(2, rope=ropes)
    for i in range(2):
        both.update(KEYS, VALUES, i)
    both.compress("knorm", budget="ada", keep=0.7)
    positions = [layer.positions for layer in both.layers]
    assert positions[0].shape == positions[1].shape
    single = DynamicCache(1, rope=ropes[1])
    single.update(KEYS, VALUES, 0)
    single.compress("knorm", budget="ada", keep=0.7)
    for cache, own in (both, ropes), (single, ropes[1:]):
        given = [each[:, :, -30:] for each in queries[: len(own)]]
        cache.compress("expected", keep=0.5, per_head=True, queries=given, rope=own)
    np.testing.assert_array_equal(both.layers[1].positions, single.layers[0].positions)
