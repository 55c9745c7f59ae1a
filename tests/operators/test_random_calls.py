"""Random legal calls of every operator against the reference, in memory of any form; outputs, caches, inputs.

What is written is compared by bits where the specification defines them, and memory around arrays does not
change. The calls are those of `guard_fuzz.py`.
"""

import functools

import attention_scenes
import numpy as np
import pytest
import random_calls
from attention_scenes import TOLERANCE, assert_near
from calls import arrays_of, by_name, like
from random_calls import ATTENDED, GENERATORS
from scenes import ALL_FORMATS, FLOATS, QUICK_FORMATS, Formats, assert_same, first_quick
from surroundings import carve

from kvkit import cpu
from kvkit.calls import positions
from kvkit.reference import REFERENCE

PRODUCTS = "mla_absorb", "mla_expand", "indexer_scores"  # sums in float32
EPS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def limit_of_rotation(expected, x):
    """Return the error that float32 products and the rounding of the output can have."""
    if not x.size:
        return 0
    largest = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
    smallest = {"float16": 2.0**-25}.get(x.dtype.name, 1e-40)
    return 4 * EPS["float32"] * np.maximum(1e-30, largest) + EPS[x.dtype.name] * np.abs(expected) + smallest


def compare(call, results, expected):
    """Compare with the reference, by bits where it has them."""
    for i, (got, right) in enumerate(zip(results, expected, strict=True)):
        if "rotary" in call.name:
            x = arrays_of((call["query"], call["key"]))[i]
            limit = limit_of_rotation(right, 4 * x if "cos" in call.inputs else x)
            assert (np.abs(got.astype(np.float64) - right) <= limit).all()
        elif "attention" in call.name or call.name in PRODUCTS:
            assert_near(got, np.asarray(right), TOLERANCE[got.dtype.name] if i == 0 else 2e-5)
        else:
            assert_same(got, right.astype(got.dtype), i)


def check(rng, call):
    """Check the operator against the reference, also with given outputs, and that inputs do not change."""
    after = call.copy()
    if "lses" in after.inputs:  # FlashAttention 2 says +inf of a query without keys
        for lse in after["lses"]:
            lse[lse == np.inf] = -np.inf
    with np.errstate(all="ignore"):
        expected = arrays_of(REFERENCE[call.name](**after.inputs))
    given, checks = random_calls.moved(rng, call)
    results = given.run()
    if call.operator.outputs:
        made = [array for array in arrays_of(results) if array is not None]
        compare(call, made, expected[: len(made)])
        for name, result in zip(call.operator.returned({}), arrays_of(results), strict=False):
            if any(array.inout and array.name == name for array in call.operator.inputs):
                assert result is given.inputs.get(name)
    for array in call.operator.inputs:
        if isinstance(call.inputs.get(array.name), np.ndarray) and array.name != "lses":
            assert_same(np.asarray(given[array.name], call[array.name].dtype), after[array.name], array.name)
    for untouched in checks:
        untouched()
    check_outputs(rng, call)


def blank(array):
    return np.full(array.nbytes, 255, np.uint8).view(array.dtype).reshape(array.shape)


def check_outputs(rng, call):
    """Check that given outputs amid other memory get the bits of new ones."""
    if call.operator.outputs:
        results = call.copy().run()
        offset = 0 if "ascend" in call.name else int(rng.integers(9))
        made = [array if array is None else carve(blank(array), offset) for array in arrays_of(results)]
        views = [pair if pair is None else pair[0] for pair in made]
        again = arrays_of(call.run(out=like(results, views)))
        for got, pair, right in zip(again, made, arrays_of(results), strict=True):
            if right is not None:
                assert got is pair[0]
                assert_same(got, right)
                pair[1]()


def parts(*numbers):
    """Return the parts of random calls, of which the first is quick."""
    return pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in numbers)])


@pytest.mark.parametrize("generator", GENERATORS[:-3], ids=lambda each: each.__name__)
@parts(1, 2)
def test_operators(generator, part):
    for seed in range(40 * part, 40 * (part + 1)):
        rng = np.random.default_rng([seed, 1])
        call = generator(rng)
        call.inputs.pop("return_lse", None)
        check(rng, call)


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("generator", [random_calls.rotary, random_calls.bias], ids=["rotary", "bias"])
def test_plain_forms(generator, monkeypatch):
    """What is written without vectors has the same bits."""
    found = {}
    for plain in (False, True):
        if plain:
            row = cpu.positions.alibi.row_of_mask
            for name in ("heads_of", "halves_of"):
                compile_heads = functools.partial(getattr(cpu.positions.rotary, name), plain=True)
                monkeypatch.setattr(cpu.positions.rotary, name, compile_heads)
            monkeypatch.setattr(cpu.positions.alibi, "row_of_mask", functools.partial(row, plain=True))
            positions.rotations.clear()
        for seed in range(120):
            results = arrays_of(generator(np.random.default_rng([seed, 1])).run())
            for i, (got, right) in enumerate(zip(results, found.setdefault(seed, results), strict=True)):
                assert_same(got, right, (seed, i))


def check_attention(rng, call):
    """Check that outputs are no worse than code that rounds each step, and that lse changes none."""
    memory = by_name(call)
    given, checks = random_calls.moved(rng, memory)
    wide_mask = call["attn_mask"] is not None and call["attn_mask"].dtype.itemsize > call["query"].itemsize
    exact = call.inputs.get("scale") is None or call.attributes["quant_group"] % 8 == 0
    there = call.but(**{name: given[name] for name in call.inputs})
    attention_scenes.check(call, exact and not wide_mask, there)
    for untouched in checks:
        untouched()
    check_outputs(rng, memory.but(return_lse=True))
    assert_same(memory.copy().run(), memory.copy().run(return_lse=True)[0])


@pytest.mark.parametrize("kind", attention_scenes.KINDS)
@parts(1, 2, 3, 4)
def test_attention(kind, part):
    for i in range(3 * len(ATTENDED)):
        if i % 5 == part:
            rng, formats = np.random.default_rng([i, len(kind)]), ATTENDED[i % len(ATTENDED)]
            check_attention(rng, random_calls.attention(rng, kind, formats))


@pytest.mark.slow
@pytest.mark.parametrize("t1", FLOATS)
@pytest.mark.parametrize("kind", ["static_cache", "dynamic_cache"])
def test_attention_over_every_format(kind, t1):
    grid = [Formats(t1, t2) for t2 in FLOATS]
    grid += [Formats(t1, "int8", t3, bit, group) for t3 in FLOATS for bit in (8, 4)
             for group in (2, 4, 8, 16, 32, 64, 128)]  # fmt: skip
    for i, formats in enumerate(grid):
        for seed in range(5):
            rng = np.random.default_rng([i, seed])
            check_attention(rng, random_calls.attention(rng, kind, formats))


@pytest.mark.parametrize("formats", first_quick(ALL_FORMATS, len(QUICK_FORMATS)), ids=str)
def test_key_value_cache(formats):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        check(rng, by_name(random_calls.key_value_cache(rng, formats)))
