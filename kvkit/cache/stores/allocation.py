"""Allocate the arrays of layers: in memory, or in files that the system pages in and out."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import functools
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.errors import argument_error, describe
from kvkit.files.paths import name_in_errors
from kvkit.runtime import arrays
from kvkit.typed import Array, FilePath

Allocate = Callable[[tuple[int, ...], Any], Array]  # f(shape, dtype) -> an array of zeros
in_memory: Allocate = arrays.zeros
UNSUPPORTED = errno.EOPNOTSUPP, errno.EINVAL  # by a disk that cannot reserve space


class InFiles:
    """Allocates arrays in files of a folder. A file has no name, so nothing is left of it after its array."""

    def __init__(self, folder: FilePath) -> None:
        if os.name == "nt":
            raise argument_error("offload", "a system that can map files without names", "Windows")
        if not isinstance(folder, (str, os.PathLike)):
            raise argument_error("offload", "a folder for the files of the cache", describe(folder))
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Array:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if not size:
            return np.zeros(shape, dtype)
        with name_in_errors(self.folder), tempfile.TemporaryFile(dir=self.folder) as file:
            reserve_space(file.fileno(), size)
            return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), size))

    def __reduce__(self) -> Any:  # a copy of a layer lies in memory
        return memory_allocator, ()


def memory_allocator() -> Allocate:
    """Return `in_memory`, for copies of layers."""
    return in_memory


def copy_of(array: Array, allocate: Allocate) -> Array:
    """Return a copy of an array in one from `allocate`."""
    copied = allocate(array.shape, array.dtype)
    copied[...] = array
    return copied


def reserve_space(file: int, size: int) -> None:
    """Reserve a new file's disk space, because writing to a mapping on a full disk kills the process."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    zeros = memoryview(bytes(2**20))
    while size:
        size -= os.write(file, zeros[:size])


def mapping_of(array: Array) -> mmap.mmap | None:
    """Return the mapping of the file that an array lies in; None in memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def prefetch(sides: Iterable[Array]) -> None:
    """Ask the system to load the files of arrays in the background."""
    mapped = [array for array in sides if array.size and mapping_of(array) is not None]
    if mapped and hasattr(mmap, "MADV_WILLNEED"):
        prefetch_thread().submit(load_pages, mapped)


def load_pages(mapped: Iterable[Array]) -> None:
    """Ask the system to load the pages of mapped arrays. `mmap.madvise` would hold Python's lock."""
    for array in mapped:
        first, end = (arrays.address(array) + offset for offset in arrays.byte_span(array))
        begin = first - first % mmap.PAGESIZE
        libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_WILLNEED)


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library."""
    return ctypes.CDLL(None)


@functools.cache
def prefetch_thread() -> concurrent.futures.ThreadPoolExecutor:
    """Return the thread that prefetches."""
    return concurrent.futures.ThreadPoolExecutor(1, "kvkit-prefetch")


def flush(sides: Iterable[Array]) -> None:
    """Write arrays in files to the disk."""
    for mapping in {
        id(mapping): mapping for mapping in map(mapping_of, sides) if mapping is not None
    }.values():
        mapping.flush()
