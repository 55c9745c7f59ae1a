"""Define `PooledLayer`, the compressed layer of a model that pools tokens itself (transformers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers.changes import whole
from kvkit.cache.layers.compressed import COMPRESSORS, CompressedLayer
from kvkit.checks.values import checked_format, text
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS
from kvkit.typed import Array, States


class PooledLayer(CompressedLayer):
    """A compressed layer whose rows the model computes; the layer stores them, and tokens between them.

    Each step calls `update`, then for the compressor, and for the indexer, `store_tokens`, `store_overlap` if
    a window ended, and `store_rows`. States hold raw kv and gate. `attend` and weights are not used.
    """

    def update(  # the model pools later in the step, so that there is nothing to pool here
        self,
        row: Array,
        compressor: Any = None,
        cache_position: ArrayLike | None = None,
        *,
        indexer: Any = None,
    ) -> tuple[States, States]:
        """Append the rows of new tokens; return the rows of the window that they attend to, twice."""
        return super().update(row, None, cache_position)

    def _checked_inputs(self, compressor: Any, indexer: Any, tokens: tuple[int, ...]) -> list[Any]:
        return []

    @one_call_at_a_time
    @whole
    def store_tokens(self, name: str, kv: Array, gate: Array) -> tuple[int, Array, Array]:
        """Store the projections of the last update's tokens.

        Parameters
        ----------
        name : str
            ``"compressor"`` or ``"indexer"``.
        kv, gate : ndarray, shape [B, q, E]

        Returns
        -------
        first : int
            The position of the first token of the windows that end in this step.
        kv, gate : ndarray of float32, shape [B, windows * ratio, E]
            The tokens of these windows.
        """
        number, before, length = self._number(name), self.span.before, self.span.length
        state = self.store.states[number]
        shape = self.batch_size, length - before, state.shape[3]
        for label, array in (("kv", kv), ("gate", gate)):
            checked_format(label, array, FLOATS, 3)
            if array.shape != shape:
                raise argument_error(label, f"shape {shape}, for the last update", describe(array))
        first, end = before // self.ratio * self.ratio, length // self.ratio * self.ratio
        old = np.arange(first, min(before, end))
        parts = [
            np.concatenate([state[:, old % state.shape[1], side], x[:, : max(0, end - before)]], axis=1)
            for side, x in enumerate((kv, gate))
        ]
        held = np.arange(max(before, length - state.shape[1]), length)
        for side, x in enumerate((kv, gate)):
            state[:, held % state.shape[1], side] = x[:, held - before]
        return first, parts[0].astype(np.float32, copy=False), parts[1].astype(np.float32, copy=False)

    @one_call_at_a_time
    @whole
    def store_overlap(self, name: str, kv: Array, gate: Array) -> tuple[Array, Array] | None:
        """Store what the next rows need of the windows that ended in this step.

        Parameters
        ----------
        name : str
            As in `store_tokens`.
        kv, gate : ndarray, shape [B, windows, ratio, dim]
            The part for the next row of each window that ended in this step, with its biases.

        Returns
        -------
        tuple (kv, gate) or None
            What was stored of the window before the step's first one; None for the first window.
        """
        number, last = self._number(name), self.span.length // self.ratio - 1
        before = self.span.before // self.ratio - 1  # the last window of the step before
        known = self.store.overlaps[number] if number < len(self.store.overlaps) else None
        kept = max(0, (min(self.floor, self.span.before) // self.ratio) - 1)
        room = last + 2 - kept
        array = self.allocate((len(kv), room, 2, *kv.shape[2:]), np.float32)
        new = np.arange(max(kept, last + 1 - kv.shape[1]), last + 1)
        for side, x in enumerate((kv, gate)):
            array[:, new % room, side] = x[:, new - last - 1]
        if known is not None:
            windows = np.arange(max(kept, before + 1 - known.shape[1]), before + 1)
            array[:, windows % room] = known[:, windows % known.shape[1]]
        found = None if known is None or before < 0 else known[:, before % known.shape[1]]
        others = [*self.store.overlaps]
        others[number : number + 1] = [array]
        self.store = replace(self.store, overlaps=tuple(others))
        return None if found is None else (found[:, 0], found[:, 1])

    @one_call_at_a_time
    @whole
    def store_rows(self, name: str, rows: Array) -> Array:
        """Store the rows, or index keys, of the windows that ended in the last update; return all.

        Parameters
        ----------
        name : str
            As in `store_tokens`.
        rows : ndarray, shape [B, windows, dim]

        Returns
        -------
        ndarray, shape [B, all windows, dim]
            A view, valid until the next call that changes the layer.
        """
        number, first, end = self._number(name), self.span.before // self.ratio, self._count()
        checked_format("rows", rows, FLOATS, 3)
        shape = self.batch_size, end - first, self.index_dim if number else self.dim
        if rows.shape != shape:
            raise argument_error("rows", f"shape {shape}, for the last update", describe(rows))
        if number:
            self.store.index_keys.write(slice(first, end), rows)
            keys: Array = self.store.index_keys.read(end)
            return keys
        self.store.rows.write(np.arange(first, end), rows)
        stored: Array = self.store.rows.first(end)
        return stored

    def _number(self, name: str) -> int:
        """Return the number of a compressor; raise without tokens."""
        names = COMPRESSORS[: bool(self.ratio) + bool(self.index_dim)]
        if self.store is None or not names:
            raise argument_error(self.name, "stored tokens of a layer with compressed rows", "none")
        return names.index(text("name", name, names))

    # Files

    def _arrays(self) -> dict[str, Array]:
        overlaps = () if self.store is None else self.store.overlaps
        named = zip(COMPRESSORS, overlaps, strict=False)
        return super()._arrays() | {f"overlaps.{name}": array for name, array in named}

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        super()._fill(arrays, length)
        names = [f"overlaps.{name}" for name in COMPRESSORS if f"overlaps.{name}" in arrays]
        if names:
            self.store = replace(self.store, overlaps=tuple(arrays[name].copy() for name in names))
