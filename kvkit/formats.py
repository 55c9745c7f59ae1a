"""Every element format as data: what the bytes of a cache, a scale or a tensor mean.

Kernels never see a dtype: they are compiled for names, and whatever decides their code stands here.
"""

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """An element format: `bits` each, in arrays of `dtype`.

    `widen` and `narrow` name the formulas of `numeric.py` from an element's word to a number and back.
    """

    name: str
    dtype: np.dtype
    bits: int
    significant: int = 0  # bits of a float's significand
    limits: tuple[int, int] = (0, 0)  # the least and the largest code
    widen: str = ""
    narrow: str = ""

    def bytes(self, count):
        """Size of `count` neighbouring elements."""
        return count * self.bits // 8

    @property
    def symmetric(self):
        """Whether codes have a scale alone; unsigned ones have a minimum beside it."""
        return self.limits[0] < 0

    @cached_property
    def word(self):
        """The dtype of an element's bits, or of the byte that a code is in."""
        return np.dtype(f"u{self.dtype.itemsize}") if self.significant else self.dtype

    @cached_property
    def smallest_scale(self):
        """PMX: a scale is at least 1e-5, rounded to the type of the data."""
        return float(np.float32(1e-5).astype(self.dtype))

    def __str__(self):
        return self.name


FLOAT32 = Format("float32", np.dtype(np.float32), 32, 24, widen="float_of", narrow="bits_of")
FLOAT16 = Format("float16", np.dtype(np.float16), 16, 11, widen="half_to_float", narrow="float_to_half")
BFLOAT16 = Format(
    "bfloat16", np.dtype(ml_dtypes.bfloat16), 16, 8, widen="bfloat16_to_float", narrow="float_to_bfloat16"
)
INT8 = Format("int8", np.dtype(np.int8), 8, limits=(-127, 127), widen="as_it_is")
# Two's complement nibbles, the even element in the low one.
INT4 = Format("int4", np.dtype(np.int8), 4, limits=(-7, 7), widen="low_nibble")

# What only kvkit's own caches store: codes of 2 bits, and unsigned ones.
INT2 = Format("int2", np.dtype(np.uint8), 2, limits=(-1, 1))
UINT8 = Format("uint8", np.dtype(np.uint8), 8, limits=(0, 255))
UINT4 = Format("uint4", np.dtype(np.uint8), 4, limits=(0, 15))
UINT2 = Format("uint2", np.dtype(np.uint8), 2, limits=(0, 3))

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
BY_NAME = {fmt.name: fmt for fmt in (*FLOATS, INT8, INT4, INT2, UINT8, UINT4, UINT2)}
BY_DTYPE = {fmt.dtype: fmt for fmt in (*FLOATS, INT8)}
CODES = {(fmt.bits, fmt.symmetric): fmt for fmt in (INT8, INT4, INT2, UINT8, UINT4, UINT2)}
QUANTIZED = {8: INT8, 4: INT4}  # the codes that operators store, by quant_bit
MASKS = {name: number for number, name in enumerate((*map(str, FLOATS), "bool"), 1)}  # as kernels know them


def coarser(one, other):
    """Whether rounding to a float format, by name, loses bits that another one keeps."""
    return BY_NAME[one].significant < BY_NAME[other].significant


def mask_bytes(mask):
    """The size of an element of a mask, by the name of its format or "bool"; without one there is no step."""
    return 0 if mask is None else 1 if mask == "bool" else BY_NAME[mask].bytes(1)
