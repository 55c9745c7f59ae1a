"""Store a quantized layer's keys and values as codes."""

from __future__ import annotations

import copy
import functools
from typing import Any

from kvkit import cpu
from kvkit.cache.stores.allocation import Allocate
from kvkit.cache.stores.attributes import Attributes
from kvkit.cache.stores.codes import CodedSide
from kvkit.cache.stores.memory import BeginAt, Geometry
from kvkit.cache.stores.view import KVView
from kvkit.formats.rotations import OUTPUT, QUERY_ROWS
from kvkit.typed import Array, States

SIDES = "keys", "values"


class CodeStore:
    """Stores the keys and values of a layer as codes, with the methods of `Store`."""

    _attributes = Attributes("sides", "rooms")
    capacity = 0  # sides grow by themselves
    rows_adjoin = False

    def __init__(self, geometry: Geometry, sides: list[CodedSide], read_back: bool) -> None:
        self.geometry, self.sides, self.read_back = geometry, sides, read_back
        self.rooms: list[tuple[Array, Any]] = []  # of each side in this update: (tail, its first row)

    def counters(self) -> tuple[Any, ...]:
        """Return the objects that count rows."""
        return (self, *self.sides)

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
        if not layer._record_past:
            self.encode_old()

    def encode_old(self) -> None:
        """Encode the tokens that have left the window; with `read_back` attention reads their codes now."""
        for side in self.sides:
            side.encode_old()
            if self.read_back:
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
        return self.sides[0].rotated(query, QUERY_ROWS)

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

    def copied(self, allocate: Allocate) -> CodeStore:
        """Return a copy of the store in arrays from `allocate`."""
        store = copy.copy(self)
        store.sides = [side.copied(allocate) for side in self.sides]
        return store

    def joined(self, store: CodeStore, row: int) -> CodeStore:
        """Return a copy with the tokens of another store before row `row`."""
        joined = copy.copy(self)
        joined.sides = [own.joined(their, row) for own, their in zip(self.sides, store.sides, strict=True)]
        return joined

    def select_rows(self, indices: Array) -> CodeStore:
        """Return a copy of the store with these rows of the batch."""
        store = copy.copy(self)
        store.geometry = self.geometry._replace(batch=len(indices))
        store.sides = [side.select_rows(indices) for side in self.sides]
        return store
