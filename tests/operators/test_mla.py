"""Attention over latent caches, against float64 over the rows that a cache of each kind stands for."""

import itertools
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from latent_scenes import BF16, F16, F32, LATENT, ROPE, pools
from tile_scenes import HAVE_TILES, needs_tiles

import kvkit
from kvkit import KvkitError, reference
from kvkit.cpu import machine
from kvkit.formats import decode, encode
from kvkit.runtime.arrays import zeros

PAGE, FP8 = 16, ml_dtypes.float8_e4m3fn
SCALE = 192**-0.5


def expected(query, contexts, values, causal, sinks=None):
    """Return (output, lse without sinks) in float64, context by context."""
    outputs, lses, begin = [], [], 0
    for count, rows in contexts:
        for i in range(count):
            seen = rows[: len(rows) - count + i + 1] if causal else rows
            scores = query[begin + i].astype(float) @ seen.T.astype(float) * SCALE  # [heads, rows]
            top = scores.max(-1, initial=-np.inf)
            lse = (
                top + np.log(np.exp(scores - top[:, None]).sum(-1))
                if len(seen)
                else np.full(len(scores), -np.inf)
            )
            weights = np.exp(scores - lse[:, None])
            if sinks is not None:
                weights /= 1 + np.exp(sinks - lse)[:, None]
            outputs.append(weights @ seen[:, :values].astype(float))
            lses.append(lse)
        begin += count
    return np.array(outputs), np.array(lses)


KINDS = "one pool", "with gaps", "two pools", "ds_mla", "ds_mla:p2", "ds_v4", "ds_v4:vllm"
TOLERANCE = {F32: 2e-5, F16: 2e-3, BF16: 1.6e-2}


def assert_close(found, output, lse, dtype):
    attn_output, found_lse = found
    assert attn_output.dtype == dtype
    np.testing.assert_allclose(attn_output.astype(float), output, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(found_lse, lse, rtol=2e-6, atol=5e-6)


def scene(kind, dtype, heads, counts, seed=0):
    """Return a pool with tables, and `counts` queries of each sequence."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((9, PAGE, LATENT + ROPE)).astype(BF16).astype(F32 if dtype is F32 else dtype)
    pool, numbers = pools(rows, kind)
    tables = np.array([[4, 1, 7], [8, 0, -1], [2, 2147480000, -1]])
    lengths = np.array([41, 17, 0])
    query = rng.standard_normal((sum(counts), heads, numbers.shape[1])).astype(BF16).astype(dtype)
    positions = [np.arange(length) for length in lengths]
    slots = [tables[i][p // PAGE] * PAGE + p % PAGE for i, p in enumerate(positions)]
    return pool, numbers, tables, lengths, query, slots


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages(kind, dtype):
    """Every kind of pool, several queries a sequence, an empty context, NaN behind contexts."""
    counts = [3, 1, 0]
    pool, numbers, tables, lengths, query, slots = scene(kind, dtype, 5, counts)
    contexts = [(count, numbers[chosen]) for count, chosen in zip(counts, slots, strict=True)]
    if (
        kind == "ds_mla" and dtype is BF16 and machine.has_pairs()
    ):  # 15 rows of queries are multiplied in pairs
        contexts[0] = counts[0], contexts[0][1].astype(BF16)
    for causal in (True, False):
        output, lse = expected(query, contexts, LATENT, causal)
        found = kvkit.mla_attention(
            query, **pool, block_tables=tables, context_lens=lengths, query_starts=[0, 3, 4, 4],
            softmax_scale=SCALE, is_causal=causal, return_lse=True,
        )  # fmt: skip
        assert_close(found, output, lse, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [256, 240, 40, 16])
def test_many_heads_read_a_block_once(heads, dtype, rng):
    """Tiles of 32 heads are grouped where the context has enough parts; the last tile may be half."""
    pool = rng.standard_normal((260, PAGE, 24), F32).astype(dtype)
    lengths, query = [4100, 700, 3], rng.standard_normal((4, heads, 24), F32).astype(dtype)
    tables = [rng.permutation(len(pool)) for _ in lengths]
    rows = [pool[table].reshape(-1, 24)[:length] for table, length in zip(tables, lengths, strict=True)]
    sinks = rng.standard_normal(heads, F32)
    output, lse = expected(query, list(zip([2, 1, 1], rows, strict=True)), 16, True, sinks)
    found = kvkit.mla_attention(
        query, pool, tables, lengths, [0, 2, 3, 4], softmax_scale=SCALE, value_dim=16, sinks=sinks,
        lse_of_sinks=dtype is BF16, return_lse=True,
    )  # fmt: skip
    lse = np.logaddexp(lse, sinks) if dtype is BF16 else lse
    assert_close(found, output, lse, dtype)


@pytest.mark.parametrize("kind", ["one pool", "two pools", "ds_mla", "ds_v4"])
def test_chosen_rows(kind):
    """Indices of two pools, some of them none or behind the pool, a row twice, and lengths."""
    pool, numbers, *_, query, _ = scene(kind, F32, 3, [4])
    indices = np.array([[5, -1, 9, 5], [0, 3, 999999, 7], [1, 2, 3, 4], [-1, -1, -1, -1]])
    lens = np.array([4, 4, 2, 4])
    more = {"latent": pool["latent"][::-1]} if kind == "one pool" else pool
    extra = np.array([[3, 2], [-1, 1], [0, 0], [-1, -1]])
    called = {"softmax_scale": SCALE, "indices": indices, "index_lens": lens, "return_lse": True}
    rows = [[5, 9, 5], [0, 3, 7], [1, 2], []]
    output, lse = expected(query, [(1, numbers[chosen]) for chosen in rows], LATENT, False)
    assert_close(kvkit.mla_attention(query, **pool, **called), output, lse, F32)
    if "rope_cache" in pool:
        return
    blocks = len(numbers) // PAGE
    others = numbers.reshape(blocks, PAGE, -1)[::-1].reshape(numbers.shape) if kind == "one pool" else numbers
    both = [(1, np.concatenate([numbers[a], others[[b for b in row if b >= 0]]]))
            for a, row in zip(rows, extra.tolist(), strict=True)]  # fmt: skip
    output, lse = expected(query, both, LATENT, False)
    found = kvkit.mla_attention(query, **pool, **called, extra=(more["latent"], extra, None))
    assert_close(found, output, lse, F32)


def test_several_heads_in_a_row(rng):
    """Each head of chosen rows, in one pool or two, is a cache of its own."""
    rows = rng.standard_normal((3, PAGE, 2, 576), F32)
    query = rng.standard_normal((2, 6, 576), F32)
    more = {"softmax_scale": SCALE, "indices": [[5, -1, 40], [7, 7, 1]]}
    apart = [kvkit.mla_attention(query[:, 3 * i : 3 * i + 3], rows[:, :, i], **more) for i in range(2)]
    two = {"latent": rows[..., :LATENT], "rope_cache": rows[..., LATENT:]}
    for pool in ({"latent": rows}, two):
        found = kvkit.mla_attention(query, **pool, **more)
        np.testing.assert_allclose(found, np.concatenate(apart, axis=1), atol=1e-6)


@pytest.mark.parametrize("kind", ["one pool", "ds_mla"])
def test_sinks_and_their_lse(kind):
    pool, numbers, tables, lengths, query, slots = scene(kind, F32, 4, [1, 1, 1])
    sinks = np.array([0.5, -1, np.inf, -30], F32)
    called = {
        "block_tables": tables, "context_lens": lengths, "softmax_scale": SCALE, "sinks": sinks,
        "return_lse": True,
    }  # fmt: skip
    output, lse = expected(query, [(1, numbers[chosen]) for chosen in slots], LATENT, True, sinks)
    assert_close(kvkit.mla_attention(query, **pool, **called, lse_of_sinks=False), output, lse, F32)
    assert_close(kvkit.mla_attention(query, **pool, **called), output, np.logaddexp(lse, sinks), F32)


def test_long_contexts_come_in_pieces(monkeypatch):
    """Contexts longer than what is gathered at a time, with sinks."""
    monkeypatch.setattr("kvkit.calls.latent.ROWS", 8)
    counts = [3, 1, 0]
    pool, numbers, tables, lengths, query, slots = scene("ds_mla", F32, 3, counts)
    sinks = np.array([1, 2, 3], F32)
    contexts = [(count, numbers[chosen]) for count, chosen in zip(counts, slots, strict=True)]
    output, lse = expected(query, contexts, LATENT, True, sinks)
    csr = np.array([0, 3, 5, 5]), np.array([4, 1, 7, 8, 0])
    for table in (tables, csr):
        found = kvkit.mla_attention(query, **pool, block_tables=table, context_lens=lengths,
                                    softmax_scale=SCALE, query_starts=[0, 3, 4, 4], sinks=sinks,
                                    return_lse=True)  # fmt: skip
        assert_close(found, output, np.logaddexp(lse, sinks), F32)


def test_the_first_call_of_a_process_may_be_one_of_bytes():
    """What it needs is loaded by nothing else."""
    call = "kvkit.mla_attention(ones, bytes, [[0]], [3], softmax_scale=1.0, format='ds_mla')"
    arrays = "ones, bytes = numpy.ones((1, 2, 576), 'f'), numpy.zeros((2, 4, 656), 'B')"
    script = f"import kvkit, numpy; {arrays}; print({call}.any())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_pool_without_blocks():
    query = np.ones((1, 2, 576), F32)
    for pool in (
        {"latent": np.zeros((0, 64, 576), F32)},
        {"latent": np.zeros((0, 64, 656), np.uint8), "format": "ds_mla"},
    ):
        places = {"block_tables": np.zeros((1, 0), np.int32), "context_lens": [0]}
        output, lse = kvkit.mla_attention(query, **pool, **places, softmax_scale=1.0, return_lse=True)
        assert not output.any()
        assert (lse == -np.inf).all()


def test_the_specification_s_layer():
    """Absorbed, latent and expanded, with and without sinks."""
    c = np.array([[1, 0, -1], [2, 1, 0], [0, -1, 1]], F32)
    r = np.array([[1, 0], [0, 1], [1, 1]], F32)
    w_uk = np.array([[[1, 0, 2], [0, 1, 1]], [[1, 1, 0], [2, 0, 1]]], F32)
    w_uv = np.array([[[1, 2, 0], [0, 1, 1]], [[2, 0, 1], [1, 1, 0]]], F32)
    absorbed = kvkit.mla_absorb(np.array([[[1, -1], [0, 1]]], F32), w_uk)
    np.testing.assert_array_equal(absorbed, [[[1, -1, 1], [2, 0, 1]]])
    cache = np.zeros((1, 3, 5), F32)
    kvkit.mla_append(c, r, cache, [0, 1, 2])
    query = absorbed, np.array([[[0, 1], [1, 0]]], F32)
    called = {"block_tables": [[0]], "context_lens": [3], "value_dim": 3}
    called |= {"softmax_scale": 0.5, "return_lse": True}
    latent, lse = kvkit.mla_attention(query, cache, **called)
    np.testing.assert_allclose(latent, [[[0.78495, -0.21505, 0.424598], [1.364175, 0.364175, 0]]], atol=1e-6)
    np.testing.assert_allclose(lse, [[2.104131, 2.551445]], atol=1e-6)
    out = kvkit.mla_expand(latent, w_uv)
    np.testing.assert_allclose(out, [[[0.354849, 0.209547], [2.728351, 1.728351]]], atol=1e-6)
    with_sinks, lse = kvkit.mla_attention(query, cache, **called, sinks=np.array([0.5, -1], F32))
    np.testing.assert_allclose(with_sinks, latent * np.array([[[0.832595], [0.972117]]]), atol=1e-6)
    np.testing.assert_allclose(lse, [[2.287339, 2.579724]], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_append(kind):
    """New rows are stored as `encode` stores them; -1 stores nothing, all else keeps its bytes."""
    pool, _, *_ = scene(kind, F32, 1, [1])
    before = {name: array.copy() for name, array in pool.items() if name != "format"}
    dim = 448 if kind.startswith("ds_v4") else LATENT
    latent, rope = np.full((3, dim), 2, F32), np.full((3, ROPE), 3, F32)
    kept = {name: pool[name] for name in ("rope_cache", "format") if name in pool}
    kvkit.mla_append(latent, rope, pool["latent"], [18, -1, 5], **kept)
    query = np.ones((1, 1, dim + ROPE), F32)
    for slot in (18, 5):
        found = kvkit.mla_attention(query, **pool, indices=[[slot]], softmax_scale=1.0, value_dim=dim + ROPE)
        np.testing.assert_array_equal(found[0, 0], [2] * dim + [3] * ROPE)
    changed = [(pool[name] != array) & ~np.isnan(array.astype(F32)) for name, array in before.items()]
    most = {"ds_v4": 584, "ds_mla": 656}.get(kind.partition(":")[0], dim + ROPE)
    assert 0 < sum(map(np.count_nonzero, changed)) <= 2 * most


def test_rows_of_bytes_without_a_rope_are_stored_and_read_by_the_line_of_the_message(rng):
    latent, cache = rng.standard_normal((3, 512)).astype(F32), np.zeros((1, 4, 656), np.uint8)
    where = [0, 1, 2]
    for rope in (None, np.zeros((3, 0), F32)):
        with pytest.raises(KvkitError, match=r"without a rope: rope=np.zeros\(\(3, 64\), latent.dtype\)"):
            kvkit.mla_append(latent, rope, cache, where, format="ds_mla")
    kvkit.mla_append(latent, np.zeros((3, 64), latent.dtype), cache, where, format="ds_mla")
    query, places = latent[:, None], {"indices": [where] * 3, "softmax_scale": 0.1}
    wide = query, np.zeros((3, 1, 64), query.dtype)
    got = kvkit.mla_attention(wide, cache, **places, format="ds_mla")
    rows = decode(encode(np.pad(latent, [(0, 0), (0, 64)]), "ds_mla"), "ds_mla")[None, :, :512]
    np.testing.assert_allclose(got, kvkit.mla_attention(query, rows, **places), atol=1e-5)
    short = cache[..., :528]  # codes and scales
    with pytest.raises(
        KvkitError, match=r"append one of zeros: np.pad\(rows, \[\(0, 0\), \(0, 0\), \(0, 128\)\]\)"
    ):
        kvkit.mla_attention(wide, short, **places, format="ds_mla")
    padded = np.pad(short, [(0, 0), (0, 0), (0, 128)])
    np.testing.assert_array_equal(kvkit.mla_attention(wide, padded, **places, format="ds_mla"), got)


def test_nan_and_queries_without_rows_are_kept_apart(rng):
    """NaN in one part of the rows is not replaced by the next part; no rows give zeros beside any sink."""
    rows, extra = rng.standard_normal((2, 1, 3, 5)).astype(F32)
    rows[0, 1] = np.nan
    query = rng.standard_normal((1, 2, 5)).astype(F32)
    size = {"softmax_scale": 0.5, "value_dim": 3}
    both = kvkit.mla_attention(query, rows, indices=[[0, 1]], extra=(extra, [[0, 1]], None), **size)
    assert np.isnan(both).all()
    sinks = np.full(2, -np.inf, F32)
    no_blocks, wide = np.zeros((0, 64 * 585), np.uint8), np.ones((1, 1, 512), F32)
    assert not kvkit.mla_attention(wide, no_blocks, [[]], [0], softmax_scale=1.0, format="ds_v4").any()
    none = kvkit.mla_attention(query, extra, indices=[[-1]], sinks=sinks, lse_of_sinks=False, **size)
    np.testing.assert_array_equal(none, np.zeros_like(none))


# The indexer


FORMATS = [(BF16, BF16), (BF16, FP8), (F32, F32), (F16, F16), (F32, FP8), (F32, BF16)]
ENGINES = {
    "instructions": needs_tiles,
    "memory": [
        pytest.mark.skipif(not machine.has_integers(), reason="needs AVX-512"),
        *[pytest.mark.slow] * HAVE_TILES,
    ],
    "pairs": pytest.mark.skipif(not machine.has_pairs(), reason="needs AVX-512 BF16"),
    "float": (),
}


@pytest.mark.cpu
@pytest.mark.parametrize("engine", [pytest.param(name, marks=marks) for name, marks in ENGINES.items()])
@pytest.mark.parametrize(("of_query", "of_key"), FORMATS)
def test_indexer_scores(of_query, of_key, engine, rng, monkeypatch):
    """Every engine, in pages of any size, over pools with NaN in places that nobody reads."""
    monkeypatch.setattr(machine, "tiles", lambda: engine if engine in machine.__dict__.values() else None)
    monkeypatch.setattr(machine, "has_pairs", lambda: engine == "pairs")
    lengths, starts = [150, 0, 70, 70], [0, 40, 40, 43, 45]
    cases = (1, 3, 16, True), (5, 64, 32, False), (16, 33, 32, True), (64, 3, 128, True)
    for page, heads, dim, aligned in cases:
        need = [-(-length // page) for length in lengths]
        places, tables = rng.permutation(sum(need) + 2), np.full((4, max(need)), -1)
        for b, count in enumerate(need):
            tables[b, :count] = places[sum(need[:b]) :][:count]
        tables[3] = tables[2]  # sequences that share all pages
        memory = zeros((len(places) * page * dim + 1,), of_key)
        keys = memory[not aligned :][: len(places) * page * dim].reshape(-1, page, dim)
        keys[...] = rng.standard_normal(keys.shape)
        keys[places[sum(need) :]] = np.nan
        keys[tables[0, need[0] - 1], (lengths[0] - 1) % page + 1 :] = np.nan
        scale = {"key_scale": rng.random(keys.shape[:2], F32) + 0.5} if of_key is FP8 else {}
        query = rng.standard_normal((45, heads, dim)).astype(of_query)
        weights = rng.standard_normal((45, heads)).astype(of_query)
        call = query, keys, weights, tables, lengths, starts
        expected = reference.indexer_scores(*call, **scale)
        found = kvkit.indexer_scores(*call, **scale)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * heads**0.5)
        out = np.zeros((45, expected.shape[1] + 3), F32)[:, 1:-2]
        np.testing.assert_array_equal(kvkit.indexer_scores(*call, **scale, out=out), found)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "infinite"])
def test_topk_rows(kind, rng):
    """Rows with ties, zeros of both signs, infinities, and fewer scores than asked for."""
    for columns, k, tokens, page in itertools.product((1, 7, 300), (1, 5, 40, 400), (1, 3), (1, 4, 64)):
        scores = rng.standard_normal((tokens, columns)).astype(F32)
        if kind == "ties":
            scores = (rng.integers(-3, 4, scores.shape) / 2).astype(F32)
        if kind == "zeros":
            scores = np.maximum(scores, 0) * rng.choice([1, -1], scores.shape).astype(F32)
        if kind == "infinite":
            scores[rng.random(scores.shape) < 0.5], scores[rng.random(scores.shape) < 0.1] = -np.inf, np.inf
        scores[:, columns // 2 :][:, rng.random(columns - columns // 2) < 0.2] = -np.inf
        table, starts = rng.permutation(-(-columns // page) + 3)[None], [0, tokens]
        expected = reference.topk_rows(scores, k, table, page, starts)
        np.testing.assert_array_equal(kvkit.topk_rows(scores, k, table, page, starts), expected)


def test_topk_rows_feed_attention(rng):
    """The chosen rows are those of a mask; equal scores: the earlier position; -1 behind the last."""
    tables = [[3, 0, 2], [1, 4, 0]]
    scores = np.array([[5, 1, 5, 2, 5, -np.inf], [np.nan, 0, 0, 0, 0, 0], [-np.inf] * 6], F32)
    with pytest.raises(kvkit.KvkitError, match=r"^scores: expected numbers, got NaN"):
        kvkit.topk_rows(scores, 2, tables, 2, [0, 1, 3])
    scores[1, 0] = -1
    chosen = kvkit.topk_rows(scores, 2, tables, 2, [0, 1, 3])
    np.testing.assert_array_equal(chosen, [[6, 0], [3, 8], [-1, -1]])
    np.testing.assert_array_equal(kvkit.topk_rows(scores[:1], 6, tables[:1], 2), [[6, 7, 0, 1, 4, -1]])
    latent = rng.standard_normal((5, PAGE, 576)).astype(F32)
    query = rng.standard_normal((2, 3, 576)).astype(F32)
    keys, index_query = latent[..., :32], query[:, :, :32]
    lengths = [40, 33]
    scores = kvkit.indexer_scores(index_query, keys, np.ones((2, 3), F32), tables, lengths)
    rows = kvkit.topk_rows(scores, 10, tables, PAGE)
    best = np.zeros((2, 48), bool)
    for token, row in enumerate(scores):
        best[token, np.argsort(-row, kind="stable")[:10]] = True
    masked = kvkit.paged_attention(
        query, latent, latent[..., :512], tables, lengths, None, best, layout="b n c", softmax_scale=SCALE,
        is_causal=False,
    )  # fmt: skip
    np.testing.assert_allclose(
        kvkit.mla_attention(query, latent, indices=rows, softmax_scale=SCALE), masked, atol=2e-5
    )


@pytest.mark.cpu
@pytest.mark.parametrize("padding", [0, 576])
@pytest.mark.parametrize("axes", [3, 4])
def test_blocks_in_the_shape_that_flashmla_allocates(axes, padding, rng):
    """[blocks, tokens, (1,) 584] over blocks with padding: these axes only count bytes."""
    rows = rng.standard_normal((2 * 4, 512)).astype(BF16)
    memory = np.zeros((2, 4 * 584 + padding), np.uint8)
    kvkit.mla_append(rows[:, :448], rows[:, 448:], memory, np.arange(8), format="ds_v4")
    empty = np.zeros_like(memory)
    shape = (2, 4, 584) if axes == 3 else (2, 4, 1, 584)
    steps = (memory.strides[0], *((584, 584, 1) if axes == 4 else (584, 1)))
    shaped, written = (np.lib.stride_tricks.as_strided(each, shape, steps) for each in (memory, empty))
    query = rng.standard_normal((3, 16, 512)).astype(BF16)
    where = {"block_tables": [[1, 0]], "context_lens": [7], "query_starts": [0, 3]}
    where |= {"softmax_scale": 0.05, "format": "ds_v4"}
    expected = kvkit.mla_attention(query, memory[:, : 4 * 584], **where)
    np.testing.assert_array_equal(kvkit.mla_attention(query, shaped, **where), expected)
    kvkit.mla_append(rows[:, :448], rows[:, 448:], written, np.arange(8), format="ds_v4")
    np.testing.assert_array_equal(empty, memory)
    with pytest.raises(
        kvkit.KvkitError, match=r"latent: expected \[blocks, bytes\], or tokens of 584 bytes one behind"
    ):
        kvkit.mla_attention(query, np.zeros((2, 4, 592), np.uint8), **where)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_queries_of_8_bits(dtype, rng):
    """They are widened to bfloat16, which holds all of them, and the output is of it."""
    pool, _, tables, lengths, query, _ = scene("one pool", BF16, 4, (2, 1, 0))
    starts, query = np.array([0, 2, 3, 3]), query.astype(dtype)
    where = {"block_tables": tables, "context_lens": lengths, "query_starts": starts, "softmax_scale": 0.1}
    expected = kvkit.mla_attention(query.astype(BF16), **pool, **where)
    assert expected.dtype == BF16
    np.testing.assert_array_equal(kvkit.mla_attention(query, **pool, **where), expected)
    pair = query[..., :LATENT], query[..., LATENT:]
    np.testing.assert_array_equal(kvkit.mla_attention(pair, **pool, **where), expected)
    keys, weights = rng.standard_normal((3, 8, 16)).astype(BF16), rng.standard_normal((2, 4)).astype(F32)
    asked = rng.standard_normal((2, 4, 16)).astype(dtype)
    args = keys, weights, [[2, 0]], [11], [0, 2]
    found = kvkit.indexer_scores(asked, *args)
    np.testing.assert_array_equal(found, kvkit.indexer_scores(asked.astype(BF16), *args))


def test_calls_of_one_form_read_their_own_arrays(rng):
    """Calls of a known form are not checked in full; other tables, lengths and illegal pages still count."""
    latent, query = (rng.standard_normal(shape, np.float32) for shape in ((6, 4, 40), (2, 3, 40)))
    tables = np.array([[0, 1, 2], [3, 4, 5]])
    for lengths in ([12, 9], [12, 9], [12, 9], [5, 12]):
        given = {"block_tables": tables, "context_lens": np.array(lengths), "softmax_scale": 0.2}
        expected, _ = reference.mla_attention(query, latent, **given, value_dim=24)
        for _ in range(2):
            found = kvkit.mla_attention(query, latent, **given, value_dim=24)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        tables, latent = tables[::-1].copy(), latent * np.float32(1.5)
    with pytest.raises(KvkitError, match="block_tables"):
        kvkit.mla_attention(query, latent, tables + 3, np.array([12, 9]), softmax_scale=0.2, value_dim=24)
