"""Layers of keys, values and queries: of files, arrays, and caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkit import files
from kvkit.checks.words import describe, wrong
from kvkit.files import Contents
from kvkit.formats import BY_DTYPE, FLOATS
from kvkit.tools import inspecting

NAMES = (
    ("key", "value"),
    ("keys", "values"),
    ("current_key", "current_value"),
    ("key_states", "value_states"),
)
Read = Callable[[slice], np.ndarray]


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer: `read` gives some of its tokens, float [tokens, heads, dim]."""

    read: Read
    tokens: int
    heads: int
    dim: int
    bits: int  # of an element as it lies there


@dataclass(frozen=True)
class Layer:
    """One layer; of each sequence queries of its last tokens, [tokens, query heads, dim], if known."""

    name: str
    key: Side
    value: Side
    starts: list[int]  # where sequences begin among the tokens, and their number
    queries: list[np.ndarray] | None


@dataclass(frozen=True)
class Source:
    """What is studied: `layer(i)` of `count`; a name, and what whoever reads results should know."""

    name: str
    count: int
    layer: Callable[[int], Layer]
    notes: tuple[str, ...] = ()


def opened(source: Any, layout: str | None, sizes: Mapping[str, int] | None) -> Source:
    """A path, arrays by name, or a cache of `kvkit.cache` as layers."""
    if hasattr(source, "layers") and not isinstance(source, Mapping):
        return of_cache(source)
    contents = inspecting.taken(source)
    name = "arrays" if isinstance(source, Mapping) else str(source)
    pairs = [pair for pair in NAMES if contents.arrays.keys() >= set(pair)]
    if pairs and not (layout or contents.description.layout):
        return of_packed(name, contents, *pairs[0])
    return of_layout(name, contents, layout or contents.description.layout, sizes)


def floats(name: str, array: np.ndarray) -> int:
    """Bits of an element, which has to be a float."""
    element = BY_DTYPE.get(array.dtype)
    if element not in FLOATS:
        raise wrong(name, "float32, float16 or bfloat16 (decode codes first)", describe(array))
    return element.bits


def of_cache(cache: Any) -> Source:
    """The layers of a cache object, whose keys and values are [batch, heads, tokens, dim]."""
    if not len(cache.layers) or not cache.layers[0].batch_size:
        raise wrong("source", "a cache that has tokens", "an empty one")

    def layer(i):
        keys, values = (np.asarray(side) for side in (cache.layers[i].keys, cache.layers[i].values))
        key = side_of_sequences("keys", list(keys.swapaxes(1, 2)))
        value = side_of_sequences("values", list(values.swapaxes(1, 2)))
        tokens = keys.shape[2]
        return Layer(f"layer {i}", key, value, list(range(0, tokens * len(keys) + 1, tokens)), None)

    return Source(type(cache).__name__, len(cache.layers), layer)


def side_of_sequences(name: str, arrays: list[np.ndarray]) -> Side:
    """Sequences [tokens, heads, dim], one behind the other."""
    starts = np.cumsum([0, *map(len, arrays)])

    def read(part):
        begin, end, _ = part.indices(int(starts[-1]))
        pieces = [
            array[max(begin - start, 0) : max(end - start, 0)]
            for array, start in zip(arrays, starts[:-1].tolist(), strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    _, heads, dim = arrays[0].shape
    return Side(read, int(starts[-1]), heads, dim, floats(name, arrays[0]))


def of_packed(name: str, contents: Contents, key: str, value: str) -> Source:
    """Packed tokens: [layers, tokens, heads, dim], or one layer without its axis; as operators take them."""
    arrays = contents.arrays
    keys, values = (arrays[one] if arrays[one].ndim == 4 else arrays[one][None] for one in (key, value))
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or not keys.size:
        raise wrong(key, f"[layers, tokens, heads, dim] as {value} has", describe(arrays[key]))
    starts = [int(start) for start in arrays.get("seqstarts", (0, keys.shape[1]))]
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
        key_side, value_side = side_of_sequences(key, [keys[i]]), side_of_sequences(value, [values[i]])
        queries = None if query is None else list(query[i])
        return Layer(f"layer {numbers[i]}", key_side, value_side, starts, queries)

    return Source(name, len(keys), layer, notes)


def of_layout(name: str, contents: Contents, layout: str | None, sizes: Mapping[str, int] | None) -> Source:
    """The cache of a file, as its layout says; of tables the rows that sequences have."""
    cache = files.nested(contents.arrays)
    if cache is None or layout is None:
        wanted = "an array 'cache' and its layout, or keys and values by name: " + ", ".join(
            "/".join(pair) for pair in NAMES
        )
        raise wrong("source", wanted, ", ".join(list(contents.arrays)[:8]))
    views, lengths = inspecting.viewed(cache, layout, dict(contents.description.sizes) | dict(sizes or {}))
    if views is None:
        raise wrong("layout", "one whose content is not split (kvkit convert makes one)", layout)
    found = inspecting.pages_of(contents, lengths.get("n"))
    rows = None if found is None else found[1].rows()
    notes = ("all blocks are taken for sequences: the file has no tables",) if found is None else ()

    def side(which, i):
        array = (views.keys if which == "keys" else views.values)[i]
        if rows is None or isinstance(array, tuple):
            return side_of_sequences(which, list(array))
        _, size, heads, dim = array.shape
        bits = floats(which, array)
        return Side(lambda part: array[rows[part] // size, rows[part] % size], len(rows), heads, dim, bits)

    def layer(i):
        key, value = side("keys", i), side("values", i)
        starts = (
            found[1].starts().tolist()
            if found
            else [key.tokens * n // len(views.keys[i]) for n in range(len(views.keys[i]) + 1)]
        )
        return Layer(f"layer {i}", key, value, starts, None)

    return Source(name, len(views.keys), layer, notes)
