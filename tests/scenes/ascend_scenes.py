"""Make random legal calls of Ascend's operators, and compare them with the reference byte by byte."""

import backends
import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import strategies as st

from kvkit.reference import ascend as oracle
from kvkit.reference.ascend import KVHEAD_ROPE
from kvkit.tools.vectors import pools
from kvkit.tools.vectors.draws import any_bytes

reshape_and_cache = backends.operators.ascend.reshape_and_cache
FLOATS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
FLOATS["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
DTYPES = FLOATS | {"int8": np.dtype(np.int8)}
ARRAYS = "key", "value", "key_cache", "value_cache", "slot_mapping"
DIMS = (1, 2, 3, 7, 8, 16, 17, 31, 32, 40, 64, 96, 129)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
dtypes_of = st.sampled_from(list(DTYPES.values()))
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)


def finite(rng, shape, dtype):
    """Return random bit patterns but those of NaN and infinities."""
    array = any_bytes(rng, shape, dtype)
    if array.dtype != np.int8:
        with np.errstate(invalid="ignore"):  # signalling NaN
            array[~np.isfinite(array)] = -0.0
    return array


class Memory:
    """Places an array in larger memory: axes in any order, gaps between elements, forwards or backwards."""

    def __init__(self, rng, array):
        self.dtype, self.shape = array.dtype, array.shape
        self.order, self.offset = rng.permutation(array.ndim), int(rng.integers(0, 8))
        self.steps = rng.choice([1, 1, 1, 2, -1], array.ndim)
        self.inner = rng.random() < 0.5  # the last axis stays innermost and in one piece
        if self.inner:
            last = array.ndim - 1
            self.order = np.append(self.order[self.order != last], last)
            self.steps[last] = 1
        self.big = [abs(step) * size + 2 for step, size in zip(self.steps, self.shape, strict=True)]
        if self.inner and rng.random() < 0.5:
            self.big = [abs(step) * size for step, size in zip(self.steps, self.shape, strict=True)]
        self.bytes = rng.integers(
            0, 256, self.offset + int(np.prod(self.big)) * self.dtype.itemsize, np.uint8
        )
        self.view[...] = array

    @property
    def view(self):
        sizes = [self.big[axis] for axis in self.order]
        count = int(np.prod(sizes)) * self.dtype.itemsize
        whole = self.bytes[self.offset : self.offset + count].view(self.dtype).reshape(sizes)
        whole = whole.transpose(np.argsort(self.order))
        where = zip(self.steps, self.shape, self.big, strict=True)
        parts = [slice(big - size * abs(s), None, abs(s)) for s, size, big in where]
        return whole[tuple(parts)][tuple(slice(None, None, int(np.sign(s))) for s in self.steps)]

    def copy(self):
        other = object.__new__(Memory)
        other.__dict__.update(self.__dict__, bytes=self.bytes.copy())
        return other


def check(rng, key, value, key_cache, value_cache, slots, **keywords):
    """Check that kvkit changes memories as the loops do, returns the caches it got, and changes no input."""
    given = [None if array is None else Memory(rng, array) for array in (key, value, key_cache, value_cache)]
    after = [memory and memory.copy() for memory in given]
    oracle.reshape_and_cache(*(memory and memory.view for memory in after), slots, **keywords)
    views = [memory and memory.view for memory in given]
    indices = {name: keywords.pop(name, None) for name in ("wins", "seq_lens", "offset_index")}
    indices["slot_mapping"] = slots
    indices = {name: index_array(rng, index) for name, index in indices.items() if index is not None}
    before = {name: index.copy() for name, index in indices.items()}
    results = reshape_and_cache(*views, **indices, **keywords)
    assert results[0] is views[2]
    assert results[1] is views[3]
    for memory, expected in zip(given, after, strict=True):
        assert memory is expected or np.array_equal(memory.bytes, expected.bytes)
    for name, index in before.items():
        assert np.array_equal(indices[name], index)


def index_array(rng, numbers):
    """Return numbers as int32 or int64, contiguous or not."""
    array = np.array(numbers, np.int64)
    fits = np.array_equal(array, array.astype(np.int32))
    array = array.astype(np.int32) if fits and rng.random() < 0.5 else array
    return np.repeat(array, 2, 0)[::2] if rng.random() < 0.5 else array


def random_slots(rng, tokens, capacity):
    """Return different slots in runs that ascend, and some negative ones."""
    slots = rng.permutation(capacity)[:tokens]
    if rng.random() < 0.5:
        slots = np.sort(slots)
    if rng.random() < 0.5:
        slots = np.arange(tokens) + rng.integers(0, capacity - tokens + 1)
    hidden = rng.random(tokens) < rng.choice([0, 0.2, 1], p=[0.5, 0.4, 0.1])
    slots[hidden] = rng.choice([-1, -2, -capacity, -(2**31), -(2**63)], hidden.sum())
    return slots


def random_heads(rng, cache_format, *dtypes):
    """Return (heads, a head size for each type)."""
    if cache_format == "ND":
        heads = int(rng.integers(1, 5))
        return heads, [int(rng.choice(DIMS)) for _ in dtypes]
    heads = int(rng.choice([1, 2, 3, 4, 8]))
    groups = [32 // dtype.itemsize for dtype in dtypes]
    return heads, [group // np.gcd(group, heads) * int(rng.integers(1, 4)) for group in groups]


def plain_call(rng, dtypes, cache_format="ND"):
    heads, dims = random_heads(rng, cache_format, *dtypes)
    blocks, rows = int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 5, 16, 37]))
    slots = random_slots(rng, int(rng.integers(0, min(blocks * rows, 50) + 1)), blocks * rows)
    return (*pools.store(rng, dtypes, slots, blocks, rows, heads, dims, cache_format).inputs.values(),)


def compressed_call(rng, dtype, mode, count=2, empty_window="copy"):
    heads, dim = int(rng.integers(1, 5)), int(rng.choice([32, 64, 96]))
    seq_lens, rows = rng.integers(1, 10, int(rng.integers(0, 4))), int(rng.integers(1, 6))
    draw = finite if mode == KVHEAD_ROPE else any_bytes
    call = pools.store_compressed(rng, dtype, mode, seq_lens, rows, heads, dim, count, empty_window, draw)
    arrays = [call.inputs.pop(name) for name in ARRAYS]
    return arrays, call.inputs | call.attributes


needs_two = pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
