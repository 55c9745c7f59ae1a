"""Bring the arrays of `check` into one form: tables as pages in use, caches as arrays by layer and block."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks import table_rules
from kvkit.checks.values import integer
from kvkit.errors import KvkitError, argument_error, describe
from kvkit.files.contents import BESIDE
from kvkit.interop import as_numpy, integers
from kvkit.layouts import Layout, parse, tables
from kvkit.layouts.views import KV
from kvkit.tools.contents import Source
from kvkit.tools.inspection import fitting_layouts
from kvkit.tools.names import NAMINGS, PAGED_NAMES, rename_tables, some_names
from kvkit.tools.source import CacheSource
from kvkit.tools.state_names import COMPRESSOR, COMPRESSOR_STATES, STATES, kind_of_state

TABLES = "block_tables", "cachestarts", "kv_indices"
# Names of arrays that may be one layer's, as layers.2.entry_count.indexer.
OF_LAYERS = "compressed_slot_mapping", "window_ring", "entry_count", "compressed_kv"
NAME_OF_LAYER = re.compile(
    rf"(?:layers\.([0-9]{{1,6}})\.)?({'|'.join(OF_LAYERS)})(?:\.(?:compressor|indexer))?"
)
NAMES_READ = (
    *TABLES,
    "context_lens", "kv_indptr", "kv_last_page_len", "kvstarts", "num_blocks", "page_size", "placeholder",
    "slot_mapping", "slot_sequences", "slot_positions", "reserved_block", "index_type",
    "cache", "layers", *chain(*NAMINGS), *BESIDE, "key_scale", "value_scale", "format", "layout",
    "query", "lse", "softmax_scale", "state_indices", "free_slots", *STATES,
    "state_layout", "k", "v", "g", "beta",
    *OF_LAYERS, "compress_ratios", "window", *COMPRESSOR_STATES,
)  # fmt: skip


class SlotTokens(NamedTuple):
    """Holds the token of each slot of a step."""

    sequences: np.ndarray
    positions: np.ndarray


class UsedRows(NamedTuple):
    """Holds masks of the rows of a pool that have a token, and of the blocks with such rows."""

    rows: np.ndarray  # [blocks, rows]
    blocks: np.ndarray  # [blocks]


@dataclass(frozen=True)
class CheckedSide:
    """Holds the keys or the values of a case."""

    name: str  # "key" or "value"
    label: str  # the user's name of the array, such as key_cache
    array: np.ndarray  # codes or floats [layers, blocks, rows, heads, content]
    scale: np.ndarray | None


def stack_view(view: Any) -> np.ndarray:
    """Join the layers of a view to one array [layers, blocks, rows, heads, content]."""
    if isinstance(view, tuple):
        arrays = [one for each in view for one in (each if isinstance(each, tuple) else [each])]
        if len(shapes := dict.fromkeys(map(np.shape, arrays))) > 1:
            wanted = "layers and sequences of one length, with equal heads"
            got = " and ".join(map(str, [*shapes][:3]))
            raise argument_error(
                "cache", wanted, f"{got} (kvkit convert --layers 0,2: takes those that are alike)"
            )
        return np.stack([np.stack(each) if isinstance(each, tuple) else each for each in view])
    return np.asarray(view)


class Prints(NamedTuple):
    """Holds a number of 64 bits for each head of each row [layers, blocks, rows, heads], 0 for zeros.

    `varied` marks the heads of rows whose elements are not all equal.
    """

    rows: np.ndarray
    varied: np.ndarray


class Case:
    """Holds the tables, slots and caches that rules check. Everything is computed on first use."""

    def __init__(
        self, source: Source | CacheSource, layout: str | Layout | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.source = source if isinstance(source, CacheSource) else CacheSource(source, layout, sizes)
        given = rename_tables(source) if isinstance(source, Mapping) else self.source.arrays
        unknown = [name for name in given if name.partition(".")[0] not in NAMES_READ]
        if len(unknown) == len(given) and self.source.cache is None and not self.source.separate:
            if self.source.contents.notes:  # which say what the file has instead
                raise self.source.no_cache()
            wanted = "tables, slots or a cache by name (block_tables, slot_mapping, key_cache...)"
            raise argument_error("arrays", wanted + self.source.pattern_to_give, some_names(unknown))
        self.given = {name: as_numpy(value, name) for name, value in given.items() if value is not None}
        self.rows_of_block = 1  # more if each row of a block is a page of the table
        self.token_ids: list[Any] = []  # of each sequence of a `PagedCache`, if each row is such a page
        # The tables of a `PagedCache`, and OpenVINO's, are read as block tables.
        converted = self.source.paged or "past_lens" in self.given
        if converted and (found := self.source.block_tables()) is not None:
            self.given["block_tables"], self.given["context_lens"] = tables.to_blocks(found[1])
            if self.source.paged and found[1].page_size == 1:
                self.rows_of_block = self.source.paged["arguments"]["page_size"]
                names = (f"sequences.{i}.token_ids" for i in range(len(found[1].lengths)))
                self.token_ids = [self.source.arrays.get(name, ()) for name in names]
        self.layout = self.source.stated_layout
        self.num_blocks: Any = self.number("num_blocks", 0)  # None if unknown, as the three below
        self.page_size: Any = self.number("page_size", 1)
        self.placeholder = self.number("placeholder")
        self.reserved_block = self.number("reserved_block")
        known = {"b": self.num_blocks, "n": self.page_size}
        self.sizes = {axis: size for axis, size in known.items() if size is not None}
        self.in_pages = self.source.layout is not None and "b" in parse(self.source.layout).names
        if self.in_pages and self.sides:
            shape = self.sides[0].array.shape
            self.num_blocks = shape[1] if self.num_blocks is None else self.num_blocks
            self.page_size = shape[2] if self.page_size is None else self.page_size

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on how the source is read, and on arrays that no rule reads."""
        of_layers = [
            name for name in self.given if NAME_OF_LAYER.fullmatch(name) or kind_of_state(name) == COMPRESSOR
        ]
        return *self.source.guess, *self.source.unread(NAMES_READ, of_layers)

    def of_layers(self, *names: str) -> Iterator[tuple[str, int | None, Any]]:
        """Yield (whole name, number of its layer or None, array) of arrays of `OF_LAYERS`."""
        for name, array in self.given.items():
            found = NAME_OF_LAYER.fullmatch(name)
            if found and found[2] in names:
                yield name, None if found[1] is None else int(found[1]), array

    def number(self, name: str, least: int | None = None) -> int | None:
        """Return the integer of a name; None if it is not given."""
        return integer(name, self.given[name], least) if name in self.given else None

    def has(self, need: str) -> bool | None:
        """Return whether an input of a rule is given; None if `need` names no input."""
        if need in ("block_tables", "num_blocks", "page_size"):
            return (self.table_name if need == "block_tables" else getattr(self, need)) is not None
        if need == "scales":
            return any(side.scale is not None for side in self.sides)
        if need == "keys and values":
            return bool(self.sides)
        if need in OF_LAYERS:
            return any(self.of_layers(need))
        return need in self.given if need in NAMES_READ else None

    def index(self, name: str, ndim: int | None = None) -> Any:
        """Return an index tensor of any integers; None if it is not given."""
        return integers(name, self.given[name], ndim) if name in self.given else None

    @cached_property
    def table_name(self) -> str | None:
        """Return the name of the array that lists pages; None without one."""
        name = next((name for name in TABLES if name in self.given), None)
        if name is None:
            return None
        for needed in ("num_blocks", "page_size"):
            if getattr(self, needed) is None:
                unknown = [each for each in self.given if each.partition(".")[0] not in NAMES_READ]
                if unknown and self.source.cache is None and not self.source.separate:
                    raise self.source.no_cache()
                if self.source.cache is not None and self.source.layout is None:
                    fits = ", ".join(fitting_layouts(self.source.cache, contents=False)) or "no named one"
                    wanted = f"the layout of cache (fits: {fits}), or num_blocks and page_size with {name}"
                    raise argument_error("layout", wanted, "None")
                raise argument_error(needed, f"a number, as {name} is given", "None")
        if self.page_size < 1:
            raise argument_error("page_size", "at least 1", self.page_size)
        return name

    @cached_property
    def raw_table(self) -> Any:
        """Return the pages as given: an array [sequences, columns], or (starts, pages)."""
        value = self.given[self.table_name or ""]
        if self.table_name == "kv_indices":
            if "kv_indptr" not in self.given:
                raise argument_error("kv_indptr", "where each sequence begins in kv_indices", "none")
            return self.index("kv_indptr", 1), self.index("kv_indices", 1)
        if isinstance(value, (tuple, list)) and len(value) == 2 and np.ndim(value[0]) == 1:
            starts, pages = (integers(f"{self.table_name}[{i}]", each, 1) for i, each in enumerate(value))
            if isinstance(value, tuple) or len(starts) != len(pages):
                return starts, pages
        return self.index(self.table_name or "", 2)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sequence."""
        lengths: np.ndarray | None = self.index("context_lens", 1)
        if lengths is None and "kvstarts" in self.given:
            lengths = np.diff(self.index("kvstarts", 1))
        if lengths is None and isinstance(self.raw_table, tuple):
            pages = np.diff(self.raw_table[0])
            last = self.index("kv_last_page_len", 1)
            if last is not None and len(last) == len(pages):
                lengths = np.where(pages > 0, (pages - 1) * self.page_size + last, 0)
        if lengths is None:
            raise argument_error("context_lens", "the tokens of each sequence", "None")
        return lengths.astype(np.int64, copy=False)

    @cached_property
    def pages(self) -> Any:
        """Return the entries in use, as given, in the form of `checks.table_rules`; None without a table."""
        if self.table_name is None:
            return None
        if isinstance(self.raw_table, tuple):
            starts, pages = self.raw_table
            legal = len(starts) and not starts[0] and starts[-1] <= len(pages)
            legal = legal and (np.diff(starts) >= 0).all()
            starts = starts.astype(np.int64) if legal else np.zeros(1, np.int64)
            return table_rules.Tables(starts, np.ascontiguousarray(pages[: starts[-1]].astype(np.int64)), 0)
        rows = min(len(self.raw_table), len(self.lengths))
        return table_rules.tables_in_use(self.raw_table[:rows], self.lengths[:rows], 0, self.page_size)

    @cached_property
    def page_tables(self) -> Any:
        """Return `pages` as page numbers; None without a table."""
        if self.pages is None:
            return None
        placeholder = self.placeholder if self.placeholder is not None else self.reserved_block
        unit, rows = (self.unit, 1) if self.aligned else (1, self.page_size)
        starts, ids = self.pages.starts, self.pages.ids // unit
        return table_rules.Tables(starts, ids, self.num_blocks * rows, placeholder)

    @cached_property
    def unit(self) -> int:
        """Return the difference between the entries of two neighbouring pages: page_size in PMX's tables."""
        return self.page_size if self.table_name == "cachestarts" else 1

    @cached_property
    def aligned(self) -> bool:
        """Return whether all entries begin whole pages; PMX lets pages begin at any row."""
        return self.unit == 1 or not (self.pages.ids % self.unit).any()

    @property
    def noun(self) -> str:
        """Return what the numbers of `page_tables` are: pages; rows if pages have one or begin at any row."""
        return "page" if self.aligned and not self.token_ids else "row"

    def place(self, sequence: str, column: int) -> str:
        """Return the words for the place of a page in the table of a sequence."""
        return f"{'has token' if self.token_ids else 'is in column'} {column} of {sequence}"

    def entry(self, sequence: int, column: int) -> str:
        """Return the name of an entry of the table, as a Python expression; or its token's place."""
        if isinstance(self.raw_table, tuple):
            place = self.pages.starts[sequence] + column
            return f"{self.table_name}[{place}] (sequence {sequence}, page {column})"
        if self.token_ids:
            return f"sequence {sequence}, token {column}"
        return f"{self.table_name}[{sequence}, {column}]"

    @cached_property
    def slots(self) -> Any:
        """Return the slots of a step as int64; None without slots, or if the size of the pool is unknown."""
        slots = self.index("slot_mapping")
        unknown = slots is None or self.page_size is None or self.num_blocks is None
        return None if unknown else slots.reshape(-1).astype(np.int64)

    @cached_property
    def slot_tokens(self) -> Any:
        """Return the `SlotTokens`; None if they are unknown."""
        sequences, positions = self.index("slot_sequences", 1), self.index("slot_positions", 1)
        if self.slots is None or sequences is None or positions is None:
            return None
        if self.table_name is None or not self.aligned:
            return None
        for name, array in (("slot_sequences", sequences), ("slot_positions", positions)):
            if len(array) != len(self.slots):
                raise argument_error(name, f"{len(self.slots)} entries, as slot_mapping", len(array))
        return SlotTokens(sequences.astype(np.int64), positions.astype(np.int64))

    @cached_property
    def page_of_tokens(self) -> Any:
        """Return the page that the table has for each slot's token, or -1; None if tokens are unknown."""
        if self.slot_tokens is None:
            return None
        sequences, positions = self.slot_tokens
        columns = positions // self.page_size
        if isinstance(self.raw_table, tuple):
            starts, ids = self.pages.starts, self.pages.ids
        else:
            count, width = self.raw_table.shape
            starts, ids = np.arange(count + 1) * width, self.raw_table.reshape(-1)
        known = (sequences >= 0) & (sequences < len(starts) - 1) & (positions >= 0)
        own = np.where(known, sequences, 0)
        place = starts[own] + columns
        known &= place < np.append(starts, 0)[own + 1]
        pages = ids[np.where(known, place, 0)] if len(ids) else columns
        return np.where(known, pages // self.unit, -1).astype(np.int64)

    @cached_property
    def viewed(self) -> tuple[KV | None, str]:
        """Return (views of keys and values, ""), or (None, why the layout does not fit)."""
        try:
            return self.source.view(**self.sizes), ""
        except KvkitError as error:
            if self.layout is None:
                raise
            with contextlib.suppress(KvkitError):  # without the number of heads, all heads are one
                return self.source.view(**{"h": 1} | self.source.sizes | self.sizes), ""
            return None, str(error)

    @cached_property
    def sides(self) -> list[CheckedSide]:
        """Return the keys and values that are given."""
        found: list[CheckedSide] = []
        if len(self.source.orders) > 1:
            self.source.require_cache()
        apart, kv = self.source.separate, self.viewed[0]
        if self.source.layout is None and self.source.side_names == PAGED_NAMES:
            wanted = "[blocks, rows, heads, content], perhaps after an axis of layers"
            got = describe(next(iter(apart.values())))
            raise argument_error(PAGED_NAMES["key" not in apart], wanted, got)
        if kv is None:
            return found
        labels = self.source.side_names if apart and self.source.side_names else PAGED_NAMES
        for name, views in self.source.given_sides(kv).items():
            array, scale = self.in_rows(stack_view(views)), self.in_rows(self.scale_of(name))
            found.append(CheckedSide(name, labels[name == "value"], array, scale))
        return found

    def in_rows(self, array: Any) -> Any:
        """Return an array [layers, blocks, rows, ...], with a block for each row if tables list rows."""
        if self.rows_of_block == 1 or array is None or array.ndim < 3:
            return array
        return array.reshape(array.shape[0], -1, 1, *array.shape[3:])

    def scale_of(self, side: str) -> np.ndarray | None:
        """Return the scales of keys or values, with an axis of layers added if codes lack it."""
        if inside := self.source.scales_inside.get("scale"):
            codes = self.source.require_view().keys[0]
            found = self.source.given_sides(inside)[side]  # all rows of a block share a channel's scale
            return stack_view(tuple(np.repeat(each, codes.shape[1] // each.shape[1], 1) for each in found))
        scale = self.source.side_scale(side, "scale")
        if scale is None:
            scales = None
            with contextlib.suppress(KvkitError):  # ignore scales with other axes
                scales = None if self.source.separate else self.source.scale_views.get("scale")
            return None if scales is None else stack_view(self.source.given_sides(scales)[side])
        scale = np.asarray(scale)
        codes = self.source.separate.get(side)
        one_layer = codes is not None and np.ndim(codes) == 4 and self.layout is None
        return scale[None] if scale.ndim in (3, 4) and one_layer else scale

    @cached_property
    def used(self) -> UsedRows | None:
        """Return the rows and blocks of the pool that have tokens; None without tables."""
        if self.page_tables is None or not self.sides or not self.aligned or not self.in_pages:
            return None
        blocks, rows = self.sides[0].array.shape[1:3]
        filled = np.zeros(blocks, np.int64)  # rows with a token, which are the first ones of a block
        starts, ids = self.page_tables.starts, self.page_tables.ids
        counts = np.diff(starts)
        columns = np.arange(len(ids)) - np.repeat(starts[:-1], counts)
        in_page = np.clip(np.repeat(self.lengths[: len(counts)], counts) - columns * self.page_size, 0, rows)
        legal = (ids >= 0) & (ids < blocks)
        if self.page_tables.placeholder is not None:
            legal &= ids != self.page_tables.placeholder
        np.maximum.at(filled, ids[legal], in_page[legal])
        return UsedRows(np.arange(rows) < filled[:, None], filled > 0)

    @cached_property
    def prints(self) -> dict[str, Prints]:
        """Return {name of a side: prints of its rows}. Rows of equal bytes have equal prints."""
        found: dict[str, Prints] = {}
        for side in self.sides:
            own = tuple(slice(None if step else 1) for step in side.array.strides)  # not what is repeated
            array, shape = side.array[own], side.array.shape[:-1]
            nbytes = array.shape[-1] * array.itemsize
            size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
            factors = np.random.default_rng(0).integers(1, 2**63, nbytes // size, np.uint64) | np.uint64(1)
            rows, varied = np.empty(array.shape[:-1], np.uint64), np.empty(array.shape[:-1], bool)
            for layer, block in np.ndindex(array.shape[:2]):
                octets = np.ascontiguousarray(array[layer, block]).view(np.uint8)  # [rows, heads, bytes]
                rows[layer, block] = octets.view(f"u{size}") @ factors
                octets = octets.reshape(*octets.shape[:2], -1, array.itemsize)
                varied[layer, block] = (octets != octets[..., :1, :]).any(axis=(-1, -2))
            found[side.name] = Prints(np.broadcast_to(rows, shape), np.broadcast_to(varied, shape))
        return found

    @cached_property
    def rows_in_use(self) -> np.ndarray | None:
        """Return the mask [blocks, rows] of rows that have a token; None if it is unknown.

        Without tables they are, of each block, the rows from the first to the last that is not zero in some
        layer; of a pool of keys and values in one array, those that are not zero.
        """
        if self.used is not None or self.table_name is not None or not self.sides:
            return None if self.used is None else self.used.rows
        some = np.zeros(self.sides[0].array.shape[1:3], bool)
        for side in self.sides:
            if side.array.shape[1:3] != some.shape:
                return None
            some |= (self.prints[side.name].rows != 0).any(axis=(0, 3))
        if not self.source.separate:
            return some
        after = np.maximum.accumulate(some, axis=1)
        return after & np.maximum.accumulate(some[:, ::-1], axis=1)[:, ::-1]

    def row_name(self, side: CheckedSide, layer: int, block: int, row: int) -> str:
        """Return the name of a row, as a Python expression."""
        if self.rows_of_block > 1:
            block, row = divmod(block, self.rows_of_block)
        at = (layer, block, row) if len(side.array) > 1 else (block, row)
        return f"{side.label}[{', '.join(map(str, at))}]"
