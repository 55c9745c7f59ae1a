"""A pool that reuses the memory of freed result arrays, because new pages must be cleared by the system.

The pool keeps at most 512 MB. Set KVKIT_RESULT_POOL_BYTES to change this; 0 turns it off.
"""

import ctypes
import itertools
import math
import os
import weakref
from collections import deque

import numpy as np

SMALLEST = 2**20  # bytes of a result below which the allocator keeps memory itself
ALIGNED = 64
VARIABLES = "KVKIT_RESULT_POOL_BYTES", "KVKIT_SPARE_BYTES"  # the second is the name of version 0.1


class ResultPool:
    """At most `most` bytes that were results, and the results that live.

    Nothing is locked: results die in any thread, and within any of these lines. Each step on a deque or a
    dict is one for all threads.
    """

    def __init__(self, most):
        self.most, self._numbers = most, itertools.count()
        self._free: deque[np.ndarray] = deque()
        self._lent: dict[int, tuple] = {}

    def empty(self, shape, dtype):
        """As `numpy.empty`: an array that does not own its memory, which comes back with its last view."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if not SMALLEST <= size <= self.most:
            return np.empty(shape, dtype)
        memory = self._fitting(size)
        begin, number = -memory.ctypes.data % ALIGNED, next(self._numbers)
        owner = (ctypes.c_char * size).from_buffer(memory, begin)
        self._lent[number] = memory, weakref.ref(owner, lambda _: self._back(number))
        return np.ndarray(shape, dtype, owner)

    def kept(self):
        """Bytes that wait for a result."""
        return sum(memory.size for memory in tuple(self._free))

    def _fitting(self, size):
        """Memory for so many bytes: what came back last first, and not much more than is asked for."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another thread has it
                break
            if size + ALIGNED <= memory.size <= size + size // 4 + ALIGNED:
                return memory
            self._free.appendleft(memory)
        step = 2 ** (size.bit_length() - 4)  # contexts grow
        rounded = (size // step + 1) * step + ALIGNED
        try:
            return np.empty(rounded, np.uint8)
        except MemoryError:
            self._free.clear()
            return np.empty(rounded, np.uint8)

    def _back(self, number):
        memory, _ = self._lent.pop(number)
        self._free.append(memory)
        try:
            while self.kept() > self.most:
                self._free.popleft()
        except IndexError:  # another thread has taken all
            pass


def pool_bytes() -> int:
    """Return how many bytes the environment lets the pool keep."""
    return int(next((os.environ[name] for name in VARIABLES if name in os.environ), 2**29))


empty = ResultPool(pool_bytes()).empty


def zeros(shape, dtype):
    """As `numpy.zeros`, from the beginning of a cache line on: numpy's own begin 16 bytes behind one."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNED, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % ALIGNED)
