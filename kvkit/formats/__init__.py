"""What the bytes of a cache mean: elements, and formats, which are codes with scales in a place.

elements    one number: float32, int8, e4m3, ..., which kernels are compiled for
named       every format that kvkit or an engine writes, as data
scales      how engines find a group's scale
packing     codes of a few bits in bytes, and the parts of blocks
coding      encode and decode, with numpy
rotations   of rows on their way into a cache, of queries and outputs
"""

from kvkit.formats.coding import decode, encode
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
from kvkit.formats.named import NAMED, Format, named
from kvkit.formats.rotations import ROTATIONS, Rotation, rotate, rotation_named

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
]
