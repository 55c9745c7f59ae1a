"""Count the tokens of a sharded cache, and keep the new ones of a step until shards get them."""

from __future__ import annotations

import numpy as np

from kvkit.errors import argument_error
from kvkit.typed import Array


class OpenStep:
    """Counts tokens: every layer has ``length``, some layers have ``step`` more, for ``batch`` sequences.

    In the middle of a step::

        layer 0   |---- length ----|-- step --|    taken, and sent to the shards by its attention
        layer 1   |---- length ----|-- step --|    taken, still in ``pending``
        layer 2   |---- length ----|               not yet taken

    ``pending`` holds new keys and values by layer.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.begin(0, 0)

    def begin(self, length: int, batch: int) -> None:
        """Begin with ``length`` tokens in every layer, and without a step."""
        # An empty cache takes any number of sequences.
        self.length, self.batch, self.step = length, batch if length else 0, 0
        self._taken: set[int] = set()
        self.pending: dict[int, tuple[Array, Array]] = {}

    @property
    def complete(self) -> bool:
        """Return whether all layers have the tokens of the step."""
        return len(self._taken) == self._layers

    @property
    def total(self) -> int:
        """Return the number of tokens that all layers have."""
        return self.length + self.step if self.complete else self.length

    def visible_tokens(self, layer_idx: int) -> int:
        """Return how many tokens the context of a layer has."""
        if self._taken and layer_idx not in self._taken:
            raise argument_error("layer_idx", "a layer that has taken the tokens of the step", layer_idx)
        return self.length + self.step

    def add(self, layer_idx: int, key: Array, value: Array) -> None:
        """Keep copies of a layer's new keys and values, because the caller may change the arrays."""
        tokens = key.shape[2]
        if layer_idx in self._taken:
            raise argument_error("layer_idx", "a layer that has not yet taken this step's tokens", layer_idx)
        if self._taken and tokens != self.step:
            raise argument_error("key_states", f"{self.step} tokens, as in other layers", tokens)
        self.pending[layer_idx] = np.array(key), np.array(value)
        self._taken.add(layer_idx)
        self.step, self.batch = tokens, len(key)

    def commit(self, caller: str) -> None:
        """End the step. Raise if only some layers have its tokens, in an error of the method `caller`."""
        if self._taken and not self.complete:
            missing = sorted(set(range(self._layers)) - self._taken)
            wanted = "all layers to have taken the step's tokens"
            raise argument_error(caller, wanted, f"layers {missing} without them")
        self.begin(self.total, self.batch)
