"""The memory of arrays: their addresses, and a pool of freed results.

New pages must be cleared by the system, so results of 1 MB and more reuse the memory of freed ones. The pool
keeps at most 512 MB. Set KVKIT_RESULT_POOL_BYTES to change this; 0 turns it off.
"""

import ctypes
import itertools
import math
import os
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy import ndarray
from numpy.typing import DTypeLike

Name = TypeVar("Name")
DATA = object.__basicsize__  # numpy's PyArrayObject is a Python object's header, then the data pointer
# This process's memory as words, to read pointers from.
MEMORY: Any = (ctypes.c_int64 * 2**59).from_address(0)
SMALLEST = 2**20  # bytes of a pooled result; the allocator reuses smaller ones itself
ALIGNED = 64  # bytes of a cache line
VARIABLES = "KVKIT_RESULT_POOL_BYTES", "KVKIT_SPARE_BYTES"  # the second is the name of version 0.1


def address(array: Any) -> int:
    """Return the address of an array's data, faster than `array.ctypes.data` does."""
    word: int = MEMORY[id(array) + DATA >> 3]
    return word


def addresses_of(arrays: Iterable[Any]) -> list[int]:
    """Return the addresses of arrays, 0 for None."""
    return [0 if array is None else MEMORY[id(array) + DATA >> 3] for array in arrays]


def byte_span(array: ndarray) -> tuple[int, int]:
    """Return the range of byte offsets of an array's elements, relative to its address."""
    if array.flags.c_contiguous:  # also without elements
        return 0, array.nbytes
    if not array.size:
        return 0, 0
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    return sum(min(0, far) for far in reach), sum(max(0, far) for far in reach) + array.itemsize


def overlap_distances(
    arrays: Mapping[Name, ndarray], places: Any, written: Collection[Name]
) -> list[tuple[Name, Name, int, int, int]]:
    """Return (one, other, least, most, checked) for each pair of which one array is `written`.

    A later call has other addresses. Its arrays may overlap if the distance from `one` to `other` lies
    between `least` and `most`. The distance `checked` is always allowed: arrays of these shapes and strides
    had it at the addresses `places[name]`, where they were checked not to overlap, although their spans may
    (halves of one pool).
    """
    spans = {name: (places[name], *byte_span(array)) for name, array in arrays.items()}
    return [
        (one, other, low - other_high, high - other_low, other_place - place)
        for i, (one, (place, low, high)) in enumerate(spans.items()) if one in written
        for j, (other, (other_place, other_low, other_high)) in enumerate(spans.items())
        if i > j or (i < j and other not in written)  # each pair once
    ]  # fmt: skip


class ResultPool:
    """Keeps at most `most` bytes of freed result arrays, and knows the arrays in use.

    It has no lock, because an array can die in any thread and between any two lines below. Each operation on
    a deque or a dict is atomic.
    """

    def __init__(self, most: int) -> None:
        self.most, self._numbers = most, itertools.count()
        self._free: deque[np.ndarray] = deque()
        self._in_use: dict[int, tuple] = {}

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Return an array like `numpy.empty` does; its memory returns to the pool when its last view dies."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if not SMALLEST <= size <= self.most:
            return np.empty(shape, dtype)
        memory = self._take(size)
        begin, number = -memory.ctypes.data % ALIGNED, next(self._numbers)
        owner = (ctypes.c_char * size).from_buffer(memory, begin)  # type: ignore[arg-type]
        self._in_use[number] = memory, weakref.ref(owner, lambda _: self._give_back(number))
        return np.ndarray(shape, dtype, owner)  # type: ignore[arg-type]

    def free_bytes(self) -> int:
        """Return the bytes of freed memory in the pool."""
        return sum(memory.size for memory in tuple(self._free))

    def _take(self, size: int) -> np.ndarray:
        """Return memory of `size` bytes or more: freed memory that is at most a quarter larger, or new."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another thread took it
                break
            if size + ALIGNED <= memory.size <= size + size // 4 + ALIGNED:
                return memory
            self._free.appendleft(memory)
        step = 2 ** (size.bit_length() - 4)  # sizes are rounded up, because contexts grow
        rounded = (size // step + 1) * step + ALIGNED
        try:
            return np.empty(rounded, np.uint8)
        except MemoryError:
            self._free.clear()
            return np.empty(rounded, np.uint8)

    def _give_back(self, number: int) -> None:
        """Free the memory of a dead array, and drop the oldest memory beyond the limit."""
        memory, _ = self._in_use.pop(number)
        self._free.append(memory)
        try:
            while self.free_bytes() > self.most:
                self._free.popleft()
        except IndexError:  # another thread took the rest
            pass


def pool_bytes() -> int:
    """Return how many bytes the environment lets the pool keep."""
    return int(next((os.environ[name] for name in VARIABLES if name in os.environ), 2**29))


empty_result = ResultPool(pool_bytes()).empty


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return zeros that begin at a cache line; numpy's own often begin 16 bytes after one."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNED, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % ALIGNED)
