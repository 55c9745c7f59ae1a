"""`inspect`: what is in a file, or in arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvkit import layouts
from kvkit.errors import KvkitError, brief
from kvkit.files import Description
from kvkit.files.members import is_own
from kvkit.layouts.views import KV
from kvkit.tools.source import SIDES, CacheSource, Source
from kvkit.tools.text import columns, size

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
    found = CacheSource(source, layout, sizes)
    contents, line = found.contents, found.layout
    kv, lengths = found.one_head_view()
    cache = contents.cache
    kind = f"{contents.kind}, {saved}" if (saved := kind_of_saved(contents.metadata)) else contents.kind
    return Inspection(
        kind,
        [Entry(name, array.dtype.name, array.shape, array.nbytes) for name, array in found.arrays.items()],
        contents.description,
        {name: value for name, value in contents.metadata.items() if name not in TOLD},
        contents.notes,
        [] if line or cache is None else fitting_layouts(cache, stats),
        lengths,
        use_of(found),
        statistics(found.arrays, kv, found.apart) if stats else [],
    )


def kind_of_saved(metadata: Mapping[str, Any]) -> str:
    """What a file of kvkit's own is, beside its arrays."""
    about = metadata.get("cache")
    if "operator" in metadata:
        return f"results of {brief(metadata['operator'])}"
    if not isinstance(about, dict):
        return ""
    layers = about.get("layers")
    return f"a cache of {len(layers)} layers" if isinstance(layers, list) else "a paged cache"


def fitting_layouts(cache: Any, contents: bool) -> list[str]:
    """Layouts that fit; those that contents speak for, if they are looked at and speak for any."""
    try:
        return (layouts.fits(cache, contents=True) if contents else []) or layouts.fits(cache)
    except KvkitError:
        return []


def statistics(arrays: Mapping[str, np.ndarray], kv: KV | None, apart: Collection[str]) -> list[Numbers]:
    """Count over keys and values of each layer; over each array if nobody knows which are which."""
    if kv is None:
        return [numbers_of(name, [array]) for name, array in arrays.items() if is_number(array)]
    sides = [(f"{side}s", getattr(kv, f"{side}s")) for side in SIDES if not apart or side in apart]
    return [
        numbers_of(f"layer {layer} {name}", side[layer] if isinstance(side[layer], tuple) else [side[layer]])
        for layer in range(len(kv.keys))
        for name, side in sides
    ]


def is_number(array: np.ndarray) -> bool:
    return array.dtype.kind in "fiub" or is_own(array.dtype)


def numbers_of(name: str, arrays: Iterable[np.ndarray]) -> Numbers:
    """Count over arrays, a piece at a time."""
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


def use_of(source: CacheSource) -> Use | None:
    """Return what the block tables say, whatever their convention; None without tables."""
    pages = source.block_tables()
    if pages is None:
        return None
    convention, found = pages
    used, count = np.unique(found.table[found.table >= 0], return_counts=True)
    return Use(convention, found.lengths.tolist(), found.page_size, len(used), int((count > 1).sum()))
