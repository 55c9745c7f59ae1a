"""Caches lose the tokens that a scorer ranks last, and their memory."""

import numpy as np
import pytest

import kvkit
from kvkit import eviction
from kvkit.cache import (
    Cache,
    DynamicCache,
    DynamicLayer,
    PagedCache,
    QuantizedCache,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticLayer,
)

ROPE = kvkit.Rope(8)


def states(tokens=40, heads=2, batch=2, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, heads, tokens, 8)).astype(np.float32)


def filled(*layers, tokens=40, **options):
    cache = Cache(layers or [DynamicLayer(), DynamicLayer()], **options)
    for i in range(len(cache)):
        cache.update(states(tokens, seed=i), states(tokens, seed=i + 9), i)
    return cache


def kept_of(scores, count):
    """Return the positions of the best mean scores."""
    return eviction.select(scores.mean((0, 1))[None, None], count=count)[0, 0]


def test_the_best_tokens_stay_and_attention_reads_them():
    cache, whole, queries = filled(), filled(), [states(8, heads=4, seed=i) for i in range(2)]
    report = cache.compress("snapkv", keep=0.25, queries=queries, window=8, kernel=3)
    assert (report.tokens, report.skipped) == ([10, 10], {})
    assert report.bytes_after * 4 == report.bytes_before
    for i, layer in enumerate(cache.layers):
        old = whole.layers[i]
        wanted = kept_of(eviction.scores("snapkv", old.keys, queries=queries[i], window=8, kernel=3), 10)
        np.testing.assert_array_equal(layer.positions, wanted)
        np.testing.assert_array_equal(layer.keys, old.keys[:, :, wanted])
        mask = np.isin(np.arange(40), wanted)[None].repeat(2, 0)
        query = queries[i][:, :, -1:]
        np.testing.assert_allclose(
            cache.attend(query, i), whole.attend(query, i, attn_mask=mask), rtol=1e-5, atol=1e-6
        )
    assert cache.get_seq_length() == 40
    cache.update(states(1), states(1), 0)
    assert cache.layers[0].positions[-1] == 40


def test_memory_is_freed():
    cache = filled(tokens=1000)
    before = cache.layers[0].store.capacity
    cache.compress("knorm", keep=0.1)
    store = cache.layers[0].store
    assert store.capacity <= 116 < before / 8
    assert store.keys.nbytes == 2 * 2 * store.capacity * 8 * 4


def test_a_function_and_scores_of_ones_own():
    def newest_and_longest(layer_idx, keys, values, queries):
        scores = np.linalg.norm(values, axis=-1)
        scores[..., -4:] = np.inf
        return scores

    cache, other = filled(), filled()
    cache.compress(newest_and_longest, count=10)
    own = [newest_and_longest(0, layer.keys, layer.values, None) for layer in other.layers]
    other.compress(own, count=10)
    for one, two in zip(cache.layers, other.layers, strict=True):
        np.testing.assert_array_equal(one.positions, two.positions)
        assert one.positions[-4:].tolist() == [36, 37, 38, 39]


def test_options_that_a_scorer_has_too_are_the_scorers():
    queries = [states(8, heads=4, seed=i) for i in range(2)]
    cache, whole = filled(), filled()
    cache.compress("rkv", keep=0.5, queries=queries, threshold=0.9, window=4)
    for i, layer in enumerate(cache.layers):
        scores = eviction.scores("rkv", whole.layers[i].keys, queries=queries[i], threshold=0.9, window=4)
        assert layer.positions.tolist() == kept_of(scores, 20).tolist()


def test_budgets_of_layers():
    cache = filled()
    cache.compress("knorm", budget=[3, 30])
    assert [layer.stored_tokens for layer in cache.layers] == [3, 30]
    cache = filled(*[DynamicLayer() for _ in range(4)], tokens=1000)
    assert cache.compress("knorm", keep=0.5, budget="pyramid").tokens == [936, 645, 355, 64]


def test_windows_are_skipped():
    cache = filled(SlidingWindowLayer(16), DynamicLayer())
    report = cache.compress("streaming", keep=0.5)
    assert report.skipped == {0: "a window evicts already"}
    assert report.tokens == [15, 20]


def test_renumbered_tokens_are_contiguous():
    """Attention then counts keys as rotated for their ranks, however they lie."""
    cache, keys = Cache([DynamicLayer()], rope=ROPE), states(12)
    cache.update(ROPE.rotate(keys, np.arange(12)), states(12, seed=1), 0)
    for budget in (8, 6):  # the second scores keys that lie shifted
        report = cache.compress("streaming", count=budget, sinks=2, renumber=True)
        assert report.tokens == [budget]
        assert cache.get_seq_length() == budget
    rows = [0, 1, 8, 9, 10, 11]
    assert cache.layers[0].positions.tolist() == list(range(6))
    query, fresh = states(1, heads=4, seed=3), Cache([DynamicLayer()], rope=ROPE)
    fresh.update(ROPE.rotate(keys[:, :, rows], np.arange(6)), states(12, seed=1)[:, :, rows], 0)
    np.testing.assert_allclose(cache.attend(query, 0), fresh.attend(query, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(eviction.SCORERS))
def test_every_scorer_compresses(name):
    """What a layer knows, such as its rotation, it tells the scorer; or a sentence says what is missing."""
    cache = filled(rope=ROPE)
    options = {
        "lagkv": {"lag": 8}, "finch": {"window": 5}, "snapkv": {"window": 5}, "rkv": {"window": 5},
            "h2o": {"recent": 5},
        "qfilter": {"filters": np.ones((2, 8), np.float32)},
    }.get(name, {})  # fmt: skip
    weights = [np.random.default_rng(i).random((2, 4, 5, 40)).astype(np.float32) for i in range(2)]
    given = {
        "queries": [states(heads=4, seed=i) for i in range(2)],
        "weights": weights if name == "kvzip" else None,
    }
    if name in ("quest", "think", "critical"):
        with pytest.raises(kvkit.KvkitError, match=r"a scorer of tokens|scores: expected a value"):
            cache.compress(name, keep=0.5, **given)
        return
    assert cache.compress(name, keep=0.5, **given, **options).tokens == [20, 20]


def test_codes_are_scored_decoded_and_move_as_bytes():
    """Arrays of a layer in memory shrink, too; scales that tokens share stay until the last one goes."""
    for by_token in True, False:
        spec = "uint4:g8" if by_token else "uint4:g8:channel"
        cache = filled(QuantizedLayer(key=spec, residual_length=8), tokens=1000)
        layer = cache.layers[0]
        cache.update(states(1), states(1), 0)
        layer.store.release_undo()
        before, keys, held = layer.nbytes, layer._stored()[0], layer.store.sides[0].codes.nbytes
        scores = -np.linalg.norm(np.asarray(keys), axis=-1)
        report = cache.compress("knorm", keep=0.25)
        np.testing.assert_array_equal(layer.positions, kept_of(scores, 250))
        np.testing.assert_array_equal(layer.keys, keys[:, :, layer.positions])
        assert (report.tokens_before, report.tokens, report.bytes_before) == ([1001], [250], before)
        assert report.bytes_after == layer.nbytes
        assert by_token == (layer.nbytes < 0.3 * before)
        assert layer.store.sides[0].codes.nbytes < held / 3


def test_a_call_or_the_cache_says_how_keys_were_rotated():
    paged = PagedCache(20, 4, 1, 2, 8, np.float32)
    caches = QuantizedCache(num_layers=1, rope=ROPE), QuantizedCache(num_layers=1), DynamicCache(1), paged
    for cache, rope in zip(caches, (None, ROPE, [ROPE], [ROPE]), strict=True):
        cache.update(states(), states(), 0)
        target = cache.rows if cache is paged else cache
        report = target.compress("streaming", keep=0.5, renumber=True, rope=rope)
        assert report.tokens == [20]
        assert cache.layers[0].rope_shifts.tolist() == [[0, 4, 0], [4, 20, -20]]


def test_a_static_layer_closes_up_if_tokens_are_renumbered():
    cache = filled(StaticLayer(50), rope=ROPE)
    with pytest.raises(kvkit.KvkitError, match=r"layers\[0\]: expected positions 0, 1, 2, \.\.\., .*close"):
        cache.compress("streaming", keep=0.5)
    assert cache.compress("streaming", keep=0.5, renumber=True).tokens == [20]
    cache.update(states(30), states(30), 0)  # there is room again
    assert cache.get_seq_length() == 50


# Sequences in blocks


def paged(tokens=40, num_blocks=16, **options):
    """Return a cache of two layers, and a sequence in it."""
    cache = PagedCache(num_blocks, 4, 2, 2, 8, np.float32, rope=ROPE, **options)
    seq = cache.blocks.add(range(tokens))
    write(cache, seq, *(states(tokens, batch=1, seed=i) for i in range(2)))
    return cache, seq


def write(cache, seq, *layers):
    """Append keys of each layer, [1, H, tokens, D], which are values, too."""
    with cache.begin_step([(seq, layers[0].shape[2])]) as step:
        for i, keys in enumerate(layers):
            step.update(*[np.ascontiguousarray(keys[0].swapaxes(0, 1))] * 2, i)


def gathered(cache, seq):
    """Return the keys of each layer, [1, H, tokens, D]."""
    with cache.begin_step([(seq, 0)]) as step:
        return [step.gather(i)[0].swapaxes(0, 1)[None] for i in range(2)]


def test_a_sequence_releases_the_blocks_of_what_it_loses():
    """Whoever shares its blocks keeps them, byte for byte, and a published prefix is found as before."""
    cache, seq = paged()
    keys, queries = gathered(cache, seq), [states(8, heads=4, batch=1, seed=i) for i in range(2)]
    scores = [
        eviction.scores("snapkv", each, queries=own, window=8)
        for each, own in zip(keys, queries, strict=True)
    ]
    wanted = kept_of(np.mean([each.mean((0, 1)) for each in scores], 0)[None, None], 10)
    other, block_bytes = cache.blocks.fork(seq), cache.store.blocks[0][:, :, 0].nbytes
    report = cache.compress(seq, "snapkv", keep=0.25, queries=queries, window=8)
    assert (report.tokens_before, report.tokens) == ([40, 40], [10, 10])
    assert (seq.positions.tolist(), seq.next_position) == (wanted.tolist(), 40)
    for i in range(2):
        np.testing.assert_array_equal(gathered(cache, seq)[i], keys[i][:, :, wanted])
        np.testing.assert_array_equal(gathered(cache, other)[i], keys[i])
    assert (report.bytes_before, report.bytes_after) == (10 * block_bytes, cache.nbytes)
    assert report.bytes_after > report.bytes_before  # the copies, beside the blocks of the fork
    cache.blocks.free(other)
    assert cache.nbytes <= 4 * block_bytes
    assert cache.blocks.available >= 12
    assert cache.blocks.add(range(40)).length == 36
    write(cache, seq, *(states(1, batch=1) for _ in "ab"))
    assert seq.positions[-1] == 40
    with pytest.raises(kvkit.KvkitError, match=r"weights: expected weights|queries: expected queries"):
        cache.compress(seq, "tova", keep=0.5)


@pytest.mark.parametrize("bits", [0, 8])
def test_rows_of_a_batch_lose_the_same_tokens(bits):
    """Those of the best mean scores of all rows, heads and layers; attention reads what is left."""
    sizes = {"num_kv_heads": 2, "head_dim": 8, "dtype": np.float32, "quant_bit": bits}
    cache, whole = (PagedCache(64, 4, 2, **sizes) for _ in range(2))
    for i, each in ((i, each) for each in (cache, whole) for i in range(2)):
        each.update(states(seed=i), states(seed=i + 9), i)
    means = [eviction.scores("keydiff", layer.keys).mean((0, 1)) for layer in whole.layers]
    wanted = kept_of(np.mean(means, 0)[None, None], 10)
    report = cache.rows.compress("keydiff", keep=0.25)
    assert (report.tokens_before, report.tokens) == ([40, 40], [10, 10])
    assert report.bytes_after < report.bytes_before
    for new in (0, 1):
        for i, each in ((i, each) for each in (cache, whole) for i in range(2 * new)):
            each.update(states(1, seed=i), states(1), i)
        shown = np.isin(np.arange(40 + new), [*wanted, 40])[None].repeat(2, 0)
        query = states(1, heads=4, seed=5)
        for i in range(2):
            found, expected = cache.attend(query, i), whole.attend(query, i, shown)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert cache.rows.sequences[1].positions.tolist() == [*wanted, 40]
    evict = eviction.decoding("knorm", interval=1, target=8)
    assert evict(cache.rows).tokens == [8, 8]
    with pytest.raises(kvkit.KvkitError, match="`blocks`, or `rows`, got another"):
        PagedCache(4, 4, 2, **sizes).compress(cache.rows, "knorm", keep=0.5)
    empty = PagedCache(4, 4, 2, **sizes).rows.compress("knorm", keep=0.5)
    assert (empty.tokens, empty.skipped) == ([0, 0], {0: "no tokens", 1: "no tokens"})


def test_a_sequence_of_codes_is_renumbered_in_few_pieces():
    cache, seq = paged(quant_bit=8)
    keys = gathered(cache, seq)
    with pytest.raises(kvkit.KvkitError, match="at most 8 pieces"):
        cache.compress(seq, "random", keep=0.5, renumber=True)
    report = cache.compress(seq, "streaming", count=20, renumber=True)
    assert (report.tokens, seq.positions.tolist(), seq.next_position) == ([20, 20], list(range(20)), 20)
    assert seq.rope_shifts.tolist() == [[0, 4, 0], [4, 20, -20]]
    np.testing.assert_array_equal(gathered(cache, seq)[1], keys[1][:, :, [*range(4), *range(24, 40)]])


def begun(cache, seq):
    cache.begin_step([(seq, 0)])
    return seq


def spoilt(cache, seq):
    cache.cache.fill(np.nan)
    return seq


WRONG_SEQUENCES = {
    "no sequence": (lambda cache, seq: 3, {}, "seq: expected a live sequence"),
    "row": (lambda cache, seq: cache.rows.sequences.append(seq) or seq, {}, "seq: expected a sequence from"),
    "open step": (begun, {}, "seq: expected a sequence between steps"),
    "share": (None, {"keep": 2}, "keep: expected a share above 0"),
    "queries": (None, {"scorer": "tova"}, "queries: expected queries"),
    "budget": (None, {"budget": "ada"}, "budget: expected 'uniform', because all layers and heads"),
    "NaN": (spoilt, {}, "keys: expected finite numbers, got nan at (0, 0, 0, 0), in layer 0"),
    "no room": (lambda cache, seq: cache.blocks.fork(seq), {}, "num_blocks: expected"),
}


@pytest.mark.parametrize("case", WRONG_SEQUENCES)
def test_refusals_change_no_sequence(case):
    choose, given, message = WRONG_SEQUENCES[case]
    cache, seq = paged(num_blocks=10)
    with pytest.raises(kvkit.KvkitError) as caught:
        cache.compress(choose(cache, seq) if choose else seq, **{"scorer": "knorm", "keep": 0.5} | given)
    assert str(caught.value).startswith(message)
    assert (seq.length, seq.blocks) == (40, list(range(10)))


WRONG = {
    "share": ({"keep": 0}, "keep: expected a share above 0 and at most 1, got 0.0"),
    "nothing": ({}, "keep: expected a share of the tokens, or else a count, got neither"),
    "query": ({"scorer": "snapkv", "keep": 0.5}, "queries: expected queries"),
    "queries": ({"scorer": "snapkv", "keep": 0.5, "queries": [states()]}, "queries: expected a list of 2"),
    "budget": ({"keep": 0.5, "budget": "duo"}, "budget: expected 'uniform', 'pyramid', 'ada', 'global', or"),
    "counts": ({"budget": [3]}, "budget: expected 'uniform', 'pyramid', 'ada', 'global', or counts"),
    "counts of heads": ({"budget": [[3, 41], [3, 4]]}, "budget: expected counts of 0 to 40, got 41"),
    "many heads": ({"budget": [[3, 4, 5]] * 2}, "budget: expected numbers of shape (2,) or (2, 2)"),
    "threshold": ({"threshold": [1.0]}, "threshold: expected a number, or numbers [2, Hkv] or [2, B, Hkv]"),
    "threshold of NaN": ({"threshold": [[1.0, np.nan]] * 2}, "threshold: expected numbers, got nan at"),
    "ragged threshold": ({"threshold": [[1.0], [1.0, 2.0]]}, "threshold: expected a number, or numbers"),
    "ragged budget": ({"budget": [[1], [1, 2]]}, "budget: expected 'uniform', 'pyramid', 'ada'"),
    "one query": ({"keep": 0.5, "queries": 5}, "queries: expected a list of 2, one for each layer"),
    "text": ({"count": "3"}, "count: expected an integer, got str '3'"),
    "both": ({"threshold": 1.0, "keep": 0.5}, "keep: expected None beside a threshold, got both"),
    "renumbered heads": ({"keep": 0.5, "budget": "ada", "renumber": True}, "renumber: expected False where"),
    "scorer": ({"scorer": 5, "keep": 0.5}, "scorer: expected a name, a function, or scores of 2"),
    "NaN": ({"scorer": lambda i, *given: np.full((2, 2, 40), [np.nan, 1.0][i == 0]), "keep": 0.5},
            "scores: expected numbers, got nan at (0, 0, 0), in layer 1"),
    "shape": ({"scorer": [np.ones((2, 2, 9))] * 2, "keep": 0.5}, "scores: expected [B, Hkv, 40] of layer 0"),
    "rope": ({"keep": 0.5, "renumber": True}, "rope: expected how keys were rotated"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refusals_change_no_layer(case):
    given, message = WRONG[case]
    cache = filled()
    with pytest.raises(kvkit.KvkitError) as caught:
        cache.compress(**{"scorer": "knorm"} | given)
    assert str(caught.value).startswith(message)
    assert [layer.stored_tokens for layer in cache.layers] == [40, 40]


def test_a_generation_is_compressed_again_and_again():
    cache, evict = DynamicCache(), eviction.decoding("keydiff", interval=5, target=12)
    lengths = []
    for i in range(30):
        cache.update(states(1, seed=i), states(1, seed=i), 0)
        report = evict(cache)
        lengths.append(cache.layers[0].stored_tokens)
        assert (report is not None) == (i + 1 in (15, 20, 25, 30))
    assert max(lengths) == 16
    assert lengths[-1] == 12
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("kind", ["dynamic", "heads", "paged", "seq"])
def test_of_tokens_that_share_a_position_the_best_stay(kind):
    """Rows are chosen, and not positions."""
    keys, values = states(8, 1, 1), states(8, 1, 1, seed=1)
    scores, best = np.array([8, 1, 7, 2, 6, 3, 5, 4.0]).reshape(1, 1, 8), [0, 2, 4, 6]
    paged = kind in ("paged", "seq")
    cache = (
        PagedCache(16, 4, 1, 1, keys.shape[3], keys.dtype, rope="none")
        if paged
        else DynamicCache(1, rope="none")
    )
    cache.update(keys, values, 0)
    target = getattr(cache, "rows", cache)
    target.divide(0, None, 2)
    assert cache.layers[0].positions.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    if kind == "seq":
        seq = cache.blocks.fork(cache.rows.sequences[0])
        cache.compress(seq, [scores], count=4)
        assert seq.positions.tolist() == [0, 1, 2, 3]
        return
    more = {"per_head": True} if kind == "heads" else {}
    target.compress([scores], count=4, **more)
    layer = cache.layers[0]
    assert layer.positions.ravel().tolist() == [0, 1, 2, 3]
    assert layer.get_seq_length() == 4
    np.testing.assert_array_equal(layer._stored()[0], keys[:, :, best])
    np.testing.assert_array_equal(layer._stored()[1], values[:, :, best])
