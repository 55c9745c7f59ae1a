"""What is studied: keys and values as `kvkit.tools.reading` finds them, or by name, with queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvkit.errors import argument_error, brief, describe
from kvkit.files import Contents
from kvkit.tools import reading
from kvkit.tools.inspecting import taken
from kvkit.tools.reading import Layer, Layers

NAMES = (
    ("key", "value"),
    ("keys", "values"),
    ("current_key", "current_value"),
    ("key_states", "value_states"),
)


def opened(source: Any, layout: str | None, sizes: Mapping[str, int] | None) -> Layers:
    """A path, arrays by name, or a cache of `kvkit.cache` as layers."""
    if not isinstance(source, Mapping) and hasattr(source, "layers"):
        return reading.opened(source)
    contents = taken(source)
    pairs = [pair for pair in NAMES if contents.arrays.keys() >= set(pair)]
    if pairs and not (layout or contents.description.layout):
        name = "arrays" if isinstance(source, Mapping) else str(source)
        return of_packed(name, contents, *pairs[0])
    return reading.opened(source, layout, sizes)


def of_packed(name: str, contents: Contents, key: str, value: str) -> Layers:
    """Packed tokens: [layers, tokens, heads, dim], or one layer without its axis; as operators take them."""
    arrays = contents.arrays
    keys, values = (arrays[one] if arrays[one].ndim == 4 else arrays[one][None] for one in (key, value))
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or not keys.size:
        raise argument_error(key, f"[layers, tokens, heads, dim] as {value} has", describe(arrays[key]))
    starts = sequences(arrays.get("seqstarts", np.array([0, keys.shape[1]])), keys.shape[1])
    query = arrays.get("query")
    notes: tuple[str, ...] = ()
    if query is not None:
        heads = query.shape[-2] if query.ndim == 5 else 0
        fits = (
            query.ndim == 5
            and query.shape[:2] == (len(keys), len(starts) - 1)
            and query.shape[4] == keys.shape[3]
        )
        if not fits or heads % keys.shape[2] or query.shape[2] > min(np.diff(starts)):
            notes = (f"query is not [layers, sequences, last tokens, heads, dim]: {describe(query)}",)
            query = None
    numbers = arrays.get("layers")
    if numbers is None or numbers.shape != (len(keys),):
        numbers = np.arange(len(keys))

    def layer(i):
        key_side, value_side = reading.of_floats(key, [keys[i]]), reading.of_floats(value, [values[i]])
        queries = None if query is None else list(query[i])
        return Layer(f"layer {numbers[i]}", key_side, value_side, starts, queries)

    return Layers(name, len(keys), layer, notes=notes)


def sequences(starts: np.ndarray, tokens: int) -> list[int]:
    """Where sequences begin, and the number of tokens."""
    wanted = f"integers that ascend from 0 to {tokens}, the tokens"
    if starts.ndim != 1 or starts.dtype.kind not in "iu":
        raise argument_error("seqstarts", wanted, describe(starts))
    found = starts.tolist()
    if len(found) < 2 or found[0] or found[-1] != tokens or sorted(set(found)) != found:
        raise argument_error("seqstarts", wanted, brief(found))
    return found
