"""Surround arrays with memory full of NaN or 0xFF, measure Python's pace, and say how much to try."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

thorough = False  # set by `pytest --thorough`


def budget(count):
    """Return how many of `count` random examples a test tries: all in thorough runs, else a quarter."""
    return count if thorough else -(-count // 4)


def pace():
    """Return the seconds that some plain Python takes, the best of many times."""
    seconds = []
    for _ in range(100):
        begin, found = time.perf_counter(), {}
        for i in range(200):
            found[i & 15] = i, str(i)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def carve(array, offset=0, flip=None, margin=1):
    """Return a strided copy of the array inside a larger buffer of NaNs, and a check of that buffer."""
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
        assert (buffer | inside == 0xFF).all()

    return carved, untouched


class Poison:
    """Makes memory for a test, and checks at its end the parts that nobody may touch."""

    def __init__(self):
        self.checks = []

    def like(self, array):
        """Return an array of the same shape and type, full of 0xFF."""
        return np.full_like(array.view(np.uint8), 0xFF).view(array.dtype)

    def around(self, array, offset=0, flip=None, margin=1):
        """Return a copy of the array amid memory that must not change."""
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


def with_threads(count, call, **more):
    """Return what a call returns in so many threads."""
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        return call(**more)
    finally:
        numba.set_num_threads(before)
