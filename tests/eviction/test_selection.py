"""What stays of scored tokens: counts, budgets, chunks, and heavy hitters step by step."""

import numpy as np
import pytest

import kvkit
from kvkit import eviction

RANDOM = np.random.default_rng(0).random((2, 3, 20)).astype(np.float32)


def heads_of(kept, heads=3):
    """Return the rows of each head."""
    rows = np.split(kept.rows, kept.starts[1:-1])
    return [rows[b : b + heads] for b in range(0, len(rows), heads)]


def test_equal_scores_keep_the_earlier_rows():
    assert eviction.select(np.array([[[1.0, 0, 1, 1, 0]]]), count=2).tolist() == [[[0, 2]]]


@pytest.mark.parametrize(
    ("tokens", "keep", "count"), [(1000, 0.1, 100), (8, 0.5, 4), (10, 0.29, 2), (9, 0.01, 1)]
)
def test_shares_round_down(tokens, keep, count):
    assert eviction.select(np.zeros((1, 1, tokens)), keep=keep).shape == (1, 1, count)


def test_protected_rows_stay():
    rows = eviction.select(RANDOM, keep=0.2, first=2, last=2)
    assert np.isin([0, 1, 18, 19], rows).all()
    assert rows.shape == (2, 3, 4)


def test_ada_shares_a_layers_rows_over_its_heads():
    """Every head keeps a fifth of the mean, and the best of all heads stay."""
    kept = heads_of(eviction.select(RANDOM, keep=0.5, budget="ada"))
    for scores, rows in zip(RANDOM, kept, strict=True):
        assert sum(map(len, rows)) == 30
        assert min(map(len, rows)) >= 2
        staying = np.concatenate([scores[h][rows[h]] for h in range(3)])
        assert np.sort(staying).tolist() == np.sort(scores.ravel())[-30:].tolist()
    one_sided = np.stack([np.zeros((1, 10)), np.ones((1, 10))], 1)  # but for what is safe
    assert [len(rows) for rows in heads_of(eviction.select(one_sided, keep=0.5, budget="ada"), 2)[0]] == [
        1,
        9,
    ]


def test_counts_and_thresholds_of_heads():
    rows = heads_of(eviction.select(RANDOM, budget=[1, 0, 20]))
    assert [[len(row) for row in each] for each in rows] == [[1, 0, 20]] * 2
    assert rows[1][0][0] == RANDOM[1, 0].argmax()
    bound = RANDOM[0, 0, 3]  # a score that is the threshold stays
    rows = heads_of(eviction.select(RANDOM, threshold=bound, last=3))
    for scores, each in zip(RANDOM.reshape(6, 20), [row for one in rows for row in one], strict=True):
        assert each.tolist() == [i for i in range(20) if scores[i] >= bound or i >= 17]


@pytest.mark.parametrize(
    ("layers", "tokens", "keep", "window", "counts"),
    [(4, 1000, 0.5, 64, [936, 645, 355, 64]), (4, 1000, 0.25, 64, [250] * 4), (4, 1000, 0.1, 512, [100] * 4),
     (32, 4096, 0.1, 64, [410] * 32)],
)  # fmt: skip
def test_pyramids(layers, tokens, keep, window, counts):
    found = eviction.budgets("pyramid", layers=layers, tokens=tokens, keep=keep, window=window)
    assert found.tolist() == counts


def test_other_budgets():
    assert eviction.budgets("uniform", layers=3, tokens=10, keep=0.29).tolist() == [2, 2, 2]
    table = np.array([[True, False], [False, False]])
    assert eviction.budgets("duo", table=table, tokens=1000).tolist() == [[1000, 384], [384, 384]]
    assert eviction.budgets("ada", scores=RANDOM, keep=0.5).sum(1).tolist() == [30, 30]


def test_a_global_budget_is_one_threshold():
    layers = [RANDOM, RANDOM[:, :, :10] + 0.3]
    counts = eviction.budgets("global", scores=layers, keep=0.5)
    for b in range(2):
        scores = np.concatenate([each[b].ravel() for each in layers])
        bound = np.sort(scores)[-45]
        assert counts[:, b].tolist() == [[int((head >= bound).sum()) for head in each[b]] for each in layers]


def test_chunks_stay_whole():
    scores = -np.sqrt([[20, 14, 19, 14, 6, 16, 23, 20], [15, 14, 10, 17, 14, 36, 6, 15]])[None]
    assert eviction.chunks(scores, 2, keep=0.5).tolist() == [[[2, 3, 6, 7]] * 2]
    ends = np.zeros((2, 1, 7))
    ends[0, 0, 6], ends[1, 0, 0] = 1, 1  # the short chunk stays in one row of the batch
    assert eviction.chunks(ends, 3, keep=0.4).starts.tolist() == [0, 1, 4]


def test_heavy_hitters_token_by_token_and_of_a_prompt():
    """A prompt that fits gives the same tokens at once, where no weight was renormalised."""
    weights = np.random.default_rng(2).random((2, 4, 9, 9)).astype(np.float32) * np.tri(9, dtype=np.float32)
    at_once, by_token = (eviction.H2O(heavy=5, recent=4, num_kv_heads=2) for _ in range(2))
    assert at_once.add(weights).shape == (2, 2, 0)
    for i in range(9):
        by_token.add(weights[:, :, i, : i + 1])
    last = np.ones((2, 4, 10), np.float32)
    dropped = [h2o.add(last) for h2o in (at_once, by_token)]
    np.testing.assert_array_equal(*dropped)
    assert dropped[0].shape == (2, 2, 1)
    assert at_once.positions.shape == (2, 2, 9)
    sums = weights.reshape(2, 2, 2, 9, 9).sum((2, 3))[..., :6]
    np.testing.assert_array_equal(dropped[0][..., 0], sums.argmin(-1))


def test_heavy_hitters_of_the_example():
    """The specification's vectors: what stays after eight tokens, of weights over what is there."""
    h, s, c = np.meshgrid(range(2), range(8), range(4), indexing="ij")
    keys = (3 * s + 5 * h + 2 * c + s * c) % 7 - 3
    a, i, c = np.meshgrid(range(4), range(8), range(4), indexing="ij")
    queries = (2 * i + 3 * a + c + i * c) % 5 - 2
    for sizes, wanted in (((2, 2), [[0, 2, 6, 7], [0, 1, 6, 7]]), ((1, 1), [[0, 7], [0, 7]])):
        h2o, stored = eviction.H2O(*sizes, num_kv_heads=2), [[], []]
        for t in range(8):
            rows = [[*each, t] for each in stored]
            scores = np.stack([keys[a // 2, rows[a // 2]] @ queries[a, t] / 2 for a in range(4)])
            weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            h2o.add(weights[None].astype(np.float32))
            stored = h2o.positions[0].tolist()
        assert stored == wanted


NAN = RANDOM.copy()
NAN[1, 2, 3] = np.nan
WRONG = {
    "share": (lambda: eviction.select(RANDOM, keep=1.5),
        "keep: expected a share above 0 and at most 1, got 1.5"),
    "neither": (lambda: eviction.select(RANDOM), "keep: expected a share of the tokens, or else a count"),
    "both": (lambda: eviction.select(RANDOM, keep=0.5, count=0),
        "keep: expected a share of the tokens, or else a count, got both"),
    "count": (lambda: eviction.select(RANDOM, count=21), "count: expected an integer from 1 to 20, got 21"),
    "NaN": (lambda: eviction.select(NAN, keep=0.5), "scores: expected numbers, got nan at (1, 2, 3)"),
    "axes": (lambda: eviction.select(RANDOM[0], keep=0.5), "scores: expected an array of floats [B, Hkv, S]"),
    "budget": (lambda: eviction.select(RANDOM, keep=0.5, budget="fair"),
        "budget: expected 'uniform' or 'ada'"),
    "counts": (lambda: eviction.select(RANDOM, budget=[1, 2]),
        "budget: expected numbers of shape (3,) or (2, 3)"),
    "large": (lambda: eviction.select(RANDOM, budget=[1, 21, 2]),
        "budget: expected counts of 0 to 20, got 21"),
    "room": (lambda: eviction.select(RANDOM, count=3, first=2, last=2),
        "keep: expected room for the 4 first"),
    "kind": (lambda: eviction.budgets("fair"), "kind: expected 'uniform' or"),
    "options": (lambda: eviction.budgets("duo", keep=1),
        "budgets('duo'): expected the options of this kind, got an unexpected"),
    "table": (lambda: eviction.budgets("duo", table=[[1]], tokens=3), "table: expected bool [layers, Hkv]"),
    "weights": (lambda: eviction.H2O(num_kv_heads=2).add(RANDOM),
        "weights: expected [2, a multiple of 2, 0 stored"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refusals(case):
    call, message = WRONG[case]
    with pytest.raises(kvkit.KvkitError) as caught:
        call()
    assert str(caught.value).startswith(message)
