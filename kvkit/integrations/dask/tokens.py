"""Which tokens a cache in shards has: those of all layers, and a step, which layers take one by one."""

import numpy as np

from kvkit.checks.words import wrong


class Tokens:
    """`length` tokens are in all layers, `step` more in some of them, each of `batch` rows.

    Of layers in `pending` the new keys and values wait here for the next message to the shards.
    """

    def __init__(self, layers):
        self._layers = layers
        self.length = self.batch = self.step = 0
        self._taken, self.pending = set[int](), {}

    @property
    def whole(self):
        """Whether all layers have the tokens of the step."""
        return len(self._taken) == self._layers

    @property
    def total(self):
        """Tokens that all layers have."""
        return self.length + self.step if self.whole else self.length

    def seen(self, layer_idx):
        """Tokens that queries of a layer see."""
        if self._taken and layer_idx not in self._taken:
            raise wrong("layer_idx", "a layer that has taken the tokens of the step", layer_idx)
        return self.length + self.step

    def take(self, layer_idx, key, value):
        """A layer takes keys and values; their arrays are the caller's, who may change them."""
        tokens = key.shape[2]
        if layer_idx in self._taken:
            raise wrong("layer_idx", "a layer that has not yet taken this step's tokens", layer_idx)
        if self._taken and tokens != self.step:
            raise wrong("key_states", f"{self.step} tokens, as in other layers", tokens)
        self.pending[layer_idx] = np.array(key), np.array(value)
        self._taken.add(layer_idx)
        self.step, self.batch = tokens, len(key)

    def settle(self, what):
        """End the step, which all layers have taken, or none has."""
        if self._taken and not self.whole:
            missing = sorted(set(range(self._layers)) - self._taken)
            raise wrong(what, "all layers to have taken the step's tokens", f"layers {missing} that have not")
        self.begin(self.total, self.batch)

    def begin(self, length, batch):
        """So many tokens are in all layers, and no step is open."""
        self.length, self.batch, self.step = length, batch if length else 0, 0
        self._taken, self.pending = set(), {}
