"""The cases and tolerances of FlashMLA's and SGLang's own tests of attention over latent caches.

An error is within a tolerance if it is below the absolute or below the relative one, as FlashMLA compares.
"""

import numpy as np
import pytest
from latent_scenes import BF16, F32, pools

import kvkit

# FlashMLA's dense decoding: query heads, of which each key head divides some; lengths of all contexts or,
# with varying lengths, their mean
HEADS = 1, 3, 9, 63, 64, 126, 128
KEY_HEADS = 1, 2, 3, 8
PAGE, FAR = 64, 2147480000  # tokens of a block; an entry of a table behind a context
QUICK = (1, 2, 20), (2, 1, 140), (6, 4, 20)  # batch, queries of a sequence, length
GRID = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(map(str, case)))
    for case in np.array(np.meshgrid((1, 2, 6), (1, 2, 4), (20, 140, 4096))).T.reshape(-1, 3).tolist()
    for case in [tuple(case)]
]


def clipped(rng, *shape):
    return np.clip(rng.standard_normal(shape, F32) / 10, -1, 1).astype(BF16)


def dense_pool(rng, lengths, key_heads):
    """Return (pool, tables, float32 contexts); NaN follows contexts, unused entries are outside the pool."""
    blocks = -(-int(lengths.max()) // 256) * 256 // PAGE
    tables = rng.permutation(len(lengths) * blocks).astype(np.int32).reshape(len(lengths), blocks)
    pool = np.full((tables.size, PAGE, key_heads, 576), np.nan, BF16)
    contexts = []
    for table, length in zip(tables, lengths.tolist(), strict=True):
        contexts.append(clipped(rng, length, key_heads, 576))
        used = -(-length // PAGE)
        for block, begin in zip(table[:used], range(0, length, PAGE), strict=True):
            rows = contexts[-1][begin : begin + PAGE]
            pool[block, : len(rows)] = rows
        table[used:] = FAR
    return pool, tables, [context.astype(F32) for context in contexts]


def dense(query, context, causal, value_dim=512):
    """(output, lse) of the queries [s_q, heads, 576] of a sequence with all of its keys; sums in float64."""
    s_q, heads, dim = query.shape
    key_heads = context.shape[1]
    rows = query.astype(F32).reshape(s_q, key_heads, -1, dim)
    scores = np.einsum("skgd,tkd->kgst", rows, context, optimize=True).astype(float) * 576**-0.5
    if causal:
        later = np.arange(len(context)) > np.arange(s_q)[:, None] + len(context) - s_q
        scores[:, :, later] = -np.inf
    top = np.maximum(scores.max(-1, initial=-np.inf, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    sums = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(sums))[..., 0]
    weights /= np.where(sums > 0, sums, 1)
    output = np.einsum("kgst,tkd->skgd", weights.astype(F32), context[..., :value_dim], optimize=True)
    return output.reshape(s_q, heads, value_dim), lse.reshape(heads, s_q).T


def assert_within(found, expected, absolute, relative):
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    error = np.abs(np.where(np.isinf(expected), 0, found - np.where(np.isinf(expected), 0, expected)))
    error[np.isinf(expected)] = 0
    assert ((error < absolute) | (error < relative * (np.abs(expected) + 1e-6))).all(), error.max()


def check_dense(rng, s_q, lengths, key_heads, all_heads=HEADS):
    """Check every number of query heads, causal and not, over one pool."""
    pool, tables, contexts = dense_pool(rng, lengths, key_heads)
    starts = np.arange(len(lengths) + 1) * s_q
    for heads in all_heads:
        query = clipped(rng, len(lengths) * s_q, heads, 576)
        for causal in (False, True):
            parts = [dense(query[a : a + s_q], context, causal)
                     for a, context in zip(starts.tolist(), contexts, strict=False)]  # fmt: skip
            output, lse = map(np.concatenate, zip(*parts, strict=True))
            found, found_lse = kvkit.mla_attention(
                query,
                pool,
                tables,
                lengths,
                starts,
                softmax_scale=576**-0.5,
                is_causal=causal,
                return_lse=True,
            )
            found = found.astype(F32)
            assert_within(found, output, 8e-4, 2.01 / 128)
            squares = (found.astype(float) ** 2).sum() + (output.astype(float) ** 2).sum()
            assert squares < 1e-12 or 1 - 2 * (found.astype(float) * output).sum() / squares < 5e-6
            assert_within(found_lse, lse, 1e-6, 8.01 / 65536)


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("batch", "s_q", "length"), GRID)
def test_flash_mla_s_dense_grid(rng, batch, s_q, length, turn):
    """Each head count over each number of key heads that divides it, lengths equal or, in turns, not."""
    for i, key_heads in enumerate(KEY_HEADS):
        drawn = rng.normal(length, length / 2, batch) if (i + batch + s_q + turn) % 2 else [length] * batch
        lengths = np.maximum(drawn, s_q).astype(np.int32)
        check_dense(rng, s_q, lengths, key_heads, [heads for heads in HEADS if heads % key_heads == 0])


@pytest.mark.parametrize("length", [140, pytest.param(4096, marks=pytest.mark.slow)])
def test_flash_mla_s_dense_cases_with_empty_contexts(rng, length):
    for key_heads in KEY_HEADS:
        lengths = np.maximum(rng.normal(length, length / 2, 8), 2).astype(np.int32)
        lengths[rng.random(8) < 0.5] = 0
        check_dense(rng, 2, lengths, key_heads, [heads for heads in (9, 64) if heads % key_heads == 0])


# SGLang's flash_mla_with_kvcache_cpu: (batch, queries, heads, indices, page, blocks) and what else; of its
# layouts 1 is rows of 656, 2 rows of 584
ROWS = {1: ("ds_mla:p2", 576), 2: ("ds_v4", 512)}
SPARSE = {
    **{f"page {page} of int{bits}": ((2, 1, 16, 128, page, 4), {"bits": bits})
       for page in (64, 128, 256) for bits in (32, 64)},
    "a query": ((1, 1, 16, 64, 64, 4), {}),
    "2 queries": ((1, 2, 32, 100, 64, 4), {}),
    "3 sequences": ((3, 1, 16, 200, 128, 3), {}),
    "256 indices": ((2, 2, 16, 256, 128, 4), {}),
    "64 heads": ((1, 1, 64, 32, 64, 2), {}),
    "sinks": ((2, 1, 16, 128, 64, 4), {"sinks": True}),
    "lengths": ((3, 1, 16, 128, 128, 4), {"lens": None}),
    "short lengths": ((2, 1, 16, 256, 128, 4), {"lens": 17, "extra": (128, 2), "extra_lens": 9}),
    "none here and there": ((2, 1, 16, 128, 64, 4), {"invalid": 0.25}),
    "none at all": ((2, 1, 16, 256, 128, 4), {"invalid": 1.0}),
    "a second cache": ((2, 1, 16, 64, 64, 4), {"extra": (64, 2)}),
    "a second cache, lengths": ((2, 1, 16, 64, 64, 4), {"extra": (64, 2), "lens": None, "extra_lens": None}),
    "a second cache of 32": ((2, 1, 16, 64, 64, 4), {"extra": (32, 2)}),
    "few of many blocks": ((2, 1, 16, 64, 64, 8), {"extra": (32, 4), "used": (96, 48), "invalid": 0.1}),
    "sinks and a second cache": ((2, 2, 16, 128, 128, 3), {"sinks": True, "lens": None, "extra": (64, 2)}),
}  # fmt: skip


def draw_indices(rng, tokens, count, rows, invalid, dtype):
    """Return rows for each query, different ones if there are enough; some are -1."""
    chosen = [
        rng.permutation(rows)[:count] if rows >= count else rng.integers(0, rows, count)
        for _ in range(tokens)
    ]
    return np.where(rng.random((tokens, count)) < invalid, -1, chosen).astype(dtype)


def draw_lengths(rng, batch, s_q, count, length):
    drawn = rng.integers(max(1, count // 2), count + 1, batch) if length is None else np.full(batch, length)
    return np.repeat(drawn, s_q)


@pytest.mark.parametrize("kind", ["656", "584", "bfloat16"])
@pytest.mark.parametrize("case", SPARSE)
def test_sglang_s_sparse_cases(rng, case, kind):
    (batch, s_q, heads, count, page, blocks), more = SPARSE[case]
    tokens, dtype = batch * s_q, np.dtype(f"int{more.get('bits', 32)}")
    stored, dim = ROWS[1 if kind == "656" else 2]
    query = (rng.standard_normal((tokens, heads, dim), F32).astype(BF16) * BF16(0.5)).astype(BF16)
    scale, used = dim**-0.5, more.get("used", (None, None))

    def side(count, blocks, used, invalid, lens):
        numbers = (rng.standard_normal((blocks, page, 576), F32).astype(BF16) * BF16(0.5)).astype(BF16)
        pool, rows = pools(numbers, "one pool" if kind == "bfloat16" else stored)
        if kind == "bfloat16":
            pool, rows = {"latent": numbers[..., :dim]}, rows[:, :dim]
        rows = rows.astype(BF16).astype(float)  # as SGLang's kernel and its reference read them
        indices = draw_indices(rng, tokens, count, used or blocks * page, invalid, dtype)
        seen = indices >= 0
        if lens is not None:
            seen &= np.arange(count) < lens[:, None]
        return pool, indices, [rows[row[there]] for row, there in zip(indices, seen, strict=True)]

    lens = draw_lengths(rng, batch, s_q, count, more["lens"]) if "lens" in more else None
    pool, indices, found = side(count, blocks, used[0], more.get("invalid", 0), lens)
    called = {"softmax_scale": scale, "indices": indices, "index_lens": lens, "return_lse": True}
    if "extra" in more:
        count, blocks = more["extra"]
        lens = draw_lengths(rng, batch, s_q, count, more["extra_lens"]) if "extra_lens" in more else None
        second, indices, others = side(count, blocks, used[1], 0, lens)
        called["extra"] = second["latent"], indices, lens
        found = [np.concatenate(pair) for pair in zip(found, others, strict=True)]
    if more.get("sinks"):
        called |= {"sinks": rng.standard_normal(heads).astype(F32), "lse_of_sinks": False}
    output, lse = kvkit.mla_attention(query, **pool, **called)
    assert output.dtype == BF16
    for token, rows in enumerate(found):
        scores = query[token].astype(float) @ rows.T * scale
        top = scores.max(-1, initial=-1e30)
        sums = np.exp(scores - top[:, None]).sum(-1)
        with np.errstate(divide="ignore"):
            expected = top + np.log(sums)
        if not len(rows):
            assert not output[token].any()
            assert (lse[token] == -np.inf).all()  # theirs is +inf
            continue
        weights = np.exp(scores - expected[:, None])
        if "sinks" in called:
            weights /= 1 + np.exp(called["sinks"] - expected)[:, None]
        np.testing.assert_allclose(output[token].astype(float), weights @ rows[:, :512], 1e-2, 1e-2)
        np.testing.assert_allclose(lse[token], expected, 1e-2, 5e-3)


@pytest.mark.parametrize("batch", [1, 4, pytest.param(40, marks=pytest.mark.slow)])
def test_sglang_s_decoding(rng, batch):
    """22 heads over tokens in slots of their own, one of them new for each sequence."""
    length = {1: 8 * 111, 4: 8 * 128, 40: 8 * 133}[batch]
    rows = rng.standard_normal((batch * length, 1, 576), F32).astype(BF16)
    query = rng.standard_normal((batch, 22, 576), F32).astype(BF16)
    new = rng.standard_normal((batch, 576), F32).astype(BF16)
    slots = rng.permutation(len(rows))[:batch]
    kvkit.mla_append(new[:, :512], new[:, 512:], rows, slots)
    assert (rows[slots, 0] == new).all()
    tables = np.arange(len(rows)).reshape(batch, length)
    found = kvkit.mla_attention(query, rows, tables, [length] * batch, softmax_scale=576**-0.5).astype(float)
    for token, table in enumerate(tables):
        output, _ = dense(query[token : token + 1], rows[table].astype(F32), True)
        np.testing.assert_allclose(found[token], output[0], 1e-2, 1e-2)
