"""Define `Layer`, the base class of the layers of a `Cache`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.base import BaseLayer, one_call_at_a_time
from kvkit.cache.layers import requests
from kvkit.cache.layers.attention import LayerAttention
from kvkit.cache.layers.changes import LostRows, whole
from kvkit.cache.layers.joining import Join, plan_join
from kvkit.cache.layers.positions import (
    Piece,
    Rearrangement,
    RopeLike,
    RowPositions,
    check_rotation,
    pieces_array,
    planner,
    rotation_of,
)
from kvkit.cache.stores.allocation import Allocate, in_memory
from kvkit.cache.stores.attributes import Attributes
from kvkit.cache.stores.memory import Geometry, Store, check_geometry
from kvkit.cache.stores.span import Span
from kvkit.checks.arguments import Scoring
from kvkit.checks.values import flag, integer
from kvkit.errors import DroppedTokensError, argument_error
from kvkit.runtime.locks import LayerLock
from kvkit.typed import Array, Attended, States

SIDES = "keys", "values"
PREVIOUS = "previous."  # begins the names of arrays in a file with tokens that have left the window


def window_slack(window: int) -> int:
    """Return how many spare rows a window slides through before it is copied to a new store."""
    return 16 + window // 4


class Layer(BaseLayer):
    """Implements the calls of a layer of a `Cache`. Subclasses decide which tokens stay, and how.

    Attributes
    ----------
    name : str
        The layer's name in error messages.
    span : Span
        Which tokens it has, and in which rows.
    store : Store
        The arrays of keys and values; None before the first update.
    allocate : function
        Makes the arrays of stores, in memory or in files.
    _row_positions : RowPositions
        The positions of its first rows; None while row r has position r and no key is shifted. The rows of
        a window have consecutive positions, so it is None there unless keys are shifted.
    rope : Rope or "none"
        How keys were rotated; None if that is unknown.
    """

    store: Any
    span: Any
    allocate: Allocate
    rope: RopeLike
    _attributes = Attributes(
        "store", "span", "_row_positions", "rope", "_record_past", "allocate", "overwritten"
    )
    _reorders_in_place = True  # whether `reorder` to a batch of the same size overwrites rows
    _why_not_joined = ""  # why rows of other layers cannot be added, see `append`
    _source: Layer | None = None  # the layer whose rows a `SharedLayer` reads
    _joined = 0  # see `Geometry.joined`; 0 but in layers of latent rows

    def __init__(self) -> None:
        self.name, self._lock, self._attention = type(self).__name__, LayerLock(), LayerAttention()
        self._row_positions, self.rope, self._record_past, self.allocate = None, None, False, in_memory
        self.overwritten = 0  # how many changes have overwritten rows of tokens
        self._set_store(None, Span())

    def _counters(self) -> tuple[Any, ...]:
        """Return the objects that count rows, by the names in their `attributes`."""
        return (self,) if self.store is None else (self, *self.store.counters())

    def _overwrites(self) -> None:
        """Say that rows of tokens will be overwritten now, so that an interrupt loses them."""
        self.overwritten += 1

    def _lose_rows(self) -> None:
        """Refuse every later call but `reset`, because an interrupted change has lost rows."""
        self.store = self.span = LostRows(self.name)

    def _set_store(self, store: Any, span: Span) -> None:
        self._attention.forget()
        self.store, self.span = store, span

    def __repr__(self) -> str:
        if isinstance(self.store, LostRows):
            return f"<{self.name}: lost rows>"
        geometry = "" if self.store is None else f", {self.store.geometry}"
        return f"<{self.name}: {self.span.length} tokens{geometry}>"

    def _connect(self, layers: Sequence[Layer], number: int) -> None:
        """Tell the layer that it is layer `number` of `layers`, for layers that read another one."""

    def _describe(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for a file."""
        return {}

    # Methods that subclasses override, as well as `_returned`

    def _stored_from(self, length: int) -> int:
        """Return the oldest position that is stored when `length` tokens have been seen."""
        return 0

    def _croppable_to(self, length: int) -> int:
        """Return the largest first stored position that still allows a crop to `length` tokens."""
        return 0

    def _may_start(self, start: int) -> bool:
        """Return whether new tokens may begin at `start` and replace the tokens from there on."""
        return False

    def _check_room(self, length: int, new: int) -> None:
        """Raise if the layer can never hold `new` tokens after `length`."""

    def _capacity(self, rows: int) -> int:
        """Return how many rows a new store for `rows` tokens gets, with room for the next tokens."""
        return max(rows + rows // 4, 2 * self.store.capacity if self.store else 0)

    def _new_store(self, geometry: Geometry, capacity: Any) -> Any:
        return Store(geometry, capacity, self.allocate)

    def _share_lock(self, lock: LayerLock) -> None:
        """Take the lock of a closed cache, which refuses calls of its layers too."""
        self._lock = lock

    # Adding tokens

    def update(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        with self._lock:
            return self._append(key_states, value_states, cache_position)

    def _append(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None
    ) -> tuple[States, States]:
        # New tokens are whole once `span` counts them. Only positions may say that they replace others.
        append = self._append_rows if cache_position is None else self._replace_rows
        return append(key_states, value_states, cache_position)

    def _append_rows(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None
    ) -> tuple[States, States]:
        geometry, new = self._geometry_of(key_states, value_states), key_states.shape[2]
        start = self.span.length
        if cache_position is not None:
            start = self._first_new(cache_position, new)
        self._check_room(start, new)
        begin, end = self._returned(start, new)
        self._make_room(geometry, max(end, start + new), self.span.oldest)
        if start < self.span.length:  # new tokens replace some
            key_states, value_states = (self._unshared(side) for side in (key_states, value_states))
            if self._row_positions is not None:
                self._row_positions = self._row_positions.first(start)
            self._shorten(self.span.cropped(start, 0))
        oldest, origin = self.span.oldest, self.span.origin
        self.store.write(start - origin, key_states, value_states)
        if not self._record_past:
            oldest = max(oldest, self._stored_from(start + new))
        span, rows = Span(start + new, oldest, begin, origin, before=start), self._row_positions
        if rows is not None and span.first >= rows.length:
            rows = None  # the last shifted key has left the window
        self.span, self._row_positions = span, rows
        self._commit()
        return self.store.rows(begin - origin, end - origin)

    _replace_rows = whole(_append_rows)

    def _geometry_of(self, key_states: Array, value_states: Array) -> Geometry:
        """Check keys and values; return their geometry."""
        frozen = None if self.store is None else self.store.geometry
        return check_geometry(key_states, value_states, frozen, self._joined)

    def _first_new(self, cache_position: ArrayLike, new: int) -> int:
        """Check the positions of new tokens; return the first one as the span counts it."""
        length = self.get_seq_length()
        start = requests.check_positions(cache_position, new, length, self._may_start)
        return start + self.span.length - length

    def _unshared(self, states: Array) -> Array:
        """Return new tokens, copied if they share memory with the store, which will change."""
        shared = any(np.may_share_memory(states, side) for side in self.store.sides)
        return states.copy() if shared else states

    def _make_room(self, geometry: Geometry, end: int, keep: int) -> None:
        """Make room for the tokens before `end`. A larger store gets only the tokens from `keep` on."""
        if self.store is None or end - self.span.origin > self.store.capacity:
            self._move(geometry, self._capacity(end - keep), keep)

    def _move(
        self,
        geometry: Geometry,
        capacity: Any,
        keep: int,
        indices: Iterable[int] | None = None,
        final: bool = False,
    ) -> None:
        """Move the tokens from `keep` on, of the rows `indices` of the batch, to a new store.

        After a `final` move the last update can no longer be undone.
        """
        store, span = self._new_store(geometry, capacity), self.span.without_undo() if final else self.span
        if self.store is not None:
            indices = range(geometry.batch) if indices is None else indices
            store.fill(self.store, indices, *span.rows_from(keep))
        self._set_store(store, span.moved(keep))
        self._commit()

    def _commit(self) -> None:
        """Let a quantized store encode old tokens."""
        if self.store is not None:
            self.store.commit(self)

    @one_call_at_a_time
    def reserve(self, query_length: SupportsIndex) -> None:
        """Make room for `query_length` more tokens, so that their update cannot fail for lack of it."""
        new, length = integer("query_length", query_length, 0), self.span.length
        self._check_room(length, new)
        if self.store is not None:
            end = max(length + new, self._returned(length, new)[1])
            self._make_room(self.store.geometry, end, self.span.first)

    @one_call_at_a_time
    @whole
    def _release_undo(self) -> None:
        """Free memory that only the last update needed: move to a smaller store if this one is too large."""
        if self.window is None or self.store is None or self._record_past:
            return
        room, length = self.window + window_slack(self.window), self.span.length
        if self.store.capacity > room + window_slack(self.window):
            keep = max(self.span.first, length - self.window)
            if length - keep <= room:
                self._move(self.store.geometry, room, keep)

    # Sizes and positions

    def get_seq_length(self) -> int:
        rows = self._row_positions
        return self.span.length if rows is None else rows.position_after(self.span.length)

    def get_mask_sizes(self, query_length: SupportsIndex) -> tuple[int, int]:
        if self._row_positions is None:
            return super().get_mask_sizes(query_length)
        begin, end = self._returned(self.span.length, integer("query_length", query_length, 0))
        return end - begin, begin + self.get_seq_length() - self.span.length

    @property
    def stored_tokens(self) -> int:
        return self.span.length - self.span.oldest

    @property
    def positions(self) -> Array:
        return self._positions_from(self.span.oldest).positions.copy()

    @property
    def rope_shifts(self) -> Array:
        return pieces_array(self._pieces(self.span.oldest))

    def _pieces(self, first: int) -> list[Piece]:
        """Return the pieces of the rows from number `first` on, by the rope shift of their keys."""
        length = self.span.length
        if self._row_positions is not None:
            return self._row_positions.pieces(first, length)
        return [Piece(0, length - first, 0)] if length > first else []

    def _positions_from(self, row: int) -> RowPositions:
        """Return the positions and rope shifts of all rows from number `row` on."""
        if self._row_positions is not None:
            return self._row_positions.between(row, self.span.length)
        return RowPositions.contiguous(row, self.span.length)

    @property
    def batch_size(self) -> int:
        return 0 if self.store is None else self.store.geometry.batch

    def _stored(self) -> tuple[States, States]:
        return self.store.rows(*self.span.rows_from(self.span.oldest))

    def attend(  # type: ignore[override]  # names the options of the base class
        self,
        query: Array,
        attn_mask: Array | None = None,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Array | None = None,
        return_lse: bool = False,
        return_key_weights: bool = False,
    ) -> Attended:
        with self._lock:
            if attn_mask is sinks is None and return_lse is return_key_weights is False:
                attended = self._attention.again(self, query, softmax_scale, softcap)
                if attended is not None:
                    return attended
            scoring = Scoring(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks)
            wants_weights = flag("return_key_weights", return_key_weights)
            return self._attend(query, attn_mask, scoring, return_lse, wants_weights)

    def _attend(
        self, query: Array, mask: Array | None, scoring: Scoring, return_lse: bool, wants_weights: bool
    ) -> Attended:
        """Attend with options that `attend` has packed; the lock is held."""
        return self._attention(self, query, mask, scoring, return_lse, wants_weights)

    # Joining

    @one_call_at_a_time
    def append(self, other: Layer, at: SupportsIndex | None = None, rope: RopeLike = None) -> None:
        """Add the tokens of another layer behind the present ones, or before one of them.

        The other layer's first position 0 becomes `at`. Its keys, and the present ones behind them, get rope
        shifts and stay as they are in memory, so nothing is lost, also of codes: these are copied as bytes.
        Rows of a `QuantizedLayer` that are sinks or recent tokens no more are encoded now. Each row attends
        to what it did; the model did not see both contexts together.

        Parameters
        ----------
        other : layer
            Of the same kind, arguments, sizes and dtype. It does not change.
        at : int, optional
            The position that the first new token gets; None: that of the next token. Tokens from there on
            move behind the new ones. Layers with a window take tokens at the end only.
        rope : Rope, "none" or None
            How keys were rotated, in both layers, as in `shift`.

        Raises
        ------
        KvkitError
            If an argument is wrong, or the layers cannot be joined: recurrent states, a window whose first
            tokens have left it, heads that keep different tokens, other formats or rotations. `can` says so
            beforehand.

        Examples
        --------
        >>> import numpy as np, kvkit
        >>> from kvkit.cache import DynamicLayer
        >>> first, second, states = DynamicLayer(), DynamicLayer(), np.ones((1, 1, 5, 4), np.float32)
        >>> for layer in (first, second):
        ...     keys, values = layer.update(states, states)
        >>> first.append(second, at=3, rope=kvkit.Rope(4))
        >>> first.get_seq_length(), first.rope_shifts.tolist()
        (10, [[0, 3, 0], [3, 8, 3], [8, 10, 5]])
        """
        self._join(self._plan_join(other, at, rope))

    def _plan_join(self, other: Any, at: SupportsIndex | None = None, rope: RopeLike = None) -> Join:
        """Check an `append`; return a plan for `_join`."""
        plan = plan_join(self, self._positions_from(self.span.first), other, at, rope)
        self._check_movable("append", plan.moved)
        return plan

    _check_append = _plan_join

    @one_call_at_a_time
    @whole
    def _join(self, plan: Join) -> None:
        """Carry out a plan that `_plan_join` returned; without new rows nothing changes."""
        if not plan.new:
            return
        after, length = plan.moved.after, self.span.length + plan.new
        self._join_rows(plan)
        span = self.span
        self.span = Span(
            length, max(span.oldest, self._stored_from(length)), span.oldest, span.origin, length
        )
        self._row_positions, self.rope = self._needed_positions(after), plan.moved.rope
        self._commit()

    def _join_rows(self, plan: Join) -> None:
        """Store the rows of another layer: behind the present ones, where no token is, or in a new store."""
        source, rotated, at = plan.source, plan.moved.rotated, 0
        own = np.arange(*self.span.rows_from(self.span.first))
        theirs = np.arange(*source.span.rows_from(source.span.oldest))
        if plan.row == len(own) and rotated is None:
            self._make_room(source.store.geometry, self.span.length + plan.new, self.span.oldest)
            at = self.span.length - self.span.origin
            self.store.end = max(self.store.end, at + len(theirs))
            self.store.copy_from(source.store, theirs, at, None, None)  # whole rows, with their index keys
            return
        parts = (self.store, own[: plan.row]), (source.store, theirs), (self.store, own[plan.row :])
        count, capacity = len(own) + len(theirs), 0 if self.store is None else self.store.capacity
        capacity = capacity if count <= capacity else self._capacity(count)
        store = self._new_store(source.store.geometry, capacity)
        for part, rows in parts:
            if len(rows):
                shifts = None if rotated is None else rotated[at : at + len(rows)]
                store.copy_from(part, rows, at, plan.moved.rope, shifts)
                at += len(rows)
        store.end = at
        self._set_store(store, Span(len(own), before=len(own)))

    # Removing tokens and changing the batch

    @one_call_at_a_time
    @whole
    def crop(self, length: int) -> None:
        """Drop the last tokens.

        Parameters
        ----------
        length : int
            Positive: tokens to keep; no effect if the layer has fewer. Negative: tokens to drop. 0: drop
            none. Past tokens that were recorded are dropped in every case.

        Raises
        ------
        KvkitError
            If there are fewer tokens than are to be dropped.
        DroppedTokensError
            If a sliding window would need tokens that are no longer stored: a KvkitError and a RuntimeError.
        """
        length = self._length_after_crop(length)
        if self._row_positions is not None:
            length, rows = self._row_positions.crop(length)
            self._row_positions = self._needed_positions(rows)
        self._shorten(self.span.cropped(length, self._stored_from(length)))

    def _length_after_crop(self, length: int, call: str = "crop") -> int:
        """Check a `crop`, or another `call` that drops the last tokens; return the position after it."""
        span = self.span
        left = requests.length_after_crop(length, self.get_seq_length())
        if span.oldest > self._croppable_to(left):
            wanted = f"a window of {self.window} that stores what {left} tokens need"
            remedy = "call activate_past_recording() before they are dropped"
            raise argument_error(self.name, f"{wanted} ({remedy})", f"{call} to {left}", DroppedTokensError)
        return left

    def _check_crop(self, length: int) -> None:
        """Raise the error that `crop` would raise."""
        self._length_after_crop(length)

    def _check_reorder(self, indices: ArrayLike) -> None:
        """Raise the error that `reorder` would raise."""
        requests.check_rows(indices, self.batch_size)

    def _check_repeat(self, repeats: int) -> None:
        """Raise the error that `repeat` would raise."""
        integer("repeats", repeats, 1)

    def _check_reserve(self, query_length: SupportsIndex) -> None:
        """Raise the error that `reserve` would raise."""
        self._check_room(self.span.length, integer("query_length", query_length, 0))

    def _check_reset(self) -> None:
        """Raise the error that `reset` would raise: none."""

    def _shorten(self, span: Span) -> None:
        """Drop the last tokens."""
        self.span = span
        if self.store is not None:
            self._commit()

    def _plan(self, call: str, *arguments: Any, rope: RopeLike = None, **options: Any) -> Rearrangement:
        span, now = self.span, self._positions_from(self.span.first)
        dim = None if self.store is None else self.store.geometry.key_dim
        rotation = rotation_of(rope, self.rope, dim, now.shifted)
        plan = planner(call)(now, rotation, *arguments, **options)
        plan = plan.without_gaps(older=span.oldest - span.first).in_few_pieces()
        if plan.crops:
            self._length_after_crop(plan.after.length - now.length, call)
        elif plan.changes(now):
            if self._record_past:
                raise argument_error(self.name, "no past that is recorded (crop first)", call)
            self._check_movable(call, plan)
        return plan

    def _check_movable(self, call: str, plan: Rearrangement) -> None:
        """Raise if the layer cannot give its rows the planned positions."""
        if self.window is not None:
            after = plan.after
            first = after.length - len(after.positions)
            if not after.are_consecutive(first) or first > self._croppable_to(after.length):
                wanted = f"no hole in its window of {self.window} (shift all of its tokens, or none)"
                raise argument_error(self.name, wanted, f"one after {call}")

    def _rearrange(self, plan: Rearrangement) -> None:
        """Carry out a plan."""
        now = self._positions_from(self.span.first)
        if plan.crops and plan.after.length < now.length:
            self.crop(plan.after.length - now.length)
        elif plan.changes(now):
            self._move_rows(plan)

    @one_call_at_a_time
    @whole
    def _move_rows(self, plan: Rearrangement) -> None:
        """Move rows and positions as planned."""
        begin, end = self.span.rows_from(self.span.first)
        rows = begin + np.flatnonzero(plan.kept)
        # The remaining rows of a window are contiguous and do not move; others move to the front.
        first = int(rows[0]) if self.window is not None and len(rows) else 0
        if self.store is not None:
            if plan.rotated is not None or (rows != np.arange(first, first + len(rows))).any():
                self._overwrites()
            self.store.keep_rows(rows, first, plan.rope, plan.rotated)
            self._free_rows(first + len(rows), end)
        self.span = self._span_of(plan, first)
        self._row_positions, self.rope = self._needed_positions(plan.after), plan.rope

    def _span_of(self, plan: Rearrangement, first: int) -> Span:
        """Return the span after a plan; its rows begin at row `first` of the store."""
        count, length = len(plan.after.positions), plan.after.length
        if self.window is None:  # without a window, positions of the span are row numbers
            return Span(count, before=count)
        begin, stored = length - count, int(plan.kept[self.span.oldest - self.span.first :].sum())
        # Rows of the last view count as stored again if the window reaches them now.
        oldest = max(begin, min(length - stored, self._stored_from(length)))
        return Span(length, oldest, begin, origin=begin - first, before=length)

    def _needed_positions(self, rows: RowPositions) -> RowPositions | None:
        """Return the positions of rows as `_row_positions` has them: None if they need not be stored."""
        if self.window is None:
            return None if rows.is_plain() else rows
        return replace(rows, base=rows.length - len(rows.positions)) if rows.shifts.any() else None

    def _trim(self) -> None:
        """Free the memory of removed tokens; most layers have none left."""

    def _free_rows(self, begin: int, end: int) -> None:
        """Release the rows after the last token; new tokens will overwrite them."""

    @one_call_at_a_time
    @whole
    def reorder(self, indices: ArrayLike) -> None:
        """Replace row b of the batch by the old row ``indices[b]``. The batch becomes ``len(indices)``."""
        self._take_rows(requests.check_rows(indices, self.batch_size))

    reorder_cache = batch_select_indices = reorder

    @one_call_at_a_time
    @whole
    def repeat(self, repeats: int) -> None:
        """Repeat every row of the batch: rows A, B become A, A, B, B."""
        self._take_rows(np.repeat(np.arange(self.batch_size), integer("repeats", repeats, 1)))

    batch_repeat_interleave = repeat

    def _take_rows(self, indices: Array) -> None:
        """Make the old row ``indices[b]`` of the batch row b."""
        if self.store is None:
            return
        first, geometry = self.span.first, self.store.geometry
        if len(indices) == geometry.batch:
            self._overwrites()
            self.store.take(indices, *self.span.rows_from(first))
        else:
            geometry = geometry._replace(batch=len(indices))
            self._move(geometry, self.store.capacity, first, indices, final=True)

    @one_call_at_a_time
    @whole
    def reset(self) -> None:
        """Remove all tokens. The next update decides dtype and shape again."""
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Drop all tokens and arrays."""
        self._record_past, self._row_positions = False, None
        self._set_store(None, Span())

    def _stop_past_recording(self) -> None:
        """End what `activate_past_recording` began: drop or encode the tokens that leave the window."""
        self._set_past_recording(False)

    @one_call_at_a_time
    @whole
    def _set_past_recording(self, recording: bool = True) -> None:
        """Keep tokens that would be dropped or encoded until the next `crop`, which can drop draft tokens.

        If not `recording`, end this.
        """
        self._record_past = recording
        self._commit()

    # Files

    def _arrays(self) -> dict[str, Array]:
        """Return the layer's arrays by their names in a saved file."""
        if self.store is None:
            return {}
        arrays = dict(zip(SIDES, self._stored(), strict=True))
        if before := self.span.oldest - self._saved_from():  # what only the last query attends to
            rows = self.store.rows(*self.span.rows_from(self._saved_from()))
            arrays |= {
                f"{PREVIOUS}{name}": side[:, :, :before] for name, side in zip(SIDES, rows, strict=True)
            }
        return arrays

    def _saved_from(self) -> int:
        """Return the first position that a file gets: those that the last query attends to, if stored."""
        oldest, first, window = self.span.oldest, self.span.first, self.window
        return oldest if window is None else min(oldest, max(first, self.span.length - window))

    def _load(self, arrays: dict[str, Array], length: int) -> None:
        """Fill an empty layer with what `arrays` and `moves` returned. `length` is the next position."""
        moves = {name: arrays.pop(name) for name in ("positions", "rope_shifts") if name in arrays}
        if arrays or (length and not moves):
            rows = moves.get("positions") if self.window is None else None
            self._fill(arrays, length if rows is None else len(rows))
        if len(moves) == 2:
            self._set_positions(moves["positions"], moves["rope_shifts"], length)

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        """Fill an empty layer with `length` tokens from a file; raise KvkitError if the arrays do not fit."""
        keys, values = (arrays[name] for name in SIDES)
        if f"{PREVIOUS}keys" in arrays:
            keys, values = (np.concatenate((arrays[PREVIOUS + name], arrays[name]), 2) for name in SIDES)
        self._check_room(0, length)
        stored = keys.shape[2]
        oldest = length - stored
        if not 0 <= oldest <= self._croppable_to(length):
            raise argument_error(self.name, f"all tokens of {length} that the next one attends to", stored)
        store = self._new_store(self._geometry_of(keys, values), self._capacity(stored))
        store.write(0, keys, values)
        first, oldest = oldest, length - arrays["keys"].shape[2]
        self._set_store(store, Span(length, oldest, begin=first, origin=first, before=length))

    @property
    def _was_moved(self) -> bool:
        """Return whether a saved file must list the positions of rows."""
        return self._row_positions is not None

    def _moves(self) -> dict[str, Array]:
        """Return positions and rope shifts by their names in a saved file; {} if no row was moved."""
        if not self._was_moved:
            return {}
        first = self._saved_from()
        shifts = pieces_array(self._pieces(first))
        return {"positions": self._positions_from(first).positions.copy(), "rope_shifts": shifts}

    def _set_positions(self, positions: ArrayLike, rope_shifts: ArrayLike, length: int) -> None:
        """Set the positions of stored rows from a file; raise KvkitError if they are illegal."""
        first, end = self.span.first, self.span.length
        after = RowPositions.restored(positions, rope_shifts, length, end - first)
        if after.shifts.any():
            check_rotation(self.rope)
        self._check_movable("load", Rearrangement(np.ones(end - first, bool), after, self.rope))
        self._row_positions = self._needed_positions(after)

    # Where the arrays lie

    @one_call_at_a_time
    @whole
    def _lie_in(self, allocate: Allocate) -> None:
        """Move the arrays to new ones from `allocate`, which will make later arrays too."""
        if allocate is not self.allocate:
            self.allocate = allocate
            self._copy_store()

    def _copy_store(self) -> None:
        """Copy the arrays to new ones."""
        if self.store is not None:
            self._move(self.store.geometry, self.store.capacity, self.span.first, final=True)

    def _large_arrays(self) -> Iterable[Array]:
        """Return the arrays of rows, which may lie in files."""
        return () if self.store is None else self.store.sides
