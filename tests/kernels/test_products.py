"""The narrow and the wide engine: vector and plain forms, called by address, against float64."""

import itertools
import json
import os
import platform
import re
import subprocess
import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from borders import BEGIN, END, at_border, guarded, needs_borders
from kernel_steps import run_step
from llvmlite import binding
from numpy.testing import assert_array_equal

from kvkit.cpu import machine
from kvkit.cpu.attention.engines import narrow as products
from kvkit.cpu.attention.engines import plain as plain_forms
from kvkit.cpu.attention.engines import wide
from kvkit.cpu.simd import quarters
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.chunks import tile_tokens
from kvkit.formats import BY_NAME, coarser

NARROW = (1, 2, 4, 8)
# Whether plain or not, by rows: with one number of them a format will do, as it compiles slowly.
PLAIN = {1: (False,), 2: (False, True), 4: (False,), 8: (False,)}
HEAD_SIZES = (16, 48, 80, 96, 128, 256)
EPS = 2.0**-24
NOWHERE = 8  # an address that nobody can read
QMAX = {"int8": 127, "int4": 7}


class Kept(NamedTuple):
    """Describes how a cache stores elements: the arguments of `products` after the first."""

    stored: str
    cell: str | None = None
    group: int = 0
    exact: bool = False

    def __str__(self):
        scale = [self.cell, str(self.group), *["exact"] * self.exact] if self.cell else []
        return "-".join([self.stored, *scale])

    def sizes(self):
        whole = 32 if BY_NAME[self.stored].block else self.group
        return [dim for dim in HEAD_SIZES if not whole or dim % whole == 0]


FLOATS = ("float32", "float16", "bfloat16")
SCALED = itertools.product(("int8", "int4"), FLOATS, (2, 8, 16, 32), (False, True))
OTHERS = [
    *map(Kept, ("e4m3", "e5m2", "q8_0", "q4_0")),
    *(Kept("e4m3", cell, group) for cell, group in (("float32", 0), ("float16", 0), ("float32", 32))),
]
ALL = [*map(Kept, FLOATS), *itertools.starmap(Kept, SCALED), *OTHERS]
QUICK = [
    (1, Kept("float16")), (2, Kept("bfloat16")), (4, Kept("float32")), (8, Kept("float16")),
    (8, Kept("bfloat16")), (1, Kept("int8", "float16", 8)), (2, Kept("int8", "float32", 16)),
    (4, Kept("int8", "bfloat16", 2, True)), (2, Kept("int4", "bfloat16", 32)),
    (8, Kept("int4", "float16", 8, True)), (1, Kept("e4m3", "float32", 0)), (4, Kept("e4m3", "float32", 32)),
    (8, Kept("q8_0")), (4, Kept("q4_0")),
]  # fmt: skip
narrow = pytest.mark.parametrize(
    ("rows", "kept"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(NARROW, ALL)
    ],
    ids=str,
)
forms = pytest.mark.parametrize("plain", [False, True], ids=["vector", "plain"])


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# Rows of a cache


class Cached(NamedTuple):
    """Rows at scattered places of a cache; all else in it is NaN."""

    numbers: np.ndarray
    elements: np.ndarray  # bytes
    element_row: int
    cells: np.ndarray | None  # bytes
    cell_row: int
    values: np.ndarray  # float64 [token, dim]

    def spot(self, side):
        """Return the fields of params, block and tile that say where the rows of a side lie."""
        cells = NOWHERE if self.cells is None else self.cells
        params = {f"{side}s.scale_row": self.cell_row, f"{side}s.padded_dim": self.values.shape[1]}
        tile = {f"{side}s": self.elements, f"{side}_scales": cells, "count": len(self.values)}
        return params, {f"{side}_row": self.element_row}, tile

    def moved(self, place):
        arrays = {name: getattr(self, name) for name in ("numbers", "elements", "cells")}
        return self._replace(**{name: place(a) for name, a in arrays.items() if a is not None})


def cached(rng, kept, tokens, dim, integers=False, gap=0):
    """Return a cache of numbers of size 1, or of small integers whose sums are exact in float32."""
    capacity = 2 * tokens + 3
    between = 1 + rng.permutation(capacity - 2)
    numbers = rng.permutation(np.r_[capacity - 1, 0, between][:tokens]).astype(np.int64)
    if BY_NAME[kept.stored].block:
        return in_blocks(rng, kept.stored, numbers, capacity, dim, integers, gap)
    if BY_NAME[kept.stored].minifloat:
        return minifloats(rng, kept, numbers, capacity, dim, integers, gap)
    if kept.cell is None:
        values = rng.integers(-8, 9, (tokens, dim)) if integers else rng.standard_normal((tokens, dim))
        values = values.astype(dtype_of(kept.stored))
        elements, row = spread(values.view(np.uint8), numbers, capacity, gap)
        return Cached(numbers, elements, row, None, 0, values.astype(np.float64))
    qmax = 7 if integers else QMAX[kept.stored]
    codes = rng.integers(-qmax, qmax + 1, (tokens, dim)).astype(np.int8)
    shape = tokens, dim // kept.group
    scales = 2.0 ** rng.integers(-1, 2, shape) if integers else rng.uniform(0.5, 2, shape) / qmax
    scales = scales.astype(dtype_of(kept.cell))
    values = codes.astype(np.float32) * scales.astype(np.float32).repeat(kept.group, -1)
    if kept.exact:
        values = values.astype(dtype_of(kept.cell))
    if kept.stored == "int4":
        codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    elements, row = spread(codes.view(np.uint8), numbers, capacity, gap)
    cells, cell_row = spread(scales.view(np.uint8), numbers, capacity, gap)
    return Cached(numbers, elements, row, cells, cell_row, values.astype(np.float64))


def in_blocks(rng, stored, numbers, capacity, dim, integers, gap):
    """Return codes and scales of blocks, and the numbers that they stand for."""
    codes = rng.integers(-8, 8, (len(numbers), dim // 32, 32))
    scales = (
        2.0 ** rng.integers(-1, 2, codes.shape[:2]) if integers else rng.uniform(0.1, 0.2, codes.shape[:2])
    )
    scales = scales.astype(np.float16)
    low, high = np.split((codes + 8).astype(np.uint8), 2, -1)
    data = codes.astype(np.int8).view(np.uint8) if stored == "q8_0" else low | high << 4
    whole = np.concatenate((scales[..., None].view(np.uint8), data), -1)
    rows = whole.reshape(len(numbers), BY_NAME[stored].bytes(dim))
    elements, row = spread(rows, numbers, capacity, gap)
    values = codes * scales[..., None].astype(np.float64)
    return Cached(numbers, elements, row, None, 0, values.reshape(len(numbers), dim))


def minifloats(rng, kept, numbers, capacity, dim, integers, gap):
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kept.stored]
    shape = len(numbers), dim
    values = (rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)).astype(dtype)
    elements, row = spread(values.view(np.uint8), numbers, capacity, gap)
    if not kept.cell:
        return Cached(numbers, elements, row, None, 0, values.astype(np.float64))
    group = kept.group or dim
    cells = (len(numbers), dim // group)
    scales = (2.0 ** rng.integers(-1, 2, cells) if integers else rng.uniform(0.1, 0.2, cells)).astype(
        kept.cell
    )
    spots, cell_row = spread(scales.view(np.uint8), numbers, capacity, gap)
    values = values.astype(np.float64) * scales.astype(np.float64).repeat(group, -1)
    return Cached(numbers, elements, row, spots, cell_row, values)


def spread(rows, numbers, capacity, gap):
    """Return rows `gap` bytes apart among bytes of NaN, none after the last; and their stride."""
    stride = rows.shape[1] + gap
    memory = np.full((capacity, stride), 0xFF, np.uint8)
    memory[numbers, : rows.shape[1]] = rows
    return memory.reshape(-1)[: capacity * stride - gap], stride


def numbers_of(rng, shape, integers):
    return (rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)).astype(np.float32)


def padded_numbers(cache, rows):
    """Return the row numbers of the tokens, the last one repeated up to a multiple of 8."""
    assert 8 % tile_tokens(rows) == 0
    tokens = len(cache.numbers)
    return np.append(cache.numbers, cache.numbers[-1:].repeat(-tokens % 8))


def anywhere(rng, count):
    """Return addresses to prefetch; at most of them there is nothing."""
    return rng.integers(-(2**63), 2**63 - 1, count)


def same(array):
    return array


# Narrow


def narrow_scores(rng, rows, kept, queries, cache, place=same, **form):
    """Return (scores [token, row], values of the tokens); scores are written between guards."""
    numbers, tokens = place(padded_numbers(cache, rows)), len(cache.values)
    if not form.get("plain"):  # [dim / 16, row, 16]
        queries = np.ascontiguousarray(queries.reshape(rows, -1, 16).swapaxes(0, 1))
    ahead, queries = place(anywhere(rng, len(numbers))), place(queries.copy())
    paired = form.get("paired", False)
    if quarters.fits(rows, kept.stored, paired) and not form.get("plain"):
        tile = {"queries": queries}
        run_step(
            products.queries(rows, paired), {"keys.padded_dim": queries.size // rows}, {}, tile,
        )  # fmt: skip
    scores, untouched = guarded((-(-len(numbers) // 16) * 16 if rows == 1 else len(numbers), rows))
    params, block, tile = cache.spot("key")
    block |= {"key_ids": numbers, "prefetch_in_scores": ahead}
    tile |= {"queries": queries, "scores": scores, "factor": np.ones(1, np.float32)}
    run_step(products.scores(rows, *kept, **form), params, block, tile)
    untouched()
    return scores[:tokens], cache.values  # what is written after the last token is never read


def narrow_sums(rng, rows, kept, weights, cache, sums, factors, place=same, **form):
    """Return sums [row, dim] that continue `sums`, written between guards."""
    result, untouched = guarded(sums.shape, sums)
    weights, factors, ahead = place(weights), place(factors), place(anywhere(rng, len(cache.values)))
    params, block, tile = cache.spot("value")
    block |= {
        "value_ids": cache.numbers,
        "prefetch_in_sums": ahead,
        "prefetch_shift": int(rng.integers(2**40)),
    }
    tile |= {"scores": weights, "o": result, "alpha": factors}
    run_step(products.sums(rows, *kept, **form), params, block, tile)
    untouched()
    return result


def assert_close(got, expected, size, steps, label):
    """Check results within the error of `steps` float32 additions of numbers that sum up to `size`."""
    off = np.abs(got - expected) - (steps + 4) * EPS * size
    assert (off <= 0).all(), f"{label}: off by {off.max():.3g} too much"  # NaN is not within either


def check_narrow_scores(rng, rows, kept, tokens, dim, gap=0, place=same):
    pairs = machine.has_pairs() and kept == Kept("bfloat16")
    forms = [{"plain": plain} for plain in PLAIN[rows]]
    forms += [{"in_order": True}] if rows == 1 and kept.stored in FLOATS else []
    forms += [{"paired": True}] if rows >= 4 and pairs else []
    for integers, form in itertools.product((True, False), forms):
        queries, plain = numbers_of(rng, (rows, dim), integers), form.get("plain", False)
        if "paired" in form:
            queries = queries.astype(ml_dtypes.bfloat16).astype(np.float32)
        cache = cached(rng, kept, tokens, dim, integers, gap).moved(place)
        order = None if plain else products.orders(*kept[:3], dim)
        given = queries if order is None else queries.take(order[rows], 1)
        got, values = narrow_scores(rng, rows, kept, given, cache, place, **form)
        expected, size = values @ queries.T.astype(np.float64), np.abs(values) @ np.abs(queries.T)
        label = f"{tokens} tokens of {dim}, {form}"
        if integers:
            assert_array_equal(got, expected, label)
        else:
            lanes = 4 if quarters.fits(rows, kept.stored, form.get("paired", False)) else 16
            steps = dim if plain else dim // lanes + (2 if lanes == 4 else 5)
            assert_close(got, expected, size, steps, label)


def check_narrow_sums(rng, rows, kept, tokens, dim, gap=0, place=same):
    for integers, plain in itertools.product((True, False), PLAIN[rows]):
        weights, sums = numbers_of(rng, (tokens, rows), integers), numbers_of(rng, (rows, dim), integers)
        factors = numbers_of(rng, rows, integers)
        cache = cached(rng, kept, tokens, dim, integers, gap).moved(place)
        got = narrow_sums(rng, rows, kept, weights, cache, sums, factors, place, plain=plain)
        start = sums * factors[:, None].astype(np.float64)
        expected = start + weights.T.astype(np.float64) @ cache.values
        size = np.abs(start) + np.abs(weights.T) @ np.abs(cache.values)
        label = f"{tokens} tokens of {dim}, plain={plain}"
        if integers:
            assert_array_equal(got, expected, label)
        else:
            assert_close(got, expected, size, tokens, label)


@narrow
def test_narrow_scores(rows, kept, rng):
    for dim in kept.sizes():
        for tokens in (0, 1, 8, 29):
            check_narrow_scores(rng, rows, kept, tokens, dim, gap=int(rng.integers(0, 40)))


@narrow
def test_narrow_sums(rows, kept, rng):
    for dim in kept.sizes():
        for tokens in (0, 1, 8, 29):
            check_narrow_sums(rng, rows, kept, tokens, dim, gap=int(rng.integers(0, 40)))


@needs_borders
@narrow
@pytest.mark.parametrize("where", [BEGIN, END])
def test_narrow_products_read_nothing_outside(rows, kept, where, rng):
    """A byte before or behind queries, keys, cells, numbers, weights or factors would end the process."""

    def place(array):
        return at_border(array, where)

    for dim in kept.sizes()[:3]:
        check_narrow_scores(rng, rows, kept, 5, dim, 6, place)
        check_narrow_sums(rng, rows, kept, 5, dim, 6, place)


@pytest.mark.parametrize(("rows", "stored"), [(1, "e4m3"), (4, "e4m3"), (8, "e4m3"), (2, "e5m2")])
def test_every_code_of_minifloats(rows, stored, rng):
    """NaN and infinities among them, of one token in each of the groups that are unfolded."""
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[stored]
    values, tokens = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64), 37
    zeros, ones = np.zeros((rows, 256), np.float32), np.ones(rows, np.float32)
    for token in (3, 36):
        codes = np.zeros((tokens, 256), np.uint8)
        codes[token] = np.arange(256)
        cache = Cached(np.arange(tokens), codes, 256, None, 0, codes.view(dtype).astype(np.float64))
        got = narrow_sums(rng, rows, Kept(stored), np.ones((tokens, rows), np.float32), cache, zeros, ones)
        assert_array_equal(got, values[None].repeat(rows, 0))
        scores, _ = narrow_scores(rng, rows, Kept(stored), zeros, cache)
        assert_array_equal(np.isnan(scores[:tokens]), (np.arange(tokens) == token)[:, None].repeat(rows, 1))


@forms
@pytest.mark.parametrize("rows", NARROW)
def test_nothing_leaks_between_rows_and_tokens(rows, plain, rng):
    """NaN stays in its row of queries or weights, its token, its column of values."""
    kept, tokens, dim = Kept("float32"), 16, 48
    cache, row, token, column = cached(rng, kept, tokens, dim), rows - 1, 5, 17
    cache.elements.view(np.float32).reshape(-1, dim)[cache.numbers[token], column] = np.nan
    queries, weights = numbers_of(rng, (rows, dim), False), numbers_of(rng, (tokens, rows), False)
    scores, _ = narrow_scores(rng, rows, kept, queries, cache, plain=plain)
    assert_array_equal(np.isnan(scores), np.arange(tokens)[:, None].repeat(rows, 1) == token)
    start = numbers_of(rng, (rows, dim), False), np.ones(rows, np.float32)
    sums = narrow_sums(rng, rows, kept, weights, cache, *start, plain=plain)
    assert_array_equal(np.isnan(sums), np.arange(dim)[None].repeat(rows, 0) == column)

    cache = cached(rng, kept, tokens, dim)
    queries[row, 3], weights[token, row] = np.nan, np.nan
    scores, _ = narrow_scores(rng, rows, kept, queries, cache, plain=plain)
    assert_array_equal(np.isnan(scores), np.arange(rows)[None].repeat(tokens, 0) == row)
    sums = narrow_sums(rng, rows, kept, weights, cache, *start, plain=plain)
    assert_array_equal(np.isnan(sums), np.arange(rows)[:, None].repeat(dim, 1) == row)


# Wide


def wide_scores(queries, keys, key_row, plain=False):
    """[token, row] of queries [dim, row] and keys [token, dim], whose rows lie `key_row` bytes apart."""
    scores, untouched = guarded((len(keys), WIDE))
    params, block = {"keys.padded_dim": len(queries)}, {"key_row": key_row, "key_ids": NOWHERE}
    tile = {"queries": queries, "keys": keys, "key_scales": NOWHERE, "count": len(keys), "scores": scores}
    run_step(plain_forms.scores(WIDE) if plain else wide.multiply_keys.code, params, block, tile)
    untouched()
    return scores


def wide_sums(weights, values, value_row, sums, factors, plain=False):
    """[dim, row] of weights [token, row] and values [token, dim], added to sums * factors."""
    result, untouched = guarded(sums.shape, sums)
    params, block = {"values.padded_dim": len(sums)}, {"value_row": value_row, "value_ids": NOWHERE}
    tile = {"scores": weights, "values": values, "value_scales": NOWHERE, "count": len(weights)}
    step = plain_forms.sums(WIDE) if plain else wide.add_values.code
    run_step(step, params, block, tile | {"o": result, "alpha": factors})
    untouched()
    return result


def strided(rng, tokens, dim, integers, place):
    """Return (rows with NaN between them and nothing after the last, their stride)."""
    gap = int(rng.integers(0, 5))
    memory = np.full((tokens, dim + gap), np.nan, np.float32)
    memory[:, :dim] = numbers_of(rng, (tokens, dim), integers)
    memory = place(memory.reshape(-1)[: tokens * (dim + gap) - gap])
    row = 4 * (dim + gap)
    return np.lib.stride_tricks.as_strided(memory, (tokens, dim), (row, 4)), row


def check_wide(rng, tokens, dim, plain, place=same):
    """Check scores of whole tiles of 8, and sums of any number of tokens."""
    for integers in (True, False):
        queries = place(numbers_of(rng, (dim, WIDE), integers))
        keys, key_row = strided(rng, -(-tokens // 8) * 8, dim, integers, place)
        scores = wide_scores(queries, keys, key_row, plain=plain)
        expected = keys.astype(np.float64) @ queries.astype(np.float64)
        weights, factors = (place(numbers_of(rng, s, integers)) for s in ((tokens, WIDE), (WIDE,)))
        values, value_row = strided(rng, tokens, dim, integers, place)
        start = numbers_of(rng, (dim, WIDE), integers)
        sums = wide_sums(weights, values, value_row, start, factors, plain=plain)
        whole = start * factors.astype(np.float64) + values.T.astype(np.float64) @ weights
        if integers:
            assert_array_equal(scores, expected, "scores")
            assert_array_equal(sums, whole, "sums")
            continue
        assert_close(scores, expected, np.abs(keys) @ np.abs(queries), dim, "scores")
        size = np.abs(start * factors) + np.abs(values.T) @ np.abs(weights)
        assert_close(sums, whole, size, tokens, "sums")


@forms
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_wide(dim, plain, rng):
    for tokens in (0, 1, 8, 29, 64):
        check_wide(rng, tokens, dim, plain)


@needs_borders
@pytest.mark.parametrize("where", [BEGIN, END])
def test_wide_products_read_nothing_outside(where, rng):
    for tokens, dim in ((1, 16), (13, 48), (24, 80)):
        check_wide(rng, tokens, dim, False, lambda array: at_border(array, where))


@forms
def test_nothing_leaks_between_rows_and_tokens_of_wide_products(plain, rng):
    tokens, dim, row, token, column = 16, 48, 21, 5, 17
    queries, keys = numbers_of(rng, (dim, WIDE), False), numbers_of(rng, (tokens, dim), False)
    weights, ones = numbers_of(rng, (tokens, WIDE), False), np.ones(WIDE, np.float32)
    queries[3, row] = weights[token, row] = keys[token, column] = np.nan
    at = np.ix_(np.arange(tokens) == token, np.arange(WIDE) == row)
    expected = np.zeros((tokens, WIDE), bool)
    expected[at[0].ravel()] = expected[:, at[1].ravel()] = True
    expected[token] = expected[:, row] = True
    assert_array_equal(np.isnan(wide_scores(queries, keys, 4 * dim, plain=plain)), expected)
    sums = wide_sums(weights, keys, 4 * dim, np.zeros((dim, WIDE), np.float32), ones, plain=plain)
    expected = np.zeros((dim, WIDE), bool)
    expected[column] = expected[:, row] = True
    assert_array_equal(np.isnan(sums), expected)


# Which products


@pytest.mark.parametrize(
    ("cell", "group", "dims", "answer"),
    [
        (None, 0, (64, 128), True), (None, 0, (16, 16), True), (None, 0, (64, 40), False),
        (None, 0, (8, 64), False), ("float16", 8, (64, 64), True), ("float16", 48, (48, 48), True),
        ("float16", 2, (16, 16), True), ("float16", 1, (64, 64), False), ("float16", 5, (80, 80), False),
        ("float16", 24, (48, 48), False), ("float16", 8, (40, 40), False),
    ],
)  # fmt: skip
def test_what_is_read_in_place(cell, group, dims, answer):
    assert products.in_place(cell, group, dims) is answer


def test_formats_that_are_coarser():
    names = [name for name, fmt in BY_NAME.items() if fmt.bits >= 16]
    digits = dict(zip(names, (24, 11, 8), strict=True))
    for one, other in itertools.product(names, names):
        assert coarser(one, other) is (digits[one] < digits[other])


# Assembly

SHOW = """
import json
from kvkit.cpu.attention.engines import narrow, wide
codes = {"scores": narrow.scores(4, "float16"), "sums": narrow.sums(4, "float16"),
         "wide_scores": wide.multiply_keys.code, "wide_sums": wide.add_values.code}
print(json.dumps({name: code.library.get_asm_str() for name, code in codes.items()}))
"""


def has_avx512():
    chosen = {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT"} & os.environ.keys()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and not chosen and binding.get_host_cpu_features().get("avx512f", False)


def innermost_loops(assembly):
    """Yield the lines of every loop without another loop in it."""
    loops, lines, labels = [], assembly.splitlines(), {}
    for i, line in enumerate(lines):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = i
        jump = re.match(r"\s+j\w+\s+(\.LBB\w+)", line)
        if jump and jump[1] in labels:
            loops.append((labels[jump[1]], i))
    return [
        lines[begin : end + 1]
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]


@pytest.mark.perf
@pytest.mark.skipif(not has_avx512(), reason="about the instructions of AVX-512")
def test_assembly():
    """Multiplying loops multiply and add at once in full vectors, whose sums never leave the registers."""
    surroundings = os.environ | {"KVKIT_CACHE_DIR": ""}
    shown = subprocess.run([sys.executable, "-c", SHOW], env=surroundings, capture_output=True, check=True)
    for name, assembly in json.loads(shown.stdout).items():
        hot = [loop for loop in innermost_loops(assembly) if any("vfmadd" in line for line in loop)]
        assert hot, name
        for loop in hot:
            sums = [line for line in loop if "vfmadd" in line]
            assert all("zmm" in line for line in sums), name
            stack = [line for line in loop if "(%rsp)" in line]
            assert not [line for line in stack if "mm" in line], name
            assert not stack or "wide" not in name, name
