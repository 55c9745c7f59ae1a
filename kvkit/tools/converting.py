"""`convert`: a cache in a file, from layout to layout or format to format, into another file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit import files, layouts
from kvkit.errors import argument_error
from kvkit.files import Contents, Description
from kvkit.files.arrays import BESIDE, CACHE
from kvkit.layouts import tables
from kvkit.tools import recoding
from kvkit.tools.inspecting import TABLES, Source, pages_of, taken, viewed
from kvkit.tools.text import size

LONGEST = "longest"  # a page for each sequence


@dataclass(frozen=True)
class Conversion:
    """What `convert` did.

    Attributes
    ----------
    arrays : dict
        The cache in its new layout, ``"cache"`` as the layout has it; its tables; all else as it was. None of
        numbers that were coded again, into a file.
    description : Description
        What is said of it.
    before : str
        The layout that it had.
    bytes : int
        Of its elements.
    verified : bool
        Whether it was read back and compared.
    format : str, optional
        What held its numbers, if they were coded again.
    """

    arrays: dict[str, Any]
    description: Description
    before: str
    bytes: int
    verified: bool
    format: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without the arrays."""
        said = self.description.to_dict()
        found = {"from": self.before, "to": said, "bytes": self.bytes, "verified": self.verified}
        return found | ({"from_format": self.format} if self.format else {})

    def __str__(self) -> str:
        said = ", ".join(f"{axis} {count}" for axis, count in self.description.sizes.items())
        compared = ", read back and equal bit for bit" if self.verified else ""
        changed = self.before, self.description.layout
        if self.format:
            changed = self.format, self.description.format
        return f"{changed[0]} -> {changed[1]} ({said}): {size(self.bytes)}{compared}"


def convert(
    source: Source | Contents,
    target: str | os.PathLike[str] | None,
    *,
    from_layout: str | None = None,
    to_layout: str | None = None,
    format: str | None = None,
    from_format: str | None = None,
    sizes: Mapping[str, int] | None = None,
    page_size: int | str | None = None,
    tables_from: Source | None = None,
    verify: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Conversion:
    """Move a cache from one layout to another, bit for bit, with its tables.

    Parameters
    ----------
    source : path, mapping of arrays, or Contents
        A file that `kvkit.files.read` takes, or what is in one.
    target : path, optional
        A .npz, .npy or .safetensors file to write; it is whole or untouched.
    from_layout : str, optional
        How the cache lies, if its file does not say so.
    to_layout : str, optional
        A line, or a name that `kvkit.layouts.parse` knows.
    format : str, optional
        In the place of a layout: how the numbers are to be held, ``"float16"``, ``"float32"``, ``"bfloat16"``
        or a format, as `kvkit.formats.encode` takes it (``"kivi2"`` names both sides; kvkit's own codes have
        scales of 16 bits). The cache then lies as ``"l kv | b n h c"``, a b for each sequence, all of one
        length; each b is encoded for itself, and what `encode` returns beside codes is ``scale.LAYER.KV`` and
        so on, which `study` reads. Of tables the sequences' rows are converted, of what `PagedCache.save`
        wrote those of its rows.
    from_format : str, optional
        What codes in the source are, if its file does not say so; floats are what they are.
    sizes : mapping, optional
        Of the axes l, b, n, h, c that shapes do not tell.
    page_size : int or "longest", optional
        New pages of so many rows, one after the other, for all sequences of the tables (without tables: for
        each b as long as n); "longest" makes one page of each sequence. If not given rows stay where they
        are.
    tables_from : path or mapping of arrays, optional
        The tables, if they are not in `source`.
    verify : bool
        Read the result back and compare.
    progress : callable, optional
        Hears of bytes done, and bytes in all.

    Returns
    -------
    Conversion

    Raises
    ------
    KvkitError
        If files, layouts, sizes or tables contradict each other; nothing has been written.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import convert
    >>> layers = [[np.zeros((1, 3, 5, 8), np.float16) for _ in range(2)] for _ in range(2)]
    >>> done = convert({"cache": layers}, None, from_layout="hf", to_layout="vllm-lbnhc", page_size=4)
    >>> done.arrays["cache"][0].shape, done.arrays["block_tables"].tolist()
    ((2, 4, 3, 16), [[0, 1]])
    >>> print(done)
    hf -> vllm-lbnhc (l 2, b 2, n 4, h 3, c 8): 960 B
    """
    contents = source if isinstance(source, Contents) else taken(source)
    if (to_layout is None) == (format is None):
        raise argument_error(
            "to_layout", "a layout, or a format in its place", f"{to_layout!r} and {format!r}"
        )
    if to_layout is None or format is not None:
        if page_size is not None or tables_from is not None or verify:
            raise argument_error(
                "page_size", "no page_size, tables_from or verify, with a format", "one of them"
            )
        line = contents.description.layout or from_layout or recoding.LINE
        arrays, said, coded, total = recoding.recoded(
            contents, target, format, from_format, from_layout, sizes, progress
        )
        return Conversion(arrays, said, line, total, False, coded)
    before = layout_of(contents, from_layout)
    known = dict(contents.description.sizes) | dict(sizes or {})
    if (cache := contents.cache) is None:
        raise argument_error(
            "source", "arrays called cache, cache.0 and so on", ", ".join(contents.arrays) or "none"
        )
    named = {CACHE: cache}
    for name in BESIDE:
        found = files.nested(contents.arrays, name)
        if found is not None and leaves(found)[0].ndim == leaves(cache)[0].ndim:  # its axes are the layout's
            named[name] = found
    pages, moved = moves(contents, cache, before, known, page_size, tables_from)
    total, done = sum(array.nbytes for name in named for array in leaves(named[name])), 0
    made: dict[str, Any] = {}
    for name, cache in named.items():
        own = {axis: count for axis, count in known.items() if name == "cache" or axis != "c"}
        made[name] = layouts.convert(
            cache, before, to_layout, sizes=own or None, tables=pages, verify=verify,
            to_sizes=target_sizes(pages) if page_size else None,
            progress=None if progress is None else told(progress, done, total),
        )  # fmt: skip
        done += sum(array.nbytes for array in leaves(cache))
    parts = {id(array) for cache in named.values() for array in leaves(cache)}
    old = {name for name, array in contents.arrays.items() if id(array) in parts}
    old |= {name for name in contents.arrays if moved and name.startswith(TABLES)}
    kept = {name: array for name, array in contents.arrays.items() if name not in old}
    _, found = viewed_or_none(made["cache"], to_layout, known)
    said = replace(
        contents.description,
        layout=to_layout,
        sizes=found,
        tables="blocks" if moved else contents.description.tables,
    )
    result = Conversion(kept | made | moved, said, before, done, verify)
    if target is not None:
        files.write(target, result.arrays, said)
    return result


def layout_of(contents: Contents, given: str | None) -> str:
    """How a cache lies: the caller says, or its file; both only if they agree."""
    said = contents.description.layout
    if given is None and said is None:
        raise argument_error("from_layout", "a layout, as the file does not say its own", "None")
    if given is not None and said is not None and layouts.parse(given) != layouts.parse(said):
        raise argument_error("from_layout", f"{said}, as the file says", given)
    return given or said or ""


def moves(contents, cache, before, known, page_size, tables_from):
    """(tables of source and target, or None; the new tables by name)."""
    found = pages_of(taken(tables_from) if tables_from is not None else contents)
    if page_size is None:
        if tables_from is None:
            return None, {}
        return None, block_tables(found[1]) if found else {}
    old = found[1] if found else whole(cache, before, known)
    count = max(int(old.lengths.max(initial=1)), 1) if page_size == LONGEST else page_size
    new = tables.packed(old.lengths, count)
    return (old, new), block_tables(new)


def whole(cache, before: str, known: Mapping[str, int]) -> tables.Pages:
    """A sequence for each b, as long as n."""
    _, found = viewed_or_none(cache, before, known)
    if not {"b", "n"} <= found.keys():
        raise argument_error(
            "tables_from", f"tables, as '{before}' is no cache of a sequence for each b", "None"
        )
    return tables.from_batch([found["n"]] * found["b"], found["n"])


def block_tables(pages: tables.Pages) -> dict[str, np.ndarray]:
    numbers, lengths = tables.to_blocks(pages)
    return {
        "block_tables": numbers.astype(np.int32),
        "context_lens": lengths.astype(np.int32),
        "page_size": np.array(pages.page_size),
    }


def target_sizes(pages: tuple[tables.Pages, tables.Pages]) -> dict[str, int]:
    """Blocks and rows of a new cache."""
    _, new = pages
    return {"b": max(int((new.table >= 0).sum()), 1), "n": new.page_size}


def viewed_or_none(cache, line: str, known: Mapping[str, int]):
    """Views and sizes of a cache, as far as there are views; blocks and pages as its own arrays have them."""
    return viewed(cache, line, {axis: count for axis, count in known.items() if axis in "hcvs"})


def told(progress: Callable[[int, int], object], before: int, total: int) -> Callable[[int, int], object]:
    """The same for one of several parts."""
    return lambda done, _: progress(before + done, total)


def leaves(found):
    """The arrays of nested lists."""
    return list(files.flat({"": found}).values())
