"""Attention through tensor cores, few rows (decode) and many (prefill), against the oracle.

In the CUDA simulator, on the machine that runs PTX, or on a device. What one of them does alone is in
`test_device_decode.py` and `test_device_prefill.py`.
"""

from types import SimpleNamespace

import attention_scenes
import numpy as np
import pytest
import tensor_cores
from attention_scenes import BF16, FP16
from scenes import Formats
from tensor_cores import DTYPES, check, forms_taken, slow

import kvkit
import kvkit_cuda
from kvkit.formats.elements import BY_NAME
from kvkit.tools.vectors.calls import mask_rows
from kvkit.tools.vectors.draws import normal
from kvkit_cuda.attention import decode, decode_forms, merge, prefill
from kvkit_cuda.attention.fragments import LONGEST
from kvkit_cuda.attention.params import AttentionParams, Reach
from kvkit_cuda.calls import tables

# Numbers that are no longer finite are what some tests are about; numpy, in the simulator, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KERNELS = {"decode": decode, "prefill": prefill}
USUAL = {"decode": {"past": 70, "seqlen": 1}, "prefill": {"past": 20, "seqlen": 10}}


PAGE = 4


def pool_call(kernel, rng, stored, dtype, scales, dim=32, **more):
    """Return a call over pages with scales of all, of heads, tokens or 32 codes, and the CPU's results."""
    lengths, counts = {"decode": ([70, 9], [1, 2]), "prefill": ([30, 12], [10, 12])}[kernel]
    pages = [-(-length // PAGE) for length in lengths]
    pools = [
        normal(rng, (sum(pages), PAGE, 2, dim), np.float32) * (40 if stored == "int8" else 1) for _ in "kv"
    ]
    pools = [pool.astype(BY_NAME[stored].dtype) for pool in pools]
    order, starts = rng.permutation(sum(pages)), np.cumsum([0, *counts])
    given = {"int8": (0.02, 0.03), "e4m3": (0.5, 2.0)}.get(stored, (None, None))
    if scales == "heads":
        given = [np.float32([[0.03, 0.02], [0.5, 0.1]]), np.float32([0.1, 2])]
    if scales in ("tokens", "groups"):
        shape = sum(pages), PAGE, 2, {"tokens": 1, "groups": dim // 32}[scales]
        given = [rng.uniform(0.01, 0.05, shape).astype(np.float32) for _ in "kv"]
    call = {
        "query": normal(rng, (starts[-1], 4, dim), np.float32).astype(DTYPES[dtype]),
        "key_cache": pools[0], "value_cache": pools[1], "key_scale": given[0], "value_scale": given[1],
        "block_tables": (np.cumsum([0, *pages]), order), "context_lens": lengths, "query_starts": starts,
        "return_lse": True, **more,
    }  # fmt: skip
    return call, kvkit.paged_attention(**call)


def later(*case):
    return pytest.param(*case, marks=slow)


def cases(names, *given):
    return pytest.mark.parametrize(f"kernel, {names}", given, ids=str)


kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture
def taken(kernel, monkeypatch):
    """Return a list that gets the forms of the kernel in use; blocks of decode have two warps."""
    monkeypatch.setattr(decode_forms, "WARPS", 2)
    return forms_taken(KERNELS[kernel], monkeypatch)


def static(kernel, rng, formats=FP16, **options):
    return tensor_cores.static(rng, formats, **USUAL[kernel] | options)


@pytest.mark.parametrize("formats", [FP16, BF16], ids=str)
@cases(
    "past", ("decode", 0), later("decode", 15), ("decode", 100), ("prefill", 0), later("prefill", 5),
    ("prefill", 40),
)  # fmt: skip
def test_contexts(kernel, past, formats, rng, taken):
    check(static(kernel, rng, formats, past=past), taken)


@cases(
    "options", ("decode", {"is_causal": False, "seqlen": 2}), ("decode", {"window": (37, -1)}),
    ("decode", {"window": (3, 2), "is_causal": False, "seqlen": 3}), ("decode", {"softcap": 5.0}),
    ("decode", {"is_alibi": True, "seqlen": 2}), ("decode", {"softmax_scale": -0.3}),
    ("decode", {"past": -2, "seqlen": 4}),
    later("decode", {"heads": 3, "kv_heads": 3, "seqlen": 2, "batch": 2}), ("prefill", {"is_causal": False}),
    ("prefill", {"window": (9, -1)}), ("prefill", {"window": (3, 2), "is_causal": False}),
    later("prefill", {"window": (-1, 1), "is_causal": False}), ("prefill", {"softcap": 5.0}),
    ("prefill", {"is_alibi": True}), later("prefill", {"softmax_scale": -0.3}), ("prefill", {"past": -4}),
    ("prefill", {"dim": 48, "value_dim": 16}), later("prefill", {"dim": 64, "value_dim": 80}),
    later("prefill", {"heads": 6, "seqlen": 3}),
    ("prefill", {"heads": 3, "kv_heads": 3, "seqlen": 17, "batch": 2}),
)  # fmt: skip
def test_options(kernel, options, rng, taken):
    check(static(kernel, rng, **options), taken)


@cases(
    "stored, dtype, scales", ("decode", "e4m3", "float16", "shared"),
    ("decode", "e4m3", "bfloat16", "heads"), ("decode", "e5m2", "float16", "shared"),
    ("decode", "int8", "float16", "heads"), later("decode", "int8", "bfloat16", "shared"),
    ("decode", "int8", "bfloat16", "tokens"), ("decode", "e4m3", "float16", "tokens"),
    later("decode", "e5m2", "bfloat16", "tokens"), ("decode", "float16", "bfloat16", None),
    ("prefill", "e4m3", "float16", "heads"), ("prefill", "int8", "bfloat16", "shared"),
    later("prefill", "e5m2", "bfloat16", "shared"), ("prefill", "int8", "bfloat16", "tokens"),
    ("prefill", "e4m3", "float16", "tokens"), later("prefill", "e5m2", "bfloat16", "tokens"),
)  # fmt: skip
def test_pools_of_codes(kernel, stored, dtype, scales, rng, taken):
    """Scales of heads are factors of scores and of sums, which may be those of splits."""
    call, expected = pool_call(kernel, rng, stored, dtype, scales)
    if stored == "e4m3":
        call |= {"softcap": 5.0}
        expected = kvkit.paged_attention(**call)
    check_pool_call(call, expected, dtype, taken)


def check_pool_call(call, expected, dtype, taken):
    found = kvkit_cuda.paged_attention(**call)
    tolerance = attention_scenes.TOLERANCE[dtype]
    for got, right, most in zip(found, expected, (tolerance, 5e-4), strict=True):
        attention_scenes.assert_near(
            got, right.astype(np.float64), most * max(1, abs(right[right > -1e9]).max())
        )
    assert taken


@slow
@cases("slopes", ("decode", 1), ("decode", 2), ("prefill", 2))
def test_slopes_of_a_call(kernel, slopes, rng, taken):
    """ALiBi slopes of heads, or of sequences and heads; rows may see keys on both sides of them."""
    call, _ = pool_call(kernel, rng, "e4m3", "float16", "shared")
    call |= {"alibi_slopes": rng.uniform(0.01, 0.5, (2, 4)[2 - slopes :]).astype(np.float32)}
    call |= {"is_causal": False}
    check_pool_call(call, kvkit.paged_attention(**call), "float16", taken)


@cases(
    "dtype, sizes", ("decode", "bfloat16", (1e-12, 1e-12)), later("decode", "bfloat16", (1e9, 1e9)),
    ("decode", "float16", (1e-4, 10)), later("decode", "bfloat16", (1e5, 1e-5)),
    later("prefill", "bfloat16", (1e-12, 1e9)), ("prefill", "float16", (1e-4, 10)),
    later("prefill", "float16", (1e-4, 1e-4)),
)  # fmt: skip
def test_scales_of_any_size(kernel, dtype, sizes, rng, taken):
    """Values of two groups or one: of one size, or another one after the first tile; some are hidden."""
    scales, window, hidden, first = {"decode": ("groups", 35, 8, 14), "prefill": ("tokens", 4, 3, 5)}[kernel]
    call, _ = pool_call(kernel, rng, "int8", dtype, scales, dim=64, window=(window, -1))
    starts, pages = call["block_tables"]
    scales, pages = call["value_scale"], pages[: starts[1]]
    scales[:] *= np.float32(sizes[1])
    scales[pages[hidden:first]] *= np.float32(sizes[0] / sizes[1])  # the first ones that the window shows
    scales[pages[:hidden]] = np.inf
    check_pool_call(call, kvkit.paged_attention(**call), dtype, taken)


@cases(
    "dtype", later("decode", np.float16), ("decode", np.float32), ("decode", bool), ("prefill", np.float16),
    later("prefill", np.float32), ("prefill", bool),
)  # fmt: skip
def test_masks(kernel, dtype, rng, taken):
    past, seqlen = {"decode": (38, 2), "prefill": (20, 10)}[kernel]
    call = static(kernel, rng, past=past, seqlen=seqlen)
    shape = 1, 2, seqlen, past + seqlen + 3
    call.inputs["attn_mask"] = mask_rows(rng, shape, dtype)
    check(call, taken)


@cases("lengths", ("decode", [(3, 2), (0, 1), (9, 0), (40, 1)]), ("prefill", [(3, 9), (0, 5), (9, 0)]))
def test_a_mask_of_packed_sequences(kernel, lengths, rng, taken):
    call = attention_scenes.dynamic(rng, BF16, lengths, heads=2, kv_heads=1, dim=16, is_alibi=True)
    past, new = map(sum, zip(*lengths, strict=True))
    call.inputs["attn_mask"] = mask_rows(rng, (2, new, past + new), DTYPES["bfloat16"])
    check(call, taken)


@cases(
    "dtype", ("decode", np.float32), later("decode", np.float16), later("prefill", np.float32),
    ("prefill", np.float16),
)  # fmt: skip
def test_sinks(kernel, dtype, rng, taken):
    check(static(kernel, rng, sinks=normal(rng, 2, dtype)), taken)


@cases(
    "formats, page_size, dim", ("decode", FP16, 5, 32), later("decode", BF16, 0, 32),
    ("decode", Formats("fp16", "int8", "fp16", 8, 8), 7, 128),
    later("decode", Formats("fp16", "int8", "fp32", 8, 8), 0, 128),
    ("decode", Formats("bf16", "int8", "bf16", 8, 16), 0, 96),
    later("decode", Formats("fp16", "int8", "fp32", 8, 32), 0, 32),
    later("decode", Formats("bf16", "int8", "bf16", 8, 16), 0, 32),
    later("decode", Formats("fp16", "int8", "bf16", 4, 16), 3, 128),
    later("decode", Formats("bf16", "uint8", "fp16", 4, 8), 6, 128),
    later("decode", Formats("bf16", "uint8", "fp32", 4, 8), 6, 128),
    ("decode", Formats("bf16", "uint8", "fp16", 4, 32), 6, 64),
    ("decode", Formats("bf16", "int8", "fp32", 8, 48), 0, 48),
    later("decode", Formats("bf16", "int8", "bf16", 8, 64), 3, 128),
    later("decode", Formats("fp16", "uint8", "fp16", 4, 64), 0, 128), ("prefill", FP16, 5, 32),
    later("prefill", BF16, 0, 32), ("prefill", Formats("fp16", "int8", "fp16", 8, 8), 1, 32),
    later("prefill", Formats("bf16", "int8", "fp32", 8, 32), 3, 32),
    later("prefill", Formats("fp16", "int8", "bf16", 4, 16), 0, 32),
    ("prefill", Formats("bf16", "uint8", "bf16", 4, 8), 6, 32),
)  # fmt: skip
def test_caches(kernel, formats, page_size, dim, rng, taken):
    """Heads of 128 have runs of keys and of values, pieces of several chunks, and of one."""
    lengths = {
        "decode": [(50, 1), (3, 4), (0, 2), (0, 0), (4, 0)],
        "prefill": [(20, 9), (3, 1), (0, 5), (0, 0), (4, 0)],
    }[kernel]
    layout, mode = page_size % 4, int(page_size > 0)
    call = attention_scenes.dynamic_cache(
        rng, formats, lengths, 2, 1, dim, layout=layout, mode=mode, page_size=max(page_size, 1), decoding=1
    )
    check(call, taken)


@slow
@kernels
@pytest.mark.parametrize("layout", [0, 1])
def test_static_caches(kernel, layout, rng, taken):
    formats = (FP16, Formats("fp16", "int8", "fp16", 8, 16))[layout]
    sizes = {"decode": (40, 1, 2, 4, 2, 32), "prefill": (9, 9, 2, 2, 1, 16)}[kernel]
    check(attention_scenes.static_cache(rng, formats, *sizes, layout), taken)


@cases(
    "options", ("decode", {}), ("decode", {"window": (30, -1)}), ("prefill", {}),
    later("prefill", {"window": (12, -1)}),
)  # fmt: skip
def test_split_contexts(kernel, options, rng, taken, monkeypatch):
    """Parts that are merged; some rows see nothing of some parts, and one part is not finite."""
    monkeypatch.setattr(tables, "LEAST_SPLIT", 20)
    past, seqlen = {"decode": (58, 4), "prefill": (38, 9)}[kernel]
    call = static(kernel, rng, past=past, seqlen=seqlen, sinks=normal(rng, 2, np.float32), **options)
    call["value"][0, past + 2, 0, 3] = np.inf
    output = check(call, taken)
    assert np.isposinf(output[0, 2:, :, 3]).all()
    assert np.isfinite(output[0, :2]).all()


def test_more_splits_than_threads_of_a_merge(rng, monkeypatch):
    """Each thread finds the factors of several splits."""
    monkeypatch.setattr(tables, "LEAST_SPLIT", 2)
    monkeypatch.setattr(merge, "THREADS", 32)
    monkeypatch.setattr(decode_forms, "WARPS", 1)
    taken = forms_taken(decode, monkeypatch)
    check(static("decode", rng, past=70, sinks=normal(rng, 2, np.float32)), taken)


@cases("past, seqlen, nan, infinite", ("decode", 20, 4, 1, 3), ("prefill", 3, 10, 3, 5))
def test_hidden_values_are_absent(kernel, past, seqlen, nan, infinite, rng, taken):
    """NaN and infinite values reach the rows that see them, and no others."""
    call = static(kernel, rng, past=past, seqlen=seqlen)
    call["value"][0, past + nan, 0, 5] = np.nan
    call["value"][0, past + infinite, 0, 6] = np.inf
    output = check(call, taken)
    assert np.isfinite(output[0, :nan]).all()
    assert np.isnan(output[0, nan:, :, 5]).all()
    assert np.isposinf(output[0, infinite:, :, 6]).all()


@cases(
    "value, options",
    ("decode", 3e38, {"past": 30, "softmax_scale": 0.01}),
    ("decode", 1e37, {"past": 90, "softmax_scale": 0.01}),
    ("prefill", 3e38, {"past": 30}),
)
def test_sums_that_overflow(kernel, value, options, rng, taken):
    """Those of a warp, and those of all warps together."""
    call = static(kernel, rng, BF16, **options)
    call["value"][:] = np.float32(value)
    output = check(call, taken, usual=False)
    assert np.isfinite(output.astype(np.float32)).all()


HALF = {"scale_format": "float16", "group": 16, "cache_format": "int8"}
WHOLE = HALF | {"scale_format": "float32"}
TAKEN = {
    "decode": (
        {}, {"rows": 16}, {"rows": 8, "dim": 256}, {"reach": (LONGEST - 1, LONGEST - 1)},
        HALF | {"at": {"scale_row": 4}}, HALF | {"cache_format": "int4"},
        WHOLE | {"cache_format": "e4m3", "group": 0, "as_loaded": False},
        WHOLE | {"cache_format": "int4", "group": 32, "as_loaded": False}, {"data_dtype": "bfloat16"},
    ),
    "prefill": (
        {}, WHOLE, WHOLE | {"cache_format": "int4", "group": 8, "at": {"keys": 8}},
        WHOLE | {"cache_format": "e4m3", "group": 0, "as_loaded": False},
        WHOLE | {"group": 64, "as_loaded": False},
        {"reach": (2**40, LONGEST - 1)},
    ),
}  # fmt: skip
# Not in the cache's type, no whole fragments, rows that are not aligned.
REFUSED = (
    {"dim": 24}, {"dim": 272}, {"data_dtype": "float32", "cache_format": "float32"},
    {"cache_format": "bfloat16"},
    {"value_dim": 8}, {"at": {"query": 2}}, {"at": {"values": 8}}, {"at": {"out_token": 4}},
)  # fmt: skip
REFUSED_BY = {
    "decode": (
        {"rows": 17}, {"rows": 9, "value_dim": 144}, {"reach": (LONGEST, 99)}, {"reach": (99, LONGEST)},
        {"at": {"key_row": 8}}, HALF | {"group": 4}, HALF | {"at": {"key_row": 8}},
        HALF | {"at": {"scale_row": 2}}, HALF | {"cache_format": "int4", "value_dim": 16},
        HALF | {"group": 32}, WHOLE | {"as_loaded": False},
    ),
    "prefill": (
        {"rows": 8}, {"reach": (LONGEST, LONGEST)}, {"data_dtype": "bfloat16"},
        WHOLE | {"as_loaded": False}, WHOLE | {"group": 32, "as_loaded": False}, WHOLE | {"group": 4},
        WHOLE | {"group": 12},
        WHOLE | {"at": {"key_row": 8}},
    ),
}  # fmt: skip


@kernels
def test_which_calls_are_taken(kernel):
    """16-bit data in the cache or codes of them, whole fragments, aligned rows; few or more than a few."""
    usual = {
        "data_dtype": "float16", "cache_format": "float16", "scale_format": None, "group": 0, "dim": 64,
        "value_dim": 32, "as_loaded": True,
    }  # fmt: skip

    def suits(rows={"decode": 4, "prefill": 9}[kernel], reach=(99, 99), at=None, **changes):
        context = SimpleNamespace(**usual | changes)
        return KERNELS[kernel].suits(AttentionParams()._replace(**at or {}), context, Reach(*reach), rows)

    assert all(suits(**call) for call in TAKEN[kernel])
    assert [call for call in (*REFUSED, *REFUSED_BY[kernel]) if suits(**call)] == []
