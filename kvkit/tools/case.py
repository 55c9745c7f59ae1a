"""What `check` is given, normalised: tables as pages in use, caches as [layers, blocks, rows, heads,
content].

Nothing is computed before a rule asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvkit import layouts
from kvkit.checks import table_rules
from kvkit.checks.values import integer
from kvkit.errors import KvkitError, argument_error, describe
from kvkit.files.arrays import nested
from kvkit.interop import as_numpy

TABLES = "block_tables", "cachestarts", "kv_indices"
KNOWN = (
    *TABLES,
    "context_lens", "kv_indptr", "kv_last_page_len", "kvstarts", "num_blocks", "page_size", "placeholder",
    "slot_mapping", "slot_sequences", "slot_positions", "reserved_block", "index_type",
    "cache", "key_cache", "value_cache", "key_scale", "value_scale", "format", "layout",
    "query", "lse", "softmax_scale",
)  # fmt: skip
NUMBERS = "num_blocks", "page_size", "placeholder", "reserved_block"


@dataclass(frozen=True)
class Side:
    """Keys or values: a name, codes or floats [layers, blocks, rows, heads, content], and scales."""

    name: str
    array: np.ndarray
    scale: np.ndarray | None


def stacked(view):
    """One array [layers, blocks, rows, heads, content] of a view, whose layers may be arrays of their own."""
    if isinstance(view, tuple):
        return np.stack([stacked_blocks(each) for each in view])
    return view


def stacked_blocks(view):
    return np.stack(view) if isinstance(view, tuple) else view


class Case:
    """The arrays that rules look at."""

    def __init__(self, arrays: dict[str, Any], layout=None):
        unknown = [name for name in arrays if name.partition(".")[0] not in KNOWN]
        if len(unknown) == len(arrays):
            raise argument_error("arrays", f"some of {', '.join(KNOWN)}", ", ".join(map(str, unknown[:8])))
        self.given = {name: as_numpy(value, name) for name, value in arrays.items() if value is not None}
        self.layout = layout if layout is not None else self.text("layout")
        for name in NUMBERS:
            setattr(self, name, self.number(name))
        if self.num_blocks is None and self.sides:
            self.num_blocks = self.sides[0].array.shape[1]
        if self.page_size is None and self.sides:
            self.page_size = self.sides[0].array.shape[2]

    num_blocks: Any  # int, or None where nobody says it
    page_size: Any
    placeholder: int | None
    reserved_block: int | None

    def number(self, name):
        return integer(name, self.given[name]) if name in self.given else None

    def text(self, name):
        value = self.given.get(name)
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if value is not None and not isinstance(value, str):
            raise argument_error(name, "a text", describe(value))
        return value

    def index(self, name, ndim=None):
        """An index tensor of any integers; None if it is not given."""
        if name not in self.given:
            return None
        array = np.asarray(self.given[name])
        if array.size == 0:
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu" or (ndim is not None and array.ndim != ndim):
            raise argument_error(name, f"integers{f' with {ndim} axes' if ndim else ''}", describe(array))
        return array

    @cached_property
    def table_name(self):
        """Which of the arrays holds pages; None if there is none, or nothing to hold it against."""
        name = next((name for name in TABLES if name in self.given), None)
        if name is None:
            return None
        for needed in ("num_blocks", "page_size"):
            if getattr(self, needed) is None:
                raise KvkitError(f"{needed}: expected a number, as {name} is given, got None")
        if self.page_size < 1 or self.num_blocks < 0:
            raise argument_error("page_size", "at least 1", self.page_size)
        return name

    @cached_property
    def raw_table(self):
        """The pages as they are given: (rows [sequences, columns]) or (starts, pages one after the other)."""
        value = self.given[self.table_name]
        if self.table_name == "kv_indices":
            return self.index("kv_indptr", 1), self.index("kv_indices", 1)
        if isinstance(value, (tuple, list)) and len(value) == 2 and np.ndim(value[0]) == 1:
            starts, pages = map(np.asarray, value)
            if len(starts) != len(pages) or starts.dtype.kind in "iu":
                return starts, pages
        return self.index(self.table_name, 2)

    @cached_property
    def lengths(self):
        """Tokens of each sequence."""
        lengths = self.index("context_lens", 1)
        if lengths is None and "kvstarts" in self.given:
            lengths = np.diff(self.index("kvstarts", 1))
        if lengths is None and isinstance(self.raw_table, tuple):
            pages = np.diff(self.raw_table[0])
            last = self.index("kv_last_page_len", 1)
            if last is not None and len(last) == len(pages):
                lengths = np.where(pages > 0, (pages - 1) * self.page_size + last, 0)
        if lengths is None:
            raise KvkitError("context_lens: expected the tokens of each sequence, got None")
        return lengths.astype(np.int64, copy=False)

    @cached_property
    def pages(self):
        """The table as (starts, pages in use one after the other); None without one."""
        if self.table_name is None:
            return None
        if isinstance(self.raw_table, tuple):
            starts, pages = self.raw_table
            legal = (
                len(starts) and starts[0] == 0 and starts[-1] <= len(pages) and (np.diff(starts) >= 0).all()
            )
            starts = starts.astype(np.int64) if legal else np.zeros(1, np.int64)
            return starts, np.ascontiguousarray(pages[: starts[-1]].astype(np.int64))
        rows = min(len(self.raw_table), len(self.lengths))
        found = table_rules.padded(self.raw_table[:rows], self.lengths[:rows], 0, self.page_size)
        return found.starts, found.ids

    @cached_property
    def of_rows(self):
        """Whether the table says first rows, as PMX does, and not the numbers of pages."""
        return self.table_name == "cachestarts"

    @cached_property
    def tables(self):
        """`table_rules.Tables` of page numbers; None without a table."""
        if self.pages is None:
            return None
        starts, ids = self.pages
        placeholder = self.placeholder if self.placeholder is not None else self.reserved_block
        if self.aligned:
            return table_rules.Tables(starts, ids // self.unit, self.num_blocks, placeholder)
        return table_rules.Tables(starts, ids, self.num_blocks * self.page_size, placeholder)

    @cached_property
    def unit(self):
        """What a page is counted in: PMX's tables say its first row."""
        return self.page_size if self.of_rows else 1

    @cached_property
    def aligned(self):
        """Whether the table's entries are pages: PMX allows them to begin at any row."""
        return self.unit == 1 or not (self.pages[1] % self.unit).any()

    def entry(self, sequence, column):
        """The name of an entry of the table."""
        if isinstance(self.raw_table, tuple):
            return (
                f"{self.table_name}[{self.pages[0][sequence] + column}] (sequence {sequence}, page {column})"
            )
        return f"{self.table_name}[{sequence}, {column}]"

    @cached_property
    def slots(self):
        """The slots of a step, as int64; None if there are none, or no pages to hold them against."""
        slots = self.index("slot_mapping")
        if slots is None or self.page_size is None or self.num_blocks is None:
            return None
        return slots.reshape(-1).astype(np.int64)

    @cached_property
    def slot_places(self):
        """(sequence, position) of each slot; None if that is not said."""
        sequences, positions = self.index("slot_sequences", 1), self.index("slot_positions", 1)
        if self.slots is None or sequences is None or positions is None or self.table_name is None:
            return None
        if not self.aligned:
            return None
        for name, array in (("slot_sequences", sequences), ("slot_positions", positions)):
            if len(array) != len(self.slots):
                raise argument_error(name, f"{len(self.slots)} entries, as slot_mapping", len(array))
        return sequences.astype(np.int64), positions.astype(np.int64)

    @cached_property
    def page_of_slots(self):
        """The page that the table has for each slot's token; -1 where it has none. None without tokens."""
        if self.slot_places is None:
            return None
        sequences, positions = self.slot_places
        columns = positions // self.page_size
        if isinstance(self.raw_table, tuple):
            starts, ids = self.pages
            known = (sequences >= 0) & (sequences < len(starts) - 1) & (positions >= 0)
            first = starts[np.where(known, sequences, 0)]
            known &= first + columns < starts[np.where(known, sequences, 0) + 1]
            pages = ids[np.where(known, first + columns, 0)] if len(ids) else np.full(len(columns), -1)
        else:
            rows = self.raw_table
            known = (sequences >= 0) & (sequences < len(rows)) & (positions >= 0) & (columns < rows.shape[1])
            pages = rows[np.where(known, sequences, 0), np.where(known, columns, 0)] if rows.size else columns
        return np.where(known, pages // self.unit, -1).astype(np.int64)

    @cached_property
    def sizes(self):
        """What is known of a layout's axes."""
        known = {"b": self.given.get("num_blocks"), "n": self.given.get("page_size")}
        return {axis: int(size) for axis, size in known.items() if size is not None}

    @cached_property
    def whole(self):
        """The cache as the file or the caller has it, as nested lists; None if keys and values are apart."""
        return nested(self.given)

    @cached_property
    def viewed(self):
        """({"key": .., "value": ..}, "") by the layout, or (None, why there are no such views)."""
        pools = {"cache": self.whole} if self.whole is not None else {
            name: self.given[f"{name}_cache"] for name in ("key", "value") if f"{name}_cache" in self.given
        }  # fmt: skip
        try:
            views = {name: layouts.view(pool, self.layout, sizes=self.sizes) for name, pool in pools.items()}
        except KvkitError as error:
            return None, str(error)
        if "cache" in views:
            return {"key": stacked(views["cache"].keys), "value": stacked(views["cache"].values)}, ""
        return {name: stacked(getattr(view, f"{name}s")) for name, view in views.items()}, ""

    @cached_property
    def sides(self):
        """Keys and values, those that are given."""
        found: list[Side] = []
        if self.whole is not None and self.layout is None:
            return found
        for name in ("key", "value"):
            if self.layout is not None:
                cache = (self.viewed[0] or {}).get(name)
            else:
                cache = self.given.get(f"{name}_cache")
            if cache is None:
                continue
            cache = np.asarray(cache)
            if cache.ndim not in (4, 5):
                wanted = "[blocks, rows, heads, content], or [layers, ...] of that"
                raise argument_error(f"{name}_cache", wanted, describe(cache))
            scale = self.given.get(f"{name}_scale")
            scale = None if scale is None else np.asarray(scale)
            if scale is not None and scale.ndim in (3, 4) and cache.ndim == 4:
                scale = scale[None]
            found.append(Side(name, cache if cache.ndim == 5 else cache[None], scale))
            if found[0].array.shape[:3] != found[-1].array.shape[:3]:
                wanted = f"layers, blocks and rows {found[0].array.shape[:3]}, as key_cache"
                raise argument_error(f"{name}_cache", wanted, found[-1].array.shape[:3])
        return found

    @cached_property
    def used(self):
        """Which rows [blocks, rows] hold a token, and which blocks are in use; None without a table."""
        if self.tables is None or not self.sides or not self.aligned:
            return None
        blocks, rows = self.sides[0].array.shape[1:3]
        filled = np.zeros(blocks, np.int64)
        starts, ids = self.tables.starts, self.tables.ids
        counts = np.diff(starts)
        columns = np.arange(len(ids)) - np.repeat(starts[:-1], counts)
        in_page = np.clip(np.repeat(self.lengths[: len(counts)], counts) - columns * self.page_size, 0, rows)
        legal = (ids >= 0) & (ids < blocks)
        if self.tables.placeholder is not None:
            legal &= ids != self.tables.placeholder
        np.maximum.at(filled, ids[legal], in_page[legal])
        return np.arange(rows) < filled[:, None], filled > 0

    def first_rows(self, side, mask):
        """(layers, blocks, rows) of a mask [layers, blocks, rows] as words."""
        layer, block, row = mask
        layers = f"{layer}, " if len(side.array) > 1 else ""
        return f"{side.name}_cache[{layers}{block}, {row}]"
