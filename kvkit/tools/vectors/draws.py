"""Draw the parts of a pack's calls: sizes, random numbers, caches of NaN or random codes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike

from kvkit.checks.values import integer
from kvkit.errors import KvkitError
from kvkit.typed import Array

FP_TYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
NAN = np.nan


class Call(NamedTuple):
    """Holds a call of an operator."""

    operator: str
    inputs: dict[str, Any]
    attributes: dict[str, Any]
    before: dict[str, Any] | None = None  # arguments of an earlier call, which stores past tokens


# {a size: (its field in `Sizes` and in packs, the least)}
SIZES_BY_NAME = {
    "num_kv_heads": ("heads", 1),
    "head_dim": ("dim", 16),
    "page_size": ("page", 1),
    "batch": ("batch", 2),
}


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of the calls of a pack."""

    heads: int = 2  # key heads; there are a few times as many query heads
    dim: int = 16  # elements of a head, a multiple of 16
    page: int = 4  # tokens of a page; contexts end at the end of a page, or one token before or after it
    batch: int = 4  # sequences, at least 2

    @classmethod
    def of(cls, shapes: Mapping[str, int] | None) -> "Sizes":
        """Return the requested sizes, and defaults for the others; raise for unknown or small ones."""
        sizes = {}
        for name, size in (shapes or {}).items():
            if name not in SIZES_BY_NAME:
                raise KvkitError(f"shapes: expected some of {', '.join(SIZES_BY_NAME)}, got {name!r}")
            field, least = SIZES_BY_NAME[name]
            sizes[field] = integer(f"shapes: {name}", size, least)
        if sizes.get("dim", 16) % 16:
            raise KvkitError(f"shapes: head_dim: expected a multiple of 16, got {sizes['dim']}")
        return cls(**sizes)

    def each(self, *lengths: int) -> tuple[int, ...]:
        """Return a length for each sequence by repeating `lengths`."""
        return tuple(int(length) for length in np.resize(lengths, self.batch))


def numbers(
    rng: Generator, shape: tuple[int, ...], dtype: DTypeLike, most: int = 127, group: int = 8
) -> Array:
    """Return random numbers. Some groups of them are ties of codes, zeros, or tiny."""
    x = rng.standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1, group) if x.size % group == 0 else x.reshape(-1, 1)
    style = rng.integers(0, 8, len(flat))
    ties = rng.integers(-2 * most, 2 * most + 1, flat.shape) / 2
    ties[:, 0] = most  # so the scale is 1, and others are halves between two codes
    flat[style == 1] = ties[style == 1]
    flat[style == 2] = 0
    flat[style == 3] *= np.float32(1e-6)
    return x.astype(dtype)


def plain(rng: Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return numbers of a standard normal distribution."""
    return rng.standard_normal(shape).astype(dtype)


def cache_of(
    rng: Generator, layout: str, lengths: Mapping[str, int], dtype: DTypeLike, bits: int, group: int
) -> tuple[Array, Array | None]:
    """Return an unwritten (cache, scale) of a layout, with lengths by axis: NaN, or random codes."""
    shape = [lengths[axis] for axis in layout.split()[:-1]]
    if not bits:
        return np.full((*shape, lengths["c"]), NAN, dtype), None
    codes = rng.integers(-128, 128, (*shape, lengths["c"] * bits // 8)).astype(np.int8)
    return codes, np.full((*shape, lengths["c"] // group), NAN, np.float16)
