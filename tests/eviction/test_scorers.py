"""Scorers against the vectors of their specification, and what must hold of any."""

import ml_dtypes
import numpy as np
import pytest

import kvkit
from kvkit import eviction

h, s, c = np.meshgrid(range(2), range(8), range(4), indexing="ij")
KEYS = ((3 * s + 5 * h + 2 * c + s * c) % 7 - 3).astype(np.float32)[None]
VALUES = ((s + 2 * h + 3 * c + s * c * c) % 5 - 2).astype(np.float32)[None]
a, i, c = np.meshgrid(range(4), range(8), range(4), indexing="ij")
QUERIES = ((2 * i + 3 * a + c + i * c) % 5 - 2).astype(np.float32)[None]
a, c, w = np.meshgrid(range(4), range(4), range(3), indexing="ij")
OUTPUT = ((a + 2 * c + 3 * w) % 3 - 1).astype(np.float32)
ROPE = kvkit.Rope(4)


def causal_weights(queries, keys):
    group, (count, tokens) = queries.shape[1] // keys.shape[1], (queries.shape[2], keys.shape[2])
    scores = queries.astype(float) @ np.repeat(keys, group, 1).swapaxes(2, 3) / queries.shape[3] ** 0.5
    scores[..., np.arange(tokens) > tokens - count + np.arange(count)[:, None]] = -np.inf
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(np.float32)


WEIGHTS = causal_weights(QUERIES, KEYS)
KNORM = -np.sqrt(np.square(KEYS).sum(-1))
# What is given, the scores of both heads, and what half of the tokens keeps.
VECTORS = {
    "streaming": ({"budget": 4, "sinks": 1}, "1 0 0 0 0 1 1 1 / 1 0 0 0 0 1 1 1", "0 5 6 7 / 0 5 6 7"),
    "knorm": (
        {},
        "-4.472136 -3.741657 -4.358899 -3.741657 -2.44949 -4 -4.795832 -4.472136 /"
        "-3.872983 -3.741657 -3.162278 -4.123106 -3.741657 -6 -2.44949 -3.872983",
        "1 3 4 5 / 1 2 4 6",
    ),
    "keydiff": (
        {},
        "-.983534 -.231702 .340107 -.394192 .839611 .142631 .548548 -.983534 /"
        "-.912334 .129986 -.427648 .646958 -.237968 .432988 .009969 -.912334",
        "2 4 5 6 / 1 3 5 6",
    ),
    "snapkv": (
        {"queries": QUERIES, "window": 2, "kernel": 3},
        ".092574 .180664 .255678 .182944 .107449 .015532 1.257843 1.257843 /"
        ".212464 .257843 .193111 .066996 .051163 .033467 1.257843 1.257843",
        "2 3 6 7 / 0 1 6 7",
    ),
    "snapkv by weights": (
        {"weights": WEIGHTS, "window": 2, "kernel": 3, "pool": "max", "reduce": "sum"},
        ".549343 .623908 1.078894 1.078894 .562875 .086123 2.078894 2.078894 /"
        ".877002 .877002 .780216 .307253 .205753 .177273 2.078894 2.078894",
        "2 3 6 7 / 0 1 6 7",
    ),
    "tova": (
        {"queries": QUERIES},
        ".021655 .183502 .375053 .227132 .005043 .10913 .05683 1.375053 /"
        ".021655 .183502 .375053 .227132 .005043 .10913 .05683 1.375053",
        "1 2 3 7 / 1 2 3 7",
    ),
    "observed": (
        {"queries": QUERIES},
        ".351013 .205037 .326023 .239455 .057188 .034384 .131926 .007473 /"
        ".391532 .292429 .198318 .144481 .034752 .207818 .055065 .035838",
        "0 1 2 3 / 0 1 2 5",
    ),
    "observed by sums": (
        {"weights": WEIGHTS.sum(2), "normalised": False},
        "2.8081 1.435257 1.95614 1.197275 .228752 .103151 .263853 .007473 /"
        "3.132254 2.047002 1.189909 .722403 .13901 .623454 .11013 .035838",
        "0 1 2 3 / 0 1 2 3",
    ),
    "h2o": (
        {"weights": WEIGHTS, "recent": 2},
        "2.8081 1.435257 1.95614 1.197275 .228752 .103151 4.132254 4.132254 /"
        "3.132254 2.047002 1.189909 .722403 .13901 .623454 4.132254 4.132254",
        "0 2 6 7 / 0 1 6 7",
    ),
    "lagkv": ({"sinks": 1, "lag": 2}, "1 .5 0 .5 0 1 1 1 / 1 0 .5 0 .5 1 1 1", "0 5 6 7 / 0 5 6 7"),
    "lagkv across": (
        {"sinks": 1, "lag": 2, "cross": True},
        "1 .546874 .453126 .521728 .478272 1 1 1 / 1 .493613 .506387 .46876 .53124 1 1 1",
        "0 5 6 7 / 0 5 6 7",
    ),
    "lagkv of few": (
        {"sinks": 4, "lag": 8}, "1 1 1 1 0 .25 .5 .75 / 1 1 1 1 0 .25 .5 .75", "0 1 2 3 / 0 1 2 3",
    ),
    "cur": (
        {"sinks": 1, "window": 4},
        "1 .1226 .083193 .1226 .05416 .144426 .207612 .090266 /"
        "1 .056504 .134534 .160095 .067173 .259095 .021591 .179927",
        "0 1 5 6 / 0 3 5 7",
    ),
    "leverage": (
        {}, "-1.028626 .106509 .816403 .106046 -1.596657 1.809096 .816982 -1.028626 /" + "0 " * 8,
        "1 2 5 6 / 1 2 4 5",
    ),
    "non_causal": (
        {"queries": QUERIES, "chunk": 4},
        "-1.270581 .066549 .683973 1.854621 1.761456 1.307529 .056275 -1.18769 /"
        "-.576022 .237121 -.660781 -.990405 -.42326 -.493589 .507546 -.872742",
        "2 3 4 5 / 1 4 5 6",
    ),
    "non_causal of a short chunk": (
        {"queries": QUERIES, "chunk": 3},
        "-.408318 .921292 -.292936 1.54513 1.472035 1.717268 .176688 -1.079828 /" + "0 " * 8, "1 3 4 5 /",
    ),
    "expected": (
        {"queries": QUERIES, "rope": ROPE, "future": 4, "sinks": 1},
        "3.387878 .960284 .217931 .369712 .111082 .565843 .503812 .24278 /"
        "3.387878 .004401 .00831 .00254 .004006 2.387878 .006749 .041502",
        "0 1 5 6 / 0 2 5 7",
    ),
    "expected of means": (
        {"queries": QUERIES, "rope": ROPE, "future": 4, "sinks": 1, "covariance": False, "vnorm": False},
        "1.332407 .149818 .086633 .086721 .104199 .173011 .155783 .243835 /" + "0 " * 8, "0 5 6 7 /",
    ),
    "kvzip": (
        {"weights": WEIGHTS[:, :, -3:], "sinks": 0},
        ".879626 .895012 .981579 .80936 .138631 .109535 .483707 .014824 /"
        ".941401 .836661 .516385 .11323 .041655 .891503 .16127 .069885",
        "0 1 2 3 / 0 1 2 5",
    ),
    "critical": (
        {"scores": KNORM + 10, "output_weights": OUTPUT, "keep": 0.5},
        "24.875838 inf 25.385405 37.550656 inf 27.00045 31.225611 24.875838 /"
        "27.572025 9.387664 inf 52.892949 56.325984 18.00045 inf 9.190675",
        "1 3 4 6 / 2 3 4 6",
    ),
    "rkv": (
        {"queries": QUERIES, "window": 2, "kernel": 3, "mix": 0.1},
        "-.07717 -.07211 -.066083 -.07388 -.089777 -.114314 .933959 .933959 /"
        "-.073305 -.066041 -.083587 -.082853 -.110515 -.098413 .933959 .933959",
        "1 2 6 7 / 0 1 6 7",
    ),
    "triattention": (
        {"queries": QUERIES[:, [0, 3]], "rope": ROPE, "now": 8, "offsets": [1, 2, 4]},
        "10.162439 5.706864 7.55484 5.519769 2.787554 3.962811 4.344321 10.162439 /"
        "7.443611 7.058636 6.369882 7.724003 6.878266 10.170496 4.405578 7.443611",
        "0 1 2 7 / 0 3 5 7",
    ),
    "qfilter": (
        {"filters": np.array([[1, 0, 0, 0], [0, 0, 0, -1]], np.float32)},
        "3 0 -3 1 -2 2 -1 3 / 1 0 -1 -2 -3 3 2 1", "0 3 5 7 / 0 5 6 7",
    ),
}  # fmt: skip


def numbers(text):
    rows = [row.split() for row in text.split("/")]
    return [np.array(row, float) for row in rows]


@pytest.mark.parametrize("case", VECTORS)
def test_vectors(case):
    given, scores, kept = VECTORS[case]
    result = eviction.scores(case.partition(" ")[0], KEYS, VALUES, **given)
    assert result.dtype == np.float32
    assert result.shape == (1, 2, 8)
    for head, wanted in enumerate(numbers(scores)):
        if wanted.any():
            np.testing.assert_allclose(result[0, head], wanted, rtol=1e-6, atol=1e-6)
    rows = eviction.select(result, keep=0.5)
    for head, wanted in enumerate(numbers(kept)):
        if len(wanted):
            np.testing.assert_array_equal(rows[0, head], wanted)


def test_bounds_of_pages_and_channels():
    bounds = eviction.scores("quest", KEYS, queries=QUERIES, page=4)
    np.testing.assert_allclose(bounds[0], [[15, 11], [8, 10], [13, 13], [9, 12]])
    products = QUERIES[:, :, -1:] @ np.repeat(KEYS, 2, 1).swapaxes(2, 3)
    assert (np.repeat(eviction.scores("quest", KEYS, queries=QUERIES, page=3), 3, -1)[..., :8]
            >= products[:, :, 0] - 1e-6).all()  # fmt: skip
    channels = eviction.scores("think", KEYS, queries=QUERIES, window=2)
    np.testing.assert_allclose(channels[0], [[9.25, 7.25, 9.0625, 4.625], [7, 8.09375, 8.15625, 7.25]])


def test_leverage_sums_to_the_dimension():
    keys = np.random.default_rng(0).standard_normal((1, 1, 40, 6)).astype(np.float32)
    raw = eviction.by_outliers.raw_leverage(keys, 0)
    assert raw.sum() == pytest.approx(6)
    rotated = ROPE.rotate(keys, np.arange(40))
    back = eviction.scores("leverage", rotated, rope=ROPE)
    np.testing.assert_allclose(back, eviction.scores("leverage", keys), atol=1e-4)


def test_compactor_is_the_sum_of_its_parts():
    given = {"queries": QUERIES, "chunk": 4}
    result = eviction.scores("compactor", KEYS, VALUES, blend=0.5, first=1, last=2, **given)
    parts = 0.5 * eviction.scores("leverage", KEYS) + eviction.scores("non_causal", KEYS, VALUES, **given)
    np.testing.assert_allclose(result[..., 1:6], parts[..., 1:6], rtol=1e-6)
    np.testing.assert_allclose(result[..., [0, 6, 7]], parts[..., 1:6].max() + 1, rtol=1e-6)


def test_finch_multiplies_weights_by_the_keys_before_the_query():
    means = (WEIGHTS[..., -3:, :5] * np.array([[5], [6], [7]])).mean(2).reshape(1, 2, 2, 5).mean(2)
    result = eviction.scores("finch", KEYS, queries=QUERIES, window=3)
    np.testing.assert_allclose(result[..., :5], means, rtol=1e-5)


def test_expected_attention_adds_eps_before_it_multiplies_by_values():
    given = {"queries": QUERIES, "rope": ROPE, "sinks": 0}
    without, result = (eviction.scores("expected", KEYS, VALUES, **given, eps=eps) for eps in (0, 1))
    np.testing.assert_allclose(result - without, np.sqrt(np.square(VALUES).sum(-1)), rtol=1e-5)


def drawn(name, batch=3, tokens=70, dim=8, dtype=np.float32):
    """Return what a scorer needs of random numbers, and its options."""
    draw = np.random.default_rng(5)
    keys, values = draw.standard_normal((2, batch, 2, tokens, dim)).astype(dtype)
    queries = draw.standard_normal((batch, 4, tokens, dim)).astype(dtype)
    required = {
        "streaming": {"budget": 9}, "qfilter": {"filters": np.ones((2, dim), np.float32)},
        "finch": {"window": 5}, "expected": {"rope": kvkit.Rope(dim)},
        "triattention": {"rope": kvkit.Rope(dim)}, "compactor": {"blend": 0.5}, "h2o": {"recent": 5},
        "critical": {"scores": draw.random((batch, 2, tokens)), "keep": 0.5,
                     "output_weights": draw.random((4, dim, 3)).astype(np.float32)},
    }  # fmt: skip
    needs = eviction.SCORERS[name].needs
    arrays = {"values": values, "queries": queries, "weights": causal_weights(queries, keys)}
    return (
        keys,
        {need: arrays[need] for each in needs for need in each.split(" or ")[:1]},
        required.get(name, {}),
    )


@pytest.mark.parametrize("name", sorted(eviction.SCORERS))
def test_rows_of_the_batch_do_not_depend_on_each_other(name):
    keys, arrays, options = drawn(name)
    whole = eviction.scores(name, keys, **arrays, **options)
    one = {key: value[1:2] for key, value in arrays.items()}
    if "scores" in options:
        options = options | {"scores": options["scores"][1:2]}
    np.testing.assert_allclose(
        eviction.scores(name, keys[1:2], **one, **options)[0], whole[1], rtol=2e-5, atol=1e-5
    )
    assert np.isfinite(whole).all() == (name != "critical")


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "rkv", "observed"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_widened(name, dtype):
    keys, arrays, options = drawn(name, dtype=dtype)
    wide = {key: value.astype(np.float32) for key, value in arrays.items()}
    np.testing.assert_array_equal(
        eviction.scores(name, keys, **arrays, **options),
        eviction.scores(name, keys.astype(np.float32), **wide, **options),
    )


@pytest.mark.parametrize("name", ["snapkv", "observed", "rkv", "finch"])
def test_blocks_of_queries_change_nothing(name, monkeypatch):
    """A long context is scored some queries at a time."""
    keys, arrays, options = drawn(name)
    arrays.pop("weights", None)
    arrays["queries"] = np.random.default_rng(1).standard_normal((3, 4, 70, 8)).astype(np.float32)
    whole = eviction.scores(name, keys, **arrays, **options)
    monkeypatch.setattr(eviction.inputs, "BLOCK_ELEMENTS", 300)
    monkeypatch.setattr(eviction.by_queries, "SEARCHED", 16)
    np.testing.assert_allclose(eviction.scores(name, keys, **arrays, **options), whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("largest", [0.25, 2**24, 1e17])
def test_protected_tokens_score_above_all_others(largest):
    scores = eviction.scores("tova", KEYS, weights=np.full((1, 4, 1, 8), largest, np.float32))
    assert (scores[..., :-1] == np.float32(largest)).all()
    assert (scores[..., -1] > scores[..., 0]).all()


BAD = KEYS.copy()
BAD[0, 1, 2, 3] = np.nan
WRONG = {
    "name": ("nearest", {}, "name: expected a scorer that `kvkit list scorers` prints"),
    "NaN": ("knorm", {"keys": BAD}, "keys: expected finite numbers, got nan at (0, 1, 2, 3)"),
    "infinite": ("knorm", {"keys": KEYS + np.float32(np.inf)},
        "keys: expected finite numbers, got inf at (0, 0, 0, 0)"),
    "axes": ("knorm", {"keys": KEYS[0]}, "keys: expected 4 axes, got shape (2, 8, 4)"),
    "dtype": ("knorm", {"keys": KEYS.astype(float)},
        "keys: expected dtype float32 or float16 or bfloat16, got"),
    "empty": ("knorm", {"keys": KEYS[:, :, :0]}, "keys: expected at least one row, head, token and element"),
    "values": ("cur", {"values": VALUES[:, :1]}, "values: expected shape (1, 2, 8, any), got (1, 1, 8, 4)"),
    "no values": ("cur", {"values": None},
        "values: expected values [B, Hkv, S, Dv], which cur needs, got None"),
    "no queries": ("rkv", {}, "queries: expected queries [B, Hq, W, D] of the last tokens, which rkv needs"),
    "no weights": ("kvzip", {}, "weights: expected weights [B, Hq, W, S], or their sums"),
    "neither": ("snapkv", {}, "queries: expected queries [B, Hq, W, D] of the last tokens or weights"),
    "heads": ("tova", {"queries": QUERIES[:, :3]}, "queries: expected shape (1, a multiple of 2, 1 to 8, 4)"),
    "weights": ("tova", {"weights": WEIGHTS[..., :7]},
        "weights: expected shape (1, a multiple of 2, 1 to 8, 8)"),
    "no rows of weights": ("tova", {"weights": WEIGHTS[:, :, :0]},
        "weights: expected shape (1, a multiple of 2, 1 to 8, 8)"),
    "window": ("snapkv", {"queries": QUERIES},
        "window: expected fewer than the 8 tokens (window=4, say), got 64"),
    "few queries": ("snapkv", {"queries": QUERIES[:, :, :2], "window": 3},
                    "queries: expected those of the last 3 tokens (or window=2), got 2"),
    "kernel": ("snapkv", {"queries": QUERIES, "window": 2, "kernel": 4},
        "kernel: expected an odd number, got 4"),
    "pool": ("snapkv", {"queries": QUERIES, "window": 2, "pool": "min"}, "pool: expected 'avg' or 'max'"),
    "option": ("knorm", {"window": 3}, "knorm: expected options among none, got window"),
    "no option": ("streaming", {}, "budget: expected a value, which streaming needs, got None"),
    "rope": ("expected", {"queries": QUERIES, "rope": "none"},
        "rope: expected a kvkit.Rope of at most 4 elements"),
    "filters": ("qfilter", {"filters": np.ones((1, 4), np.float32)},
        "filters: expected shape (2, 4), got (1, 4)"),
    "first": ("critical", {"scores": KNORM, "output_weights": OUTPUT, "keep": 0.5, "first": 3},
        "first: expected a share from 0 to 1, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refusals(case):
    name, given, message = WRONG[case]
    with pytest.raises(kvkit.KvkitError) as caught:
        eviction.scores(name, **{"keys": KEYS, "values": VALUES} | given)
    assert str(caught.value).startswith(message)
