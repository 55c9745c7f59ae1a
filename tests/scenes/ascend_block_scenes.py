"""Make caches in blocks, and calls that operators on blocks refuse."""

import numpy as np
from ascend_scenes import random_heads

from kvkit.tools.vectors.pools import store

INT64_MAX, INT64_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min
NO_BLOCK = [-1, -2, 100, 2**31, INT64_MAX, INT64_MIN]


def caches_of(rng, dtypes, cache_format, blocks, rows):
    heads, dims = random_heads(rng, cache_format, *dtypes)
    call = store(rng, dtypes, np.zeros(0, np.int64), blocks, rows, heads, dims, cache_format)
    return [call["key_cache"], call["value_cache"]][: len(dtypes)]
