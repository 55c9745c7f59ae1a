"""Make patterns of bits of float32, and apply functions of numbers to arrays."""

import ml_dtypes
import numba
import numpy as np

PATTERNS = np.arange(2**16, dtype=np.uint16)


def mapped(function, dtype):
    """Return a compiled function that applies a helper to each element of an array."""

    @numba.njit
    def loop(values, results):
        for i in range(len(values)):
            results[i] = function(values[i])

    def run(values):
        results = np.empty(len(values), dtype)
        loop(values, results)
        return results

    return run


def float32_patterns(dtype):
    """Return narrow numbers, midpoints between them, and float32 numbers one and two steps around both."""
    info = ml_dtypes.finfo(dtype)
    ordered = PATTERNS[: 1 + int(np.array(info.max).view(np.uint16))].view(dtype).astype(np.float64)
    halfway = (ordered + np.append(ordered[1:], 2 * ordered[-1] - ordered[-2])) / 2
    near = np.concatenate([ordered, halfway]).astype(np.float32).view(np.uint32)
    near = np.concatenate([near.view(np.int32) + step for step in (-2, -1, 0, 1, 2)]).view(np.uint32)
    random = np.random.default_rng(1).integers(0, 2**32, 200_000, np.uint32)
    special = [0, 1, 2, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    patterns = np.concatenate([near, random, np.array(special, np.uint32)])
    return np.concatenate([patterns, patterns ^ np.uint32(1 << 31)]).view(np.float32)
