"""Narrow products of codes by integers, where the processor has them, against float64; calls without, too."""

import functools
import itertools

import numba
import numpy as np
import pytest
from attention_scenes import TOLERANCE
from borders import BEGIN, END, at_border, guarded, needs_borders
from kernel_steps import run_step
from numpy.testing import assert_allclose, assert_array_equal
from scenes import DTYPES, every_two

import kvkit
from kvkit import formats
from kvkit.calls.prepared import forget_all
from kvkit.cpu import machine
from kvkit.cpu.attention.engines import integers, wide_integers
from kvkit.cpu.attention.params import WIDE_BLOCK
from kvkit.cpu.attention.work_items import WIDE
from kvkit.cpu.simd.wide_integers import LOST

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not machine.has_integers(), reason="the processor multiplies no integers so"),
]
QUERY, WEIGHT = 1 / 32639 / 254, 1 / 32767  # of the largest: what fixed point is whole multiples of
FORMS = [
    ("int8", "float16", 8, 128), ("int8", "bfloat16", 32, 64), ("int8", "float32", 128, 128),
    ("int8", "float16", 256, 128), ("int4", "float16", 32, 128), ("int4", "float32", 8, 128),
    ("q8_0", None, 0, 64), ("q4_0", None, 0, 128),
]  # fmt: skip
forms = pytest.mark.parametrize(
    ("rows", "form"),
    [
        *((1 << i % 4, FORMS[i]) for i in (0, 1, 4, 6)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *((1 << i % 4, FORMS[i]) for i in (2, 3, 5, 7)),
                (4, FORMS[0]),
                (8, FORMS[4]),
                (4, FORMS[7]),
            )
        ),
    ],
    ids=str,
)


def same(array):
    return array


class Rows:
    """Codes at scattered places of a cache, all else in it NaN, and what they stand for.

    A `spike` is how many times as large as those of other tokens the scales of some are.
    """

    def __init__(self, rng, form, tokens, place=same, spike=1):
        stored, cell, group, width = form
        self.dim = max(2 * width, group)
        capacity = 2 * tokens + 1
        self.numbers = rng.permutation(capacity)[:tokens]
        size = group or 32
        largest = 127 if stored in ("int8", "q8_0") else 7
        codes = rng.integers(-largest - 1, largest + 1, (tokens, self.dim)).astype(np.int8)
        scales = rng.uniform(-1, 1, (tokens, self.dim // size)).astype(np.float32)
        scales[rng.integers(0, tokens, 2)] *= spike
        kind = kvkit.formats.BY_NAME[cell or "float16"].dtype
        scales = scales.astype(kind)
        self.values = codes * np.repeat(scales.astype(np.float64), size, 1)
        if cell is None:
            blocks = codes.reshape(tokens, -1, 32)
            low, high = np.split((blocks + 8).view(np.uint8), 2, -1)
            data = blocks.view(np.uint8) if stored == "q8_0" else low | high << 4
            whole = np.concatenate([scales[..., None].view(np.uint8), data], -1).reshape(tokens, -1)
            cells = np.zeros((tokens, 1), np.uint8)
        else:
            whole = (codes[:, ::2] & 15 | codes[:, 1::2] << 4) if stored == "int4" else codes
            cells = scales.view(np.uint8).reshape(tokens, -1)
        self.codes, self.cells = (place(self.spread(x, capacity)) for x in (whole, cells))
        self.largest = np.abs(codes).max() * np.abs(scales.astype(np.float64)).max()

    def spread(self, rows, capacity):
        memory = np.full((capacity, rows.shape[1]), 0xFF, np.uint8)
        memory[self.numbers] = rows.view(np.uint8)
        return memory

    def numbers_for(self, count):
        """Return row numbers, the last one repeated as a walk does."""
        return np.append(self.numbers, self.numbers[-1:].repeat(count - len(self.numbers))).astype(np.int64)

    def fields(self, side, count, numbers, ahead):
        """Return the fields of params, block and tile that say where the first rows of a side lie."""
        params = {f"{side}s.scale_row": self.cells.shape[1], f"{side}s.padded_dim": self.dim}
        block = {f"{side}_row": self.codes.shape[1], f"{side}_ids": numbers}
        block["prefetch_in_scores" if side == "key" else "prefetch_in_sums"] = ahead
        return params, block, {f"{side}s": self.codes, f"{side}_scales": self.cells, "count": count}


def soon(rng, count):
    return rng.integers(-(2**63), 2**63 - 1, count)


def check_scores(rng, rows, form, tokens, place=same):
    cache, whole = Rows(rng, form, tokens, place), -(-tokens // 8) * 8
    numbers, ahead = place(cache.numbers_for(whole)), place(soon(rng, whole))
    queries = place((rng.standard_normal((rows, cache.dim)) * 2.0 ** rng.integers(-9, 9)).astype(np.float32))
    fixed, untouched_queries = guarded(((5 * cache.dim // 4 + 16) * rows,))
    params, block, tile = cache.fields("key", tokens, numbers, ahead)
    run_step(integers.queries(rows, *form), params, {}, {"queries": queries, "engine_queries": fixed})
    scores, untouched = guarded((whole, rows))
    tile |= {"engine_queries": fixed, "scores": scores}
    run_step(integers.scores(rows, True, *form), params, block, tile)
    untouched_queries()
    untouched()
    expected = cache.values @ queries.T.astype(np.float64)
    largest = np.abs(queries).max(1)
    bound = (0.5 * QUERY + 2**-20) * np.abs(cache.values).sum(1)[:, None] * largest
    assert (np.abs(scores[:tokens] - expected) <= bound).all()


class Block:
    """Scores of a block [tokens, rows], what was there before, and what both come to.

    What was there before is weighed against the scores.
    """

    def __init__(self, rng, rows, cache, tokens, before):
        self.logits = (rng.standard_normal((tokens, rows)) * 3).astype(np.float32)
        self.logits[0] = -np.inf
        self.start = rng.standard_normal((rows, cache.dim)).astype(np.float32)
        self.state = np.zeros((2, max(rows, 16)), np.float32)
        self.state[0] = before
        self.state[1, :rows] = 1
        self.top = np.maximum(self.logits.max(0), np.float32(before))
        self.weights = np.exp(self.logits.astype(np.float64) - self.top)
        self.shrink = np.exp(before - self.top.astype(np.float64))
        self.expected = self.start * self.shrink[:, None] + self.weights.T @ cache.values
        units = 1.5 * WEIGHT * self.weights.max(0)[:, None]
        self.bound = tokens * units * cache.largest + 1e-5 * np.abs(self.expected).max()

    def check(self, sums):
        assert (np.abs(sums - self.expected) <= self.bound).all()
        assert_array_equal(self.state[0][: len(self.top)], self.top)
        total = self.state[1].reshape(-1, len(self.top)).sum(0)
        assert_allclose(total, self.shrink + self.weights.sum(0), rtol=1e-5, atol=len(self.logits) * WEIGHT)


def check_sums(rng, rows, form, tokens, place=same, before=0.0, spike=1, most=2**20):
    """Check scores and sums; return False if scales are too uneven or values above `most`."""
    cache, whole = Rows(rng, form, tokens, place, spike), -(-tokens * rows // 16) * 16 // rows
    numbers, ahead = place(cache.numbers_for(whole)), place(soon(rng, whole))
    block = Block(rng, rows, cache, tokens, before)
    scores = np.full((whole, rows), -np.inf, np.float32)
    scores[:tokens] = block.logits
    scores = place(scores)
    sums, untouched = guarded(block.start.shape, block.start)
    factors, memory = place(np.zeros(32, np.float32)), np.zeros(max(32768, 256 * cache.dim), np.uint8)
    params, of_block, tile = cache.fields("value", tokens, numbers, ahead)
    tile |= {"scores": scores, "o": sums, "alpha": factors, "m": block.state[0], "l": block.state[1]}
    params["most_value"] = most
    after = run_step(
        integers.sums(rows, True, *form), params, of_block | {"wide_values": memory, "rows": rows}, tile
    )
    untouched()
    if after["uneven"]:
        assert_array_equal(scores[:tokens], block.logits)
        assert_array_equal(sums, block.start)
        return False
    block.check(sums)
    return True


def check_wide(rng, form, tokens, place=same, before=0.0, spike=1, most=2**20):
    """Check scores and sums of 32 rows; queries lose at most 2^-17 of their length."""
    cache, whole = Rows(rng, form, tokens, place, spike), -(-tokens // 8) * 8
    numbers = place(cache.numbers_for(whole))
    queries = (rng.standard_normal((cache.dim, WIDE)) * 2.0 ** rng.integers(-9, 9)).astype(np.float16)
    queries, scale = place(queries.astype(np.float32)), place(np.array([0.7], np.float32))
    fixed, untouched_queries = guarded((32 * cache.dim + 64,))
    rest, number = np.zeros((max(cache.dim, WIDE_BLOCK), WIDE), np.float32), np.zeros(1, np.float32)
    keys, untouched_keys = guarded((whole, cache.dim))
    scores, untouched = guarded((whole, WIDE))
    values, untouched_values = guarded((WIDE_BLOCK, cache.dim))
    params = {
        f"{side}.{name}": number
        for side in ("keys", "values")
        for name, number in {
            "address": cache.codes.ctypes.data, "row": cache.codes.shape[1],
            "scales": cache.cells.ctypes.data, "scale_row": cache.cells.shape[1], "padded_dim": cache.dim,
        }.items()
    }  # fmt: skip
    params["most_value"] = most
    of_block = {"key_row_ids": numbers, "value_row_ids": numbers, "count": tokens}
    of_block |= {"wide_keys": keys, "wide_values": values}
    tile = {"queries": queries, "engine_queries": fixed, "scores": scores, "count": tokens, "factor": scale}
    params["workspace.lines"] = 0
    of_block |= {"workspace": rest, "number": number}
    tile["rest"] = run_step(wide_integers.queries(*form), params, of_block, tile)["tile"]["rest"]
    loaded = run_step(wide_integers.load(form[0], *form), params, of_block, tile)
    run_step(wide_integers.scores(*form), params, of_block, tile)
    for check in (untouched_queries, untouched_keys, untouched, untouched_values):
        check()
    lost = LOST * np.linalg.norm(queries, axis=0) + 2**-20 * np.abs(queries).max(0)
    right = scale * (cache.values @ queries.astype(np.float64))
    assert (
        np.abs(scores[:tokens] - right) <= scale * np.linalg.norm(cache.values, axis=1)[:, None] * lost
    ).all()

    block = Block(rng, WIDE, cache, tokens, before)
    scores[:tokens] = block.logits
    sums, untouched = guarded(block.start.T.shape, block.start.T)
    if loaded["uneven"]:
        return False
    factors = place(np.zeros(64, np.float32))
    tile |= {"o": sums, "alpha": factors, "m": block.state[0], "l": block.state[1]}
    run_step(wide_integers.sums(*form), params, of_block, tile)
    untouched()
    block.check(sums.T)
    return True


@forms
def test_products(rows, form, rng):
    for tokens in (1, 8, 29, 64):
        check_scores(rng, rows, form, tokens)
        assert check_sums(rng, rows, form, tokens)
    check_sums(rng, rows, form, 16, before=40.0)  # a block that hardly matters
    check_sums(rng, rows, form, 16, before=-40.0)
    assert not check_sums(rng, rows, form, 64, spike=1e4)
    assert not check_sums(rng, rows, form, 64, most=4)


@pytest.mark.parametrize(
    "form", [pytest.param(each, marks=[pytest.mark.slow] * (i % 2)) for i, each in enumerate(FORMS)], ids=str
)
def test_wide_products(form, rng):
    for tokens in (1, 29, 128):
        assert check_wide(rng, form, tokens)
    check_wide(rng, form, 16, before=40.0)
    check_wide(rng, form, 16, before=-40.0)
    assert not check_wide(rng, form, 64, spike=1e4)
    assert not check_wide(rng, form, 64, most=4)


@needs_borders
@pytest.mark.parametrize("where", [BEGIN, END])
def test_products_read_nothing_outside(where, rng):
    def place(array):
        return at_border(array, where)

    for i, form in enumerate(FORMS):
        check_scores(rng, 1 << i % 4, form, 5, place)
        check_sums(rng, 1 << i % 4, form, 5, place)
        check_wide(rng, form, 5, place)


def attended(query, cache, scale, codes, group, **given):
    sizes = {"num_heads": query.shape[2], "num_kv_heads": cache.shape[4], "head_dim": query.shape[3]}
    new = np.zeros((len(query), 1, cache.shape[4], query.shape[3]), query.dtype)
    return kvkit.multi_head_cache_attention(
        query, new, new, cache=cache.copy(), scale=scale.copy(), start_pos=cache.shape[3] - 1,
        quant_bit=codes, quant_group=group, cache_layout=0, **sizes, **given,
    )  # fmt: skip


def problem(rng, bits, group, heads, length=203, dim=128):
    cache = rng.integers(-127, 128, (2, 1, 2, length, 2, dim * bits // 8)).astype(np.int8)
    scale = (rng.uniform(0.2, 1, (*cache.shape[:-1], dim // group)) / 2 ** (bits - 1)).astype(np.float16)
    return rng.standard_normal((2, 1, heads, dim)).astype(np.float16), cache, scale


def without(monkeypatch, function):
    with monkeypatch.context() as patch:
        patch.setattr(machine, "has_integers", lambda: False)
        forget_all()  # calls of one form would be those with integers
        results = function()
    forget_all()
    return results


@pytest.mark.parametrize("given", [{}, {"softcap": 5.0}, {"is_alibi": True}, {"window": (50, 0)}], ids=str)
@pytest.mark.parametrize(("bits", "group", "heads"), [(8, 8, 8), (4, 32, 16), (8, 32, 36)])
def test_attention_is_as_without(bits, group, heads, given, rng, monkeypatch):
    """At large scores, too: what is between is the fixed point of queries, and of weights."""
    query, cache, scale = problem(rng, bits, group, heads)
    for size in (1, 10):
        run = functools.partial(
            attended, query, cache, scale, bits, group, softmax_scale=size / 128**0.5, **given
        )
        got, expected = run(), without(monkeypatch, run)
        scores = size / 128**0.5 * np.linalg.norm(query.astype(np.float64), axis=-1).max() * 128**0.5
        assert_allclose(
            got.astype(float), expected.astype(float), atol=2**-14 * max(1, scores) + 2**-11, rtol=0
        )
        assert not np.array_equal(got, expected)  # these are two paths


@pytest.mark.parametrize("where", ["query", "key scale", "value scale"])
@pytest.mark.parametrize("number", [np.nan, -np.inf], ids=str)
@pytest.mark.parametrize(("hidden", "heads"), [(False, 8), (True, 8), (True, 40)])
def test_what_is_not_finite_ends_as_without(where, number, hidden, heads, rng, monkeypatch):
    query, cache, scale = problem(rng, 8, 8, heads)
    mask = np.ones((1, cache.shape[3]), bool)
    mask[:, 7] = not hidden
    if where == "query":
        query[1, 0, 3, 5] = number
    else:
        scale[1, 0, int(where == "value scale"), 7, 1, 3] = number
    given = {} if where == "query" else {"attn_mask": mask}

    def run():
        return attended(query, cache, scale, 8, 8, **given)

    got, expected = run(), without(monkeypatch, run)
    assert_array_equal(np.isfinite(got), np.isfinite(expected))
    assert_allclose(got.astype(float), expected.astype(float), atol=2**-10)


@pytest.mark.parametrize("weight", [0.0, -8.0])
@pytest.mark.parametrize("heads", [8, 40])
def test_a_huge_scale_costs_other_values_nothing(heads, weight, rng):
    """Values of a token are 10,000 times as large: errors are those of weights, each times its own value."""
    query, cache, scale = problem(rng, 8, 8, heads, length=64)
    cache[:, :, 1, 7, :, ::2] = 0
    cache[:, :, :, -1] = 0  # the new token, as it will be
    scale[:, :, 1, 7] *= 1e4
    scale[:, :, :, -1] = 0
    bias = np.zeros((1, 64), np.float32)
    bias[:, 7] = weight
    got = attended(query, cache, scale, 8, 8, attn_mask=bias, softmax_scale=2**-6)
    keys, values = (
        (cache[:, 0, side] * np.repeat(scale[:, 0, side].astype(np.float64), 8, -1)).repeat(heads // 2, 2)
        for side in (0, 1)
    )
    scores = np.einsum("bhd,bthd->bht", query[:, 0].astype(np.float64), keys) * 2**-6 + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1)[..., None]
    expected = np.einsum("bht,bthd->bhd", weights, values) / total
    magnitude = np.abs(values).sum(1) / total
    error = np.abs(got[:, 0] - expected)
    assert (error <= WEIGHT * magnitude + 2**-11 * np.abs(expected) + 2**-24).all()


def assert_within_the_tolerance(got, scores, values, dtype):
    """The specification's, and what tiles add beside bfloat16, which round weights to 8 bits."""
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    expected = weights @ values
    tolerance = TOLERANCE[dtype.name] * np.maximum(1, np.abs(scores).max(1, keepdims=True) / 8)
    in_tiles = machine.tiles() and dtype.name == "bfloat16" and len(scores) > 8
    rounding = 2**-9 * (weights @ np.abs(values)) if in_tiles else 0
    assert (np.abs(got - expected) <= tolerance * np.maximum(1, np.abs(expected)) + rounding).all()


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "group"),
    every_two((DTYPES["fp16"], DTYPES["bf16"]), (1, 4, 33), (0.02, 1, 3, 10), (8, 128)),
    ids=str,
)
def test_large_values_are_within_the_tolerance(dtype, heads, size, group, rng):
    """Normal data times a factor, in windows: the specification's tolerance, whatever the values' size."""
    for (tokens, window), key_size, mean in itertools.product(
        ((60, -1), (400, -1), (400, 40)), (0.3, 1), (0, 1)
    ):
        sides = rng.standard_normal((2, 1, tokens, 1, 128)).astype(np.float32)
        sides = sides[0] * np.float32(key_size), (sides[1] + mean) * np.float32(size)
        codes = [formats.encode(side, f"int8:g{group}:float16") for side in sides]
        keys, values = (formats.decode(each, "int8:float16")[0, :, 0].astype(np.float64) for each in codes)
        query = (rng.standard_normal((1, heads, 128)) * 3).astype(dtype)
        (key, value), scales = ([each[name] for each in codes] for name in ("codes", "scale"))
        options = {"key_scale": scales[0], "value_scale": scales[1], "window": (window, 0)}
        got = kvkit.paged_attention(query, key, value, [[0]], [tokens], **options)[0].astype(np.float64)
        seen = slice(max(0, tokens - 1 - window) if window >= 0 else 0, None)
        scores = query[0].astype(np.float64) @ keys[seen].T / 128**0.5
        assert_within_the_tolerance(got, scores, values[seen], dtype)


CODED = ("int8", 32), ("int4", 32), ("q8_0", 32), ("q4_0", 32), ("int8", 8), ("int8", 64), ("int8", 128)
OUTLIERS = every_two((DTYPES["fp16"], DTYPES["bf16"]), (1, 40), CODED[:3]) + [
    pytest.param(DTYPES[dtype], heads, codes, marks=pytest.mark.slow)
    for dtype, heads, codes in itertools.product(("fp16", "bf16"), (1, 2, 4, 8, 40), CODED)
    if heads in (2, 4, 8) or codes not in CODED[:3]
]


@pytest.mark.parametrize(("dtype", "heads", "codes"), OUTLIERS, ids=str)
def test_small_queries_beside_large_ones_are_within_the_tolerance(dtype, heads, codes, rng):
    """Scales of groups, or of tokens, differ by powers of 2, and so do elements of queries.

    The large ones may meet keys that are nearly 0, so that only the small ones decide.
    """
    (stored, group), length, dim = codes, 190, 128
    bits = 4 if stored in ("int4", "q4_0") else 8
    for spread, size, most in itertools.product((0, 3, 8), (1 / 16, 1, 8), (0, 3, 6)):
        numbers = rng.integers(1 - 2 ** (bits - 1), 2 ** (bits - 1), (2, length, dim))
        shape = [n if rng.random() < 0.5 else 1 for n in (2, length, dim // group)]
        scales = 2.0 ** (most + 1 - bits - rng.uniform(0, spread, shape)) * np.ones((2, length, dim // group))
        scales = scales.astype(np.float16)
        query = size * rng.standard_normal((1, 1, heads, dim))
        query[..., rng.integers(0, dim, 2)] *= 2.0 ** rng.integers(0, 8)
        query, new = query.astype(dtype), np.zeros((1, 1, 1, dim), dtype)
        options = {"num_heads": heads, "num_kv_heads": 1, "head_dim": dim, "start_pos": length - 1}
        options |= cache_of(stored, group, numbers, scales)
        got = kvkit.multi_head_cache_attention(query, new, new, **options)[0, 0].astype(np.float64)
        keys, values = numbers * np.repeat(scales.astype(np.float64), group, -1)
        keys[-1] = values[-1] = 0  # the new token
        scores = query[0, 0].astype(np.float64) @ keys.T / dim**0.5
        assert_within_the_tolerance(got, scores, values, dtype)


def cache_of(stored, group, numbers, scales):
    """Return a cache [1, 1, 2, tokens, 1, ..] of these codes, and the attributes that describe it."""
    if stored.startswith("int"):
        bits = int(stored[3:])
        data = numbers if bits == 8 else numbers[..., ::2] & 15 | numbers[..., 1::2] << 4
        data, scale = (x[None, None, :, :, None] for x in (data.astype(np.int8), scales))
        return {"cache": data, "scale": scale.copy(), "quant_bit": bits, "quant_group": group}
    blocks = numbers.reshape(*numbers.shape[:-1], -1, 32)
    low, high = np.split((blocks + 8).astype(np.uint8), 2, -1)
    data = blocks.astype(np.int8).view(np.uint8) if stored == "q8_0" else low | high << 4
    data = np.concatenate([scales[..., None].view(np.uint8), data], -1).reshape(*numbers.shape[:-1], -1)
    return {"cache": data[None, None, :, :, None].copy(), "scale": None, "quant_format": stored}


def test_threads_do_not_matter(rng):
    query, cache, scale = problem(rng, 8, 8, 8, length=15000)
    most, results = numba.get_num_threads(), []
    for count in (1, most):
        numba.set_num_threads(count)
        results.append(attended(query, cache, scale, 8, 8))
    numba.set_num_threads(most)
    assert_array_equal(*results)
