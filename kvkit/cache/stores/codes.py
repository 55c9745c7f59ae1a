"""Store the keys or the values of a quantized layer: sinks, then codes, then an unquantized tail."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvkit import cpu
from kvkit.cache.stores.allocation import Allocate, copy_of, in_memory
from kvkit.cache.stores.attributes import Attributes
from kvkit.cache.stores.memory import copy_rows
from kvkit.errors import argument_error
from kvkit.formats import rotation_named
from kvkit.formats.elements import BY_DTYPE, BY_NAME, STORED
from kvkit.formats.rotations import OUTPUT
from kvkit.formats.rotations import STORED_ROWS as STORED_ROWS
from kvkit.typed import Array

# The arrays of a side in files. `ends`: how many codes there are up to the end of each block.
PARTS = "sinks", "codes", "cells", "ends", "tail"
TAIL_ROOM = 16  # spare rows of a new tail


class CodedSide:
    """Stores the keys or the values of a layer, [B, H, tokens, dim].

    After 13 tokens, with sink=2, residual=3 and block_size=4::

        position       0 1 | 2 3 4 5   6 7 8 9 | 10 11 12     length 13
        stored in    sinks | codes (coded=8)   | tail         codes_end 10
        block_of             0 0 0 0   1 1 1 1                block_count 2: rows of `cells` in use
        row of tail          0 1 2 3   4 5 6 7    8  9 10     tail_origin 2: the position of row 0

    At least the last `residual` tokens have no code. A block is `block_size` tokens that share a row of
    `cells`: scales, followed by minima if codes are asymmetric.

    Here the last update has encoded 6 to 9 (coded_before=4). Their unquantized copies stay in the tail, so
    that it can be undone. A full tail drops rows that are encoded for good. Attention reads `codes_read`
    codes (4 or 8), and all later tokens in the tail.

    Removing tokens does not change the bytes of the others. A block that loses some of its tokens keeps its
    scales. A block that loses all is freed. Removing a sink lowers `sink`, because no later token becomes a
    sink. If no token follows the sinks, `sink` returns to its first value.
    """

    _attributes = Attributes(
        *("sink", "length", "coded", "codes_read", "coded_before", "block_count", "tail_origin"),
        *("sinks", "tail", "codes", "cells", "block_of", "allocate"),
    )

    def __init__(
        self, name: str, spec: Any, shape: tuple[int, ...], dtype: np.dtype[Any], sink: int, residual: int,
        allocate: Allocate = in_memory,
    ) -> None:  # fmt: skip
        batch, heads, _, dim = shape
        element, by_token = BY_DTYPE[dtype].name, spec.axis == "token"
        block = STORED[spec.format].block if spec.format else None  # ggml's blocks contain their scales
        self.scales: Array | None = None  # the constant scales of the spec, [1 or heads]
        if spec.scale is not None:
            self.scales = np.array(spec.scale, np.float32).reshape(-1)
            if len(self.scales) not in (1, heads):
                raise argument_error(name, f"a scale, or one for each of {heads} heads", len(self.scales))
        if not spec.format and dim * spec.bits % 8:
            raise argument_error(name, f"a head size whose {spec.bits}-bit codes fill bytes", dim)
        # A scale is of `group` elements of one token, or of one element of `block_size` tokens.
        group = (block.elements if block else spec.group) if by_token else 1
        self.block_size = 1 if by_token else int(spec.group)
        if self.scales is None and dim % group:
            raise argument_error(name, f"a head size that groups of {group} divide", dim)
        self.rotation, self.is_value = rotation_named(spec.rotation), name == "value"
        if self.rotation:
            self.rotation.size(dim, self.is_value)  # raises for a head size that it cannot rotate
        self.spec, self.dtype, self.sink, self.residual = spec, dtype, sink, residual
        self.allocate = allocate
        symmetric = spec.format is not None or spec.scheme == "sym"
        cell = spec.param_dtype
        if self.scales is not None:
            cell, group = "float32", 0  # for `Codes`, group 0 is constant scales
        codes = cpu.copy.codes
        self.format = codes.Codes(
            element, spec.bits, symmetric, cell, group, self.block_size, spec.format or ""
        )
        codes.encoder(self.format)  # compile before anything changes
        self.widening(rounds=False)
        self.length = self.coded = self.codes_read = self.block_count = self.coded_before = 0  # see the class
        self.counter = [0]  # number of changes, shared with copies of this side
        self.sinks = np.empty((batch, heads, sink, dim), dtype)
        self.tail, self.tail_origin = np.empty((batch, heads, 0, dim), dtype), 0
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
    def codes_end(self) -> int:
        """Return the position after the last code, where the tail begins."""
        return min(self.sink, self.length) + self.coded

    @property
    def tail_length(self) -> int:
        """Return how many tokens have no code and are no sinks."""
        return self.length - self.codes_end

    def tail_tokens(self) -> Array:
        """Return a view of the rows of the tail that have no code, [B, H, tail_length, dim]."""
        first = self.codes_end - self.tail_origin
        return self.tail[:, :, first : first + self.tail_length]

    @property
    def nbytes(self) -> int:
        """Return the size of the stored tokens in bytes, with unquantized copies, without spare rows."""
        sinks, tail = min(self.sink, self.length), self.tail_length + self.coded - self.coded_before
        arrays = self.sinks[:, :, :sinks], self.tail[:, :, :tail], self.codes[:, :, : self.coded]
        return sum(array.nbytes for array in (*arrays, self.cells[:, :, : self.block_count]))

    # Room

    def make_room(self, tokens: int) -> tuple[Array, int]:
        """Make room for more tokens; return (tail, its first row), which `append` takes.

        The arrays of codes grow now. A new tail replaces the old one in `append`.
        """
        self.grow(self.new_blocks(self.length + tokens))
        first, rows = self.tail_at(tokens), self.new_tail_rows(tokens)
        if first is not None and self.tail.shape[2] <= 4 * (rows - self.tail_length):
            return self.tail, first
        batch, heads, _, dim = self.sinks.shape
        return self.allocate((batch, heads, rows, dim), self.dtype), 0

    def _tail_length_after(self, tokens: int) -> int:
        """Return the length of the tail after `tokens` more, before any is encoded."""
        return self.tail_length + max(0, self.length + tokens - max(self.length, self.sink))

    def new_tail_rows(self, tokens: int) -> int:
        """Return the rows of a new tail: for `tokens` more, and room so that few steps need another."""
        room = self.tail_length + self.residual + self.block_size + TAIL_ROOM
        return self._tail_length_after(tokens) + room

    def tail_at(self, tokens: int) -> int | None:
        """Return the row at which the tail's tokens will begin after `tokens` more; None without room.

        They stay where they are, or move to row 0 if that overwrites none that attention reads now.
        """
        need = self._tail_length_after(tokens)
        first = self.codes_end - self.tail_origin if self.tail_length else 0
        if first + need <= self.tail.shape[2]:
            return first
        read = min(self.sink, self.length) + self.codes_read - self.tail_origin
        return 0 if need <= min(first, read) else None

    def fits(self, tokens: int) -> bool:
        """Return whether there is room for more tokens."""
        blocks = self.new_blocks(self.length + tokens)
        codes, cells = self.coded + blocks * self.block_size, self.block_count + blocks
        fits = codes <= self.codes.shape[2] and cells <= self.cells.shape[2]
        return fits and self.tail_at(tokens) is not None

    def new_blocks(self, length: int) -> int:
        """Return how many more blocks are encoded when the context becomes `length` tokens long."""
        coded = min(self.coded, max(0, length - self.sink))
        return max(0, (length - self.residual - min(self.sink, length) - coded) // self.block_size)

    def grow(self, blocks: int) -> None:
        """Make room for `blocks` more blocks of codes."""
        tokens = self.coded + blocks * self.block_size
        if tokens > self.codes.shape[2]:
            more = grow_array(self.codes, self.coded, tokens, self.allocate)
            block_of = np.empty(more.shape[2], np.int64)
            block_of[: self.coded] = self.block_of[: self.coded]
            self.codes, self.block_of = more, block_of
        if self.block_count + blocks > self.cells.shape[2]:
            self.cells = grow_array(self.cells, self.block_count, self.block_count + blocks, self.allocate)

    # Changes, which cannot fail

    def append(self, states: Array, room: tuple[Array, Any]) -> None:
        """Append new tokens, in the `room` that `make_room` has returned."""
        states = self.rotated(states, STORED_ROWS)
        (tail, first), old, new = room, self.length, states.shape[2]
        sinks, end = max(0, min(new, self.sink - old)), first + self.tail_length  # new sinks; end of old tail
        if self.tail_length and (tail is not self.tail or first != self.codes_end - self.tail_origin):
            tail[:, :, first:end] = self.tail_tokens()
        self.sinks[:, :, old : old + sinks] = states[:, :, :sinks]
        tail[:, :, end : end + new - sinks] = states[:, :, sinks:]
        self.tail, self.length = tail, old + new
        self.tail_origin, self.codes_read, self.coded_before = self.codes_end - first, self.coded, self.coded
        self.counter[0] += 1

    def rotated(self, rows: Array, kind: str) -> Array:
        """Return rows [.., .., .., D] of a kind (QUERY, STORED, OUTPUT), rotated if the spec says so."""
        if self.rotation is None:
            return rows
        rotated: Array = cpu.copy.rotations.rotated_rows(rows, self.rotation, kind, self.is_value)
        return rotated

    def encode_old(self) -> None:
        """Encode the tokens that have left the window. The latest view still reads them in the tail."""
        blocks = self.new_blocks(self.length)
        if blocks:
            self._encode(self.tail_tokens(), blocks)

    def _encode(self, states: Array, blocks: int) -> None:
        """Encode the first tokens of [B, H, tokens, dim], whole blocks, to behind the codes in use."""
        tokens, (batch, heads, _, dim) = blocks * self.block_size, self.shape
        source, target = place_of(states, 0), place_of(self.codes[:, :, self.coded :], 0)
        cells = self.cells_place(-self.block_count)  # of the first cells that are not in use
        at: list[int] = []  # a `COPY_SIDE`, whose "tokens" are whole blocks
        for place, rows in (source, self.block_size), (target, self.block_size), (cells, 1):
            at += place.address, place.sequence, rows * place.row, place.head
        code, elements = cpu.copy.codes.encoder(self.format).address, batch * heads * tokens * dim
        cpu.launches.start(cpu.copy.codes.prepare_codes(code, batch, blocks, at, heads, dim, elements))
        end = self.coded + tokens
        self.block_of[self.coded : end] = self.block_count + np.arange(tokens) // self.block_size
        self.coded, self.block_count = end, self.block_count + blocks

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.coded = min(self.coded, max(0, length - self.sink))
        self.block_count = int(self.block_of[self.coded - 1]) + 1 if self.coded else 0
        self.set_length(length, min(length, self.sink))

    def set_length(self, length: int, sinks: int) -> None:
        """Count `length` tokens, the first `sinks` of them in the sinks; the next view reads all codes."""
        self.sink = sinks if length > sinks else self.sinks.shape[2]
        self.length, self.codes_read, self.coded_before = length, self.coded, self.coded
        self.counter[0] += 1

    def rows_of(self, tokens: Array) -> tuple[dict[str, Array], Array]:
        """Return ({array: the rows of these tokens in it}, the number of the new block of each code)."""
        sinks = min(self.sink, self.length)
        codes = tokens[(tokens >= sinks) & (tokens < self.codes_end)] - sinks
        blocks, block_of = np.unique(self.block_of[codes], return_inverse=True)
        tail = tokens[tokens >= self.codes_end] - self.tail_origin
        return {"sinks": tokens[tokens < sinks], "codes": codes, "cells": blocks, "tail": tail}, block_of

    def keep_rows(self, tokens: Array, source: CodedSide) -> None:
        """Store only these tokens (indices) of `source`, which may be this side."""
        rows, block_of = source.rows_of(tokens)
        for name, numbers in rows.items():
            copy_rows(getattr(self, name), getattr(source, name), numbers, 0)
        self.block_of[: len(block_of)] = block_of
        self._count(len(tokens), rows)

    def _count(self, length: int, rows: dict[str, Array]) -> None:
        """Set the counters for `length` tokens with these rows of each array."""
        self.coded, self.block_count = len(rows["codes"]), len(rows["cells"])
        self.set_length(length, len(rows["sinks"]))
        self.tail_origin = self.codes_end

    def joined(self, other: CodedSide, row: int) -> CodedSide:
        """Return a side with the tokens of another one before row `row`. Codes are copied as bytes.

        The first sinks and the last uncoded tokens stay uncoded. Uncoded tokens between codes are encoded
        now, in blocks of their own, of which the last may have fewer tokens.
        """
        runs = [*self.runs(0, row), *other.runs(0, other.length), *self.runs(row, self.length)]
        side, (batch, heads, _, dim) = copy.copy(self), self.shape
        side.sinks, side.coded, side.block_count, side.block_of = self.sinks.copy(), 0, 0, self.block_of[:0]
        side.codes, side.cells, sinks = self.codes[:, :, :0], self.cells[:, :, :0], 0
        if runs and runs[0].name == "sinks":
            first = runs.pop(0).rows()
            sinks = first.shape[2]
            side.sinks[:, :, :sinks] = first
        last = max((i for i, run in enumerate(runs) if run.name == "codes"), default=-1)
        uncoded: list[Array] = []
        for run in runs[: last + 1]:
            if run.name == "codes":
                side.add_uncoded(uncoded)
                side.add_codes(run)
                uncoded = []
            else:
                uncoded.append(run.rows())
        tail = [run.rows() for run in runs[last + 1 :]]
        count = sum(rows.shape[2] for rows in tail)
        room = count + self.residual + self.block_size + TAIL_ROOM
        side.tail = self.allocate((batch, heads, room, dim), self.dtype)
        if tail:
            np.concatenate(tail, 2, out=side.tail[:, :, :count])
        side.set_length(sinks + side.coded + count, sinks)
        side.tail_origin = side.codes_end
        side.grow(side.new_blocks(side.length))  # for tokens of the tail that will be encoded
        return side

    def runs(self, begin: int, end: int) -> list[Run]:
        """Return where the tokens [begin, end) lie, in order."""
        sinks = min(self.sink, self.length)
        parts = ("sinks", 0, sinks, 0), ("codes", sinks, self.codes_end, sinks)
        runs = [
            Run(self, name, max(begin, first) - origin, min(end, last) - origin)
            for name, first, last, origin in (*parts, ("tail", self.codes_end, self.length, self.tail_origin))
        ]
        return [run for run in runs if run.begin < run.end]

    def add_codes(self, run: Run) -> None:
        """Copy codes of another side, with their scales, behind those in use."""
        source, count, end = run.side, run.end - run.begin, self.coded + run.end - run.begin
        blocks, block_of = np.unique(source.block_of[run.begin : run.end], return_inverse=True)
        self.grow(len(blocks))
        copy_rows(self.codes, source.codes, np.arange(run.begin, run.end), end - count)
        copy_rows(self.cells, source.cells, blocks, self.block_count)
        self.block_of[self.coded : end] = self.block_count + block_of
        self.coded, self.block_count = end, self.block_count + len(blocks)

    def add_uncoded(self, parts: list[Array]) -> None:
        """Encode arrays of tokens behind the codes in use; the last token fills their last block."""
        if parts:
            states = np.concatenate(parts, 2)
            count = states.shape[2]
            blocks = -(-count // self.block_size)
            filling = np.repeat(states[:, :, -1:], blocks * self.block_size - count, axis=2)
            self.grow(blocks)
            end = self.coded + count
            self._encode(np.concatenate((states, filling), 2), blocks)
            self.coded = end

    def show_codes(self) -> None:
        """Make the next view read every code."""
        if self.codes_read != self.coded:
            self.codes_read = self.coded
            self.counter[0] += 1

    @property
    def is_large(self) -> bool:
        """Return whether a long update has left much more than a window in the tail."""
        return self.tail.shape[2] > 8 * (self.residual + self.block_size + TAIL_ROOM)

    def release_undo(self) -> None:
        """Free the unquantized copies of codes; the latest update can no longer be undone."""
        if self.is_large:
            batch, heads, _, dim = self.shape
            tail = self.allocate((batch, heads, self.new_tail_rows(0), dim), self.dtype)
            tail[:, :, : self.tail_length] = self.tail_tokens()
            self.tail, self.tail_origin = tail, self.codes_end
        self.coded_before = self.coded
        self.show_codes()

    def copied(self, allocate: Allocate) -> CodedSide:
        """Return a copy of the side in arrays from `allocate`. The few sinks stay in memory."""
        side = copy.copy(self)
        side.allocate, side.sinks, side.block_of = allocate, self.sinks.copy(), self.block_of.copy()
        side.tail, side.codes, side.cells = (
            copy_of(array, allocate) for array in (self.tail, self.codes, self.cells)
        )
        return side

    def select_rows(self, index: Array) -> CodedSide:
        """Return a copy of the side with these rows of the batch."""
        side = copy.copy(self)
        side.sinks, side.tail_origin = self.sinks[index], self.codes_end
        side.tail = self._taken(self.tail_tokens(), index)
        side.codes = self._taken(self.codes[:, :, : self.coded], index)
        side.cells = self._taken(self.cells[:, :, : self.block_count], index)
        side.block_of = self.block_of[: self.coded].copy()
        side.codes_read = side.coded_before = self.coded
        return side

    def _taken(self, rows: Array, index: Array) -> Array:
        """Return a new array with these rows of the batch."""
        taken = self.allocate((len(index), *rows.shape[1:]), rows.dtype)
        np.take(rows, index, 0, out=taken, mode="clip")  # unlike "raise", without a buffer
        return taken

    # Files

    def arrays(self) -> dict[str, Array]:
        """Return the stored arrays by the names of `PARTS`; `ends` of blocks only if blocks span tokens."""
        parts = {
            "sinks": self.sinks[:, :, : min(self.sink, self.length)],
            "codes": self.codes[:, :, : self.coded],
            "cells": self.cells[:, :, : self.block_count],
            "tail": self.tail_tokens(),
        }
        if self.block_size > 1:
            parts["ends"] = np.searchsorted(self.block_of[: self.coded], np.arange(self.block_count), "right")
        return parts

    def fill(self, arrays: Mapping[str, Array], length: int) -> None:
        """Fill an empty side with `length` tokens from a file; raise KvkitError if the arrays do not fit."""
        *outer, _, dim = self.sinks.shape
        sinks, codes, cells, tail = (arrays[name] for name in ("sinks", "codes", "cells", "tail"))
        coded, blocks = codes.shape[2], cells.shape[2]
        ends = arrays["ends"] if self.block_size > 1 else np.arange(1, coded + 1)
        block_lengths = np.diff(ends, prepend=0)
        legal = (
            sinks.shape == (*outer, sinks.shape[2], dim)
            and sinks.shape[2] <= min(self.sink, length)
            and (codes.dtype, *codes.shape) == (np.uint8, *outer, coded, self.codes.shape[3])
            and (cells.dtype, *cells.shape) == (self.cells.dtype, *outer, blocks, self.cells.shape[3])
            and tail.shape == (*outer, length - sinks.shape[2] - coded, dim)
            and {sinks.dtype, tail.dtype} == {self.dtype}
            and ends.shape == (blocks,)
            and block_lengths.sum() == coded
            and (not blocks or (block_lengths.min() > 0 and block_lengths.max() <= self.block_size))
        )
        if not legal:
            shapes = {name: array.shape for name, array in arrays.items()}
            raise argument_error("arrays", f"sinks, codes and a tail of {length} tokens in all", shapes)
        self.sinks[:, :, : sinks.shape[2]] = sinks
        self.grow(blocks)
        self.codes[:, :, :coded], self.cells[:, :, :blocks] = codes, cells
        self.block_of[:coded] = np.repeat(np.arange(blocks), block_lengths)
        self.tail = grow_array(tail, tail.shape[2], tail.shape[2], self.allocate)
        self.coded, self.block_count = coded, blocks
        self.set_length(length, sinks.shape[2])
        self.tail_origin = self.codes_end

    # Reading

    def widening(self, rounds: bool) -> int:
        """Return the address of machine code that widens codes to float32, with `rounds` to the dtype."""
        return int(cpu.copy.codes.widen(self.format, rounds=rounds).address)

    def cells_place(self, position: int) -> CodesPlace:
        """Return where scales lie, in `cells` or constant ones, if row 0 of `cells` is `position`."""
        if self.scales is None:
            return place_of(self.cells, position)
        head = self.scales.strides[0] if len(self.scales) > 1 else 0  # one scale for all heads: no stride
        return CodesPlace(cpu.launches.address(self.scales), sequence=0, head=head, row=0)

    def segments(self, table: Array | None = None, begin: int = 0, rounds: bool = False) -> Array:
        """Fill a table, or a new one, with the segments of the latest view from row `begin` on; return it."""
        segmented = cpu.attention.segmented
        batch, heads, length, _ = self.shape
        table = segmented.new_table(heads, batch) if table is None else table
        sink, floats = min(self.sink, length), segmented.floats_code(self.format.element)
        blocks, cells = 0, self.cells_place(sink)  # scales by position, or by the block of each position
        if self.block_size > 1:
            blocks, cells = cpu.launches.address(self.block_of) - 8 * sink, self.cells_place(0)
        sinks, codes, tail = (
            segmented.Segment(sink, floats, *place_of(self.sinks, 0)),
            segmented.Segment(
                sink + self.codes_read, self.widening(rounds), *place_of(self.codes, sink), *cells, blocks
            ),
            segmented.Segment(length, floats, *place_of(self.tail, self.tail_origin)),
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
        # A row id is plane + planes * position, and the kernel takes the table's address plus a row id.
        at = (cpu.launches.address(wide), 4 * tokens * dim, 4 * dim, 0, table, 1, planes, 0, table, 0, 0, 0)
        code = cpu.attention.segmented.widen_segments.code.address
        cpu.launches.start(cpu.copy.codes.prepare_codes(code, planes, tokens, at, 1, dim, wide.size))
        return self.rotated(wide, OUTPUT).astype(self.dtype, copy=False)

    def stored(self) -> Array:
        """Return all stored tokens as an array; codes are decoded."""
        side = copy.copy(self)
        side.codes_read = self.coded
        return side.read()


class Run(NamedTuple):
    """Says in which array of a side some neighbouring tokens lie."""

    side: CodedSide
    name: str  # "sinks", "codes" or "tail"
    begin: int  # the first row of the array
    end: int

    def rows(self) -> Array:
        """Return the rows, a view."""
        array: Array = getattr(self.side, self.name)
        return array[:, :, self.begin : self.end]


class CodesPlace(NamedTuple):
    """Says where the rows of an array [B, H, rows, dim] lie."""

    address: int  # of position 0, which may be outside the array
    sequence: int  # strides in bytes
    head: int
    row: int


def place_of(array: Array, position: int) -> CodesPlace:
    """Return where the rows of an array lie if its row 0 has this position."""
    sequence, head, row = array.strides[:3]
    return CodesPlace(cpu.launches.address(array) - position * row, sequence, head, row)


def grow_array(array: Array, used: int, least: int, allocate: Allocate) -> Array:
    """Copy the first `used` rows to an array of at least `least` rows and twice the present size."""
    batch, heads, capacity, dim = array.shape
    more = allocate((batch, heads, max(least + least // 4, 2 * capacity), dim), array.dtype)
    more[:, :, :used] = array[:, :, :used]
    return more
