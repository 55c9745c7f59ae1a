"""`inspect`: what is in a file, or in arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvkit import files, layouts
from kvkit.errors import KvkitError, argument_error, brief, describe
from kvkit.files import Contents, Description
from kvkit.files.members import is_own
from kvkit.layouts import tables
from kvkit.tools.text import columns, size

Source = str | os.PathLike[str] | Mapping[str, Any]
TABLES = (  # how names of tables begin
    "sequences.", "published.", "blocks", "block_tables", "context_lens", "page_size", "kv_", "slots",
    "cache_cells.",
)  # fmt: skip
SHOWN = 40  # arrays or layers in a text; all are in to_dict()
TOLD = "description", "dtypes", "cache"  # of metadata, elsewhere
SOME = 2**22  # elements that are looked at at once


@dataclass(frozen=True)
class Entry:
    """One array: its name, dtype and shape, its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Numbers:
    """What the elements of some keys or values are like; of no number min and max are None."""

    name: str
    minimum: float | None
    maximum: float | None
    nan: int
    infinite: int
    zero_rows: int
    rows: int


@dataclass(frozen=True)
class Use:
    """What tables beside a cache say of it: sequences, their tokens, blocks in use and shared by several."""

    convention: str
    lengths: list[int]
    page_size: int
    blocks: int
    shared: int


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes
    ----------
    kind : str
        Of file, or "arrays".
    arrays : list of Entry
        All of them.
    description : Description
        What the file says of its cache.
    metadata : dict
        What else it says.
    notes : tuple of str
        What whoever uses it should know.
    fits : list of str
        Layouts that the cache's arrays may have, by shape and strides: proposals, if none is said.
    sizes : dict of str to int
        Of the axes l b n h c, if the layout is known.
    use : Use, optional
        What its tables say.
    numbers : list of Numbers
        Of keys and values by layer, or of each array if no layout is known; if asked for.
    """

    kind: str
    arrays: list[Entry]
    description: Description
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fits: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    use: Use | None = None
    numbers: list[Numbers] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"description": self.description.to_dict()}

    def __str__(self) -> str:
        total = sum(entry.bytes for entry in self.arrays)
        parts = [f"{self.kind}: {len(self.arrays)} arrays, {size(total)}"]
        rows = [(entry.name, entry.dtype, str(entry.shape), size(entry.bytes)) for entry in self.arrays]
        parts.append(columns(("array", "dtype", "shape", "size"), rows, SHOWN))
        said = self.description.to_dict()
        parts.append("\n".join(f"{name}: {worded(value)}" for name, value in said.items()))
        if self.sizes and not said.get("sizes"):
            parts.append(f"sizes: {worded(self.sizes)}")
        if self.fits:
            parts.append(f"may lie as {', '.join(self.fits)}: name one with layout, nothing is guessed")
        parts.append("\n".join(f"{name}: {worded(value)}" for name, value in self.metadata.items()))
        if self.use:
            parts.append(str_of_use(self.use))
        if self.numbers:
            lines = [
                (one.name, number(one.minimum), number(one.maximum), str(one.nan), str(one.infinite),
                 f"{one.zero_rows} of {one.rows}")
                for one in self.numbers
            ]  # fmt: skip
            parts.append(columns(("of", "min", "max", "NaN", "inf", "rows of zeros"), lines, SHOWN))
        parts.append("\n".join(f"note: {note}" for note in self.notes))
        return "\n\n".join(filter(None, parts))


def worded(value: Any) -> str:
    """A value of a file as a line may show it."""
    if isinstance(value, Mapping):
        return brief(", ".join(f"{name} {each}" for name, each in value.items()), 200)
    return brief(value, 200)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def str_of_use(use: Use) -> str:
    lengths = ", ".join(map(str, use.lengths[:12])) + (", ..." if len(use.lengths) > 12 else "")
    shared = f", {use.shared} of them shared" if use.shared else ""
    pages = (
        f"{use.blocks} blocks of {use.page_size} rows in use"
        if use.page_size > 1
        else f"{use.blocks} rows in use"
    )
    return f"{len(use.lengths)} sequences ({use.convention}), tokens {lengths or 'none'}; {pages}{shared}"


def inspect(source: Source, *, layout: str | None = None, sizes: Mapping[str, int] | None = None,
            stats: bool = False) -> Inspection:  # fmt: skip
    """Say what is in a file, or in arrays: what they are, how they lie, who uses them.

    Parameters
    ----------
    source : path, or mapping of arrays
        A file of any kind that `kvkit.files.read` takes; or arrays by name, and lists of them, the cache as
        ``"cache"``.
    layout : str, optional
        How the cache lies, if the file does not say so.
    sizes : mapping, optional
        Of the axes l, b, n, h, c that shapes do not tell.
    stats : bool
        Look at all elements: least and largest, NaN, rows of zeros, of keys and values by layer.

    Returns
    -------
    Inspection
        A text (``str``) and a dict (``to_dict()``).

    Raises
    ------
    KvkitError
        If there is no such file, if it is damaged, or if the layout contradicts its arrays.

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
    contents = taken(source)
    said = contents.description
    line = layout or said.layout
    known = dict(said.sizes) | dict(sizes or {})
    cache = contents.cache
    found: dict[str, int] = {}
    views = None
    if line and cache is not None:
        views, found = viewed_as_one(cache, line, known)
    fitting = [] if line or cache is None else proposals(cache, stats)
    numbers = statistics(contents.arrays, views) if stats else []
    kind = f"{contents.kind}, {saved}" if (saved := of_kvkit(contents.metadata)) else contents.kind
    return Inspection(
        kind,
        [Entry(name, array.dtype.name, array.shape, array.nbytes) for name, array in contents.arrays.items()],
        said,
        {name: value for name, value in contents.metadata.items() if name not in TOLD},
        contents.notes,
        fitting,
        found,
        use_of(contents, found.get("n")),
        numbers,
    )


def taken(source: Source) -> Contents:
    """What is in a file, or the same of arrays."""
    if not isinstance(source, Mapping):
        if not isinstance(source, (str, os.PathLike)):
            raise argument_error("source", "a path, or arrays by name", describe(source))
        return files.read(source)
    arrays = {name: np.asarray(array) for name, array in files.flat(source).items()}
    return Contents(arrays, {}, kind="arrays")


def of_kvkit(metadata: Mapping[str, Any]) -> str:
    """What a file of kvkit's own is, beside its arrays."""
    about = metadata.get("cache")
    if "operator" in metadata:
        return f"results of {brief(metadata['operator'])}"
    if not isinstance(about, dict):
        return ""
    layers = about.get("layers")
    return f"a cache of {len(layers)} layers" if isinstance(layers, list) else "a paged cache"


def viewed(cache, line: str, known: Mapping[str, int]):
    """Keys and values by layer and the sizes, as far as a view tells them."""
    parsed = layouts.parse(line)
    if parsed.split or parsed.joined:
        return None, {}
    kv = layouts.view(cache, parsed, sizes=known or None)
    first = kv.keys[0][0] if isinstance(kv.keys[0], tuple) else kv.keys[0]
    found = dict(zip("bnhc"[-first.ndim :], first.shape, strict=True))
    found |= {"l": len(kv.keys)} | ({"b": len(kv.keys[0])} if isinstance(kv.keys[0], tuple) else {})
    return kv, {axis: found[axis] for axis in "lbnhc" if axis in parsed.names}


def viewed_as_one(cache, line: str, known: Mapping[str, int]):
    """The same; the heads of a row as one, if nobody says how many there are."""
    try:
        return viewed(cache, line, known)
    except KvkitError:
        if "h" in known:
            raise
        try:
            views, found = viewed(cache, line, {**known, "h": 1})
        except KvkitError:
            views = None
        if views is None:
            raise
        return views, {axis: count for axis, count in found.items() if axis not in "hc"}


def proposals(cache, contents: bool) -> list[str]:
    """Layouts that fit; those that contents speak for, if they are looked at and speak for any."""
    try:
        return (layouts.fits(cache, contents=True) if contents else []) or layouts.fits(cache)
    except KvkitError:
        return []


def statistics(arrays: Mapping[str, np.ndarray], views: Any) -> list[Numbers]:
    """Of keys and values of each layer; of each array of numbers if nobody knows which are which."""
    if views is None:
        return [of_numbers(name, [array]) for name, array in arrays.items() if is_number(array)]
    found = []
    for layer, pair in enumerate(zip(views.keys, views.values, strict=True)):
        for name, side in zip(("keys", "values"), pair, strict=True):
            found.append(of_numbers(f"layer {layer} {name}", side if isinstance(side, tuple) else [side]))
    return found


def is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "fiub" or is_own(array.dtype)


def of_numbers(name: str, arrays) -> Numbers:
    """Pass over arrays a piece at a time."""
    least, most, nan, infinite, zeros, rows = np.inf, -np.inf, 0, 0, 0, 0
    for array in arrays:
        flat = array if array.ndim > 1 else array.reshape(1, -1)
        step = max(SOME // max(flat[:1].size, 1), 1)
        for begin in range(0, len(flat), step):
            with np.errstate(invalid="ignore"):  # NaN may be of the signalling kind
                piece = flat[begin : begin + step].astype(np.float32)
            fine = np.isfinite(piece)
            unknown = int(np.isnan(piece).sum())
            nan, infinite = nan + unknown, infinite + int(piece.size - fine.sum()) - unknown
            least = min(least, float(piece.min(initial=np.inf, where=fine)))
            most = max(most, float(piece.max(initial=-np.inf, where=fine)))
            empty = ~(piece != 0).any(-1)
            zeros, rows = zeros + int(empty.sum()), rows + empty.size
    some = least <= most
    return Numbers(name, least if some else None, most if some else None, nan, infinite, zeros, rows)


def use_of(contents: Contents, page_size: int | None) -> Use | None:
    """What the tables of a file say, whatever their convention; None if there are none."""
    pages = pages_of(contents, page_size)
    if pages is None:
        return None
    convention, found = pages
    used, count = np.unique(found.table[found.table >= 0], return_counts=True)
    return Use(convention, found.lengths.tolist(), found.page_size, len(used), int((count > 1).sum()))


def pages_of(contents: Contents, page_size: int | None = None) -> tuple[str, tables.Pages] | None:
    """(their convention, the tables of a file in one form), if it has any."""
    try:
        return pages_said(contents, page_size)
    except KvkitError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise argument_error("source", "tables as kvkit or llama.cpp has them", brief(error)) from None


def pages_said(contents: Contents, page_size: int | None) -> tuple[str, tables.Pages] | None:
    arrays = contents.arrays
    size = page_size or contents.description.sizes.get("n") or integer(arrays, "page_size")
    if {"block_tables", "context_lens"} <= arrays.keys() and size:
        return "block tables", tables.from_blocks(arrays["block_tables"], arrays["context_lens"], size)
    if {"kv_indptr", "kv_indices", "kv_last_page_len"} <= arrays.keys() and size:
        parts = arrays["kv_indptr"], arrays["kv_indices"], arrays["kv_last_page_len"]
        return "compressed rows", tables.from_csr(*parts, size)
    if {"slots", "context_lens"} <= arrays.keys():
        return "a slot a token", tables.from_slots(arrays["slots"], arrays["context_lens"])
    if isinstance(about := contents.metadata.get("cache"), dict) and "paged" in about:
        return "a paged cache of kvkit's", of_paged(arrays, about["paged"])
    if {"cache_cells.positions", "cache_cells.sequences"} <= arrays.keys():
        return "cells", cells_of(arrays)
    return None


def rows_of(contents: Contents, pages: tables.Pages) -> tuple[int | None, np.ndarray | None]:
    """(rows of a file's cache, which of them hold something), as far as its layout tells them."""
    cache, line = contents.cache, contents.description.layout
    if cache is None or line is None:
        return None, None
    views, _ = viewed_as_one(cache, line, contents.description.sizes)
    if views is None or isinstance(views.keys[0], tuple):
        return None, None
    keys = views.keys[0]  # [blocks, rows, heads, content]
    if keys.shape[1] % pages.page_size:
        return None, None
    return keys.shape[0] * keys.shape[1], (keys != 0).any((-2, -1)).ravel()


def of_paged(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> tables.Pages:
    """Of what `PagedCache.save` wrote: blocks by their places in the file."""
    rows = [arrays[f"sequences.{i}.block_table"] for i in range(len(about["sequences"]))]
    numbers = np.full((len(rows), max(map(len, rows), default=0)), -1)
    for sequence, row in enumerate(rows):
        numbers[sequence, : len(row)] = np.searchsorted(arrays["blocks"], row)
    lengths = np.array([said["length"] for said in about["sequences"]], np.int64)
    return tables.from_blocks(numbers, lengths, about["arguments"]["page_size"])


def cells_of(arrays: Mapping[str, np.ndarray]) -> tables.Pages:
    """Of llama.cpp's cells; sequences keep their order, not their numbers."""
    at, whose = arrays["cache_cells.positions"], arrays["cache_cells.sequences"]
    starts = arrays["cache_cells.sequence_starts"]
    _, numbers = np.unique(whose, return_inverse=True)
    cells = np.repeat(np.arange(len(at)), np.diff(starts))
    return tables.from_tokens(cells, numbers, at[cells])


def integer(arrays: Mapping[str, np.ndarray], name: str) -> int | None:
    array = arrays.get(name)
    return int(array) if array is not None and array.ndim == 0 and array.dtype.kind in "iu" else None
