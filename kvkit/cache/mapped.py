"""A layer in a memory-mapped file, with a JSON sidecar that says which one and what it holds.

The file holds keys, then values, each [B, Hkv, capacity, D]. The sidecar says of which kind the layer is, and
its state: the numbers that say which rows hold which tokens. Rows are written first, then the state, in one
write; a larger store is a new file, which counts when its sidecar has replaced the old one. So a process may
end at any moment.
"""

import concurrent.futures
import contextlib
import functools
import json
import mmap
import os
import sys
import weakref

import numpy as np

from kvkit.cache import kinds
from kvkit.cache.store import Store

VERSION = 1
PAGE = 4096  # where values begin in a file; no file is smaller
STATE = "length", "oldest", "begin", "origin", "record_past"
NUMBER = 20  # characters of a number in a state, so that a later one fits in its place


class MappedStore(Store):
    """Keys and values in a mapped file. Rows that count are never written again."""

    in_place = False

    def __init__(self, geometry, capacity, home, path, new=True):
        self.home, self.path, self.sidecar, self.loading = home, path, -1, False
        self.file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0))
        weakref.finalize(self, os.close, self.file)
        batch, heads, key_dim, value_dim, fmt = geometry
        key_bytes, value_bytes = (batch * heads * capacity * fmt.bytes(dim) for dim in (key_dim, value_dim))
        self.values_at = -(-key_bytes // PAGE) * PAGE
        self.size = max(self.values_at + value_bytes, PAGE)
        try:
            if new:
                allocate(self.file, self.size)
            self.memory = mmap.mmap(self.file, self.size)
        except BaseException:
            if new:
                path.unlink()
            raise
        super().__init__(geometry, capacity)

    def _arrays(self):
        batch, heads, key_dim, value_dim, fmt = self.geometry
        shape = batch, heads, self.capacity
        keys = np.ndarray((*shape, key_dim), fmt.dtype, self.memory)
        return keys, np.ndarray((*shape, value_dim), fmt.dtype, self.memory, self.values_at)

    def commit(self, layer):
        numbers = layer._length, layer._oldest, layer._begin, layer._origin, layer.record_past
        text = ", ".join(f'"{name}": {number:{NUMBER}d}' for name, number in zip(STATE, numbers, strict=True))
        text = f"{{{text}}}}}\n"
        if self.sidecar < 0:
            self.home.accept(self, text)
        else:
            os.lseek(self.sidecar, self.state_at, os.SEEK_SET)
            os.write(self.sidecar, text.encode())

    def know_sidecar(self, sidecar, state_at):
        """Say by descriptor which sidecar counts this file, and where in it the state is."""
        self.sidecar, self.state_at = sidecar, state_at
        weakref.finalize(self, os.close, sidecar)

    def close(self):
        """Delete the file, and what says that it counts."""
        if self.sidecar >= 0:
            self.home.say_empty()
        self.path.unlink()

    def flush(self):
        self.memory.flush()
        os.fsync(self.sidecar)

    def prefetch(self, rows):
        """Let the system read the first rows into memory, in the background."""
        if not self.loading and hasattr(os, "posix_fadvise"):
            self.loading = True
            background().submit(self.load, rows)

    def load(self, rows):
        with contextlib.suppress(OSError):
            for array, start in ((self.keys, 0), (self.values, self.values_at)):
                head, length = array.strides[1], rows * array.strides[2]
                for i in range(array.shape[0] * array.shape[1]):
                    os.posix_fadvise(self.file, start + i * head, length, os.POSIX_FADV_WILLNEED)
        self.loading = False


@functools.cache
def background():
    return concurrent.futures.ThreadPoolExecutor(1, "kvkit-prefetch")


def allocate(file, size):
    """Make room on the disk now: a mapping that finds none later ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    zeros = memoryview(bytes(2**20))
    while size:
        size -= os.write(file, zeros[:size])


class Home:
    """Where a layer's files lie; called for a new store."""

    def __init__(self, folder, number, layer):
        self.folder, self.number, self.about = folder, number, kinds.described(layer)
        self.sidecar = folder / f"layer-{number:03}.json"
        self.generation, self.current = 0, None

    def __call__(self, geometry, capacity):
        self.generation += 1
        return MappedStore(geometry, capacity, self, self.path())

    def path(self):
        return self.folder / f"layer-{self.number:03}-{self.generation}.raw"

    def accept(self, store, state):
        """Let a store's file be the layer's; the one before it goes."""
        batch, heads, key_dim, value_dim, fmt = store.geometry
        text = self.text(
            generation=self.generation,
            dtype=fmt.name,
            byteorder=sys.byteorder,
            keys=[batch, heads, store.capacity, key_dim],
            values=[batch, heads, store.capacity, value_dim],
        )
        text = text.removesuffix("}") + ', "state": '
        store.know_sidecar(put(self.sidecar, text + state), len(text))
        before, self.current = self.current, store
        if before is not None:
            before.path.unlink()

    def text(self, **more):
        return json.dumps({"version": VERSION, **self.about, **more})

    def say_empty(self, **more):
        """Say that the layer has no file."""
        os.close(put(self.sidecar, self.text(**more) + "\n"))
        self.current = None


def put(path, text):
    """Write a small file, or replace it in one step; its descriptor."""
    temporary = path.with_suffix(".new")
    file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.write(file, text.encode())
        os.replace(temporary, path)
    except BaseException:
        os.close(file)
        temporary.unlink(missing_ok=True)
        raise
    return file
