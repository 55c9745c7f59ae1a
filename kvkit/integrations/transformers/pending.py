"""Find the cache that keys came from: models pass the tensors of an update to attention, not the cache.

In each layer a model makes two calls::

    k, v = cache.update(k, v, layer_idx)    `remember`: the record has weak references to these k and v
    attention_forward(module, q, k, v)      `claim` returns the layer's record, if these are its k and v
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkit.errors import argument_error


@dataclass(slots=True, weakref_slot=True)
class Stored:
    """Records what an update has stored. The model gets only the new keys and values.

    The cache keeps the record until the layer's next update, to know whether attention has read it.
    """

    layer: Any  # of kvkit's cache
    keys: Any  # past and new keys, arrays or views of codes; None after attention
    values: Any
    begin: int  # number of past tokens
    key: weakref.ref  # to the tensors that the update returned
    value: weakref.ref
    after_attention: Any = None  # a function of (queries, weights of keys or None)
    wants_weights: bool = False  # whether `after_attention` gets weights
    is_read: bool = False  # whether attention has read the record

    @property
    def is_moved(self) -> bool:
        """Return whether tokens of the layer were removed or moved, so that a row is not its position."""
        return self.layer.row_positions is not None

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return keys and values of the tokens that attention may need, without unused rows."""
        if self.keys is None:
            raise argument_error("key", "one attention for each update", "a second one for the same keys")
        length = self.layer.get_seq_length()
        return tuple(np.asarray(side)[:, :, :length] for side in (self.keys, self.values))

    def drop_arrays(self) -> None:
        """Drop the arrays after attention, because a layer may have made them for it."""
        if not getattr(self.layer, "is_shared", False):
            self.keys = self.values = None

    def is_lost(self) -> bool:
        """Return whether the layer has tokens that attention never read."""
        return not self.is_read and self.layer.get_seq_length() > self.begin


USE_OTHERS = "for a model that changes keys or values use attn_implementation 'sdpa' or 'eager'"
PENDING: ContextVar[dict[int | None, weakref.ref[Stored]]] = ContextVar("kvkit_pending", default={})  # noqa: B039


def remember(layer_idx: int | None, stored: Stored) -> None:
    """Hold the record of a layer for its attention."""
    PENDING.set({**PENDING.get(), layer_idx: weakref.ref(stored)})


def forget(layer_idx: int | None) -> None:
    """Drop the record of a layer."""
    PENDING.set({i: stored for i, stored in PENDING.get().items() if i != layer_idx})


def shared_by(key: Any, value: Any) -> Stored | None:
    """Return the record of the layer whose keys these are, for a layer without keys of its own, or None."""
    for reference in PENDING.get().values():
        stored = reference()
        if stored is not None and stored.key() is key and stored.value() is value:
            return stored
    return None


def claim(layer_idx: int | None, key: Any, value: Any) -> Stored | None:
    """Return the record of the update that returned these keys; None if they are not from a kvkit cache."""
    reference = PENDING.get().get(layer_idx)
    stored = shared_by(key, value) if reference is None else reference()
    if stored is None:
        return None
    returned_key = stored.key()  # None if the model has dropped the tensor
    has_new_tokens = key.shape[2] == stored.layer.get_seq_length() - stored.begin
    is_expanded = stored.layer.latent_dim and has_new_tokens  # keys that the model made of new latent rows
    if is_expanded or (returned_key is key and stored.value() is value):
        stored.is_read = True
        return stored
    if stored.is_read and returned_key is not key:
        return None
    forget(layer_idx)
    # If the returned tensor lives, the model has made these keys of it: it would see the new tokens alone. If
    # it is gone, the record may be of a pass that was cut off: refuse only as many keys, after past tokens.
    if returned_key is not None or (stored.begin > 0 and has_new_tokens):
        name = "value" if returned_key is key else "key"
        wanted = f"the tensor that update of layer {layer_idx} returned"
        raise argument_error(name, wanted, f"another one; {USE_OTHERS}")
    return None
