"""Store versions of a recurrent state, in memory or in a mapped file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvkit.cache.stores.mapped import File
from kvkit.formats import BY_NAME
from kvkit.runtime.arrays import zeros
from kvkit.typed import Array

NONE = -1  # the version of a state before the first token


class StateForms(NamedTuple):
    """Lists the names, shapes without the batch, and dtypes of the arrays of a state."""

    batch: int
    forms: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

    def __str__(self) -> str:
        arrays = (f"{name} {(self.batch, *shape)} of {dtype}" for name, (shape, dtype) in self.forms.items())
        return ", ".join(arrays)


class StateStore:
    """Stores versions of a recurrent state: an array [versions, B, ...] for each array of the state.

    A new version is written whole into an unused place, then committed. So a crash leaves the old version or
    the new one::

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
    file : File or None
    """

    in_place = True

    def __init__(self, geometry: StateForms, versions: int, home: Any = None, new: bool = True) -> None:
        self.geometry, self.versions = geometry, versions
        self.current = self.previous = NONE
        self.checkpoints: dict[int, int] = {}
        forms = [((versions, geometry.batch, *shape), dtype) for shape, dtype in geometry.forms.values()]
        self.file = None if home is None else File(home, forms, new)
        arrays = [zeros(*form) for form in forms] if self.file is None else self.file.arrays
        self.arrays: dict[str, Array] = dict(zip(geometry.forms, arrays, strict=True))

    @classmethod
    def opened(cls, about: dict[str, Any], home: Any) -> StateStore:
        """Open the store that a sidecar describes."""
        state, arrays = about["state"], about["states"]
        forms = {name: (tuple(shape), BY_NAME[dtype].dtype) for name, dtype, shape in arrays}
        store = cls(StateForms(about["batch"], forms), about["versions"], home, new=False)
        legal = range(NONE, store.versions)
        store.current, store.previous = state["current"], state["previous"]
        positions = [state[f"checkpoint{i}"] for i in range(store.versions)]
        store.checkpoints = {position: i for i, position in enumerate(positions) if position >= 0}
        versions_exist = store.current in legal and store.previous in legal
        if not versions_exist or max(store.checkpoints, default=0) > state["length"]:
            raise ValueError(f"a state that cannot be: {state}")
        return store

    def __reduce__(self) -> tuple[Any, ...]:  # a copy lies in memory
        attributes = {"current": self.current, "previous": self.previous, "checkpoints": self.checkpoints}
        attributes |= {"file": None, "arrays": self.arrays}
        return StateStore, (self.geometry, self.versions), attributes

    def arrays_of(self, version: int) -> dict[str, Array]:
        """Return views of a version's arrays, [B, ...] each; {} before the first token."""
        return {} if version == NONE else {name: array[version] for name, array in self.arrays.items()}

    def free(self) -> int:
        """Return an unused version to write to; NONE if all are used."""
        used = {self.current, self.previous, *self.checkpoints.values()}
        return next((i for i in range(self.versions) if i not in used), NONE)

    def fill(self, store: StateStore, indices: Any) -> None:
        """Copy the used versions of another store; `indices` are the rows of its batch."""
        used = sorted({store.current, *store.checkpoints.values()} - {NONE})
        for name, array in store.arrays.items():
            for new, version in enumerate(used):
                self.arrays[name][new] = array[version][indices]
        self.current = self.previous = NONE if store.current == NONE else used.index(store.current)
        self.checkpoints = {position: used.index(i) for position, i in store.checkpoints.items()}

    def with_new_sidecar(self) -> StateStore:
        """Return a store of the same file without a sidecar; the next commit writes a new one."""
        store = StateStore.__new__(StateStore)
        store.__dict__.update(self.__dict__ | {"checkpoints": dict(self.checkpoints)})
        store.file = None if self.file is None else self.file.with_new_sidecar()
        return store

    def commit(self, layer: Any) -> None:
        """Commit which versions are used, if there is a file."""
        if self.file is not None:
            positions = {version: position for position, version in self.checkpoints.items()}
            numbers = {"current": self.current, "previous": self.previous}
            numbers |= {f"checkpoint{i}": positions.get(i, NONE) for i in range(self.versions)}
            self.file.commit(self.about, layer, numbers)

    def about(self) -> dict[str, Any]:
        """Describe the arrays for a sidecar."""
        states = [(name, dtype.name, shape) for name, (shape, dtype) in self.geometry.forms.items()]
        return {"batch": self.geometry.batch, "versions": self.versions, "states": states}

    def prefetch(self, span: Any) -> None:
        """Do nothing: a state is small."""

    def close(self) -> None:
        """Delete the file, if there is one."""
        if self.file is not None:
            self.file.close()

    @property
    def nbytes(self) -> int:
        """Return the size of the used versions in bytes."""
        used = {self.current, *self.checkpoints.values()} - {NONE}
        return sum(array[0].nbytes for array in self.arrays.values()) * len(used)
