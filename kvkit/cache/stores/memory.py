"""Store rows of keys and values in arrays. The layer knows which token has which row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvkit import cpu
from kvkit.cache.stores.allocation import Allocate, in_memory
from kvkit.checks import attention
from kvkit.checks.values import checked_format
from kvkit.errors import CACHE_AXES, argument_error, in_other_order
from kvkit.formats import FLOATS, Element
from kvkit.typed import Array, States

COPY_BYTES = 2**20  # that one step of `copy_rows` copies
BeginAt = Callable[[Array, int], None]  # (params, row): makes a prepared call read from that row on


class Geometry(NamedTuple):
    """Holds the sizes and the format of a layer, which its first update decides."""

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    fmt: Element
    # The elements of a latent row, stored once: its first `key_dim` are the key, its first `value_dim` the
    # value. 0 for keys and values that are stored apart.
    joined: int = 0

    def __str__(self) -> str:
        dims = " and ".join(dict.fromkeys((str(self.key_dim), str(self.value_dim))))
        return f"[{self.batch}, {self.heads}, q, {dims}] of {self.fmt}"

    def forms(self, capacity: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shapes and dtypes of the arrays of a store."""
        dims = (self.joined,) if self.joined else (self.key_dim, self.value_dim)
        return [((self.batch, self.heads, capacity, dim), self.fmt.dtype) for dim in dims]

    def fits(self, key_states: Any, value_states: Any) -> bool:
        """Return whether keys and values surely fit: a quick check that most calls pass."""
        if not type(key_states) is type(value_states) is np.ndarray:
            return False
        if not key_states.dtype == value_states.dtype == self.fmt.dtype:
            return False
        outer = self.batch, self.heads, *key_states.shape[2:3]
        shapes = key_states.shape, value_states.shape
        return shapes == ((*outer, self.key_dim), (*outer, self.value_dim))


def check_geometry(
    key_states: Array, value_states: Array, frozen: Geometry | None, joined: int = 0
) -> Geometry:
    """Check new keys and values; return their geometry, which must be `frozen` unless that is None."""
    if frozen is not None and frozen.fits(key_states, value_states):
        return frozen
    fmt = checked_format("key_states", key_states, FLOATS, 4, CACHE_AXES)
    if checked_format("value_states", value_states, FLOATS, 4, CACHE_AXES) is not fmt:
        raise argument_error("value_states", f"the dtype of key_states, {fmt}", value_states.dtype)
    batch, heads, new, dim = key_states.shape
    wanted = f"[batch, heads, tokens, dim] = {frozen}, as the cache has keys"
    if frozen and (hint := in_other_order(key_states.shape, (*frozen[:2], None, frozen.key_dim))):
        raise argument_error("key_states", wanted, f"{key_states.shape}{hint}")
    if value_states.shape[:3] != (batch, heads, new):
        hint = in_other_order(value_states.shape, (batch, heads, new, None))
        if hint and not frozen:
            hint = "; one of the two is in another order than [batch, heads, tokens, dim]"
        wanted = f"shape [batch, heads, tokens, dim] = [{batch}, {heads}, {new}, any]"
        raise argument_error("value_states", wanted, f"{value_states.shape}{hint}")
    geometry = Geometry(batch, heads, dim, value_states.shape[3], fmt, joined)
    if frozen is None:
        if min(geometry[:4]) < 1:
            raise argument_error("key_states", "at least one row, head and element", f"shapes {geometry}")
    elif geometry != frozen:
        raise argument_error("key_states", wanted, geometry)
    return geometry


class Store:
    """Stores keys and values in memory: two arrays [B, Hkv, capacity, D], or one for latent rows."""

    __slots__ = ("capacity", "end", "geometry", "keys", "sides", "values")
    rows_adjoin = True  # whether the rows of a head are contiguous

    def __init__(self, geometry: Geometry, capacity: int, allocate: Allocate = in_memory) -> None:
        self.geometry, self.capacity = geometry, capacity
        self.end = 0  # rows from here on are zeros; set before rows are written
        self.set_sides([allocate(shape, dtype) for shape, dtype in geometry.forms(capacity)])

    def set_sides(self, sides: Any) -> None:
        """Set the arrays of the store, and keys and values as views of them."""
        self.sides = sides
        self.keys, self.values = sides[0], sides[-1]
        if self.geometry.joined:
            self.keys, self.values = (sides[0][..., :dim] for dim in self.geometry[2:4])

    @staticmethod
    def of_arrays(geometry: Geometry, capacity: int, sides: Sequence[Array]) -> Store:
        """Return a store of arrays that exist."""
        store = Store.__new__(Store)
        store.geometry, store.capacity, store.end = geometry, capacity, capacity
        store.set_sides(sides)
        return store

    def __reduce__(self) -> tuple[Any, ...]:  # a copy lies in memory, and has views of its own arrays
        return Store.of_arrays, (self.geometry, self.capacity, self.sides)

    def write(self, row: int, key_states: Array, value_states: Array) -> None:
        """Write new tokens to the rows from `row` on."""
        end = row + key_states.shape[2]
        self.end = max(self.end, end)
        self.keys[:, :, row:end] = key_states
        if not self.geometry.joined:
            self.values[:, :, row:end] = value_states

    def rows(self, begin: int, end: int) -> tuple[States, States]:
        """Return views of the keys and values in some rows."""
        return self.keys[:, :, begin:end], self.values[:, :, begin:end]

    def context(self, query_format: str, begin: int, end: int) -> tuple[Any, BeginAt]:
        """Return (the `Context` of some rows for queries of a format, a `BeginAt` function)."""
        key, value = (side.swapaxes(1, 2) for side in self.rows(begin, end))  # [B, rows, Hkv, D]
        rows = attention.context_of(self.geometry.fmt, key, value, (key.strides[:2], value.strides[:2]))
        return rows._replace(data_dtype=query_format, as_loaded=False), self.begin_at

    def query(self, query: Array) -> Array:
        """Return queries rotated as the stored keys are: here not at all."""
        return query

    output = query  # the stored values are not rotated, so outputs are not rotated back

    def begin_at(self, params: Array, row: int) -> None:
        """Make a prepared call of attention read from a row on."""
        for name, array in (("keys.address", self.keys), ("values.address", self.values)):
            params[cpu.attention.prepare.FIELD[name]] = cpu.launches.address(array) + row * array.strides[2]

    def counters(self) -> tuple[Any, ...]:
        """Return the objects that count rows: none, because the layer does."""
        return ()

    def clear(self, begin: int, end: int) -> None:
        """Write zeros to rows."""
        for side in self.sides:
            side[:, :, begin:end] = 0

    def keep_rows(self, rows: Array, first: int, rope: Any, rotated: Array | None) -> None:
        """Move rows to `first` and the rows after it; rotate their keys by `rotated` positions.

        Little memory is allocated, because rows are lost if this fails.
        """
        self.copy_from(self, rows, first, rope, rotated)

    def copy_from(self, store: Store, rows: Array, first: int, rope: Any, rotated: Array | None) -> None:
        """Copy rows of a store to `first` and the rows after it; rotate their keys by `rotated` positions."""
        for side, source in zip(self.sides, store.sides, strict=True):
            is_key = side is self.sides[0]
            copy_rows(side, source, rows, first, rope, rotated if is_key else None)

    def take(self, indices: Array, begin: int, end: int) -> None:
        """Replace row b of the batch by the old row ``indices[b]``, for some rows of tokens."""
        changed = [b for b, index in enumerate(indices) if index != b]
        for side in self.sides if changed else ():  # in steps, because memory must not end here
            step = max(1, COPY_BYTES // max(1, len(changed) * side[0, :, :1].nbytes))
            for first in range(begin, end, step):
                rows = side[:, :, first : min(first + step, end)]
                rows[changed] = rows[indices[changed]]

    def fill(self, store: Any, indices: Iterable[int], begin: int, end: int) -> None:
        """Copy rows [begin, end) of another store to the first rows; `indices` are the rows of its batch."""
        self.end = end - begin
        for side, source in zip(self.sides, store.sides, strict=True):
            for b, index in enumerate(indices):
                side[b, :, : end - begin] = source[index, :, begin:end]

    def commit(self, layer: Any) -> None:
        """Encode what must be, after a change; floats stay as they are."""


def copy_rows(
    target: Array, source: Array, rows: Array, first: int, rope: Any = None, rotated: Array | None = None
) -> None:
    """Copy ascending rows of [B, H, rows, D] to `first` and the rows after it, in steps.

    Keys are rotated by `rotated` positions unless it is None. Target and source may be one array if no row
    moves to a later row.
    """
    if rotated is None and target is source:  # skip the first rows if they stay where they are
        stay = int(np.argmin(np.append(rows == np.arange(first, first + len(rows)), False)))
        rows, first = rows[stay:], first + stay
    step = max(1, COPY_BYTES // max(1, source[:, :, :1].nbytes))
    for begin in range(0, len(rows), step):
        copied = source[:, :, rows[begin : begin + step]]
        end = begin + copied.shape[2]
        if rotated is not None:
            copied = rope.shift(copied.astype(np.float32), rotated[begin:end])
        target[:, :, first + begin : first + end] = copied
