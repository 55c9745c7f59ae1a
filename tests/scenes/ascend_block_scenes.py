"""Make caches in blocks, and calls that operators on blocks refuse."""

import numpy as np
from ascend_scenes import any_bits, random_heads

INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min
NO_BLOCK = [-1, -2, 100, 2**31, INT64_MAX, INT64_MIN]


def caches_of(rng, dtypes, cache_format, blocks, rows):
    heads, dims = random_heads(rng, cache_format, *dtypes)
    caches = []
    for dtype, dim in zip(dtypes, dims, strict=True):
        size = dtype.itemsize
        nz = (blocks, heads * dim * size // 32, rows, 32 // size)
        caches.append(any_bits(rng, nz if cache_format == "NZ" else (blocks, rows, heads, dim), dtype))
    return caches
