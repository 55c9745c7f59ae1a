"""Prefill through tensor cores: fragments against plain matrices, and the kernel against the oracle.

In the CUDA simulator, on the machine that runs PTX, or on a device.
"""

from dataclasses import replace
from types import SimpleNamespace

import attention_scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import BF16, FP16, normal
from numba import cuda, types
from scenes import Formats
from tensor_cores import DTYPES, F32, U32, check, elements, forms_taken, run, slow, static, word

from kvkit_cuda.attention import prefill, tiles
from kvkit_cuda.attention.fragments import LONGEST
from kvkit_cuda.attention.params import AttentionParams, Reach
from kvkit_cuda.calls import tables
from kvkit_cuda.device_runtime import device, host, memory, ptx

# Numbers that are no longer finite are what some tests are about; numpy, in the simulator, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# Instructions


@elements
def test_product(element, rng):
    """The fragments of A, B and C as PTX ISA draws them for mma.m16n8k16."""
    a, b = (normal(rng, shape, DTYPES[element]) for shape in ((16, 16), (16, 8)))
    c = normal(rng, (16, 8), np.float32)
    words_a, words_b, held = (
        np.zeros((32, 4), np.uint32),
        np.zeros((32, 2), np.uint32),
        np.zeros((32, 4), np.float32),
    )
    for lane in range(32):
        for i in range(0, 8, 2):
            row = lane // 4 + (8 if i in (2, 3, 6, 7) else 0)
            column = lane % 4 * 2 + (8 if i >= 4 else 0)
            words_a[lane, i // 2] = word(a[row, column : column + 2])
        for i in range(0, 4, 2):
            row = lane % 4 * 2 + (8 if i >= 2 else 0)
            words_b[lane, i // 2] = word(b[row : row + 2, lane // 4])
        for i in range(4):
            held[lane, i] = c[lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + i % 2]
    mma = ptx.mma(element)

    def kernel(a, b, c):
        i = cuda.threadIdx.x
        c[i, 0], c[i, 1], c[i, 2], c[i, 3] = mma(
            (a[i, 0], a[i, 1], a[i, 2], a[i, 3]), (b[i, 0], b[i, 1]), (c[i, 0], c[i, 1], c[i, 2], c[i, 3])
        )

    _, _, got = run(kernel, U32, U32, F32, arrays=(words_a, words_b, held))
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + i % 2
            expected = c[row, column] + sum(float(a[row, k]) * float(b[k, column]) for k in range(16))
            assert abs(got[lane, i] - expected) < 1e-5 * max(1, abs(expected))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_tiles_and_matrices(dim, transposed):
    """Rows that were copied to shared memory are found there as matrices."""
    given = np.arange(16 * dim, dtype=np.uint16).reshape(16, dim)
    shared_memory, load, at = (
        memory.shared(16 * tiles.row_bytes(dim)),
        ptx.matrices(transposed),
        tiles.place(dim),
    )
    fill, arrived, last = tiles.copy_row(dim), ptx.arrived, dim // 8 - 2

    def kernel(source, words):
        tile, lane = shared_memory(), cuda.threadIdx.x
        for row in range(lane >> 3, 16, 4):
            fill(tile, row, source[0, 0] + row * dim * 2, 0, 1, lane & 7)
        arrived()
        cuda.syncthreads()
        words[lane, 0], words[lane, 1], words[lane, 2], words[lane, 3] = load(
            tile, at(lane & 15, last + (lane >> 4))
        )

    there = cuda.to_device(given)
    place = np.array([[host.address(there)]], np.int64)
    _, got = run(kernel, types.Array(types.int64, 2, "C"), U32, arrays=(place, np.zeros((32, 4), np.uint32)))
    for lane in range(32):
        for i in range(4):
            matrix = given[i % 2 * 8 : i % 2 * 8 + 8, 8 * (last + i // 2) : 8 * (last + i // 2) + 8]
            matrix = matrix.T if transposed else matrix
            assert got[lane, i] == word(matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2])


@elements
def test_two_numbers_are_rounded_into_a_word(element, rng):
    given = normal(rng, (32, 2), np.float32) * np.float32(10.0) ** rng.integers(-9, 9, (32, 2)).astype(
        np.float32
    )
    given[:6] = [[1 + 2**-11, 1 + 3 * 2**-11], [1 + 2**-8, 1 + 3 * 2**-8], [65520, -65519], [0, -0.0],
                 [np.inf, -np.inf], [2**-24, 2**-26]]  # fmt: skip
    packed = ptx.packed(element)

    def kernel(numbers, words):
        i = cuda.threadIdx.x
        words[i, 0] = packed(numbers[i, 0], numbers[i, 1])

    _, got = run(kernel, F32, U32, arrays=(given, np.zeros((32, 1), np.uint32)))
    for lane in range(32):
        assert got[lane, 0] == word(given[lane].astype(DTYPES[element]))


def test_powers_and_larger_numbers(rng):
    given = rng.uniform(-140, 20, (32, 2)).astype(np.float32)
    given[:4] = [[-np.inf, 1], [0, -0.0], [np.nan, -3], [5, np.nan]]
    power, larger = ptx.power, ptx.larger

    def kernel(numbers, found):
        i = cuda.threadIdx.x
        found[i, 0], found[i, 1] = power(numbers[i, 0]), larger(numbers[i, 0], numbers[i, 1])

    _, got = run(kernel, F32, F32, arrays=(given, np.zeros((32, 2), np.float32)))
    expected = np.exp2(given[:, 0].astype(np.float64))
    expected[expected < 2.0**-126] = np.where(device.SIMULATED, expected[expected < 2.0**-126], 0)
    np.testing.assert_allclose(got[:, 0], expected, 2.0**-21, 2.0**-126)
    np.testing.assert_array_equal(got[:, 1], np.fmax(given[:, 0], given[:, 1]))


# The kernel


@pytest.fixture
def taken(monkeypatch):
    return forms_taken(prefill, monkeypatch)


@pytest.mark.parametrize("formats", [FP16, BF16], ids=str)
@pytest.mark.parametrize("past", [0, pytest.param(5, marks=slow), 40])
def test_causal(formats, past, rng, taken):
    check(static(rng, formats, past), taken)


@pytest.mark.parametrize(("strips", "tokens"), [(1, 16), pytest.param(1, 32, marks=slow), (2, 16)])
def test_any_tile(strips, tokens, rng, taken, monkeypatch):
    made = prefill.form_of
    monkeypatch.setattr(prefill, "form_of", lambda *call: replace(made(*call), strips=strips, tokens=tokens))
    check(static(rng, heads=4), taken)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"window": (9, -1)},
        {"window": (3, 2), "is_causal": False},
        pytest.param({"window": (-1, 1), "is_causal": False}, marks=slow),
        {"softcap": 5.0},
        {"is_alibi": True},
        pytest.param({"softmax_scale": -0.3}, marks=slow),
        {"past": -4},
        {"dim": 48, "value_dim": 16},
        pytest.param({"dim": 64, "value_dim": 80}, marks=slow),
        pytest.param({"heads": 6, "seqlen": 3}, marks=slow),
        {"heads": 3, "kv_heads": 3, "seqlen": 17, "batch": 2},
    ],
    ids=str,
)
def test_options(options, rng, taken):
    check(static(rng, **options), taken)


@pytest.mark.parametrize("dtype", [np.float16, pytest.param(np.float32, marks=slow), bool])
def test_masks(dtype, rng, taken):
    call = static(rng)
    call.inputs["attn_mask"] = attention_scenes.mask_rows(rng, (1, 2, 10, 33), dtype)
    check(call, taken)


def test_a_mask_of_packed_sequences(rng, taken):
    call = attention_scenes.dynamic(
        rng, BF16, [(3, 9), (0, 5), (9, 0)], heads=2, kv_heads=1, dim=16, is_alibi=True
    )
    call.inputs["attn_mask"] = attention_scenes.mask_rows(rng, (2, 14, 26), ml_dtypes.bfloat16)
    check(call, taken)


@pytest.mark.parametrize("dtype", [pytest.param(np.float32, marks=slow), np.float16])
def test_sinks(dtype, rng, taken):
    check(static(rng, sinks=normal(rng, 2, dtype)), taken)


@pytest.mark.parametrize(
    ("formats", "page_size"),
    [
        (FP16, 5),
        pytest.param(BF16, 0, marks=slow),
        (Formats("fp16", "int8", "fp16", 8, 8), 1),
        pytest.param(Formats("bf16", "int8", "fp32", 8, 32), 3, marks=slow),
        pytest.param(Formats("fp16", "int8", "bf16", 4, 16), 0, marks=slow),
        (Formats("bf16", "uint8", "bf16", 4, 8), 6),
    ],
    ids=str,
)
def test_caches(formats, page_size, rng, taken):
    lengths = [(20, 9), (3, 1), (0, 5), (0, 0), (4, 0)]
    layout, mode = page_size % 4, int(page_size > 0)
    call = attention_scenes.dynamic_cache(
        rng, formats, lengths, 2, 1, dim=32, layout=layout, mode=mode, page_size=max(page_size, 1), decoding=1
    )
    check(call, taken)


@slow
def test_static_caches(rng, taken):
    for layout in range(2):
        formats = (FP16, Formats("fp16", "int8", "fp16", 8, 16))[layout]
        call = attention_scenes.static_cache(rng, formats, 9, 9, 2, 2, 1, 16, layout)
        check(call, taken)


@pytest.mark.parametrize("options", [{}, pytest.param({"window": (12, -1)}, marks=slow)], ids=str)
def test_split_contexts(options, rng, taken, monkeypatch):
    """Parts that are merged; some rows see nothing of some parts, and one part is not finite."""
    monkeypatch.setattr(tables, "LEAST_PART", 20)
    call = static(rng, past=38, seqlen=9, sinks=normal(rng, 2, np.float32), **options)
    call["value"][0, 40, 0, 3] = np.inf
    output = check(call, taken)
    assert np.isposinf(output[0, 2:, :, 3]).all()
    assert np.isfinite(output[0, :2]).all()


def test_hidden_values_are_absent(rng, taken):
    """NaN and infinite values reach the rows that see them, and no others."""
    call = static(rng, past=3)
    call["value"][0, 6, 0, 5] = np.nan
    call["value"][0, 8, 0, 6] = np.inf
    output = check(call, taken)
    assert np.isfinite(output[0, :3]).all()
    assert np.isnan(output[0, 3:, :, 5]).all()
    assert np.isposinf(output[0, 5:, :, 6]).all()


def test_sums_that_overflow(rng, taken):
    call = static(rng, BF16, past=30)
    call["value"][:] = np.float32(3e38)
    output = check(call, taken, usual=False)
    assert np.isfinite(output.astype(np.float32)).all()


@pytest.mark.parametrize("warps", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
def test_warps(warps, rng, taken, monkeypatch):
    """A block has as many warps as there are strips of rows, and no more than it may."""
    monkeypatch.setattr(prefill, "WARPS", warps)
    call = attention_scenes.dynamic(rng, FP16, [(0, 36), (3, 0), (5, 3)], heads=2, kv_heads=1, dim=16)
    check(call, taken)


def test_which_calls_are_taken():
    """16-bit data in the cache or codes of them, whole fragments, aligned rows, more than a few."""
    record = AttentionParams()
    context = SimpleNamespace(packed="float16", stored="float16", cell=None, group=0, dim=64, value_dim=32)
    codes = {"stored": "int8", "cell": "float32", "group": 16}

    def suits(rows=9, reach=(99, 99), at=None, **changes):
        changed = SimpleNamespace(**vars(context) | changes)
        return prefill.suits(record._replace(**at or {}), changed, Reach(*reach), rows)

    assert suits()
    assert suits(**codes)
    assert suits(**codes | {"stored": "int4", "group": 8}, at={"keys": 8})
    assert suits(reach=(2**40, LONGEST - 1))
    for refused in (
        {"rows": 8}, {"reach": (LONGEST, LONGEST)}, {"packed": "float32", "stored": "float32"},
        {"stored": "bfloat16"},
        {"dim": 24}, {"dim": 272}, {"value_dim": 8}, codes | {"group": 4}, codes | {"group": 12},
        codes | {"at": {"key_row": 8}}, {"at": {"query": 2}}, {"at": {"values": 8}}, {"at": {"out_token": 4}},
    ):  # fmt: skip
        assert not suits(**refused), refused
