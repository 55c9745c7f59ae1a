"""Wide products of bfloat16 in pairs, where the processor has them, against float64; calls without, too."""

import functools
import itertools
import math
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from borders import guarded
from numba import types
from numpy.testing import assert_array_equal
from tile_scenes import HAVE_TILES, use_tiles

import kvkit
from kvkit.cpu import machine
from kvkit.cpu.attention import prepare
from kvkit.cpu.simd import pairs
from kvkit.runtime import jit

pytestmark = pytest.mark.cpu
BF16, WIDE = ml_dtypes.bfloat16, 32
KINDS = ["float32", *["pairs"] * machine.has_pairs(), *["tiles"] * HAVE_TILES]


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    monkeypatch.setattr(machine, "has_pairs", lambda: request.param != "float32")
    monkeypatch.setattr(machine, "has_slow_pairs", lambda: False)
    use_tiles(monkeypatch, machine.INSTRUCTIONS if request.param == "tiles" else None)
    prepare.FIXED.clear()
    yield request.param
    prepare.FIXED.clear()


def random(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def pair_rows(source, rows, target):
    pairs.pair_rows(source, rows, target)


def pair_scores(queries, addresses, ahead, count, dim, target, scale, rows):
    pairs.scores(queries, addresses, ahead, count, dim, target, scale, rows)


def pair_sums(weights, addresses, pairs_of_tokens, dim, target, factors, rows):
    pairs.sums(weights, addresses, pairs_of_tokens, dim, target, factors, rows)


def in_order(source, target, rows, dim):
    pairs.in_order(source, target, rows, dim)


@functools.cache
def compiled(function):
    """Return machine code that is not kept on disk, which knows only the package's files."""
    count = function.__code__.co_argcount
    with mock.patch.object(jit, "cache_folder", return_value=None):
        return jit.callback(function, types.void(*[types.int64] * count))


def call(function, *arguments):
    """Return the micro-kernel."""
    compiled(function).ctypes(*[x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments])


def as_pairs(rows):
    """Return [rows, WIDE] as bfloat16 pairs [rows / 2, WIDE, 2]; an odd last row is beside zeros."""
    whole = np.concatenate([rows, np.zeros((len(rows) % 2, WIDE), np.float32)])
    return whole.astype(BF16).reshape(-1, 2, WIDE).swapaxes(1, 2)


def attended(query, key, value, scale):
    """Attend causally in float64; arrays are [heads, tokens, dim]."""
    new, length, group = len(query), len(key), query.shape[1] // key.shape[1]
    query, key, value = (x.astype(np.float64).swapaxes(0, 1) for x in (query, key, value))
    out = np.zeros((*query.shape[:2], value.shape[2]))
    for head in range(len(query)):
        for token in range(new):
            seen = length - new + token + 1
            scores = key[head // group][:seen] @ query[head][token] * scale
            weights = np.exp(scores - scores.max())
            out[head, token] = weights / weights.sum() @ value[head // group][:seen]
    return out


@pytest.mark.parametrize("dim", [16, 24, 80, 128])
@pytest.mark.parametrize("tokens", [(33, 33), (40, 301), (130, 130)], ids=str)
@pytest.mark.parametrize("size", [1, 30], ids=["scores", "large_scores"])
def test_prefill(kind, dim, tokens, size, rng):
    """Within the rounding of weights and of the output, 2^-8 each, of the largest values."""
    new, length = tokens
    query = (size * random(rng, 1, new, 4, dim)).astype(BF16)
    key, value = (random(rng, 1, length, 2, dim).astype(BF16) for _ in range(2))
    out = kvkit.multi_head_attention(query, key, value, num_heads=4, num_kv_heads=2, head_dim=dim)
    expected = attended(query[0], key[0], value[0], 1 / math.sqrt(dim)).swapaxes(0, 1)
    error = np.abs(out[0].astype(np.float64) - expected)
    assert error.max() <= 2**-7 * np.abs(value.astype(np.float64)).max()


def test_keys_that_nobody_sees_do_not_matter(kind, rng):
    """Not even beside one that is seen, in a pair."""
    query, key, value = (random(rng, 1, 41, 1, 16).astype(BF16) for _ in range(3))
    mask = rng.random((41, 41)) < 0.5
    mask[:, 0] = True
    sizes = {"num_heads": 1, "head_dim": 16, "is_causal": False}
    clean = kvkit.multi_head_attention(query, key, value, mask, **sizes)
    for hidden in (np.nan, np.inf):
        other = value.copy()
        mask[:, 7] = False
        expected = kvkit.multi_head_attention(query, key, value, mask, **sizes)
        other[:, 7] = hidden
        found = kvkit.multi_head_attention(query, key, other, mask, **sizes)
        assert np.isfinite(found.astype(np.float32)).all()
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=2**-6)
    assert clean.shape == query.shape


@pytest.mark.skipif(not machine.has_pairs(), reason="the processor has no pairs of bfloat16")
def test_full_tiles_are_floats_where_pairs_are_slow(rng, monkeypatch):
    """More than 16 query rows of a key head have the bits of floats, fewer those of pairs, in splits too."""
    use_tiles(monkeypatch, None)
    for rows, tokens in itertools.product((9, 16, 17, 80), (90, 3000)):
        query, key, value = (
            random(rng, 1, n, h, 64).astype(BF16) for n, h in ((1, rows), *2 * [(tokens, 1)])
        )
        found = []
        for pairs_here, slow in ((True, False), (True, True), (False, False)):
            monkeypatch.setattr(machine, "has_pairs", lambda pairs_here=pairs_here: pairs_here)
            monkeypatch.setattr(machine, "has_slow_pairs", lambda slow=slow: slow)
            prepare.FIXED.clear()
            use_tiles(monkeypatch, None)
            found.append(kvkit.multi_head_attention(query, key, value).tobytes())
        prepare.FIXED.clear()
        assert found[0] != found[2]
        assert found[1] == found[2 if rows > 16 else 0]


def test_what_is_wanted(monkeypatch):
    ask, integers, pairs = machine.has.__wrapped__, machine.has_integers(), machine.has_pairs()
    for most, expected in (
        ("avx512", (False, False)),
        ("avx512vnni", (integers, False)),
        ("avx512bf16", (integers, pairs)),
        ("", (integers, pairs)),
    ):
        monkeypatch.setenv("KVKIT_CPU", most)
        assert (ask("avx512vnni"), ask("avx512bf16")) == expected
    monkeypatch.setenv("KVKIT_CPU", "386")
    words = "KVKIT_CPU: expected avx512 or avx512vnni or avx512bf16 or amx, got '386'"
    with pytest.raises(kvkit.KvkitError, match=words):
        ask("avx512vnni")


if machine.has_pairs():

    @pytest.mark.parametrize("rows", [2, 5, 16])
    def test_pair_rows(rows, rng):
        source, (kept, untouched) = random(rng, rows, WIDE), guarded((-(-rows // 2), WIDE))
        target = kept.view(BF16).reshape(-1, WIDE, 2)
        call(pair_rows, source, rows, target)
        assert_array_equal(target, as_pairs(source))
        untouched()
        call(pair_rows, source, rows, source)
        assert_array_equal(source.view(BF16).reshape(-1, WIDE, 2)[: len(target)], target)

    @pytest.mark.parametrize("rows", [8, 16, 24, WIDE])
    @pytest.mark.parametrize("tokens", [1, 8, 13])
    def test_products(tokens, rows, rng):
        """Of rows that lie in any order; an odd last token has a partner of weight 0."""
        dim, chosen = 48, rng.permutation(24)[:16]
        pool, weights = random(rng, 24, 64).astype(BF16), random(rng, tokens, WIDE)
        addresses = pool.ctypes.data + chosen * pool.strides[0]
        rows_of_pool = pool[chosen, :dim].astype(np.float64)
        start, factors = random(rng, rows, dim), random(rng, WIDE)
        (sums, untouched), ordered = guarded((rows, dim)), np.empty((rows, dim), np.float32)
        sums[...], packed = start, as_pairs(weights).copy()
        call(pair_sums, packed, addresses, -(-tokens // 2), dim, sums, factors, rows)
        untouched()
        call(in_order, sums, ordered, rows, dim)
        expected, before = np.empty((rows, dim), np.float32), start * factors[:rows, None]
        call(in_order, before, expected, rows, dim)
        expected = expected + weights.astype(BF16).astype(float).T[:rows] @ rows_of_pool[:tokens]
        np.testing.assert_allclose(ordered, expected, rtol=1e-5, atol=1e-5)
        sums[...] = start
        call(pair_sums, packed, addresses, 0, dim, sums, factors, rows)
        assert_array_equal(sums, start * factors[:rows, None])
        queries, (scores, untouched) = random(rng, dim, WIDE), guarded((16, WIDE))
        scale, arranged = np.float32([0.3]), as_pairs(queries).copy()
        exact = rows_of_pool @ queries.astype(BF16).astype(np.float64) * 0.3
        for ahead in (0, addresses):
            call(pair_scores, arranged, addresses, ahead, 16, dim, scores, scale, rows)
            np.testing.assert_allclose(scores[:, :rows], exact[:, :rows], rtol=1e-5, atol=1e-5)
        untouched()
