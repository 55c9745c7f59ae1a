"""Every bit of the mean of KVHEAD_ROPE: sums in float32, token by token, divided once, rounded once."""

import math

import backends
import exact_mean
import numpy as np
import pytest
from ascend_scenes import FLOATS, finite, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit.cpu.copy import pieces
from kvkit.reference import ascend as oracle
from kvkit.reference.ascend import KVHEAD_ROPE

reshape_and_cache = backends.operators.ascend.reshape_and_cache


BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
every_float = pytest.mark.parametrize("element", FLOATS)


def mean_of(tokens):
    """Return the stored mean of tokens [count, D], which keys, values and all heads must share."""
    count, dim = tokens.shape
    whole = -(-dim // 32) * 32
    padded = np.zeros((count, 2, whole), tokens.dtype)
    padded[:, :, :dim] = tokens[:, None]
    caches = np.full((2, 1, 2, 1, whole), 7, tokens.dtype)
    more = {"wins": [count] * 2, "seq_lens": [count], "offset_index": [0, 0]}
    reshape_and_cache(padded, padded, *caches, [0, 1], compress_type=KVHEAD_ROPE, **more)
    rows = caches.reshape(4, whole)
    assert all(row.tobytes() == rows[0].tobytes() for row in rows)
    return rows[0, :dim]


def numbers(rng, element, shape):
    """Return numbers whose sums round in every way: near each other, of any size, opposite, subnormal."""
    how = rng.integers(0, 4)
    if how == 0:
        return finite(rng, shape, FLOATS[element])
    steps = rng.integers(-40, 41, shape) if how == 1 else 1000 + rng.integers(-3, 4, shape)
    smallest = exact_mean.PRECISION[element][1] - exact_mean.PRECISION[element][0] + 1
    scale = 2.0 ** (smallest if rng.random() < 0.4 else rng.integers(-6, 4))
    array = (steps * scale).astype(FLOATS[element])
    if how == 3:
        array[1::2] = -array[: len(array) // 2 * 2 : 2][: len(array[1::2])]
        array[rng.integers(0, len(array))] += FLOATS[element].type(scale)
    return array


@settings(max_examples=60)
@given(seeds, st.sampled_from(list(FLOATS)), st.integers(1, 12))
def test_in_whole_numbers(rng, element, count):
    """Against fractions, which are rounded by a rule and not by a machine."""
    tokens = numbers(rng, element, (count, 16))
    for got, column in zip(mean_of(tokens).astype(float), tokens.T, strict=True):
        expected, negative = exact_mean.exact_mean(column, element)
        assert got == float(expected)
        assert math.copysign(1, got) == (-1 if negative else 1)


@settings(max_examples=60)
@given(seeds, st.sampled_from(list(FLOATS)), st.integers(1, 300))
def test_in_loops(rng, element, count):
    tokens = numbers(rng, element, (count, 33))
    assert mean_of(tokens).tobytes() == oracle.mean_of_rows(tokens).tobytes()


@every_float
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 256, 288, 512])
def test_every_lane(element, dim):
    """Each element of a head has numbers of its own, whatever vectors it is in."""
    tokens = finite(np.random.default_rng(dim), (7, dim), FLOATS[element])
    assert mean_of(tokens).tobytes() == oracle.mean_of_rows(tokens).tobytes()


@every_float
def test_one_token(element):
    """It comes back with every bit but the sign of -0.0, subnormal numbers and infinities too."""
    bits = np.arange(2**16, dtype=np.uint32)
    if element == "float32":
        bits = bits * 65_521 + 12_345
    tokens = bits.astype(BITS[element]).view(FLOATS[element])
    with np.errstate(invalid="ignore"):
        nan, zero = np.isnan(tokens), tokens == 0
    got = mean_of(tokens[None])
    assert got[~nan & ~zero].tobytes() == tokens[~nan & ~zero].tobytes()
    assert not got[zero].view(BITS[element]).any()
    assert np.isnan(got[nan]).all()


@every_float
def test_nan_and_infinity_stay_in_their_element(element):
    tokens = np.ones((5, 64), FLOATS[element])
    tokens[2, 3], tokens[1, 40], tokens[3, 41] = np.nan, np.inf, -np.inf
    tokens[0, 42], tokens[4, 42] = np.inf, -np.inf
    got = mean_of(tokens)
    assert np.isnan(got[[3, 42]]).all()
    assert got[40] == np.inf
    assert got[41] == -np.inf
    assert (np.delete(got, [3, 40, 41, 42]) == 1).all()


@pytest.mark.cpu
def test_threads_share_a_long_mean(rng, monkeypatch):
    """Each has some of its elements, all tokens of them in order."""
    tokens = rng.standard_normal((3000, 1, 96), np.float32)
    more = {"wins": [2990], "seq_lens": [3000], "offset_index": [4], "compress_type": KVHEAD_ROPE}
    stored = []
    for count in (1, 2, 3, 4, 16):
        monkeypatch.setattr(pieces, "threads", lambda count=count: count)
        caches = np.zeros((2, 1, 16, 1, 96), np.float32)
        reshape_and_cache(tokens, -tokens, *caches, [0], **more)
        stored.append(caches.tobytes())
    assert len(set(stored)) == 1
    assert any(stored[0])
