"""Describe a cache in a file: the layout of its bytes, and the rotation of its keys.

Arrays do not show which of two layouts of equal shapes they have, or whether keys are rotated. So a file that
kvkit writes contains this description, as JSON under the name ``description``. Fields that are None are left
out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvkit.errors import brief
from kvkit.files.errors import file_error
from kvkit.typed import FilePath

SIZED = "l", "b", "n", "h", "c", "v", "s"  # that `sizes` may have: see `kvkit.layouts`
CHOICES = {"rope_pairs": ("halves", "interleaved"), "rotation": ("none", "hadamard"), "lse_base": ("e", "2")}
LONGEST_TEXT = 2000  # the most characters of a line or a name


@dataclass(frozen=True)
class Description:
    """Describes the cache in a file. Fields that the file leaves open are None.

    Parameters
    ----------
    layout : str, optional
        A line such as ``"l | kv b n h c"``, or a name of `kvkit.layouts.NAMED`.
    sizes : mapping
        Lengths of the axes l, b, n, h and c of the layout, and of v, the content of values, if it differs.
    format : str, optional
        The format of the elements, a name of `kvkit.formats`.
    tables : str, optional
        The convention of the file's page tables.
    rope_applied : bool, optional
        Whether rotary embedding is already applied to keys.
    rope_base : float, optional
        The base of the rotary embedding's angles (theta).
    rope_pairs : {"halves", "interleaved"}, optional
        Which two elements of a head the rotary embedding rotates as a pair.
    rotation : {"none", "hadamard"}, optional
        A rotation of the heads that does not depend on positions (see `kvkit.formats.rotate`).
    rotation_blocks : (int, int), optional
        The sizes of the blocks of `rotation`, for keys and for values.
    lse_base : {"e", "2"}, optional
        The base of log-sum-exps in the file.
    rope_dim : int, optional
        How many elements of a head, from the first, rotary embedding rotates; by default all.

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
        """Return the fields that are not None, as values that JSON can hold."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["sizes"] = dict(self.sizes) or None
        if self.rotation_blocks is not None:
            values["rotation_blocks"] = list(self.rotation_blocks)
        return {name: value for name, value in values.items() if value is not None}


def parse_description(path: FilePath, stored: Any) -> Description:
    """Return the `Description` that a file stores as JSON, an empty one for None; raise if it is illegal."""
    if stored is None:
        return Description()
    if not isinstance(stored, dict):
        raise file_error(path, "its description is no object")
    names = {entry.name for entry in fields(Description)}
    for name, value in stored.items():
        if name not in names:
            what = f"its description has {brief(name)}, which kvkit does not know"
            raise file_error(path, what, "update kvkit")
        if not is_legal(name, value):
            raise file_error(path, f"its description says that {name} is {brief(repr(value))}")
    blocks = stored.get("rotation_blocks")
    return Description(**stored | {"rotation_blocks": tuple(blocks) if blocks else None})


def is_legal(name: str, value: Any) -> bool:
    """Return whether a field of the description may have this value."""
    if name in CHOICES:
        return value in CHOICES[name]
    if name == "sizes":
        return isinstance(value, dict) and all(axis in SIZED and is_size(n) for axis, n in value.items())
    if name == "rotation_blocks":
        return isinstance(value, list) and len(value) == 2 and all(map(is_size, value))
    if name == "rope_dim":
        return is_size(value)
    if name == "rope_applied":
        return isinstance(value, bool)
    if name == "rope_base":
        return type(value) in (int, float) and 0 < value < math.inf
    return isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable()


def is_size(value: object) -> bool:
    """Return whether a value can be the size of an axis."""
    return type(value) is int and 0 <= value < 2**63
