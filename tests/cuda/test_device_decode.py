"""Decode through tensor cores: tiles that a warp copies and multiplies, and the kernel against the oracle.

In the CUDA simulator, on the machine that runs PTX, or on a device.
"""

import attention_scenes
import numpy as np
import pytest
from attention_scenes import BF16, FP16
from numba import cuda, types
from scenes import assert_same
from tensor_cores import DTYPES, U32, check, elements, forms_taken, run, slow, static, word

from kvkit.formats import BY_NAME
from kvkit.runtime.jit import shared
from kvkit.tools.vectors.draws import normal
from kvkit_cuda.attention import decode, decode_forms, stored_tiles, tile_words
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


@pytest.mark.parametrize("stored", ["e4m3", "e5m2"])
def test_floats_of_8_bits_by_shifts(stored):
    """All of them, NaN and infinity too, as an instruction of later devices has them."""
    codes = np.arange(256, dtype=np.uint8)
    words = codes.view(np.uint16).astype(np.uint32).reshape(4, 32).T.copy()
    widened = ptx.widened(stored, native=False)

    def kernel(words):
        for i in range(4):
            words[cuda.threadIdx.x, i] = widened(words[cuda.threadIdx.x, i])

    (got,) = run(kernel, U32, arrays=(words,))
    numbers = np.ascontiguousarray(got.T).reshape(-1).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(numbers, BY_NAME[stored].table)


def test_groups_of_copies():
    """A thread has what it has waited for, by 16 bytes or 4; the simulator spoils the rest."""
    given = np.arange(1, 32 * 16 + 1, dtype=np.uint32).reshape(32, 16)
    block, copy, copy_word = memory.shared(32 * 64), ptx.copy, ptx.copy_word
    together, all_but_one, arrived, load = (
        ptx.end_group, ptx.all_but(1), ptx.arrived, memory.load(4, 4, space=3),
    )  # fmt: skip

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


TILES = [("int8", 8, 64, 4), ("int8", 24, 96, 8), ("int4", 16, 96, 4), ("int4", 8, 128, 8)]


@pytest.mark.parametrize(
    ("stored", "group", "dim", "panel", "cell", "element"),
    [  # each cell and each tile with one element, with the other one in the slow suite
        pytest.param(*tile, cell, element, marks=[slow] * ((i + j + k) % 2))
        for i, tile in enumerate(TILES)
        for j, cell in enumerate(("float32", "float16", "bfloat16"))
        for k, element in enumerate(DTYPES)
    ],
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
    panels, first, pace, mask = tile.panels, tile.thread_step, tile.panel_step, tile_words.code_mask(tile)

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
    """Return a list that gets the forms of kernels in use; blocks have two warps."""
    monkeypatch.setattr(decode_forms, "WARPS", 2)
    return forms_taken(decode, monkeypatch)


def one(rng, formats=FP16, past=70, seqlen=1, **options):
    return static(rng, formats, past, seqlen, **options)


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
