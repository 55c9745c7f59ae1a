"""Convert a path, named arrays or a cache object to the contents of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvkit import files
from kvkit.errors import argument_error, brief, describe
from kvkit.files import Contents, llama
from kvkit.files.contents import CACHE
from kvkit.interop import as_numpy
from kvkit.tools.names import LAYER, PAGED_NAMES, SIDES, by_layer, matching, patterns_beside

Source = str | os.PathLike[str] | Mapping[str, Any] | Contents


def contents_of(source: Any) -> Contents:
    """Read a file, with llama.cpp's streams joined; or wrap named arrays or a cache object as contents."""
    if isinstance(source, Contents):
        return llama.join_streams(source)
    if isinstance(source, (str, os.PathLike)):
        return llama.join_streams(files.read(source))
    if not isinstance(source, Mapping):
        if not hasattr(source, "layers"):
            hint = ": give {'key': keys, 'value': values}" if isinstance(source, np.ndarray) else ""
            raise argument_error("source", "a path, a dict of arrays or a cache", describe(source) + hint)
        return Contents(arrays_of_object(source), {}, kind=type(source).__name__)
    given: dict[str, Any] = {}
    for name, value in source.items():
        if value is not None:
            given |= arrays_of_object(value) if hasattr(value, "layers") else {name: value}
    lists = {name: value for name, value in given.items() if holds_arrays(value)}
    arrays = {}
    for name, value in (given | files.flat(lists)).items():
        if name not in lists:
            try:
                arrays[name] = np.asarray(as_numpy(value, name))
            except ValueError:  # such as nested lists of numbers
                wanted = "an array, or lists of equal length"
                raise argument_error(name, wanted, describe(value)) from None
    return Contents(arrays, {}, kind="arrays")


def arrays_of_object(cache: Any) -> dict[str, Any]:
    """Return {name: array} of the keys and values of a cache object of transformers or `kvkit.cache`.

    Layers without keys, such as recurrent ones, are left out. A static layer gives only its filled rows.
    """
    found: dict[str, Any] = {}
    for number, layer in enumerate(cache.layers):
        pair: Any = ()
        tokens, kind = slice(None), type(layer).__name__
        if hasattr(layer, "_stored"):  # a layer of kvkit
            pair = layer._stored()
        elif "quantized" in kind.lower():
            got = f"a {kind}, whose .keys are only the last ones"
            raise argument_error("source", "a layer whose .keys are all of its keys", got)
        elif getattr(layer, "keys", None) is not None:
            pair = layer.keys, layer.values
            tokens = slice(int(layer.get_seq_length()) if kind.startswith("Static") else None)
        for side, array in zip(SIDES, pair, strict=False):
            found[f"past_key_values.{number}.{side}"] = np.asarray(as_numpy(array, side))[:, :, tokens]
    if not any(array.size for array in found.values()):
        in_steps = hasattr(cache, "blocks")  # sequences of a `PagedCache`, beside its batch
        wanted = "a file of cache.save(path, sequences), or a cache with a batch" if in_steps else "a cache"
        got = f"an empty {'batch' if in_steps else 'cache'}"
        raise argument_error("source", f"{wanted} that has tokens", got)
    return found


def by_patterns(
    source: Any, keys: str | None, values: str | None, fused: str | None = None, queries: str | None = None
) -> Any:
    """Rename the arrays of keys and values of a source, or of both in one array, to the usual names.

    Parameters
    ----------
    source : path, mapping of arrays, or Contents
    keys, values : str or None
        Names of arrays of keys and of values, with {l} for the number of a layer.
    fused : str or None
        The names of arrays that hold both. Without any pattern the source is returned unchanged.
    queries : str or None
        The names of arrays of queries; by default those of keys with "query" for "key", or "q" for "k".

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.tools.contents import by_patterns
    >>> from kvkit.tools.source import CacheSource
    >>> arrays = {f"attn{i}_{side}": np.ones((3, 8, 2, 16)) for i in (0, 1) for side in "kv"}
    >>> CacheSource(by_patterns(arrays, "attn{l}_k", "attn{l}_v")).axis_sizes
    {'l': 2, 'b': 3, 'n': 8, 'h': 2, 'c': 16}
    """
    if keys is values is fused is queries is None:
        return source
    contents, found = contents_of(source), []  # {number of a layer: name} of keys, and of values
    beside = patterns_beside(keys) if keys is not None and queries is None else None
    if beside is not None and (beside[1] in contents.arrays or by_layer(contents.arrays, beside[1])):
        queries = beside[1]
    if queries is not None:
        own = matching(contents.arrays, queries, "queries")
        arrays = {name: x for name, x in contents.arrays.items() if name not in own.values()}
        for i, number in enumerate(sorted(own)):
            arrays[f"query.{i}" if LAYER in queries else "query"] = contents.arrays[own[number]]
        contents = replace(contents, arrays=arrays)
    if keys is values is fused is None:
        return contents
    sides = {"keys": keys, "values": values} if fused is None else {"fused": fused}
    if fused is not None and not keys is values is None:
        raise argument_error("fused", "no pattern beside one of keys or values", brief(fused))
    for argument, pattern in sides.items():
        if pattern is None:
            raise argument_error(argument, "a pattern, as the other side has one", "None")
        found.append(matching(contents.arrays, pattern, argument))
    if found[0].keys() != found[-1].keys():
        missing = min(found[0].keys() ^ found[1].keys())
        wanted = f"the layers of keys, {sorted(found[0])}"
        raise argument_error("values", wanted, f"no layer {missing} in both")
    renamed = {name for side in found for name in side.values()}
    arrays = {name: array for name, array in contents.arrays.items() if name not in renamed}
    names = PAGED_NAMES if fused is None else (CACHE,)
    for name, pattern, side in zip(names, sides.values(), found, strict=True):
        for at, layer in enumerate(sorted(side)):
            arrays[f"{name}.{at}" if LAYER in str(pattern) else name] = contents.arrays[side[layer]]
    if (numbers := sorted(found[0])) != list(range(len(numbers))):
        arrays["layers"] = np.array(numbers)
    return replace(contents, arrays=arrays)


def by_patterns_of_any(sources: Sequence[Any], *patterns: str | None) -> list[Any]:
    """Rename the arrays of the sources that have any of the names; raise if none has, or one has not all."""
    has_names = []
    for source in sources:
        arrays = contents_of(source).arrays
        named = (each in arrays or by_layer(arrays, each) for each in patterns if each is not None)
        has_names.append(any(named))
    return [
        by_patterns(source, *patterns) if has_names[i] or not any(has_names) else source
        for i, source in enumerate(sources)
    ]


def holds_arrays(value: Any) -> bool:
    """Return whether a value is a list of arrays, or of such lists."""
    several = isinstance(value, (list, tuple)) and len(value) > 0
    return several and any(hasattr(each, "shape") or holds_arrays(each) for each in value)
