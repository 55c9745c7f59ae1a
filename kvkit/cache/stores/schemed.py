"""Store keys and values that schemes encode in numpy; the first and recent tokens stay unquantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvkit.cache.stores.memory import Geometry, Store
from kvkit.errors import argument_error, describe
from kvkit.typed import Array


class Chunk(NamedTuple):
    """Holds tokens that were encoded together; some may have been removed since."""

    live: Array  # the ascending indices in the chunk of the tokens that were not removed
    rows: tuple[dict[str, Array], ...]  # what `encode` returned, for each row of the batch


@dataclass(frozen=True)
class SchemedSide:
    """Holds the keys or the values of a layer. It is immutable: every change returns a new side."""

    name: str
    scheme: Any
    group: int  # how many tokens are encoded together
    sink: int
    residual: int
    sinks: Array  # [B, H, tokens, D]
    tail: Array
    chunks: tuple[Chunk, ...] = ()

    changes = 0  # read by views; an immutable side never changes

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tail.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, tokens, dim = self.tail.shape
        return batch, heads, self.sinks.shape[2] + sum(len(chunk.live) for chunk in self.chunks) + tokens, dim

    @property
    def nbytes(self) -> int:
        """Return the size of the stored tokens in bytes."""
        coded = (array.nbytes for chunk in self.chunks for row in chunk.rows for array in row.values())
        return self.sinks.nbytes + self.tail.nbytes + sum(coded)

    def appended(self, states: Array) -> SchemedSide:
        """Return the side with new tokens; they become sinks only if no other token follows the sinks."""
        only_sinks = self.shape[2] == self.sinks.shape[2]
        new = self.sink - self.sinks.shape[2] if only_sinks else 0
        sinks = np.concatenate((self.sinks, states[:, :, :new]), 2)
        return replace(self, sinks=sinks, tail=np.concatenate((self.tail, states[:, :, new:]), 2))

    def with_old_encoded(self) -> SchemedSide:
        """Return the side with the groups of tokens encoded that have left the window as a whole."""
        count = max(0, self.tail.shape[2] - self.residual) // self.group
        if not count:
            return self
        *groups, tail = np.split(self.tail, self.group * np.arange(1, count + 1), 2)
        return replace(self, chunks=(*self.chunks, *map(self.encoded, groups)), tail=tail.copy())

    def encoded(self, states: Array) -> Chunk:
        """Encode tokens, row by row of the batch."""
        rows = []
        for row in states:
            arrays = self.scheme.encode(np.array(row.swapaxes(0, 1), np.float32, order="C"))
            if not isinstance(arrays, dict) or not all(isinstance(x, np.ndarray) for x in arrays.values()):
                raise argument_error(f"{self.name}.encode", "a dict of arrays", describe(arrays))
            rows.append({name: array.copy() for name, array in arrays.items()})  # without the bases of views
        return Chunk(np.arange(self.group), tuple(rows))

    def decoded(self, chunk: Chunk) -> Array:
        """Return the tokens of a chunk, [B, H, tokens, D]."""
        _, heads, _, dim = self.tail.shape
        rows = [np.asarray(self.scheme.decode(dict(arrays)), np.float32) for arrays in chunk.rows]
        for array in rows:
            if array.shape != (self.group, heads, dim):
                raise argument_error(f"{self.name}.decode", f"shape {(self.group, heads, dim)}", array.shape)
        tokens: Array = np.stack(rows).swapaxes(1, 2)[:, :, chunk.live].astype(self.dtype)
        return tokens

    def cropped(self, length: int) -> SchemedSide:
        """Return the side with the first `length` tokens only."""
        return self.keep_tokens(np.arange(min(length, self.shape[2])))

    def keep_tokens(self, tokens: Array) -> SchemedSide:
        """Return the side with these tokens only; a chunk keeps the codes of removed tokens."""
        begin, chunks = self.sinks.shape[2], []
        sinks = self.sinks[:, :, tokens[tokens < begin]]
        for chunk in self.chunks:
            end = begin + len(chunk.live)
            live = chunk.live[tokens[(tokens >= begin) & (tokens < end)] - begin]
            if len(live):
                chunks.append(chunk._replace(live=live))
            begin = end
        tail = self.tail[:, :, tokens[tokens >= begin] - begin]
        return replace(self, sinks=sinks, tail=tail, chunks=tuple(chunks))

    def select_rows(self, indices: Array) -> SchemedSide:
        """Return the side with these rows of the batch."""
        chunks = [chunk._replace(rows=tuple(chunk.rows[index] for index in indices)) for chunk in self.chunks]
        return replace(self, sinks=self.sinks[indices], tail=self.tail[indices], chunks=tuple(chunks))

    def read(self) -> Array:
        """Return all tokens as an array."""
        return np.concatenate((self.sinks, *map(self.decoded, self.chunks), self.tail), 2)


class SchemedStore(Store):
    """Stores keys and values encoded by schemes; they are decoded only while attention runs."""

    rows_adjoin = False

    def __init__(
        self, geometry: Geometry, sides: Sequence[SchemedSide], attended: Sequence[SchemedSide]
    ) -> None:
        self.geometry, self.capacity, self.sides = geometry, 0, sides
        self.attended = attended  # the sides that attention reads until the next change
        self.keys: Any = None  # arrays while attention runs
        self.values: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SchemedStore, (self.geometry, self.sides, self.attended)

    def keep_rows(self, rows: Array, first: int, rope: Any, rotated: Array | None) -> None:
        self.sides = self.attended = [side.keep_tokens(rows) for side in self.sides]
