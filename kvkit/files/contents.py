"""Hold the contents of a file of any kind, and name the arrays of nested lists."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkit.files.description import Description
from kvkit.typed import Array

CACHE = "cache"
BESIDE = {  # {name of an array that belongs to codes in a file: its name in `kvkit.formats.encode`}
    "scale": "scale", "minimum": "minimum", "zero": "zero", "whole": "whole",
    "scales": "scale", "minima": "minimum",
}  # fmt: skip


@dataclass(frozen=True)
class Contents:
    """Holds the arrays of a file by name, with its metadata and description.

    A cache is the array ``cache``, or ``cache.I`` and ``cache.I.J`` if its layout has lists of arrays, or the
    layers that `Cache.save` wrote.
    """

    arrays: dict[str, Array]
    metadata: dict[str, Any]
    mapped: os.stat_result | None = None  # status of the file, if arrays may be mapped from it
    kind: str = ".npz"
    description: Description = field(default_factory=Description)
    notes: tuple[str, ...] = ()  # facts for the user

    @property
    def cache(self) -> Any:
        """Return the cache, an array or the nested lists of its layout; None if there is none."""
        if (cache := nested(self.arrays)) is not None:
            return cache
        saved = {name for name in self.arrays if name.startswith("layers.")}
        pairs = [[f"layers.{i}.{side}" for side in ("keys", "values")] for i in range(len(saved) // 2)]
        if saved and saved == {name for pair in pairs for name in pair}:
            return [[self.arrays[name] for name in pair] for pair in pairs]
        return None


def notes_in(metadata: dict[str, Any]) -> tuple[str, ...]:
    """Return the notes that a file of kvkit copied from the file it was converted from."""
    notes = metadata.get("notes")
    return tuple(map(str, notes)) if isinstance(notes, list) else ()


def name_arrays(source: Any, name: str = CACHE) -> dict[str, Any]:
    """Return {name: array} for an array or nested lists: ``cache``, ``cache.I``, ``cache.I.J`` and so on."""
    if not isinstance(source, (list, tuple)):
        return {name: source}
    return {k: v for i, each in enumerate(source) for k, v in name_arrays(each, f"{name}.{i}").items()}


def nested(arrays: Mapping[str, Any], name: str = CACHE) -> Any:
    """Return the array of a name, or the nested lists of NAME.I, NAME.I.J; None if numbers have gaps.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.files import nested
    >>> nested({"cache.0": np.ones(2), "cache.1": np.ones(3)})
    [array([1., 1.]), array([1., 1., 1.])]
    """
    if name in arrays:
        return arrays[name]
    begin = f"{name}."
    heads = {key[len(begin) :].partition(".")[0] for key in arrays if key.startswith(begin)}
    heads = {head for head in heads if head.isascii() and head.isdecimal()}
    if heads != {str(i) for i in range(len(heads))} or not heads:
        return None
    members = [nested(arrays, f"{begin}{i}") for i in range(len(heads))]
    return None if any(member is None for member in members) else members


def flat(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name: array}, where nested lists of arrays become NAME.I, NAME.I.J and so on.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.files import flat
    >>> sorted(flat({"cache": [np.ones(2), np.ones(3)], "tokens": np.arange(5)}))
    ['cache.0', 'cache.1', 'tokens']
    """
    return {key: each for name, source in arrays.items() for key, each in name_arrays(source, name).items()}
