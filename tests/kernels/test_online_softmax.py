"""exp, tanh and the softmax from block to block, by tiny kernels of their own, against float64."""

import functools
import itertools
from unittest import mock

import numpy as np
import pytest
from borders import guarded
from numba import types
from numpy.testing import assert_array_equal

from kvkit.cpu import memory
from kvkit.cpu.attention import online_softmax
from kvkit.cpu.attention.engines import nan_safe
from kvkit.cpu.simd import attention
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.lanes import F32, LANES, exp, micro_kernel, read, sums_of, write
from kvkit.formulas import numeric
from kvkit.runtime import jit

TILES = (1, 2, 4, 8, WIDE)
INF, NAN = np.float32(np.inf), np.float32(np.nan)
LOWEST = np.finfo(np.float32).min
tiles = pytest.mark.parametrize("tile", TILES)


def compiled(function, arguments):
    """Return machine code that is not kept on disk, which knows only the package's files."""
    with mock.patch.object(jit, "cache_folder", return_value=None):
        return jit.callback(function, types.void(*[types.int64] * arguments))


def addresses(arguments):
    return [x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments]


def call(code, *arguments):
    code.ctypes(*addresses(arguments))


# Lane by lane


@functools.cache
def lane_by_lane(formula):
    @micro_kernel
    def vector(b, source, target):
        write(b, target, formula(read(b, source, F32, LANES)))

    def over(source, target, vectors):
        for i in range(vectors):
            vector(source + 4 * LANES * i, target + 4 * LANES * i)

    return compiled(over, 3)


def applied(formula, x):
    """Return the formula of every number, written between guards."""
    x = np.asarray(x, np.float32)
    padded = np.append(x, np.zeros(-len(x) % LANES, np.float32))
    result, untouched = guarded(padded.shape)
    call(lane_by_lane(formula), padded, result, len(padded) // LANES)
    untouched()
    return result[: len(x)]


def numbers_between(low, high, step):
    """Return every `step`-th float32 from low to high, both of one sign."""
    ends = sorted(abs(np.array([low, high], np.float32)).view(np.uint32).tolist())
    x = np.arange(ends[0], ends[1] + 1, step, dtype=np.uint32).view(np.float32)
    return -x if low < 0 else x


def ulps(got, truth):
    """Return the distance of numbers from the truth, in units of the truth's last place."""
    place = np.maximum(np.frexp(truth)[1] - 24, -149)
    return np.abs(got - truth) / 2.0**place


def worst(formula, truth, low, high, step, chunk=2**22):
    """Return the largest error over a range, in ulp."""
    largest = 0.0
    x = numbers_between(low, high, step)
    for begin in range(0, len(x), chunk):
        part = x[begin : begin + chunk]
        largest = max(largest, ulps(applied(formula, part), truth(part.astype(np.float64))).max())
    return largest


STEPS = [1009, pytest.param(31, marks=pytest.mark.slow)]


@pytest.mark.parametrize("step", STEPS)
def test_exp_is_within_2_ulp(step):
    assert worst(exp, np.exp, -87.33654, -0.0, step) <= 2
    assert worst(exp, np.exp, 0, 88, step) <= 2


def test_exp_where_scores_are_close():
    """Every number from -2 to -1, and from -1/64 on a few of each size."""
    assert worst(exp, np.exp, -2, -1, 1) <= 2
    x = -(2.0 ** np.arange(-149, -5, dtype=np.float32))
    assert ulps(applied(exp, x), np.exp(x.astype(np.float64))).max() <= 1


def test_exp_of_what_counts_as_nothing():
    """Positive zeros where the result would be subnormal, far below, and for -inf; NaN stays NaN."""
    edge = np.float32(np.log(2.0**-126))
    below = [np.nextafter(edge, -INF), -87.34, -88, -100, -103.5, -104, -1e4, -1e30, LOWEST, -INF]
    below = np.array(below, np.float32)
    assert (np.exp(below.astype(np.float64)) < 2.0**-126).all()
    assert_array_equal(applied(exp, below).view(np.uint32), 0)
    above = applied(exp, [np.float32(-87.33654), -87.3365, -87.3])
    assert (above >= 2.0**-126).all()
    assert_array_equal(applied(exp, [0.0, -0.0]), 1)
    assert np.isnan(applied(exp, [NAN, -NAN])).all()


@pytest.mark.parametrize("step", STEPS)
def test_tanh_is_within_3_ulp(step):
    assert worst(attention.tanh, np.tanh, 0, 30, step) <= 3


def test_tanh_near_its_seam():
    """Every number about 0.625, where one formula ends and another begins."""
    assert worst(attention.tanh, np.tanh, 0.62, 0.63, 1) <= 3


def test_tanh_of_special_numbers(rng):
    assert_array_equal(applied(attention.tanh, [INF, -INF, 1e30, -1e30, 20, -20]), [1, -1, 1, -1, 1, -1])
    assert_array_equal(applied(attention.tanh, [0.0, -0.0]), 0)
    assert np.isnan(applied(attention.tanh, [NAN, -NAN])).all()
    x = rng.standard_normal(1000, np.float32) * 3
    assert_array_equal(applied(attention.tanh, -x), -applied(attention.tanh, x))
    tiny = 2.0 ** np.arange(-149, -13, dtype=np.float32)
    assert_array_equal(applied(attention.tanh, tiny), tiny)


@functools.cache
def cap_code():
    cap = attention.apply_softcap

    def over(scores, vectors, number):
        cap(scores, vectors, number)

    return compiled(over, 3)


@pytest.mark.parametrize("limit", [1e-3, 1.0, 30.0, 50.0, 1e30])
def test_cap(limit, rng):
    """Three roundings of at most half an ulp beside those of tanh, one of which may reach the next binade."""
    limit = np.full(1, limit, np.float32)
    sizes = 10.0 ** rng.uniform(-4, 3, 4096) * rng.choice([-1, 1], 4096)
    x = (sizes * min(limit[0], 1e4)).astype(np.float32)
    x[:3] = INF, -INF, 0
    result, untouched = guarded(x.shape, x)
    call(cap_code(), result, len(x) // LANES, limit)
    untouched()
    exact = limit.astype(np.float64)
    assert ulps(result[3:], exact * np.tanh(x[3:] / exact)).max() <= 6
    assert_array_equal(result[:3], [limit[0], -limit[0], 0])


@functools.cache
def sums_code(count):
    @micro_kernel
    def kernel(b, source, target):
        vectors = [read(b, b.add(source, source.type(4 * LANES * i)), F32, LANES) for i in range(count)]
        write(b, target, sums_of(vectors))

    def over(source, target):
        kernel(source, target)

    return compiled(over, 2)


@pytest.mark.parametrize("count", [8, 16])
def test_sums_of_vectors(count, rng):
    x = rng.integers(-99, 99, (count, LANES)).astype(np.float32)
    result, untouched = guarded(count)
    call(sums_code(count), x, result)
    untouched()
    assert_array_equal(result, x.sum(1))


# Softmax


@functools.cache
def softmax_code():
    """Compile the softmax of one block of scores, with the maximum and sum of each row."""
    softmax, fold, put = online_softmax.softmax, online_softmax.fold, memory.store(types.float32)

    def over(scores, tile, count, top, total, factor, folded):
        softmax(scores, tile, tile, count, top, total, factor)
        for row in range(tile):
            one, whole = fold(top, total, row, tile)
            put(folded + 8 * row, one)
            put(folded + 8 * row + 4, whole)

    return compiled(over, 7)


class Running:
    """Holds the state of a tile: a maximum and a sum for each of at least 16 lanes."""

    def __init__(self, tile):
        self.tile, self.lanes = tile, max(tile, LANES)
        self.top, self.top_untouched = guarded(self.lanes, -np.inf)
        self.total, self.total_untouched = guarded(self.lanes, 0)
        self.weights = np.zeros((0, tile))

    def block(self, scores):
        """Take a block [token, row]; the weights so far shrink as sums of values would."""
        count = len(scores)
        memory, memory_untouched = guarded(-(-count * self.tile // LANES) * LANES)
        memory[: count * self.tile] = scores.ravel()
        factor, factor_untouched = guarded(self.lanes)
        folded, folded_untouched = guarded((self.tile, 2))
        call(softmax_code(), memory, self.tile, count, self.top, self.total, factor, folded)
        for untouched in (memory_untouched, factor_untouched, folded_untouched):
            untouched()
        self.top_untouched()
        self.total_untouched()
        new = memory[: count * self.tile].reshape(count, self.tile)
        shrink = factor.reshape(-1, self.tile)[0]
        assert_array_equal(factor.reshape(-1, self.tile), shrink[None].repeat(self.lanes // self.tile, 0))
        self.weights = np.concatenate([self.weights * shrink.astype(np.float64), new])
        return folded.T


def softmax(scores):
    """Return (maximum, sum, weights before division) in float64."""
    scores = scores.astype(np.float64)
    top = scores.max(0)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - np.where(top == -np.inf, 0, top))
    return top, weights.sum(0), weights


BLOCKS = [(64,), (1,), (5,), (64, 64, 3), (1, 1, 1), (7, 32, 32, 30)]


def check_softmax(tile, blocks, scores):
    """Check weights against float64, where differences of scores are rounded once a block."""
    running, begin = Running(tile), 0
    span = 0 if np.isneginf(scores).all() else min(np.ptp(scores[np.isfinite(scores)]), 88)
    close = {"rtol": 2e-6 + len(blocks) * 2.0**-24 * span, "atol": 1e-35}
    for count in blocks:
        top, total = running.block(scores[begin : begin + count])
        begin += count
        right = softmax(scores[:begin])
        assert_array_equal(top, right[0])
        np.testing.assert_allclose(total, right[1], **close)
        np.testing.assert_allclose(running.weights, right[2], **close)
    return running


@tiles
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("size", [1, 30, 1e4])
def test_softmax(tile, blocks, size, rng):
    scores = (rng.standard_normal((sum(blocks), tile)) * size).astype(np.float32)
    check_softmax(tile, blocks, scores)
    check_softmax(tile, blocks, np.sort(scores, 0))
    check_softmax(tile, blocks, np.sort(scores, 0)[::-1])
    scores[rng.random(scores.shape) < 0.6] = -INF
    check_softmax(tile, blocks, scores)


@tiles
def test_softmax_of_rows_that_see_nothing(tile, rng):
    """At first, from some block on, or ever: no NaN, a total of 0."""
    scores = rng.standard_normal((96, tile)).astype(np.float32)
    scores[:40, ::3] = scores[32:, 1::3] = -INF
    check_softmax(tile, (32, 32, 32), scores)
    running = check_softmax(tile, (32, 32, 32), np.full((96, tile), -INF))
    assert_array_equal(running.total, 0)
    assert_array_equal(running.weights, 0)


@tiles
def test_softmax_of_the_lowest_scores(tile, rng):
    """What models hide keys with is a number: beside it others count, alone it is shared out evenly."""
    scores = np.full((64, tile), LOWEST)
    running = check_softmax(tile, (32, 32), scores)
    assert_array_equal(running.weights, 1)
    scores[40] = 3
    running = check_softmax(tile, (32, 32), scores)
    assert_array_equal(running.weights, np.arange(64)[:, None].repeat(tile, 1) == 40)


@tiles
def test_nan_stays_in_its_row(tile, rng):
    scores, row = rng.standard_normal((80, tile)).astype(np.float32), tile - 1
    clean, spoilt = Running(tile), Running(tile)
    for begin in (0, 40):
        block = scores[begin : begin + 40]
        expected = clean.block(block)
        bad = block.copy()
        bad[7, row] = NAN
        got = spoilt.block(bad)
        assert np.isnan(got[1, row])
        others = np.arange(tile) != row
        assert_array_equal(got[:, others].view(np.uint32), expected[:, others].view(np.uint32))
        assert_array_equal(spoilt.weights[:, others], clean.weights[:, others])


@functools.cache
def weight_code():
    weight, get, put = numeric.weight, memory.load(types.float32), memory.store(types.float32)

    def over(scores, tops, weights, count):
        for i in range(count):
            put(weights + 4 * i, weight(get(scores + 4 * i), get(tops + 4 * i)))

    return compiled(over, 4)


def test_weight(rng):
    special = [
        (-INF, -INF, 0), (-INF, 3, 0), (-INF, LOWEST, 0), (LOWEST, LOWEST, 1), (5, 5, 1), (-1e30, 0, 0),
    ]  # fmt: skip
    tops = (rng.standard_normal(1000) * 20).astype(np.float32)
    scores = tops - (rng.random(1000) * 60).astype(np.float32)
    expected = np.exp(scores - tops, dtype=np.float64)
    scores, tops, expected = (
        np.append(x, np.array(more, x.dtype))
        for x, more in zip((scores, tops, expected), zip(*special, strict=True), strict=True)
    )
    result, untouched = guarded(scores.shape)
    call(weight_code(), scores, tops, result, len(scores))
    untouched()
    assert ulps(result[:1000], expected[:1000]).max() <= 2
    assert_array_equal(result[1000:], expected[1000:])


# Careful sums


@functools.cache
def careful_code():
    add_seen_values = nan_safe.add_seen_values

    def over(weights, values, value_row, count, dim, sums, factors, tile):
        add_seen_values(weights, values, value_row, count, dim, sums, factors, tile)

    return compiled(over, 8)


@tiles
@pytest.mark.parametrize("dim", [16, 48])
def test_careful_sums(tile, dim, rng):
    """Values without weight may be anything, for each row on its own."""
    for count, gap in itertools.product((0, 1, 13), (0, 3)):
        weights = rng.random((count, tile), np.float32)
        values = rng.standard_normal((count, dim + gap), np.float32)
        weights[::2, ::2] = 0
        values[::2] = rng.choice([NAN, INF, -INF]) if tile == 1 else values[::2]
        factors, start = (rng.random(n, np.float32) for n in (tile, tile * dim))
        start = start.reshape(tile, dim)
        stored = start.T if tile == WIDE else start
        sums, untouched = guarded(stored.shape, stored)
        call(careful_code(), weights, values, 4 * (dim + gap), count, dim, sums, factors, tile)
        untouched()
        with np.errstate(invalid="ignore"):
            terms = weights[:, :, None].astype(np.float64) * values[:, None, :dim]
        terms[weights == 0] = 0
        expected = start * factors[:, None].astype(np.float64) + terms.sum(0)
        np.testing.assert_allclose(sums.T if tile == WIDE else sums, expected, rtol=1e-5, atol=1e-6)


@tiles
def test_careful_sums_of_a_visible_nan(tile):
    """A row that gives it no weight never knows."""
    weights = np.zeros((2, tile), np.float32)
    weights[0], weights[1, 0] = 1, 0.5
    values = np.array([[1, 2], [NAN, 4]], np.float32).repeat(8, 1)
    sums, _ = guarded((16, tile) if tile == WIDE else (tile, 16), 0)
    call(careful_code(), weights, values, 64, 2, 16, sums, np.ones(tile, np.float32), tile)
    sums = sums.T if tile == WIDE else sums
    assert_array_equal(sums[0], np.repeat([NAN, 4], 8))
    assert_array_equal(sums[1:], values[:1].repeat(tile - 1, 0))
