"""Define `StatePool`: slots of recurrent states for many sequences, with forks and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.layers.gated_delta import GatedDeltaLayer
from kvkit.checks.index_tensors import index
from kvkit.checks.values import integer
from kvkit.errors import CapacityError, argument_error, describe
from kvkit.typed import Array

PoolForms = Mapping[str, tuple[tuple[int, ...], Any]]  # {name: (shape of a state, dtype)}


class StatePool:
    """A pool of recurrent states: a slot holds the states of all layers of one sequence.

    A state is not paged: it has no rows. A sequence that moves on changes its state, so a fork is a copy,
    and a prefix can be shared only where a checkpoint was made. The arrays [slots, ...] go with `indices` to
    `gated_delta_step`, `gated_delta_rule` and `causal_conv`, which change them in place.

    Parameters
    ----------
    layers : sequence of GatedDeltaLayer, or of dict
        The layers; a dict says {name: (shape of a state, dtype)}.
    slots : int
        Sequences and checkpoints together. The checkpoint that was used longest ago gives way to a sequence.
    dtype : dtype
        Of the convolution's states of a `GatedDeltaLayer`.

    Attributes
    ----------
    arrays : list of dict of str to ndarray
        The states of each layer, [slots, ...].

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import StatePool
    >>> pool = StatePool([{"recurrent": ((2, 4, 4), np.float32)}], slots=4)
    >>> pool.allocate("a"), pool.allocate("b")
    (0, 1)
    >>> pool.arrays[0]["recurrent"][pool.indices(["a"])] += 1       # a model runs the tokens 5 6 7
    >>> pool.checkpoint("a", [5, 6, 7])
    2
    >>> pool.resume("c", [5, 6, 7, 8])                              # its first three tokens are known
    3
    >>> pool.indices(["c", None, "a"])
    array([ 3, -1,  0])
    """

    def __init__(
        self, layers: Sequence[GatedDeltaLayer | PoolForms], slots: int, *, dtype: Any = np.float32
    ) -> None:
        self.slots = integer("slots", slots, 1)
        if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence) or not layers:
            raise argument_error("layers", "a list of layers", describe(layers))
        self.arrays: list[dict[str, Array]] = []
        for i, layer in enumerate(layers):
            forms = layer._state_forms(dtype) if isinstance(layer, GatedDeltaLayer) else layer
            if not isinstance(forms, Mapping) or not forms:
                raise argument_error(
                    f"layers[{i}]", "a GatedDeltaLayer, or a dict of states", describe(layer)
                )
            self.arrays.append(
                {name: np.zeros((self.slots, *shape), kind) for name, (shape, kind) in forms.items()}
            )
        self._free = list(range(self.slots))[::-1]
        self._slots: dict[Hashable, int] = {}
        self._checkpoints: dict[
            bytes, tuple[int, int]
        ] = {}  # {digest of tokens: (how many, slot)}, oldest first

    def __repr__(self) -> str:
        used, kept = len(self._slots), len(self._checkpoints)
        return (
            f"StatePool({len(self.arrays)} layers, {self.slots} slots: {used} sequences, {kept} checkpoints)"
        )

    # Sequences

    @property
    def sequences(self) -> dict[Hashable, int]:
        """Return the slot of each sequence."""
        return dict(self._slots)

    @property
    def free_slots(self) -> list[int]:
        """Return the slots of nobody, as `kvkit.check` takes them beside ``state_indices``."""
        return list(self._free)

    @property
    def nbytes(self) -> int:
        """Return the size of all slots in bytes."""
        return sum(array.nbytes for layer in self.arrays for array in layer.values())

    def allocate(self, seq: Hashable) -> int:
        """Return a slot for a new sequence; its states are zeros."""
        self._check_new("seq", seq)
        slot = self._take()
        self._slots[seq] = slot
        for layer in self.arrays:
            for array in layer.values():
                array[slot] = 0
        return slot

    def free(self, seq: Hashable) -> None:
        """Give back the slot of a sequence."""
        self._free.append(self._slots.pop(self._known(seq)))

    def fork(self, seq: Hashable, new: Hashable) -> int:
        """Copy the states of a sequence for a new one; return its slot."""
        self._known(seq)
        self._check_new("new", new)
        slot = self._take()
        self._slots[new] = slot
        self._copy(self._slots[seq], slot)
        return slot

    def indices(self, seqs: Sequence[Hashable | None]) -> Array:
        """Return the slots of sequences as an index tensor; -1 for None, a row of padding."""
        return np.array([-1 if seq is None else self._slots[self._known(seq)] for seq in seqs], np.int64)

    # Checkpoints

    def checkpoint(self, seq: Hashable, tokens: ArrayLike) -> int:
        """Keep a copy of a sequence's states under the tokens that it has run so far; return its slot."""
        source, digest = self._slots[self._known(seq)], digest_of(tokens)
        length = len(np.asarray(tokens))
        if digest in self._checkpoints:  # it becomes the latest
            self._checkpoints[digest] = self._checkpoints.pop(digest)
            return self._checkpoints[digest][1]
        slot = self._take()
        self._copy(source, slot)
        self._checkpoints[digest] = length, slot
        return slot

    def find(self, tokens: ArrayLike) -> tuple[int, int]:
        """Return (how many tokens, slot) of the longest checkpoint that these tokens begin with; (0, -1)."""
        numbers = index("tokens", tokens)
        lengths = sorted({length for length, _ in self._checkpoints.values()}, reverse=True)
        for length in lengths:
            known = self._checkpoints.get(digest_of(numbers[:length])) if length <= len(numbers) else None
            if known is not None:
                return known
        return 0, -1

    def resume(self, seq: Hashable, tokens: ArrayLike) -> int:
        """Begin a sequence at the longest checkpoint of its tokens; return how many of them are done."""
        self._check_new("seq", seq)
        length, source = self.find(tokens)
        if source < 0:
            self.allocate(seq)
            return 0
        digest = digest_of(index("tokens", tokens)[:length])
        self._checkpoints[digest] = self._checkpoints.pop(digest)  # so that it does not give way
        slot = self._take(source)
        self._slots[seq] = slot
        self._copy(source, slot)
        return length

    def _known(self, seq: Hashable) -> Hashable:
        """Return a sequence; raise if the pool does not have it."""
        if seq not in self._slots:
            raise argument_error("seq", "a sequence of this pool", repr(seq))
        return seq

    def _check_new(self, name: str, seq: Hashable) -> None:
        if seq is None or seq in self._slots:
            raise argument_error(name, "a name that no sequence has", repr(seq))

    def _take(self, spare: int = -1) -> int:
        """Return a free slot; the oldest checkpoint gives way, but never the slot `spare`."""
        if not self._free:
            oldest = next((key for key, (_, slot) in self._checkpoints.items() if slot != spare), None)
            if oldest is None:
                raise argument_error("slots", "a free slot", f"{self.slots} in use", CapacityError)
            self._free.append(self._checkpoints.pop(oldest)[1])
        return self._free.pop()

    def _copy(self, source: int, target: int) -> None:
        for layer in self.arrays:
            for array in layer.values():
                array[target] = array[source]


def digest_of(tokens: ArrayLike) -> bytes:
    """Return a digest of token ids."""
    return hashlib.sha256(index("tokens", tokens).tobytes()).digest()
