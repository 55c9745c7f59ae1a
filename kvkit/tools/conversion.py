"""`convert`: write a cache to another file, in another layout or format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvkit import files, layouts
from kvkit.checks.latent import ds_v4_blocks, ds_v4_parts
from kvkit.errors import argument_error, brief, hints_keywords, printable
from kvkit.files import Contents, Description, llama_writing
from kvkit.files.contents import CACHE
from kvkit.formats import BY_DTYPE, FLOATS
from kvkit.layouts import Layout, tables
from kvkit.layouts.tables import BlockTable
from kvkit.layouts.views import KV
from kvkit.tools import recoding
from kvkit.tools import states as llama_states
from kvkit.tools.contents import Source, contents_of
from kvkit.tools.layer_choice import choose_layers
from kvkit.tools.rope_pairs import PairOrder, change_of_pairs
from kvkit.tools.source import (
    DS_V4_LAYOUT,
    LATENT_LINE,
    LINE,
    SLIDING,
    CacheSource,
    axis_sizes_of,
    check_pages_in_pool,
    ds_v4_as_rows,
    in_file,
    leaves,
    parse_layout,
    view_of,
)
from kvkit.tools.state_order import ORDERS, state_order
from kvkit.tools.text import size


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`.

    Attributes
    ----------
    arrays : dict
        The cache in its new layout (``cache``, ``cache.N`` and so on), its tables, and all other arrays
        unchanged. Empty if arrays of a new format were written to a file.
    description : Description
        The new description of the cache.
    before : str
        The old layout.
    bytes : int
        The size of the cache in bytes.
    verified : bool
        Whether the result was read again and compared with the source.
    format : str, optional
        The old format, if it changed.
    metadata : dict
        Other metadata for the file: ``notes`` for readers, and ``sliding``, the description of a second
        cache.
    states : str, optional
        The new order of recurrent states, if it changed.
    notes : tuple of str
        How the source was read, such as a layout that names imply, and what the result does not have.
    """

    arrays: dict[str, Any]
    description: Description
    before: str
    bytes: int
    verified: bool
    format: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    states: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result without arrays, as values that JSON can hold."""
        facts: dict[str, Any] = {"from": self.before, "to": self.description.to_dict(), "bytes": self.bytes}
        facts |= {"verified": self.verified} | ({"from_format": self.format} if self.format else {})
        facts |= {"states": self.states} if self.states else {}
        return facts | ({"notes": list(self.notes)} if self.notes else {})

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis} {count}" for axis, count in self.description.sizes.items())
        compared = ", read back and equal bit for bit" if self.verified else ""
        changed = self.before, self.description.layout
        if self.states and self.before in ORDERS:  # nothing else changed
            changed, sizes = (self.before, self.states), "order of states"
        if self.format:
            changed = self.format, self.description.format
        if second := self.metadata.get(SLIDING):
            sizes += "; with a window: " + ", ".join(f"{axis} {n}" for axis, n in second["sizes"].items())
        text = f"{changed[0]} -> {changed[1]} ({sizes}): {size(self.bytes)}{compared}"
        notes = *self.notes, *self.metadata.get("notes", ())
        return "\n".join([text, *(f"note: {printable(note)}" for note in notes)])


@hints_keywords
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
    states: str | None = None,
    from_states: str | None = None,
    state_heads: str | tuple[int, int] | None = None,
    verify: bool = False,
    compress: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Conversion:
    """Move a cache from one layout to another, bit for bit, with its tables; or convert it to another format.

    Parameters
    ----------
    source : path, mapping of arrays, or Contents
        A file that `kvkit.files.read` takes, or its contents.
    target : path, optional
        A .npz, .npy or .safetensors file to write; or a .bin file, which is a sequence state of llama.cpp,
        with floats or with the codes of another state. On an error it does not change.
    from_layout : str, optional
        The layout of the cache, if its file does not name it.
    to_layout : str, optional
        The new layout: a line, or a name that `kvkit.layouts.parse` knows.
    format : str, optional
        The new format, instead of a layout: ``"float16"``, ``"float32"``, ``"bfloat16"``, a name that
        `kvkit.formats.encode` takes, or one for each side as in ``"q8_0/q4_0"`` (``"kivi2"`` names both).
        Scales of kvkit's own codes are float16. The new cache has the layout ``"l kv | b n h c"`` with a b
        for each sequence, or ``"b l kv | n h c"`` if sequences differ in length. Each b is encoded by itself.
        The other results of `encode` become ``scale.LAYER.KV`` and so on, which `study` reads. Rows without a
        sequence in the tables, or in a saved `PagedCache`, are left out.
    from_format : str, optional
        The format of codes in the source, if its file does not name it.
    sizes : mapping, optional
        Lengths of axes l, b, n, h, c that the shapes do not determine.
    page_size : int or "longest", optional
        Copy the sequences of the tables into consecutive pages of so many rows; "longest" gives each sequence
        one page. Without tables each b is a sequence of length n. By default rows do not move.
    tables_from : path or mapping of arrays, optional
        The tables, if they are not in `source`.
    rotation : str, optional
        The rotation of the stored codes, which is undone (needs `format`): "llama.cpp", which rotates codes
        since April 2026, or any other name that `kvkit.formats.rotate` takes.
    rope_pairs : {"halves", "neighbours"}, optional
        The order of key elements in the result. Rotary embedding rotates elements i and i + D/2 as a pair, as
        in transformers, or 2 i and 2 i + 1, as in llama.cpp's files of Llama.
    from_rope_pairs : {"halves", "neighbours"}, optional
        The order of key elements in the source, if its file does not state it.
    layers : str, optional
        The layers to take, such as "0,2,4:", because layers with a window may differ in length. The numbers
        are those in names of arrays, or count from 0.
    states, from_states : {"KV", "VK", "KV:tiled", "VK:tiled"}, optional
        The orders of recurrent states in the result and in the source, beside a layout or a format or alone:
        [dk, dv] or [dv, dk], with the value heads of llama.cpp, which are tiled. No shape tells them.
    state_heads : str or pair of int, optional
        The heads of keys and of values, such as "16/32", if heads are tiled or rows have those of all heads.
    verify : bool
        Whether to read the result again and compare it with the source.
    compress : {"zstd"}, optional
        Compress the arrays of a .npz file without loss (the extra ``zstd``).
    progress : callable, optional
        A function that is called with (bytes done, all bytes).

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
    order = state_order(states, from_states, state_heads)
    if order is not None:
        source, state_bytes = order.moved(contents_of(source))
        if to_layout is None and format is None:
            facts = dict(source.arrays), source.description, order.before, state_bytes, False
            result = Conversion(*facts, states=order.target)
            return result if target is None else write_conversion(target, result, compress=compress)
    if (to_layout is None) == (format is None):
        got = "neither" if to_layout is None else f"both, {to_layout} and {format}"
        raise argument_error("to_layout", "a layout, or a format instead", got)
    options = from_layout, sizes, ("from_layout", "from_format")
    opened = CacheSource(source, *options)
    if layers is not None:
        opened = CacheSource(choose_layers(opened, layers), *options)
    pairs = None
    if rope_pairs is not None or from_rope_pairs is not None:
        pairs = change_of_pairs(rope_pairs, from_rope_pairs, opened.contents.description)
    if to_layout is None:
        for name, extra in {"page_size": page_size, "tables_from": tables_from, "verify": verify}.items():
            if extra:
                instead = " (kvkit study measures its error)" if name == "verify" else ""
                wanted = f"none with a format, for which rows do not move{instead}"
                raise argument_error(name, wanted, brief(extra))
        result = to_new_format(
            opened, target, format or "", from_format, rotation, pairs, progress, compress=compress
        )
        return replace(result, states=states)
    if rotation is not None:
        raise argument_error("rotation", "a format with it, as codes are decoded to undo it", "to_layout")
    line = parse_layout(to_layout, "to_layout")
    if len(opened.separate) == 2 and "kv" not in line.names and "h" in line.names:
        # Keys and values lie apart: the layout is one of two such caches.
        to_layout = str(Layout(("kv", *line.lists), line.axes, line.value_axes))
    if opened.scales_inside:
        wanted = "a format instead, as channels of a block share scales"
        raise argument_error("to_layout", wanted, to_layout)
    stated = opened.contents.description.layout
    given = None if from_layout is None else parse_layout(from_layout, "from_layout")
    if given is not None and stated is not None and given != layouts.parse(stated):
        raise argument_error("from_layout", f"{stated}, as the file says", from_layout)
    rows, to_blocks = ds_v4_as_rows(opened, from_format), to_layout == DS_V4_LAYOUT
    arrays, descriptions, total = move_caches(
        rows, LATENT_LINE if to_blocks else to_layout, page_size, tables_from, pairs, verify=verify,
        progress=progress,
    )  # fmt: skip
    if to_blocks:
        moved, arrays[CACHE] = arrays[CACHE], [ds_v4_blocks(CACHE, each) for each in arrays[CACHE]]
        for one, blocks in zip(moved, arrays[CACHE], strict=True) if verify else ():
            if not np.array_equal(np.concatenate(ds_v4_parts(CACHE, blocks), 2), one.view(np.uint8)):
                raise argument_error("verify", "the bytes of the rows", "others")
        described = descriptions[CACHE]
        rest = {axis: n for axis, n in described.sizes.items() if axis != "c"}
        descriptions[CACHE] = replace(described, layout=DS_V4_LAYOUT, sizes=rest, format="ds_v4")
    metadata = opened.carried_metadata(descriptions.get(SLIDING))
    facts = arrays, descriptions[CACHE], str(opened.layout), total, verify
    notes = *opened.guess, *(note_on_pages(opened, to_layout) if page_size is None else ())
    result = Conversion(*facts, metadata=metadata, notes=notes, states=states)
    return result if target is None else write_conversion(target, result, compress=compress)


def to_new_format(
    source: CacheSource, target: str | os.PathLike[str] | None, format: str, from_format: str | None,
    rotation: str | None, pairs: PairOrder | None, progress: Callable[[int, int], object] | None,
    compress: str | None,
) -> Conversion:  # fmt: skip
    """Convert the numbers of a cache to a format, and write it."""
    to_state = target is not None and is_state_name(target)
    if to_state and format not in [str(one) for one in FLOATS]:
        raise argument_error("format", "floats, for a state of llama.cpp, which rotates codes", format)
    file = None if to_state else target
    made = recoding.recode(source, file, format, from_format, rotation, pairs, progress, compress=compress)
    facts = made.description, str(source.layout or LINE), made.bytes, False, made.before
    result = Conversion(made.arrays, *facts, metadata=made.metadata, notes=source.guess)
    return write_conversion(target, result, compress=compress) if target is not None and to_state else result


def note_on_pages(source: CacheSource, to_layout: str) -> tuple[str, ...]:
    """Return a note on pages that a layout of whole sequences takes for sequences; () without page tables."""
    found = source.block_tables() if layouts.parse(to_layout) == layouts.parse("hf") else None
    if found is None:
        return ()
    pages = "each page became" if found[1].page_size > 1 else "the rows of each block became"
    return (f"{pages} a sequence of {to_layout}; page_size='longest' writes the sequences of {found[0]}",)


def is_state_name(path: str | os.PathLike[str]) -> bool:
    """Return whether a file of this name is written as a sequence state of llama.cpp."""
    return Path(path).suffix == llama_writing.SUFFIX


def write_conversion(
    path: str | os.PathLike[str], result: Conversion, advance: Callable[[int], object] | None = None,
    compress: str | None = None,
) -> Conversion:  # fmt: skip
    """Write a converted cache to a file of the kind of its suffix; note what such a file cannot hold."""
    if is_state_name(path):
        if compress is not None:
            wanted = "a .npz file, the only kind whose arrays are compressed"
            raise argument_error("compress", wanted, llama_writing.SUFFIX)
        state = llama_states.make_state(result.arrays, result.description, result.metadata)
        llama_writing.write(path, state)
        whole = CacheSource(Contents(files.flat(result.arrays), {}, description=result.description))
        lost = (note.replace("not read", "not written") for note in whole.unread(("token_ids",)))
        result = replace(result, notes=(*result.notes, *lost))
    else:
        files.write(
            path, result.arrays, result.description, metadata=result.metadata, advance=advance,
            compress=compress,
        )  # fmt: skip
    return result


def move_caches(
    source: CacheSource, to_layout: str, page_size: int | str | None, tables_from: Source | None,
    pairs: PairOrder | None, *, verify: bool, progress: Callable[[int, int], object] | None,
) -> tuple[dict[str, Any], dict[str, Description], int]:  # fmt: skip
    """Move all caches of a file to a layout; return (all arrays, descriptions of the caches, bytes)."""
    arrays: dict[str, Any] = {}
    described: dict[str, Description] = {}
    total = 0
    for name, cache in source.caches.items():
        cache.require_cache()
        pages, block_tables = new_pages(cache, page_size, tables_from, name)
        moved = move_cache(cache, to_layout, pages, verify, progress)
        sizes = sizes_after(cache, to_layout, pages)
        is_split = bool(layouts.parse(to_layout).split)
        kv = None if is_split else view_of(moved[CACHE], to_layout, sizes)
        if pairs is not None:
            reorder_pairs(kv, pairs)
        old = cache.contents.description
        described[name] = replace(
            old, layout=to_layout, sizes=sizes if kv is None else axis_sizes_of(kv, to_layout),
            tables="blocks" if block_tables else old.tables,
            rope_pairs=old.rope_pairs if pairs is None else pairs.target,
        )  # fmt: skip
        total += sum(array.nbytes for part in moved.values() for array in leaves(part))
        others = cache.other_arrays(moved, tables=not block_tables)
        arrays |= in_file(name, others | moved | cache.numbers_to_write | block_tables)
    return arrays, described, total


def sizes_after(
    source: CacheSource, to_layout: str, pages: tuple[BlockTable, BlockTable] | None
) -> dict[str, int]:
    """Return the sizes of a converted cache that follow from the source and its new pages."""
    line, sizes = layouts.parse(to_layout), source.sizes | source.axis_sizes
    if ("kv" in layouts.parse(source.layout or "").names) != ("kv" in line.names):
        sizes = {
            axis: n for axis, n in sizes.items() if axis not in "cvs"
        }  # latent rows, whole or two planes
    if pages is not None:
        sizes |= pages_of_target(pages[1])
    if "b" not in line.names and "n" in sizes:
        sizes["n"] *= sizes.get("b", 1)
    return {axis: n for axis, n in sizes.items() if axis in line.names or axis == "v"}


def pages_of_target(pages: BlockTable) -> dict[str, int]:
    """Return the blocks and the tokens of a block of new pages."""
    return {"b": max(int((pages.table >= 0).sum()), 1), "n": pages.page_size}


def reorder_pairs(kv: KV | None, pairs: PairOrder) -> None:
    """Reorder the elements of keys so that the wanted pairs rotate together."""
    if kv is None:
        raise argument_error("rope_pairs", "a layout whose content is not split", "another")
    for layer in kv.keys:
        for keys in layer if isinstance(layer, tuple) else [layer]:
            if BY_DTYPE.get(keys.dtype) not in FLOATS:
                wanted = "floats, or a format instead of the layout"
                raise argument_error("rope_pairs", wanted, str(keys.dtype))
            if pairs.target != pairs.before:
                keys[...] = keys[..., pairs.places(keys.shape[-1])]


def move_cache(
    source: CacheSource, to_layout: str, pages: tuple[BlockTable, BlockTable] | None, verify: bool,
    progress: Callable[[int, int], object] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the cache in its new layout, and its scales if they have as many axes."""
    axes, own = leaves(source.cache)[0].ndim, source.own_arrays
    parts = {
        name: part for name, part in own.items() if name == CACHE or {x.ndim for x in leaves(part)} == {axes}
    }
    total, done = sum(array.nbytes for part in parts.values() for array in leaves(part)), 0
    target = pages_of_target(pages[1]) if pages else None
    moved: dict[str, Any] = {}
    for name, part in parts.items():

        def advance(now: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + now, total)

        sizes = {axis: n for axis, n in source.sizes.items() if name == CACHE or axis != "c"}
        with source.naming(source.latent_planes):
            moved[name] = layouts.convert(
                part, source.layout or "", to_layout, sizes=sizes or None, to_sizes=target, tables=pages,
                verify=verify, progress=advance,
            )  # fmt: skip
        done += sum(array.nbytes for array in leaves(part))
    return moved


def new_pages(
    source: CacheSource, page_size: int | str | None, tables_from: Source | None, cache: str = CACHE
) -> tuple[tuple[BlockTable, BlockTable] | None, dict[str, np.ndarray]]:
    """Return ((old pages, new pages), or None if rows do not move; new block tables by name)."""
    if page_size is None and tables_from is None:
        return None, {}
    other = source if tables_from is None else CacheSource(tables_from).caches.get(cache, source)
    found = other.block_tables(other.page_size() or source.page_size())
    if page_size is None:
        return None, block_tables(found[1], other.places_of_tokens) if found else {}
    if found and (kv := source.one_head_view()[0]) is not None and not isinstance(kv.keys[0], tuple):
        check_pages_in_pool(*found, kv.keys[0].shape[0] * kv.keys[0].shape[1])
    if found:
        old = found[1]
    else:  # each b is a sequence of length n
        sizes = source.axis_sizes
        if "n" not in sizes:
            wanted = f"page tables, as '{source.layout}' has no sequence for each b"
            raise argument_error("tables_from", wanted, "None")
        old = tables.from_batch([sizes["n"]] * sizes.get("b", 1), sizes["n"])
    count = max(int(old.lengths.max(initial=1)), 1) if isinstance(page_size, str) else page_size
    new = tables.packed(old.lengths, count)
    return (old, new), block_tables(new, other.places_of_tokens if found else {})


def block_tables(pages: BlockTable, places: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: array} of block tables, with `places`, the positions that do not count from 0."""
    numbers, lengths = tables.to_blocks(pages)
    found = {
        "block_tables": numbers.astype(np.int32),
        "context_lens": lengths.astype(np.int32),
        "page_size": np.array(pages.page_size),
    }
    return found | dict(places)
