"""Remove tokens from states of llama.cpp, or build a state from the cache of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error
from kvkit.files import Contents, Description, llama
from kvkit.files.contents import CACHE, flat
from kvkit.tools.source import SLIDING, CacheSource, axis_sizes_of, in_file, leaves

STATE_LINE = "l kv | b n (h c)"


def retain_tokens(contents: Contents, keep: Callable[[np.ndarray], np.ndarray]) -> Contents:
    """Return a state with only the cells whose positions `keep` chooses, a function positions -> bool array.

    Positions and rotated keys do not change: llama.cpp continues after the last position.
    """
    if any(name.startswith(f"{llama.RECURRENT}.") for name in contents.arrays):
        wanted = "layers that have rows of tokens"
        raise argument_error("source", wanted, "recurrent ones, whose state has all tokens in it")
    joined = llama.join_streams(contents)
    arrays, line = dict(joined.arrays), joined.description.layout or ""
    for name in llama.CACHE_NAMES:
        begin = f"{name}_cells."
        if f"{begin}positions" not in arrays:
            continue
        inside = keep(arrays[f"{begin}positions"])
        counts = np.diff(arrays[f"{begin}sequence_starts"])
        arrays[f"{begin}sequences"] = arrays[f"{begin}sequences"][np.repeat(inside, counts)]
        arrays[f"{begin}sequence_starts"] = np.concatenate([[0], np.cumsum(counts[inside])])
        for what in [each for each in arrays if each.startswith(begin)]:
            if not what.endswith(("sequences", "sequence_starts")):
                arrays[what] = arrays[what][inside]
        for place in [each for each in arrays if each.startswith(f"{name}.")]:
            transposed = ";" in line and place.endswith(".1")  # values [1, elements, cells]
            arrays[place] = arrays[place][:, :, inside] if transposed else arrays[place][:, inside]
    tokens = arrays.get("token_ids", np.zeros(0, np.int32))
    arrays["token_ids"] = tokens[keep(np.arange(len(tokens)))]
    return replace(joined, arrays=arrays)


def positions_of(contents: Contents) -> np.ndarray:
    """Return the distinct positions of a state, ascending."""
    arrays = llama.join_streams(contents).arrays
    found = [array for name, array in arrays.items() if name.endswith("cells.positions")]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def make_state(arrays: Mapping[str, Any], description: Description, metadata: Mapping[str, Any]) -> Contents:
    """Build the state of one sequence from a cache: rows in the order of positions, without stale rows."""
    source = CacheSource(Contents(flat(arrays), dict(metadata), description=description))
    found: dict[str, np.ndarray] = {"token_ids": np.asarray(source.arrays.get("token_ids", ()), np.int32)}
    described = {
        name: replace(each.contents.description, layout=STATE_LINE, sizes={}, tables="cells")
        for name, each in source.caches.items()
    }
    for name, each in source.caches.items():
        found |= in_file(name, rows_of_state(each))
    about = {SLIDING: described[SLIDING].to_dict()} if SLIDING in described else {}
    return Contents(found, about, kind=llama.TITLES[llama.SEQUENCE], description=described[CACHE])


def rows_of_state(source: CacheSource) -> dict[str, np.ndarray]:
    """Return {name: array} of the rows and the cells of one cache."""
    kv = source.require_view()
    pages = source.block_tables()
    sizes = axis_sizes_of(kv, source.layout or "")
    count = len(pages[1].lengths) if pages else sizes.get("b", 1)
    if count != 1:
        raise argument_error("source", "one sequence, as a state of llama.cpp has", count)
    rows = pages[1].rows() if pages else np.arange(leaves(kv.keys[0])[0].shape[-3])
    places = source.places_of_tokens
    found: dict[str, np.ndarray] = {}
    for layer, pair in enumerate(zip(*kv, strict=True)):
        for side, array in enumerate(pair):
            whole = np.concatenate(array) if isinstance(array, tuple) else array.reshape(-1, *array.shape[2:])
            found[f"{CACHE}.{layer}.{side}"] = whole[rows].reshape(1, len(rows), -1)
    at = places.get("positions", np.arange(len(rows)))
    cells = {"positions": at, "sequences": np.zeros(len(rows)), "sequence_starts": np.arange(len(rows) + 1)}
    cells |= {axis: places[f"positions_{axis}"] for axis in "xy" if f"positions_{axis}" in places}
    if "x" in cells:
        cells["token"] = np.full(len(rows), -1)
    return found | {f"{CACHE}_cells.{name}": array.astype(np.int32) for name, array in cells.items()}
