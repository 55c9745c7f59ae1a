"""Define the tool `inspect`: list what is in a file, or in named arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kvkit import layouts
from kvkit.errors import KvkitError, argument_error, brief, hints_keywords, printable
from kvkit.files import Contents, Description
from kvkit.files.members import is_extension_dtype
from kvkit.layouts.tables import BlockTable
from kvkit.tools.contents import Source
from kvkit.tools.queries import MASK_NAMES, QUERY_NAMES
from kvkit.tools.readers import open_one
from kvkit.tools.source import CacheSource, ds_v4_as_rows
from kvkit.tools.state_names import StateArrays, find_states, kind_of_state
from kvkit.tools.text import columns, size

ARRAYS_SHOWN = 40  # the most arrays or layers in a text; to_dict() has all
SHOWN_ELSEWHERE = "description", "dtypes", "cache", "notes", "sliding"  # metadata that is printed apart
READ_BESIDE = (
    *QUERY_NAMES,
    *MASK_NAMES,
    "softmax_scale",
    "lse",
    "token_ids",
)  # arrays that tools read beside a cache
COUNTED_ELEMENTS = 2**22  # elements counted at a time


@dataclass(frozen=True)
class InspectedArray:
    """Describes an array of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Numbers:
    """Holds statistics of the elements of keys or values; minimum and maximum are None if none is finite."""

    name: str
    minimum: float | None
    maximum: float | None
    nan: int
    infinite: int
    zero_rows: int
    rows: int

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        ends = ("" if end is None else f"{end:.4g}" for end in (self.minimum, self.maximum))
        return (self.name, *ends, str(self.nan), str(self.infinite), f"{self.zero_rows} of {self.rows}")


@dataclass(frozen=True)
class RowValues:
    """Holds the keys or the values of one token in a layer, as numbers by head."""

    name: str
    heads: list[list[float]]

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"  head {h}: {' '.join(f'{x:.6g}' for x in head)}"
                                       for h, head in enumerate(self.heads))])  # fmt: skip


@dataclass(frozen=True)
class TableUse:
    """Says how block tables use a cache."""

    convention: str
    lengths: list[int]  # tokens of each sequence
    page_size: int
    blocks: int  # blocks in use
    shared: int  # blocks that several sequences share
    positions: list[str] | None = None  # runs such as "0:4, 12:20" by sequence; None if they count from 0

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths[:12])) + (", ..." if len(self.lengths) > 12 else "")
        shared = f", {self.shared} of them shared" if self.shared else ""
        pages = f"blocks of {self.page_size} rows" if self.page_size > 1 else "rows"
        sequences = f"{len(self.lengths)} sequences ({self.convention}), tokens {lengths or 'none'}"
        at = "; ".join(self.positions[:12]) if self.positions else ""
        return f"{sequences}; {self.blocks} {pages} in use{shared}" + (f"\npositions {at}" if at else "")


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    Attributes
    ----------
    kind : str
        The kind of file, or "arrays".
    arrays : list of InspectedArray
        All arrays.
    description : Description
        The file's description of its cache.
    metadata : dict
        Other metadata of the file.
    notes : tuple of str
        Facts that the file lacks, for its users.
    fits : list of str
        If no layout is named: layouts that fit the shapes and strides of the cache's arrays.
    sizes : dict of str to int
        The sizes of the axes l b n h c, if the layout is known.
    use : TableUse, optional
        How its block tables use the cache.
    numbers : list of Numbers
        Statistics of keys and values by layer, or of each array if no layout is known; [] without ``stats``.
    sliding : Inspection, optional
        Description, sizes, tables and statistics of the second cache, which has the layers with a window.
    states : list of StateArrays
        Arrays of recurrent states and of the last inputs of convolutions, by the names that engines use.
    values : list of RowValues
        Keys and values of one row of a layer; [] unless a layer and a row are given.
    """

    kind: str
    arrays: list[InspectedArray]
    description: Description
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fits: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    use: TableUse | None = None
    numbers: list[Numbers] = field(default_factory=list)
    sliding: Inspection | None = None
    states: list[StateArrays] = field(default_factory=list)
    values: list[RowValues] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        found = asdict(self) | {"description": self.description.to_dict()}
        return found | {"sliding": self.sliding.to_dict() if self.sliding else None}

    def __str__(self) -> str:
        total = sum(entry.bytes for entry in self.arrays)
        parts = self.facts()
        if self.sliding is not None:
            parts += [f"{self.sliding.kind}:", *self.sliding.facts()]
        parts += ["\n".join(map(str, self.states)), "\n".join(map(str, self.values))]
        parts.append("\n".join(f"note: {printable(note)}" for note in self.notes))
        rows = [(entry.name, entry.dtype, str(entry.shape), size(entry.bytes)) for entry in self.arrays]
        count = f"{len(rows)} array{'s' * (len(rows) != 1)}"
        head = [f"{self.kind}: {count}, {size(total)}"]
        head.append(columns(("array", "dtype", "shape", "size"), rows, ARRAYS_SHOWN))
        return "\n\n".join(filter(None, [*head, *parts]))

    def facts(self) -> list[str]:
        """Return the text about the cache, in paragraphs."""
        described = self.description.to_dict()
        if described.get("sizes"):
            described["sizes"] = self.sizes or described["sizes"]
        parts = ["\n".join(f"{name}: {in_brief(value)}" for name, value in described.items())]
        if self.sizes and not described.get("sizes"):
            parts.append(f"sizes: {in_brief(self.sizes)}")
        if self.fits:
            parts.append(f"layouts that fit: {', '.join(self.fits)}; give layout=NAME, as kvkit chooses none")
        lines = (f"{printable(name)}: {in_brief(value)}" for name, value in self.metadata.items())
        parts.append("\n".join(lines))
        if self.use:
            parts.append(str(self.use))
        if self.numbers:
            heads = "of", "min", "max", "NaN", "inf", "rows of zeros"
            parts.append(columns(heads, [each.cells() for each in self.numbers], ARRAYS_SHOWN))
        return parts


def in_brief(value: Any) -> str:
    """Return a value from a file as text, shortened to fit a line."""
    several = isinstance(value, Mapping)
    return str(brief(", ".join(f"{name} {each}" for name, each in value.items()) if several else value, 200))


@hints_keywords
def inspect(source: Source, *, layout: str | None = None, sizes: Mapping[str, int] | None = None,
            stats: bool = False, layer: int | None = None, row: int | None = None,
            advance: Callable[[int], object] | None = None) -> Inspection:  # fmt: skip
    """List what is in a file, or in named arrays: arrays, layout, and how sequences use the cache.

    Parameters
    ----------
    source : path, or mapping of arrays
        A file that `kvkit.files.read` takes; or named arrays and lists of arrays, the cache as ``"cache"``.
    layout : str, optional
        The layout of the cache, if the file does not name it.
    sizes : mapping, optional
        Lengths of axes l, b, n, h, c that the shapes do not determine.
    stats : bool
        Whether to count over all elements of each layer: minimum, maximum, NaN, rows of zeros.
    layer, row : int, optional
        A layer, by its number in the model, and a row, counted through the layer's blocks or sequences: their
        keys and values are returned as numbers, decoded if they are codes.
    advance : callable, optional
        A function that is called with the number of bytes of each piece that was counted.

    Returns
    -------
    Inspection
        Its ``str`` is a text, ``to_dict()`` a dict for JSON.

    Raises
    ------
    KvkitError
        If there is no such file, layer or row, if a file is damaged, or if the layout contradicts the arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import inspect
    >>> pool = np.zeros((10, 2, 16, 3, 8), np.float16)
    >>> found = inspect({"cache": pool}, layout="flashinfer-nhd", stats=True)
    >>> found.sizes
    {'b': 10, 'n': 16, 'h': 3, 'c': 8}
    >>> found.numbers[0]
    Numbers(name='layer 0 keys', minimum=0.0, maximum=0.0, nan=0, infinite=0, zero_rows=480, rows=480)
    """
    found = CacheSource(source, layout, sizes)
    contents, cache, second = found.contents, found.contents.cache, found.sliding
    arrays, pattern = found.arrays.items(), ""
    if found.cache is None and not (found.separate or found.saved or "operator" in contents.metadata):
        pattern = found.pattern_to_give
    not_understood = f"no array has the name of a cache: give{pattern.removeprefix(', or')}"
    return Inspection(
        kind_of(contents),
        [InspectedArray(name, array.dtype.name, array.shape, array.nbytes) for name, array in arrays],
        contents.description,
        {name: value for name, value in contents.metadata.items() if name not in SHOWN_ELSEWHERE},
        (*found.notes, *found.unread(READ_BESIDE, [*filter(kind_of_state, found.arrays)]),
         *([not_understood] if pattern else [])),
        states=find_states(found.arrays), values=values_of(found, layer, row),
        fits=[] if found.layout or cache is None else fitting_layouts(cache, stats),
        **facts_of(found, stats, advance),
        sliding=None if second is None else Inspection(
            "layers with a window", [], second.contents.description, **facts_of(second, stats, advance)
        ),
    )  # fmt: skip


def values_of(source: CacheSource, layer: int | None, row: int | None) -> list[RowValues]:
    """Return the keys and the values of a row of a layer; [] if neither is given."""
    if layer is None and row is None:
        return []
    if layer is None or row is None:
        raise argument_error("layer", "a layer and a row, beside each other", "one of them")
    known: list[int] = []
    for each in source.caches.values():
        opened = open_one(each, rows=np.array([row]))
        numbers = each.layer_numbers or range(len(known), len(known) + opened.count)
        known += numbers
        if layer not in numbers:
            continue
        found = opened.layer(list(numbers).index(layer))
        kv = None if each.saved.get("layers") else ds_v4_as_rows(each).one_head_view()[0]
        views = None if kv is None else kv.keys[list(numbers).index(layer)]
        in_pool, count = False, found.key.tokens
        if isinstance(views, np.ndarray) and count == 1:
            in_pool, count = True, views.shape[0] * views.shape[1]
        if not 0 <= row < count:
            raise argument_error("row", f"0 to {count - 1}", row)
        part = slice(0, 1) if in_pool else slice(row, row + 1)
        return [
            RowValues(f"layer {layer} {name}, row {row}", side.read(part)[0].astype(np.float64).tolist())
            for name, side in found.sides.items()
        ]
    raise argument_error("layer", f"one of {brief(known)}", layer)


def facts_of(source: CacheSource, stats: bool, advance: Callable[[int], object] | None) -> dict[str, Any]:
    """Return the sizes, the use of tables and the statistics of a cache, as arguments of `Inspection`."""
    kv, axis_sizes = ds_v4_as_rows(source).one_head_view()
    sides = None if kv is None else source.given_sides(kv)
    numbers = statistics(source.arrays, sides, advance) if stats else []
    return {"sizes": axis_sizes, "use": use_of(source), "numbers": numbers}


def kind_of(contents: Contents) -> str:
    """Return the kind of a file as text, with the object of kvkit that it holds, if any."""
    about, kind = contents.metadata.get("cache"), contents.kind
    if "operator" in contents.metadata:
        return f"{kind}, results of {brief(contents.metadata['operator'])}"
    if not isinstance(about, dict):
        return kind
    layers = about.get("layers")
    return f"{kind}, a " + (f"cache of {len(layers)} layers" if isinstance(layers, list) else "paged cache")


def fitting_layouts(cache: Any, contents: bool) -> list[str]:
    """Return the layouts that fit the shapes and strides of a cache.

    With `contents`, only layouts that the elements make likely are returned, then layouts with split axes,
    which elements cannot confirm; all layouts if no layout is likely.
    """
    try:
        likely = layouts.fits(cache, contents=True) if contents else []
        possible = layouts.fits(cache)
        split = [name for name in possible if layouts.parse(name).split and name not in likely]
        return [*likely, *split] if likely else possible
    except KvkitError:
        return []


def statistics(
    arrays: Mapping[str, np.ndarray], sides: Mapping[str, Any] | None,
    advance: Callable[[int], object] | None = None,
) -> list[Numbers]:  # fmt: skip
    """Return the statistics of keys and values of each layer, or of each array if the layout is unknown."""
    if sides is None:
        numeric = {
            name: x for name, x in arrays.items() if x.dtype.kind in "fiub" or is_extension_dtype(x.dtype)
        }
        return [numbers_of(name, [array], advance) for name, array in numeric.items()]
    return [
        numbers_of(f"layer {layer} {name}s", views if isinstance(views, tuple) else [views], advance)
        for layer, pair in enumerate(zip(*sides.values(), strict=True))
        for name, views in zip(sides, pair, strict=True)
    ]


def numbers_of(
    name: str, arrays: Iterable[np.ndarray], advance: Callable[[int], object] | None = None
) -> Numbers:
    """Return the statistics of arrays, computed a piece at a time."""
    least, most, nan, infinite, zeros, rows = np.inf, -np.inf, 0, 0, 0, 0
    for array in arrays:
        flat = array if array.ndim > 1 else array.reshape(1, -1)
        step = max(COUNTED_ELEMENTS // max(flat[:1].size, 1), 1)
        for begin in range(0, len(flat), step):
            with np.errstate(invalid="ignore"):  # NaN may be signalling
                piece = flat[begin : begin + step]
                exact = piece.dtype.itemsize < 4 or piece.dtype == np.float32
                piece = piece.astype(np.float32 if exact else np.float64, copy=False)
            fine = np.isfinite(piece)
            unknown = int(np.isnan(piece).sum())
            nan, infinite = nan + unknown, infinite + int(piece.size - fine.sum()) - unknown
            least = min(least, float(piece.min(initial=np.inf, where=fine)))
            most = max(most, float(piece.max(initial=-np.inf, where=fine)))
            empty = ~(piece != 0).any(-1)
            zeros, rows = zeros + int(empty.sum()), rows + empty.size
            if advance is not None:
                advance(flat[begin : begin + step].nbytes)
    some = least <= most
    return Numbers(name, least if some else None, most if some else None, nan, infinite, zeros, rows)


def use_of(source: CacheSource) -> TableUse | None:
    """Return how block tables of any convention use a cache; None without tables."""
    found = source.block_tables()
    if found is None:
        return None
    convention, tables = found
    used, count = np.unique(tables.table[tables.table >= 0], return_counts=True)
    shared = int((count > 1).sum())
    return TableUse(
        convention, tables.lengths.tolist(), tables.page_size, len(used), shared,
        runs_of(tables, source.positions),
    )  # fmt: skip


def runs_of(pages: BlockTable, positions: np.ndarray | None) -> list[str] | None:
    """Return the runs of positions of each sequence as texts such as "0:4, 12:20".

    None without positions (they count from 0), or if their number is not the number of tokens in the tables.
    """
    if positions is None or len(positions) != pages.lengths.sum():
        return None
    texts = []
    for begin, end in pairwise(pages.starts()):
        own = positions[begin:end]
        runs = np.split(own, np.flatnonzero(~np.isin(np.diff(own), (0, 1))) + 1)
        texts.append(", ".join(f"{run[0]}:{run[-1] + 1}" for run in runs if len(run)))
    return texts
