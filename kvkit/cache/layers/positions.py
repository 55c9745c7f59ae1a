"""Plan the calls that remove and move tokens; hold the positions of rows that are no longer 0, 1, 2, ...

A key of rope shift d is rotated in memory for its position - d. No plan rotates a key to move it: attention
rotates queries by -d instead. A plan holds a new state, so that all layers can be checked before one changes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks import index_tensors
from kvkit.checks.values import flag, integer
from kvkit.errors import argument_error, describe
from kvkit.rope import NO_ROTATION, Rope
from kvkit.typed import Array

MAX_PIECES = 8  # the most pieces of a layer, which attention reads one by one
FAR = 2**40  # the largest position and shift
KNOWN_ROTATION = "how keys were rotated, a kvkit.Rope or 'none'"

RopeLike = Rope | str | None  # how keys are rotated: a Rope, "none", or None if unknown


class Piece(NamedTuple):
    """Describes neighbouring rows of one rope shift."""

    begin: int  # the first row
    end: int
    shift: int


@dataclass(frozen=True, eq=False)
class RowPositions:
    """Holds positions and rope shifts of a layer's first rows, whose numbers begin at `base`.

    Rows after these have the positions from `length` on, and no shift. After `remove(2, 5)` and
    `shift(6, None, 1)` of 8 tokens, two more are appended::

        row         0  1  2  3  4 | 5  6        base 0
        position    0  1  5  7  8 | 9 10        length 9
        shift       0  0  0  1  1 | 0  0        pieces (0, 3, 0), (3, 5, 1), (5, 7, 0)
    """

    positions: Array  # int64, ascending
    shifts: Array  # int64
    length: int  # the position after these rows
    base: int = 0  # more than 0 in a window, which no longer stores earlier rows

    @classmethod
    def contiguous(cls, begin: int, end: int) -> Self:
        """Return the state of rows [begin, end) that were never moved."""
        return cls(np.arange(begin, end), np.zeros(end - begin, np.int64), end, begin)

    @classmethod
    def restored(cls, positions: ArrayLike, pieces: ArrayLike, length: int, rows: int) -> Self:
        """Check the positions and pieces of `rows` rows from a file; return the state."""
        positions = index_tensors.index("positions", positions, 1, rows)
        pieces = index_tensors.index("rope_shifts", pieces, 2)
        ends = np.array([0, *pieces[:, 1]]) if pieces.shape[1] == 3 else np.array([-1])
        if ends[-1] != rows or (np.diff(ends) < 1).any() or (pieces[:, 0] != ends[:-1]).any():
            raise argument_error("rope_shifts", f"pieces of {rows} rows", pieces.tolist())
        if rows and (positions[0] < 0 or (np.diff(positions) < 0).any() or positions[-1] >= length):
            raise argument_error("positions", f"ascending positions below {length}", describe(positions))
        return cls(positions, np.repeat(pieces[:, 2], np.diff(ends)), length)

    def _describe(self) -> dict[str, Any]:
        """Describe the rows for JSON: runs of consecutive positions, and rope shifts."""
        borders = [0, *(np.flatnonzero(np.diff(self.positions) != 1) + 1), len(self.positions)]
        pairs = itertools.pairwise(borders if len(self.positions) else [])
        runs = [(int(self.positions[begin]), int(end - begin)) for begin, end in pairs]
        return {"positions": runs, "rope_shifts": self._pieces}

    @classmethod
    def read(cls, description: Mapping[str, Any], count: int, length: int, base: int) -> Self:
        """Check what `describe` has written; return the state of its first `count` rows."""
        runs = [np.arange(first, first + many) for first, many in description["positions"]]
        positions = np.concatenate([np.arange(0), *runs])
        pieces = np.array(description["rope_shifts"] or np.zeros((0, 3), np.int64)).reshape(-1, 3)
        whole = cls.restored(positions, pieces, FAR, len(positions))
        if not 0 <= count <= len(positions) or (count and positions[count - 1] >= length):
            raise ValueError(f"{count} rows before position {length} of {len(positions)}")
        return cls(whole.positions[:count], whole.shifts[:count], length, base)

    def are_consecutive(self, first: int) -> bool:
        """Return whether the rows and the next token have consecutive positions from `first` on."""
        return np.array_equal(self.positions, np.arange(first, self.length))

    def is_plain(self) -> bool:
        """Return whether row r has position r, and no key is shifted."""
        return self.are_consecutive(0) and not self.shifts.any()

    def position_after(self, rows: int) -> int:
        """Return the position of the token after row number `rows` - 1."""
        return self.length + rows - self.base - len(self.positions)

    def between(self, begin: int, end: int) -> Self:
        """Return the state of the rows [begin, end), which may include rows after these."""
        later, first = self.contiguous(self.length, self.position_after(end)), begin - self.base
        positions = np.concatenate((self.positions, later.positions))[first:]
        return type(self)(positions, np.concatenate((self.shifts, later.shifts))[first:], later.length, begin)

    def first(self, rows: int) -> Self:
        """Return the state of the rows with numbers below `rows`; new tokens replace the other rows."""
        count = rows - self.base
        if count >= len(self.positions):
            return self
        length = int(self.positions[count])
        return replace(self, positions=self.positions[:count], shifts=self.shifts[:count], length=length)

    def crop(self, length: int) -> tuple[int, Self]:
        """Return (number of rows, their state) for the tokens before position `length`."""
        if length > self.length:
            return self.base + len(self.positions) + length - self.length, self
        count = int(np.searchsorted(self.positions, length))
        left = replace(self, positions=self.positions[:count], shifts=self.shifts[:count], length=length)
        return self.base + count, left

    @functools.cached_property
    def shifted(self) -> bool:
        """Return whether a key has a rope shift."""
        return bool(self.shifts.any())

    @functools.cached_property
    def _pieces(self) -> list[Piece]:
        """Return the pieces of these rows."""
        inner = (np.flatnonzero(np.diff(self.shifts)) + 1).tolist()
        borders = [0, *inner, len(self.shifts)] if len(self.shifts) else []
        return [Piece(begin, end, int(self.shifts[begin])) for begin, end in itertools.pairwise(borders)]

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the pieces of the rows [begin, end), counted from `begin`."""
        passed = begin - self.base
        pieces = [Piece(max(0, a - passed), b - passed, shift) for a, b, shift in self._pieces if b > passed]
        described = len(self.positions) - passed
        if end - begin > described:  # the later rows have no shift
            joins = bool(pieces) and not pieces[-1].shift
            first = pieces.pop().begin if joins else max(0, described)
            pieces.append(Piece(first, end - begin, 0))
        return pieces


def pieces_array(pieces: list[Piece]) -> Array:
    """Return pieces as int64 [pieces, 3]."""
    return np.array(pieces, np.int64).reshape(-1, 3)


class Rearrangement(NamedTuple):
    """Plans a change of a layer's rows, which is checked and not yet done."""

    kept: Array  # bool for each row: whether it stays
    after: RowPositions  # of the rows that stay
    rope: RopeLike  # how the keys are rotated
    rotated: Array | None = None  # by how many positions each remaining key is rotated in memory
    crops: bool = False  # whether only the last tokens are dropped
    frees: bool = False  # whether the memory of removed tokens is freed

    def in_few_pieces(self) -> Rearrangement:
        """Return the plan, or if it leaves more than `MAX_PIECES` pieces, one that rotates keys in memory."""
        after, count = self.after, len(self.after.positions)
        pieces = after.pieces(after.base, after.base + count + 1)  # the next token has a piece, too
        if len(pieces) <= MAX_PIECES:
            return self
        return flatten(after, self.rope)._replace(kept=self.kept)

    def without_gaps(self, older: int) -> Rearrangement:
        """Return a plan that also removes those of the first `older` rows that are before a gap in positions.

        These rows are only in the view of a window's last update, whose positions must be consecutive.
        """
        count, after = int(self.kept[:older].sum()), self.after
        gaps = np.flatnonzero(np.diff(np.append(after.positions, after.length)[: count + 1]) != 1)
        if not len(gaps):
            return self
        first, kept = int(gaps[-1]) + 1, self.kept.copy()
        rotated = None if self.rotated is None else self.rotated[first:]
        kept[np.flatnonzero(kept)[:first]] = False
        after = replace(after, positions=after.positions[first:], shifts=after.shifts[first:])
        return self._replace(kept=kept, after=after, rotated=rotated)

    def changes(self, now: RowPositions) -> bool:
        """Return whether the plan changes anything."""
        after = self.after
        same = bool(self.kept.all()) and np.array_equal(after.positions, now.positions)
        return not (same and np.array_equal(after.shifts, now.shifts) and after.length == now.length)


def remove(
    now: RowPositions,
    rope: RopeLike,
    begin: SupportsIndex,
    end: SupportsIndex | None = None,
    *,
    close: bool = False,
) -> Rearrangement:
    """Plan to remove the tokens with positions in [begin, end); with `close`, shift later tokens back."""
    begin = integer("begin", begin, 0)
    end = now.length if end is None else integer("end", end, begin)
    close = flag("close", close)
    kept = (now.positions < begin) | (now.positions >= end)
    length = min(begin, now.length) if end >= now.length else now.length
    after = RowPositions(now.positions[kept], now.shifts[kept], length)
    if not close or end >= now.length or begin == end:
        return Rearrangement(kept, after, rope, crops=end >= now.length)
    return shift(after, rope, end, None, begin - end)._replace(kept=kept)


def retain(
    now: RowPositions,
    rope: RopeLike,
    positions: ArrayLike,
    *,
    renumber: bool = False,
    rows: Array | None = None,
) -> Rearrangement:
    """Plan to keep only the tokens with these positions; the next token's position does not change.

    Positions that a window has dropped are ignored. With `renumber` the tokens and the next token get the
    positions 0, 1, 2, ... Of tokens that share a position, `rows` says which ones stay.
    """
    if rows is not None:
        return keep_rows(now, rope, np.isin(np.arange(len(now.positions)), rows), renumber)
    wanted = index_tensors.index("positions", positions, 1)
    if (np.diff(wanted) <= 0).any():
        raise argument_error("positions", "ascending positions, each once", describe(positions))
    missing = np.setdiff1d(wanted[wanted >= now.base], now.positions)
    if len(missing):
        raise argument_error("positions", "positions that are stored", int(missing[0]))
    return keep_rows(now, rope, np.isin(now.positions, wanted), renumber)


def keep_rows(now: RowPositions, rope: RopeLike, kept: Array, renumber: bool) -> Rearrangement:
    """Plan to keep some rows; with `renumber` they and the next token get the positions 0, 1, 2, ..."""
    after = RowPositions(now.positions[kept], now.shifts[kept], now.length)
    if not renumber:
        return Rearrangement(kept, after, rope)
    ranks = np.arange(len(after.positions))
    return plan_move(after, rope, np.ones(len(ranks), bool), ranks, len(ranks))._replace(kept=kept)


def shift(
    now: RowPositions, rope: RopeLike, begin: SupportsIndex, end: SupportsIndex | None, delta: SupportsIndex
) -> Rearrangement:
    """Plan to add `delta` to the positions in [begin, end); tokens that get below 0 are removed."""
    begin = integer("begin", begin, 0)
    end = FAR if end is None else integer("end", end, begin)
    delta = integer("delta", delta, -FAR, FAR)
    moves = (now.positions >= begin) & (now.positions < end)
    length = now.length + delta if begin <= now.length <= end and delta else now.length
    return plan_move(now, rope, moves, now.positions + delta * moves, length)


def divide(
    now: RowPositions, rope: RopeLike, begin: SupportsIndex, end: SupportsIndex | None, d: SupportsIndex
) -> Rearrangement:
    """Plan to divide the positions in [begin, end) by `d`, rounding down; tokens may then share positions."""
    begin = integer("begin", begin, 0)
    end = FAR if end is None else integer("end", end, begin)
    d = integer("d", d, 2)
    moves = (now.positions >= begin) & (now.positions < end)
    length = -(-now.length // d) if begin <= now.length <= end else now.length
    positions = np.where(moves, now.positions // d, now.positions)
    return plan_move(now, rope, moves, positions, length, may_share=True)


def flatten(now: RowPositions, rope: RopeLike) -> Rearrangement:
    """Plan to rotate shifted keys in memory."""
    after = RowPositions(now.positions, np.zeros_like(now.shifts), now.length)
    return Rearrangement(np.ones(len(now.positions), bool), after, rope, now.shifts)


PLANS: dict[str, Callable[..., Rearrangement]] = {
    "remove": remove, "retain": retain, "shift": shift, "divide": divide, "flatten": flatten,
}  # fmt: skip


# Verbs that move no tokens: an object has a method `_check_VERB` for each that it has.
OTHER_VERBS = "append", "crop", "reorder", "repeat", "reserve", "reset", "compress"
OTHER_NAMES = dict.fromkeys(("reorder_cache", "batch_select_indices"), "reorder")
OTHER_NAMES |= {"batch_repeat_interleave": "repeat"}


def plan_move(
    now: RowPositions, rope: RopeLike, moves: Array, positions: Array, length: int, may_share: bool = False
) -> Rearrangement:
    """Check the `positions` after a move of some rows; return the plan. Tokens below 0 are removed."""
    changes = moves & (positions != now.positions)
    if changes.any():
        check_rotation(rope)
    kept = positions >= 0
    positions, moves = positions[kept], moves[kept]
    gaps, least = np.diff(positions), 0 if may_share else 1
    wrong = np.flatnonzero((moves[1:] != moves[:-1]) & (gaps < least))  # at the ends of the moved range
    if len(wrong):
        at = int(wrong[0])
        wanted = "positions that stay ascending" + ("" if may_share else ", each once")
        raise argument_error("positions", wanted, f"{positions[at]} before {positions[at + 1]}")
    length = max(length, 0)
    if len(positions) and positions[-1] >= length:
        wanted = f"positions below {length}, the next token's"
        raise argument_error("positions", wanted, int(positions[-1]))
    shifts = now.shifts[kept] + (0 if rope == NO_ROTATION else positions - now.positions[kept])
    return Rearrangement(kept, RowPositions(positions, shifts, length), rope)


def check_rotation(rope: Any) -> None:
    """Raise if it is unknown how keys were rotated."""
    if not isinstance(rope, Rope) and rope != NO_ROTATION:
        raise argument_error("rope", KNOWN_ROTATION, describe(rope))


def describe_rotation(rope: RopeLike) -> Any:
    """Describe how keys were rotated, for a file."""
    return rope.describe() if isinstance(rope, Rope) else rope


def restored_rotation(description: Any) -> RopeLike:
    """Return a rotation from its description in a file."""
    rope: RopeLike = Rope(**description) if isinstance(description, dict) else description
    if rope is not None:
        check_rotation(rope)
    return rope


def rotation_of(rope: Any, known: RopeLike, dim: int | None, shifted: bool) -> RopeLike:
    """Return how a layer's keys were rotated: the argument `rope` of a call, or if it is None, as `known`.

    Keys have `dim` elements; None if there is no key. If some are `shifted`, both must shift keys alike.
    """
    if rope is None:
        rope = known
    elif shifted and not moves_alike(rope, known):
        raise argument_error("rope", f"the rotation of earlier shifts, {known}", rope)
    if rope is not None:
        check_rotation(rope)
    if isinstance(rope, Rope) and dim is not None and rope.end > dim:
        raise argument_error("rope", f"at most {dim} rotated elements, the size of a key", rope.end)
    return rope


def check_codes(name: str, call: str, plan: Rearrangement) -> None:
    """Raise if a plan would rotate coded keys in memory."""
    if plan.rotated is not None and plan.rotated.any():
        wanted = f"at most {MAX_PIECES} pieces of rope shifts, because codes are not rotated"
        raise argument_error(name, wanted, f"{call}, which would rotate keys")


def moves_alike(first: Any, second: Any) -> bool:
    """Return whether two rotations shift keys alike."""
    if not isinstance(first, Rope) or not isinstance(second, Rope):
        return type(first) is type(second) and first == second
    return first.interleaved == second.interleaved and np.array_equal(first.frequencies, second.frequencies)


def planner(call: str) -> Callable[..., Rearrangement]:
    """Return the function that plans a call."""
    if call not in PLANS:
        raise argument_error("call", f"one of {', '.join(PLANS)}", repr(call))
    return PLANS[call]


def check_call(cache: Any, plan: Callable[..., Any], call: str, *arguments: Any, **options: Any) -> None:
    """Raise the error that a call would raise; nothing changes. `plan` checks calls that move tokens."""
    verb = OTHER_NAMES.get(call, call)
    check = getattr(cache, f"_check_{verb}", None)
    if check is not None:
        check(*arguments, **options)
        return
    if verb not in PLANS:
        known = [*PLANS, *(name for name in OTHER_VERBS if hasattr(cache, f"_check_{name}"))]
        raise argument_error("call", f"one of {', '.join(known)}", repr(call))
    bound = inspect.signature(getattr(cache, call)).bind(*arguments, **options)
    bound.apply_defaults()
    by_name = {name for name, each in bound.signature.parameters.items() if each.kind is each.KEYWORD_ONLY}
    by_name |= {"rope"}  # as methods call `_plan`
    named = {name: value for name, value in bound.arguments.items() if name in by_name}
    plan(call, *(value for name, value in bound.arguments.items() if name not in by_name), **named)
