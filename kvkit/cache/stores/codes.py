"""Store the keys or the values of a quantized layer: sinks, then codes, then an unquantized tail."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.cache.stores.memory import copy_rows
from kvkit.errors import argument_error
from kvkit.formats import rotation_named
from kvkit.formats.elements import BY_DTYPE, BY_NAME, STORED
from kvkit.formats.rotations import OUTPUT
from kvkit.formats.rotations import STORED as STORED_ROWS
from kvkit.typed import Array

PARTS = "sinks", "codes", "cells", "ends", "tail"  # the arrays of a side in files
TAIL_ROOM = 16  # spare rows of a new tail


class CodedSide:
    """Stores the keys or the values of a layer, [B, H, tokens, dim].

    Of `length` tokens the first `sink` stay unquantized, the next `coded` are codes, and the rest, the tail,
    stays unquantized: at least the last `residual` tokens, the window. Row 0 of the tail has position
    `start`. `cells` are the scales of codes, followed by minima if codes are asymmetric; `blocks` rows of
    cells are in use, each for a block of `block` tokens.

    An update that encodes tokens also leaves them in the tail: undoing it needs all tokens after the first
    `before` codes. The latest view reads the first `seen` codes, and later tokens in the tail.

    Removing tokens does not change the bytes of the others. A block that loses some of its tokens keeps its
    scales. A block that loses all is freed. Removing a sink lowers `sink`, because no later token becomes a
    sink. If no token follows the sinks, `sink` returns to its first value.
    """

    def __init__(
        self, name: str, spec: Any, shape: tuple[int, ...], dtype: np.dtype[Any], sink: int, residual: int
    ) -> None:
        batch, heads, _, dim = shape
        element, by_token = BY_DTYPE[dtype].name, spec.axis == "token"
        block = STORED[spec.format].block if spec.format else None
        self.scales: Array | None = None  # the constant scales of the spec, [1 or heads]
        if spec.scale is not None:
            self.scales = np.array(spec.scale, np.float32).reshape(-1)
            if len(self.scales) not in (1, heads):
                raise argument_error(name, f"a scale, or one for each of {heads} heads", len(self.scales))
        if not spec.format and dim * spec.bits % 8:
            raise argument_error(name, f"a head size whose {spec.bits}-bit codes fill bytes", dim)
        group = block.elements if block else spec.group
        if by_token and self.scales is None and dim % group:
            raise argument_error(name, f"a head size that groups of {group} divide", dim)
        group, self.rotation = group if by_token else 1, rotation_named(spec.rotation)
        if self.rotation:
            self.rotation.size(dim, name == "value")
        self.block = 1 if by_token else spec.group  # how many tokens share scales
        self.spec, self.dtype, self.sink, self.residual = spec, dtype, sink, residual
        self.is_value = name == "value"
        symmetric = spec.format is not None or spec.scheme == "sym"
        cell, group = (spec.param_dtype, group) if self.scales is None else ("float32", 0)
        self.format = cpu.copy.codes.Codes(
            element, spec.bits, symmetric, cell, group, self.block, spec.format or ""
        )
        cpu.copy.codes.encoder(self.format), self.widening(rounds=False)  # compile before anything changes
        self.length = self.coded = self.seen = self.blocks = self.before = 0
        self.counter = [0]  # number of changes, shared with copies of this side
        self.sinks = np.empty((batch, heads, sink, dim), dtype)
        self.tail, self.start = np.empty((batch, heads, 0, dim), dtype), 0  # position of its row 0
        width = STORED[spec.format].bytes(dim) if spec.format else dim * spec.bits // 8
        self.codes = np.empty((batch, heads, 0, width), np.uint8)
        cells = 0 if block or not group else dim // group * (1 if symmetric else 2)
        self.cells = np.empty((batch, heads, 0, cells), BY_NAME[spec.param_dtype].dtype)
        self.block_of = np.empty(0, np.int64)  # the block of each code: its row of `cells`

    @property
    def changes(self) -> int:
        """Return how often the rows that views read have changed. Views of an older count are invalid."""
        return self.counter[0]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, dim = self.sinks.shape
        return batch, heads, self.length, dim

    @property
    def end(self) -> int:
        """Return the first position of the tail."""
        return min(self.sink, self.length) + self.coded

    @property
    def nbytes(self) -> int:
        """Return the size of the stored tokens in bytes, with unquantized copies, without spare rows."""
        sinks, tail = min(self.sink, self.length), self.length - self.end + self.coded - self.before
        counts = (self.sinks, sinks), (self.tail, tail), (self.codes, self.coded), (self.cells, self.blocks)
        return sum(array[:, :, :1].nbytes * count for array, count in counts if array.shape[2])

    # Room

    def make_room(self, tokens: int) -> tuple[Array, int]:
        """Make room for more tokens; return (tail, its first row), which `append` takes.

        The arrays of codes grow now. A new tail replaces the old one in `append`.
        """
        self.grow(self.new_blocks(self.length + tokens))
        live, _, new_tail = self.tail_counts(tokens)
        first = self.tail_at(tokens)
        if first is not None and self.tail.shape[2] <= 4 * (new_tail - live):
            return self.tail, first
        batch, heads, _, dim = self.sinks.shape
        return np.empty((batch, heads, new_tail, dim), self.dtype), 0

    def tail_counts(self, tokens: int) -> tuple[int, int, int]:
        """Return the number of tokens in the tail now and after `tokens` more, and the rows of a new tail."""
        live = self.length - self.end
        need = live + max(0, self.length + tokens - max(self.length, self.sink))
        return live, need, need + live + self.residual + self.block + TAIL_ROOM

    def tail_at(self, tokens: int) -> int | None:
        """Return the row at which the tail's tokens will begin after `tokens` more; None without room.

        They only move to free rows, because committed rows of a file must not be overwritten.
        """
        live, need, _ = self.tail_counts(tokens)
        first = self.end - self.start if live else 0
        if first + need <= self.tail.shape[2]:
            return first
        return 0 if need <= first else None

    def fits(self, tokens: int) -> bool:
        """Return whether there is room for more tokens."""
        blocks = self.new_blocks(self.length + tokens)
        codes, cells = self.coded + blocks * self.block, self.blocks + blocks
        rooms = self.codes.shape[2], self.cells.shape[2]
        return self.tail_at(tokens) is not None and codes <= rooms[0] and cells <= rooms[1]

    def new_blocks(self, length: int) -> int:
        """Return how many more blocks are encoded when the context becomes `length` tokens long."""
        coded = min(self.coded, max(0, length - self.sink))
        return max(0, (length - self.residual - min(self.sink, length) - coded) // self.block)

    def grow(self, blocks: int) -> None:
        """Make room for `blocks` more blocks of codes."""
        tokens = self.coded + blocks * self.block
        if tokens > self.codes.shape[2]:
            more = grow_array(self.codes, self.coded, tokens)
            block_of = np.empty(more.shape[2], np.int64)
            block_of[: self.coded] = self.block_of[: self.coded]
            self.codes, self.block_of = more, block_of
        if self.blocks + blocks > self.cells.shape[2]:
            self.cells = grow_array(self.cells, self.blocks, self.blocks + blocks)

    # Changes, which cannot fail

    def append(self, states: Array, room: tuple[Array, Any]) -> None:
        """Append new tokens, in the `room` that `make_room` has returned."""
        states = self.rotated(states, STORED_ROWS)
        (tail, first), old, new = room, self.length, states.shape[2]
        live, sinks = old - self.end, max(0, min(new, self.sink - old))
        begin = self.end - self.start
        if live and (tail is not self.tail or first != begin):
            tail[:, :, first : first + live] = self.tail[:, :, begin : begin + live]
        self.sinks[:, :, old : old + sinks] = states[:, :, :sinks]
        tail[:, :, first + live : first + live + new - sinks] = states[:, :, sinks:]
        self.tail, self.length = tail, old + new
        self.start, self.seen, self.before = self.end - first, self.coded, self.coded
        self.counter[0] += 1

    def rotated(self, rows: Array, kind: str) -> Array:
        """Return rows [.., .., .., D] of a kind (QUERY, STORED, OUTPUT), rotated if the spec says so."""
        if self.rotation is None:
            return rows
        rotated: Array = cpu.copy.rotations.turned(rows, self.rotation, kind, self.is_value)
        return rotated

    def encode_old(self) -> None:
        """Encode the tokens that have left the window. The latest view still reads them in the tail."""
        blocks = self.new_blocks(self.length)
        if not blocks:
            return
        tokens, first = blocks * self.block, self.end - self.start
        batch, heads, _, dim = self.shape
        source = self.tail[:, :, first:]
        target = self.codes[:, :, self.coded :]
        at: list[int] = []
        places = address_of(source, 0), address_of(target, 0), self.cells_at(-self.blocks)
        for (address, sequence, head, row), rows in zip(places, (self.block, self.block, 1), strict=True):
            at += address, sequence, rows * row, head
        code, elements = cpu.copy.codes.encoder(self.format).address, batch * heads * tokens * dim
        cpu.launches.start(cpu.copy.codes.prepare_codes(code, batch, blocks, at, heads, dim, elements))
        self.block_of[self.coded : self.coded + tokens] = self.blocks + np.arange(tokens) // self.block
        self.coded, self.blocks = self.coded + tokens, self.blocks + blocks

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.coded = min(self.coded, max(0, length - self.sink))
        self.blocks = int(self.block_of[self.coded - 1]) + 1 if self.coded else 0
        self.end_change(length, min(length, self.sink))

    def end_change(self, length: int, sinks: int) -> None:
        """Count `length` tokens, the first `sinks` of them in the sinks; the next view reads all codes."""
        self.sink = sinks if length > sinks else self.sinks.shape[2]
        self.length, self.seen, self.before = length, self.coded, self.coded
        self.counter[0] += 1

    def rows_of(self, tokens: Array) -> tuple[dict[str, Array], Array]:
        """Return the rows of these tokens in each array by name, and the new block number of each code."""
        sinks = min(self.sink, self.length)
        codes = tokens[(tokens >= sinks) & (tokens < self.end)] - sinks
        blocks, block_of = np.unique(self.block_of[codes], return_inverse=True)
        tail = tokens[tokens >= self.end] - self.start
        return {"sinks": tokens[tokens < sinks], "codes": codes, "cells": blocks, "tail": tail}, block_of

    def keep_rows(self, tokens: Array, source: CodedSide) -> None:
        """Store only the tokens of `source`, which may be this side, with these numbers."""
        rows, block_of = source.rows_of(tokens)
        for name, numbers in rows.items():
            copy_rows(getattr(self, name), getattr(source, name), numbers, 0)
        self.block_of[: len(block_of)] = block_of
        self._count(len(tokens), rows)

    def count_kept(self, tokens: Array) -> None:
        """Set the counters as if only these tokens were stored; no array changes."""
        self._count(len(tokens), self.rows_of(tokens)[0])

    def _count(self, length: int, rows: dict[str, Array]) -> None:
        """Set the counters for `length` tokens with these rows of each array."""
        self.coded, self.blocks = len(rows["codes"]), len(rows["cells"])
        self.end_change(length, len(rows["sinks"]))
        self.start = self.end

    def undo_update(self, length: int) -> None:
        """Keep the first `length` tokens, and read again in the tail the tokens that were encoded last."""
        self.coded = self.before
        self.crop(length)

    def show_codes(self) -> None:
        """Make the next view read every code."""
        if self.seen != self.coded:
            self.seen = self.coded
            self.counter[0] += 1

    @property
    def is_large(self) -> bool:
        """Return whether a long update has left much more than a window in the tail."""
        return self.tail.shape[2] > 8 * (self.residual + self.block + TAIL_ROOM)

    def release_undo(self) -> None:
        """Free the unquantized copies of codes; the latest update can no longer be undone."""
        live, _, room = self.tail_counts(0)
        first, (batch, heads, _, dim) = self.end - self.start, self.shape
        if self.is_large:
            tail = np.empty((batch, heads, room, dim), self.dtype)
            tail[:, :, :live] = self.tail[:, :, first : first + live]
            self.tail, first = tail, 0
        self.start, self.before = self.end - first, self.coded
        self.show_codes()

    def select_rows(self, index: Array) -> CodedSide:
        """Return a copy of the side with these rows of the batch."""
        side, first = copy.copy(self), self.end - self.start
        live = self.length - self.end
        side.sinks = self.sinks[index]
        side.tail, side.start = self.tail[:, :, first : first + live][index], self.end
        side.codes = self.codes[:, :, : self.coded][index]
        side.cells = self.cells[:, :, : self.blocks][index]
        side.block_of = self.block_of[: self.coded].copy()
        side.seen = side.before = self.coded
        return side

    # Files

    def arrays(self) -> dict[str, Array]:
        """Return the stored arrays by the names of `PARTS`; `ends` of blocks only if blocks span tokens."""
        first, live = self.end - self.start, self.length - self.end
        arrays = {
            "sinks": self.sinks[:, :, : min(self.sink, self.length)],
            "codes": self.codes[:, :, : self.coded],
            "cells": self.cells[:, :, : self.blocks],
            "tail": self.tail[:, :, first : first + live],
        }
        if self.block > 1:
            arrays["ends"] = np.searchsorted(self.block_of[: self.coded], np.arange(self.blocks), "right")
        return arrays

    def fill(self, arrays: Mapping[str, Array], length: int) -> None:
        """Fill an empty side with `length` tokens from a file; raise KvkitError if the arrays do not fit."""
        *outer, _, dim = self.sinks.shape
        sinks, codes, cells, tail = (arrays[name] for name in ("sinks", "codes", "cells", "tail"))
        coded, blocks = codes.shape[2], cells.shape[2]
        ends = arrays["ends"] if self.block > 1 else np.arange(1, coded + 1)
        counts = np.diff(ends, prepend=0)
        legal = (
            sinks.shape == (*outer, sinks.shape[2], dim)
            and sinks.shape[2] <= min(self.sink, length)
            and (codes.dtype, *codes.shape) == (np.uint8, *outer, coded, self.codes.shape[3])
            and (cells.dtype, *cells.shape) == (self.cells.dtype, *outer, blocks, self.cells.shape[3])
            and tail.shape == (*outer, length - sinks.shape[2] - coded, dim)
            and {sinks.dtype, tail.dtype} == {self.dtype}
            and ends.shape == (blocks,)
            and counts.sum() == coded
            and (not blocks or (counts.min() > 0 and counts.max() <= self.block))
        )
        if not legal:
            shapes = {name: array.shape for name, array in arrays.items()}
            raise argument_error("arrays", f"sinks, codes and a tail of {length} tokens in all", shapes)
        self.sinks[:, :, : sinks.shape[2]] = sinks
        self.grow(blocks)
        self.codes[:, :, :coded], self.cells[:, :, :blocks] = codes, cells
        self.block_of[:coded] = np.repeat(np.arange(blocks), counts)
        self.tail = grow_array(tail, tail.shape[2], tail.shape[2])
        self.coded, self.blocks = coded, blocks
        self.end_change(length, sinks.shape[2])
        self.start = self.end

    # Reading

    def widening(self, rounds: bool) -> int:
        """Return the address of machine code that widens codes to float32, with `rounds` to the dtype."""
        return int(cpu.copy.codes.widen(self.format, rounds=rounds).address)

    def cells_at(self, position: int) -> tuple[int, int, int, int]:
        """Return (address of position 0, three strides) of the scales, in `cells` or constant ones."""
        if self.scales is None:
            return address_of(self.cells, position)
        return cpu.launches.address(self.scales), 0, self.scales.strides[0] * (len(self.scales) > 1), 0

    def segments(self, table: Array | None = None, begin: int = 0, rounds: bool = False) -> Array:
        """Fill a table, or a new one, with the segments of the latest view from row `begin` on; return it."""
        segmented = cpu.attention.segmented
        batch, heads, length, _ = self.shape
        table = segmented.new_table(heads, batch) if table is None else table
        sink, floats = min(self.sink, length), segmented.floats_code(self.format.element)
        blocks = cpu.launches.address(self.block_of) - 8 * sink if self.block > 1 else 0
        places = *address_of(self.codes, sink), *self.cells_at(0 if blocks else sink), blocks
        sinks, codes, tail = (
            segmented.Segment(sink, floats, *address_of(self.sinks, 0)),
            segmented.Segment(sink + self.seen, self.widening(rounds), *places),
            segmented.Segment(length, floats, *address_of(self.tail, self.start)),
        )
        if begin:
            sinks, codes, tail = (segment.from_row(begin) for segment in (sinks, codes, tail))
        segmented.set_segments(table, sinks=sinks, codes=codes, tail=tail)
        return table

    def read(self) -> Array:
        """Return all tokens of the latest view as an array; codes are decoded."""
        batch, heads, tokens, dim = self.shape
        wide, planes = np.empty(self.shape, np.float32), batch * heads
        segments = self.segments(rounds=True)
        table = cpu.launches.address(segments)
        at = (cpu.launches.address(wide), 4 * tokens * dim, 4 * dim, 0, table, 1, planes, 0, table, 0, 0, 0)
        code = cpu.attention.segmented.widen_code().address
        cpu.launches.start(cpu.copy.codes.prepare_codes(code, planes, tokens, at, 1, dim, wide.size))
        return self.rotated(wide, OUTPUT).astype(self.dtype, copy=False)

    def stored(self) -> Array:
        """Return all stored tokens as an array; codes are decoded."""
        side = copy.copy(self)
        side.seen = self.coded
        return side.read()


def address_of(array: Array, position: int) -> tuple[int, int, int, int]:
    """Return (address of position 0, three strides) of [B, H, rows, dim] whose row 0 is `position`."""
    sequence, head, row = array.strides[:3]
    return cpu.launches.address(array) - position * row, sequence, head, row


def grow_array(array: Array, used: int, least: int) -> Array:
    """Copy the first `used` rows to an array of at least `least` rows and twice the present size."""
    batch, heads, capacity, dim = array.shape
    more = np.empty((batch, heads, max(least + least // 4, 2 * capacity), dim), array.dtype)
    more[:, :, :used] = array[:, :, :used]
    return more
