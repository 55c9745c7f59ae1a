"""Decode through tensor cores: tiles that a warp copies and multiplies, and the kernel against the oracle.

In the CUDA simulator, on the machine that runs PTX, or on a device.
"""

from types import SimpleNamespace

import attention_scenes
import numpy as np
import pytest
from attention_scenes import BF16, FP16, normal
from numba import cuda, types
from scenes import Formats, assert_same
from tensor_cores import DTYPES, U32, check, elements, forms_taken, run, slow, static, word

from kvkit.formats import BY_NAME
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import decode, decode_forms, stored_tiles, tile_words
from kvkit_cuda.attention.fragments import LONGEST
from kvkit_cuda.attention.params import AttentionParams, Reach
from kvkit_cuda.calls import tables
from kvkit_cuda.device_runtime import device, host, memory, ptx

# Numbers that are no longer finite are what some tests are about; numpy, in the simulator, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ADDRESSES = types.Array(types.int64, 2, "C")


# Instructions


def test_turned_matrices():
    given = np.arange(64, dtype=np.uint16).reshape(8, 8)
    words = np.array([[word(given[i // 4, i % 4 * 2 : i % 4 * 2 + 2])] for i in range(32)], np.uint32)
    transposed = ptx.transposed

    def kernel(words):
        i = cuda.threadIdx.x
        words[i, 0] = transposed(words[i, 0])

    (got,) = run(kernel, U32, arrays=(words,))
    for i in range(32):
        assert got[i, 0] == word(given.T[i // 4, i % 4 * 2 : i % 4 * 2 + 2])


@pytest.mark.parametrize("operation", ["sub", "mul"])
def test_operations_of_two_halves(operation, rng):
    given = normal(rng, (2, 32, 2), np.float16) * np.float16(2) ** rng.integers(-15, 15, (2, 32, 2)).astype(
        np.float16
    )
    words = np.array([[word(x), word(y)] for x, y in zip(*given, strict=True)], np.uint32)
    compute = ptx.halves(operation)

    def kernel(words):
        i = cuda.threadIdx.x
        words[i, 0] = compute(words[i, 0], words[i, 1])

    (got,) = run(kernel, U32, arrays=(words,))
    exact = {"sub": np.subtract, "mul": np.multiply}[operation](*given.astype(np.float64))
    assert_same(got[:, 0].copy().view(np.float16), exact.astype(np.float16).reshape(-1))


def test_groups_of_copies():
    """A thread has what it has waited for, by 16 bytes or 4; the simulator spoils the rest."""
    given = np.arange(1, 32 * 16 + 1, dtype=np.uint32).reshape(32, 16)
    block, copy, copy_word = memory.shared(32 * 64), ptx.copy, ptx.copy_word
    together, all_but_one, arrived, load = (
        ptx.end_group,
        ptx.all_but(1),
        ptx.arrived,
        memory.load(4, 4, space=3),
    )

    early = device.SIMULATED  # a device would not say what is there

    @shared
    def look(address):
        return np.uint32(load(address)[0])

    def kernel(places, words):
        i = cuda.threadIdx.x
        at, source = block() + 64 * i, places[0, 0] + 64 * i
        copy(at, source)
        copy_word(at + 16, source + 16)
        together()
        copy(at + 48, source + 48)
        together()
        all_but_one()
        for j in range(5):
            words[i, j] = look(at + 4 * j)
        words[i, 6] = look(at + 60) if early else 0
        arrived()
        for j in range(12, 16):
            words[i, j] = look(at + 4 * j)

    there = cuda.to_device(given)
    place = np.array([[host.address(there)]], np.int64)
    _, got = run(kernel, ADDRESSES, U32, arrays=(place, np.zeros((32, 16), np.uint32)))
    if device.SIMULATED:
        assert (got[:, 6] == 2**32 - 1).all()
    got[:, 6] = given[:, 6]
    given[:, [5, 7, 8, 9, 10, 11]] = 0  # where nobody looks
    assert_same(got, given)


# Tiles


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("cell", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("stored", "group", "dim", "panel"),
    [("int8", 8, 64, 4), ("int8", 24, 96, 8), ("int4", 16, 96, 4), ("int4", 8, 128, 8)],
)
def test_codes_are_widened_to_the_same_bits(element, cell, stored, group, dim, panel, rng):
    """Every code, with scales of every size, becomes what `numeric.dequantize` makes of it."""
    dtype, groups = BY_NAME[cell].dtype, dim // group
    tile = stored_tiles.Tile(element, stored, cell, group, dim, panel, unit=16)
    codes = rng.permutation(np.tile(np.arange(256, dtype=np.uint8), dim // 16)).view(np.int8).reshape(16, dim)
    codes = codes if stored == "int8" else codes >> 4
    packed = codes if stored == "int8" else (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    scales = (rng.uniform(1, 2, (16, groups)) * 2.0 ** rng.integers(-26, 12, (16, groups))).astype(dtype)
    image = np.zeros(tile.bytes, np.uint8)
    rows, cells = image[: 16 * tile.step].reshape(16, -1), image[16 * tile.step :].reshape(16, -1)
    rows[:, : packed.shape[1]], cells[:, : scales[0].nbytes] = packed.view(np.uint8), scales.view(np.uint8)
    size, block, copy, arrived = tile.bytes, memory.shared(tile.bytes), ptx.copy, ptx.arrived
    begin, read = tile_words.start(tile), tile_words.reader(tile)
    panels, first, pace, mask = tile.panels, tile.first(1), tile.pace, tile_words.code_mask(tile)

    def kernel(places, words):
        i, at = cuda.threadIdx.x, block()
        for j in range(16 * i, size, 16 * 32):
            copy(at + j, places[0, 0] + j)
        arrived()
        cuda.syncthreads()
        held = cuda.local.array(12, types.uint32)
        for token in range(0, 16, 8):
            for j in range(panels):
                for chunk in range(i >> 3, panel, 4):
                    read(begin(at, i & 7, chunk, mask), token, j, held, 0)
                    for k in range(4):
                        words[token + (i & 7), 4 * (chunk * first + j * pace) + k] = held[k]

    there = cuda.to_device(image)
    place = np.array([[host.address(there)]], np.int64)
    _, got = run(kernel, ADDRESSES, U32, arrays=(place, np.zeros((16, 4 * panel * panels), np.uint32)))
    exact = codes.astype(np.float32) * np.repeat(scales, group, axis=1).astype(np.float32)
    expected = exact.astype(dtype).astype(DTYPES[element]).reshape(16, -1, 8)
    apart, made = tile.apart, got[:, : dim // 2].copy()
    pairs = [[k // apart * 2 * apart + k % apart + half for half in (0, apart)] for k in range(4)]
    assert_same(made.view(DTYPES[element]).reshape(16, -1, 4, 2), expected[..., pairs])


# The kernel


@pytest.fixture
def taken(monkeypatch):
    """The forms of the kernels that calls are given; blocks are of two warps."""
    monkeypatch.setattr(decode_forms, "WARPS", 2)
    return forms_taken(decode, monkeypatch)


def one(rng, formats=FP16, past=70, seqlen=1, **options):
    return static(rng, formats, past, seqlen, **options)


@pytest.mark.parametrize("formats", [FP16, BF16], ids=str)
@pytest.mark.parametrize("past", [0, pytest.param(15, marks=slow), 100])
def test_contexts(formats, past, rng, taken):
    check(one(rng, formats, past), taken)


@pytest.mark.parametrize(
    ("heads", "seqlen"),
    [(1, 1), (4, 1), pytest.param(3, 2, marks=slow), (8, 1), pytest.param(9, 1, marks=slow), (3, 4), (16, 1)],
)
def test_rows(heads, seqlen, rng, taken):
    check(one(rng, heads=heads, seqlen=seqlen), taken)
    assert {form.rows for form in taken} == {8 if heads * seqlen <= 8 else 16}


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(32, 32), (48, 80), (64, 16), (128, 128), pytest.param(256, 192, marks=slow)]
)
def test_head_sizes(dim, value_dim, rng, taken):
    check(one(rng, dim=dim, value_dim=value_dim, past=40), taken)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("warps", [1, pytest.param(4, marks=slow)])
def test_any_ring(stages, warps, rng, taken, monkeypatch):
    """Tiles, also more of them than a context has, are asked for in time and not overwritten too early."""
    monkeypatch.setattr(decode_forms, "WARPS", warps)
    monkeypatch.setattr(decode_forms, "STAGES", stages)
    for past in (20, 130):
        check(one(rng, past=past), taken)
    assert {(form.stages, form.warps) for form in taken} == {(stages, warps)}


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False, "seqlen": 2},
        {"window": (37, -1)},
        {"window": (3, 2), "is_causal": False, "seqlen": 3},
        {"softcap": 5.0},
        {"is_alibi": True, "seqlen": 2},
        {"softmax_scale": -0.3},
        {"past": -2, "seqlen": 4},
        pytest.param({"heads": 3, "kv_heads": 3, "seqlen": 2, "batch": 2}, marks=slow),
    ],
    ids=str,
)
def test_options(options, rng, taken):
    check(one(rng, **options), taken)


@pytest.mark.parametrize("dtype", [pytest.param(np.float16, marks=slow), np.float32, bool])
def test_masks(dtype, rng, taken):
    call = one(rng, past=38, seqlen=2)
    call.inputs["attn_mask"] = attention_scenes.mask_rows(rng, (1, 2, 2, 43), dtype)
    check(call, taken)


def test_a_mask_of_packed_sequences(rng, taken):
    call = attention_scenes.dynamic(
        rng, BF16, [(3, 2), (0, 1), (9, 0), (40, 1)], heads=2, kv_heads=1, dim=16, is_alibi=True
    )
    call.inputs["attn_mask"] = attention_scenes.mask_rows(rng, (2, 4, 56), DTYPES["bfloat16"])
    check(call, taken)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=slow)])
def test_sinks(dtype, rng, taken):
    check(one(rng, sinks=normal(rng, 2, dtype)), taken)


@pytest.mark.parametrize(
    ("formats", "page_size", "dim"),
    [
        (FP16, 5, 32),
        pytest.param(BF16, 0, 32, marks=slow),
        (Formats("fp16", "int8", "fp16", 8, 8), 7, 128),
        pytest.param(Formats("fp16", "int8", "fp32", 8, 8), 0, 128, marks=slow),
        pytest.param(Formats("fp16", "int8", "fp32", 8, 32), 0, 32, marks=slow),
        pytest.param(Formats("bf16", "int8", "bf16", 8, 16), 0, 32, marks=slow),
        pytest.param(Formats("fp16", "int8", "bf16", 4, 16), 3, 128, marks=slow),
        pytest.param(Formats("bf16", "uint8", "fp16", 4, 8), 6, 128, marks=slow),
        pytest.param(Formats("bf16", "uint8", "fp32", 4, 8), 6, 128, marks=slow),
    ],
    ids=str,
)
def test_caches(formats, page_size, dim, rng, taken):
    """Heads of 128 have runs of keys and of values, pieces of several chunks, and of one."""
    lengths = [(50, 1), (3, 4), (0, 2), (0, 0), (4, 0)]
    layout, mode = page_size % 4, int(page_size > 0)
    call = attention_scenes.dynamic_cache(
        rng, formats, lengths, 2, 1, dim, layout=layout, mode=mode, page_size=max(page_size, 1), decoding=1
    )
    check(call, taken)


@slow
@pytest.mark.parametrize("layout", [0, 1])
def test_static_caches(layout, rng, taken):
    formats = (FP16, Formats("fp16", "int8", "fp16", 8, 16))[layout]
    check(attention_scenes.static_cache(rng, formats, 40, 1, 2, 4, 2, 32, layout), taken)


@pytest.mark.parametrize("options", [{}, {"window": (30, -1)}], ids=str)
def test_split_contexts(options, rng, taken, monkeypatch):
    """Parts that are merged; some rows see nothing of some parts, and one part is not finite."""
    monkeypatch.setattr(tables, "LEAST_PART", 20)
    call = one(rng, past=58, seqlen=4, sinks=normal(rng, 2, np.float32), **options)
    call["value"][0, 60, 0, 3] = np.inf
    output = check(call, taken)
    assert np.isposinf(output[0, 2:, :, 3]).all()
    assert np.isfinite(output[0, :2]).all()


def test_hidden_values_are_absent(rng, taken):
    """NaN and infinite values reach the rows that see them, and no others."""
    call = one(rng, past=20, seqlen=4)
    call["value"][0, 21, 0, 5] = np.nan
    call["value"][0, 23, 0, 6] = np.inf
    output = check(call, taken)
    assert np.isfinite(output[0, :1]).all()
    assert np.isnan(output[0, 1:, :, 5]).all()
    assert np.isposinf(output[0, 3:, :, 6]).all()


def test_sums_that_overflow(rng, taken):
    """Those of a warp, and those of all warps together."""
    for past in (30, 90):
        call = one(rng, BF16, past=past, softmax_scale=0.01)
        call["value"][:] = np.float32(3e38 if past == 30 else 1e37)
        output = check(call, taken, usual=False)
        assert np.isfinite(output.astype(np.float32)).all()


@elements
def test_results_are_the_same_bits_for_any_company(element, rng, taken):
    """A sequence beside others, and at another place of a page table, has the bits that it has alone."""
    formats = {"float16": FP16, "bfloat16": BF16}[element]
    call = attention_scenes.dynamic(rng, formats, [(40, 1), (9, 2)], heads=4, kv_heads=1, dim=32)
    alone = call.but(
        query=call["query"][1:], key=call["key"][41:], value=call["value"][41:],
        seqstarts=call["seqstarts"][1:] - 1, kvstarts=call["kvstarts"][1:] - 41,
    )  # fmt: skip
    assert_same(call.run()[1:], alone.run())
    assert taken
    assert call["query"].dtype == DTYPES[element]


def test_which_calls_are_taken():
    """16-bit data in the cache, whole fragments, aligned rows, few of them."""
    record = AttentionParams()
    context = SimpleNamespace(packed="float16", stored="float16", cell=None, group=0, dim=64, value_dim=32)

    codes = {"stored": "int8", "cell": "float16", "group": 16}

    def suits(rows=4, reach=(99, 99), at=None, **changes):
        changed = SimpleNamespace(**vars(context) | changes)
        return decode.suits(record._replace(**at or {}), changed, Reach(*reach), rows)

    assert suits()
    assert suits(rows=16)
    assert suits(rows=8, dim=256)
    assert suits(reach=(LONGEST - 1, LONGEST - 1))
    assert suits(**codes, at={"scale_row": 4})
    assert suits(**codes | {"stored": "int4"})
    for refused in (
        {"rows": 17}, {"rows": 9, "value_dim": 144}, {"reach": (LONGEST, 99)}, {"reach": (99, LONGEST)},
        {"dim": 24}, {"dim": 272},
        {"packed": "float32", "stored": "float32"}, {"stored": "bfloat16"}, {"value_dim": 8},
        {"at": {"query": 2}}, {"at": {"values": 8}}, {"at": {"key_row": 8}}, {"at": {"out_token": 4}},
        codes | {"group": 4}, codes | {"at": {"key_row": 8}}, codes | {"at": {"scale_row": 2}},
        codes | {"stored": "int4", "value_dim": 16}, codes | {"group": 32},
    ):  # fmt: skip
        assert not suits(**refused), refused
