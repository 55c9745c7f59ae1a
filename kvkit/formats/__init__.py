"""Say what the bytes of a cache mean: elements, and formats, which are codes with scales.

elements    single numbers, such as float32, int8 and e4m3, for which kernels are compiled
known       a table of every format that kvkit or an engine writes
scales      rules that find a group's scale
packing     pack codes of a few bits into bytes, and the parts of blocks
coding      encode and decode with numpy
rotations   rotate rows before they are stored, and queries and outputs to match
schemes     find formats and your own classes by name, for `study` and caches
"""

import importlib
from typing import TYPE_CHECKING, Any

from kvkit.formats.elements import (
    BFLOAT16,
    BY_DTYPE,
    BY_NAME,
    CODES,
    FLOAT16,
    FLOAT32,
    FLOATS,
    INT4,
    INT8,
    MASKS,
    QUANTIZED,
    Element,
    coarser,
    mask_bytes,
)

if TYPE_CHECKING:
    from kvkit.formats import packing as packing
    from kvkit.formats.coding import decode as decode
    from kvkit.formats.coding import encode as encode
    from kvkit.formats.known import NAMED as NAMED
    from kvkit.formats.known import Format as Format
    from kvkit.formats.known import named as named
    from kvkit.formats.rotations import ROTATIONS as ROTATIONS
    from kvkit.formats.rotations import Rotation as Rotation
    from kvkit.formats.rotations import rotate as rotate
    from kvkit.formats.rotations import rotation_named as rotation_named
    from kvkit.formats.schemes import scheme as scheme

__all__ = [
    "BFLOAT16",
    "BY_DTYPE",
    "BY_NAME",
    "CODES",
    "FLOAT16",
    "FLOAT32",
    "FLOATS",
    "INT4",
    "INT8",
    "MASKS",
    "NAMED",
    "QUANTIZED",
    "ROTATIONS",
    "Element",
    "Format",
    "Rotation",
    "coarser",
    "decode",
    "encode",
    "mask_bytes",
    "named",
    "rotate",
    "rotation_named",
    "scheme",
]
# What operators do not need is loaded when it is first used.
ROOMS = {
    **dict.fromkeys(("decode", "encode"), "coding"),
    **dict.fromkeys(("NAMED", "Format", "named"), "known"),
    **dict.fromkeys(("ROTATIONS", "Rotation", "rotate", "rotation_named"), "rotations"),
    "scheme": "schemes",
}


def __getattr__(name: str) -> Any:
    if name == "packing":
        return importlib.import_module("kvkit.formats.packing")
    if name in ROOMS:
        return getattr(importlib.import_module(f"kvkit.formats.{ROOMS[name]}"), name)
    raise AttributeError(f"module 'kvkit.formats' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
