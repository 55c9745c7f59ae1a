"""Define the layers that keep every token: `DynamicLayer` and `StaticLayer`."""

from __future__ import annotations

from typing import Any

from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers.changes import LostRows
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.positions import Rearrangement
from kvkit.cache.stores.memory import Geometry
from kvkit.cache.stores.span import Span
from kvkit.checks.values import integer
from kvkit.errors import CapacityError, argument_error

MOST_TOKENS = 2**40  # no memory holds more


class DynamicLayer(Layer):
    """A layer that grows and keeps every token. An append copies only the new tokens.

    A full store is doubled, so n appends copy O(n) tokens in all.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import DynamicLayer
    >>> layer, token = DynamicLayer(), np.ones((1, 1, 1, 2), np.float32)
    >>> for i in range(3):
    ...     keys, values = layer.update(i * token, token)
    >>> keys[0, 0, :, 0], layer.get_seq_length(), layer.get_mask_sizes(1)
    (array([0., 1., 2.], dtype=float32), 3, (4, 0))
    """

    @one_call_at_a_time
    def _trim(self) -> None:
        """Move to a store with room for a sixteenth more tokens, if the present one has more room."""
        if self.store is not None:
            room = self.stored_tokens + max(self.stored_tokens // 16, 16)
            if room < self.store.capacity:
                self._move(self.store.geometry, room, self.span.first, final=True)


class StaticLayer(Layer):
    """A layer of fixed size. An update returns all of its rows; unused rows are zeros.

    `attend` reads the filled part only.

    Parameters
    ----------
    max_cache_len : int
        The most tokens it can hold.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import StaticLayer
    >>> layer, token = StaticLayer(4), np.ones((1, 1, 1, 2), np.float32)
    >>> keys, values = layer.update(token, token)
    >>> keys[0, 0, :, 0], layer.keys.shape, layer.get_mask_sizes(1)
    (array([1., 0., 0., 0.], dtype=float32), (1, 1, 1, 2), (4, 0))
    """

    def __init__(self, max_cache_len: int) -> None:
        self.max_cache_len = integer("max_cache_len", max_cache_len, 1)
        if self.max_cache_len > MOST_TOKENS:
            raise argument_error("max_cache_len", f"at most {MOST_TOKENS} tokens", max_cache_len)
        super().__init__()

    def _describe(self) -> dict[str, Any]:
        return {"max_cache_len": self.max_cache_len}

    def _returned(self, length: int, new: int) -> tuple[int, int]:
        return 0, self.max_cache_len

    def _may_start(self, start: int) -> bool:
        return 0 <= start < self.span.length

    def _check_room(self, length: int, new: int) -> None:
        if length + new > self.max_cache_len:
            wanted = f"room for {new} new tokens after {length} (max_cache_len {self.max_cache_len})"
            raise argument_error(self.name, wanted, self.max_cache_len - length, CapacityError)

    def _capacity(self, rows: int) -> int:
        return self.max_cache_len

    def get_max_length(self) -> int:
        return self.max_cache_len

    def _check_movable(self, call: str, plan: Rearrangement) -> None:
        if self.window is not None:
            super()._check_movable(call, plan)
        elif not plan.after.are_consecutive(0):
            wanted = "positions 0, 1, 2, ..., as close=True leaves them"
            raise argument_error(self.name, wanted, f"a hole after {call}")

    def _make_room(self, geometry: Geometry, end: int, keep: int) -> None:
        super()._make_room(geometry, end, keep)
        _, used = self.span.rows_from(0)
        if self.store.end > used:  # of an update that an interrupt has ended
            self.store.clear(used, self.store.end)
            self.store.end = used

    def _free_rows(self, begin: int, end: int) -> None:
        if begin < end:
            self._overwrites()
            self.store.clear(begin, end)
            self.store.end = begin

    def _shorten(self, span: Span) -> None:
        """Drop the last tokens, and write zeros to their rows."""
        first, end = span.length - span.origin, self.span.length - span.origin
        super()._shorten(span)
        if self.store is not None:
            self._free_rows(first, end)

    @one_call_at_a_time
    def reset(self) -> None:
        """Remove all tokens. The memory stays, filled with zeros; so do dtype and shape."""
        if isinstance(self.store, LostRows):
            self._forget_rows()
        _, rows = self.span.rows_from(0)
        self.span, self._row_positions = Span(), None
        if self.store is not None:
            self._commit()
            self._free_rows(0, rows)
