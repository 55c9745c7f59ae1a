"""Describe a cache in a file: the layout of its bytes, and the rotation of its keys.

Bytes do not show which of two layouts of equal shapes they have, or whether keys are rotated. So every file
that kvkit writes contains this description, as JSON under the name ``description``, without unknown fields.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvkit.errors import brief
from kvkit.files.errors import file_error
from kvkit.typed import FilePath

AXES = "l", "b", "n", "h", "c", "v", "s"
CHOICES = {"rope_pairs": ("halves", "interleaved"), "rotation": ("none", "hadamard"), "lse_base": ("e", "2")}
LONGEST = 2000  # the most characters of a line or a name


@dataclass(frozen=True)
class Description:
    """A file's description of a cache; unknown fields are None.

    Parameters
    ----------
    layout : str, optional
        A line such as ``"l | kv b n h c"``, or a name that `kvkit.layouts` knows.
    sizes : mapping
        Lengths of the axes l, b, n, h and c of that line, and of v if the content of values has another size.
    format : str, optional
        The format of the elements, a name of `kvkit.formats`.
    tables : str, optional
        The convention of the file's page tables, a name of `kvkit.layouts`.
    rope_applied : bool, optional
        Whether keys are already rotated by their positions.
    rope_base : float, optional
        The base of that rotation's angles.
    rope_pairs : {"halves", "interleaved"}, optional
        Which two elements of a head rotate as a pair.
    rotation : {"none", "hadamard"}, optional
        Another rotation of the heads (see `kvkit.formats.rotate`).
    rotation_blocks : (int, int), optional
        The sizes of that rotation's blocks for keys and for values.
    lse_base : {"e", "2"}, optional
        The base of log-sum-exps in the file.
    rope_dim : int, optional
        How many first elements of a head rotate; by default all.

    Examples
    --------
    >>> from kvkit.files import Description
    >>> Description("l kv | b h n c", {"h": 3}, rope_applied=True).to_dict()
    {'layout': 'l kv | b h n c', 'sizes': {'h': 3}, 'rope_applied': True}
    """

    layout: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    format: str | None = None
    tables: str | None = None
    rope_applied: bool | None = None
    rope_base: float | None = None
    rope_pairs: str | None = None
    rotation: str | None = None
    rotation_blocks: tuple[int, int] | None = None
    lse_base: str | None = None
    rope_dim: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the known fields as values that JSON can hold."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        found["sizes"] = dict(self.sizes) or None
        if self.rotation_blocks is not None:
            found["rotation_blocks"] = list(self.rotation_blocks)
        return {name: value for name, value in found.items() if value is not None}


def parse_description(path: FilePath, found: Any) -> Description:
    """Return the description in a file, if any; raise if it is illegal."""
    if found is None:
        return Description()
    if not isinstance(found, dict):
        raise file_error(path, "its description is no object")
    known = {entry.name for entry in fields(Description)}
    for name, value in found.items():
        if name not in known:
            raise file_error(
                path, f"its description has {brief(name)}, which kvkit does not know", "update kvkit"
            )
        if not is_legal(name, value):
            raise file_error(path, f"its description says that {name} is {brief(repr(value))}")
    blocks = found.get("rotation_blocks")
    return Description(**found | {"rotation_blocks": tuple(blocks) if blocks else None})


def is_legal(name: str, value: Any) -> bool:
    """Return whether a value is legal for a field of the description."""
    if name in CHOICES:
        return value in CHOICES[name]
    if name == "sizes":
        return isinstance(value, dict) and all(axis in AXES and is_size(size) for axis, size in value.items())
    if name == "rotation_blocks":
        return isinstance(value, list) and len(value) == 2 and all(map(is_size, value))
    if name == "rope_dim":
        return is_size(value)
    if name == "rope_applied":
        return isinstance(value, bool)
    if name == "rope_base":
        return type(value) in (int, float) and 0 < value < math.inf
    return isinstance(value, str) and len(value) <= LONGEST and value.isprintable()


def is_size(value: object) -> bool:
    """Return whether a value is a number of elements."""
    return type(value) is int and 0 <= value < 2**63
