"""Draw the parts of random calls: sizes, types, numbers, and what a call must not look at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.random import Generator

from kvkit.checks.values import integer
from kvkit.errors import KvkitError
from kvkit.reference.cache import LARGEST_CODE
from kvkit.typed import Array

FP_TYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
DTYPES = FP_TYPES | {"int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8)}
NAN = np.nan
ANY_INDEX = np.array([-1, 2**63 - 1, -(2**63), 2**40])  # entries of index tensors that nothing may read
NOT_FINITE = np.array([np.nan, np.inf, -np.inf], np.float32)


@dataclass
class Call:
    """Holds a call of an operator, which has a name."""

    name: str
    inputs: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]


@dataclass(frozen=True)
class Formats:
    """Holds the types of a call of PMX by name: of tokens (T1), of the cache (T2), of scales (T3)."""

    t1: str
    t2: str
    t3: str = ""
    bit: int = 0
    group: int = 8


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


def dtype_of(name: Any) -> np.dtype[Any]:
    """Return the dtype of a name of `DTYPES`, or of what numpy knows."""
    return np.dtype(DTYPES.get(name, name))


def normal(rng: Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return numbers of a standard normal distribution."""
    return rng.standard_normal(shape).astype(dtype_of(dtype))


def numbers(
    rng: Generator, shape: tuple[int, ...], dtype: np.dtype[Any], group: int = 1, top: float | None = None,
    most: int = 127,
) -> Array:  # fmt: skip
    """Return numbers up to `top`; each group is normal, zeros, ties of codes, subnormal, or of any size."""
    if dtype.kind in "iu":
        return any_bytes(rng, shape, dtype)
    info = ml_dtypes.finfo(dtype)
    top = float(info.max) if top is None else top
    x = rng.standard_normal((int(np.prod(shape)) // group, group))
    style = rng.integers(0, 8, len(x))
    x[style == 1] = 0
    ties = rng.integers(-2 * most, 2 * most + 1, x.shape) / 2
    ties[:, rng.integers(group)] = most  # so the scale is a power of two, and others are halves between codes
    ties *= 2.0 ** rng.integers(-9, np.clip(np.log2(top / most) + 1, -8, 9), (len(x), 1))  # up to `top`
    x[style == 2] = ties[style == 2]
    x[style == 3] = rng.integers(-3, 4, x.shape)[style == 3] * float(info.smallest_subnormal)
    x[style == 4] = (rng.uniform(-1, 1, x.shape) * top)[style == 4]
    x[style == 5] *= 2.0 ** rng.integers(-20, 12, x.shape)[style == 5]
    x[rng.random(x.shape) < 0.05] = -0.0
    return np.clip(x, -top, top).reshape(shape).astype(np.float32).astype(dtype)


def any_bytes(rng: Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return elements of any bits."""
    size = int(np.prod(shape)) * dtype_of(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype_of(dtype)).reshape(shape)


def poison(rng: Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return contents that nothing may read: NaN and infinities, or any bytes."""
    if dtype_of(dtype).itemsize == 1:
        return any_bytes(rng, shape, dtype)
    return rng.choice(NOT_FINITE, shape).astype(dtype_of(dtype))


def block_table(rng: Generator, lengths: Any, page: int, dtype: type = np.int64) -> tuple[Array, Array]:
    """Return (a table [B, M] of scattered blocks, which rows [blocks, page] hold a token).

    Some sequences begin with full blocks of another one; two blocks or more are of no sequence. Entries after
    the last block of a sequence are any numbers.
    """
    counts = -(-np.asarray(lengths, np.int64) // page)
    ids, columns = rng.permutation(counts.sum() + 2), counts.max(initial=0) + rng.integers(0, 3)
    end = np.iinfo(dtype)
    unread = np.clip([len(ids), *ANY_INDEX], end.min, end.max)
    table: Array = rng.choice(unread, (len(counts), columns)).astype(dtype)
    used = np.zeros((len(ids), page), bool)
    for b, (row, length, count) in enumerate(zip(table, lengths, counts, strict=True)):
        other = rng.integers(3 * b + 1)  # the sequence that shares its blocks, or none
        shared = min(length, lengths[other]) // page if other < b else 0
        row[:shared] = table[other, :shared] if shared else 0
        row[shared:count], ids = ids[: count - shared], ids[count - shared :]
        at = np.arange(length)
        used[row[at // page], at % page] = True
    return table, used


def tokens(rng: Generator, formats: Formats, shape: tuple[int, ...], usual: bool = False) -> Array:
    """Return new tokens: numbers of any size whose scales are finite in T3, or no larger than a code."""
    most = LARGEST_CODE.get(formats.bit, 127)
    if formats.t1 == "int8":
        return any_bytes(rng, shape, np.int8)
    top = float(most if usual else ml_dtypes.finfo(DTYPES[formats.t1]).max)
    if formats.t3 == "fp16":  # 0 times infinity would be NaN
        top = min(top, 60000.0 * most)
    return numbers(rng, shape, DTYPES[formats.t1], formats.group if formats.bit else 1, top, most)


def rows_and_scales(
    rng: Generator, formats: Formats, shape: tuple[int, ...], usual: bool
) -> tuple[Array, Array | None]:
    """Return (rows of a cache, their scales) for tokens of a shape; two codes of four bits share a byte.

    `usual` ones are of a size about 1, as models write them; others are of any size, or any bytes.
    """
    scale_shape, dtype = (*shape[:-1], shape[-1] // formats.group), DTYPES[formats.t2]
    if not usual:
        rows = numbers(rng, (*shape[:-1], shape[-1] // 2 if formats.bit == 4 else shape[-1]), dtype)
        return rows, numbers(rng, scale_shape, DTYPES[formats.t3]) if formats.bit else None
    if not formats.bit:
        return normal(rng, shape, dtype), None
    most = LARGEST_CODE[formats.bit]
    codes = np.clip(np.rint(rng.standard_normal(shape) * most / 3), -most, most).astype(np.int8)
    if formats.bit == 4:
        codes = ((codes[..., ::2] & 15) | (codes[..., 1::2] << 4)).view(dtype)
    return codes, (rng.uniform(1, 4, scale_shape) / most).astype(DTYPES[formats.t3])
