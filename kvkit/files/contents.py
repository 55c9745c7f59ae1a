"""The contents of a file of any kind."""

import os
from dataclasses import dataclass, field
from typing import Any

from kvkit.files.arrays import find_cache
from kvkit.files.description import Description
from kvkit.typed import Array


@dataclass(frozen=True)
class Contents:
    """The arrays of a file by name, with its metadata and description.

    A cache is the array ``cache``, or ``cache.I`` and ``cache.I.J`` if its layout has lists of arrays.
    """

    arrays: dict[str, Array]
    metadata: dict[str, Any]
    mapped: os.stat_result | None = None  # status of the file, if arrays may be mapped
    kind: str = ".npz"
    description: Description = field(default_factory=Description)
    notes: tuple[str, ...] = ()  # facts for the user

    @property
    def cache(self) -> Any:
        """Return the cache, as an array or nested lists of its layout; None if there is none."""
        return find_cache(self.arrays)


def notes_in(metadata: dict[str, Any]) -> tuple[str, ...]:
    """Return the notes that a file of kvkit took over from its source file."""
    notes = metadata.get("notes")
    return tuple(map(str, notes)) if isinstance(notes, list) else ()
