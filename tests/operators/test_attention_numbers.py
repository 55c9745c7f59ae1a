"""Numbers to trust: infinite masks, NaN where it does not count, huge scores, long contexts."""

import math

import attention_scenes as scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import (
    FP16,
    FP32,
    INT8,
    KINDS,
    TOLERANCE,
    any_kind,
    assert_near,
    check,
    one,
    whole_context,
)
from numpy.testing import assert_array_equal

import kvkit
from kvkit.cpu import prefetching
from kvkit.reference.cache import CACHE_ATTRIBUTES
from kvkit.tools.vectors.calls import context_length, dynamic_mask, static_mask

CACHED = ("static_cache", "dynamic_cache")
kinds = pytest.mark.parametrize("kind", KINDS)
packed = pytest.mark.parametrize("kind", ["static", "dynamic"])
cached = pytest.mark.parametrize("kind", CACHED)


def keys_of(call):
    names = ("key", "value") if "key" in call.inputs else ("current_key", "current_value")
    return [call[name] for name in names]


# NaN and infinities that nothing may look at

HIDING = {
    "causal": {},
    "alibi": {"is_causal": False, "is_alibi": True},
    "window": {"is_causal": False, "window": (2, 1)},
    "mask": {"is_causal": False},
    "boolean_mask": {"is_causal": False},
}


def hidden(rng, kind, formats, how, seqlen, poison):
    """Return a call in which some new keys are hidden from queries, and poisoned."""
    call = any_kind(kind, rng, formats, 4, seqlen, dim=24, **HIDING[how])
    for key in keys_of(call):
        key[..., -2:, :, :] = poison
    if "mask" in how:
        shape = (seqlen, seqlen + 4) if "static" in kind else (len(call["query"]), call["kvstarts"][-1])
        mask = rng.random(shape) < 0.7
        mask[::2, -2:], mask[1::2, -2:] = False, True
        zeros = np.where(mask, 0, -np.inf).astype(call["query"].dtype)
        call = call.but(attn_mask=mask if how == "boolean_mask" else zeros)
    return call


@kinds
@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("formats", [FP32, FP16], ids=str)
def test_nan_in_hidden_keys_and_values(kind, how, formats, rng):
    """Queries that see them become NaN; the others never know."""
    for seqlen in (5, 20):
        call = hidden(rng, kind, formats, how, seqlen, np.nan)
        output, _ = check(call, usual=False)
        finite = np.isfinite(output).all(axis=(-1, -2))
        assert finite.any()
        assert not finite.all()


@kinds
@pytest.mark.parametrize("how", HIDING)
def test_infinite_hidden_values(kind, how, rng):
    call = hidden(rng, kind, FP32, how, 20, np.inf)
    keys_of(call)[0][...] = 1
    output, lse = check(call, usual=False)
    assert np.isfinite(lse).all() or "mask" in how
    assert not np.isnan(output).any()


@packed
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, bool], ids=["additive", "boolean"])
def test_keys_hidden_from_every_query(kind, poison, dtype, rng):
    """Whatever is in them, and in any of 300 positions: results as without them."""
    for seqlen in (1, 4):
        call = any_kind(kind, rng, FP32, 300, seqlen, is_causal=False)
        columns = keys_of(call)[0].shape[-3]
        gone = rng.random(columns) < 0.3
        gone[:64] = True
        for key in keys_of(call):
            key[..., gone, :, :] = poison
        row = ~gone if dtype is bool else np.where(gone, -np.inf, 0).astype(np.float32)
        mask = np.broadcast_to(row, (call["query"].shape[-3], columns))
        output, _ = check(call.but(attn_mask=mask))
        assert np.isfinite(output).all()


@kinds
def test_nan_in_queries_stays_in_its_row_and_head(kind, rng):
    for seqlen in (1, 9):
        call = any_kind(kind, rng, FP32, 30, seqlen)
        call["query"][..., 0, 1, 3] = np.nan
        output, _ = check(call, usual=False)
        nan = np.isnan(output)
        assert nan.any()
        assert not nan[..., [0, 2, 3], :].any()


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
@pytest.mark.parametrize("formats", [FP32, FP16, INT8], ids=str)
def test_nan_in_another_sequence(kind, formats, rng):
    """All of one sequence is NaN; the others are what they were."""
    call = getattr(scenes, kind)(rng, formats, [(7, 3), (9, 1), (5, 8), (0, 1)])
    expected = call.copy().run()
    for name in ("query", "current_key", "current_value", "key", "value"):
        if name in call.inputs:
            starts = call["kvstarts"] if name in ("key", "value") else call["seqstarts"]
            call[name][starts[1] : starts[2]] = np.nan
    output = call.run()
    others = np.r_[0:3, 4 : len(output)]
    scenes.assert_same(output[others], expected[others])
    if formats.bit == 0:
        assert np.isnan(output[3]).all()


@kinds
def test_nan_in_one_value_element(kind, rng):
    """It reaches that element of the rows that see it, and no other."""
    call = any_kind(kind, rng, FP32, 6, 9, heads=2)
    keys_of(call)[1][..., -1, 1, 5] = np.nan
    output, lse = check(call, usual=False)
    assert np.argwhere(np.isnan(output)).shape[0] == (2 if "static" in kind else 1)
    assert np.isfinite(lse).all()


@kinds
def test_nan_and_plus_infinity_in_a_mask_stay_in_their_row(kind, rng):
    """What becomes of that row is open."""
    call = any_kind(kind, rng, FP32, 6, 9, dim=16)
    static = "static" in kind
    mask = static_mask(rng, call, (4, 9)) if static else dynamic_mask(rng, call, 4)
    expected = call.but(attn_mask=mask.copy()).expected()[0]
    mask[2, 3, :6] = np.nan
    mask[1, 4, :6] = np.inf
    output = call.but(attn_mask=mask).run()
    for head, row in ((2, 3), (1, 4)):
        output[..., row, head, :] = expected[..., row, head, :] = 0
    assert_near(output, expected, 2e-5)


# Huge scores


def scores(kind, values, weights=None, n=1, **attrs):
    """Return the outputs of queries whose score with key j is values[j]; key j has value j + 1."""
    m = len(values)
    root = 2.0 ** round(math.log2(max(max(map(abs, values)), 1)) / 2)
    query = np.zeros((n, 1, 8))
    query[..., 0] = root
    key = np.zeros((m, 1, 8))
    key[:, 0, 0] = np.array(values) / root
    value = np.zeros((m, 1, 8)) + np.arange(1, m + 1)[:, None, None]
    return one(kind, query, key, value, softmax_scale=1.0, is_causal=False, **attrs).run().reshape(n, 8)[:, 0]


SIZES = [1e4, 1e7, 1e20, 1e30, 1e38]


@kinds
@pytest.mark.parametrize("size", SIZES)
def test_the_largest_score_wins(kind, size):
    values = [-size, 0, size, size / 2, -size / 3]
    for n in (1, 5):
        assert scores(kind, values, n=n).tolist() == [3] * n
    assert scores(kind, [-size, -size * 2**-1, -size])[0] == 2


@kinds
@pytest.mark.parametrize("size", [0, 1, -1, 30, -1e3, 1e4, -1e4, 1e30, -1e30, 1e38, -1e38])
def test_equal_scores_give_the_mean(kind, size):
    assert scores(kind, [size] * 7)[0] == pytest.approx(4, rel=1e-6)
    assert scores(kind, [size] * 300)[0] == pytest.approx(150.5, rel=1e-6)


@kinds
@pytest.mark.parametrize("size", [-64, 64, 1024, -4096, 4096, 65536])
def test_small_differences_of_large_scores(kind, size):
    """Scores size and size - 1 are exact in float32; so is their difference."""
    expected = (1 * math.e + 2) / (math.e + 1)
    assert scores(kind, [size, size - 1])[0] == pytest.approx(expected, abs=4 * 2**-23 * abs(size) + 2e-5)


@kinds
def test_scores_that_grow_and_fall_along_the_context(kind, rng):
    """The running maximum changes with every block of keys, or never again after the first."""
    for seqlen in (1, 4):
        for slope in (0.03, -0.03):
            call = any_kind(kind, rng, FP32, 700, seqlen, is_causal=False, dim=8, heads=2, kv_heads=1)
            static = "static" in kind
            columns = context_length(call) if static else int(call["kvstarts"][-1])
            mask = np.zeros((call["query"].shape[-3], columns), np.float32)
            mask += slope * np.arange(columns, dtype=np.float32)
            check(call.but(attn_mask=mask))


@kinds
def test_the_lowest_finite_mask_is_an_addend(kind, rng):
    """Models mask with it. Beside it every score vanishes, so a row of nothing else gives the mean."""
    for dtype, formats in ((np.float32, FP32), (np.float16, FP16)):
        call = any_kind(kind, rng, formats, 6, 3, dim=8)
        lowest = np.finfo(dtype).min
        static = "static" in kind
        mask = static_mask(rng, call, (3,)) if static else dynamic_mask(rng, call)
        mask = np.where(mask == -np.inf, lowest, mask).astype(dtype)
        if dtype == np.float32:
            mask[1] = np.where(np.isfinite(mask[1]), lowest, mask[1])
        output, lse = check(call.but(attn_mask=mask))
        assert np.isfinite(output).all()
        assert np.isfinite(lse).all()


@kinds
def test_a_huge_sink_leaves_nothing(kind, rng):
    sinks = np.array([1e30, -1e30, np.inf, 0], np.float32)
    output, lse = check(any_kind(kind, rng, FP32, 9, 2, sinks=sinks))
    assert not output[..., [0, 2], :].any()
    assert (np.isfinite(lse) == np.isfinite(sinks)).all()


@kinds
def test_a_sink_of_nan_beside_hidden_keys(kind, rng):
    sinks = np.array([np.nan, 1, np.nan, -np.inf], np.float32)
    call = any_kind(kind, rng, FP32, 9, 2, sinks=sinks)
    columns = context_length(call) if "static" in kind else int(call["kvstarts"][-1])
    rows = call["query"].shape[-3]
    call = call.but(attn_mask=np.full((rows, columns), -np.inf, np.float32))
    lse = call.run(return_lse=True)[1]
    assert_array_equal(lse, np.broadcast_to(np.where(np.isnan(sinks), np.nan, sinks), lse.shape))
    assert_array_equal(call.expected()[1], lse)


@kinds
def test_softcap_of_huge_scores(kind):
    """tanh is 1 or -1 there."""
    call = [1e30, -1e30, 1e30]
    low, high = math.exp(-3), math.exp(3)
    expected = (1 * high + 2 * low + 3 * high) / (2 * high + low)
    assert scores(kind, call, softcap=3.0)[0] == pytest.approx(expected, abs=2e-5)


@kinds
def test_values_of_every_size(kind, rng):
    """Large values do not overflow on the way, small ones do not vanish."""
    for size in (1e-30, 1e30, 3e37):
        call = any_kind(kind, rng, FP32, 50, 3)
        value = keys_of(call)[1]
        if "cache" in call.inputs:
            cache = call["cache"]
            cache[np.isfinite(cache)] *= 0
        value[...] = size * np.sign(value)
        output, _, _, _ = call.expected()
        got = call.run()
        assert scenes.error(got / np.float32(size), output / size) < 2e-5


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("keys", [3, 100, 5000])
def test_sums_of_large_values_do_not_overflow(rows, keys):
    """All of one sign, near the largest float32: their mean is one of them."""
    query, key = np.zeros((1, rows, 1, 16), np.float32), np.zeros((1, keys, 1, 16), np.float32)
    value = np.full_like(key, 3e38)
    output, lse = kvkit.multi_head_attention(
        query, key, value, num_heads=1, head_dim=16, is_causal=False, return_lse=True
    )
    np.testing.assert_allclose(output, 3e38, rtol=2e-5)
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-6)
    output, _ = kvkit.merge_attention_states([output] * 3, [lse] * 3)
    np.testing.assert_allclose(output, 3e38, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("last", [99, 4999])
def test_large_values_that_lose_all_weight(rows, last):
    """What they summed up to so far counts for nothing once a key of a far higher score comes."""
    query = np.ones((1, rows, 1, 16), np.float32)
    key, value = np.zeros((1, last + 1, 1, 16), np.float32), np.full((1, last + 1, 1, 16), 3e38, np.float32)
    key[0, last], value[0, last] = 25, 1
    output = kvkit.multi_head_attention(
        query, key, value, num_heads=1, head_dim=16, is_causal=False, softmax_scale=1.0
    )
    np.testing.assert_array_equal(output, 1)


@pytest.mark.parametrize("top", [1, 600, 4999])
def test_a_nan_score_counts_wherever_the_largest_is(top):
    """A context in parts is as one in one piece."""
    query, key = np.ones((1, 1, 1, 16), np.float32), np.zeros((1, 5000, 1, 16), np.float32)
    key[0, top], key[0, 0] = 62.5, np.nan
    results = kvkit.multi_head_attention(query, key, key * 0 + 1, num_heads=1, head_dim=16, return_lse=True)
    assert all(np.isnan(array).all() for array in results)


COARSE = [scenes.Formats("fp16", "fp32"), scenes.Formats("bf16", "fp16")]


@cached
@pytest.mark.parametrize("formats", COARSE, ids=str)
def test_data_coarser_than_their_cache(kind, formats, rng):
    """Large scores tell a key that was rounded to the data, as a load does, from one that was not.

    Codes are read otherwise: see `test_attention_large_scores.py`.
    """
    for seqlen in (1, 16):
        call = any_kind(kind, rng, formats, 250, seqlen, heads=4, kv_heads=2, dim=128)
        call["query"][...] *= 4
        check(call)


def test_alibi_of_far_tokens(rng):
    """In float16 the distance itself would be rounded from 2048 on."""
    for formats in (FP16, FP32):
        for kind in ("dynamic", "dynamic_cache"):
            call = getattr(scenes, kind)(rng, formats, [(3000, 2)], 8, 1, 8, is_alibi=True)
            check(call)


@kinds
@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0), (4, 3, 0), (1, 0, 2, 3)], ids=str)
def test_masks_without_elements_are_no_masks(kind, shape, rng):
    call = any_kind(kind, rng)
    expected = call.copy().run()
    scenes.assert_same(call.but(attn_mask=np.zeros(shape, np.float32)).run(), expected)


@pytest.mark.parametrize("formats", [FP32, INT8], ids=str)
def test_an_endless_page(formats, rng):
    check(scenes.dynamic_cache(rng, formats, [(0, 5)], page_size=2**40))


# Contexts of one token and of 100,000


@kinds
def test_a_context_of_one_token(kind, rng):
    """Its value comes back, whatever the score."""
    for formats in (FP32, FP16):
        call = any_kind(kind, rng, formats, 0, 1, heads=3, kv_heads=1)
        output, _ = check(call)
        value = keys_of(call)[1]
        first = value[:1] if "static" in kind else value[:1][None]
        scenes.assert_same(
            np.ascontiguousarray(output[:1]).reshape(3, -1), np.repeat(first.reshape(1, -1), 3, 0)
        )


LONG = 100_000


@packed
@pytest.mark.parametrize("formats", [FP32, FP16], ids=str)
def test_a_context_of_100000_tokens(kind, formats, rng):
    for seqlen in (1, 3):
        if kind == "static":
            call = scenes.static(rng, formats, LONG, seqlen, batch=1, heads=1, kv_heads=1, dim=8)
        else:
            call = scenes.dynamic(rng, formats, [(LONG, seqlen), (3, 1)], heads=1, kv_heads=1, dim=8)
        call["value"][...] += 1
        check(call)


@pytest.mark.parametrize("formats", [FP16, INT8], ids=str)
def test_a_cache_of_100000_tokens(formats, rng):
    lengths = [(LONG, 1), (3, 1)]
    for page_size in (16, 128):
        call = scenes.dynamic_cache(rng, formats, lengths, 1, 1, 8, layout=3, page_size=page_size)
        key, value = whole_context(call)
        attrs = {name: value for name, value in call.attributes.items() if name not in CACHE_ATTRIBUTES}
        inputs = {"query": call["query"], "key": key, "value": value}
        inputs |= {name: call[name] for name in ("seqstarts", "kvstarts", "decoding_batches")}
        inputs |= {"max_seqlen": None, "max_kvlen": None, "attn_mask": None}
        expected = scenes.Call(scenes.OPERATORS["dynamic"], inputs, attrs).expected()
        output, lse = call.run(return_lse=True)
        assert_near(output, expected[0], TOLERANCE["float16"])
        assert_near(lse, expected[1], TOLERANCE["float16"], "lse")


@pytest.fixture
def prefetch_distance(monkeypatch):
    """Return a function that sets the distances of this processor."""

    def set_distance(distances):
        monkeypatch.setattr(prefetching, "distances", lambda: distances)

    return set_distance


@pytest.mark.parametrize("formats", [FP32, FP16, scenes.BF16], ids=str)
def test_one_query_over_a_long_run(formats, rng, prefetch_distance):
    """It is read in long blocks, and in short ones again where a value without weight is NaN.

    The bits show that blocks are long, for sums are rescaled at other tokens. Most values cancel each other,
    so that rounding errors are left.
    """
    long = prefetching.TABLE[0].distances  # of a Zen 4
    for options in ({}, {"window": (1200, 0)}, {"softcap": 3.0}, {"is_alibi": True}):
        call = scenes.static(rng, formats, 1500, 1, batch=1, heads=1, kv_heads=1, dim=128, **options)
        key, value = keys_of(call)
        key[:, 750:1500], value[:, 750:1500] = key[:, :750], -value[:, :750]
        prefetch_distance(long._replace(long_run=prefetching.NEVER))
        by_short_blocks = call.run()
        prefetch_distance(long)
        output, _ = check(call)
        assert options or not np.array_equal(output, by_short_blocks)
    call["value"][:, 700] = np.nan
    mask = np.zeros((1, 1501), np.float32)
    mask[0, 700] = -np.inf
    check(call.but(attn_mask=mask.astype(call["query"].dtype)))


def test_elements_in_one_place():
    """Broadcast keys and values are what their copies are."""
    query = np.ones((1, 1, 4, 16), np.float32)
    keys = np.broadcast_to(np.float32(1), (1, 300, 2, 16))
    values = np.broadcast_to(np.arange(300, dtype=np.float32)[None, :, None, None], keys.shape)
    output = kvkit.multi_head_attention(query, keys, values, num_heads=4, num_kv_heads=2, head_dim=16)
    np.testing.assert_allclose(output, 149.5, rtol=1e-6)
    with pytest.raises(kvkit.KvkitError, match=r"^key_cache: expected elements at different addr"):
        kvkit.paged_attention(query[0], keys, values, [[0]], [300])


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("like_data", [False, True], ids=["float32 mask", "mask of the data"])
def test_adjacent_masks_give_the_bits_of_strided_ones(kind, like_data, rng):
    """Adjacent numbers are added 16 rows at a time where tiles have 32, in blocks of 128 tokens."""
    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    query, key, value = (rng.standard_normal((300, heads, 32)).astype(dtype) for heads in (6, 2, 2))
    strided = np.zeros((6, 300, 600), dtype if like_data else np.float32)[..., ::2]
    strided[:] = np.where(rng.random(strided.shape) < 0.2, -np.inf, rng.standard_normal(strided.shape))
    strided[4, 7, 3], key[290] = np.nan, np.nan  # a key that half of the rows hide
    strided[:, ::2, 290] = -np.inf
    sequences, heads = ([0, 37, 300], [0, 37, 300]), {"num_heads": 6, "head_dim": 32, "num_kv_heads": 2}
    outputs = [
        kvkit.dynamic_batching.multi_head_attention(
            query, key, value, *sequences, 0, None, None, mask, **heads
        )
        for mask in (strided, np.ascontiguousarray(strided))
    ]
    assert_array_equal(*(output.view(np.uint8) for output in outputs))
    assert np.isfinite(outputs[0][290:292:2].astype(np.float32)).all()
