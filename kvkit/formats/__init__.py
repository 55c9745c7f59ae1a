"""Define what the bytes of a cache mean: elements, and formats, which are codes with scales.

elements    single numbers, such as float32, int8 and e4m3, for which kernels are compiled
known       a table of every format that kvkit or an engine writes
scales      rules that find a group's scale
packing     pack codes of a few bits into bytes, and parts into blocks
coding      encode and decode with numpy
rotations   rotate rows before they are stored, and queries and outputs to match
mixes       parse the text that names formats of layers and sides
schemes     resolve names of formats and of registered classes, for `study` and caches
"""

from typing import TYPE_CHECKING

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
from kvkit.runtime.lazy_imports import lazy_names

if TYPE_CHECKING:
    from kvkit.formats import packing as packing
    from kvkit.formats.coding import decode, encode
    from kvkit.formats.known import NAMED, Format, named
    from kvkit.formats.rotations import ROTATIONS, Rotation, rotate, rotation_named
    from kvkit.formats.schemes import scheme

__all__ = [
    "BFLOAT16", "BY_DTYPE", "BY_NAME", "CODES", "FLOAT16", "FLOAT32", "FLOATS", "INT4", "INT8", "MASKS",
    "NAMED", "QUANTIZED", "ROTATIONS", "Element", "Format", "Rotation", "coarser", "decode", "encode",
    "mask_bytes", "named", "rotate", "rotation_named", "scheme",
]  # fmt: skip
# Names that operators do not need are imported on first use.
MODULES = {
    **dict.fromkeys(("decode", "encode"), "kvkit.formats.coding"),
    **dict.fromkeys(("NAMED", "Format", "named"), "kvkit.formats.known"),
    **dict.fromkeys(("ROTATIONS", "Rotation", "rotate", "rotation_named"), "kvkit.formats.rotations"),
    "scheme": "kvkit.formats.schemes",
    "packing": "kvkit.formats.packing",
}
__getattr__, __dir__ = lazy_names(__name__, MODULES, __all__)
