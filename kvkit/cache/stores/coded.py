"""Store a quantized layer's keys and values as codes, in memory or in a mapped file."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.cache.stores.codes import TAIL_ROOM, CodedSide
from kvkit.cache.stores.mapped import ArrayForm, File, Home
from kvkit.cache.stores.memory import BeginAt, Geometry
from kvkit.cache.stores.span import Span
from kvkit.cache.stores.view import KVView
from kvkit.formats import BY_NAME
from kvkit.formats.rotations import OUTPUT, QUERY
from kvkit.typed import Array, States

SIDES = "keys", "values"
GROWING = "tail", "codes", "cells"  # arrays of a side that grow with the context
# {name in a sidecar: the counter of a `CodedSide`}
COUNTERS = {"coded": "coded", "before": "coded_before", "start": "tail_origin"}

Forms = dict[str, ArrayForm]  # {name: (shape, dtype)} of the arrays of a side
Plan = tuple["CodeStore", list[Forms]]  # a store, and the arrays of its sides in a file


class CodeStore:
    """Stores the keys and values of a layer as codes, with the methods of `Store`."""

    capacity = 0  # sides grow by themselves
    file: Any = None  # the mapped file; None in memory
    rows_adjoin = False

    def __init__(self, geometry: Geometry, sides: list[CodedSide], read_back: bool) -> None:
        self.geometry, self.sides, self.read_back = geometry, sides, read_back
        self.rooms: list[tuple[Array, Any]] = []  # of each side in this update: (tail, its first row)

    def fits(self, new: int) -> bool:
        """Return whether there is room for new tokens."""
        return all(side.fits(new) for side in self.sides)

    def make_room(self, new: int) -> None:
        """Make room for new tokens."""
        self.rooms = [side.make_room(new) for side in self.sides]

    def write(self, row: int, key_states: Array, value_states: Array) -> None:
        states = key_states, value_states
        for side, new, room in zip(self.sides, states, self.rooms, strict=True):
            side.append(new, room)

    def commit(self, layer: Any) -> None:
        """Encode the tokens that have left the window, unless the layer records the past."""
        self.rooms = []
        if not layer.record_past:
            self.encode_old()

    def encode_old(self) -> None:
        """Encode the tokens that have left the window; with `read_back` attention reads their codes now."""
        for side in self.sides:
            side.encode_old()
            if self.read_back:
                self.show_codes(side)

    def show_codes(self, side: CodedSide) -> None:
        """Make attention read all codes of a side, and free the unquantized copies of them."""
        side.release_undo()

    def crop(self, length: int) -> None:
        for side in self.sides:  # there may be more codes afterwards, if past tokens were recorded
            side.grow(side.new_blocks(length))
        for side in self.sides:
            side.crop(length)
            side.encode_old()
        self.attend_to_codes()

    def keep_rows(self, rows: Array, first: int, rope: Any, rotated: Array | None) -> None:
        """Keep only some tokens, byte for byte. Codes are never rotated."""
        if len(rows) < self.sides[0].length:
            for side in self.sides:
                side.keep_rows(rows, side)

    @property
    def lost_sinks(self) -> int:
        """Return how many sinks were removed."""
        return int(self.sides[0].sinks.shape[2]) - self.sides[0].sink

    def undo_update(self, length: int) -> None:
        """Undo the latest update: go back to `length` tokens."""
        for side in self.sides:
            side.undo_update(length)

    @property
    def is_large(self) -> bool:
        return any(side.is_large for side in self.sides)

    def release_undo(self) -> None:
        """Free the unquantized copies of codes, which undoing the last update would need."""
        for side in self.sides:
            side.release_undo()

    def attend_to_codes(self) -> None:
        """Make attention read every token that has a code as this code, not as its unquantized copy."""
        for side in self.sides:
            side.show_codes()

    def rows(self, begin: int, end: int) -> tuple[States, States]:
        key, value = self.sides
        return KVView(key), KVView(value)

    def context(self, query_format: str, begin: int, end: int) -> tuple[Any, BeginAt]:
        batch, heads, *dims = self.geometry[:4]
        tables = [side.segments(begin=begin) for side in self.sides]
        forms = [side.format for side in self.sides]
        context = cpu.attention.segmented.context(query_format, batch, heads, tuple(dims), forms, tables)
        return context, functools.partial(self.begin_at, tables)

    def query(self, query: Array) -> Array:
        """Return queries rotated as the stored keys are."""
        return self.sides[0].rotated(query, QUERY)

    def output(self, out: Array) -> Array:
        """Return outputs of attention rotated back, because the stored values are rotated."""
        return self.sides[1].rotated(out, OUTPUT)

    def begin_at(self, tables: list[Array], params: Array, row: int) -> None:
        """Make a prepared call read the latest view from a row on: refill its tables of segments."""
        for side, table in zip(self.sides, tables, strict=True):
            side.segments(table, row)

    def stored(self) -> tuple[States, States]:
        key, value = self.sides
        return key.stored(), value.stored()

    def select_rows(self, indices: Array) -> CodeStore:
        """Return a copy of the store with these rows of the batch."""
        store = copy.copy(self)
        store.geometry = self.geometry._replace(batch=len(indices))
        store.sides = [side.select_rows(indices) for side in self.sides]
        return store

    def close(self) -> None:
        pass


class MappedCodeStore(CodeStore):
    """Stores codes, scales, sinks and tail in one mapped file.

    Committed rows are never overwritten: tokens of the tail stay in place until they are encoded, or move to
    free rows. So a step writes free rows first; then one write of a few numbers to the sidecar commits it.
    The arrays of codes have spare rows, so that decoding after a prompt does not need a new file at once.
    Tokens that the latest update encoded also stay in the tail, unquantized: after a crash between layers,
    opening the folder can undo that update.
    """

    def __init__(self, geometry: Geometry, plan: Plan, home: Home, new: bool = True) -> None:
        source, forms = plan
        super().__init__(geometry, source.sides, source.read_back)
        self.forms = forms
        self.file = File(home, [form for side_forms in forms for form in side_forms.values()], new)
        arrays = iter(self.file.arrays)
        for side, side_forms in zip(self.sides, forms, strict=True):
            for part in side_forms:
                setattr(side, part, next(arrays))
            side.block_of = side.block_of[0, 0, :, 0]  # in files every array has 4 axes

    def __reduce__(self) -> tuple[Any, ...]:  # a copy lies in memory
        return CodeStore, (self.geometry, self.sides, self.read_back)

    @classmethod
    def opened(
        cls, about: dict[str, Any], span: Span, home: Home, empty: Callable[[Geometry], CodeStore]
    ) -> MappedCodeStore:
        """Open the store that a sidecar describes. `empty` makes an empty store in memory."""
        _dtype, batch, heads, _rows, key_dim = about["keys"]["tail"]
        value_dim = about["values"]["tail"][-1]
        geometry = Geometry(batch, heads, key_dim, value_dim, BY_NAME[about["dtype"]])
        source = empty(geometry)
        forms = [
            array_forms(side, batch, *(about[name][part][3] for part in GROWING))
            for name, side in zip(SIDES, source.sides, strict=True)
        ]
        if any(about[name] != expected for name, expected in describe_forms(forms).items()):
            raise ValueError(f"arrays that do not fit the arguments {home.about['arguments']}")
        store = cls(geometry, (source, forms), home, new=False)
        for name, side in zip(SIDES, store.sides, strict=True):
            side.sink = min(about["state"].get("sinks", side.sink), side.sink)
            restore_side(side, span.length, *(about["state"][f"{name}.{key}"] for key in COUNTERS))
        return store

    def show_codes(self, side: CodedSide) -> None:
        side.show_codes()  # without freeing the unquantized copies, which undo an unfinished step

    def make_room(self, new: int) -> None:
        self.rooms = [(side.tail, side.tail_at(new)) for side in self.sides]

    def fill(self, store: CodeStore, indices: Iterable[int], begin: int, end: int) -> None:
        """Copy all tokens of another store; `indices` are the rows of its batch."""
        for side, source in zip(self.sides, store.sides, strict=True):
            # The tail begins after sinks and codes of earlier updates: the latest update may be undone.
            sinks = min(side.sink, side.length)
            side.tail_origin = sinks + side.coded_before
            first = side.tail_origin - source.tail_origin
            sources = {
                "sinks": source.sinks[:, :, :sinks],
                "codes": source.codes[:, :, : side.coded],
                "cells": source.cells[:, :, : side.block_count],
                "tail": source.tail[:, :, first : first + side.length - side.tail_origin],
            }
            for name, rows in sources.items():
                for b, index in enumerate(indices):
                    getattr(side, name)[b, :, : rows.shape[2]] = rows[index]
            side.block_of[: side.coded] = source.block_of[: side.coded]

    def with_new_sidecar(self) -> MappedCodeStore:
        """Return a store of the same file without a sidecar; the next commit writes a new one."""
        store = MappedCodeStore.__new__(MappedCodeStore)
        CodeStore.__init__(store, self.geometry, [copy.copy(side) for side in self.sides], self.read_back)
        store.forms, store.file = self.forms, self.file.with_new_sidecar()
        return store

    def fill_rows(self, store: CodeStore, rows: Array, rope: Any, rotated: Array | None) -> None:
        """Copy some tokens of another store, byte for byte. Codes are never rotated."""
        for side, source in zip(self.sides, store.sides, strict=True):
            side.keep_rows(rows, source)

    def commit(self, layer: Any) -> None:
        super().commit(layer)
        numbers = {
            f"{name}.{key}": getattr(side, counter)
            for name, side in zip(SIDES, self.sides, strict=True)
            for key, counter in COUNTERS.items()
        }
        self.file.commit(self.about, layer, numbers)

    def about(self) -> dict[str, Any]:
        """Describe the arrays for a sidecar."""
        return {"dtype": self.geometry.fmt.name} | describe_forms(self.forms)

    def close(self) -> None:
        self.file.close()

    def prefetch(self, span: Span) -> None:
        rows: list[tuple[int, int]] = []
        for side in self.sides:  # (first, count) of sinks, tail, codes, cells and block_of, as `array_forms`
            rows += [(0, side.sink), (side.codes_end - side.tail_origin, side.tail_length)]
            rows += [(0, count) for count in (side.coded, side.block_count, side.coded)]
        self.file.prefetch(rows)


def plan_file(
    store: CodeStore, batch: int, tokens: int, keep_encoded: bool, kept: Array | None = None
) -> Plan:
    """Plan a file for a store and `tokens` more; return the store and the forms of its arrays.

    If one array is too small all of them grow, because growing needs a new file. With `keep_encoded` the tail
    also has the tokens that the latest update encoded. With `kept` the store has only these tokens.
    """
    store = copy.copy(store)  # the plan has counters of its own
    store.sides = [copy.copy(side) for side in store.sides]
    if not keep_encoded:
        for side in store.sides:
            side.coded_before = side.codes_read = side.coded
    if kept is not None:
        for side in store.sides:
            side.count_kept(kept)
    grows = kept is not None or not store.fits(tokens)
    return store, [array_forms(side, batch, *row_counts(side, tokens, grows)) for side in store.sides]


def row_counts(side: CodedSide, tokens: int, grows: bool) -> tuple[int, int, int]:
    """Return how many rows the arrays tail, codes and cells need.

    With `grows`, there is room for the new blocks and a quarter more, at least for twice the present blocks,
    and besides for the blocks of a window and of a tail's spare tokens.
    """
    codes, cells = side.codes.shape[2], side.cells.shape[2]
    if grows:
        new = side.new_blocks(side.length + tokens)
        more = max(side.block_count, new + (side.block_count + new) // 4)
        more += 1 + (side.residual + TAIL_ROOM) // side.block_size
        codes, cells = side.coded + more * side.block_size, side.block_count + more
    return side.new_tail_rows(tokens) + side.coded - side.coded_before, codes, cells


def array_forms(side: CodedSide, batch: int, tail: int, codes: int, cells: int) -> Forms:
    """Return {name: (shape, dtype)} of the arrays of a side."""
    rows = {"sinks": side.sinks.shape[2], "tail": tail, "codes": codes, "cells": cells}
    forms: Forms = {}
    for name, count in rows.items():
        array = getattr(side, name)
        forms[name] = (batch, array.shape[1], count, array.shape[3]), array.dtype
    return forms | {"block_of": ((1, 1, codes, 1), np.dtype(np.int64))}


def describe_forms(forms: Iterable[Forms]) -> dict[str, dict[str, list[Any]]]:
    """Describe the arrays of both sides for a sidecar."""
    return {
        name: {part: [dtype.name, *shape] for part, (shape, dtype) in side_forms.items()}
        for name, side_forms in zip(SIDES, forms, strict=True)
    }


def restore_side(side: CodedSide, length: int, coded: int, before: int, start: int) -> None:
    """Set the counters of a side whose arrays are filled; raise ValueError if they do not fit the arrays."""
    sinks = min(side.sink, length)
    first, end = sinks + before - start, length - start  # rows of the tail after the first `before` codes
    blocks = side.block_of[: max(0, coded)]
    legal = (
        sinks >= 0
        and 0 <= before <= coded <= min(side.codes.shape[2], length - sinks)
        and (first == end or 0 <= first < end <= side.tail.shape[2])
        and (not coded or 0 <= blocks.min() <= blocks.max() < side.cells.shape[2])
    )
    if not legal:
        raise ValueError(f"a state that cannot be: {length} tokens, {coded} codes, a tail from {start} on")
    side.coded, side.tail_origin = coded, start
    side.crop(length)  # counts the blocks
    side.coded_before = before
