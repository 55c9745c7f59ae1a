"""Attention by tiles, beside the reference and other engines; by instructions bit for bit as in memory."""

import functools
import itertools
import math
import re

import attention_scenes as scenes
import latent_scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import BF16, FP16, Formats, check, dynamic, dynamic_cache, static, static_cache
from borders import at_border, needs_borders
from numpy.testing import assert_array_equal
from plan_scenes import attend, planned
from scenes import assert_same, first_quick
from tile_scenes import HAVE_TILES, forms, use_tiles

import kvkit
from kvkit.cpu import machine
from kvkit.cpu.attention import prepare
from kvkit.cpu.simd import tile_products
from kvkit.runtime.arrays import zeros
from kvkit.tools.vectors.calls import context_length, dynamic_mask, static_mask

pytestmark = pytest.mark.cpu
LENGTHS = [(0, 40), (700, 1), (9, 50), (0, 0), (31, 33)]


@pytest.fixture(autouse=True)
def pairs_without_tiles(monkeypatch):
    """Calls without tiles are multiplied in pairs, which round weights as tiles do, also on Intel."""
    monkeypatch.setattr(machine, "has_slow_pairs", lambda: False)
    prepare.FIXED.clear()
    yield
    prepare.FIXED.clear()


def masked(rng, call, dtype, pad=0):
    """Return the call with a mask of its own for each head."""
    static = "static" in call.kind
    _, tokens, heads, *_ = call["query"].shape if static else (0, 0, 4)
    mask = static_mask(rng, call, (heads, tokens), dtype, pad) if static else (
        dynamic_mask(rng, call, 4, dtype, pad)
    )  # fmt: skip
    return call.but(attn_mask=mask)


def lowered(rng, call, dtype):
    """Return the call with a mask that gives some rows, and half of all keys, the lowest finite number."""
    mask = np.zeros((13, context_length(call)), dtype)
    low = rng.random(mask.shape) < 0.5
    low[rng.permutation(13)[:5]] = True
    return call.but(attn_mask=np.where(low, ml_dtypes.finfo(dtype).min, mask))


CASES = {
    **{f"head of {dim}": lambda rng, dim=dim: static(rng, BF16, 37, 70, dim=dim) for dim in (32, 96, 17, 80)},
    "values of another size": lambda rng: static(rng, BF16, 0, 45, dim=64, value_dim=96),
    **{
        f"groups of {group}": lambda rng, group=group: static(rng, BF16, 5, 21, 1, 2 * group, 2, dim=32)
        for group in (1, 3, 7, 40)
    },
    "new tokens only": lambda rng: dynamic(rng, BF16, LENGTHS),
    "fewer keys than queries": lambda rng: dynamic(rng, BF16, [(-20, 45), (0, 33)], dim=32),
    "window": lambda rng: static(rng, BF16, 50, 300, 1, dim=32, window=(64, 0)),
    "window on both sides": lambda rng: static(rng, BF16, 0, 200, 1, dim=32, window=(20, 9), is_causal=False),
    "softcap and sinks": lambda rng: static(
        rng, BF16, 9, 60, softcap=3.0, sinks=rng.standard_normal(4).astype(np.float32)
    ),
    "alibi": lambda rng: dynamic(rng, BF16, LENGTHS, is_alibi=True),
    "negative scale": lambda rng: static(rng, BF16, 9, 60, softmax_scale=-0.2),
    "scale of zero": lambda rng: static(rng, BF16, 9, 60, softmax_scale=0.0),
    "mask": lambda rng: masked(rng, dynamic(rng, BF16, LENGTHS, is_causal=False), "bfloat16"),
    "padded mask of float32": lambda rng: masked(rng, static(rng, BF16, 9, 60), np.float32, pad=3),
    "boolean mask": lambda rng: masked(rng, static(rng, BF16, 9, 140, is_causal=False), bool),
    **{
        f"mask of {np.dtype(dtype).name} in whole lines and a part, of groups": lambda rng, dtype=dtype: (
            masked(rng, static(rng, BF16, 160, 13, 1, 6, 2, dim=32), dtype)
        )
        for dtype in (np.float32, ml_dtypes.bfloat16, bool)
    },
    **{
        f"lowest {np.dtype(dtype).name} in a mask, {past} keys before": lambda rng, dtype=dtype, past=past: (
            lowered(rng, static(rng, BF16, past, 13, 1, 6, 2, dim=32, is_causal=False), dtype)
        )
        for dtype in (np.float32, ml_dtypes.bfloat16)
        for past in (160, 1300)
    },
    "one row of a mask for all": lambda rng: static(rng, BF16, 100, 33, 1, 2, 2, dim=32).but(
        attn_mask=np.broadcast_to(rng.standard_normal(133).astype(ml_dtypes.bfloat16), (33, 133))
    ),
    "splits": lambda rng: static(rng, BF16, 1300, 12, 1, dim=32, is_causal=False),
    **{
        f"layout {layout}, mode {mode}, pages of {size}": lambda rng, layout=layout, mode=mode, size=size: (
            dynamic_cache(rng, BF16, LENGTHS, layout=layout, mode=mode, page_size=size)
        )
        for layout, mode, size in ((0, 0, 16), (1, 1, 16), (2, 1, 3), (3, 1, 1), (3, 1, 128), (3, 0, 16))
    },
    "static cache": lambda rng: static_cache(rng, BF16, 150, 40, layout=1),
    "cache of float32": lambda rng: dynamic_cache(rng, Formats("bf16", "fp32"), LENGTHS),
    **{
        str(formats): lambda rng, formats=formats: dynamic_cache(rng, formats, LENGTHS, layout=3)
        for formats in (
            Formats("bf16", "int8", "fp16", 8, 8),
            Formats("bf16", "int8", "bf16", 8, 64),
            Formats("bf16", "int8", "fp32", 4, 32),
            Formats("bf16", "int8", "fp16", 4, 64),
        )
    },
    "cache of float16": lambda rng: dynamic_cache(rng, Formats("bf16", "fp16"), LENGTHS, layout=3),
}

FEW = [(130, 1), (40, 2), (0, 4), (0, 1), (64, 1), (31, 3)]  # tokens of up to 16 query rows a key head
# Narrow tiles: 8 and 16 query rows; fewer are multiplied in pairs.
CASES |= {
    **{
        f"{rows} rows of {dim}": lambda rng, rows=rows, dim=dim: static(
            rng, BF16, 69, 1, 1, 2 * rows, 2, dim=dim
        )
        for rows, dim in ((3, 32), (4, 128), (6, 96), (8, 256), (9, 64), (16, 160), (13, 80))
    },
    "few rows of values of another size": lambda rng: static(
        rng, BF16, 40, 1, 1, 16, 1, dim=64, value_dim=160
    ),
    "few rows, window": lambda rng: dynamic(rng, BF16, FEW, 8, 2, window=(21, 0)),
    "few rows, window on both sides": lambda rng: dynamic(
        rng, BF16, [(40, 16), (90, 3)], 1, 1, dim=32, window=(20, 5), is_causal=False
    ),
    "few rows, softcap and sinks": lambda rng: static(
        rng, BF16, 50, 1, 1, 32, 2, dim=32, softcap=3.0, sinks=rng.standard_normal(32).astype(np.float32)
    ),
    "few rows, alibi": lambda rng: dynamic(rng, BF16, FEW, 8, 2, is_alibi=True),
    "few rows, negative scale": lambda rng: static(rng, BF16, 60, 4, 1, softmax_scale=-0.2),
    "few rows, scale of zero": lambda rng: static(rng, BF16, 60, 1, 1, 8, 1, softmax_scale=0.0),
    "few rows, mask": lambda rng: masked(rng, dynamic(rng, BF16, FEW, is_causal=False), "bfloat16"),
    "few rows, padded mask of float32": lambda rng: masked(rng, static(rng, BF16, 60, 4), np.float32, pad=3),
    "few rows, boolean mask": lambda rng: masked(rng, static(rng, BF16, 70, 2, is_causal=False), bool),
    "few rows, splits": lambda rng: static(rng, BF16, 1400, 1, 2, 16, 1, dim=32),
    **{
        f"few rows, layout {layout}, mode {mode}, pages of {size}": (
            lambda rng, layout=layout, mode=mode, size=size: dynamic_cache(
                rng, BF16, FEW, 8, 2, layout=layout, mode=mode, page_size=size
            )
        )
        for layout, mode, size in (
            (0, 0, 16), (0, 1, 16), (1, 1, 16), (1, 1, 5), (2, 1, 3), (2, 0, 16), (3, 1, 1), (3, 1, 8),
            (3, 1, 24), (3, 1, 128), (3, 0, 16),
        )
    },
    "few rows of many heads, interleaved": lambda rng: dynamic_cache(
        rng, BF16, FEW, 48, 12, dim=256, layout=0
    ),
    "few rows, static cache": lambda rng: static_cache(rng, BF16, 150, 4, layout=1),
    "few rows, cache of float32": lambda rng: dynamic_cache(rng, Formats("bf16", "fp32"), FEW),
    "few rows and many": lambda rng: dynamic_cache(rng, BF16, [*FEW, (20, 40), (1, 9)], layout=3),
}  # fmt: skip


CASES |= {
    "float16": lambda rng: static(rng, FP16, 37, 70, dim=96, value_dim=64),
    "float16, groups of 7": lambda rng: static(rng, FP16, 5, 21, 1, 14, 2, dim=32),
    "float16, window": lambda rng: static(rng, FP16, 50, 300, 1, dim=32, window=(64, 0), softcap=9.0),
    "float16, mask": lambda rng: masked(rng, dynamic(rng, FP16, LENGTHS, is_causal=False), "float16"),
    "float16, splits": lambda rng: static(rng, FP16, 1300, 12, 1, dim=32, is_causal=False),
    "float16 in pages": lambda rng: dynamic_cache(rng, FP16, LENGTHS, layout=3, page_size=3),
    "float16, large scores": lambda rng: static(rng, FP16, 9, 60, softmax_scale=30.0),
    **{
        f"float16, {rows} rows of {dim}": lambda rng, rows=rows, dim=dim: static(
            rng, FP16, 69, 1, 1, 2 * rows, 2, dim=dim
        )
        for rows, dim in ((8, 128), (9, 64), (16, 160))
    },
    "float16, few rows, window": lambda rng: dynamic(rng, FP16, FEW, 16, 1, window=(21, 0)),
    "float16, few rows, softcap and sinks": lambda rng: static(
        rng, FP16, 50, 1, 1, 32, 2, dim=32, softcap=3.0, sinks=rng.standard_normal(32).astype(np.float32)
    ),
    "float16, few rows, mask": lambda rng: masked(
        rng, static(rng, FP16, 60, 4, 1, 8, 2, is_causal=False), "float16"
    ),
    "float16, few rows, splits": lambda rng: static(rng, FP16, 1400, 1, 2, 16, 1, dim=32),
    "float16, few rows in pages": lambda rng: dynamic_cache(rng, FP16, FEW, 16, 2, layout=3, page_size=3),
    "float16, few rows of many heads, interleaved": lambda rng: dynamic_cache(
        rng, FP16, FEW, 48, 3, dim=256, layout=0
    ),
    "float16, few rows, large scores": lambda rng: static(rng, FP16, 60, 1, 1, 16, 1, softmax_scale=30.0),
}


# Forms that other cases compile too, or that take code of their own.
SLOW = r"layout [12]|pages of (5|24|128)|scale-(bf16|fp32)|rows of (96|80|160|256)|heads|of (17|96|1|40)$"
SLOW += r"|float16, (9|few rows|mask|window|splits|groups)|1300 keys|both sides|mask of|int4"


def check_bits(form, run, results, monkeypatch):
    """Check that a call by instructions gives the results that it has given in memory."""
    if form == machine.MEMORY and HAVE_TILES:
        use_tiles(monkeypatch, machine.INSTRUCTIONS)
        for one, other in zip(run(return_lse=True), results, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * bool(re.search(SLOW, case))) for case in CASES]
)
@forms
def test_beside_the_reference(form, case, rng, monkeypatch):
    use_tiles(monkeypatch, form)
    call = CASES[case](rng)
    results = check(call.copy())
    check_bits(form, call.run, results, monkeypatch)


def engines_made(monkeypatch, form, engines, call):
    """Return for what a call makes `engines` of tiles."""
    made, engine = [], engines.engine
    prepare.engines.cache_clear()
    use_tiles(monkeypatch, form)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "engine", lambda *given: made.append(given[:3]) or engine(*given))
        call()
    return made


@forms
def test_tiles_are_used_where_they_fit(form, rng, monkeypatch):
    """Otherwise the other tests would prove nothing."""
    codes = Formats("bf16", "int8", "fp16", 8, 32)
    for call, terms in (
        (static(rng, BF16, 0, 40, dim=64), "BFLOAT16"), (static(rng, FP16, 0, 40, dim=64), "FLOAT16"),
        (dynamic_cache(rng, codes, [(0, 40)], dim=64), "CODES"), (static(rng, BF16, 0, 40, dim=48), None),
    ):  # fmt: skip
        made = engines_made(monkeypatch, form, prepare.wide_tiles, call.run)
        expected = [(form == machine.MEMORY, getattr(tile_products, terms))] if terms else []
        assert [given[:2] for given in made] == expected


@forms
def test_narrow_tiles_are_used_where_they_fit(form, rng, monkeypatch):
    both = (BF16, tile_products.BFLOAT16), (FP16, tile_products.FLOAT16)
    for (formats, terms), (dim, rows, *expected) in itertools.product(both, (
        (64, 4, [], []), (64, 5, [8], []), (64, 8, [8], []), (96, 9, [16], [16]), (48, 8, [], []),
        (48, 16, [], []), (64, 2, [], []), (64, 17, [], []),
    )):  # fmt: skip
        call = static(rng, formats, 40, 1, 1, rows, 1, dim=dim)
        assert engines_made(monkeypatch, form, prepare.narrow_tiles, call.run) == [
            (rows, form == machine.MEMORY, terms) for rows in expected[formats is FP16]
        ]
    for data, dim, rows in ((ml_dtypes.bfloat16, 64, 5), (np.float16, 64, 16), (np.float16, 96, 8)):
        pool = np.ones((1, 8, 1, dim), ml_dtypes.float8_e4m3fn)
        arguments = np.ones((1, rows, dim), data), pool, pool, [[0]], [8]
        call = functools.partial(kvkit.paged_attention, *arguments)
        terms = tile_products.Terms(1, 1 + (data == np.float16), "e4m3")
        made = engines_made(monkeypatch, form, prepare.narrow_tiles, call)
        assert made == ([(-(-rows // 8) * 8, form == machine.MEMORY, terms)] if dim == 64 else [])


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        *((kind, 40) for kind in ("one pool", "with gaps", "two pools", "ds_mla", "ds_v4")),
        *(("one pool", heads) for heads in (3, 8, 16)), ("with gaps", 16), ("two pools", 16), ("ds_mla", 16),
    ],
)  # fmt: skip
@forms
def test_latent_rows(form, kind, heads, rng, monkeypatch):
    """Against the same call without tiles."""
    check_latent_rows(form, kind, heads, ml_dtypes.bfloat16, rng, monkeypatch)


@forms
def test_latent_rows_of_float16(form, rng, monkeypatch):
    check_latent_rows(form, "one pool", 16, np.float16, rng, monkeypatch)


def check_latent_rows(form, kind, heads, dtype, rng, monkeypatch):
    rows = rng.standard_normal((12, 16, 576)).astype(dtype)
    pool, _ = latent_scenes.pools(rows, kind)
    dim = 512 if kind == "ds_v4" else 576
    query = rng.standard_normal((4, heads, dim)).astype(dtype)
    tables = rng.permutation(12).reshape(2, 6)
    found = []
    for engines in form, None:
        use_tiles(monkeypatch, engines)
        output, lse = kvkit.mla_attention(
            query, **pool, block_tables=tables, context_lens=[91, 35], query_starts=[0, 3, 4],
            softmax_scale=dim**-0.5, return_lse=True,
        )  # fmt: skip
        found.append((output.astype(np.float64), lse))
    rounding = 0 if heads == 40 else 2**-7  # of the output: other engines of few rows have float32 weights
    largest = np.abs(found[1][0]).max()
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=rounding, atol=2**-8 * largest)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=2e-5)


def aligned(array):
    """Return a copy that begins at a cache line, so that tiles of keys are loaded where they lie."""
    copy = zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


@forms
def test_rows_in_place_and_copied_rows_give_the_same_bits(form, rng, monkeypatch):
    """Tiles load 16 rows where they lie together at cache lines; others are copied first."""
    use_tiles(monkeypatch, form)
    for lengths in ([(0, 45)], [(100, 33), (15, 17)]):
        for size in (1, 8, 16, 128):
            call = dynamic_cache(rng, BF16, lengths, heads=2, kv_heads=1, dim=64, layout=3, page_size=size)
            moved = np.zeros(call["cache"].nbytes + 128, np.uint8)
            begin = -moved.ctypes.data % 64 + 16
            moved = moved[begin : begin + call["cache"].nbytes].view(call["cache"].dtype)
            moved = moved.reshape(call["cache"].shape)
            moved[...] = call["cache"]
            in_place, copied = call.but(cache=aligned(call["cache"])), call.but(cache=moved)
            assert in_place["cache"].ctypes.data % 64 == 0
            check(in_place.copy(), given=in_place)
            assert_same(in_place.run(), copied.run())


@forms
def test_few_rows_in_place_and_copied_rows_give_the_same_bits(form, rng, monkeypatch):
    """Pages of 16 tokens are read where they lie, shorter ones and the end of a context are copied."""
    use_tiles(monkeypatch, form)
    query = rng.standard_normal((1, 8, 64)).astype(ml_dtypes.bfloat16)
    keys, values = (rng.standard_normal((96, 1, 64)).astype(ml_dtypes.bfloat16) for _ in range(2))
    found = []
    for page in (96, 16, 8, 3, 1):
        table = rng.permutation(96 // page)
        pools = [np.full_like(x, np.nan).reshape(-1, page, 1, 64) for x in (keys, values)]
        for pool, rows in zip(pools, (keys, values), strict=True):
            pool[table] = rows.reshape(pool.shape)
            pool[table[89 // page], 89 % page :] = np.nan
            pool[table[89 // page + 1 :]] = np.nan
        found.append(kvkit.paged_attention(query, *pools, table[None], [89], [0, 1], return_lse=True))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert_same(one, same)


@needs_borders
@forms
def test_no_row_is_read_behind_a_cache(form, rng, monkeypatch):
    """A tile has 16 rows; a byte that is read behind the last row of memory ends the process."""
    use_tiles(monkeypatch, form)
    for new, tokens in itertools.product((40, 16, 3), (1, 15, 17, 31, 33, 47, 160)):
        query, key, value = (
            rng.standard_normal((1, n, 1, 64)).astype(ml_dtypes.bfloat16) for n in (new, tokens, tokens)
        )
        expected = kvkit.multi_head_attention(query, key, value, num_heads=1, head_dim=64, is_causal=False)
        given = at_border(key), at_border(value)
        found = kvkit.multi_head_attention(query, *given, num_heads=1, head_dim=64, is_causal=False)
        assert_same(found, expected)


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=str)
@forms
def test_hidden_keys_and_values_of_few_rows_do_not_matter(form, poison, rng, monkeypatch):
    use_tiles(monkeypatch, form)
    for rows, formats in (8, BF16), (16, BF16), (16, FP16):
        call = static(rng, formats, 89, 1, 1, rows, 1, dim=32)
        seen = np.ones((1, 90), bool)
        seen[:, [3, 40, 77]] = False
        for name in "key", "value":
            call[name][:, ~seen[0]] = poison
        output, _ = check(call.but(attn_mask=seen), usual=False)
        assert np.isfinite(output.astype(np.float32)).all()


@forms
def test_an_infinite_key_hides_itself_or_its_query(form, rng, monkeypatch):
    """A score of -inf has weight 0; rows with a score of inf are NaN, and no other row is."""
    use_tiles(monkeypatch, form)
    for formats, new, heads in itertools.product((BF16, FP16), (1, 9, 16, 40), (1, 9, 16, 33)):
        call = static(rng, formats, 90 - new, new, 1, heads, 1, dim=32, is_causal=False)
        place, rows = 60, 0
        for infinity in (np.inf, -np.inf):
            call["key"][0, place, 0, 3] = infinity
            hidden = call["query"][..., 3] * infinity < 0
            key, value = (call[name].copy() for name in ("key", "value"))
            key[0, place, 0, 3] = value[0, place] = 0
            seen = np.arange(90) != place
            expected = call.but(key=key, value=value, attn_mask=seen[None]).run()
            output = call.run()
            assert np.isnan(output[~hidden]).all()
            error = np.abs(output[hidden].astype(np.float32) - expected[hidden].astype(np.float32))
            assert error.max(initial=0) < 2e-2
            rows += hidden.sum()
        assert rows == new * heads


@pytest.mark.parametrize(("data", "rows"), [(ml_dtypes.bfloat16, 16), (np.float16, 8)])
@forms
def test_an_infinite_key_of_8_bits_hides_itself_or_its_query(form, data, rows, rng, monkeypatch):
    """Few query rows beside the same call without tiles."""
    query = rng.standard_normal((1, rows, 64)).astype(data)
    keys, values = (rng.standard_normal((1, 40, 1, 64)).astype(ml_dtypes.float8_e5m2) for _ in range(2))
    keys[0, 20, 0, 3] = np.inf
    found = []
    for engines in form, None:
        use_tiles(monkeypatch, engines)
        output = kvkit.paged_attention(query, keys, values, [[0]], [40]).astype(np.float64)
        assert_array_equal(np.isnan(output).all(2), query[..., 3] > 0)
        found.append(output)
    np.testing.assert_allclose(*found, rtol=0, atol=2**-8 * np.nanmax(np.abs(found[1])))


@forms
def test_every_nan_of_float16_is_seen(form, rng, monkeypatch):
    """Also one whose bits overflow where term 0 is rounded."""
    use_tiles(monkeypatch, form)
    for name, sign in itertools.product(("key", "value"), (0, 0x8000)):
        for past, new, heads in (0, 40, 1), (39, 1, 16):
            call = static(rng, FP16, past, new, 1, heads, 1, dim=32)
            call[name][0, 5, 0, 2:3].view(np.uint16)[:] = 0x7FFF | sign
            output = call.run().astype(np.float32)[0]
            assert np.isfinite(output[: 5 - past]).all()
            assert np.isnan(output[max(5 - past, 0) :, 0, 2]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=str)
@forms
def test_hidden_keys_and_values_do_not_matter(form, poison, rng, monkeypatch):
    use_tiles(monkeypatch, form)
    call = static(rng, BF16, 0, 90, 1, 1, 1, dim=32)
    for name in "key", "value":
        call[name][:, 70:] = poison
    output, _ = check(call, usual=False)
    assert np.isfinite(output[:, :70].astype(np.float32)).all()
    seen = np.ones((90, 90), bool)
    seen[:, 70:] = False
    output, _ = check(call.but(attn_mask=seen), usual=False)
    assert np.isfinite(output.astype(np.float32)).all()


@forms
def test_large_scores(form, rng, monkeypatch):
    """The largest wins; equal ones give the mean; a maximum that grows by little does not rescale sums."""
    use_tiles(monkeypatch, form)
    for new, size in itertools.product((20, 4), (0.1, 5, 1e3, 1e10, 1e30)):
        values = size * np.array([1, 1.001, 2, -1, 2.5] * 40, np.float32)
        key = np.zeros((1, 200, 1, 32), np.float32)
        key[0, :, 0, 0], query = values / size, np.zeros((1, new, 1, 32), np.float32)
        query[..., 0] = size
        value = rng.standard_normal((1, 200, 1, 32), np.float32)
        arrays = (x.astype(ml_dtypes.bfloat16) for x in (query, key, value))
        sizes = {"num_heads": 1, "head_dim": 32, "is_causal": False, "softmax_scale": 1.0}
        inputs = dict(zip(("query", "key", "value"), arrays, strict=True)) | {"attn_mask": None}
        check(scenes.Call("multi_head_attention", inputs, sizes))


@forms
@pytest.mark.parametrize("rows", [(70, 1), (9, 1), (1, 16), (1, 33)], ids=str)
def test_large_scores_of_float16(form, rows, rng, monkeypatch):
    """All terms count where elements do not differ, so that what is left out of products would add up."""
    use_tiles(monkeypatch, form)
    (new, heads), dim = rows, 64
    for size in 30, 300, 1000, 2000:
        query, key = (
            (math.sqrt(size / math.sqrt(dim)) * rng.uniform(least, 1.2, (1, count, group, 1)) * np.ones(dim))
            for least, count, group in ((0.8, new, heads), (1.195, 100, 1))
        )
        value = rng.standard_normal((1, 100, 1, dim))
        query, key, value = (x.astype(np.float16) for x in (query, key, value))
        output = kvkit.multi_head_attention(query, key, value, is_causal=False)
        scores = np.einsum("bshd,bmkd->shm", query.astype(float), key.astype(float)) / math.sqrt(dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("shm,md->shd", weights, value[0, :, 0].astype(float))
        assert np.abs(output[0] - expected).max() < 1e-3 * max(np.abs(expected).max(), 1)


@forms
def test_key_weights_keep_pairs(form, rng, monkeypatch):
    """They need weights in float32."""
    for past, new in (0, 60), (56, 4):
        call = static(rng, BF16, past, new, dim=32)
        arrays = [call[name] for name in ("query", "key", "value")]
        found = []
        for engines in form, None:
            use_tiles(monkeypatch, engines)
            found.append(kvkit.multi_head_attention(*arrays, **call.attributes, return_key_weights=True))
        for one, other in zip(*found, strict=True):
            assert_array_equal(one, other)


@forms
def test_pools_of_any_strides(form, rng, monkeypatch):
    """Pages with gaps between rows, heads and pages, beside the same call without tiles."""
    pool = rng.standard_normal((9, 2, 20, 3, 72)).astype(ml_dtypes.bfloat16)
    keys, values = pool[:, 0, :16, :2, :64], pool[:, 1, :16, :2, 4:68]
    query = rng.standard_normal((44, 6, 64)).astype(ml_dtypes.bfloat16)
    tables, lengths, starts = rng.permutation(9)[:8].reshape(2, 4), [60, 41], [0, 40, 44]
    found = []
    for engines in form, None:
        use_tiles(monkeypatch, engines)
        found.append(kvkit.paged_attention(query, keys, values, tables, lengths, starts).astype(np.float64))
    np.testing.assert_allclose(*found, rtol=0, atol=2**-8 * np.abs(found[1]).max())


@forms
def test_plans_run_tiles(form, rng, monkeypatch):
    """A plan has the bits of the operator, over bfloat16 and over codes."""
    use_tiles(monkeypatch, form)
    for formats in BF16, Formats("bf16", "int8", "fp16", 8, 8):
        call = dynamic_cache(rng, formats, [*LENGTHS, (64, 2)], 8, 2, layout=3)
        assert_same(attend(planned(call), call.copy()), call.copy().run())


KINDS_OF_8_BITS, DATA = (
    (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8),
    (ml_dtypes.bfloat16, np.float16),
)
each_kind_of_8_bits = pytest.mark.parametrize("kind", first_quick(KINDS_OF_8_BITS))
few_rows_of_8_bits = pytest.mark.parametrize(
    ("kind", "data", "wide"),
    [
        # One kind of floats, and integers.
        pytest.param(kind, data, wide, marks=[] if i != 1 and (j, wide) == (0, True) else [pytest.mark.slow])
        for (i, kind), (j, data), wide in itertools.product(
            enumerate(KINDS_OF_8_BITS), enumerate(DATA), (False, True)
        )
    ],
)


def numbers_of(kind):
    """Return all finite numbers of a kind of 8 bits."""
    numbers = np.arange(256, dtype=np.uint8).view(kind)
    return numbers[np.isfinite(numbers.astype(np.float32))]


@few_rows_of_8_bits
@forms
def test_few_rows_of_8_bits_are_read_exactly(form, data, kind, wide, monkeypatch):
    """The lse of one key is an element of that key, the output is its value."""
    use_tiles(monkeypatch, form)
    numbers = np.resize(numbers_of(kind), (4, 1, 1, 64))
    count = 16 if wide else 8
    query = 2 * np.eye(64).reshape(-1, 1, count, 64).astype(data)
    scales = {"key_scale": 0.5, "value_scale": 0.25}
    for pool, rows in itertools.product(numbers, query):
        out, lse = kvkit.paged_attention(
            rows, pool[None], pool[None], [[0]], [1], softmax_scale=1.0, return_lse=True, **scales
        )
        expected = pool[0].astype(np.float32)
        np.testing.assert_allclose(lse[0], expected[0, rows[0].argmax(1)], rtol=1e-6, atol=1e-7)
        assert_array_equal(out[0], np.broadcast_to(expected / 4, (count, 64)).astype(data))


def in_pages(rows, table, page, behind):
    """Return 75 rows in pages of one head; rows after them have another number."""
    pool = np.full((len(table) * page, *rows.shape[1:]), behind, np.float32)
    pool[:75] = rows
    return pool.reshape(len(table), page, 1, *rows.shape[1:])[np.argsort(table)]


@pytest.mark.parametrize("kind_of_scale", first_quick([np.float32, None, np.float16, ml_dtypes.bfloat16]))
@few_rows_of_8_bits
@forms
def test_few_rows_of_8_bits(form, data, kind, wide, kind_of_scale, rng, monkeypatch):
    """In pages of any size, beside float64, scales of calls or tokens; nothing behind a context counts."""
    numbers = numbers_of(kind)
    numbers = numbers[abs(numbers.astype(np.float32)) <= 127].astype(np.float32)
    for page, few, dims in ((1, 8, (64, 128)), (3, 5, (128, 64)), (16, 7, (64, 64)), (80, 8, (192, 256))):
        rows = 2 * few - (few < 8) if wide else few
        keys, values = (rng.choice(numbers, (75, dim)) for dim in dims)
        pools, table = [], rng.permutation(-(-75 // page))

        behind = -128 if kind == np.int8 else np.nan
        pools = [in_pages(x, table, page, behind).astype(kind) for x in (keys, values)]
        query = rng.standard_normal((1, rows, dims[0])).astype(data)
        scale, value_scale = 2.0 / np.abs(keys).max(), 0.01
        given = {"key_scale": scale, "value_scale": value_scale}
        if kind_of_scale:  # integers multiply up to 8 rows of int8
            rows = max(rows, 9) if kind == np.int8 else rows
            query = rng.standard_normal((1, rows, dims[0])).astype(data)
            of_tokens = [(x * np.exp(rng.standard_normal(75))).astype(kind_of_scale) for x in (scale, 0.01)]
            given |= {
                name: in_pages(x, table, page, np.nan).astype(kind_of_scale)
                for name, x in zip(("key_scale", "value_scale"), of_tokens, strict=True)
            }
            scale, value_scale = 1.0, 1.0
            keys, values = (
                x * each.astype(np.float32)[:, None]
                for x, each in zip((keys, values), of_tokens, strict=True)
            )
        use_tiles(monkeypatch, form)
        call = functools.partial(kvkit.paged_attention, query, *pools, table[None], [75], **given)
        out, lse = call(return_lse=True)
        scores = query[0].astype(np.float64) @ keys.T * np.float32(scale) / np.sqrt(dims[0])
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected = weights / weights.sum(1, keepdims=True) @ values * value_scale
        np.testing.assert_allclose(lse[0], scores.max(1) + np.log(weights.sum(1)), rtol=1e-5, atol=1e-5)
        rounding = 2**-8 if data == ml_dtypes.bfloat16 else 2**-11
        largest = np.abs(values).max() * value_scale
        error = np.abs(out[0].astype(np.float64) - expected).max()
        assert error < rounding * largest
        check_bits(form, call, (out, lse), monkeypatch)


@each_kind_of_8_bits
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 3e38, 1e-40])
@forms
def test_scales_of_few_rows_that_are_no_numbers(form, number, kind, rng, monkeypatch):
    """One scale of a key, then of a value: what floats of the same codes and scales say, without tiles."""
    pools = [rng.choice(numbers_of(kind)[1:], (1, 48, 1, 64)) for _ in range(2)]
    query = rng.standard_normal((1, 16, 64)).astype(ml_dtypes.bfloat16)
    for which, token in itertools.product(range(2), (5, 40)):
        scales = [np.full((1, 48, 1), 1e-3, np.float32) for _ in range(2)]
        scales[which][0, token] = number
        if token == 40 and np.isinf(number):  # also if all rows have one sign
            query[:] = query[:, :1]
        given, found = dict(zip(("key_scale", "value_scale"), scales, strict=True)), []
        for engines in form, None:
            use_tiles(monkeypatch, engines)
            found.append(kvkit.paged_attention(query, *pools, [[0]], [48], **given).astype(np.float64))
        finite = np.isfinite(found[1])
        assert_array_equal(np.isfinite(found[0]), finite)
        assert_array_equal(np.isnan(found[0]), np.isnan(found[1]))
        largest = np.abs(found[1][finite]).max(initial=1e-30)
        np.testing.assert_allclose(found[0][finite], found[1][finite], rtol=0, atol=2**-6 * largest)


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@forms
def test_8_bit_floats(form, kind, rng, monkeypatch):
    """Prompts over pools of 8-bit floats, with and without a scale, beside the same calls without tiles."""
    keys, values = (rng.standard_normal((4, 16, 2, 64)).astype(kind) for _ in range(2))
    query = rng.standard_normal((44, 4, 64)).astype(ml_dtypes.bfloat16)
    tables, lengths, starts = rng.permutation(4).reshape(2, 2), [31, 24], [0, 28, 44]
    for scales in {}, {"key_scale": 0.7, "value_scale": 1.5}:
        found = []
        for engines in form, None:
            use_tiles(monkeypatch, engines)
            output = kvkit.paged_attention(query, keys, values, tables, lengths, starts, **scales)
            found.append(output.astype(np.float64))
        np.testing.assert_allclose(*found, rtol=0, atol=2**-8 * np.abs(found[1]).max())
