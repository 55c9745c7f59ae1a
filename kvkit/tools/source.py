"""Find the cache in a file, or in arrays by name: its arrays, layout, sizes, scales, format, block tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from kvkit import files, layouts
from kvkit.checks.latent import ds_v4_parts
from kvkit.errors import KvkitError, argument_error, brief, describe
from kvkit.files import Contents, Description, llama
from kvkit.files.contents import BESIDE, CACHE, nested
from kvkit.files.description import parse_description
from kvkit.formats import FLOATS, NAMED
from kvkit.formats.elements import FLOATS8
from kvkit.layouts import Layout, tables
from kvkit.layouts.tables import BlockTable
from kvkit.layouts.views import KV
from kvkit.tools import openvino
from kvkit.tools.contents import Source, contents_of
from kvkit.tools.names import NAMES, PAGED_NAMES, SIDES, LayerNames, find_layers, rename_tables, some_names
from kvkit.tools.saved_pages import order_cells, pages_of_cells, pages_of_saved

AXES = {True: {3: "n h c", 4: "b n h c", 5: "l b n h c"}, False: {3: "n h c", 4: "l n h c", 5: "l b n h c"}}
LINE, LATENT_LINE = "l kv | b n h c", "l | b n c"  # of rows, and of latent rows, as `convert` writes them
DS_V4_LAYOUT = "flashmla-ds-v4"  # its codes and scales are apart
SLIDING = "sliding"  # the name of a second cache, of layers with a window; a prefix of its tables
BLOCKS = "block tables"
PACKED = "packed sequences"  # a convention of tables: `seqstarts`
TABLES = (  # prefixes of the names of tables
    "sequences.", "published.", "blocks", "block_tables", "context_lens", "page_size", "kv_", "slots",
    "cache_cells.", "cachestarts", "kvstarts", "seqstarts", "num_blocks", "slot_",
    "block_indices", "past_lens", "subsequence_begins",
)  # fmt: skip


class CacheSource:
    """Finds the cache in a file, or in arrays by name, for all tools. Everything is read on first use.

    The cache is the array ``cache``, arrays ``cache.N`` and so on, a pair of `NAMES`, arrays of each layer by
    the patterns of `kvkit.tools.names`, or a cache object. Scales are ``scale`` and the other results of
    `kvkit.formats.encode`, or ``key_scale`` and ``value_scale``.

    Parameters
    ----------
    source : path, mapping of arrays, or Contents
        A file that `kvkit.files.read` takes, its contents, or arrays and lists of arrays by name.
    layout : str or Layout, optional
        The layout of the cache, instead of the one in the source. A pair of names needs none.
    sizes : mapping, optional
        Lengths of axes l, b, n, h, c that the shapes do not determine.
    arguments : pair of str
        The names of the arguments for layout and format in error messages.
    """

    def __init__(
        self,
        source: Source,
        layout: str | Layout | None = None,
        sizes: Mapping[str, int] | None = None,
        arguments: tuple[str, str] = ("layout", "format"),
    ) -> None:
        self.contents = contents_of(source)
        self.scales_inside: dict[str, KV] = {}
        stated = layout or self.contents.description.layout
        if stated in openvino.FORMATS:
            self.contents, self.scales_inside = openvino.split_blocks(self.contents, str(stated))
            layout = stated = openvino.FLOATS
        if stated == openvino.FLOATS:
            self.contents = openvino.with_tables(self.contents)
        if (renamed := rename_tables(self.contents.arrays)) is not self.contents.arrays:
            self.contents = replace(self.contents, arrays=dict(renamed))
        self.arrays = self.contents.arrays
        named = isinstance(source, (str, os.PathLike))
        self.name = str(source) if named else self.contents.kind
        self.given_layout, self.given_sizes = layout, dict(sizes or {})
        self.sizes = dict(self.contents.description.sizes) | self.given_sizes
        self.arguments = arguments
        self.stated_layout = layout or self.contents.description.layout or self.text("layout")
        # Whether names alone decide the layout.
        self.implied = self.stated_layout is None and self.layer_names is not None
        if self.implied and self.layer_names is not None and self.layer_names.heads_first:
            self.stated_layout = Layout(("l",), *[layouts.parse("hf").axes] * 2)

    def text(self, name: str) -> str | None:
        """Return the text in an array; None without that array."""
        array = self.arrays.get(name)
        if array is None:
            return None
        if array.ndim or not isinstance(array.item(), str):
            raise argument_error(name, "a text", describe(array))
        return str(array.item())

    def integer(self, name: str) -> int | None:
        """Return the integer in an array; None without that array."""
        array = self.arrays.get(name)
        return int(array) if array is not None and array.ndim == 0 and array.dtype.kind in "iu" else None

    @property
    def saved(self) -> dict[str, Any]:
        """Return the metadata of a cache that kvkit saved; {} for other files."""
        about = self.contents.metadata.get("cache")
        return about if isinstance(about, dict) else {}

    @property
    def paged(self) -> Mapping[str, Any]:
        """Return the metadata of a saved `PagedCache`; {} for other files."""
        found = self.saved.get("paged")
        return found if isinstance(found, dict) else {}

    @cached_property
    def sliding(self) -> CacheSource | None:
        """Return the second cache of a file, which has the layers with a window; None without one."""
        if nested(self.arrays, SLIDING) is None:
            return None
        arrays = {name: array for old, array in self.arrays.items() if (name := name_in_second(old))}
        about = self.contents.metadata.get(SLIDING)
        said = parse_description(self.name, about) if about is not None else replace(
            self.contents.description, sizes={axis: self.sizes[axis] for axis in "hcv" if axis in self.sizes}
        )  # fmt: skip
        contents = Contents(arrays, {}, kind=self.contents.kind, description=said)
        sizes = {axis: count for axis, count in self.given_sizes.items() if axis in "hcv"}
        return CacheSource(contents, self.given_layout, sizes, self.arguments)

    @property
    def caches(self) -> dict[str, CacheSource]:
        """Return the cache, and a second one if any, by the names of their arrays."""
        return {CACHE: self} | ({} if self.sliding is None else {SLIDING: self.sliding})

    def carried_metadata(self, second: Description | None, rotation: str | None = None) -> dict[str, Any]:
        """Return the other metadata of a converted file: notes for the user, and its second cache."""
        gone = {llama.HEADS} | ({llama.ROTATED} if rotation is not None else set())
        notes = [note for note in self.contents.notes if note not in gone]
        found: dict[str, Any] = {"notes": notes} if notes else {}
        return found | ({} if second is None else {SLIDING: second.to_dict()})

    @cached_property
    def places_of_tokens(self) -> dict[str, np.ndarray]:
        """Return the packed positions of all tokens, and those in images; {} if they count from 0."""
        if {"cache_cells.positions", "cache_cells.sequences"} <= self.arrays.keys():
            cells, owners = order_cells(self.arrays)
            names = {"": "cache_cells.positions", "_x": "cache_cells.x", "_y": "cache_cells.y"}
            found = {f"positions{end}": self.arrays[name][cells] for end, name in names.items()
                     if name in self.arrays}  # fmt: skip
            begins = np.flatnonzero(np.diff(owners, prepend=-1))
            counted = np.arange(len(cells)) - np.repeat(begins, np.diff([*begins, len(cells)]))
            return {} if all(np.array_equal(each, counted) for each in found.values()) else found
        found = {name: array for name, array in self.arrays.items() if name.partition("_")[0] == "positions"}
        return {name: array for name, array in found.items() if array.ndim == 1 and array.dtype.kind in "iu"}

    @property
    def positions(self) -> np.ndarray | None:
        """Return the packed positions of the sequences' tokens; None if they count from 0."""
        return self.places_of_tokens.get("positions")

    @cached_property
    def side_names(self) -> tuple[str, str] | None:
        """Return the first pair of `NAMES` with both arrays, or else with one; None if ``cache`` exists."""
        if self.contents.cache is not None:
            return None
        here = [tuple(nested(self.arrays, name) is not None for name in pair) for pair in NAMES]
        for enough in all, any:
            for pair, found in zip(NAMES, here, strict=True):
                if enough(found):
                    return pair
        return None if self.layer_names is None else self.layer_names.patterns

    @cached_property
    def layer_names(self) -> LayerNames | None:
        """Return keys and values by names with layer numbers; None if `NAMES` or ``cache`` exist."""
        known = any(nested(self.arrays, name) is not None for pair in NAMES for name in pair)
        return None if known or self.contents.cache is not None else find_layers(self.arrays)

    @property
    def layer_numbers(self) -> list[int] | None:
        """Return the numbers of the layers in a source; None if they count from 0."""
        if self.layer_names is not None:
            return self.layer_names.numbers
        numbers = self.arrays.get("layers")
        return numbers.tolist() if numbers is not None and numbers.ndim == 1 else None

    @property
    def numbers_to_write(self) -> dict[str, np.ndarray]:
        """Return {name: numbers of layers} for a file; {} if they count from 0."""
        numbers = self.layer_numbers
        known = numbers is not None and numbers != list(range(len(numbers)))
        return {"layers": np.array(numbers)} if known else {}

    @cached_property
    def separate(self) -> dict[str, Any]:
        """Return the separate arrays of keys and values; one of them may be missing."""
        if self.layer_names is not None and self.side_names == self.layer_names.patterns:
            return {
                side: list(layers.values())
                for side, layers in zip(SIDES, self.layer_names.sides, strict=True)
                if layers
            }
        found = zip(SIDES, self.side_names or (), strict=False)
        return {side: pool for side, name in found if (pool := nested(self.arrays, name)) is not None}

    @cached_property
    def cache(self) -> Any:
        """Return the arrays of the cache, as nested by `layout`; None unless both sides exist."""
        whole = self.contents.cache
        return list(self.separate.values()) if whole is None and len(self.separate) == 2 else whole

    @cached_property
    def layout(self) -> str | Layout | None:
        """Return the layout of the cache; a pair of names has kv as a list. None if it is unknown."""
        return self.layout_of(next(iter(self.separate.values()), None), self.stated_layout)

    def layout_of(self, pool: Any, stated: str | Layout | None = None) -> str | Layout | None:
        """Return the layout of one side, whose arrays are like `pool`: the stated one, or that of names."""
        if not self.separate and (stated or pool is None):
            if stated:
                parse_layout(stated, self.arguments[0])
            return stated
        outer = ("kv",) if len(self.separate) != 1 else ()
        if stated:
            line = parse_layout(stated, self.arguments[0])
            if "kv" in line.names and "kv" not in line.lists:
                expected = "a layout without an axis kv, as keys and values are arrays of their own"
                raise argument_error(self.arguments[0], expected, f"'{line}'")
            lists = (*outer, *(level for level in line.lists if level != "kv"))
            return Layout(lists, line.axes, line.value_axes if outer else line.axes)
        several = isinstance(pool, list)
        axes = AXES[several or self.side_names in (PAGED_NAMES, None)].get(
            np.ndim(pool[0] if several else pool)
        )
        if axes is None or (several and axes.startswith("l")):
            return None
        return Layout((*outer, "l") if several else outer, *[tuple(axes.split())] * 2)

    def require_cache(self) -> Any:
        """Return `cache`; raise if the source has none, or its layout is unknown."""
        if len(self.separate) == 1:
            [side] = self.separate
            names = self.side_names or SIDES
            raise argument_error(names[side == "key"], f"an array, beside {names[side != 'key']}", "None")
        if self.cache is None:
            if any(name.endswith(".rope_shifts") for name in self.arrays):
                wanted = "a cache whose row r has position r, as in a layout"
                raise argument_error(
                    "source", wanted, "removed or moved tokens (kvkit.cache.load reads them)"
                )
            wanted = "an array 'cache' and its layout, or keys and values by name (key/value, keys/values)"
            raise argument_error("source", wanted, some_names(self.arrays))
        if self.layout is None:
            raise argument_error(self.arguments[0], "a layout, as the file does not say its own", "None")
        return self.cache

    @cached_property
    def kv(self) -> KV | None:
        """Return keys and values as views; None without a cache, or if its layout has no view."""
        return self.view()

    def view(self, **sizes: int) -> KV | None:
        """Return keys and values as views, with more sizes; a missing side is replaced by the other."""
        if self.layout is None or (self.cache is None and not self.separate):
            return None
        if self.separate and not self.stated_layout:
            return self.view_by_names(self.separate.values(), self.sizes | sizes)
        cache = self.cache if len(self.separate) != 1 else next(iter(self.separate.values()))
        with self.naming():
            return view_of(cache, self.layout, self.sizes | sizes)

    def view_by_names(self, pools: Iterable[Any], sizes: dict[str, int]) -> KV:
        """Return views of arrays with the axes that their names imply, of any strides."""
        axes, names = layouts.parse(self.layout or "").axes, self.side_names or SIDES
        at = tuple(slice(None) if axis in axes else None for axis in "lbnhc")
        pools = list(pools)
        for name, pool in zip(names, pools, strict=False):
            odd = [x for x in (pool if isinstance(pool, list) else [pool]) if np.ndim(x) != len(axes)]
            if odd:
                raise argument_error(name, f"the axes {' '.join(axes)}", describe(odd[0]))
        views = [tuple(x[at[1:]] for x in pool) if isinstance(pool, list) else pool[at] for pool in pools]
        shapes = [[each.shape[:-1] for each in view] for view in views]
        if shapes[0] != shapes[-1] or not shapes[0]:
            raise argument_error(names[1], f"layers {brief(shapes[0])}, as {names[0]}", brief(shapes[-1]))
        for axis, size in zip("bnh", shapes[0][0], strict=True):
            if sizes.get(axis, size) != size:
                raise argument_error(names[0], f"a size {axis} of {sizes[axis]}", size)
        return KV(views[0], views[-1])

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Make errors name separate keys and values by their arrays."""
        try:
            yield
        except KvkitError as error:
            text = str(error)
            for i, name in enumerate(self.side_names or ()):
                text = text.replace(f"arrays[{i}]", name).replace(f"source[{i}]", name)
            if " in each layer, got " in text:
                text += " (layers=0,2: takes those of one length)"
            raise KvkitError(text) from error

    def require_view(self, both: bool = True) -> KV:
        """Return `kv`; raise if there is no cache or layout, or the layout has no view."""
        if both or len(self.separate) != 1:
            self.require_cache()
        if self.kv is None:
            wanted = "one whose content is not split (kvkit convert makes one)"
            raise argument_error(self.arguments[0], wanted, self.layout)
        return self.kv

    def require_view_of_rows(self) -> KV:
        """Return keys and values; if the number of heads is unknown, the heads of a row are one."""
        try:
            return self.require_view(both=False)
        except KvkitError:
            if (kv := self.one_head_view()[0]) is None:
                raise
            return kv

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Return the lengths of the layout's axes that views determine."""
        return {} if self.kv is None or self.layout is None else axis_sizes_of(self.kv, self.layout)

    def one_head_view(self) -> tuple[KV | None, dict[str, int]]:
        """Return views and sizes; if the number of heads is unknown, the heads of a row are one."""
        try:
            return self.kv, self.axis_sizes
        except KvkitError:
            with contextlib.suppress(KvkitError):
                if "h" not in self.sizes and self.layout and (kv := self.view(h=1)) is not None:
                    sizes = axis_sizes_of(kv, self.layout)
                    return kv, {axis: size for axis, size in sizes.items() if axis not in "hc"}
            raise

    @cached_property
    def scales(self) -> dict[str, Any]:
        """Return the scales, minima and zeros beside the codes, by the names of `BESIDE`."""
        if len(self.separate) == 1:
            return {}
        found = {name: nested(self.arrays, name) for name in BESIDE}
        if self.separate:
            pairs = {part: [self.side_scale(side, part) for side in SIDES] for part in BESIDE.values()}
            found = {part: None if any(x is None for x in pair) else pair for part, pair in pairs.items()}
        return {name: arrays for name, arrays in found.items() if arrays is not None}

    @cached_property
    def own_arrays(self) -> dict[str, Any]:
        """Return the cache and its scales, as nested lists."""
        return {CACHE: self.cache} | self.scales

    def other_arrays(self, parts: Iterable[str], tables: bool) -> dict[str, np.ndarray]:
        """Return the arrays that are not among `parts`, with or without `tables`."""
        gone = {id(array) for part in parts for array in leaves(self.own_arrays[part])}
        return {
            name: array
            for name, array in self.arrays.items()
            if id(array) not in gone
            and (tables or not name.startswith((*TABLES, "positions")))
            and (self.sliding is None or not name_in_second(name))
        }

    def side_scale(self, side: str, part: str) -> Any:
        """Return the scales, or another `part` beside the codes, of keys or values; None without any."""
        names = f"{side}_{part}", f"{(self.side_names or SIDES)[side == 'value']}_{part}"
        return next((found for name in names if (found := nested(self.arrays, name)) is not None), None)

    @cached_property
    def scale_views(self) -> dict[str, KV]:
        """Return the scales and the other inputs of `kvkit.formats.decode`, by layer."""
        if self.scales_inside:
            return self.scales_inside
        layers = len(self.require_view(both=False).keys)
        sizes = {axis: count for axis, count in self.sizes.items() if axis not in "cv"}
        found = {}
        for name, arrays in self.scales.items():
            pair = arrays if self.separate else [arrays, arrays]
            if not any(isinstance(each, list) or each.ndim > 1 + bool(self.separate) for each in pair):
                found[BESIDE[name]] = KV(*(each if each.ndim == 2 else (each,) * layers for each in pair))
            elif self.separate and not self.stated_layout:
                axes = leaves(self.cache)[0].ndim  # a scale for each head has no axis of groups
                found[BESIDE[name]] = self.view_by_names((with_axes(each, axes) for each in pair), sizes)
            elif (kv := view_of(arrays, self.layout or "", sizes)) is not None:
                found[BESIDE[name]] = kv
        if isinstance(scale := self.paged.get("arguments", {}).get("scale"), list):
            found["scale"] = KV(*np.swapaxes(np.asarray(scale, np.float32), 0, 1))  # of each head
        return found

    def format_of(self, dtypes: Iterable[np.dtype], given: str | None = None) -> str:
        """Return the format of codes: the one given, or stated in the source, or implied by the dtype."""
        coded = sorted(set(dtypes), key=str)
        said = given or format_of_paged(self.paged.get("arguments", {}))
        said = said or self.contents.description.format or self.text("format")
        types = self.contents.metadata.get("types")
        several = [each for each in types if each not in map(str, FLOATS)] if isinstance(types, list) else []
        said = several[0] if said is None and len(several) == 1 else said
        if given is None and len(coded) == 1 and (said is None or said.split(":")[0] not in NAMED):
            said = {one.dtype: one.name for one in FLOATS8}.get(coded[0], said)
        if said is None and coded == [np.int8] and self.kv is not None and "scale" in self.scale_views:
            groups = np.shape(self.scale_views["scale"].keys[0])[-1]
            said = f"int8:g{np.shape(self.kv.keys[0])[-1] // groups}"
        if said is None:
            floats = any(one.kind not in "iuV" or one.itemsize == 2 for one in coded)
            wanted = "float32, float16 or bfloat16, or codes of a format that the file names"
            wanted = wanted if floats else "one that the file names, for its codes"
            name = (self.side_names or (CACHE,))[0] if floats else self.arguments[1]
            raise argument_error(name, wanted, ", ".join(map(str, coded)))
        return said

    def block_tables(self, page_size: int | None = None) -> tuple[str, BlockTable] | None:
        """Return (their convention, the block tables in one form); None if there are none."""
        try:
            return self.read_tables(page_size)
        except KvkitError:
            raise
        except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise argument_error("source", "tables as kvkit or llama.cpp has them", brief(error)) from None

    def read_tables(self, page_size: int | None) -> tuple[str, BlockTable] | None:
        """Return the block tables of the first convention whose arrays are all there."""
        arrays, names = self.arrays, self.arrays.keys()
        if {"block_tables", "context_lens"} <= names and (size := self.page_size(page_size)):
            return BLOCKS, tables.from_blocks(arrays["block_tables"], arrays["context_lens"], size)
        if {"kv_indptr", "kv_indices", "kv_last_page_len"} <= names and (size := self.page_size(page_size)):
            parts = arrays["kv_indptr"], arrays["kv_indices"], arrays["kv_last_page_len"]
            return "compressed rows", tables.from_csr(*parts, size)
        if {"cachestarts", "kvstarts"} <= names and (size := self.page_size(page_size)):
            rows, lengths = arrays["cachestarts"], np.diff(arrays["kvstarts"])
            return "first rows of pages", tables.from_entries("cachestarts", rows, lengths, size, 1)
        if {"slots", "context_lens"} <= names:
            return "a slot a token", tables.from_slots(arrays["slots"], arrays["context_lens"])
        if "paged" in self.saved:
            return "a paged cache of kvkit's", pages_of_saved(arrays, self.saved["paged"])
        if {"cache_cells.positions", "cache_cells.sequences"} <= names:
            return "cells", pages_of_cells(arrays)
        if (starts := self.sequence_starts) is not None:
            lengths = np.diff(starts)
            owners = np.repeat(np.arange(len(lengths)), lengths)
            positions = np.concatenate([np.arange(length) for length in lengths])
            return PACKED, tables.from_tokens(np.arange(starts[-1]), owners, positions)
        return None

    def page_size(self, given: int | None = None) -> int | None:
        """Return the rows of a page: as given, or stated in the source, or in the shape of its cache."""
        said = given or self.integer("page_size") or self.sizes.get("n")
        if said or self.layout is None or self.cache is None:
            return said
        return self.one_head_view()[1].get("n")

    @cached_property
    def sequence_starts(self) -> list[int] | None:
        """Return where sequences of packed tokens begin, and the number of tokens; None without seqstarts."""
        starts = self.arrays.get("seqstarts")
        if starts is None or self.kv is None or self.side_names == PAGED_NAMES:
            return None
        tokens = self.axis_sizes.get("b", 1) * self.axis_sizes.get("n", 1)
        legal = starts.ndim == 1 and starts.dtype.kind in "iu" and len(starts) > 1
        legal = legal and not starts[0] and starts[-1] == tokens and bool((np.diff(starts) > 0).all())
        if legal:
            found: list[int] = starts.tolist()
            return found
        if self.side_names is None:  # they count other tokens than those of the cache
            return None
        wanted = f"integers that ascend from 0 to {tokens}, the tokens"
        integers = starts.ndim == 1 and starts.dtype.kind in "iu"
        raise argument_error("seqstarts", wanted, brief(starts.tolist()) if integers else describe(starts))


def parse_layout(layout: str | Layout, argument: str) -> Layout:
    """Parse a layout; errors name the argument."""
    try:
        return layouts.parse(layout)
    except KvkitError as error:
        raise KvkitError(str(error).replace("layout:", f"{argument}:", 1)) from None


def name_in_second(name: str) -> str:
    """Return the name of a second cache's array without its prefix; "" for other arrays."""
    begin, _, rest = name.partition(".")
    if begin == SLIDING:
        return f"{CACHE}.{rest}" if rest else CACHE
    if not name.startswith(f"{SLIDING}_"):
        return ""
    rest = name.removeprefix(f"{SLIDING}_")
    return f"{CACHE}_{rest}" if rest.startswith("cells.") else rest


def in_file(cache: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a cache under their names in a file; those of a second cache have a prefix."""
    if cache == CACHE:
        return dict(arrays)
    begins = f"{CACHE}.", f"{CACHE}_cells."
    return {
        SLIDING + (name.removeprefix(CACHE) if f"{name}.".startswith(begins) else f"_{name}"): array
        for name, array in arrays.items()
    }


def ds_v4_as_rows(source: CacheSource, from_format: str | None = None) -> CacheSource:
    """Return blocks of 584 bytes a token as rows with scales after codes; other caches as they are."""
    told = from_format or source.contents.description.format
    line = source.layout and layouts.parse(source.layout)
    if line != layouts.parse(DS_V4_LAYOUT) or (told != "ds_v4" and str(source.layout) != DS_V4_LAYOUT):
        return source
    blocks = [each for leaf in leaves(source.cache) for each in (leaf if leaf.ndim == 3 else [leaf])]
    parts = [ds_v4_parts("cache", each.view(np.uint8)) for each in blocks]
    others = {name: array for name, array in source.arrays.items() if name.partition(".")[0] != CACHE}
    arrays = others | {f"{CACHE}.{i}": np.concatenate(part, axis=2) for i, part in enumerate(parts)}
    described = replace(source.contents.description, layout=LATENT_LINE, sizes={}, format="ds_v4")
    found = CacheSource(replace(source.contents, arrays=arrays, description=described))
    found.name = source.name
    return found


def with_axes(found: Any, count: int) -> Any:
    """Append an axis of length 1 to an array, or each array of a list, that has fewer than `count` axes."""
    if isinstance(found, list):
        return [with_axes(each, count) for each in found]
    return found[..., None] if found.ndim == count - 1 else found


def check_pages_in_pool(convention: str, pages: BlockTable, rows: int) -> None:
    """Check that a pool of so many rows has every page of a table."""
    outside = np.argwhere(pages.table >= rows)
    if len(outside):
        sequence, column = outside[0].tolist()
        here = f"block_tables[{sequence}, {column}]"
        here = here if convention == BLOCKS else f"{convention}, page {column} of sequence {sequence}"
        wanted = f"a page of the pool's, 0 to {rows // pages.page_size - 1} (see kvkit check)"
        page = int(pages.table[sequence, column]) // pages.page_size
        raise argument_error(here, wanted, page)


def leaves(found: Any) -> list[np.ndarray]:
    """Return the arrays of nested lists."""
    return list(files.flat({"": found if isinstance(found, np.ndarray) else list(found)}).values())


def view_of(cache: Any, layout: str | Layout, sizes: Mapping[str, int]) -> KV | None:
    """Return keys and values as views; None if a layout splits the content, which has no view."""
    line = layouts.parse(layout)
    return None if line.split or line.has_scales else layouts.view(cache, line, sizes=sizes or None)


def axis_sizes_of(kv: KV, layout: str | Layout) -> dict[str, int]:
    """Return the lengths of a layout's axes in views; in lists only lengths that all members share."""
    arrays = [one for each in kv.keys for one in (each if isinstance(each, tuple) else [each])]
    found = {"l": len(kv.keys)} | ({"b": len(kv.keys[0])} if isinstance(kv.keys[0], tuple) else {})
    for i, axis in enumerate("bnhc"[-arrays[0].ndim :]):
        lengths = {array.shape[i] for array in arrays}
        found |= {axis: min(lengths)} if len(lengths) == 1 else {}
    found = {axis: n for axis, n in found.items() if axis in layouts.parse(layout).names}
    values = kv.values[0][0] if isinstance(kv.values[0], tuple) else kv.values[0]
    return found | ({"v": values.shape[-1]} if values.shape[-1] != found.get("c", values.shape[-1]) else {})


def format_of_paged(about: Mapping[str, Any]) -> str | None:
    """Return the format of a `PagedCache` from the arguments of its constructor."""
    bits = about.get("quant_bit")
    return about.get("quant_format") or (f"int{bits}:g{about.get('quant_group')}" if bits else None)
