"""Formats that operators store, by every way to their bytes, against `kvkit.formats`.

Scalar formulas and rows of vector and plain machine code are the CPU's; operators are run by every backend.
"""

import functools

import backends
import ml_dtypes
import numba
import numpy as np
import pytest
from patterns import float32_patterns, mapped

from kvkit import KvkitError, formats
from kvkit.cpu.copy.rows import call_rows, rows
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.reference.attention import attend_sequence

slow = pytest.mark.slow
MINIFLOATS = ("e4m3", "e5m2")
forms = pytest.mark.parametrize("plain", [False, True], ids=["vector", "plain"])

# Formulas and rows


@functools.cache
def caller():
    return numba.njit(lambda code, a: call_rows(code, *a))


def move(direction, packed, cache, cells=None, plain=False, *, stored, cell=None, group=0):
    """Encode or decode one row [dim] to or from a row of bytes."""
    code = rows(direction, packed.dtype.name, stored, cell, group, 0, False, plain)
    at = 0 if cells is None else cells.ctypes.data
    given = packed.ctypes.data, 0, 0, cache.ctypes.data, 0, 0, at, 0, 0, 1, 1, 1, packed.size
    caller()(code.address, tuple(map(np.int64, given)))


@pytest.mark.cpu
@pytest.mark.parametrize("name", MINIFLOATS)
def test_formulas(name):
    codes = np.arange(256, dtype=np.uint8)
    widened = mapped(numeric.widening(name), np.float32)(codes)
    np.testing.assert_array_equal(widened, BY_NAME[name].table)
    x = float32_patterns(np.float16)[::7]
    np.testing.assert_array_equal(
        mapped(numeric.narrowing(name), np.uint8)(x), formats.encode(x, name)["codes"]
    )


@pytest.mark.cpu
@forms
@pytest.mark.parametrize("name", MINIFLOATS)
def test_every_byte_and_many_numbers(name, plain):
    codes, x = np.arange(256, dtype=np.uint8), np.empty(256, np.float32)
    move("load", x, codes, stored=name, plain=plain)
    np.testing.assert_array_equal(x, BY_NAME[name].table)
    x = np.concatenate((x, float32_patterns(np.float16)[::29]))
    back = np.zeros(x.size, np.uint8)
    move("store", x, back, stored=name, plain=plain)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(back[numbers], formats.encode(x, name)["codes"][numbers])
    assert (back[~numbers] & 0x7F == 0x7F).all()


@pytest.mark.cpu
@forms
@pytest.mark.parametrize(
    ("cell", "group"),
    [
        pytest.param("float32", 0, marks=slow),
        ("float32", 32),
        ("float32", 20),
        pytest.param("float16", 64, marks=slow),
    ],
)
def test_scales(rng, cell, group, plain):
    x = (rng.standard_normal(320) * np.repeat([100, 1, 0.01, 0], 80)).astype(np.float32)
    codes, cells = np.zeros(320, np.uint8), np.full(320 // group if group else 1, 0.25, cell)
    how = {"cells": cells, "stored": "e4m3", "cell": cell, "group": group, "plain": plain}
    move("store", x, codes, **how)
    expected = formats.encode(x, "e4m3", scale="group" if group else 0.25, group=group or 320)
    np.testing.assert_array_equal(cells, np.asarray(expected["scale"]).astype(cell))
    again = formats.encode(x, "e4m3", scale=cells.astype(np.float32))
    np.testing.assert_array_equal(codes, again["codes"])
    y = np.empty_like(x)
    move("load", y, codes, **how)
    np.testing.assert_array_equal(y, formats.decode({"codes": codes, "scale": cells}, "e4m3"))


@pytest.mark.cpu
@forms
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(ml_dtypes.bfloat16, marks=slow)])
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


# Operators

B, H, HEADS, D, ROOM = 2, 2, 4, 64, 40
# (quant_format, what shares a scale: None, "tensor" or "head" if given, elements of a group if found)
CASES = [("e4m3", "head"), ("e4m3", 64), ("q8_0", None), ("q4_0", None)]
MORE = [("e4m3", None), ("e4m3", "tensor"), ("e4m3", 32), ("e5m2", None), ("e5m2", "head")]
cases = pytest.mark.parametrize(
    ("name", "shared"), [*CASES, *(pytest.param(*case, marks=slow) for case in MORE)]
)
SIZES = {"num_heads": HEADS, "num_kv_heads": H, "head_dim": D}


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


def empty(name, shared, rng):
    """Return (cache, scale, attributes) of a static cache of one layer whose rows begin at odd addresses."""
    shape = B, 1, 2, ROOM, H, BY_NAME[name].bytes(D)
    cache, how = np.zeros(np.prod(shape) + 1, np.uint8)[1:].reshape(shape), {"quant_format": name}
    if isinstance(shared, int):
        return cache, np.zeros((*shape[:-1], D // shared), np.float32), how | {"quant_group": shared}
    if shared is None:
        return cache, None, how
    return cache, rng.uniform(0.2, 2, (2, H) if shared == "head" else 2).astype(np.float32), how


def encoded(x, side, name, shared, scale):
    """Return (codes, numbers) of tokens [.., H, D] of one side."""
    given = {None: None}.get(shared, "group") if not isinstance(shared, str) else scale[side]
    arrays = formats.encode(x, name, scale=given, **({"group": shared} if isinstance(shared, int) else {}))
    return arrays["codes"], formats.decode(arrays, name)


def on_device(*arrays):
    """Return the arrays on the backend's device, or unchanged."""
    if backends.name == "cpu":
        return arrays
    from device_arrays import Array

    return tuple(array if array is None else Array(array) for array in arrays)


def contents(array):
    return np.asarray(getattr(array, "array", getattr(array, "_ary", array)))


@cases
def test_what_is_stored_and_returned(rng, backend, name, shared):
    cache, scale, how = empty(name, shared, rng)
    tokens = 7 if backends.name == "cpu" else 2
    new = normal(rng, B, tokens, H, D), normal(rng, B, tokens, H, D)
    new[0][0, 0, 0, :5] = 0, -60000, 1e-7, 3, -2
    if name in MINIFLOATS and not isinstance(shared, int):  # what is too large saturates
        new[1][0, 0, 0, :2] = np.inf, np.nan
    returned = backend.key_value_cache(*new, 3, *on_device(cache, scale), **how)
    for side in (0, 1):
        codes, numbers = encoded(new[side], side, name, shared, scale)
        np.testing.assert_array_equal(cache[:, 0, side, 3 : 3 + tokens], codes)
        with np.errstate(over="ignore"):
            wanted = numbers.astype(np.float16)
        got = contents(returned[side])[:, 3:]
        np.testing.assert_array_equal(got, wanted)
        assert (np.signbit(got) == np.signbit(wanted))[~np.isnan(wanted)].all()
    assert not cache[:, :, :, 3 + tokens :].any()


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_what_is_not_finite_stays_in_its_block(rng, backend, name):
    """An infinity makes the scale of its block infinite; NaN is stored as some number."""
    for bad in (np.nan, np.inf):
        x = normal(rng, 1, 1, H, D)
        expected = formats.encode(x, name)["codes"]
        x[..., 3] = bad
        cache = np.zeros((1, 1, 2, 1, H, BY_NAME[name].bytes(D)), np.uint8)
        backend.key_value_cache(x, x, 0, cache, None, quant_format=name)
        own, other = np.split(cache[:, 0, 0], 2, -1)
        np.testing.assert_array_equal(other, np.split(expected, 2, -1)[1])
        assert np.isfinite(own[..., :2].view(np.float16)).all() == np.isnan(bad)
        if name == "q8_0" and np.isnan(bad):
            assert not own[..., 2 + 3].any()


@cases
@pytest.mark.parametrize("tokens", [1, pytest.param(20, marks=pytest.mark.cpu)])
def test_attention(rng, backend, name, shared, tokens):
    """Over codes x scale in float32: of one query token in place, of many over what is widened."""
    cache, scale, how = empty(name, shared, rng)
    length = 17 if backends.name == "cpu" else 3
    past = normal(rng, B, length, H, D), normal(rng, B, length, H, D)
    new = normal(rng, B, tokens, H, D), normal(rng, B, tokens, H, D)
    backend.key_value_cache(*past, 0, cache, scale, **how)
    query = normal(rng, B, tokens, HEADS, D)
    arrays = on_device(cache, scale)
    got = contents(backend.multi_head_cache_attention(query, *new, length, *arrays, **SIZES, **how))
    for b in range(B):
        whole = (np.concatenate((past[side][b], new[side][b])) for side in (0, 1))
        keys, values = (encoded(x, side, name, shared, scale)[1] for side, x in enumerate(whole))
        expected, _ = attend_sequence(query[b], keys, values)
        size = np.maximum(1, np.abs(expected))
        assert (np.abs(got[b] - expected) <= 2e-3 * size).all()


def test_a_plan_of_pages_repeats(rng, backend):
    """The same numbers through a page table, made again for the next layer, whose scales are its own."""
    caches = np.zeros((2, 16, 1, 2, H, D), np.uint8)
    table, starts = np.array([[4, 12, 0, 8]]), np.array([0, 9])
    step = backend.dynamic_batching.plan(starts, starts, table, np.array([0]), cache_mode=1, page_size=4)
    new = normal(rng, 9, H, D), normal(rng, 9, H, D)
    for cache in caches:
        scale = rng.uniform(0.5, 2, (2, H)).astype(np.float32)
        for _ in range(2):
            given = on_device(*new, cache, scale)
            returned = step.key_value_cache(*given, quant_format="e4m3")
        for side in (0, 1):
            codes, numbers = encoded(new[side], side, "e4m3", "head", scale)
            np.testing.assert_array_equal(contents(returned[side]), numbers.astype(np.float16))
            np.testing.assert_array_equal(cache[[4, 5, 6, 7, 12, 13, 14, 15, 0], 0, side], codes)


@pytest.mark.cpu
def test_scales_that_change_between_runs(rng, backend):
    """A prepared call reads the scales of its time, wherever they lie then."""
    starts, zero = np.array([0, 5]), np.array([0])
    step = backend.dynamic_batching.plan(starts, starts, np.array([0]), zero)
    new, query = [normal(rng, 5, H, D) for _ in "kv"], normal(rng, 5, HEADS, D)
    scales = [rng.uniform(0.5, 2, (2, H)).astype(np.float32) for _ in range(2)]
    for scale in (*scales, scales[1]):
        cache = np.zeros((5, 1, 2, H, D), np.uint8)
        got = step.multi_head_cache_attention(query, *new, cache, scale, **SIZES, quant_format="e4m3")
        keys, values = (encoded(x, side, "e4m3", "head", scale)[1] for side, x in enumerate(new))
        assert np.abs(got - attend_sequence(query, keys, values)[0]).max() < 4e-3
        scale *= np.float32(0.7)


BLOCKS = {"quant_format": "q8_0", "cache": np.zeros((B, 1, 2, ROOM, H, 68), np.uint8)}
CODES = dict.fromkeys(("current_key", "current_value"), np.zeros((B, 1, H, D), np.int8))
REFUSED = {
    "unknown": ({"quant_format": "fp8"}, "quant_format: expected one of e4m3, e5m2, q8_0, q4_0, or None"),
    "both": ({"quant_bit": 8}, "quant_bit: expected 0, for quant_format 'e4m3', got 8"),
    "dtype": ({"cache": np.zeros((B, 1, 2, ROOM, H, D), np.int8)}, "cache: expected dtype uint8 or float8"),
    "NaN": ({"scale": np.array([1, np.nan], np.float32)}, "scale: expected finite numbers above 0, got NaN"),
    "zero": ({"scale": np.zeros((2, H), np.float32)}, "scale: expected finite numbers above 0, got 0.0"),
    "inside": (BLOCKS | {"scale": np.ones(2, np.float32)}, "scale: expected None"),
    "int8 keys": (CODES, "current_key: expected dtype float32"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what, rng, backend):
    cache, scale, _ = empty("e4m3", "head", rng)
    changes, message = REFUSED[what]
    given = {name: np.zeros((B, 1, H, D), np.float32) for name in ("current_key", "current_value")}
    given |= {"start_pos": 0, "cache": cache, "scale": scale, "quant_format": "e4m3"} | changes
    with pytest.raises(KvkitError, match=message):
        backend.key_value_cache(**given)
