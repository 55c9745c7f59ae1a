"""The weights that keys get, summed over queries, beside those of float64."""

import numpy as np
import pytest

import kvkit
from kvkit.cache import Cache, DynamicCache, PagedCache, QuantizedLayer
from kvkit.cpu.attention import key_weights, prepare
from kvkit.formats import BY_NAME


def expected(query, key, scale=None, left=-1, softcap=0.0, sinks=None, bias=0.0, slopes=None):
    """Return the sums [B, H, M] of causal weights, for queries [B, S, H, D] and keys [B, M, Hkv, D]."""
    (_, count, heads, dim), (_, tokens, kv_heads, _) = query.shape, key.shape
    keys = np.repeat(key.astype(np.float64), heads // kv_heads, 2)
    scores = np.einsum("bshd,bmhd->bhsm", query.astype(np.float64), keys) * (scale or dim**-0.5)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    distance = tokens - count + np.arange(count)[:, None] - np.arange(tokens)
    if slopes is not None:
        scores = scores - np.asarray(slopes)[:, None, None] * distance
    scores = scores + bias
    hidden = (distance < 0) | ((distance > left) & (left >= 0))
    weights = np.exp(np.where(hidden, -np.inf, scores))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[:, None, None]
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0).sum(2)


def drawn(batch, count, tokens, heads, kv_heads, dim, dtype=np.float32):
    draw = np.random.default_rng(3)
    states = [(batch, count, heads, dim), (batch, tokens, kv_heads, dim), (batch, tokens, kv_heads, dim)]
    return [draw.standard_normal(shape).astype(dtype) for shape in states]


def check(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


SIZES = [(1, 1, 5, 2, 2, 16), (2, 3, 70, 4, 2, 32), (1, 40, 200, 8, 4, 64), (2, 150, 150, 3, 1, 64),
         (1, 33, 300, 40, 1, 16), (1, 2, 1000, 4, 2, 20)]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_of_weights(sizes, dtype):
    query, key, value = drawn(*sizes, BY_NAME[dtype].dtype)
    options = {"num_heads": sizes[3], "head_dim": sizes[5], "num_kv_heads": sizes[4]}
    out, lse, sums = kvkit.multi_head_attention(
        query, key, value, return_lse=True, return_key_weights=True, **options
    )
    check(sums, expected(query, key))
    plain, plain_lse = kvkit.multi_head_attention(query, key, value, return_lse=True, **options)
    rounding = 2e-2 if dtype == "bfloat16" else 2e-3
    np.testing.assert_allclose(out.astype(float), plain.astype(float), rtol=rounding, atol=rounding / 2)
    np.testing.assert_allclose(lse, plain_lse, rtol=1e-5, atol=1e-5)


MASK = np.where(np.random.default_rng(1).random((1, 1, 60, 90)) < 0.3, -np.inf, 0.5).astype(np.float32)
RULES = {
    "window": ({"window": (7, -1)}, {"left": 7}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "sinks": ({"sinks": np.arange(4, dtype=np.float32)}, {"sinks": np.arange(4)}),
    "mask": ({"attn_mask": MASK}, {"bias": MASK}),
    "boolean mask": ({"attn_mask": np.isfinite(MASK)}, {"bias": np.where(np.isfinite(MASK), 0, -np.inf)}),
    "alibi": ({"is_alibi": True}, {"slopes": [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]}),
    "scale": ({"softmax_scale": 0.5}, {"scale": 0.5}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [60, 1])
def test_what_hides_or_weighs_keys(rule, count):
    given, wanted = (dict(each) for each in RULES[rule])
    query, key, value = drawn(2, count, 90, 4, 2, 32)
    for each in (given, wanted):
        each.update({name: each[name][:, :, :count] for name in ("attn_mask", "bias") if name in each})
    sums = kvkit.multi_head_attention(
        query, key, value, num_heads=4, head_dim=32, num_kv_heads=2, return_key_weights=True, **given
    )[1]
    check(sums, expected(query, key, **wanted))


def test_pages_of_sequences(monkeypatch):
    """Every sequence has sums of its own; a worker that may keep little takes fewer tiles."""
    monkeypatch.setattr(key_weights, "MOST_BYTES", 2**14)
    lengths, counts, (query, key, value) = [40, 7, 130], [3, 1, 100], drawn(1, 104, 177, 4, 2, 32)
    starts, ends = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(lengths))
    pools, tables = np.zeros((2, 30, 16, 2, 32), np.float32), np.zeros((3, 9), np.int64)
    order = iter(np.random.default_rng(0).permutation(30))
    for b in range(3):
        for page in range(-(-lengths[b] // 16)):
            tables[b, page] = block = next(order)
            tokens = slice(ends[b] + 16 * page, min(ends[b] + 16 * page + 16, ends[b + 1]))
            for pool, side in zip(pools, (key, value), strict=True):
                pool[block, : tokens.stop - tokens.start] = side[0, tokens]
    sums = kvkit.paged_attention(query[0], *pools, tables, lengths, starts, return_key_weights=True)[1]
    assert sums.shape == (3, 4, 130)
    for b in range(3):
        own = query[:, starts[b] : starts[b + 1]], key[:, ends[b] : ends[b + 1]]
        check(sums[b, :, : lengths[b]], expected(*own)[0])
        assert not sums[b, :, lengths[b] :].any()
    assert prepare.key_tiles(10**6) == 1


CACHES = {
    "dynamic": DynamicCache,
    "quantized": lambda: Cache([QuantizedLayer(residual_length=16)]),
    "paged": lambda: PagedCache(20, 8, 1, 2, 64, np.float32),
    "paged codes": lambda: PagedCache(20, 8, 1, 2, 64, np.float32, quant_bit=8),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_caches_keys(kind):
    query, key, value = (side.swapaxes(1, 2) for side in drawn(2, 50, 50, 4, 2, 64))
    cache = CACHES[kind]()
    keys, _ = cache.update(key, value, 0)
    out, lse, more = cache.attend(query, 0, return_key_weights=True, return_lse=True)
    plain = cache.attend(query, 0, return_lse=True)
    np.testing.assert_allclose(out, plain[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, plain[1], rtol=1e-5, atol=1e-5)
    out, sums = cache.attend(query, 0, return_key_weights=True)
    np.testing.assert_array_equal(sums, more)
    assert out.shape == (2, 4, 50, 64)
    check(sums, expected(query.swapaxes(1, 2), np.asarray(keys).swapaxes(1, 2)))


def test_shifted_keys_are_refused():
    cache, (query, key, value) = DynamicCache(), (side.swapaxes(1, 2) for side in drawn(1, 8, 8, 1, 1, 16))
    cache.update(key, value, 0)
    cache.remove(2, 4, close=True, rope=kvkit.Rope(16))
    with pytest.raises(kvkit.KvkitError, match="expected False, because keys were moved"):
        cache.attend(query[:, :, -1:], 0, return_key_weights=True)


def test_results_do_not_depend_on_threads():
    import numba

    query, key, value = drawn(1, 300, 300, 4, 1, 32)
    options = {"num_heads": 4, "head_dim": 32, "num_kv_heads": 1, "return_key_weights": True}
    whole, threads = kvkit.multi_head_attention(query, key, value, **options), numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = kvkit.multi_head_attention(query, key, value, **options)
    finally:
        numba.set_num_threads(threads)
    np.testing.assert_array_equal(whole[1], one[1])
