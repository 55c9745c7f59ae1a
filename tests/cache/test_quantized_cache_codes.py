"""Codes of the quantized layer, bit for bit: vectors of the specification, loops, both forms of kernels."""

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import pytest
import quantized_cache_reference as reference
from hypothesis import given
from hypothesis import strategies as st
from quantized_cache_scenes import OPTIONS, PMX, coded, states
from scenes import first_quick

from kvkit.cache import QuantizedCache
from kvkit.cache.layers.quant_spec import QuantSpec
from kvkit.cache.layers.quantized import QuantizedLayer
from kvkit.cache.stores.codes import CodedSide
from kvkit.cpu.copy import codes
from kvkit.cpu.launches import address, start
from kvkit.formats import BY_DTYPE

CASES = {  # dtype, spec, head size: whole panels of 16 and not, groups smaller and larger than a panel
    "float32 4 bits asym channel": ("float32", QuantSpec("uint4:g4:channel"), 34),
    "float16 2 bits asym token": ("float16", QuantSpec("uint2:g32"), 64),
    "float32 8 bits sym token": ("float32", QuantSpec("int8:g8"), 40),
    "float16 4 bits sym token": ("float16", QuantSpec("int4:g16:float32"), 48),
    "bfloat16 2 bits sym channel": ("bfloat16", QuantSpec("int2:g5:channel"), 20),
    "bfloat16 8 bits asym token": ("bfloat16", QuantSpec("uint8:g2:float32"), 18),
    "float16 8 bits asym channel": ("float16", QuantSpec("uint8:g1:channel:float32"), 16),
    "float32 2 bits asym token of 3": ("float32", QuantSpec("uint2:g3:float32"), 12),
}


def numbers(rng, shape, dtype):
    """Return random numbers with ties, zeros, constant groups and outliers."""
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3, (*shape[:-1], 1))
    kinds = rng.integers(0, 6, shape[:-1])
    x[kinds == 0] = np.rint(2 * x[kinds == 0]) / 2
    x[kinds == 1] = 0
    x[kinds == 3] = abs(x[kinds == 3])
    x[(rng.random(shape) < 0.1)] *= -0.0
    x[kinds == 2] = x[kinds == 2][:, :1]
    x[rng.random(shape) < 0.02] *= 50
    return x.astype(dtype)


def layer_of(spec, **options):
    return QuantizedLayer(key=spec, value=spec, **{"residual_length": 0, "sink": 0, **options})


def coded_row(spec, row, dtype=np.float32):
    layer = layer_of(spec)
    x = np.array(row, dtype).reshape(1, 1, 1, -1)
    layer.update(x, x)
    found, cells = coded(layer)
    return found.ravel(), cells.ravel(), layer.keys.ravel()


@pytest.mark.parametrize("case", first_quick(CASES, 2))
def test_every_bit_of_codes_and_parameters(case):
    dtype, given, dim = CASES[case]
    spec = given.of_side(False)
    rng = np.random.default_rng(list(CASES).index(case))
    size = spec.group if spec.axis == "channel" else 1
    x = numbers(rng, (2, 3, 6 * size, dim), dtype)
    layer = layer_of(given)
    layer.update(x, x)
    truth = reference.Side(spec, spec.axis, 0, 0)
    truth.update(x)
    for side in (0, 1):
        found, cells = coded(layer, side)
        assert found.shape[2] == x.shape[2]
        for p in range(x.shape[2]):
            assert np.array_equal(found[:, :, p], truth.bytes[p])
        for i, (_, wanted) in enumerate(truth.blocks):
            assert cells[:, :, i].tobytes() == wanted.tobytes()
    assert layer.keys.tobytes() == layer.values.tobytes() == truth.stored().tobytes()


@pytest.mark.parametrize("case", first_quick(CASES, 2))
def test_vectors_are_their_plain_siblings(case):
    dtype, given, dim = CASES[case]
    spec = given.of_side(False)
    side = CodedSide("key", spec, (1, 1, 0, dim), np.dtype(dtype), 0, 0)
    form, size = side.format, side.block_size
    x = numbers(np.random.default_rng(7), (4 * size, dim), dtype)
    results = []
    for plain in (False, True):
        found = np.full((4 * size, dim * spec.bits // 8), 0xA5, np.uint8)
        cells = np.full((4, side.cells.shape[3]), 7, spec.param_dtype)
        row = dim * x.itemsize
        at = (address(x), 0, size * row, 0, address(found), 0, size * found.strides[0], 0)
        at = (*at, address(cells), 0, cells.strides[0], 0)
        start(codes.prepare_codes(codes.encoder(form, plain).address, 1, 4, at, 1, dim, 0))
        wide = np.full((4 * size, dim), np.nan, np.float32)
        for block in range(4):
            rows = slice(block * size, (block + 1) * size)
            at = (address(wide[rows]), 0, 4 * dim, 0, address(found[rows]), 0, found.strides[0], 0)
            at = (*at, address(cells[block]), 0, 0, 0)
            start(codes.prepare_codes(codes.widen(form, plain).address, 1, size, at, 1, dim, 0))
        results.append((found.tobytes(), cells.tobytes(), wide.tobytes()))
    assert results[0] == results[1]
    assert np.array_equal(wide, wide.astype(dtype).astype(np.float32)), "numbers of the input's format"
    assert BY_DTYPE[np.dtype(dtype)].name == form.element


# The specification's vectors


VECTORS = [  # the spec, a row of one group, its codes, the scale and the minimum, what comes back
    (QuantSpec("int8:g8"), (127, -127, 0.5, 1.5, 2.5, -0.5, 0, 3),
     [127, 129, 0, 2, 2, 0, 0, 3], [1], [127, -127, 0, 2, 2, 0, 0, 3]),
    (QuantSpec("int4:g4"), (1, -1, 7, 0), [0xF1, 0x07], [1], [1, -1, 7, 0]),
    (QuantSpec("uint2:g4:float32"), (-1, 0, 1, 2), [0xE4], [1, -1], [-1, 0, 1, 2]),
    (QuantSpec("uint2:g4:float32"), (0, 0.5, 1.5, 3), [0b11_10_00_00], [1, 0], [0, 0, 2, 3]),
    *((QuantSpec(f"uint{bits}:g4:float32"), [1.25] * 4, [0] * (bits // 2),
       [np.float32(1e-5), 1.25], [1.25] * 4) for bits in (4, 8, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "row", "codes", "cells", "keys"), VECTORS)
def test_vectors(spec, row, codes, cells, keys):
    found = coded_row(spec, row)
    assert [each.tolist() for each in found] == [codes, cells, keys]


@pytest.mark.parametrize(("dtype", "param"), first_quick(PMX))
def test_vector_zero_group(dtype, param):
    found, cells, keys = coded_row(QuantSpec(f"int8:g8:{param}"), [0] * 8, dtype)
    assert not found.any()
    assert not keys.any()
    assert cells.tolist() == [np.float32(1e-5).astype(dtype).astype(param)]


def test_bytes_of_a_token():
    keys, values = QuantSpec("uint4:g32:channel"), QuantSpec("uint4:g64")
    assert (keys.bytes_per_token(64), values.bytes_per_token(64)) == (40, 36)
    # A group of a token has 16 elements.
    assert QuantSpec("kivi4").bytes_per_token(16) == ((8 + 2) + (8 + 4)) / 2
    cache, tokens = QuantizedCache(residual_length=0, sink=0), np.ones((1, 1, 64, 16), np.float16)
    for i in range(2):
        cache.update(tokens, tokens, i)
        cache.layers[i].store.release_undo()
    assert cache.nbytes == 2 * 64 * 2 * QuantSpec("kivi4").bytes_per_token(16)
    layer = QuantizedLayer(**OPTIONS | {"residual_length": 0, "sink": 0})
    layer.update(*states(64))
    layer.store.release_undo()
    assert layer.nbytes == 2 * 2 * 64 * ((16 * 4 // 8 + 16 * 2 * 2 // 4) + (24 * 2 // 8 + 3 * 2 * 2))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4), st.sampled_from([8, 4, 2]))
def test_errors_are_at_most_half_a_step(row, bits):
    _, (scale, low), keys = coded_row(QuantSpec(f"uint{bits}:g4:float32"), row)
    assert low == min(np.float32(row))
    assert np.all(abs(keys - np.float32(row)) <= scale * 0.5001 + 1e-6 * abs(np.float32(row)).max())
