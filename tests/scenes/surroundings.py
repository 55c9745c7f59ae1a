"""What tests run amid: memory that is filled with NaN or 0xFF around arrays, and the pace of Python."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def pace():
    """Seconds that some plain Python takes, the best of many times."""
    seconds = []
    for _ in range(100):
        begin, found = time.perf_counter(), {}
        for i in range(200):
            found[i & 15] = i, str(i)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def carve(array, offset=0, flip=None, margin=1):
    """A strided view of the array's contents inside a larger buffer of NaNs, and a check of that buffer."""
    big = tuple(size + 2 * margin for size in array.shape)
    inner = (slice(margin, -margin),) * array.ndim
    count = int(np.prod(big)) * array.itemsize

    def view(buffer):
        part = buffer[offset : offset + count].view(array.dtype).reshape(big)[inner]
        return part if flip is None else np.flip(part, flip)

    buffer, inside = np.full(count + offset + 64, 0xFF, np.uint8), np.zeros(count + offset + 64, np.uint8)
    carved = view(buffer)
    carved[...] = array
    view(inside).view(np.uint8)[...] = 0xFF

    def untouched():
        assert (buffer[inside == 0] == 0xFF).all()

    return carved, untouched


class Poison:
    """Makes such memory for a test, and knows what nobody may have touched when it ends."""

    def __init__(self):
        self.checks = []

    def like(self, array):
        """An array of the same shape and type in which no element has been written."""
        return np.full_like(array.view(np.uint8), 0xFF).view(array.dtype)

    def around(self, array, offset=0, flip=None, margin=1):
        """The array's contents amid memory that must not change."""
        carved, untouched = carve(array, offset, flip, margin)
        self.checks.append(untouched)
        return carved

    def check(self):
        for untouched in self.checks:
            untouched()


def in_threads(work, count):
    """Call work(0), work(1), ... in threads that take turns often; raise what any of them raised."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            calls = [pool.submit(work, i) for i in range(count)]
        for call in calls:
            call.result()
    finally:
        sys.setswitchinterval(interval)
