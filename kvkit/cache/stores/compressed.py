"""Store the arrays of a compressed layer: rows in blocks for attention, index keys, states in rings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvkit.cache.stores.allocation import Allocate
from kvkit.calls.latent import gather_rows
from kvkit.checks.latent import DS_V4, DS_V4_BODY, DS_V4_ROW, LatentPool, ds_v4_parts
from kvkit.formats.coding import encode
from kvkit.formats.elements import E4M3
from kvkit.typed import Array

PAGE = 64  # rows of a block
LARGEST_E4M3 = 448.0  # the largest number of float8_e4m3fn, the code of an index key's largest element


class CompressedForm(NamedTuple):
    """Says how many sequences a layer has, and the dtype of its rows; "ds_v4" for rows of bytes."""

    batch: int
    fmt: str
    key_dim: int

    def __str__(self) -> str:
        return f"{self.batch} sequences of {self.fmt}"


class RowPool:
    """Stores rows [B, rows, dim] in blocks: floats, or the 584 bytes of `ds_v4`, coded once.

    Attributes
    ----------
    blocks : ndarray, shape [B, blocks, page, dim] or [B, blocks, bytes]
    page : int
        Rows of a block.
    """

    def __init__(self, blocks: Array, dim: int) -> None:
        self.blocks, self.dim = blocks, dim
        self.page = int(blocks.shape[2]) // (DS_V4_ROW if blocks.ndim == 3 else 1)

    @classmethod
    def of(cls, batch: int, rows: int, dim: int, dtype: Any, allocate: Allocate, page: int = PAGE) -> RowPool:
        """Allocate a pool for at least `rows` rows; a dtype of bytes is that of codes."""
        bytes_of_block = -(-page * DS_V4_ROW // DS_V4_BODY) * DS_V4_BODY
        inner = (bytes_of_block,) if dtype == np.uint8 else (page, dim)
        return cls(allocate((batch, max(1, -(-rows // page)), *inner), dtype), dim)

    @property
    def coded(self) -> bool:
        """Return whether rows are bytes."""
        return self.blocks.ndim == 3

    @property
    def rows(self) -> int:
        """Return how many rows of each sequence have room."""
        return int(self.blocks.shape[1]) * self.page

    @property
    def pool(self) -> Array:
        """Return the blocks of all sequences in one pool, as `mla_attention` takes it."""
        pool: Array = self.blocks.reshape(-1, *self.blocks.shape[2:])
        return pool

    def parts(self) -> list[Array]:
        """Return views [B, blocks, self.page, width] of what a row has: numbers, or codes and scales."""
        if not self.coded:
            return [self.blocks]
        shape = self.blocks.shape[:2]
        return [part.reshape(*shape, self.page, -1) for part in ds_v4_parts("blocks", self.pool)]

    def write(self, places: Array, rows: Array) -> None:
        """Write rows [B, n, dim] to the places [n] of every sequence; floats are rounded once, or coded."""
        if self.coded:
            rows = encode(rows.reshape(-1, self.dim), DS_V4)["codes"].reshape(*rows.shape[:2], DS_V4_ROW)
        self.write_stored(places, rows)

    def write_stored(self, places: Array, stored: Array) -> None:
        """Write what `stored` returns."""
        begin = 0
        for part in self.parts():
            end = begin + part.shape[3]
            part[:, places // self.page, places % self.page] = stored[..., begin:end]
            begin = end

    def stored(self, places: Array) -> Array:
        """Return the numbers [B, n, dim], or the bytes [B, n, 584], of some places."""
        parts = [part[:, places // self.page, places % self.page] for part in self.parts()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def read(self, places: Array) -> Array:
        """Return rows [B, n, dim], decoded to float32 if they are codes."""
        if not self.coded:
            return self.stored(places)
        pool, slots = LatentPool(ds_v4_parts("blocks", self.pool), DS_V4, self.dim), self.slots(places)
        return gather_rows(pool, slots.reshape(-1)).reshape(*slots.shape, self.dim)

    def slots(self, places: Array) -> Array:
        """Return the slots [B, ...] in `pool` of places [...]; -1 stays."""
        first = np.arange(len(self.blocks)).reshape(-1, *[1] * places.ndim) * self.rows
        return np.where(places < 0, -1, places + first)

    def first(self, count: int) -> Array:
        """Return the rows in the first places, [B, count, dim]: a view, or decoded codes."""
        if self.coded:
            return self.read(np.arange(count))
        rows: Array = self.blocks.reshape(len(self.blocks), -1, self.dim)[:, :count]
        return rows

    def grown(self, rows: int, allocate: Allocate, used: int) -> RowPool:
        """Return a pool with room for more rows, and the first `used` rows of this one."""
        larger = RowPool.of(len(self.blocks), rows, self.dim, self.blocks.dtype, allocate, self.page)
        count = -(-used // self.page)
        larger.blocks[:, :count] = self.blocks[:, :count]
        return larger

    def ring(self, rows: int, allocate: Allocate, positions: Array) -> RowPool:
        """Return a ring of another size with the rows of some positions."""
        other = RowPool.of(len(self.blocks), rows, self.dim, self.blocks.dtype, allocate, self.page)
        other.write_stored(positions % other.rows, self.stored(positions % self.rows))
        return other


class IndexKeys:
    """Stores index keys [B, rows, dim]: floats, or codes of float8 with a float32 scale each.

    Attributes
    ----------
    keys : ndarray, shape [B, rows, dim]
    scales : ndarray of float32, shape [B, rows], or None
    """

    def __init__(self, keys: Array, scales: Array | None) -> None:
        self.keys, self.scales = keys, scales

    @classmethod
    def of(cls, batch: int, rows: int, dim: int, dtype: Any, allocate: Allocate) -> IndexKeys:
        """Allocate keys; a dtype of bytes is that of codes."""
        if dtype != np.uint8:
            return cls(allocate((batch, rows, dim), dtype), None)
        return cls(allocate((batch, rows, dim), E4M3.dtype), allocate((batch, rows), np.float32))

    def grown(self, rows: int, allocate: Allocate, used: int) -> IndexKeys:
        """Return keys with room for more rows, and the first `used` rows of these."""
        dtype = self.keys.dtype if self.scales is None else np.uint8
        larger = IndexKeys.of(len(self.keys), rows, self.keys.shape[2], dtype, allocate)
        for mine, others in zip(self.arrays(), larger.arrays(), strict=True):
            others[:, :used] = mine[:, :used]
        return larger

    def arrays(self) -> list[Array]:
        """Return keys, and scales if there are any."""
        return [self.keys] if self.scales is None else [self.keys, self.scales]

    def write(self, rows: slice | Array, keys: Array) -> None:
        """Write float32 keys [B, n, dim] to `rows`."""
        if self.scales is None:
            self.keys[:, rows] = keys
            return
        largest = np.abs(keys).max(axis=2)
        scales = np.where(largest > 0, largest, LARGEST_E4M3) / np.float32(LARGEST_E4M3)
        self.scales[:, rows] = scales
        self.keys[:, rows] = keys / scales[..., None]

    def read(self, count: int) -> Array:
        """Return the first `count` keys [B, count, dim], decoded to float32 if they are codes."""
        if self.scales is None:
            return self.keys[:, :count]
        return self.keys[:, :count].astype(np.float32) * self.scales[:, :count, None]


@dataclass(frozen=True)
class CompressedStore:
    """Holds the arrays of a compressed layer. Rows that a token needs are never overwritten.

    Attributes
    ----------
    geometry : CompressedForm
    window : RowPool
        A ring: the row of position p is in place ``p % window.rows``.
    rows : RowPool or None
        Compressed row i is in place i.
    index_keys : IndexKeys or None
    states : tuple of ndarray of float32, shape [B, ring, 2, E]
        Of the compressor and of the indexer's: token p is in row ``p % ring``.
    overlaps : tuple of ndarray of float32, shape [B, K, 2, ratio, dim]
        Where a model pools by itself, what rows need of the window before: window i is in place ``i % K``.
    """

    geometry: CompressedForm
    window: RowPool
    rows: RowPool | None = None
    index_keys: IndexKeys | None = None
    states: tuple[Array, ...] = ()
    overlaps: tuple[Array, ...] = ()

    def counters(self) -> tuple[()]:
        """Return no objects that count rows: the layer's span says which are used."""
        return ()

    def commit(self, layer: Any) -> None:
        """Do nothing: rows are coded when they are written."""

    def arrays(self) -> Iterator[Array]:
        """Yield all arrays, each with an axis of sequences in front."""
        yield self.window.blocks
        if self.rows is not None:
            yield self.rows.blocks
        if self.index_keys is not None:
            yield from self.index_keys.arrays()
        yield from self.states
        yield from self.overlaps

    def mapped(self, function: Any) -> CompressedStore:
        """Return a store whose arrays are those that a function makes of these."""
        made = [function(array) for array in self.arrays()]
        window, *rest = made
        rows = None if self.rows is None else RowPool(rest.pop(0), self.rows.dim)
        keys = None
        if self.index_keys is not None:
            keys = IndexKeys(rest.pop(0), None if self.index_keys.scales is None else rest.pop(0))
        form = self.geometry._replace(batch=len(window))
        pool, count = RowPool(window, self.window.dim), len(self.states)
        return CompressedStore(form, pool, rows, keys, tuple(rest[:count]), tuple(rest[count:]))


def moved_ring(state: Array, ring: int, positions: Array, allocate: Allocate) -> Array:
    """Return a state in a ring of another size, with the tokens of some positions."""
    other = allocate((len(state), ring, *state.shape[2:]), np.float32)
    other[:, positions % ring] = state[:, positions % state.shape[1]]
    return other
