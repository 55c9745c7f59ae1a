"""Make scenes, random legal calls of the operators, and compare them with the oracle bit by bit."""

import copy
import itertools
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import ClassVar

import backends
import ml_dtypes
import numpy as np
import pytest

from kvkit.reference import cache as reference

DTYPES = {
    "fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8),
}  # fmt: skip
FLOATS = ("fp32", "fp16", "bf16")
GROUPS = (2, 4, 8, 16, 32, 64)
INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min
GARBAGE = np.array([-1, INT64_MAX, INT64_MIN, 2**40])
LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Formats:
    """Holds the types of a call: data, cache, scale."""

    t1: str
    t2: str
    t3: str = ""
    bit: int = 0
    group: int = 8
    dims: tuple[int, ...] = (6, 24, 40, 17, 1, 128)

    def __str__(self):
        if not self.bit:
            return f"{self.t1}-in-{self.t2}"
        return f"{self.t1}-in-int{self.bit}-scale-{self.t3}-group{self.group}"


DIMS = {2: (6, 24, 38), 4: (12, 24, 40), 8: (8, 24, 40), 16: (16, 48), 32: (32, 96), 64: (64, 128)}
MOVED = [Formats(t1, t2) for t1 in FLOATS for t2 in FLOATS] + [Formats("int8", "int8")]
# Every two of T1, bits, T3 and group together.
QUANTIZED = [
    Formats(t1, "int8", FLOATS[(i + k) % 3], (8, 4)[(i + k) % 2], group, DIMS[group])
    for i, t1 in enumerate(FLOATS)
    for k, group in enumerate(GROUPS)
]
# A narrow, a usual and a wide group; what is compiled for others is slow.
QUICK_QUANTIZED = [formats for formats in QUANTIZED if formats.group in (2, 8, 64)]
ODD_GROUPS = [
    Formats("fp32", "int8", "fp32", 8, 1, (6, 17)), Formats("fp16", "int8", "fp16", 8, 3, (6, 24)),
    Formats("bf16", "int8", "fp16", 8, 5, (40, 5)), Formats("fp32", "int8", "bf16", 8, 24, (24, 48)),
    Formats("fp32", "int8", "fp16", 4, 6, (6, 24)), Formats("fp16", "int8", "fp32", 4, 10, (40,)),
    Formats("bf16", "uint8", "bf16", 4, 40, (40,)),
]  # fmt: skip
QUICK_FORMATS = MOVED + QUICK_QUANTIZED + ODD_GROUPS
ALL_FORMATS = QUICK_FORMATS + [formats for formats in QUANTIZED if formats not in QUICK_QUANTIZED]
DYNAMIC_AXES = (
    "row layer kv head dim", "layer row kv head dim", "layer kv row head dim", "layer kv head row dim",
)  # fmt: skip
STATIC_AXES = ("sequence layer kv row head dim", "layer sequence kv head row dim")
OPERATORS = {
    "static": ("key_value_cache", reference.key_value_cache),
    "dynamic": ("dynamic_batching.key_value_cache", reference.dynamic_key_value_cache),
}


@dataclass
class Arguments:
    """Holds the arguments of one legal call; `inputs` are in the operator's order."""

    operators: ClassVar[dict] = {}  # by kind: (name, the reference)
    kind: str
    inputs: dict
    attrs: dict

    def __getitem__(self, name):
        return self.inputs[name]

    def copy(self):
        return copy.deepcopy(self)

    def but(self, **changes):
        """Return the call with some inputs or attributes replaced."""
        inputs = {name: changes.pop(name, value) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, attrs={**self.attrs, **changes})

    def run(self, by=None, **more):
        """Run the call by the backend, or by the package `by`; return its results."""
        operator = attrgetter(self.operators[self.kind][0])(by or backends.operators)
        return operator(*self.inputs.values(), **self.attrs, **more)


@dataclass
class Scene(Arguments):
    """Holds a call that appends to a cache and loads it."""

    operators: ClassVar[dict] = OPERATORS
    formats: Formats

    def oracle(self):
        """Return (key, value, cache, scale) by the reference; the scene does not change."""
        after = self.copy()
        key, value = OPERATORS[self.kind][1](*after.inputs.values(), **after.attrs)
        return key, value, after["cache"], after["scale"]

    def results(self, **more):
        """Return (key, value, cache, scale) by the backend, which changes the scene's cache and scale."""
        return *self.run(**more), self["cache"], self["scale"]


# Which cases are quick


def first_quick(cases, count=1):
    """Return parameters; only the first ones are quick, the others prove the same for other formats."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] * (i >= count))
        for i, case in enumerate(cases)
    ]


def every_two(*axes):
    """Return a grid of parameters; the quick ones have every pair of values of two axes."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    rest, quick = list(itertools.product(*axes)), []
    left = set().union(*map(pairs, rest))
    while left:
        quick.append(max(rest, key=lambda case: len(pairs(case) & left)))
        rest.remove(quick[-1])
        left -= pairs(quick[-1])
    return first_quick(quick + rest, len(quick))


# Comparison, by bits


def raw(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same(got, expected, label=""):
    if got is None or expected is None:
        assert got is expected, label
        return
    assert got.dtype.itemsize == expected.dtype.itemsize, label
    assert got.shape == expected.shape, label
    if not np.array_equal(raw(got), raw(expected)):
        size = expected.dtype.itemsize
        where = np.flatnonzero((raw(got) != raw(expected)).reshape(-1, size).any(axis=1))
        first = np.unravel_index(where[0], expected.shape)
        count = f"{len(where)} of {expected.size} differ"
        raise AssertionError(f"{label}: {count}, first {first}: {got[first]!r}, not {expected[first]!r}")


def assert_all_same(got, expected):
    for label, a, b in zip(("key", "value", "cache", "scale"), got, expected, strict=True):
        assert_same(a, b, label)


def check(scene):
    """Check that kvkit does to the scene what the reference does, and that inputs do not change."""
    expected, before = scene.oracle(), scene.copy()
    assert_all_same(scene.results(), expected)
    for name, array in scene.inputs.items():
        if name not in ("cache", "scale") and isinstance(array, np.ndarray):
            assert_same(array, before[name], name)


# Data


def largest(formats):
    """Return the largest magnitude whose scale is finite in T3 (0 times inf would make NaN)."""
    top = float(ml_dtypes.finfo(DTYPES[formats.t1]).max)
    return min(top, 60000.0 * reference.LARGEST_CODE[formats.bit]) if formats.t3 == "fp16" else top


def numbers(rng, shape, dtype, group=1, top=None, qmax=127):
    """Return finite numbers, each group normal, zeros, ties of codes, subnormal, huge, or of many sizes."""
    if dtype.kind == "i" or dtype.kind == "u":
        return rng.integers(0, 256, shape).astype(np.uint8).view(dtype)
    info = ml_dtypes.finfo(dtype)
    top = float(info.max) if top is None else top
    x = rng.standard_normal((int(np.prod(shape)) // group, group))
    style = rng.integers(0, 8, len(x))
    x[style == 1] = 0
    ties = rng.integers(-2 * qmax, 2 * qmax + 1, x.shape) / 2
    ties[:, rng.integers(group)] = qmax
    x[style == 2] = (ties * 2.0 ** rng.integers(-9, 9, (len(x), 1)))[style == 2]
    x[style == 3] = rng.integers(-3, 4, x.shape)[style == 3] * float(info.smallest_subnormal)
    x[style == 4] = (rng.uniform(-1, 1, x.shape) * top)[style == 4]
    x[style == 5] *= 2.0 ** rng.integers(-20, 12, x.shape)[style == 5]
    x[rng.random(x.shape) < 0.05] = -0.0
    return np.clip(x, -top, top).reshape(shape).astype(np.float32).astype(dtype)


def tokens(rng, formats, shape):
    group = formats.group if formats.bit else 1
    return numbers(rng, shape, DTYPES[formats.t1], group, None if formats.t1 == "int8" else largest(formats),
                   reference.LARGEST_CODE.get(formats.bit, 127))  # fmt: skip


def cache_and_scale(rng, formats, axes, sizes):
    """Return a cache and scale of random contents: all bytes as codes, all sizes of scales."""
    shape = [sizes[axis] for axis in axes.split()]
    width = shape[-1] // 2 if formats.bit == 4 else shape[-1]
    cache = numbers(rng, (*shape[:-1], width), DTYPES[formats.t2])
    if not formats.bit:
        return cache, None
    return cache, numbers(rng, (*shape[:-1], shape[-1] // formats.group), DTYPES[formats.t3])


# Scenes


def attributes(formats, repeat, layout):
    return {"num_layer": LAYERS, "layer_idx": LAYER, "quant_bit": formats.bit, "quant_group": formats.group,
            "num_repeat": repeat, "cache_layout": layout}  # fmt: skip


def static(rng, formats, layout=0, batch=2, start=3, seqlen=2, heads=2, dim=None, repeat=1):
    dim = dim or int(rng.choice(formats.dims))
    sizes = {"sequence": batch + 2, "row": start + seqlen + 2}
    sizes |= {"layer": LAYERS, "kv": 2, "head": heads, "dim": dim}
    cache, scale = cache_and_scale(rng, formats, STATIC_AXES[layout], sizes)
    key, value = (tokens(rng, formats, (batch, seqlen, heads, dim)) for _ in range(2))
    inputs = {"current_key": key, "current_value": value, "start_pos": start, "cache": cache, "scale": scale}
    return Scene("static", inputs, attributes(formats, repeat, layout), formats)


def edges(page_size):
    """Return (start_pos, seqlen) of eight sequences: around the edge of a page, empty ones, a long one."""
    p = page_size
    return [(0, p - 1), (p, 1), (0, 0), (p + 1, 0), (p - 1, 2), (0, p + 1), (2 * p, p), (5 * p + 1, 1)]


def dynamic(rng, formats, layout=0, mode=0, lengths=None, page_size=3, heads=2, dim=None, repeat=1):
    lengths = edges(page_size) if lengths is None else lengths
    lengths = [lengths[i] for i in rng.permutation(len(lengths))]
    dim = dim or int(rng.choice(formats.dims))
    starts, rows = pages(rng, lengths, page_size) if mode else offsets(rng, lengths)
    sizes = {"row": rows, "layer": LAYERS, "kv": 2, "head": heads, "dim": dim}
    cache, scale = cache_and_scale(rng, formats, DYNAMIC_AXES[layout], sizes)
    start_pos, seqlens = np.array(lengths, np.int64).reshape(-1, 2).T.copy()
    seqstarts, kvstarts = (np.r_[0, np.cumsum(x)].astype(np.int64) for x in (seqlens, start_pos + seqlens))
    key, value = (tokens(rng, formats, (int(seqstarts[-1]), heads, dim)) for _ in range(2))
    inputs = {
        "current_key": key, "current_value": value, "seqstarts": seqstarts, "kvstarts": kvstarts,
        "cachestarts": starts, "start_pos": start_pos,
        "max_seqlen": int(max(seqlens, default=0)), "max_kvlen": int(max(start_pos + seqlens, default=0)),
        "cache": cache, "scale": scale,
    }  # fmt: skip
    attrs = attributes(formats, repeat, layout)
    return Scene("dynamic", inputs, {**attrs, "cache_mode": mode, "page_size": page_size}, formats)


def offsets(rng, lengths):
    """Return offsets of sequences in any order with gaps; one that only reads may share another's past."""
    starts, row = rng.choice(GARBAGE, len(lengths)), 1
    for b in rng.permutation(len(lengths)):
        if sum(lengths[b]):
            starts[b] = row
            row += sum(lengths[b]) + int(rng.integers(0, 3))
    for b, (start_pos, seqlen) in enumerate(lengths):
        hosts = [a for a in range(len(lengths)) if a != b and lengths[a][1] and lengths[a][0] >= start_pos]
        if start_pos and not seqlen and hosts:
            starts[b] = starts[rng.choice(hosts)]
    return starts, max((int(s) + sum(n) for s, n in zip(starts, lengths, strict=True) if sum(n)), default=1)


def pages(rng, lengths, page_size):
    """Return a table of scattered pages: a shared prefix, random last entries, a last page cut short."""
    counts = [-(-sum(n) // page_size) for n in lengths]
    table = rng.choice(GARBAGE, (len(lengths), max(counts, default=0) + 2))
    sharing = [b for b, (start_pos, _) in enumerate(lengths) if start_pos >= page_size]
    own = [(b, p) for b, count in enumerate(counts) for p in range(count) if p or b not in sharing[1:]]
    own = [own[i] for i in rng.permutation(len(own))]
    partial = [(b, p) for b, p in own if sum(lengths[b]) < (p + 1) * page_size]
    if partial:
        own.remove(partial[0])
        own.append(partial[0])
    rows = row = 1
    for b, p in own:
        table[b, p] = row
        rows = row + min(page_size, sum(lengths[b]) - p * page_size)
        row += page_size + int(rng.integers(0, 3))
    for b in sharing[1:]:
        table[b, 0] = table[sharing[0], 0]
    return table, rows
