"""Define `Sequence`: its tokens, their ids and positions, and the blocks that store them."""

from __future__ import annotations

import itertools
from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.layers.changes import assign
from kvkit.cache.layers.positions import Piece, RowPositions, pieces_array
from kvkit.checks import index_tensors
from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe
from kvkit.typed import Array

ID_BYTES = 8  # of a token id, int64


class PageSegment(NamedTuple):
    """Describes a segment: tokens of one rope shift that fill pages from row 0 on."""

    begin: int  # the first token's index among those in the cache
    end: int
    page: int  # the index of its first page in the block table
    shift: int


class Moves(NamedTuple):
    """Says where the tokens of a sequence are after some were removed or moved; see `Sequence`."""

    rows: RowPositions  # of all tokens
    borders: list[int]
    intact: int
    ropes: list[Any] | None  # how the keys were rotated in each layer


class SavedSequence(NamedTuple):
    """Describes a sequence to restore in a new allocator."""

    length: int
    first_hash: bytes  # of no blocks, with which the hashes of its blocks begin
    table: Array  # blocks
    token_ids: ArrayLike
    moves: Moves | None  # None if token i has position i


class Sequence:
    """A sequence of tokens, and the blocks that store them. `BlockAllocator.add` and `fork` make it.

    Its tokens fill its blocks in order until some are removed or moved (`PagedCache.remove`). Then they lie
    in segments, each of which begins with a new page. Pages have 4 rows here, and 2, 3 and 4 of 9 tokens
    were removed. Other sequences share blocks 0, 1 and 2, so 5, 6 and 7 were copied to block 3::

        block        0        | 3        | 2            blocks [0, 3, 2]
        row          0 1 2 3  | 0 1 2 3  | 0 1 2 3
        position     0 1 - -  | 5 6 7 -  | 8 - - -      next_position 9, intact 2
        index        0 1      | 2 3 4    | 5            length 6, borders [2, 5]

    Attributes
    ----------
    length : int
        The number of its tokens in the cache.

    Examples
    --------
    >>> from kvkit.cache import BlockAllocator
    >>> sequence = BlockAllocator(num_blocks=4, page_size=2).add([7, 8, 9])
    >>> sequence.length, sequence.blocks, sequence.token_ids
    (0, [], array([7, 8, 9]))
    """

    __slots__ = (
        "_allocator", "_borders", "_chain", "_ids", "_intact", "_pending", "_ropes", "_row_positions",
        "_table", "length",
    )  # fmt: skip

    def __init__(self, allocator: Any, ids: bytearray, chain: list[bytes]) -> None:
        self._allocator = allocator  # None after `BlockAllocator.free`
        self.length = 0
        self._table = array("q")  # blocks
        self._ids = ids  # little-endian int64 of the first tokens; they may be more or fewer than `length`
        self._chain = chain  # hashes of the first 0, 1, 2... full blocks
        self._pending = 0  # tokens that the open step adds
        self._borders: list[int] = []  # the end of each segment but the last, which takes new tokens
        self._row_positions: RowPositions | None = None  # None while token i has position i and no shift
        # How many first tokens have no hole before them and were never moved: only they can be published.
        self._intact: int | None = None  # None: all
        self._ropes: list[Any] | None = None  # how keys were rotated in each layer, once tokens were moved

    @property
    def blocks(self) -> list[int]:
        """Return the sequence's blocks, in the order of its tokens."""
        return self._table.tolist()

    @property
    def _tail_length(self) -> int:
        """Return how many tokens the last segment has."""
        return self.length - self._borders[-1] if self._borders else self.length

    @property
    def next_position(self) -> int:
        """Return the position of the next token: `length` until tokens are removed or moved."""
        rows = self._row_positions
        return self.length if rows is None else rows.position_after(self.length)

    @property
    def positions(self) -> Array:
        """Return the position of every token in the cache: int64, ascending, shape [length]."""
        return self._all_positions().positions.copy()

    @property
    def rope_shifts(self) -> Array:
        """Return the rope shifts of its keys: int64 [pieces, 3] of (first token, end, shift).

        In memory a key of shift d is rotated for its position - d. `PagedStep.attend` takes that into
        account.
        """
        return pieces_array(self._pieces(self.length))

    def _pieces(self, tokens: int) -> list[Piece]:
        """Return the pieces of the first `tokens` tokens."""
        if self._row_positions is not None:
            return self._row_positions.pieces(0, tokens)
        return [Piece(0, tokens, 0)] if tokens else []

    def _all_positions(self) -> RowPositions:
        """Return the positions and rope shifts of all tokens in the cache."""
        if self._row_positions is not None:
            return self._row_positions.between(0, self.length)
        return RowPositions.contiguous(0, self.length)

    def _segment_lengths(self) -> list[int]:
        """Return how many tokens each segment but the last has."""
        return [end - begin for begin, end in itertools.pairwise([0, *self._borders])]

    def _segments(self, page_size: int, tokens: int) -> list[PageSegment]:
        """Return the segments of the first `tokens` tokens, which may include those of an open step."""
        segments, begin, page = [], 0, 0
        shifts = () if self._row_positions is None else self._row_positions.shifts
        for end in (*self._borders, tokens):
            if begin < min(end, tokens):
                shift = int(shifts[begin]) if begin < len(shifts) else 0  # new tokens have none
                segments.append(PageSegment(begin, min(end, tokens), page, shift))
            page, begin = page + -(-(end - begin) // page_size), end
        return segments

    def _rows(self, page_size: int) -> Array:
        """Return the cache row of every token: int64, shape [length]."""
        rows, table = [np.empty(0, np.int64)], np.array(self._table, np.int64)
        for begin, end, page, _ in self._segments(page_size, self.length):
            places = np.arange(end - begin)
            rows.append(table[page + places // page_size] * page_size + places % page_size)
        return np.concatenate(rows)

    @property
    def token_ids(self) -> Array:
        """Return the known ids of its tokens; those from index `length` on are not in the cache yet."""
        return np.frombuffer(bytes(self._ids), "<i8").astype(np.int64)

    @property
    def _id_count(self) -> int:
        """Return how many of its tokens have ids."""
        return len(self._ids) // ID_BYTES

    def _moves(self) -> Moves | None:
        """Return where its tokens are; None if token i has position i."""
        if self._intact is None:
            return None
        return Moves(self._all_positions(), self._borders[:], self._intact, self._ropes)

    def _set_moves(self, moves: Moves) -> None:
        """Set where its tokens are; raise KvkitError if that is illegal."""
        rows, borders, intact, self._ropes = moves
        # After shifted tokens there is a border at `length`, because new tokens are not shifted.
        inner = set(borders[:-1] if borders[-1:] == [self.length] else borders)
        shift_changes = {begin for begin, *_ in rows.pieces(0, self.length)[1:]}
        if borders != sorted(set(borders)) or not shift_changes <= inner <= set(range(1, self.length)):
            raise argument_error("segments", f"ends of segments among {self.length} tokens", borders)
        first = slice(integer("intact", intact, 0, self.length))
        if not np.array_equal(rows.positions[first], np.arange(intact)) or rows.shifts[first].any():
            raise argument_error("intact", "tokens before the first hole", intact)
        self._borders, self._intact = borders, intact
        self._row_positions = None if rows.is_plain() else rows

    def _become(self, **attributes: Any) -> None:
        """Set attributes in one step."""
        assign((self, name, value) for name, value in attributes.items())

    def _keep_ids(self, kept: Array, is_crop: bool) -> None:
        """Drop the ids of tokens that are not kept; with `is_crop` also the ids of tokens to come."""
        ids = np.frombuffer(bytes(self._ids), "<i8")
        own, later = ids[: self.length], ids[self.length :]
        self._ids = bytearray(own[kept[: len(own)]].tobytes() + (b"" if is_crop else later.tobytes()))

    def _page_ids(self, i: int, page_size: int) -> bytes:
        """Return the ids of its tokens i * page_size to (i + 1) * page_size, as bytes."""
        size = ID_BYTES * page_size
        return bytes(self._ids[i * size : (i + 1) * size])

    def _copy(self) -> Sequence:
        """Return a sequence of the same tokens in the same blocks."""
        other = Sequence(self._allocator, self._ids[:], self._chain[:])
        other.length, other._table, other._borders = self.length, self._table[:], self._borders[:]
        other._row_positions, other._intact, other._ropes = self._row_positions, self._intact, self._ropes
        return other

    def __repr__(self) -> str:
        return f"<Sequence of {self.length} tokens in blocks {self.blocks}>"


def encode_ids(token_ids: ArrayLike) -> bytearray:
    """Return token ids as bytes, the same on every machine."""
    return bytearray(index_tensors.index("token_ids", token_ids, 1).astype("<i8").tobytes())


def check_bytes(name: str, value: Any) -> bytes:
    """Return `value`; raise unless it is bytes."""
    if not isinstance(value, bytes):
        raise argument_error(name, "bytes", describe(value))
    return value
