"""`convert`: write a cache to another file, in another layout or format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvkit import files, layouts
from kvkit.checks.latent import ds_v4_blocks, ds_v4_parts
from kvkit.errors import argument_error, brief, describe, printable
from kvkit.files import Contents, Description, llama_writing
from kvkit.files.contents import CACHE
from kvkit.formats import BY_DTYPE, FLOATS
from kvkit.layouts import tables
from kvkit.layouts.tables import BlockTable
from kvkit.layouts.views import KV
from kvkit.tools import recoding, states
from kvkit.tools.contents import Source
from kvkit.tools.layer_choice import choose_layers
from kvkit.tools.rope_pairs import PairOrder, change_of_pairs
from kvkit.tools.source import (
    DS_V4_LAYOUT,
    LATENT_LINE,
    LINE,
    SLIDING,
    TABLES,
    CacheSource,
    axis_sizes_of,
    check_pages_in_pool,
    ds_v4_as_rows,
    in_file,
    leaves,
    parse_layout,
    view_of,
)
from kvkit.tools.text import size


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`.

    Attributes
    ----------
    arrays : dict
        The cache in its new layout under the names of the layout, its tables, and all other arrays unchanged.
        Empty if `format` wrote a file.
    description : Description
        The new description of the cache.
    before : str
        The old layout.
    bytes : int
        The size of its elements in bytes.
    verified : bool
        Whether the result was read again and compared.
    format : str, optional
        The old format, if it changed.
    metadata : dict
        Other metadata for the file: ``notes`` for readers, and ``sliding``, the description of a second
        cache.
    """

    arrays: dict[str, Any]
    description: Description
    before: str
    bytes: int
    verified: bool
    format: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON has it, without the arrays."""
        said = self.description.to_dict()
        found = {"from": self.before, "to": said, "bytes": self.bytes, "verified": self.verified}
        return found | ({"from_format": self.format} if self.format else {})

    def __str__(self) -> str:
        said = ", ".join(f"{axis} {count}" for axis, count in self.description.sizes.items())
        compared = ", read back and equal bit for bit" if self.verified else ""
        changed = self.before, self.description.layout
        if self.format:
            changed = self.format, self.description.format
        if second := self.metadata.get(SLIDING):
            said += "; with a window: " + ", ".join(f"{axis} {n}" for axis, n in second["sizes"].items())
        text = f"{changed[0]} -> {changed[1]} ({said}): {size(self.bytes)}{compared}"
        return "\n".join([text, *(f"note: {printable(note)}" for note in self.metadata.get("notes", ()))])


def convert(
    source: Source,
    target: str | os.PathLike[str] | None,
    *,
    from_layout: str | None = None,
    to_layout: str | None = None,
    format: str | None = None,
    from_format: str | None = None,
    sizes: Mapping[str, int] | None = None,
    page_size: int | str | None = None,
    tables_from: Source | None = None,
    rotation: str | None = None,
    rope_pairs: str | None = None,
    from_rope_pairs: str | None = None,
    layers: str | None = None,
    verify: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Conversion:
    """Move a cache from one layout to another, bit for bit, with its tables.

    Parameters
    ----------
    source : path, mapping of arrays, or Contents
        A file that `kvkit.files.read` takes, or its contents.
    target : path, optional
        A .npz, .npy or .safetensors file to write; or a .bin file, llama.cpp's state of one sequence, with
        floats or with the codes of another state. On an error it does not change.
    from_layout : str, optional
        The layout of the cache, if its file does not name it.
    to_layout : str, optional
        A line, or a name that `kvkit.layouts.parse` knows.
    format : str, optional
        The new format, in place of a layout: ``"float16"``, ``"float32"``, ``"bfloat16"`` or a name that
        `kvkit.formats.encode` takes, also one for each side as in ``"q8_0/q4_0"`` (``"kivi2"`` names both).
        kvkit's own codes get scales of 16 bits. The new cache has the layout ``"l kv | b n h c"`` with a b
        for each sequence, or ``"b l kv | n h c"`` if sequences differ in length. Each b is encoded apart. The
        other results of `encode` become ``scale.LAYER.KV`` and so on, which `study` reads. Only rows of
        sequences are converted: those of the tables, or of the rows of a saved `PagedCache`.
    from_format : str, optional
        The format of codes in the source, if its file does not name it.
    sizes : mapping, optional
        Lengths of axes l, b, n, h, c that the shapes do not determine.
    page_size : int or "longest", optional
        Rearrange the sequences of the tables into consecutive pages of so many rows; "longest" gives each
        sequence one page. Without tables each b is a sequence of length n. By default rows do not move.
    tables_from : path or mapping of arrays, optional
        The tables, if they are not in `source`.
    rotation : str, optional
        The rotation of the stored codes, which is undone (needs `format`): "llama.cpp", which rotates codes
        since April 2026, or any other name that `kvkit.formats.rotate` takes.
    rope_pairs : {"halves", "neighbours"}, optional
        The order of key elements in the result: elements i and i + D/2 rotate as a pair, as in transformers,
        or 2 i and 2 i + 1, as in llama.cpp's files of Llama.
    from_rope_pairs : {"halves", "neighbours"}, optional
        The order of key elements in the source, if its file does not state it.
    layers : str, optional
        The layers to take, such as "0,2,4:", because layers with windows may have another length. Numbers are
        those of the arrays' names, or count from 0.
    verify : bool
        Whether to read the result again and compare it with the source.
    progress : callable, optional
        Called with (bytes done, bytes in all).

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
    hf -> vllm-lbnhc (l 2, b 2, n 4, h 3, c 8): 1.5 KiB
    """
    if (to_layout is None) == (format is None):
        got = "neither" if to_layout is None else f"both, {to_layout} and {format}"
        raise argument_error("to_layout", "a layout, or a format in its place", got)
    named = from_layout, sizes, ("from_layout", "from_format")
    found = CacheSource(source, *named)
    if layers is not None:
        found = CacheSource(choose_layers(found, layers), *named)
    pairs = None
    if rope_pairs is not None or from_rope_pairs is not None:
        pairs = change_of_pairs(rope_pairs, from_rope_pairs, found.contents.description)
    if to_layout is None:
        for name, extra in {"page_size": page_size, "tables_from": tables_from, "verify": verify}.items():
            if extra:
                raise argument_error(name, "none with a format, as rows stay where they are", brief(extra))
        to_state = target is not None and is_state_name(target)
        if to_state and format not in [str(one) for one in FLOATS]:
            raise argument_error("format", "floats, for a state of llama.cpp, which rotates codes", format)
        made = recoding.recode(
            found, None if to_state else target, format or "", from_format, rotation, pairs, progress
        )
        before = str(found.layout or LINE)
        result = Conversion(
            made.arrays, made.description, before, made.bytes, False, made.before, metadata=made.metadata
        )
        if target is not None and to_state:
            write_conversion(target, result)
        return result
    if rotation is not None:
        raise argument_error("rotation", "a format beside it, as codes are decoded to undo it", "to_layout")
    parse_layout(to_layout, "to_layout")
    if found.scales_inside:
        wanted = "a format in its place, as channels of a block share scales"
        raise argument_error("to_layout", wanted, to_layout)
    said = found.contents.description.layout
    given = None if from_layout is None else parse_layout(from_layout, "from_layout")
    if given is not None and said is not None and given != layouts.parse(said):
        raise argument_error("from_layout", f"{said}, as the file says", from_layout)
    rows, to_blocks = ds_v4_as_rows(found, from_format), to_layout == DS_V4_LAYOUT
    arrays, descriptions, total = move_caches(
        rows, LATENT_LINE if to_blocks else to_layout, page_size, tables_from, pairs, verify=verify,
        progress=progress,
    )  # fmt: skip
    if to_blocks:
        arrays[CACHE] = [rows_as_ds_v4(each, verify) for each in arrays[CACHE]]
        sizes_of_rows = {axis: n for axis, n in descriptions[CACHE].sizes.items() if axis != "c"}
        descriptions[CACHE] = replace(
            descriptions[CACHE], layout=DS_V4_LAYOUT, sizes=sizes_of_rows, format="ds_v4"
        )
    metadata = found.carried_metadata(descriptions.get(SLIDING))
    result = Conversion(arrays, descriptions[CACHE], str(found.layout), total, verify, metadata=metadata)
    if target is not None:
        write_conversion(target, result)
    return result


def rows_as_ds_v4(rows: np.ndarray, verify: bool) -> np.ndarray:
    """Return rows of 584 bytes as blocks that have all codes, then all scales; perhaps read them back."""
    blocks = ds_v4_blocks(CACHE, rows)
    if verify and not np.array_equal(np.concatenate(ds_v4_parts(CACHE, blocks), 2), rows.view(np.uint8)):
        raise argument_error("verify", "the bytes of the rows", "others")
    return blocks


def is_state_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a file of this name gets llama.cpp's state of one sequence."""
    return Path(path).suffix == llama_writing.SUFFIX


def write_conversion(
    path: str | os.PathLike[str], result: Conversion, advance: Callable[[int], object] | None = None
) -> None:
    """Write a converted cache to the kind of file that the path names."""
    if is_state_name(path):
        state = states.make_state(result.arrays, result.description, result.metadata)
        llama_writing.write(path, state)
    else:
        files.write(path, result.arrays, result.description, metadata=result.metadata, advance=advance)


def move_caches(
    source: CacheSource,
    to_layout: str,
    page_size: int | str | None,
    tables_from: Source | None,
    pairs: PairOrder | None,
    *,
    verify: bool,
    progress: Callable[[int, int], object] | None,
) -> tuple[dict[str, Any], dict[str, Description], int]:
    """Convert all caches of a file; return (all arrays, descriptions of the caches, bytes)."""
    arrays: dict[str, Any] = {}
    described: dict[str, Description] = {}
    total = 0
    for name, each in source.caches.items():
        each.require_cache()
        pages, block_tables = new_pages(each, page_size, tables_from, name)
        made = move_cache(each, to_layout, pages, verify, progress)
        before, after = (layouts.parse(line or "").names for line in (each.layout, to_layout))
        inner = "hcvs" if ("kv" in before) == ("kv" in after) else "h"  # latent rows, whole or as two planes
        kv = view_of(made[CACHE], to_layout, {axis: n for axis, n in each.sizes.items() if axis in inner})
        if pairs is not None:
            reorder_pairs(kv, pairs)
        said = each.contents.description
        described[name] = replace(
            said,
            layout=to_layout,
            sizes={} if kv is None else axis_sizes_of(kv, to_layout),
            tables="blocks" if block_tables else said.tables,
            rope_pairs=said.rope_pairs if pairs is None else pairs.target,
        )
        total += sum(array.nbytes for part in made.values() for array in leaves(part))
        others = each.other_arrays(made, tables=not block_tables)
        arrays |= in_file(name, others | made | each.numbers_to_write | block_tables)
    return arrays, described, total


def reorder_pairs(kv: KV | None, pairs: PairOrder) -> None:
    """Reorder the elements of keys so that the wanted pairs rotate together."""
    if kv is None:
        raise argument_error("rope_pairs", "a layout whose content is not split", "another")
    for layer in kv.keys:
        for keys in layer if isinstance(layer, tuple) else [layer]:
            if BY_DTYPE.get(keys.dtype) not in FLOATS:
                wanted = "floats, or a format in place of the layout"
                raise argument_error("rope_pairs", wanted, str(keys.dtype))
            if pairs.target != pairs.before:
                keys[...] = keys[..., pairs.places(keys.shape[-1])]


def move_cache(
    source: CacheSource,
    to_layout: str,
    pages: tuple[BlockTable, BlockTable] | None,
    verify: bool,
    progress: Callable[[int, int], object] | None,
) -> dict[str, Any]:
    """Return the cache in its new layout, with scales beside it that have as many axes."""
    axes = leaves(source.cache)[0].ndim
    parts = {
        name: part
        for name, part in source.own_arrays.items()
        if {each.ndim for each in leaves(part)} == {axes}
    }
    total, done = sum(array.nbytes for part in parts.values() for array in leaves(part)), 0
    target = {"b": max(int((pages[1].table >= 0).sum()), 1), "n": pages[1].page_size} if pages else None
    made: dict[str, Any] = {}
    for name, part in parts.items():

        def advance(now: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + now, total)

        sizes = {axis: n for axis, n in source.sizes.items() if name == CACHE or axis != "c"}
        with source.naming():
            made[name] = layouts.convert(
                part, source.layout or "", to_layout, sizes=sizes or None, to_sizes=target, tables=pages,
                verify=verify, progress=advance,
            )  # fmt: skip
        done += sum(array.nbytes for array in leaves(part))
    return made


def new_pages(
    source: CacheSource, page_size: int | str | None, tables_from: Source | None, cache: str = CACHE
) -> tuple[tuple[BlockTable, BlockTable] | None, dict[str, np.ndarray]]:
    """Return (pages of source and target, or None if rows stay; new block tables by name)."""
    if page_size is None and tables_from is None:
        return None, {}
    other = source if tables_from is None else CacheSource(tables_from).caches.get(cache, source)
    found = other.block_tables(other.page_size() or source.page_size())
    if page_size is None:
        return None, block_tables(found[1], other.places_of_tokens) if found else {}
    if found and (kv := source.one_head_view()[0]) is not None and not isinstance(kv.keys[0], tuple):
        check_pages_in_pool(*found, kv.keys[0].shape[0] * kv.keys[0].shape[1])
    old = found[1] if found else whole_sequences(source)
    count = max(int(old.lengths.max(initial=1)), 1) if isinstance(page_size, str) else page_size
    new = tables.packed(old.lengths, count)
    return (old, new), block_tables(new, other.places_of_tokens if found else {})


def whole_sequences(source: CacheSource) -> BlockTable:
    """Return pages in which each b is a sequence of length n."""
    sizes = source.axis_sizes
    if "n" not in sizes:
        wanted = f"tables, as '{source.layout}' is no cache of a sequence for each b"
        raise argument_error("tables_from", wanted, "None")
    return tables.from_batch([sizes["n"]] * sizes.get("b", 1), sizes["n"])


def block_tables(pages: BlockTable, places: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return block tables by the names of engines, and positions if they do not count from 0."""
    numbers, lengths = tables.to_blocks(pages)
    found = {
        "block_tables": numbers.astype(np.int32),
        "context_lens": lengths.astype(np.int32),
        "page_size": np.array(pages.page_size),
    }
    return found | dict(places)


def join(
    sources: Iterable[Source] | Mapping[str, Source],
    *,
    axis: str = "h",
    layout: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Contents:
    """Join the caches of tensor-parallel ranks, which have some heads each of the same tokens.

    Parameters
    ----------
    sources : iterable of path, mapping of arrays, or Contents
        The caches, in the order of their heads; or a dict of them, whose keys name them in errors.
    axis : "h"
        The axis that is split.
    layout, sizes
        The layout and sizes of each, as `convert` takes them.

    Returns
    -------
    Contents
        The whole cache, for `convert`; everything else is that of the first source.

    Raises
    ------
    KvkitError
        If the caches differ in anything but their heads, or have scales beside them.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools import convert, join
    >>> ranks = [{"cache": [[np.full((1, 2, 5, 8), i, np.float16)] * 2]} for i in range(4)]
    >>> whole = convert(join(ranks, layout="hf"), None, to_layout="vllm-lbnhc")
    >>> whole.arrays["cache"][0].shape, whole.arrays["cache"][0][0, 0, ::2, 0].tolist()
    ((1, 5, 8, 16), [0.0, 1.0, 2.0, 3.0])
    """
    if axis != "h":
        raise argument_error("axis", "'h', the heads", brief(repr(axis)))
    named = dict(sources) if isinstance(sources, Mapping) else dict(enumerate(sources))
    found = [CacheSource(each, layout, sizes, ("from_layout", "from_format")) for each in named.values()]
    for name, one in zip(named, found, strict=True):
        one.name = name if isinstance(name, str) else one.name
    if not found:
        raise argument_error("sources", "a cache or more", "none")
    kept = [one.other_arrays(one.own_arrays, tables=True) for one in found]
    for one, others in zip(found, kept, strict=True):
        if one.sliding is not None:
            raise argument_error("sources", "files of one cache", f"two caches in {one.name}")
        if len(one.require_view().keys) != (layers := len(found[0].require_view().keys)):
            wanted = f"layers as {found[0].name} has, {layers}"
            raise argument_error("sources", wanted, f"{len(one.require_view().keys)} in {one.name}")
        if one.scales or one.scales_inside:
            wanted = "floats, or codes with scales in their rows"
            raise argument_error("sources", wanted, f"scales in {one.name}")
        if not one.separate and not {"kv", "h"} & parse_layout(one.layout or LINE, "layout").names:
            wanted = "caches with heads, which latent rows do not have: each rank has all of them"
            raise argument_error("sources", wanted, one.name)
        tables_differ = [name for name in kept[0].keys() | others.keys() if name.startswith(TABLES)
                         and not np.array_equal(kept[0].get(name, ()), others.get(name, ()))]  # fmt: skip
        if tables_differ:
            raise argument_error("sources", f"the same {tables_differ[0]}", f"another one in {one.name}")
    cache = [
        [join_heads([one.name for one in found], [getattr(one.require_view(), side)[layer] for one in found])
         for side in ("keys", "values")]
        for layer in range(layers)
    ]  # fmt: skip
    arrays = kept[0] | found[0].numbers_to_write | files.flat({CACHE: cache})
    described = replace(found[0].contents.description, layout=LINE, sizes={})
    return replace(found[0].contents, arrays=arrays, description=described)


def join_heads(names: Sequence[str], parts: Sequence[Any]) -> np.ndarray:
    """Join the parts of several ranks to one array [blocks, tokens, heads, content]."""
    arrays = [np.stack(part) if isinstance(part, tuple) else part for part in parts]
    for name, array in zip(names, arrays, strict=True):
        if (array.shape[:2], array.shape[3:], array.dtype) != (
            arrays[0].shape[:2], arrays[0].shape[3:], arrays[0].dtype,
        ):  # fmt: skip
            expected = f"{describe(arrays[0])} but for its heads, as {names[0]}"
            raise argument_error("sources", expected, f"{describe(array)} in {name}")
    return np.ascontiguousarray(np.concatenate(arrays, 2))
