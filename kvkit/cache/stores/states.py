"""Store versions of a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvkit.cache.stores.allocation import Allocate, in_memory
from kvkit.cache.stores.attributes import Attributes
from kvkit.typed import Array

NO_STATE = -1  # the version of a state before the first token


class StateForms(NamedTuple):
    """Lists the names, shapes without the batch, and dtypes of the arrays of a state."""

    batch: int
    forms: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

    def __str__(self) -> str:
        arrays = (f"{name} {(self.batch, *shape)} of {dtype}" for name, (shape, dtype) in self.forms.items())
        return ", ".join(arrays)


class StateStore:
    """Stores versions of a recurrent state: an array [versions, B, ...] for each array of the state.

    A version that a checkpoint needs is not overwritten::

        version    0               1          2               3
                   state of 4      free       state of 9      state of 11 tokens
                   a checkpoint               `previous`      `current`            checkpoints {4: 0}

    Attributes
    ----------
    arrays : dict of str to ndarray, shape [versions, B, ...]
    current, previous : int
        The versions of the state now and before the last update; -1 before the first token.
    checkpoints : dict of int to int
        The versions that are kept, by the position of the next token.
    """

    def __init__(self, geometry: StateForms, versions: int, allocate: Allocate = in_memory) -> None:
        self.geometry, self.versions = geometry, versions
        self.current = self.previous = NO_STATE
        self.checkpoints: dict[int, int] = {}
        self.arrays: dict[str, Array] = {
            name: allocate((versions, geometry.batch, *shape), dtype)
            for name, (shape, dtype) in geometry.forms.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:  # a copy lies in memory
        attributes = {"current": self.current, "previous": self.previous, "checkpoints": self.checkpoints}
        attributes |= {"arrays": self.arrays}
        return StateStore, (self.geometry, self.versions), attributes

    _attributes = Attributes("current", "previous", "checkpoints")

    def counters(self) -> tuple[Any, ...]:
        """Return the objects that say which versions are used."""
        return (self,)

    def arrays_of(self, version: int) -> dict[str, Array]:
        """Return views of a version's arrays, [B, ...] each; {} before the first token."""
        return {} if version == NO_STATE else {name: array[version] for name, array in self.arrays.items()}

    def free(self) -> int:
        """Return an unused version to write to; NONE if all are used."""
        used = {self.current, self.previous, *self.checkpoints.values()}
        return next((i for i in range(self.versions) if i not in used), NO_STATE)

    def fill(self, store: StateStore, indices: Any) -> None:
        """Copy the used versions of another store; `indices` are the rows of its batch."""
        used = sorted({store.current, *store.checkpoints.values()} - {NO_STATE})
        for name, array in store.arrays.items():
            for new, version in enumerate(used):
                self.arrays[name][new] = array[version][indices]
        self.current = self.previous = NO_STATE if store.current == NO_STATE else used.index(store.current)
        self.checkpoints = {position: used.index(i) for position, i in store.checkpoints.items()}

    def commit(self, layer: Any) -> None:
        """Do nothing: nothing is encoded."""

    @property
    def nbytes(self) -> int:
        """Return the size of the used versions in bytes."""
        used = {self.current, *self.checkpoints.values()} - {NO_STATE}
        return sum(array[0].nbytes for array in self.arrays.values()) * len(used)
