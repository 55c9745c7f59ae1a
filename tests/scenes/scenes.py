"""Make scenes, random legal calls of the operators, and compare them with the oracle bit by bit."""

import copy
import itertools
from dataclasses import dataclass, replace

import backends
import numpy as np
import pytest

from kvkit.operators import OPERATORS
from kvkit.reference import REFERENCE
from kvkit.tools.vectors import calls as pmx_calls
from kvkit.tools.vectors import draws

DTYPES, FLOATS = draws.DTYPES, tuple(draws.FP_TYPES)
GROUPS = (2, 4, 8, 16, 32, 64)
INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min


@dataclass(frozen=True)
class Formats(draws.Formats):
    """Holds the types of a call, and head sizes to draw from."""

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


class Call(draws.Call):
    """Holds a legal call: its inputs, and its attributes apart or among them."""

    @property
    def operator(self):
        return OPERATORS[self.name]

    @property
    def kind(self):
        kind = "dynamic" if "dynamic" in self.name else "static"
        return f"{kind}_cache" if "cache_attention" in self.name else kind

    def copy(self):
        return copy.deepcopy(self)

    def but(self, **changes):
        """Return the call with some arguments replaced, or with more: attributes, if it has some apart."""
        inputs = {n: value for n, value in changes.items() if n in self.inputs or not self.attributes}
        attributes = {n: value for n, value in changes.items() if n not in inputs}
        return replace(self, inputs=self.inputs | inputs, attributes=self.attributes | attributes)

    def run(self, by=None, **more):
        """Run the call by the backend, or by the package `by`; return its results."""
        named = self.inputs | self.attributes | more
        first = [named.pop(array.name, None) for array in self.operator.inputs if not array.keyword]
        return self.operator.function((by or backends.operators).__name__)(*first, **named)

    def by_reference(self, **more):
        """Return the results of the reference, which changes the call's cache and scale."""
        return REFERENCE[self.name](**self.inputs, **self.attributes, **more)


@dataclass
class Scene(Call):
    """Holds a call that appends to a cache and loads it."""

    formats: Formats = None

    def oracle(self):
        """Return (key, value, cache, scale) by the reference; the scene does not change."""
        after = self.copy()
        return *after.by_reference(), after["cache"], after["scale"]

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


# Scenes


def drawn(make, rng, formats, *how, dim=None, **more):
    call = make(rng, formats, *how, dim=dim or int(rng.choice(formats.dims)), **more)
    return Scene(call.name, call.inputs, call.attributes, formats)


def static(rng, formats, layout=0, batch=2, start=3, seqlen=2, **more):
    return drawn(pmx_calls.static_append, rng, formats, layout, batch, start, seqlen, **more)


def edges(page_size):
    """Return (start_pos, seqlen) of eight sequences: around the edge of a page, empty ones, a long one."""
    p = page_size
    return [(0, p - 1), (p, 1), (0, 0), (p + 1, 0), (p - 1, 2), (0, p + 1), (2 * p, p), (5 * p + 1, 1)]


def dynamic(rng, formats, layout=0, mode=0, lengths=None, page_size=3, **more):
    lengths = edges(page_size) if lengths is None else lengths
    lengths = [lengths[i] for i in rng.permutation(len(lengths))]
    return drawn(pmx_calls.dynamic_append, rng, formats, layout, mode, lengths, page_size, **more)
