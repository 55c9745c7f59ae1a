"""Describe elements, the single numbers of caches, scales and tensors, as they lie in memory.

Kernels never see a dtype: they are compiled for the names of elements, whose fields decide their code.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Block:
    """A block of ggml: a scale, then the codes of `elements` elements, in `bytes` bytes."""

    elements: int
    bytes: int
    codes_at: int
    cell: str  # the element of the scale, which comes first
    halves: bool = False  # low nibbles hold the first half of the elements, high ones the second
    less: int = 0  # this offset is added to codes before they are stored: half of their range, or 0


@dataclass(frozen=True)
class Element:
    """A kind of number that takes `bits` bits, in arrays of `dtype`.

    `widen` and `narrow` name the formulas of `numeric.py` from an element's word to a number and back.
    """

    name: str
    dtype: np.dtype[Any]
    bits: int
    significant: int = 0  # bits of a float's significand
    limits: tuple[float, float] = (0, 0)  # the least and the largest code or number
    widen: str = ""
    narrow: str = ""
    numbers: tuple[float, ...] = ()  # the number of each code, if no rule computes it
    block: Any = None  # a `Block`, if codes lie beside their scale

    def bytes(self, count: int) -> int:
        """Return the bytes of `count` neighbouring elements; of blocks they must be whole blocks."""
        if self.block:
            return int(count // self.block.elements * self.block.bytes)
        return count * self.bits // 8

    @property
    def minifloat(self) -> bool:
        """Return whether it is a float of 8 bits."""
        return self.bits == 8 and self.significant > 0

    @property
    def symmetric(self) -> bool:
        """Return whether codes have only a scale; unsigned codes have a minimum, too."""
        return self.limits[0] < 0

    @cached_property
    def word(self) -> np.dtype[Any]:
        """Return the dtype of an element's bits, or of the byte that a code is in."""
        return np.dtype(f"u{self.dtype.itemsize}") if self.significant else self.dtype

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """Return the number of each code of up to 8 bits, float32 [2^bits]."""
        codes = np.arange(1 << self.bits)
        if self.numbers:
            return np.array(self.numbers, np.float32)
        if self.significant:
            return codes.astype(np.uint8).view(self.dtype).astype(np.float32)
        sign = 1 << self.bits - 1 if self.symmetric else 0
        return ((codes ^ sign) - sign).astype(np.float32)

    @cached_property
    def smallest_scale(self) -> float:
        """Return PMX's smallest scale: 1e-5, rounded to the type of the data."""
        return float(np.float32(1e-5).astype(self.dtype))

    def __str__(self) -> str:
        return self.name


FLOAT32 = Element("float32", np.dtype(np.float32), 32, 24, widen="float_of", narrow="bits_of")
FLOAT16 = Element("float16", np.dtype(np.float16), 16, 11, widen="half_to_float", narrow="float_to_half")
BFLOAT16 = Element(
    "bfloat16", np.dtype(ml_dtypes.bfloat16), 16, 8, widen="bfloat16_to_float", narrow="float_to_bfloat16"
)
INT8 = Element("int8", np.dtype(np.int8), 8, limits=(-127, 127), widen="int8_to_float")
# Two's complement nibbles, the even element in the low one.
INT4 = Element("int4", np.dtype(np.int8), 4, limits=(-7, 7), widen="low_nibble")

# What only kvkit's own caches store: codes of 2 bits, and unsigned ones.
INT2 = Element("int2", np.dtype(np.uint8), 2, limits=(-1, 1))
UINT8 = Element("uint8", np.dtype(np.uint8), 8, limits=(0, 255))
UINT4 = Element("uint4", np.dtype(np.uint8), 4, limits=(0, 15))
UINT2 = Element("uint2", np.dtype(np.uint8), 2, limits=(0, 3))

# Floats of 8 bits. No number of e4m3 is infinite; what is too large saturates in both, NaN stays NaN.
E4M3 = Element("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 8, 4, (-448, 448), "e4m3_to_float", "float_to_e4m3")
E5M2 = Element(
    "e5m2", np.dtype(ml_dtypes.float8_e5m2), 8, 3, (-57344, 57344), "e5m2_to_float", "float_to_e5m2"
)

# Blocks of ggml: a scale of 16 bits, then 32 codes.
BYTE = np.dtype(np.uint8)
Q8_0 = Element("q8_0", BYTE, 8, limits=(-127, 127), block=Block(32, 34, 2, "float16"))
Q4_0 = Element("q4_0", BYTE, 4, limits=(-8, 7), block=Block(32, 18, 2, "float16", halves=True, less=8))

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
FLOATS8 = (E4M3, E5M2)
BLOCKS = (Q8_0, Q4_0)
BY_NAME = {one.name: one for one in (*FLOATS, INT8, INT4, INT2, UINT8, UINT4, UINT2, *FLOATS8, *BLOCKS)}
BY_DTYPE = {one.dtype: one for one in (*FLOATS, INT8)}
CODES = {(one.bits, one.symmetric): one for one in (INT8, INT4, INT2, UINT8, UINT4, UINT2)}
QUANTIZED = {8: INT8, 4: INT4}  # the codes that operators store, by quant_bit
STORED = {one.name: one for one in (*FLOATS8, *BLOCKS)}  # other stored elements, by quant_format
MASKS = {name: number for number, name in enumerate((*map(str, FLOATS), "bool"), 1)}  # as kernels number them


def coarser(one: str, other: str) -> bool:
    """Return whether rounding to a float format, by name, loses bits that another one keeps."""
    return BY_NAME[one].significant < BY_NAME[other].significant


def mask_bytes(mask: str | None) -> int:
    """Return the bytes of an element of a mask, by the name of its format or "bool"; 0 without a mask."""
    return 0 if mask is None else 1 if mask == "bool" else BY_NAME[mask].bytes(1)
