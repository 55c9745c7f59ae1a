"""Where the keys and values of a layer lie: rows in two arrays. Which token has which row, layers know."""

from typing import Any, NamedTuple

import numpy as np

from kvkit import cpu
from kvkit.checks import attention, tensors
from kvkit.errors import argument_error
from kvkit.formats import FLOATS, Element
from kvkit.runtime import result_pool


class Geometry(NamedTuple):
    """What the first update decides about a layer."""

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    fmt: Element

    def __str__(self):
        sizes = f"[{self.batch}, {self.heads}, q, {self.key_dim} and {self.value_dim}]"
        return f"{sizes} of {self.fmt}"

    def fits(self, key_states, value_states):
        """Whether these are plainly such keys and values, as in nearly every call."""
        if not type(key_states) is type(value_states) is np.ndarray:
            return False
        if not key_states.dtype == value_states.dtype == self.fmt.dtype:
            return False
        batch, heads, key_dim, value_dim, _ = self
        new = key_states.shape[2:3]
        return key_states.shape == (batch, heads, *new, key_dim) and value_states.shape == (
            batch,
            heads,
            *new,
            value_dim,
        )


def geometry(key_states, value_states, frozen):
    """The geometry of new keys and values, which is the `frozen` one unless that is None."""
    if frozen is not None and frozen.fits(key_states, value_states):
        return frozen
    fmt = tensors.checked_format("key_states", key_states, FLOATS, 4)
    if tensors.checked_format("value_states", value_states, FLOATS, 4) is not fmt:
        raise argument_error("value_states", f"the dtype of key_states, {fmt}", value_states.dtype)
    batch, heads, new, dim = key_states.shape
    if value_states.shape[:3] != (batch, heads, new):
        raise argument_error("value_states", f"shape ({batch}, {heads}, {new}, any)", value_states.shape)
    given = Geometry(batch, heads, dim, value_states.shape[3], fmt)
    if frozen is None:
        if min(given[:4]) < 1:
            raise argument_error("key_states", "at least one row, head and element", f"shapes {given}")
    elif given != frozen:
        raise argument_error("key_states", f"keys and values as at the first update, {frozen}", given)
    return given


class Store:
    """Keys and values in memory: two arrays [B, Hkv, capacity, D], zeros until they are written."""

    __slots__ = ("capacity", "geometry", "keys", "values")
    in_place = True  # rows that a layer relies on may be written
    file: Any = None  # where it lies, if not in memory

    def __init__(self, geometry, capacity):
        self.geometry, self.capacity = geometry, capacity
        self.keys, self.values = self._arrays()

    def _arrays(self):
        batch, heads, key_dim, value_dim, fmt = self.geometry
        shape = batch, heads, self.capacity
        return result_pool.zeros((*shape, key_dim), fmt.dtype), result_pool.zeros(
            (*shape, value_dim), fmt.dtype
        )

    def write(self, row, key_states, value_states):
        """Write new tokens to the rows from `row` on."""
        end = row + key_states.shape[2]
        self.keys[:, :, row:end] = key_states
        self.values[:, :, row:end] = value_states

    def rows(self, begin, end):
        """Views of the keys and values in some rows."""
        return self.keys[:, :, begin:end], self.values[:, :, begin:end]

    def context(self, packed, begin, end):
        """Some rows as attention reads them, with queries of the format `packed`: as they are."""
        key, value = (side.swapaxes(1, 2) for side in self.rows(begin, end))  # [B, rows, Hkv, D]
        rows = attention.context_of(self.geometry.fmt, key, value, (key.strides[:2], value.strides[:2]))
        return rows._replace(packed=packed, as_loaded=False)

    def query(self, query):
        """Queries as the stored keys want them; a store of codes may have turned those."""
        return query

    output = query  # likewise outputs, as a caller wants them

    def begin_at(self, numbers, row):
        """Let prepared attention begin at another row."""
        for name, array in (("keys", self.keys), ("values", self.values)):
            numbers[cpu.attention.prepare.AT[name]] = cpu.launches.address(array) + row * array.strides[2]

    def clear(self, begin, end):
        """Make rows zeros again."""
        for array in self.rows(begin, end):
            array[...] = 0

    def take(self, indices, begin, end):
        """Let row b of the batch be what row ``indices[b]`` was, for some rows of tokens."""
        changed = [b for b, index in enumerate(indices) if index != b]
        if changed:
            sides = self.rows(begin, end)
            taken = [side[indices[changed]] for side in sides]
            for side, rows in zip(sides, taken, strict=True):
                side[changed] = rows

    def fill(self, store, indices, begin, end):
        """Take rows of another store, which become the first ones, from the given rows of its batch."""
        sides = zip(self.rows(0, end - begin), store.rows(begin, end), strict=True)
        for target, source in sides:
            for b, index in enumerate(indices):
                target[b] = source[index]

    def commit(self, span, record_past):
        """All rows are written that a layer now means."""

    def close(self):
        """Let go of what is not memory."""
