"""The scalar numerics over all 16-bit patterns and all bytes, and the proof behind the vector quotients."""

import numba
import numpy as np
import pytest
from patterns import PATTERNS, float32_patterns, mapped
from scenes import DTYPES, FLOATS

import kvkit
from kvkit.formats import BY_NAME
from kvkit.formulas import numeric

NARROW = {"fp16": ("float16", numeric.half_to_float, numeric.float_to_half),
          "bf16": ("bfloat16", numeric.bfloat16_to_float, numeric.float_to_bfloat16)}  # fmt: skip
narrow_formats = pytest.mark.parametrize("t1", NARROW)
SIGNIFICANDS = {"fp16": 1024, "bf16": 128}


def rounded_by(name):
    return mapped(numeric.rounding(name), np.float32)


def cast(values, dtype):
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def assert_same_floats(got, expected):
    """Check that floats have equal bits; a NaN may have any payload."""
    bits = {2: np.uint16, 4: np.uint32}[got.itemsize]
    nan = np.isnan(cast(expected, np.float32))
    assert (np.isnan(cast(got, np.float32)) == nan).all()
    assert (got.view(bits)[~nan] == expected.view(bits)[~nan]).all()


@narrow_formats
def test_widening_every_pattern(t1):
    _, widen, _ = NARROW[t1]
    assert_same_floats(mapped(widen, np.float32)(PATTERNS), cast(PATTERNS.view(DTYPES[t1]), np.float32))


def test_widening_bfloat16_keeps_the_bits_of_nans():
    wide = mapped(numeric.bfloat16_to_float, np.float32)(PATTERNS)
    assert (wide.view(np.uint32) == PATTERNS.astype(np.uint32) << 16).all()


@narrow_formats
def test_every_pattern_survives_widening_and_narrowing(t1):
    _, widen, narrow = NARROW[t1]
    back = mapped(narrow, np.uint16)(mapped(widen, np.float32)(PATTERNS))
    assert_same_floats(back.view(DTYPES[t1]), PATTERNS.view(DTYPES[t1]))


@narrow_formats
def test_narrowing(t1):
    x = float32_patterns(DTYPES[t1])
    assert len(x) > 500_000
    got = mapped(NARROW[t1][2], np.uint16)(x).view(DTYPES[t1])
    assert_same_floats(got, cast(x, DTYPES[t1]))


@pytest.mark.parametrize("t1", FLOATS)
def test_round_to(t1):
    x = float32_patterns(DTYPES["fp16" if t1 == "fp32" else t1])
    got = rounded_by(DTYPES[t1].name)(x)
    assert_same_floats(got, cast(cast(x, DTYPES[t1]), np.float32))


@pytest.mark.parametrize("t1", FLOATS)
def test_smallest_scale(t1):
    bits = {"fp32": 0x3727C5AC, "fp16": 0x00A8, "bf16": 0x3728}[t1]
    smallest = np.array(BY_NAME[DTYPES[t1].name].smallest_scale, np.float32).astype(DTYPES[t1])
    assert int(smallest.view(np.uint32 if t1 == "fp32" else np.uint16)) == bits


# Nibbles

BYTES = np.arange(256, dtype=np.uint8).view(np.int8)


def nibbles(data):
    """Return nibbles, low then high, as two's complement."""
    unsigned = np.stack([data.view(np.uint8) & 15, data.view(np.uint8) >> 4], axis=-1).astype(np.int8)
    return np.where(unsigned > 7, unsigned - 16, unsigned).reshape(*data.shape[:-1], -1)


def test_every_byte_has_its_nibbles():
    low, high = (mapped(f, np.int8)(BYTES) for f in (numeric.low_nibble, numeric.high_nibble))
    assert (np.stack([low, high], axis=-1).reshape(-1) == nibbles(BYTES)).all()


def test_every_byte_is_packed_from_its_nibbles():
    @numba.njit
    def loop(data, results):
        for i in range(len(data)):
            low, high = numeric.low_nibble(data[i]), numeric.high_nibble(data[i])
            results[i] = numeric.pack_nibbles(low, high)

    back = np.zeros_like(BYTES)
    loop(BYTES, back)
    assert (back == BYTES).all()


@pytest.mark.parametrize("dim", [6, 512], ids=["plain", "vectors"])
def test_every_int4_byte_is_loaded(dim):
    data = np.resize(BYTES, (-(-256 // (dim // 2)), dim // 2))
    rows = len(data)
    cache = np.stack([data, data[::-1]])[None, :, :, None].copy()
    scale = np.ones((1, 2, rows, 1, dim // 2), np.float16)
    nothing = np.zeros((1, 0, 1, dim), np.float32)
    # One sequence of `rows` past tokens in layout 0 of the static cache, (MaxB, L, 2, MaxS, H, Dh/2).
    key, value = kvkit.key_value_cache(nothing, nothing, rows, cache[:, None], scale[:, None],
                                       quant_bit=4, quant_group=2)  # fmt: skip
    assert (key[0, :, 0] == nibbles(data)).all()
    assert (value[0, :, 0] == nibbles(data[::-1])).all()


@pytest.mark.parametrize("dim", [8, 24, 40, 512])
def test_every_int4_byte_of_legal_codes_is_stored(dim):
    """A 7 in each group makes its scale 1, so that codes come from themselves."""
    pairs = BYTES[(nibbles(BYTES).reshape(-1, 2) > -8).all(axis=1)]
    assert len(pairs) == 15 * 15
    groups = np.column_stack([np.full(75, 0x77, np.uint8).view(np.int8), pairs.reshape(75, 3)])
    data = np.resize(groups, (-(-75 // (dim // 8)), dim // 2))
    rows = len(data)
    tokens = nibbles(data).astype(np.float32)[None, :, None]
    cache = np.zeros((1, 1, 2, rows, 1, dim // 2), np.int8)
    scale = np.zeros((1, 1, 2, rows, 1, dim // 8), np.float16)
    kvkit.key_value_cache(tokens, -tokens, 0, cache, scale, quant_bit=4, quant_group=8)
    assert (scale == 1).all()
    assert (cache[0, 0, 0, :, 0] == data).all()
    assert (nibbles(cache[0, 0, 1, :, 0]) == -nibbles(data)).all()


# Quotients: kvkit/cpu/simd/panels.py multiplies 16-bit floats by a rounded reciprocal


@narrow_formats
def test_products_with_reciprocals_round_like_quotients(t1):
    """For every pair of significands, hence, by powers of two, for all normal numbers."""
    count = SIGNIFICANDS[t1]
    x = np.arange(count, 2 * count, dtype=np.float32)
    for s in x:
        inverse = np.float32(1) / s
        assert inverse.dtype == np.float32
        exact = (x.astype(np.float64) / np.float64(s)).astype(np.float32)
        assert (exact == x / s).all()
        rounded = (x / s).astype(DTYPES[t1])
        ratio = x * inverse
        assert (ratio.astype(DTYPES[t1]) == rounded).all()
        half = np.uint32(2**22 // count)
        nearest = (ratio.view(np.uint32) + half) & ~(2 * half - np.uint32(1))
        assert (nearest.view(np.float32) == rounded.astype(np.float32)).all()


@narrow_formats
@pytest.mark.parametrize("qmax", [127, 7])
def test_scales_from_products_are_those_from_quotients(t1, qmax):
    """Of every finite maximum; subnormal scales are below the smallest one."""
    dtype = DTYPES[t1]
    x = cast(PATTERNS[: 2**15].view(dtype), np.float32)
    x = x[np.isfinite(x)]
    smallest = np.float32(BY_NAME[dtype.name].smallest_scale)
    product, quotient = (
        np.maximum(cast(scale, dtype).astype(np.float32), smallest)
        for scale in (x * np.float32(1 / qmax), x / np.float32(qmax))
    )
    assert (product == quotient).all()
