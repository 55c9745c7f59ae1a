"""Decide how the arrays of a cache are read: their layout, sizes, views, format and block tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from kvkit import files, layouts
from kvkit.checks.latent import ds_v4_parts
from kvkit.errors import KvkitError, argument_error, brief, describe, suggestion
from kvkit.files import Contents, Description, llama, lmcache
from kvkit.files.contents import BESIDE, CACHE, nested
from kvkit.files.description import parse_description
from kvkit.formats import FLOATS, NAMED
from kvkit.formats.elements import FLOATS8
from kvkit.layouts import Layout, tables
from kvkit.layouts.tables import BlockTable
from kvkit.layouts.views import KV, iterate_leaves
from kvkit.tools import openvino
from kvkit.tools.contents import Source, contents_of
from kvkit.tools.name_layouts import (
    POOL_AXES,
    TOKEN_AXES,
    describe_order,
    layout_of_order,
    orders_that_fit,
    swapped,
)
from kvkit.tools.names import (
    BESIDE_TABLE,
    CONTRACTS,
    PAGED_NAMES,
    SIDES,
    CacheArrays,
    common_pattern,
    paired_patterns,
    rename_tables,
    some_names,
)
from kvkit.tools.saved_pages import pages_of_cells, pages_of_saved
from kvkit.tools.state_names import kind_of_state

LINE, LATENT_LINE = "l kv | b n h c", "l | b n c"  # the layouts that `convert` writes with a new format
DS_V4_LAYOUT = "flashmla-ds-v4"  # a block has codes of all tokens, then their scales
SLIDING = "sliding"  # the name of a file's second cache (layers with a window), and prefix of its tables
BLOCK_TABLES, PACKED = "block tables", "packed sequences"  # names of two conventions of page tables
NAMES_OF_FACTS = "layout", "format", "layers", "sliding_layers"  # names of arrays that describe a cache
TABLE_PREFIXES = (  # names of arrays that belong to page tables begin so
    "sequences.", "published.", "blocks", "block_tables", "context_lens", "page_size", "kv_", "slots",
    "cache_cells.", "cachestarts", "kvstarts", "seqstarts", "num_blocks", "slot_",
    "block_indices", "past_lens", "subsequence_begins",
)  # fmt: skip


class CacheSource(CacheArrays):
    """Reads a cache from a file, from named arrays or from a cache object, for all tools.

    `CacheArrays` finds the arrays by name. This class views them. Each step is computed on first use::

        cache, scales  --layout, sizes-->  kv, scale_views  --format-->  (`readers` decode the views)

    Parameters
    ----------
    source : path, mapping of arrays, cache object, or Contents
        A file that `kvkit.files.read` takes, its contents, or named arrays and lists of arrays.
    layout : str or Layout, optional
        The layout of the cache, instead of the one that the source states. Pairs of names may need none.
    sizes : mapping, optional
        Lengths of axes l, b, n, h, c that the shapes do not determine.
    arguments : pair of str
        The names of the arguments for layout and format in error messages.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools.source import CacheSource
    >>> pool = np.zeros((10, 16, 2, 64), np.float16)
    >>> source = CacheSource({"key_cache": pool, "value_cache": pool})
    >>> str(source.layout), source.axis_sizes, source.kv.keys.shape
    ('kv | b n h c', {'b': 10, 'n': 16, 'h': 2, 'c': 64}, (1, 10, 16, 2, 64))
    """

    def __init__(
        self, source: Source, layout: str | Layout | None = None, sizes: Mapping[str, int] | None = None,
        arguments: tuple[str, str] = ("layout", "format"),
    ) -> None:  # fmt: skip
        contents = contents_of(source)
        self.tables_read: dict[int | None, tuple[str, BlockTable] | None] = {}  # by the size of a page
        self.scales_inside: dict[str, KV] = {}  # views of scales that lay in the same blocks as codes
        stated = layout or contents.description.layout
        if stated in openvino.CODE_POOLS:
            contents, self.scales_inside = openvino.split_blocks(contents, str(stated))
            layout = stated = openvino.PLAIN
        if stated == openvino.PLAIN:
            contents = openvino.with_tables(contents)
        super().__init__(replace(contents, arrays=dict(rename_tables(contents.arrays))))
        named = isinstance(source, (str, os.PathLike))
        self.name = str(source) if named else contents.kind
        self.given_layout, self.given_sizes = layout, dict(sizes or {})
        self.sizes = dict(contents.description.sizes) | self.given_sizes
        self.layout_argument, self.format_argument = arguments
        self.stated_layout = layout or contents.description.layout or self.text("layout")

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes of the file, and one on a layout that only the names of its arrays imply."""
        return *self.contents.notes, *self.guess

    @property
    def guess(self) -> tuple[str, ...]:
        """Return notes on what only names or shapes imply: a layout, or keys that may be latent rows."""
        found = (self.latent_planes,) if self.latent_planes else ()
        if self.stated_layout or not self.separate or self.contents.kind == "arrays":
            return found
        if self.layout is None:
            return (f"give {self.two_orders}",) if len(self.orders) > 1 else ()
        return (
            f"the layout '{self.layout}' is guessed from the names of arrays; layout=NAME names another",
            *found,
        )

    @property
    def latent_planes(self) -> str:
        """Return a note on keys and values with the sizes of the two parts of latent rows; "" for others."""
        line = layouts.parse(self.layout) if self.layout else None
        if line is None or line.split or line.has_scales or not {"kv", "h"} <= line.names:
            return ""
        with contextlib.suppress(KvkitError):
            sizes = self.axis_sizes
            if sizes.get("h") == 1 and 0 < 4 * sizes.get("v", 0) <= sizes.get("c", 0):
                plain = " ".join("1" if axis == "h" else axis for axis in line.axes)
                parts = f"keys of {sizes['c']} elements and values of {sizes['v']} in one head"
                as_planes = f"the layout '{' '.join(line.lists)} | {plain}' reads them so"
                return f"{parts} may be the latent and the rotated part of rows (MLA): {as_planes}"
        return ""

    @cached_property
    def layout(self) -> str | Layout | None:
        """Return the layout of `cache`: the stated one, or the one that names imply; None if unknown."""
        line = parse_layout(self.stated_layout, self.layout_argument) if self.stated_layout else None
        if not self.separate:
            return self.stated_layout
        outer = ("kv",) if len(self.separate) == 2 else ()
        if line is not None:
            if "kv" in line.names and "kv" not in line.lists:
                without = " ".join(axis for axis in line.axes if axis != "kv")
                such = f" ('{without}', say)" if "kv" in line.axes else ""
                expected = f"a layout without an axis kv, as keys and values are arrays of their own{such}"
                raise argument_error(self.layout_argument, expected, f"'{line}'")
            lists = (*outer, *(level for level in line.lists if level != "kv"))
            return Layout(lists, line.axes, line.value_axes if outer else line.axes)
        if len(self.orders) != 1:
            return None
        return layout_of_order((*outer, "l") if self.in_lists else outer, self.orders[0])

    @property
    def heads_first(self) -> bool:
        """Return whether only the names of arrays say that heads come before tokens."""
        implied = bool(self.separate) and not self.stated_layout and self.layout is not None
        return implied and "h" in layouts.parse(self.layout or "").axes[:-2]

    @property
    def in_lists(self) -> bool:
        """Return whether separate keys and values are a list of layers."""
        return any(isinstance(side, list) for side in self.separate.values())

    @cached_property
    def first_array(self) -> np.ndarray:
        """Return the first array of keys, or of values if they are alone."""
        side = next(iter(self.separate.values()))
        return np.asarray(side[0] if isinstance(side, list) else side)

    @cached_property
    def orders(self) -> list[str]:
        """Return the axes that names propose, and others that fit as well; [] if names propose none."""
        if not self.separate or self.stated_layout:
            return []
        by_layer, ndim = self.layer_names, self.first_array.ndim
        known = POOL_AXES if self.in_lists or self.side_names == PAGED_NAMES else TOKEN_AXES
        axes = known.get(ndim)
        if axes is None or (self.in_lists and axes.startswith("l")):
            return []
        if by_layer is not None and by_layer.heads_first:
            axes = swapped(axes)
        shapes = {
            np.shape(side[0] if isinstance(side, list) else side)[:-1] for side in self.separate.values()
        }
        if (
            str((self.side_names or SIDES)[0]).startswith(CONTRACTS)
            or len(shapes) > 1
            or 0 in self.first_array.shape
        ):
            return [axes]  # other orders fit no better, as errors will say
        sizes = {axis: size for axis, size in self.sizes.items() if axis in "bnh"}
        in_pages = any(name in self.arrays for name in (*BESIDE_TABLE, "slots", "slot_mapping"))
        if in_pages and (rows := self.integer("page_size")) is not None:
            sizes["n"] = rows
        starts = self.arrays.get("seqstarts", np.zeros(0))
        is_packed = starts.size > 1 and starts.dtype.kind in "iu" and self.side_names != PAGED_NAMES
        tokens = int(starts.reshape(-1)[-1]) if is_packed else None
        return orders_that_fit(axes, self.first_array.shape, sizes, tokens, in_pages)

    @property
    def two_orders(self) -> str:
        """Return a text that asks for one of two layouts that fit the same arrays."""
        shape, lists = self.first_array.shape, ("l",) if self.in_lists else ()
        found = [f"'{layout_of_order(lists, axes)}' ({describe_order(axes, shape)})" for axes in self.orders]
        name = (self.side_names or SIDES)[0]
        heads = shape[self.orders[-1].split().index("h")]
        size = f"the size h, as sizes={{'h': {heads}}}"
        return f"a layout, as {name} {shape} may be {' or '.join(found)}, or {size}"

    def require_cache(self) -> Any:
        """Return `cache`; raise if the source has none, or its layout is unknown."""
        if len(self.separate) == 1:
            keys, values = self.side_names or SIDES
            missing, present = (values, keys) if "key" in self.separate else (keys, values)
            raise argument_error(missing, f"an array, beside {present}", "None")
        if self.cache is None:
            if any(name.endswith(".rope_shifts") for name in self.arrays):
                got = "removed or moved tokens (kvkit.cache.load reads them)"
                raise argument_error("source", "a cache whose row r has position r", got)
            raise self.no_cache()
        if self.layout is None:
            wanted = "a layout, as the file does not name one (kvkit inspect lists those that fit)"
            if not self.separate and isinstance(self.cache, list) and leaves(self.cache)[0].ndim == 4:
                wanted = wanted.replace("(", f"({self.layout_argument}='hf' for those of transformers; ")
            if self.separate and self.first_array.ndim == 2:
                line = "l | n (h c)" if self.in_lists else "n (h c)"
                wanted = f"a layout, as heads have no axis (layout='{line}' and sizes={{'h': N}})"
            wanted = self.two_orders if len(self.orders) > 1 else wanted
            raise argument_error(self.layout_argument, wanted, "None")
        self.check_levels()
        return self.cache

    def no_cache(self) -> KvkitError:
        """Return the error of a source whose names tell no cache."""
        wanted = "an array 'cache' and its layout, or keys and values by name (key/value, keys/values)"
        notes = "".join(f" ({note})" for note in self.contents.notes)
        return argument_error("source", wanted + self.pattern_to_give, some_names(self.arrays) + notes)

    @property
    def pattern_to_give(self) -> str:
        """Return words that propose a pattern of the names of large arrays; "" without any."""
        likely = [name for name, x in self.arrays.items() if x.ndim > 1 and x.dtype.kind not in "US"]
        if (pair := paired_patterns(likely)) is not None:
            stacked = pair[0] in self.arrays and self.arrays[pair[0]].ndim == 4
            layout = " layout='| l n h c', if layers are the first axis" if stacked else ""
            return f", or their names (keys='{pair[0]}' values='{pair[1]}'{layout})"
        likely = [name for name in likely if self.arrays[name].ndim > 2]
        unknown = [name for name in likely if kind_of_state(name) is None]
        pattern = common_pattern(unknown) or (unknown[0] if len(likely) == len(unknown) == 1 else None)
        if pattern is None and len({self.arrays[name].shape for name in likely}) == 1 and len(likely) == 2:
            return f", or their names (keys='{likely[0]}' values='{likely[1]}', say)"
        return "" if pattern is None else f", or a pattern (fused={pattern}, say, and its layout)"

    def check_levels(self) -> None:
        """Refuse one array for a layout with lists, unless it has an axis for each level of them.

        The items of an array may stand for a list. Only its axes tell that from one layer's array, whose
        blocks would count as layers.
        """
        line = layouts.parse(self.layout or "")
        pools = list(self.separate.values()) or [self.cache]
        levels = tuple(axis for axis in line.lists if axis != "kv") if self.separate else line.lists
        pool = next((pool for pool in pools if isinstance(pool, np.ndarray)), None)
        if pool is None or not levels or not pool.ndim:
            return
        axes = min(len(line.axes), len(line.value_axes))
        if pool.ndim < len(levels) + axes and self.sizes.get(levels[0]) != len(pool):
            name = (self.side_names or SIDES)[0] if self.separate else CACHE
            wanted = f"the shape of '{line}': {axes} axes, or some of them as one"
            alone = f"(without a list of layers the layout is '{' '.join(line.axes)}')"
            raise argument_error(f"{name}[0]", wanted, f"{describe(pool[0])} {alone}")

    @cached_property
    def kv(self) -> KV | None:
        """Return keys and values as views; None without a cache, or if its layout has no view."""
        return self.view()

    def view(self, **sizes: int) -> KV | None:
        """Return keys and values as views, with these sizes. If one side is missing, the other is both."""
        if self.layout is None or (self.cache is None and not self.separate):
            return None
        self.check_levels()
        if self.separate and not self.stated_layout:
            return self.view_by_names(self.separate.values(), self.sizes | sizes)
        cache = next(iter(self.separate.values())) if len(self.separate) == 1 else self.cache
        with self.naming():
            return view_of(cache, self.layout, self.sizes | sizes)

    def view_by_names(self, pools: Iterable[Any], sizes: dict[str, int]) -> KV:
        """Return keys and values as views with the axes that their names imply; strides may be any."""
        axes, names = layouts.parse(self.layout or "").axes, self.side_names or SIDES
        order = [axes.index(axis) for axis in "lbnhc" if axis in axes]
        at = tuple(slice(None) if axis in axes else None for axis in "lbnhc")  # inserts the missing axes
        pools = list(pools)
        for name, pool in zip(names, pools, strict=False):
            odd = [x for x in (pool if isinstance(pool, list) else [pool]) if np.ndim(x) != len(axes)]
            if odd:
                raise argument_error(name, f"the axes {' '.join(axes)}", describe(odd[0]))
        views = [
            tuple(x.transpose(order)[at[1:]] for x in pool) if isinstance(pool, list)
            else pool.transpose(order)[at]
            for pool in pools
        ]  # fmt: skip
        shapes = [[each.shape[:-1] for each in view] for view in views]
        if shapes[0] != shapes[-1] or not shapes[0]:
            same = sorted(map(sorted, shapes[0])) == sorted(map(sorted, shapes[-1]))
            hint = f"; tokens and heads of {names[1]} look exchanged (swapaxes)" if same else ""
            raise argument_error(
                names[1], f"layers {brief(shapes[0])}, as {names[0]}", f"{brief(shapes[-1])}{hint}"
            )
        for axis, size in zip("bnh", shapes[0][0], strict=True):
            if sizes.get(axis, size) != size:
                raise argument_error(names[0], f"a size {axis} of {sizes[axis]}", size)
        return KV(views[0], views[-1])

    @contextlib.contextmanager
    def naming(self, hint: str = "") -> Iterator[None]:
        """Name keys and values in errors of `layouts`, which call them arrays[0] and so on; add a hint."""
        try:
            yield
        except KvkitError as error:
            text = str(error)
            for i, name in enumerate(self.side_names or ()):
                text = text.replace(f"arrays[{i}]", name).replace(f"source[{i}]", name)
            if " in each layer, got " in text:
                alike = "of equal heads" if "equal heads in" in text else "of one length"
                text += f" (layers=0,2: takes those {alike})"
            if lmcache.NO_SIZES in self.contents.notes:
                text += f" ({lmcache.GROUPED})"
            text += f" ({hint})" if hint else ""
            raise KvkitError(text) from error

    def require_view(self, both: bool = True) -> KV:
        """Return `kv`; raise if there is no cache or layout, or the layout has no view."""
        if both or len(self.separate) != 1:
            self.require_cache()
        if self.kv is None:
            wanted = "a layout without scales in its blocks (kvkit convert makes such caches)"
            raise argument_error(self.layout_argument, wanted, self.layout)
        return self.kv

    def given_sides(self, kv: KV) -> dict[str, Any]:
        """Return {"key": views by layer, "value": views} of those sides that the source has."""
        sides = zip(SIDES, kv, strict=True)
        return {side: views for side, views in sides if not self.separate or side in self.separate}

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Return the lengths of the layout's axes that views determine."""
        if self.layout is None:
            return {}
        self.check_levels()
        line = layouts.parse(self.layout)
        if line.split and self.cache is not None and not line.has_scales:
            with self.naming():
                pairs = list(iterate_leaves(self.cache, line, self.sizes))
                keys, values = (leaf.sizes for leaf in pairs[0][1])
                lists = {
                    axis: 1 + max(where[axis] for where, _ in pairs) for axis in line.lists if axis != "kv"
                }
                found = dict(keys) | lists | ({"v": values["c"]} if values["c"] != keys["c"] else {})
                return {axis: size for axis, size in found.items() if axis in line.names or axis == "v"}
        return {} if self.kv is None else axis_sizes_of(self.kv, line)

    def one_head_view(self) -> tuple[KV | None, dict[str, int]]:
        """Return (views, sizes of axes); if the number of heads is unknown, a row is one head."""
        try:
            return self.kv, self.axis_sizes
        except KvkitError:
            with contextlib.suppress(KvkitError):
                if "h" not in self.sizes and self.layout and (kv := self.view(h=1)) is not None:
                    sizes = axis_sizes_of(kv, self.layout)
                    return kv, {axis: size for axis, size in sizes.items() if axis not in "hc"}
            raise

    @cached_property
    def scale_views(self) -> dict[str, KV]:
        """Return {name in `kvkit.formats.decode`: views by layer} of scales, minima and zeros."""
        if self.scales_inside:
            return self.scales_inside
        layers = len(self.require_view(both=False).keys)
        sizes = {axis: count for axis, count in self.sizes.items() if axis not in "cv"}
        found = {}
        for name, arrays in self.scales.items():
            pair = arrays if self.separate else [arrays, arrays]
            most_axes = 2 if self.separate else 1  # of scales without rows: [], [heads], [layers, heads]
            if not any(isinstance(each, list) or each.ndim > most_axes for each in pair):
                found[BESIDE[name]] = KV(*(each if each.ndim == 2 else (each,) * layers for each in pair))
            elif self.separate and not self.stated_layout:
                axes = leaves(self.cache)[0].ndim  # scales for each head lack the last axis
                found[BESIDE[name]] = self.view_by_names((with_axes(each, axes) for each in pair), sizes)
            elif (kv := view_of(arrays, self.layout or "", sizes)) is not None:
                found[BESIDE[name]] = kv
        if isinstance(scale := self.paged.get("arguments", {}).get("scale"), list):  # [layers, sides, heads]
            found["scale"] = KV(*np.swapaxes(np.asarray(scale, np.float32), 0, 1))
        return found

    def format_of(self, dtypes: Iterable[np.dtype], given: str | None = None) -> str:
        """Return the format of codes: the given one, the stated one, or what dtypes and scales imply."""
        coded = sorted(set(dtypes), key=str)
        format = given or self.stated_format()
        if given is None and len(coded) == 1 and (format is None or format.split(":")[0] not in NAMED):
            format = {fmt.dtype: fmt.name for fmt in FLOATS8}.get(coded[0], format)
        if format is None and coded == [np.int8] and self.kv is not None and "scale" in self.scale_views:
            groups = np.shape(self.scale_views["scale"].keys[0])[-1]
            format = f"int8:g{np.shape(self.kv.keys[0])[-1] // groups}"
        if format is None:
            floats = any(dtype.kind not in "iuV" or dtype.itemsize == 2 for dtype in coded)
            wanted = "float32, float16 or bfloat16, or codes of a format that the file names"
            wanted = wanted if floats else "the format of codes, as the file does not name it"
            name = (self.side_names or (CACHE,))[0] if floats else self.format_argument
            raise argument_error(name, wanted, ", ".join(map(str, coded)))
        return format

    def stated_format(self) -> str | None:
        """Return the format that the source names; None if it names none, or several."""
        format = format_of_paged(self.paged.get("arguments", {}))
        format = format or self.contents.description.format or self.text("format")
        types = self.contents.metadata.get("types")  # of all layers, in states of llama.cpp
        coded = [each for each in types if each not in map(str, FLOATS)] if isinstance(types, list) else []
        return coded[0] if format is None and len(coded) == 1 else format

    @cached_property
    def sliding(self) -> CacheSource | None:
        """Return the second cache of a file, which has the layers with a window; None without one."""
        if nested(self.arrays, SLIDING) is None:
            return None
        arrays = {name: array for old, array in self.arrays.items() if (name := name_in_second(old))}
        stored = self.contents.metadata.get(SLIDING)
        described = parse_description(self.name, stored) if stored is not None else replace(
            self.contents.description, sizes={axis: self.sizes[axis] for axis in "hcv" if axis in self.sizes}
        )  # fmt: skip
        contents = Contents(arrays, {}, kind=self.contents.kind, description=described)
        sizes = {axis: count for axis, count in self.given_sizes.items() if axis in "hcv"}
        arguments = self.layout_argument, self.format_argument
        return CacheSource(contents, self.given_layout, sizes, arguments)

    @property
    def caches(self) -> dict[str, CacheSource]:
        """Return {name of its arrays: source} for the cache and the second cache, if any."""
        return {CACHE: self} | ({} if self.sliding is None else {SLIDING: self.sliding})

    def carried_metadata(self, second: Description | None, rotation: str | None = None) -> dict[str, Any]:
        """Return the metadata of a converted file: notes that still hold, a second cache's description."""
        notes = notes_that_hold(self.contents.notes, rotation is not None)
        metadata: dict[str, Any] = {"notes": notes} if notes else {}
        return metadata | ({} if second is None else {SLIDING: second.to_dict()})

    def other_arrays(self, parts: Iterable[str], tables: bool) -> dict[str, np.ndarray]:
        """Return {name: array} of arrays that do not belong to `parts`, with or without page tables."""
        own = self.own_arrays
        excluded = {id(array) for part in parts for array in leaves(own[part])}
        return {
            name: array
            for name, array in self.arrays.items()
            if id(array) not in excluded
            and (tables or not name.startswith((*TABLE_PREFIXES, "positions")))
            and (self.sliding is None or not name_in_second(name))
        }

    def unread(self, also: Collection[str] = (), states: Collection[str] = ()) -> tuple[str, ...]:
        """Return a note that names arrays that belong neither to the cache nor to `also` nor to `states`.

        It is () without any. Names of `also` are proposed for names like them.
        """
        if self.saved or (self.cache is None and not self.separate):
            return ()
        parts = [*self.separate.values(), *self.scales.values(), *([] if self.separate else [self.cache])]
        own = {id(array) for part in parts for array in leaves(part)}
        known = *TABLE_PREFIXES, "positions", "slot", "paged_kv_"
        names = [
            name + suggestion(name, also)
            for name, array in self.arrays.items()
            if not (id(array) in own or name in (*also, *states, *NAMES_OF_FACTS) or name.startswith(known))
            and not (self.sliding is not None and name_in_second(name))
        ]
        return (f"not read: {some_names(names)}",) if names else ()

    def block_tables(self, page_size: int | None = None) -> tuple[str, BlockTable] | None:
        """Return (name of the convention of tables, their `BlockTable`); None if there are no tables."""
        if page_size not in self.tables_read:
            try:
                self.tables_read[page_size] = self.read_tables(page_size)
            except KvkitError:
                raise
            except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                wanted = "page tables in the form of kvkit or llama.cpp"
                raise argument_error("source", wanted, brief(error)) from None
        return self.tables_read[page_size]

    def read_tables(self, page_size: int | None) -> tuple[str, BlockTable] | None:
        """Return the block tables of the first convention of which all arrays exist."""
        arrays, names = self.arrays, self.arrays.keys()
        if {"block_tables", "context_lens"} <= names and (size := self.page_size(page_size)):
            return BLOCK_TABLES, tables.from_blocks(arrays["block_tables"], arrays["context_lens"], size)
        if {"kv_indptr", "kv_indices", "kv_last_page_len"} <= names and (size := self.page_size(page_size)):
            parts = arrays["kv_indptr"], arrays["kv_indices"], arrays["kv_last_page_len"]
            return "compressed rows", tables.from_csr(*parts, size)
        if {"cachestarts", "kvstarts"} <= names and (size := self.page_size(page_size)):
            rows, lengths = arrays["cachestarts"], np.diff(arrays["kvstarts"])
            return "first rows of pages", tables.from_entries("cachestarts", rows, lengths, size, 1)
        if {"slots", "context_lens"} <= names:
            return "slots of tokens", tables.from_slots(arrays["slots"], arrays["context_lens"])
        if "paged" in self.saved:
            return "a paged cache of kvkit", pages_of_saved(arrays, self.saved["paged"])
        if {"cache_cells.positions", "cache_cells.sequences"} <= names:
            return "cells", pages_of_cells(arrays)
        if (starts := self.sequence_starts) is not None:
            lengths = np.diff(starts)
            owners = np.repeat(np.arange(len(lengths)), lengths)
            positions = np.concatenate([np.arange(length) for length in lengths])
            return PACKED, tables.from_tokens(np.arange(starts[-1]), owners, positions)
        return None

    def page_size(self, given: int | None = None) -> int | None:
        """Return the rows of a page: the given number, a stated one, or the one in the shape of the cache."""
        size = given or self.integer("page_size") or self.sizes.get("n")
        if size or self.layout is None or self.cache is None:
            return size
        return self.one_head_view()[1].get("n")

    @cached_property
    def sequence_starts(self) -> list[int] | None:
        """Return where packed sequences begin, then the number of tokens; None without ``seqstarts``."""
        starts = self.arrays.get("seqstarts")
        if starts is None or self.kv is None or self.side_names == PAGED_NAMES:
            return None
        tokens = self.axis_sizes.get("b", 1) * self.axis_sizes.get("n", 1)
        integers = starts.ndim == 1 and starts.dtype.kind in "iu"
        whole = integers and len(starts) > 1 and not starts[0] and starts[-1] == tokens
        if whole and (np.diff(starts) > 0).all():
            return list(map(int, starts))
        if self.side_names is None:  # ``seqstarts`` may belong to other arrays than the cache
            return None
        wanted = f"integers that ascend from 0 to {tokens}, the tokens"
        raise argument_error("seqstarts", wanted, brief(starts.tolist()) if integers else describe(starts))


def notes_that_hold(notes: Iterable[str], unrotated: bool) -> list[str]:
    """Return a file's notes that still hold if its layout is known, and perhaps its rotation undone."""
    settled = {llama.NO_HEADS} | ({llama.ROTATED_NOTE} if unrotated else set())
    return [note for note in notes if note not in settled]


def parse_layout(layout: str | Layout, argument: str) -> Layout:
    """Parse a layout. Errors name the argument, such as "from_layout"."""
    try:
        return layouts.parse(layout)
    except KvkitError as error:
        raise KvkitError(str(error).replace("layout:", f"{argument}:", 1)) from None


# Arrays of the second cache have other names in the file than in a `CacheSource` of their own:
#     sliding.0.1 <-> cache.0.1,  sliding_cells.x <-> cache_cells.x,  sliding_block_tables <-> block_tables


def name_in_second(name: str) -> str:
    """Return the name in its own source of an array of the second cache; "" for other arrays."""
    begin, _, rest = name.partition(".")
    if begin == SLIDING:
        return f"{CACHE}.{rest}" if rest else CACHE
    if not name.startswith(f"{SLIDING}_"):
        return ""
    rest = name.removeprefix(f"{SLIDING}_")
    return f"{CACHE}_{rest}" if rest.startswith("cells.") else rest


def in_file(cache: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name in the file: array} of the arrays of a cache, CACHE or SLIDING."""
    if cache == CACHE:
        return dict(arrays)
    begins = f"{CACHE}.", f"{CACHE}_cells."
    return {
        SLIDING + (name.removeprefix(CACHE) if f"{name}.".startswith(begins) else f"_{name}"): array
        for name, array in arrays.items()
    }


def ds_v4_as_rows(source: CacheSource, from_format: str | None = None) -> CacheSource:
    """Return a source whose rows have their codes and scales side by side; other layouts unchanged.

    A block of `DS_V4_LAYOUT` has the codes of all its tokens, then their scales: 584 bytes a token.
    """
    format = (from_format or source.contents.description.format or "").partition(":")[0]
    line = source.layout and layouts.parse(source.layout)
    if line != layouts.parse(DS_V4_LAYOUT) or (format != "ds_v4" and str(source.layout) != DS_V4_LAYOUT):
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
    """Append an axis of length 1 to each array that has one axis less than `count`."""
    if isinstance(found, list):
        return [with_axes(each, count) for each in found]
    return found[..., None] if found.ndim == count - 1 else found


def check_pages_in_pool(convention: str, pages: BlockTable, rows: int) -> None:
    """Check that every page of a table lies in a pool of so many rows."""
    outside = np.argwhere(pages.table >= rows)
    if len(outside):
        sequence, column = outside[0].tolist()
        here = f"block_tables[{sequence}, {column}]"
        here = here if convention == BLOCK_TABLES else f"{convention}, page {column} of sequence {sequence}"
        wanted = f"a page of the pool, 0 to {rows // pages.page_size - 1} (see kvkit check)"
        page = int(pages.table[sequence, column]) // pages.page_size
        raise argument_error(here, wanted, page)


def leaves(found: Any) -> list[np.ndarray]:
    """Return the arrays of nested lists."""
    return list(files.flat({"": found if isinstance(found, np.ndarray) else list(found)}).values())


def view_of(cache: Any, layout: str | Layout, sizes: Mapping[str, int]) -> KV | None:
    """Return keys and values as views, or copies if the layout splits an axis; None with scales in blocks."""
    line = layouts.parse(layout)
    if line.has_scales:
        return None
    if line.split:
        whole = Layout(("l", "kv") if "kv" in line.names else ("l",), *[("b", "n", "h", "c")] * 2)
        cache, line, sizes = layouts.convert(cache, line, whole, sizes=sizes or None), whole, {}
    return layouts.view(cache, line, sizes=sizes or None)


def axis_sizes_of(kv: KV, layout: str | Layout) -> dict[str, int]:
    """Return {axis of the layout: length} of views, without lengths in which the arrays of lists differ."""
    in_lists = isinstance(kv.keys[0], tuple)  # a layer is a tuple of sequences [n, h, c]
    arrays = [one for each in kv.keys for one in (each if in_lists else [each])]
    found = {"l": len(kv.keys)} | ({"b": len(kv.keys[0])} if in_lists else {})
    for i, axis in enumerate("bnhc"[-arrays[0].ndim :]):
        lengths = {array.shape[i] for array in arrays}
        found |= {axis: min(lengths)} if len(lengths) == 1 else {}
    found = {axis: n for axis, n in found.items() if axis in layouts.parse(layout).names}
    values = kv.values[0][0] if in_lists else kv.values[0]
    return found | ({"v": values.shape[-1]} if values.shape[-1] != found.get("c", values.shape[-1]) else {})


def format_of_paged(about: Mapping[str, Any]) -> str | None:
    """Return the format of a `PagedCache` from the arguments of its constructor."""
    bits = about.get("quant_bit")
    return about.get("quant_format") or (f"int{bits}:g{about.get('quant_group')}" if bits else None)
