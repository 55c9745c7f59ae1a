"""Prefill through tensor cores: fragments against plain matrices, and the kernel against the oracle.

In the CUDA simulator, on the machine that runs PTX, or on a device.
"""

from dataclasses import replace

import attention_scenes
import numpy as np
import pytest
from attention_scenes import FP16
from numba import cuda, types
from tensor_cores import DTYPES, F32, U32, check, elements, forms_taken, run, slow, static, word

from kvkit.tools.vectors.draws import normal
from kvkit_cuda.attention import prefill, tiles
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


@pytest.mark.parametrize(
    ("strips", "tokens", "stage"),
    [(1, 16, 1), pytest.param(1, 32, 2, marks=slow), (2, 16, 2)],
)
def test_any_tile(strips, tokens, stage, rng, taken, monkeypatch):
    """A stage has any tiles; the last one is not full."""
    made, sizes = prefill.form_of, {"strips": strips, "tokens": tokens, "tiles": stage}
    monkeypatch.setattr(prefill, "form_of", lambda *call: replace(made(*call), **sizes))
    check(static(rng, heads=4, past=61), taken)


def test_a_block_has_no_more_warps_than_rows_need():
    form = prefill.form("float16", "float16", None, 64, 64, False)
    assert [prefill.warps_of(form, rows) for rows in (9, 32, 33, 100, 1000)] == [1, 1, 2, 4, 8]


@pytest.fixture
def fresh_kernels(forget=prefill.compiled.cache_clear):
    """Compile kernels again: in the simulator their shared memory depends on the block."""
    forget()
    yield
    forget()


@pytest.mark.usefixtures("fresh_kernels")
@pytest.mark.parametrize("warps", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
def test_warps(warps, rng, taken, monkeypatch):
    """A block has as many warps as there are strips of rows, and no more than it may."""
    monkeypatch.setattr(prefill, "WARPS", warps)
    call = attention_scenes.dynamic(rng, FP16, [(0, 36), (3, 0), (5, 3)], heads=2, kv_heads=1, dim=16)
    check(call, taken)
