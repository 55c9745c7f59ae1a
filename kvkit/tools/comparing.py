"""`diff`: where two caches or outputs differ, and why."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvkit.checks.values import integer, number
from kvkit.errors import KvkitError, argument_error, describe
from kvkit.interop import as_numpy
from kvkit.tools import counting
from kvkit.tools.case import stacked
from kvkit.tools.causes import Cause, Trial, tried
from kvkit.tools.source import SIDES, CacheSource
from kvkit.tools.tasks import Lazy, Mapper

NAMES = {"l": "layer", "kv": "side", "b": "page", "n": "position", "h": "head", "c": "element"}
BY_NDIM = {1: "n", 2: "n c", 3: "n h c", 4: "b n h c", 5: "l b n h c"}
BLOCK = 2**25  # bytes that are looked at in one go
MOST_TRIED = 2**22  # bytes of an array that causes are tried on
LEAST_NAMED = 8  # heads, layers or pages that are listed


@dataclass(frozen=True)
class ArrayDifference:
    """Where one array differs from another.

    Attributes
    ----------
    name : str
        Of the array.
    shape : tuple of int
        Its sizes, by axes of these names.
    axes : tuple of str
        "layer", "page", "position", "head", "element".
    differing, total : int
        Elements.
    first : dict
        Its place by axis, and what is there: ``expected`` and ``got``.
    counts : dict of str to dict
        Differing elements by layer, page and head.
    histogram : dict of str to int
        How many elements are so many ulps apart: "1", "2-3", "4-7", ...
    worst : dict
        The head with the largest error, and that error.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    differing: int
    total: int
    first: dict[str, Any]
    counts: dict[str, dict[int, int]]
    histogram: dict[str, int]
    worst: dict[str, Any]

    def lines(self):
        """For a terminal."""
        share = self.differing / self.total
        yield f"{self.name}: {self.differing} of {self.total} elements differ ({share:.2%})"
        place = ", ".join(f"{axis} {self.first[axis]}" for axis in self.axes)
        yield f"  {argument_error(f'first: {place}', self.first['expected'], self.first['got'])}"
        for axis, counts in self.counts.items():
            most = sorted(counts.items(), key=lambda item: -item[1])[:LEAST_NAMED]
            rest = len(counts) - len(most)
            said = ", ".join(f"{i}: {count}" for i, count in sorted(most))
            yield f"  by {axis}: {said}{f', and {rest} more' if rest else ''}"
        if self.histogram:
            yield "  ulps apart: " + ", ".join(
                f"{bucket}: {count}" for bucket, count in self.histogram.items()
            )
        if self.worst:
            place = ", ".join(f"{axis} {i}" for axis, i in self.worst.items() if axis != "error")
            yield f"  worst: {place or 'all'}: off by {self.worst['error']:.6g}"


@dataclass(frozen=True)
class Difference:
    """What `diff` found.

    Attributes
    ----------
    arrays : list of ArrayDifference
        Of arrays that differ.
    causes : list of Cause
        What explains some of that, the best first.
    problems : list of str
        Arrays that only one side has, or that have other shapes.
    compared : int
        Bytes of each side.
    notes : list of str
        What was not tried, and why.
    """

    arrays: list[ArrayDifference] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    compared: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether there is nothing to say."""
        return not self.arrays and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        arrays = [asdict(each) for each in self.arrays]
        causes = [asdict(cause) for cause in self.causes]
        return {
            "equal": self.equal, "compared": self.compared, "arrays": arrays, "causes": causes,
            "problems": self.problems, "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        if self.equal:
            return f"equal: {self.compared} bytes"
        lines = [*self.problems, *(line for each in self.arrays for line in each.lines())]
        return "\n".join([*lines, *map(str, self.causes), *self.notes])


def diff(
    a: Any,
    b: Any,
    *,
    layout_a: Any = None,
    layout_b: Any = None,
    like: Any = None,
    sizes: Mapping[str, int] | None = None,
    axes: str | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    ulp: int = 0,
    plot: str | os.PathLike | None = None,
    advance: Any = None,
    mapper: Mapper = map,
) -> Difference:
    """Compare two caches or outputs, and try to say why they differ.

    Parameters
    ----------
    a, b : path, dict of arrays, or array
        What is expected, and what came. Arrays are compared by name; those of a file or dict that has a
        layout are its keys and values, whatever lies where.
    layout_a, layout_b : str or Layout, optional
        The lines of ``cache`` (or ``cache.0``, ...), or of ``key_cache`` and ``value_cache``.
    like : path or dict of arrays, optional
        Inputs, for causes in the making of codes: under the name of the codes, floats in their place;
        ``before`` (or ``before_NAME``), what was there; ``positions`` and ``rope_base`` of keys.
    sizes : dict, optional
        Of the layouts' axes, as in `kvkit.layouts.view`.
    axes : str, optional
        The axes of arrays without a layout: of ``l b n h c``; the last of these if not given.
    atol, rtol, ulp : float, float, int
        Elements count as equal within ``atol + rtol * |expected|`` or so many ulps. All 0: bits are compared.
    plot : path, optional
        Draw a map of the differing elements, tokens by heads, into this file (needs matplotlib).
    advance : callable, optional
        Told the number of bytes of every piece that is done.
    mapper : callable
        As `map`: calls a function for each array, perhaps elsewhere (`kvkit.integrations.dask.mapper`), where
        files are opened again.

    Returns
    -------
    Difference

    Raises
    ------
    KvkitError
        If an argument is wrong, or there is nothing to compare.

    Examples
    --------
    >>> import numpy as np, kvkit.tools
    >>> expected = np.arange(1, 25, dtype=np.float16).reshape(3, 2, 4)  # [tokens, heads, content]
    >>> got = np.roll(expected, 1, axis=0)
    >>> print(kvkit.tools.diff({"key": expected}, {"key": got}).causes[0])
    key: row off by one (row +1) explains 40 of 40 bytes (100.0%)
    """
    tolerances = number("atol", atol), number("rtol", rtol), integer("ulp", ulp, 0)
    given = Lazy(compared_arrays, a, b, layout_a, layout_b, sizes, like)
    one, two, _ = given.value
    result = Difference()
    common = [name for name in one if name in two]
    if not common:
        raise argument_error("b", f"some array of {', '.join(one) or 'none'}", ", ".join(two) or "none")
    for mine, other, side in ((one, two, "a"), (two, one, "b")):
        result.problems.extend(f"{name}: only in {side}" for name in mine if name not in other)
    maps = {}
    here = advance if mapper is map else None  # elsewhere pieces are not heard of, only arrays
    letters = [letters_of(one[name], axes, layout_a is not None) for name in common]
    work = partial(one_array, given, tolerances=tolerances, drawn=plot is not None, advance=here)
    for found in mapper(work, common, letters):
        result.problems.extend(found.problems)
        result.arrays.extend(found.arrays)
        result.causes.extend(found.causes)
        result.notes.extend(found.notes)
        object.__setattr__(result, "compared", result.compared + found.bytes)
        maps.update(found.maps)
        if advance is not None and here is None:
            advance(found.bytes)
    result.causes.sort(key=lambda cause: -cause.explained / cause.differing)
    if plot is not None and maps:
        draw(plot, maps)
    return result


Arrays = dict[str, np.ndarray]


def compared_arrays(
    a: Any, b: Any, layout_a: Any, layout_b: Any, sizes: Mapping[str, int] | None, like: Any
) -> tuple[Arrays, Arrays, Arrays]:
    """Return the arrays of both sides by name, and inputs; keys and values where a side has a layout."""
    sources = [
        CacheSource({"array": array} if isinstance(array := as_numpy(side), np.ndarray) else side,
                    layout, sizes, (argument, "format"))
        for side, layout, argument in ((a, layout_a, "layout_a"), (b, layout_b, "layout_b"))
    ]  # fmt: skip
    inputs = {} if like is None else CacheSource(like).arrays
    one, two = (
        {name: x for name, x in source.arrays.items() if x.dtype.kind not in "SUO"} for source in sources
    )
    if not any(source.stated_layout for source in sources) and (
        one.keys() & two.keys() or not all(source.layout for source in sources)
    ):
        return one, two, inputs
    return keys_and_values(sources[0]), keys_and_values(sources[1]), inputs


def keys_and_values(source: CacheSource) -> Arrays:
    """Return keys and values, and the scales beside them, [layers, blocks, rows, heads, content]."""
    if source.cache is None and not source.apart:
        expected = "an array cache, key_cache or value_cache to lie in it"
        raise argument_error("layout", expected, ", ".join(source.arrays) or "none")
    if not source.apart:
        source.require_cache()
    kv = source.kv
    if kv is None:
        raise argument_error(
            source.arguments[0], "one whose content is not split (kvkit convert makes one)", source.layout
        )
    parts = {"": kv}
    with contextlib.suppress(KvkitError):  # scales that have other axes are not compared
        parts |= {f"_{part}": view for part, view in source.part_views.items()}
    return {
        f"{side}s{part}": stacked(getattr(view, f"{side}s"))
        for part, view in parts.items()
        for side in SIDES
        if not source.apart or side in source.apart
    }


@dataclass(frozen=True)
class ComparedArray:
    """What came of an array: its part of a `Difference`; counts of rows, if they are drawn."""

    bytes: int = 0
    arrays: list[ArrayDifference] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    maps: dict[str, Any] = field(default_factory=dict)


def one_array(given: Lazy, name: str, letters: Any, tolerances: Any, drawn: bool, advance: Any):
    """Compare an array of both sides, and look for causes."""
    one, two, inputs = given.value
    expected, got = one[name], two[name]
    if expected.shape != got.shape:
        return ComparedArray(problems=[str(argument_error(name, f"shape {expected.shape}", got.shape))])
    found, counts = compared(name, letters, expected, got, tolerances, advance)
    if found is None:
        return ComparedArray(expected.nbytes)
    notes: list[str] = []
    if expected.dtype != got.dtype:
        notes.append(f"{name}: {expected.dtype} against {got.dtype}: no cause was tried")
        causes = []
    else:
        causes = causes_of(name, letters, one, two, inputs, found, notes)
    maps = {name: (counts, letters)} if drawn else {}
    return ComparedArray(expected.nbytes, [found], causes, notes=notes, maps=maps)


def letters_of(array, axes, has_layout):
    """The names of an array's axes."""
    letters = tuple((axes if axes and not has_layout else BY_NDIM.get(array.ndim, "")).split())
    if axes and not has_layout and len(letters) != array.ndim and array.ndim in BY_NDIM:
        letters = tuple(BY_NDIM[array.ndim].split())
    if len(letters) != array.ndim:
        letters = tuple(f"axis {i}" for i in range(array.ndim))
    if len(set(letters)) != len(letters):
        raise argument_error("axes", "each of l b n h c at most once", describe(axes))
    return letters


def compared(name, letters, expected, got, tolerances, advance):
    """(`ArrayDifference`, or None; differing elements of each row) of two arrays of one shape."""
    content = expected.shape[-1] if expected.ndim else 1
    outer = expected.shape[:-1]
    rows = int(np.prod(outer, dtype=np.int64))
    counts, errors = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
    histogram = np.zeros(counting.BUCKETS, np.int64)
    one, two = (array.reshape(1) if not array.ndim else array for array in (expected, got))
    lead = one.shape[0] if one.ndim > 1 else 1
    step = max(1, BLOCK // max(1, one.nbytes // max(lead, 1)))
    per = rows // lead if lead else 0
    for begin in range(0, lead, step) if one.size else ():
        part = slice(begin, begin + step)
        x, y = ((array[part] if array.ndim > 1 else array).reshape(-1, content) for array in (one, two))
        if not same_bytes(x, y):
            where = slice(begin * per, begin * per + len(x))
            counts[where], errors[where], more = counting.count(x, y, *tolerances)
            histogram += more
        if advance is not None:
            advance(x.nbytes)
    if not counts.any():
        return None, counts
    return described(name, letters, expected, got, counts, errors, histogram, tolerances), counts.reshape(
        outer
    )


def same_bytes(one, two):
    """Whether arrays hold equal bytes, as fast as they can be read."""
    if one.dtype != two.dtype:
        return False
    one, two = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, two))
    whole = len(one) // 8 * 8
    return np.array_equal(one[:whole].view(np.uint64), two[:whole].view(np.uint64)) and np.array_equal(
        one[whole:], two[whole:]
    )


def described(name, letters, expected, got, counts, errors, histogram, tolerances):
    names = tuple(NAMES.get(letter, letter) for letter in letters)
    outer = expected.shape[:-1]
    row = np.unravel_index(int(counts.argmax() if not counts.any() else (counts > 0).argmax()), outer)
    x, y = (array[row].reshape(1, -1) if array.ndim else array.reshape(1, 1) for array in (expected, got))
    each = [counting.count(x[:, i : i + 1], y[:, i : i + 1], *tolerances)[0][0] for i in range(x.shape[1])]
    element = int(np.argmax(np.array(each) > 0))
    place = (*(int(i) for i in row), element)[: expected.ndim]
    first = dict(zip(names, place, strict=True)) | {
        "expected": plain(x[0, element]),
        "got": plain(y[0, element]),
    }
    table, far = counts.reshape(outer), errors.reshape(outer)
    by = {}
    for letter, axis in zip(letters[:-1], names[:-1], strict=True):
        if letter in ("l", "b", "h"):
            i = letters.index(letter)
            sums = table.sum(axis=tuple(j for j in range(table.ndim) if j != i))
            by[axis] = {int(j): int(sums[j]) for j in np.flatnonzero(sums)}
    heads = [i for i, letter in enumerate(letters[:-1]) if letter in ("l", "h")]
    largest = far.max(axis=tuple(i for i in range(far.ndim) if i not in heads)) if heads else far.max()
    at = np.unravel_index(int(np.argmax(largest)), np.shape(largest)) if heads else ()
    worst = {names[i]: int(j) for i, j in zip(heads, at, strict=True)} | {"error": float(np.max(largest))}
    ulps = {bucket(i): int(n) for i, n in enumerate(histogram) if n}
    return ArrayDifference(
        name, expected.shape, names, int(counts.sum()), expected.size, first, by, ulps, worst
    )


def bucket(i):
    """The distances that a bucket of the histogram counts."""
    return str(i) if i < 2 else f"{2 ** (i - 1)}-{2**i - 1}"


def plain(value):
    """A number as JSON and people may have it."""
    return value.item() if isinstance(value.item(), (int, float, bool)) else float(value)


def causes_of(name, letters, one, two, inputs, found, notes):
    """The causes that explain a difference, tried where it begins, on no more than can be looked at soon."""
    expected, got = one[name], two[name]
    others = {other: array for other, array in one.items() if other != name}
    like = {key: np.asarray(value) for key, value in inputs.items()}
    outer = expected.shape[:-1]
    for i, axis in enumerate(found.axes[:-1]):
        if expected.nbytes <= MOST_TRIED or axis == "head":
            continue
        begin, take = found.first[axis], max(1, MOST_TRIED * expected.shape[i] // expected.nbytes)
        begin = max(0, min(begin, expected.shape[i] - take))
        part = (*[slice(None)] * i, slice(begin, begin + take))
        notes.append(f"{name}: causes were tried on {axis} {begin} to {begin + take - 1} alone")
        for arrays in (others, like):
            arrays.update({key: array[part] for key, array in arrays.items() if array.shape[:-1] == outer})
        expected, got = expected[part], got[part]
        outer = expected.shape[:-1]
    return tried(Trial(name, letters, expected, got, like, others))


def draw(path, maps):
    """A map of tokens by heads for each array that differs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise KvkitError("plot: needs matplotlib: pip install 'kvkit-kernels[plot]'") from None
    figure = Figure(figsize=(9, 2.2 * len(maps) + 0.6), layout="constrained")
    for axes, (name, (counts, letters)) in zip(
        figure.subplots(len(maps), squeeze=False)[:, 0], maps.items(), strict=True
    ):
        head = letters[:-1].index("h") if "h" in letters[:-1] else None
        table = (
            counts.reshape(1, -1)
            if head is None
            else np.moveaxis(counts, head, 0).reshape(counts.shape[head], -1)
        )
        image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set(title=name, xlabel="token", ylabel="head")
        figure.colorbar(image, ax=axes, label="differing elements")
    figure.savefig(path, dpi=120)
