"""Find the cache that keys came from: models pass the tensors of an update to attention, not the cache.

In each layer a model makes two calls::

    k, v = cache.update(k, v, layer_idx)    `remember`: the record has weak references to these k and v
    attention_forward(module, q, k, v)      `claim` returns the record whose tensors these are

A record belongs to its cache, which keeps it, and is found by its tensors alone: other models may run in
between, and layers without keys of their own pass on those of another layer. The number of the layer counts
only for keys that a model has made of the tensors.
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
    after_attention: Any = None  # a function of (queries, weights of keys or None, padding mask or None)
    wants_weights: bool = False  # whether `after_attention` gets weights
    is_read: bool = False  # whether attention has read the record

    @property
    def is_moved(self) -> bool:
        """Return whether tokens of the layer were removed or moved, so that a row is not its position."""
        return self.layer._row_positions is not None

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
MOST_RECORDS = 4096  # before those of caches that are gone are dropped
# {id of the key tensor that an update returned: its record}, of all caches
RECORDS: dict[int, weakref.ref[Stored]] = {}
# {number of a layer: the records of the cache that updated it last}, in this thread or task
LATEST: ContextVar[dict[int | None, weakref.ref[Records]]] = ContextVar("kvkit_latest", default={})  # noqa: B039


class Records(dict[int, Stored]):
    """Holds the last update of each layer of a cache."""

    __slots__ = ("__weakref__",)


def unique_tensors(key: Any, value: Any, last: Stored | None) -> tuple[Any, Any]:
    """Return tensors that stand for one update: the given ones, or views if another update returned these.

    `last` is the layer's record, which the update replaces.
    """
    return (key, value) if record_of(key) in (None, last) else (key.view_as(key), value.view_as(value))


def remember(layer_idx: int, stored: Stored, key: Any, records: Records) -> None:
    """Let attention find the record of the update that returned the tensor `key`."""
    records[layer_idx] = stored
    if len(RECORDS) >= MOST_RECORDS:
        for number in [number for number, reference in RECORDS.items() if reference() is None]:
            RECORDS.pop(number, None)
    RECORDS[id(key)] = weakref.ref(stored)
    latest, owner = LATEST.get(), weakref.ref(records)
    if latest.get(layer_idx) is not owner:
        LATEST.set({**latest, layer_idx: owner})


def record_of(key: Any) -> Stored | None:
    """Return the record of the update that returned this tensor of keys, or None."""
    reference = RECORDS.get(id(key))
    stored = None if reference is None else reference()
    return stored if stored is not None and stored.key() is key else None


def latest_record(layer_idx: int | None, owner: weakref.ref[Records]) -> Stored | None:
    """Return the record of a layer's last update, if its cache has one."""
    records = owner()
    return None if records is None else records.get(layer_idx)  # type: ignore[arg-type]


def claim(layer_idx: int | None, key: Any, value: Any) -> Stored | None:
    """Return the record of the update that returned these keys; None if they are not from a kvkit cache."""
    stored = record_of(key)
    if stored is None:
        return claim_changed(layer_idx, key)
    if stored.value() is not value:
        raise another_tensor("value", layer_idx)
    stored.is_read = True
    return stored


def claim_changed(layer_idx: int | None, key: Any) -> Stored | None:
    """Return the record of the update that a model made these keys of; None if they are of no cache.

    Only keys of new latent rows may be. Raise for other keys, which would be those of the new tokens alone.
    """
    latest, returned = LATEST.get(), None
    stored = latest_record(layer_idx, latest[layer_idx]) if layer_idx in latest else None
    if stored is not None and not stored.is_read:
        returned = stored.key()  # None if the model has dropped the tensor
        has_new_tokens = key.shape[2] == stored.layer.get_seq_length() - stored.begin
        if stored.layer.latent_dim and has_new_tokens:
            stored.is_read = True
            return stored
        LATEST.set({i: reference for i, reference in latest.items() if i != layer_idx})
        # If the tensor is gone, the record may be of a pass that was cut off: as many keys are refused then.
        if returned is not None or (stored.begin > 0 and has_new_tokens):
            raise another_tensor("key", layer_idx)
    if any(is_view(key, latest_record(*each)) for each in latest.items()):
        raise another_tensor("key", layer_idx)
    return None


def is_view(key: Any, stored: Stored | None) -> bool:
    """Return whether keys are a view of those that stand for past tokens too."""
    returned = None if stored is None or not stored.begin else stored.key()
    return returned is not None and returned.shape == key.shape and returned.data_ptr() == key.data_ptr()


def another_tensor(name: str, layer_idx: int | None) -> Exception:
    """Return the error of attention to a tensor that was made of the one that an update returned."""
    wanted = f"the tensor that update of layer {layer_idx} returned"
    return argument_error(name, wanted, f"another one; {USE_OTHERS}")
