"""The checked call of `key_value_cache`."""

from typing import NamedTuple

import numpy as np

from kvkit.checks import caches
from kvkit.checks.outputs import Results
from kvkit.checks.records import Cache, Steps
from kvkit.checks.tensors import current, holdable
from kvkit.checks.values import integer
from kvkit.formats import Element

RESULTS = "key", "value"


class Call(NamedTuple):
    """A checked call, but for its outputs."""

    fmt: Element
    shape: tuple[int, ...]  # of key and value
    current_key: np.ndarray
    current_value: np.ndarray
    layer: Cache
    steps: Steps
    repeat: int
    written: list[tuple[str, np.ndarray]]
    results: Results


def checked_key_value_cache(sequences, current_key, current_value, cache, scale, *, num_repeat, **attributes):
    """The checked call, of `Static` or of `Packed` sequences."""
    fmt, current_key, current_value = current(current_key, current_value, sequences.axes)
    heads, dim = current_key.shape[-2:]
    repeat = integer("num_repeat", num_repeat, 1)
    layer = caches.cache_layer(fmt, heads, dim, cache, scale, sequences.layouts, **attributes)
    steps = sequences.over_cache("current_key", current_key, layer)
    shape = (*sequences.contexts(steps), heads * repeat, dim)
    holdable("num_repeat", shape, fmt)
    inputs = [("current_key", current_key), ("current_value", current_value)]
    written = caches.written_apart(cache, scale, layer, inputs)
    results = Results(dict.fromkeys(RESULTS, (shape, fmt.dtype)), inputs + written)
    return Call(fmt, shape, current_key, current_value, layer, steps, repeat, written, results)
