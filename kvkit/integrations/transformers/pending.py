"""From a cache's update to the attention that follows: a model hands only the tensors on, not the cache."""

import weakref
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.words import wrong


class Stored(NamedTuple):
    """What an update has stored, and returned to its caller as the new keys alone."""

    layer: Any  # of kvkit's cache
    keys: Any  # as the layer returns them: past and new ones, arrays or views of codes
    values: Any
    tokens: int  # new ones
    key: weakref.ref  # the tensor that the model hands on

    def arrays(self):
        """Keys and values of all tokens that attention may need, without the empty end of a static layer."""
        length = self.layer.get_seq_length()
        return (np.asarray(side)[:, :, :length] for side in (self.keys, self.values))


PENDING: ContextVar[dict[int, Stored]] = ContextVar("kvkit_pending", default={})  # noqa: B039  never changed


def put(layer_idx, stored):
    """Say what the attention of a layer is to read."""
    PENDING.set({**PENDING.get(), layer_idx: stored})


def take(layer_idx, key):
    """What was stored with these keys; None if they come from no cache of ours, and are all there is."""
    pending = PENDING.get()
    stored = pending.get(layer_idx)
    if stored is None:
        return None
    rest = dict(pending)
    del rest[layer_idx]
    PENDING.set(rest)
    recorded = stored.key()
    if recorded is key:
        return stored
    # A model that has made new keys of those it got would attend to them alone, without the past. Where none
    # of its tensors lives on the forward pass was cut off, unless there is a past and the tokens are as many.
    if recorded is not None or stored.layer.get_seq_length() > stored.tokens == key.shape[2]:
        raise wrong("key", f"the tensor that update of layer {layer_idx} returned", "another one")
    return None
