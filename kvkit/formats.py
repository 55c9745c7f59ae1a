"""Every element format as data: what the bytes of a cache, a scale or a tensor mean.

A format has a name, the dtype of the arrays that hold it, and how many elements an array item packs.
Kernels never see a dtype: they are compiled for names.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """An element format: `bits` each, in arrays of `dtype`."""

    name: str
    dtype: np.dtype
    bits: int

    def bytes(self, count):
        """Size of `count` neighbouring elements."""
        return count * self.bits // 8

    def __str__(self):
        return self.name


FLOAT32 = Format("float32", np.dtype(np.float32), 32)
FLOAT16 = Format("float16", np.dtype(np.float16), 16)
BFLOAT16 = Format("bfloat16", np.dtype(ml_dtypes.bfloat16), 16)
INT8 = Format("int8", np.dtype(np.int8), 8)
INT4 = Format("int4", np.dtype(np.int8), 4)  # two's complement nibbles, the even element in the low one


# What only kvkit's own caches store: codes of 2 bits, and unsigned ones, which have minima beside scales.
INT2 = Format("int2", np.dtype(np.uint8), 2)
UINT8 = Format("uint8", np.dtype(np.uint8), 8)
UINT4 = Format("uint4", np.dtype(np.uint8), 4)
UINT2 = Format("uint2", np.dtype(np.uint8), 2)

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
BY_NAME = {fmt.name: fmt for fmt in (*FLOATS, INT8, INT4, INT2, UINT8, UINT4, UINT2)}
BY_DTYPE = {fmt.dtype: fmt for fmt in (*FLOATS, INT8)}
QUANTIZED = {8: INT8, 4: INT4}
QMAX = {"int8": 127, "int4": 7}

# PMX: a scale is at least 1e-5, rounded to the type of the data.
SMALLEST_SCALE = {fmt.name: float(np.float32(1e-5).astype(fmt.dtype)) for fmt in FLOATS}


def mask_bytes(mask):
    """The size of an element of a mask, by the name of its format or "bool"; without one there is no step."""
    return 0 if mask is None else 1 if mask == "bool" else BY_NAME[mask].bytes(1)
