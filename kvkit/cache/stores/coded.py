"""Where a quantized layer's codes lie: in memory, or in a mapped file."""

import copy
from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.cache.stores.codes import SPARE
from kvkit.cache.stores.mapped import File
from kvkit.cache.stores.memory import Geometry
from kvkit.cache.stores.view import KVView
from kvkit.formats import BY_NAME
from kvkit.formats.rotations import OUTPUT, QUERY

SIDES = "keys", "values"
GROWING = "tail", "codes", "cells"
NUMBERS = "coded", "before", "start"  # of each side, in a state


class CodeStore:
    """Keys and values of a layer as codes, in the place of a `Store`."""

    capacity = 0  # for how many more tokens another store for the same ones has room
    file: Any = None  # where it lies, if not in memory

    def __init__(self, geometry, sides, read_back):
        self.geometry, self.sides, self.read_back = geometry, sides, read_back
        self.rooms: list = []  # of the update that is under way
        self.tables: list = []  # that attention reads

    def fits(self, new):
        """Whether there is room for new tokens."""
        return all(side.fits(new) for side in self.sides)

    def make_room(self, new):
        self.rooms = [side.room(new) for side in self.sides]

    def write(self, row, key_states, value_states):
        states = key_states, value_states
        for side, new, room in zip(self.sides, states, self.rooms, strict=True):
            side.append(new, room)

    def commit(self, span, record_past):
        """Encode what has left the window, unless past is recorded."""
        self.rooms = []
        if not record_past:
            self.evict()

    def evict(self):
        for side in self.sides:
            side.evict()
            if self.read_back:
                self.let_go(side)

    def let_go(self, side):
        """Let the next view see what is stored, and nothing else be held."""
        side.settle()

    def crop(self, length):
        for side in self.sides:
            side.grow(side.new_blocks(length))
        for side in self.sides:
            side.crop(length)
            side.evict()
        self.see_stored()

    def take_back(self, length):
        """Be as before the latest update, when there were so many tokens."""
        for side in self.sides:
            side.take_back(length)

    @property
    def is_large(self):
        return any(side.is_large for side in self.sides)

    def settle(self):
        """Let go of what only the last update needed."""
        for side in self.sides:
            side.settle()

    def see_stored(self):
        """Let attention see nothing but what is stored."""
        for side in self.sides:
            side.read_back()

    def rows(self, begin, end):
        return tuple(KVView(side) for side in self.sides)

    def context(self, packed, begin, end):
        """All rows as attention reads them, with queries of the format `packed`."""
        batch, heads, *dims, _ = self.geometry
        self.tables = [side.described() for side in self.sides]
        forms = [side.format for side in self.sides]
        return cpu.attention.segmented.context(packed, batch, heads, tuple(dims), forms, self.tables)

    def query(self, query):
        """Queries as the stored keys want them."""
        return self.sides[0].turned(query, QUERY)

    def output(self, out):
        """Outputs of attention to the stored values, as a caller wants them."""
        return self.sides[1].turned(out, OUTPUT)

    def begin_at(self, numbers, row):
        """Let prepared attention see what the latest view sees."""
        for side, table in zip(self.sides, self.tables, strict=True):
            side.described(table)

    def stored(self):
        return [side.stored() for side in self.sides]

    def taken(self, indices):
        """The same for other rows of the batch."""
        store = copy.copy(self)
        store.tables = []
        store.geometry = self.geometry._replace(batch=len(indices))
        store.sides = [side.taken(indices) for side in self.sides]
        return store

    def close(self):
        pass


class MappedCodeStore(CodeStore):
    """Codes, their scales, sinks and tail in one mapped file.

    Rows that count are never written again, in the tail too: its tokens stay where they are until they are
    codes, or move to where none of them lies. So a step writes only behind what counts, and its one write to
    the sidecar, of a few numbers, says all that has changed. Codes have room for all that may leave the
    window and some more, so that nothing but new tokens and other rows need another file, and the first ones
    after a prompt do not; the tail is as long as the prompt until they do. Of what the latest update has
    coded it keeps the originals, so that opening after a crash between two layers can take it back.
    """

    def __init__(self, geometry, plan, home, new=True):
        source, forms = plan
        super().__init__(geometry, source.sides, source.read_back)
        self.forms = forms
        self.file = File(home, [form for of_side in forms for form in of_side.values()], new)
        arrays = iter(self.file.arrays)
        for side, of_side in zip(self.sides, forms, strict=True):
            for part in of_side:
                setattr(side, part, next(arrays))
            side.block_of = side.block_of[0, 0, :, 0]

    def __reduce__(self):  # a copy lies in memory
        return CodeStore, (self.geometry, self.sides, self.read_back)

    @classmethod
    def opened(cls, about, span, home, empty):
        """The store of tokens, as a sidecar says; `empty` makes another one of its geometry, in memory."""
        (_, batch, heads, _, key_dim), value_dim = about["keys"]["tail"], about["values"]["tail"][-1]
        given = Geometry(batch, heads, key_dim, value_dim, BY_NAME[about["dtype"]])
        source = empty(given)
        forms = [
            forms_of(side, batch, *(about[name][part][3] for part in GROWING))
            for name, side in zip(SIDES, source.sides, strict=True)
        ]
        if any(about[name] != said for name, said in said_of(forms).items()):
            raise ValueError(f"arrays that are not those of {home.about['arguments']}")
        store = cls(given, (source, forms), home, new=False)
        for name, side in zip(SIDES, store.sides, strict=True):
            restore(side, span.length, *(about["state"][f"{name}.{number}"] for number in NUMBERS))
        return store

    def let_go(self, side):  # a step that was cut off may have to be taken back
        side.read_back()

    def make_room(self, new):
        self.rooms = [(side.tail, side.tail_at(new)) for side in self.sides]

    def fill(self, store, indices, begin, end):
        """Take all that another store has, from the given rows of its batch."""
        for side, source in zip(self.sides, store.sides, strict=True):
            side.start = min(side.sink, side.length) + side.before
            first, live = side.start - source.start, side.length - side.start
            used = {"sinks": min(side.sink, side.length), "codes": side.coded, "cells": side.blocks}
            pieces = [(name, 0, count) for name, count in used.items()]
            for name, begin, count in (*pieces, ("tail", first, live)):
                target, rows = getattr(side, name), getattr(source, name)[:, :, begin : begin + count]
                for b, index in enumerate(indices):
                    target[b, :, :count] = rows[index]
            side.block_of[: side.coded] = source.block_of[: side.coded]

    def commit(self, span, record_past):
        super().commit(span, record_past)
        numbers = {
            f"{name}.{number}": getattr(side, number)
            for name, side in zip(SIDES, self.sides, strict=True)
            for number in NUMBERS
        }
        self.file.commit(self.about, span, record_past, numbers)

    def about(self):
        """What a sidecar says of the arrays."""
        return {"dtype": self.geometry.fmt.name} | said_of(self.forms)

    def close(self):
        self.file.close()

    def prefetch(self, span):
        rows: list = []  # in the order of the arrays
        for side in self.sides:
            rows += (0, side.sink), (side.end - side.start, side.length - side.end)
            rows += [(0, count) for count in (side.coded, side.blocks, side.coded)]
        self.file.prefetch(rows)


def planned(store, batch, tokens, view):
    """What a `MappedCodeStore` is to hold: a store, and arrays with room for it and so many more tokens.

    Where one is too small all grow, as they would soon be too small too, and every time is a new file.
    Without the latest view there are no originals of codes.
    """
    store = copy.copy(store)
    store.sides = [copy.copy(side) for side in store.sides]
    for side in store.sides if not view else ():
        side.before = side.seen = side.coded
    grows = not store.fits(tokens)
    return store, [forms_of(side, batch, *counts(side, tokens, grows)) for side in store.sides]


def counts(side, tokens, grows):
    """Rows of the tail, the codes and the cells: as they are, or more and room for a window and a quarter."""
    codes, cells = side.codes.shape[2], side.cells.shape[2]
    if grows:
        new = side.new_blocks(side.length + tokens)
        more = max(side.blocks, new + (side.blocks + new) // 4) + 1 + (side.residual + SPARE) // side.block
        codes, cells = side.coded + more * side.block, side.blocks + more
    return side.tail_counts(tokens)[2] + side.coded - side.before, codes, cells


def forms_of(side, batch, tail, codes, cells):
    """(shape, dtype) of the arrays of a side, by name."""
    rows = {"sinks": side.sink, "tail": tail, "codes": codes, "cells": cells}
    forms = {}
    for name, count in rows.items():
        array = getattr(side, name)
        forms[name] = (batch, array.shape[1], count, array.shape[3]), array.dtype
    return forms | {"block_of": ((1, 1, codes, 1), np.dtype(np.int64))}


def said_of(forms):
    """The same for a sidecar, by the names of the sides."""
    return {
        name: {part: [dtype.name, *shape] for part, (shape, dtype) in of_side.items()}
        for name, of_side in zip(SIDES, forms, strict=True)
    }


def restore(side, length, coded, before, start):
    """Let a side whose arrays are in place have a state, if it can be."""
    sinks = min(side.sink, length)
    first, last = sinks + before - start, length - start
    blocks = side.block_of[: max(0, coded)]
    legal = (
        0 <= before <= coded <= min(side.codes.shape[2], length - sinks)
        and (first == last or 0 <= first < last <= side.tail.shape[2])
        and (not coded or 0 <= blocks.min() <= blocks.max() < side.cells.shape[2])
    )
    if not legal:
        raise ValueError(f"a state that cannot be: {length} tokens, {coded} codes, a tail from {start} on")
    side.coded, side.start = coded, start
    side.crop(length)
    side.before = before
