"""Rows of floats of 8 bits and of ggml's blocks: vector and plain machine code against `kvkit.formats`."""

import ml_dtypes
import numpy as np
import pytest
from patterns import float32_patterns, mapped

from kvkit import formats
from kvkit.cpu.copy.rows import call_rows, rows
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric

MINIFLOATS = ("e4m3", "e5m2")
forms = pytest.mark.parametrize("plain", [False, True], ids=["vector", "plain"])


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CALL = {}


def call(code, *arguments):
    """Call machine code of rows, which takes addresses and strides."""
    import numba

    if not CALL:
        CALL["rows"] = numba.njit(lambda code, a: call_rows(code, *a))
    CALL["rows"](code.address, tuple(np.int64(x) for x in arguments))


def move(direction, packed, cache, scale=None, cells=None, plain=False, **how):
    """One row of an array [dim] and a row of bytes."""
    stored, name = how.pop("stored"), how.get("cell")
    code = rows(direction, packed.dtype.name, stored, name, how.get("group", 0), 0, False, plain)
    at = 0 if cells is None else cells.ctypes.data
    call(code, packed.ctypes.data, 0, 0, cache.ctypes.data, 0, 0, at, 0, 0, 1, 1, 1, packed.size)


def nan_bits(x):
    return np.where(np.isnan(x), np.float32(np.nan), x)


@pytest.mark.parametrize("name", MINIFLOATS)
def test_formulas(name):
    codes = np.arange(256, dtype=np.uint8)
    widened = mapped(numeric.widening(name), np.float32)(codes)
    np.testing.assert_array_equal(widened, BY_NAME[name].table)
    x = float32_patterns(np.float16)[::7]
    np.testing.assert_array_equal(
        mapped(numeric.narrowing(name), np.uint8)(x), formats.encode(x, name)["codes"]
    )


@forms
@pytest.mark.parametrize("name", ["e4m3", slow("e5m2")])
def test_every_byte(name, plain):
    codes, x = np.arange(256, dtype=np.uint8), np.empty(256, np.float32)
    move("load", x, codes, stored=name, plain=plain)
    np.testing.assert_array_equal(x, BY_NAME[name].table)
    back = np.zeros(256, np.uint8)
    move("store", x, back, stored=name, plain=plain)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(back[numbers], formats.encode(x, name)["codes"][numbers])
    assert (back[~numbers] & 0x7F == 0x7F).all()


@forms
@pytest.mark.parametrize("name", ["e5m2", slow("e4m3")])
def test_stores_of_many_numbers(name, plain):
    x = np.ascontiguousarray(float32_patterns(np.float16)[::29])
    codes = np.zeros(x.size, np.uint8)
    move("store", x, codes, stored=name, plain=plain)
    np.testing.assert_array_equal(codes, formats.encode(x, name)["codes"])


@forms
@pytest.mark.parametrize(("cell", "group"), [slow("float32", 0), ("float32", 32), slow("float16", 64)])
def test_scales(rng, cell, group, plain):
    x = (rng.standard_normal(128) * np.repeat([100, 1, 0.01, 0], 32)).astype(np.float32)
    codes, cells = np.zeros(128, np.uint8), np.full(128 // group if group else 1, 0.25, cell)
    move("store", x, codes, cells=cells, stored="e4m3", cell=cell, group=group, plain=plain)
    expected = formats.encode(x, "e4m3", scale="group" if group else 0.25, group=group or 128)
    np.testing.assert_array_equal(cells, np.asarray(expected["scale"]).astype(cell))
    again = formats.encode(x, "e4m3", scale=cells.astype(np.float32))
    np.testing.assert_array_equal(codes, again["codes"])
    y = np.empty_like(x)
    move("load", y, codes, cells=cells, stored="e4m3", cell=cell, group=group, plain=plain)
    np.testing.assert_array_equal(y, formats.decode({"codes": codes, "scale": cells}, "e4m3"))


@forms
@pytest.mark.parametrize("dtype", [np.float32, slow(ml_dtypes.bfloat16)])
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks(rng, name, dtype, plain):
    x = rng.standard_normal((24, 64)) * np.exp(3 * rng.standard_normal((24, 1)))
    x[0], x[1], x[2, :32], x[3] = 0, -3, np.arange(32) - 15.5, np.arange(64) % 2 * 16 - 8
    x = np.ascontiguousarray(x.astype(dtype).reshape(-1))
    cache = np.zeros(BY_NAME[name].bytes(x.size), np.uint8)
    move("store", x, cache, stored=name, plain=plain)
    np.testing.assert_array_equal(cache, formats.encode(x, name)["codes"])
    y = np.empty_like(x)
    move("load", y, cache, stored=name, plain=plain)
    np.testing.assert_array_equal(y, formats.decode(cache, name).astype(dtype))
