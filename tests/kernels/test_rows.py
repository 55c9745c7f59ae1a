"""The machine code of `rows`: vector, streaming and plain forms, called by address, write the same bytes."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
import scenes
from scenes import DIMS, DTYPES, FLOATS, GROUPS, MOVED, QUANTIZED, Formats, assert_same, every_two
from surroundings import carve

from kvkit.cpu import machine
from kvkit.cpu.copy.rows import MANY, rows
from kvkit.cpu.simd.panels import groups_in_panel
from kvkit.reference import cache as reference
from kvkit.tools.vectors import draws

REST_OF_GRID = [
    formats
    for t1 in FLOATS
    for bit in (8, 4)
    for t3 in FLOATS
    for group in GROUPS
    if (formats := Formats(t1, "int8", t3, bit, group, DIMS[group])) not in QUANTIZED
]
# Every T1, T3 and number of bits; groups of 2 and 8 are in the tests of every number.
QUICK = {QUANTIZED[i] for i in (5, 9, 16)}
quantized = pytest.mark.parametrize(
    "formats", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in QUANTIZED], ids=str
)
rest_of_grid = pytest.mark.parametrize("formats", REST_OF_GRID, ids=str)
TOKENS, HEADS = 3, 3


def names(formats):
    """Return the formats as `rows` takes them: data, cache, scale, group."""
    if not formats.bit:
        return DTYPES[formats.t1].name, DTYPES[formats.t2].name, None, 0
    return DTYPES[formats.t1].name, f"int{formats.bit}", DTYPES[formats.t3].name, formats.group


def run(direction, formats, packed, cache, scale=None, repeat=1, **form):
    """Call the code over arrays [token, head, element] with any strides between tokens and heads."""
    if direction == "store" and formats.bit and not form.get("plain"):
        form["groups"] = groups_in_panel(formats.group, packed.shape[-1] // formats.group)
    code = rows(direction, *names(formats), **form)
    tokens, heads = cache.shape[:2]
    spot = (0, 0, 0) if scale is None else (scale.ctypes.data, *scale.strides[:2])
    code.ctypes(packed.ctypes.data, *packed.strides[:2], cache.ctypes.data, *cache.strides[:2], *spot,
                tokens, heads, repeat, packed.shape[-1])  # fmt: skip


def blank(shape, dtype, fill=0x55):
    return np.full((*shape[:-1], shape[-1] * dtype.itemsize), fill, np.uint8).view(dtype)


def widths(formats, dim):
    return dim // 2 if formats.bit == 4 else dim, dim // formats.group


def stored(formats, x, plain):
    """Return codes and scales of `x`, written between guards at odd addresses."""
    outer, (width, cells) = x.shape[:2], widths(formats, x.shape[2])
    cache, cache_untouched = carve(blank((*outer, width), DTYPES["int8"]), 1)
    scale, scale_untouched = carve(blank((*outer, cells), DTYPES[formats.t3]), 3)
    run("store", formats, x, cache, scale, plain=plain)
    cache_untouched()
    scale_untouched()
    return cache, scale


def oracle(formats, x):
    with np.errstate(all="ignore"):
        codes, scale = reference.quantize_heads(x, formats.bit, formats.group)
        scale = scale.astype(DTYPES[formats.t3])
    return codes if formats.bit == 8 else reference.pack_int4(codes).view(np.int8), scale


def check_stores(formats, x):
    codes, cells = oracle(formats, x)
    for plain in (False, True):
        cache, scale = stored(formats, x, plain)
        assert_same(scale, cells, f"scale, plain={plain}")
        assert_same(cache, codes, f"cache, plain={plain}")


FEW, ALL = (3, 16, 33), (1, 2, 3, 4, 5, 8, 9, 12, 15, 16, 17, 31, 33)  # each size of panel is compiled apart


def tails(group, counts):
    """Return row sizes of whole panels, and with every kind of rest."""
    return [group * count for count in counts if group * count <= 1100]


def near_ties(rng, formats, shape):
    """Return groups with a maximum, and numbers whose quotients lie within two steps of k + 1/2."""
    dtype, qmax = DTYPES[formats.t1], reference.LARGEST_CODE[formats.bit]
    groups = int(np.prod(shape)) // formats.group
    largest = (2.0 ** rng.uniform(-10, 15, (groups, 1))).astype(dtype)
    step = reference.divide(largest, qmax, dtype).astype(np.float64)
    x = ((rng.integers(-qmax, qmax, (groups, formats.group)) + 0.5) * step).astype(dtype)
    bits = x.view(f"i{dtype.itemsize}")
    bits += rng.integers(-2, 3, x.shape).astype(bits.dtype)
    x = np.clip(x.astype(np.float64), -largest.astype(np.float64), largest.astype(np.float64)).astype(dtype)
    x[np.arange(groups), rng.integers(0, formats.group, groups)] = largest[:, 0]
    return x.reshape(shape)


def check_all_stores(formats, rng, counts=FEW):
    for dim in tails(formats.group, counts):
        check_stores(formats, draws.tokens(rng, formats, (TOKENS, HEADS, dim)))
    for tokens in (1, MANY // 4, MANY // 4 + 1):  # panels of four rows a token: less than MANY, as many, more
        check_stores(formats, draws.tokens(rng, formats, (tokens, 4, formats.group * 16)))
    check_stores(formats, draws.tokens(rng, formats, (11, 8, 512)))
    check_stores(formats, near_ties(rng, formats, (11, 8, 512)))


def check_all_loads(formats, rng, stream=False):
    for dim in tails(formats.group, ALL):
        cache, scale = draws.rows_and_scales(rng, formats, (TOKENS, HEADS, dim), False)
        dtype = DTYPES[formats.t1]
        expected = reference.load_heads(cache, scale, ..., formats.bit, formats.group, dtype)
        forms = [{"plain": True}, {}] + ([{"stream": True}] if stream else [])
        for form in forms:
            # Streaming needs every row to begin at a multiple of 16 bytes.
            out = aligned_blank((TOKENS, HEADS, dim), dtype)
            run("load", formats, out, cache, scale, **form)
            assert_same(out, expected, str(form))


def aligned_blank(shape, dtype):
    """Return rows that begin at multiples of 64 bytes."""
    pitch = -(-shape[-1] * dtype.itemsize // 64) * 64
    buffer = np.full(shape[0] * shape[1] * pitch + 64, 0x55, np.uint8)
    begin = -buffer.ctypes.data % 64
    padded = buffer[begin : begin + shape[0] * shape[1] * pitch].reshape(*shape[:2], pitch)
    return padded[..., : shape[-1] * dtype.itemsize].view(dtype)


@quantized
def test_quantize(formats, rng):
    check_all_stores(formats, rng)


@quantized
def test_dequantize(formats, rng):
    check_all_loads(formats, rng, stream=QUANTIZED.index(formats) % 7 == 0)


@pytest.mark.slow
@rest_of_grid
def test_quantize_in_the_rest_of_the_grid(formats, rng):
    check_all_stores(formats, rng, ALL)


@pytest.mark.slow
@rest_of_grid
def test_dequantize_in_the_rest_of_the_grid(formats, rng):
    check_all_loads(formats, rng)


# Each type to another; random calls store and load all of them.
MOVED_FIRST = sorted(MOVED, key=lambda formats: MOVED.index(formats) not in (1, 5, 6, 9))


@pytest.mark.parametrize("formats", scenes.first_quick(MOVED_FIRST, 4), ids=str)
@pytest.mark.parametrize("direction", ["store", "load"])
def test_move(formats, direction, rng):
    t1, t2 = DTYPES[formats.t1], DTYPES[formats.t2]
    source, target = (t1, t2) if direction == "store" else (t2, t1)
    forms = [{"plain": True}, {}] + ([{"stream": True}] if direction == "load" else [])
    for dim in (1, 2, 15, 16, 17, 31, 32, 33, 40, 128, 200):
        x = draws.numbers(rng, (TOKENS, HEADS, dim), source)
        for form in forms:
            out = aligned_blank(x.shape, target)
            run(direction, formats, *((x, out) if direction == "store" else (out, x)), **form)
            with np.errstate(all="ignore"):
                assert_same(out, x.astype(target), str(form))


# Every number of a 16-bit format


def every_finite(dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # numpy on ARM warns of NaN that signal
        return x[np.isfinite(x.astype(np.float32))]


TYPES, BITS, MORE = ("fp16", "bf16"), (8, 4), (127.0, 1.0, 0.0123, 1e-3)


@pytest.mark.parametrize(
    ("t1", "bit", "largest"),
    every_two(TYPES, BITS, ("max", 3.14159, "smallest"))
    + [pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(TYPES, BITS, MORE)],
)
def test_quantize_every_number(t1, bit, largest):
    """Beside one maximum, in groups of two; the pairs lie in both orders."""
    formats = Formats(t1, "int8", t1, bit, 2)
    dtype, info = DTYPES[t1], ml_dtypes.finfo(DTYPES[t1])
    top = np.array({"max": info.max, "smallest": info.smallest_subnormal}.get(largest, largest)).astype(dtype)
    x = every_finite(dtype)
    x = x[np.abs(x.astype(np.float32)) <= np.float32(top)]
    pairs = np.stack([np.full_like(x, top), x], axis=1)
    pairs = np.concatenate([pairs, pairs[:, ::-1]])
    check_stores(formats, pairs.reshape(1, 1, -1))


@pytest.mark.parametrize(("t1", "bit", "lower"), every_two(("fp16", "bf16"), (8, 4), (False, True)))
def test_every_maximum_in_every_lane(t1, bit, lower, monkeypatch):
    """Also with what a lesser processor has; then infinities and NaNs, which change no other group."""
    if lower:
        monkeypatch.setattr(machine, "has_integers", lambda: False)
        monkeypatch.setattr(sys.modules[__name__], "rows", rows.__wrapped__)
    formats = Formats(t1, "int8", t1, bit, 8)
    top = every_finite(DTYPES[t1])
    top = top[: len(top) // 128 * 128]
    x = np.where(np.arange(8) % 2, 0.4, -0.7) * top.astype(np.float32)[:, None]
    x[np.arange(len(top)), np.arange(len(top)) // 16 % 8] = top
    x = x.astype(DTYPES[t1]).reshape(1, 1, -1)
    check_stores(formats, x)
    marked = x.reshape(-1)[: 16 * 17 * 8].copy().reshape(16, 17 * 8)  # in each group of a panel once
    marked[:, 3], marked[:, 5] = np.nan, np.inf
    got = [side.reshape(-1, side.size // 272) for side in stored(formats, marked.reshape(1, 1, -1), False)]
    expected = [side.reshape(-1, side.size // 272) for side in oracle(formats, marked.reshape(1, 1, -1))]
    others = np.arange(272) % 17 != 0
    for one, other in zip(got, expected, strict=True):
        assert_same(one[others], other[others])
