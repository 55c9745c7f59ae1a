"""Describe elements: the number types of caches, scales and tensors, as they lie in memory.

Kernels never see a dtype: they are compiled for names of elements.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Block:
    """Describes a block of ggml: a scale, then codes."""

    elements: int  # how many numbers a block holds
    bytes: int  # the size of the block
    codes_at: int  # the byte offset of the codes
    cell: str  # the element of the scale
    halves: bool = False  # whether byte i holds code i (low nibble) and code i + 16, not 2 i and 2 i + 1
    bias: int = 0  # stored code - code: 8 if codes -8..7 are stored as 0..15


@dataclass(frozen=True)
class Element:
    """Describes a number type, which takes `bits` bits in arrays of `dtype`.

    `widen` and `narrow` name the formulas in `formulas/numeric.py` that convert bits to float32 and back.
    """

    name: str
    dtype: np.dtype[Any]
    bits: int
    significant: int = 0  # bits of a float's significand, with the implicit leading 1; 0 for codes
    limits: tuple[float, float] = (0, 0)  # the least and the largest code or number
    widen: str = ""
    narrow: str = ""
    numbers: tuple[float, ...] = ()  # the number that stored bits 0, 1, 2, ... stand for, if they are listed
    block: Any = None  # a `Block`, for codes that lie in blocks, each with its scale

    def bytes(self, count: int) -> int:
        """Return the bytes of `count` neighbouring elements, which fill whole blocks if there are blocks."""
        if self.block:
            return int(count // self.block.elements * self.block.bytes)
        return count * self.bits // 8

    @cached_property
    def minifloat(self) -> bool:
        """Return whether the element is a float of 8 bits."""
        return self.bits == 8 and self.significant > 0

    @property
    def symmetric(self) -> bool:
        """Return whether codes are signed and have only a scale. Unsigned codes also have a minimum."""
        return self.limits[0] < 0

    @cached_property
    def word(self) -> np.dtype[Any]:
        """Return the dtype of a float's bits, or of the byte that holds a code."""
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
        return ((codes ^ sign) - sign).astype(np.float32)  # two's complement: 15 of 4 bits is -1

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
# Nibbles in two's complement; the low nibble of a byte holds the element of even index.
INT4 = Element("int4", np.dtype(np.int8), 4, limits=(-7, 7), widen="low_nibble")

# Codes that only kvkit's caches with state store, in the same order.
INT2 = Element("int2", np.dtype(np.uint8), 2, limits=(-1, 1))
UINT8 = Element("uint8", np.dtype(np.uint8), 8, limits=(0, 255))
UINT4 = Element("uint4", np.dtype(np.uint8), 4, limits=(0, 15))
UINT2 = Element("uint2", np.dtype(np.uint8), 2, limits=(0, 3))

# Floats of 8 bits. e4m3 has no infinity. Numbers that are too large saturate in both; NaN stays NaN.
E4M3 = Element("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 8, 4, (-448, 448), "e4m3_to_float", "float_to_e4m3")
E5M2 = Element(
    "e5m2", np.dtype(ml_dtypes.float8_e5m2), 8, 3, (-57344, 57344), "e5m2_to_float", "float_to_e5m2"
)

# Blocks of ggml: a scale of 16 bits, then 32 codes.
BYTE = np.dtype(np.uint8)
Q8_0 = Element("q8_0", BYTE, 8, limits=(-127, 127), block=Block(32, bytes=34, codes_at=2, cell="float16"))
Q4_0_BLOCK = Block(32, bytes=18, codes_at=2, cell="float16", halves=True, bias=8)
Q4_0 = Element("q4_0", BYTE, 4, limits=(-8, 7), block=Q4_0_BLOCK)

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
FLOATS8 = (E4M3, E5M2)
BLOCKS = (Q8_0, Q4_0)
INTEGERS = (INT8, INT4, INT2, UINT8, UINT4, UINT2)
BY_NAME = {element.name: element for element in (*FLOATS, *INTEGERS, *FLOATS8, *BLOCKS)}
BY_DTYPE = {element.dtype: element for element in (*FLOATS, INT8)}
CODES = {(element.bits, element.symmetric): element for element in INTEGERS}
QUANTIZED = {8: INT8, 4: INT4}  # the codes that operators store, by quant_bit
STORED = {element.name: element for element in (*FLOATS8, *BLOCKS)}  # other stored elements, by quant_format
MASKS = {"float32": 1, "float16": 2, "bfloat16": 3, "bool": 4}  # the number of a mask's type in kernels


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype of numpy or ml_dtypes is a float of any width, so that it may have NaN."""
    return dtype.name.removeprefix("b").startswith(("float", "complex"))


def coarser(name: str, other: str) -> bool:
    """Return whether one float format, by its name, has fewer significant bits than another."""
    return BY_NAME[name].significant < BY_NAME[other].significant


def mask_bytes(mask: str | None) -> int:
    """Return the bytes of one element of a mask of this format (or "bool"); 0 for None."""
    return 0 if mask is None else 1 if mask == "bool" else BY_NAME[mask].bytes(1)
