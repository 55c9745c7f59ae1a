"""Define the tool `diff`: find where two caches or outputs differ, and why."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.checks.values import finite_number, integer
from kvkit.errors import KvkitError, argument_error, brief, hints_keywords, printable
from kvkit.interop import as_numpy
from kvkit.layouts import Layout, tables
from kvkit.tools import counting
from kvkit.tools.axes import AXIS_WORDS, BY_NDIM, ROLES, axes_by_count, is_index, letters_of
from kvkit.tools.case import stack_view
from kvkit.tools.causes import Cause, Trial, index_causes, try_causes, usable_inputs
from kvkit.tools.counting import RowCounts, Tolerances
from kvkit.tools.names import some_names
from kvkit.tools.readers import LayerReader, open_arrays
from kvkit.tools.source import SLIDING, TABLE_PREFIXES, CacheSource, ds_v4_as_rows
from kvkit.tools.state_names import kind_of_state
from kvkit.tools.tasks import Lazy, Mapper
from kvkit.typed import FilePath

ByName = dict[str, np.ndarray]
# The axes along which differing elements are counted: keys of `axes.AXIS_WORDS`, and a word of index tensors.
BY_AXIS = "l", "s", "b", "h", "g", "sequence"
COMPLEX = {"c", "W"}  # `dtype.kind` of complex numbers: numpy's, ml_dtypes'
VIEW_AXES = {1: "l", 2: "l h", 5: "l b n h c"}  # {number of axes: axes} of keys, values and their scales
COMPARED = 2**25  # the most bytes compared at a time, unless one row has more
MOST_TRIED = 2**22  # the most bytes of an array on which causes are tried
LISTED = 8  # heads, layers or pages in a printed list: those with most differences


@dataclass(frozen=True)
class ArrayDifference:
    """Describes where one array differs from another.

    Attributes
    ----------
    name : str
        The array's name.
    shape : tuple of int
        The array's shape.
    axes : tuple of str
        The names of the axes, such as "layer", "page", "position", "head", "element".
    differing, total : int
        How many elements differ, and how many there are.
    first : dict
        The place of the first difference, {axis: index}, with the elements ``expected`` and ``got``.
    counts : dict of str to dict
        Differing elements by layer, sequence, page, head and column group, if the array has these axes.
    histogram : dict of str to int
        How many elements differ by "1", "2-3", "4-7", ... ulps.
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

    def __str__(self) -> str:
        share = self.differing / self.total
        place = ", ".join(f"{axis} {self.first[axis]}" for axis in self.axes)
        place = f"first: {place}" if place else "first"
        numbers = f"expected {self.first['expected']}, got {self.first['got']}"
        lines = [
            f"{printable(self.name)}: {self.differing} of {self.total} elements differ ({share:.2%})",
            f"  {place}: {numbers}",
        ]
        for axis, counts in self.counts.items():
            most = sorted(counts.items(), key=lambda item: -item[1])[:LISTED]
            rest = f", and {len(counts) - len(most)} more" if len(counts) > len(most) else ""
            lines.append(f"  by {axis}: " + ", ".join(f"{i}: {count}" for i, count in sorted(most)) + rest)
        if self.histogram:
            lines.append("  ulps apart: " + ", ".join(f"{ulps}: {n}" for ulps, n in self.histogram.items()))
        if self.worst:
            place = ", ".join(f"{axis} {i}" for axis, i in self.worst.items() if axis != "error")
            lines.append(f"  worst: {place or 'all'}: off by {self.worst['error']:.6g}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Difference:
    """The result of `diff`.

    Attributes
    ----------
    arrays : list of ArrayDifference
        The arrays that differ.
    causes : list of Cause
        Causes whose description is shorter than a list of the differences, the best first.
    problems : list of str
        Arrays that only one side has, or whose shapes differ, or whose dtypes differ if bits are compared.
    compared : int
        How many bytes of side a were compared.
    notes : list of str
        Arrays without a cause; causes that were not tried, and why; page tables that were not compared;
        differing dtypes that count as equal (with tolerances, and of index tensors).
    maps : dict
        {array to draw: (differing elements of each row, letters of its axes)}.
    """

    arrays: list[ArrayDifference] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    compared: int = 0
    notes: list[str] = field(default_factory=list)
    maps: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.arrays and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        arrays, causes = [asdict(each) for each in self.arrays], [asdict(cause) for cause in self.causes]
        return {
            "equal": self.equal, "compared": self.compared, "arrays": arrays, "causes": causes,
            "problems": self.problems, "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        problems, notes = map(printable, self.problems), map(printable, self.notes)
        if self.equal:
            return "\n".join([f"equal: {self.compared} bytes", *notes])
        return "\n".join([*problems, *map(str, self.arrays), *map(str, self.causes), *notes])


@hints_keywords
def diff(
    a: Any,
    b: Any,
    *,
    layout_a: str | Layout | None = None,
    layout_b: str | Layout | None = None,
    like: Any = None,
    sizes: Mapping[str, int] | None = None,
    axes: str | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    ulp: int = 0,
    plot: FilePath | None = None,
    advance: Callable[[int], object] | None = None,
    mapper: Mapper = map,
) -> Difference:
    """Compare two caches or outputs, and try to explain the differences.

    Parameters
    ----------
    a, b : path, dict of arrays, or array
        The expected side, and the actual side. Arrays of equal names are compared. If a side has a layout, or
        if no names are equal, the keys and values of the caches are compared, whatever the arrays are called,
        and the page tables and lengths that both have.
    layout_a, layout_b : str or Layout, optional
        The layout of ``cache`` (or ``cache.0``, ...), or of ``key_cache`` and ``value_cache``: a name or
        a line such as "| l kv b n h c".
    like : path or dict of arrays, optional
        Inputs that help to explain differences: the floats that were quantized, by the name of their codes;
        ``before`` (or ``before_NAME``), the array before the call; ``positions`` and ``rope_base`` of keys;
        of attention ``query`` with ``key`` and ``value`` [batch, heads, tokens, dim], or with the other
        inputs of `kvkit.paged_attention`, and ``softmax_scale``, if it is not head_dim ** -0.5.
    sizes : dict, optional
        Lengths of the layouts' axes, as in `kvkit.layouts.view`.
    axes : str, optional
        The axes of arrays without a layout, letters of ``l b n h c``. Arrays with another number of axes have
        the usual ones of their name, as all have by default.
    atol, rtol, ulp : float, float, int
        Elements are equal within ``atol + rtol * |expected|`` or ``ulp`` ulps. All 0: bits and dtypes are
        compared.
    plot : path, optional
        Draw a map of the differing elements, tokens by heads, into this file (needs matplotlib).
    advance : callable, optional
        A function that is called with the number of bytes of each piece that was compared.
    mapper : callable
        A function such as `map`, which compares each array. `kvkit.integrations.dask.mapper` compares them on
        workers, which open files themselves.

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
    tolerances = finite_number("atol", atol), finite_number("rtol", rtol), integer("ulp", ulp, 0)
    for name, number in zip(("atol", "rtol"), tolerances, strict=False):
        if number < 0:
            raise argument_error(name, "a number of at least 0", number)
    if plot is not None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise KvkitError("plot: needs matplotlib: pip install '.[plot]' in a clone") from None
        kinds = Figure().canvas.get_supported_filetypes()
        if Path(plot).suffix.lower().removeprefix(".") not in kinds:
            raise argument_error("plot", f"a name that ends in .{', .'.join(kinds)}", plot)
    sides = (a, layout_a, "layout_a"), (b, layout_b, "layout_b")
    arrays = Lazy(compared_arrays, sides, sizes, like, axes)
    one, two, inputs, known_axes, notes, sources = arrays.value
    if not one:
        raise argument_error("a", "some array of numbers", "none")
    common = [name for name in one if name in two]
    if not common:
        raise argument_error("b", f"some array of {', '.join(one)}", ", ".join(two) or "none")
    problems = [f"{name}: only in a" for name in one if name not in two]
    problems += [f"{name}: only in b" for name in two if name not in one]
    if like is not None and not usable_inputs(inputs, {name: one[name] for name in common}):
        shapes = ", ".join(f"{name} {np.shape(x)}" for name, x in inputs.items())
        of_attention = "query, key, value"
        wanted = f"floats with the names and shapes of {', '.join(common)}; before, positions; {of_attention}"
        raise argument_error("like", wanted, brief(shapes) or "nothing")
    here = advance if mapper is map else None  # workers report whole arrays, not pieces
    of_tables = {} if known_axes is VIEW_AXES else known_axes
    by_name = {x for x in common if is_index(one[x]) or kind_of_state(x)}
    letters = [letters_of(x, one[x], of_tables if x in by_name else known_axes) for x in common]
    work = partial(compare_array, arrays, tolerances=tolerances, drawn=plot is not None, advance=here)
    found = Difference(problems=problems)
    compared = 0
    for part in mapper(work, common, letters):
        for name in ("arrays", "causes", "problems", "notes"):
            getattr(found, name).extend(getattr(part, name))
        found.maps.update(part.maps)
        compared += part.compared
        if advance is not None and here is None:
            advance(part.compared)
    if not found.equal and same_tokens(sources):
        found.notes.append("the tokens of all sequences are equal, if each side is read by its page tables")
    else:
        found.notes.extend(notes)
    found.causes.sort(key=lambda cause: -cause.explained / cause.differing)
    if plot is not None and found.maps:
        draw_maps(plot, found.maps)
    return replace(found, compared=compared)


def compared_arrays(
    sides: Sequence[tuple[Any, str | Layout | None, str]], sizes: Mapping[str, int] | None, like: Any,
    axes: str | None,
) -> tuple[ByName, ByName, ByName, dict[int, str], list[str], list[CacheSource]]:  # fmt: skip
    """Return ({name: array} of side a, of b, inputs by name, {number of axes: axes}, notes, sources)."""
    sources = []
    for side, layout, name in sides:
        array = as_numpy(side)
        given = {"array": array} if isinstance(array, np.ndarray) else side
        sources.append(ds_v4_as_rows(CacheSource(given, layout, sizes, arguments=(name, "format"))))
    given = None if like is None else CacheSource(like, sides[0][1], sizes)
    inputs = {} if given is None else dict(given.arrays)
    one, two = ({name: x for name, x in each.arrays.items() if x.dtype.kind not in "SUO"} for each in sources)
    common = one.keys() & two.keys()
    by_name = bool(common) or not all(source.layout for source in sources)
    # An order of heads before tokens is a guess from the names of arrays, which `axes` overrule.
    stated = any(source.stated_layout or (source.heads_first and not axes) for source in sources)
    if by_name and not stated:
        axes_known = axes_by_count(axes, [one[name].ndim for name in common])
        return one, two, inputs, axes_known, [], sources
    if given is not None:
        with contextlib.suppress(KvkitError):  # inputs may be no cache: before, positions
            inputs |= keys_and_values(given)
    (own, others), notes = differing_tables(*sources)
    if all(source.paged for source in sources):  # tokens that moved have other positions in the same rows
        moved = [{x: each[x] for x in each if x.endswith(".positions")} for each in (one, two)]
        own, others = own | moved[0], others | moved[1]
    states = [name for name in one if name in two and kind_of_state(name)]
    own, others = ({x: arrays[x] for x in states} | more for arrays, more in ((one, own), (two, others)))
    unread = (
        note.replace("not read", "not compared") for each in sources for note in each.unread(states=states)
    )
    notes = list(dict.fromkeys((*notes, *(note for each in sources for note in each.guess), *unread)))
    one, two = (keys_and_values(each) | more for each, more in zip(sources, (own, others), strict=True))
    return one, two, inputs, VIEW_AXES, notes, sources


def keys_and_values(source: CacheSource) -> ByName:
    """Return {name: array} of keys, values and their scales, [layers, blocks, rows, heads, content]."""
    if source.cache is None and not source.separate:
        expected = "an array cache, key_cache or value_cache of this layout"
        raise argument_error("layout", expected + source.pattern_to_give, some_names(source.arrays))
    parts = {"": source.one_head_view()[0] or source.require_view(both=False)}  # the latter says why not
    with contextlib.suppress(KvkitError):  # scales with other axes are not compared
        parts |= {f"_{part}": view for part, view in source.scale_views.items()}
    found = {f"{side}s{part}": stack_view(views) for part, kv in parts.items()
             for side, views in source.given_sides(kv).items()}  # fmt: skip
    second = {} if source.sliding is None else keys_and_values(source.sliding)
    return found | {f"{SLIDING}_{name}": array for name, array in second.items()}


def differing_tables(a: CacheSource, b: CacheSource) -> tuple[list[ByName], list[str]]:
    """Return ([{name: array} of page tables and lengths of each side], notes); no arrays of equal tables.

    Ids are compared up to the shorter length of a sequence: of pages, or of rows if pages have other sizes.
    """
    try:
        found = [each.block_tables() for each in (a, b)]
    except KvkitError:  # tables that no reader takes are compared as they are
        every = [each.arrays.items() for each in (a, b)]
        return [{name: x for name, x in each if name.startswith(TABLE_PREFIXES)} for each in every], []
    pages = [each[1] for each in found if each is not None]
    if len(pages) < 2 or pages[0] == pages[1]:
        side = "b" if found[0] is None else "a"
        return [{}, {}], [f"only {side} has page tables: they are not compared"] if len(pages) == 1 else []
    count, size = min(len(each.lengths) for each in pages), pages[0].page_size
    shorter = np.minimum(*(each.lengths[:count] for each in pages))
    common = [tables.from_entries("pages", x.table[:count], shorter, x.page_size, 1) for x in pages]
    name, ids = "rows", [tables.to_slots(each, -1) for each in common]
    if size > 1 and all(each.page_size == size for each in pages):
        with contextlib.suppress(KvkitError):  # pages that begin within a block have no id
            ids, name = [tables.to_blocks(each)[0] for each in common], "block_tables"
    return [{name: x, "context_lens": each.lengths} for x, each in zip(ids, pages, strict=True)], []


def same_tokens(sources: Sequence[CacheSource]) -> bool:
    """Return whether two caches, of which one or both have page tables, hold the same tokens."""
    try:
        if all(source.block_tables() is None for source in sources):
            return False
        one, two = map(open_arrays, sources)
        layers = ((one.layer(i), two.layer(i)) for i in range(one.count))
        return one.count == two.count and all(same_layer(*pair) for pair in layers)
    except KvkitError:  # arrays that are no caches
        return False


def same_layer(one: LayerReader, two: LayerReader) -> bool:
    """Return whether two layers have the same tokens."""
    if one.starts != two.starts:
        return False
    for x, y in (one.key, two.key), (one.value, two.value):
        if (x.tokens, x.heads, x.dim) != (y.tokens, y.heads, y.dim):
            return False
        step = max(1, COMPARED // max(1, 4 * x.heads * x.dim))
        parts = [slice(begin, begin + step) for begin in range(0, x.tokens, step)]
        if not all(same_bytes(np.asarray(x.read(part)), np.asarray(y.read(part))) for part in parts):
            return False
    return True


def compare_array(
    arrays: Lazy, name: str, letters: tuple[str, ...], tolerances: Tolerances, drawn: bool,
    advance: Callable[[int], object] | None,
) -> Difference:  # fmt: skip
    """Compare an array of both sides, and look for causes."""
    one, two, inputs, *_ = arrays.value
    expected, got = one[name], two[name]
    if expected.shape != got.shape:
        return Difference(problems=[str(argument_error(name, f"shape {expected.shape}", got.shape))])
    if {expected.dtype.kind, got.dtype.kind} & COMPLEX and not same_bytes(expected, got):
        wanted = "equal bytes, because complex numbers are compared by no other measure"
        return Difference(problems=[str(argument_error(name, wanted, f"other bytes ({got.dtype})"))])
    problems: list[str] = []
    notes: list[str] = []
    if expected.dtype != got.dtype:
        matters = not any(tolerances) and not (is_index(expected) and is_index(got))
        (problems if matters else notes).append(
            str(argument_error(name, f"dtype {expected.dtype}", got.dtype))
        )
    found = count_rows(expected, got, tolerances, advance)
    if not found.differing.any():
        return Difference(problems=problems, compared=expected.nbytes, notes=notes)
    array = describe_difference(name, letters, expected, got, found, tolerances)
    causes: list[Cause] = []
    if expected.dtype == got.dtype:
        causes = causes_of(array, letters, one, got, inputs, notes, tolerances)
        if not causes:
            guessed = (
                expected.ndim > 2 and " ".join(letters) == BY_NDIM.get(expected.ndim) and not arrays.value[3]
            )
            other = f", with axes {' '.join(letters)}; axes=LETTERS names others" if guessed else ""
            notes.append(f"{name}: no cause found{other}")
    maps = {name: (found.differing.reshape(expected.shape[:-1]), letters)} if drawn else {}
    return Difference([array], causes, problems, expected.nbytes, notes, maps)


def count_rows(
    expected: np.ndarray, got: np.ndarray, tolerances: Tolerances,
    advance: Callable[[int], object] | None,
) -> RowCounts:  # fmt: skip
    """Count the differences of two arrays, in blocks of whole rows."""
    one, two = (array if array.ndim > 1 else array.reshape(1, -1) for array in (expected, got))
    *outer, content = one.shape
    sizes = [math.prod(one.shape[i:]) * one.itemsize for i in range(1, one.ndim)]  # of an index, by axis
    axis = next((i for i, size in enumerate(sizes) if size <= COMPARED), len(outer) - 1)  # the axis to cut
    step = max(1, COMPARED // max(1, sizes[axis]))
    begins = range(0, outer[axis] if one.size else 0, step)
    result, row = RowCounts.zeros(math.prod(outer)), 0
    for *index, begin in product(*map(range, outer[:axis]), begins):
        part: tuple[Any, ...] = (*index, slice(begin, begin + step))
        x, y = (array[part].reshape(-1, content) for array in (one, two))
        if not same_bytes(x, y):
            where = slice(row, row + len(x))
            found = counting.count(x, y, *tolerances)
            result.differing[where], result.errors[where] = found.differing, found.errors
            result.histogram[:] += found.histogram
        row += len(x)
        if advance is not None:
            advance(x.nbytes)
    return result


def same_bytes(one: np.ndarray, two: np.ndarray) -> bool:
    """Return whether two arrays have equal dtypes and bytes, compared in words of 8 bytes."""
    if one.dtype != two.dtype:
        return False
    one, two = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, two))
    whole = len(one) // 8 * 8
    words = one[:whole].view(np.uint64), two[:whole].view(np.uint64)
    return np.array_equal(words[0], words[1]) and np.array_equal(one[whole:], two[whole:])


def describe_difference(
    name: str, letters: tuple[str, ...], expected: np.ndarray, got: np.ndarray, found: RowCounts,
    tolerances: Tolerances,
) -> ArrayDifference:  # fmt: skip
    """Describe where two arrays differ, from the counts of `count_rows`."""
    names, outer = tuple(AXIS_WORDS.get(letter, letter) for letter in letters), expected.shape[:-1]
    row = np.unravel_index(int((found.differing > 0).argmax()), outer)  # the first row that differs
    x, y = (array[row].reshape(1, -1) if array.ndim else array.reshape(1, 1) for array in (expected, got))
    differs = [counting.count(x[:, i : i + 1], y[:, i : i + 1], *tolerances).differing[0] > 0
               for i in range(x.shape[1])]  # fmt: skip
    element = int(np.argmax(differs))
    place = (*(int(i) for i in row), element)[: expected.ndim]
    first: dict[str, Any] = dict(zip(names, place, strict=True))
    first |= {"expected": plain_number(x[0, element]), "got": plain_number(y[0, element])}
    differing, errors = found.differing.reshape(outer), found.errors.reshape(outer)
    by_axis = {}
    for i, letter in enumerate(letters[:-1]):
        if letter in BY_AXIS:
            sums = differing.sum(axis=tuple(j for j in range(differing.ndim) if j != i))
            by_axis[names[i]] = {int(j): int(sums[j]) for j in np.flatnonzero(sums)}
    heads = [i for i, letter in enumerate(letters[:-1]) if letter in ("l", "h", "g")]
    others = tuple(i for i in range(errors.ndim) if i not in heads)
    largest = errors.max(axis=others) if heads else errors.max()
    at = np.unravel_index(int(np.argmax(largest)), np.shape(largest)) if heads else ()
    worst: dict[str, Any] = {names[i]: int(j) for i, j in zip(heads, at, strict=True)}
    worst["error"] = float(np.max(largest))
    worst = {} if is_index(expected) else worst
    ulps = {each: int(n) for each, n in zip(counting.BUCKETS, found.histogram, strict=True) if n}
    return ArrayDifference(
        name, expected.shape, names, int(differing.sum()), expected.size,
        first=first, counts=by_axis, histogram=ulps, worst=worst,
    )  # fmt: skip


def plain_number(value: Any) -> int | float | bool:
    """Return a number as an int or float for JSON and texts."""
    found = value.item()
    return found if isinstance(found, (int, float, bool)) else float(value)


def causes_of(
    found: ArrayDifference, letters: tuple[str, ...], one: ByName, got: np.ndarray, inputs: ByName,
    notes: list[str], tolerances: Tolerances,
) -> list[Cause]:  # fmt: skip
    """Return the causes of a difference, tried on `MOST_TRIED` bytes around the first difference."""
    expected = one[found.name]
    if is_index(expected):
        return index_causes(found.name, found.axes, expected, got)
    others = {other: array for other, array in one.items() if other != found.name}
    like = {key: np.asarray(value) for key, value in inputs.items()}
    outer = expected.shape[:-1]
    for i, axis in enumerate(found.axes[:-1]):  # cut one axis after another until the array is small
        if expected.nbytes <= MOST_TRIED or axis == "head":
            continue
        begin, take = found.first[axis], max(1, MOST_TRIED * expected.shape[i] // expected.nbytes)
        begin = max(0, min(begin, expected.shape[i] - take))
        part = (*[slice(None)] * i, slice(begin, begin + take))
        notes.append(f"{found.name}: causes were tried only on {axis} {begin} to {begin + take - 1}")
        for arrays in (others, like):
            arrays.update({key: array[part] for key, array in arrays.items() if array.shape[:-1] == outer})
        expected, got = expected[part], got[part]
        outer = expected.shape[:-1]
    roles = tuple(ROLES.get(letter, letter) for letter in letters)
    return try_causes(Trial(found.name, roles, expected, got, like, others, tolerances))


def draw_maps(path: FilePath, maps: Mapping[str, Any]) -> None:
    """Draw a map of tokens by layers and heads for each array that differs."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 12, "axes.titlesize": 12}):  # as large as a page's
        figure = Figure(figsize=(4.8, 2.8 * len(maps) + 0.4), layout="constrained")
        places = figure.subplots(len(maps), squeeze=False)[:, 0]
        for axes, (name, (counts, letters)) in zip(places, maps.items(), strict=True):
            outer = [letters.index(axis) for axis in "lh" if axis in letters[: counts.ndim]]
            table = np.moveaxis(counts, outer, range(len(outer))).reshape(
                math.prod(counts.shape[axis] for axis in outer), -1
            )
            rows = counts.shape[outer[1]] if len(outer) == 2 else 1  # rows of the table for each label
            ticks = range(0, len(table), rows * math.ceil(len(table) / rows / 12)) if outer else ()
            axes.set_yticks(ticks, [str(row // rows) for row in ticks])
            axes.set(title=name, xlabel="token", ylabel=AXIS_WORDS[letters[outer[0]]] if outer else "")
            image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap="viridis")
            figure.colorbar(image, ax=axes, label="differing elements")
        figure.savefig(path, dpi=120)
