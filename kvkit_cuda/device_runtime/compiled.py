"""Compiled kernels on disk, in the folder of compiled code and by its rules (see `kvkit.runtime.disk_cache`).

A kernel's file name is a digest of all that its code depends on: the sources that its module imports, its
signature and key, the compute capability, and the versions of numba-cuda and NVIDIA's libraries.
"""

import functools
import hashlib
import pickle
import re
from pathlib import Path

import numba
import numpy as np

from kvkit.runtime import disk_cache, source_digest

LIBRARIES = "nvvm", "nvJitLink"  # compiler and linker
counts = {"loaded": 0, "compiled": 0}  # kernels of this process


class Folder:
    """A kernel's cache with the interface that numba-cuda expects; an invalid file counts as a miss."""

    cache_path = None

    def __init__(self, function, key, capability):
        self.module, self.key = function.__module__, (key, capability)
        self.name = re.sub(r"(\W|<locals>)+", "-", f"{self.module}.{function.__qualname__}")

    def file(self, signature):
        """Return the file of a kernel; None if none is kept."""
        there, source = folder(), source_digest.digest(self.module)
        if there is None or source is None:
            return None
        variant = hashlib.sha256(f"{signature} {self.key} {source}".encode()).hexdigest()[:20]
        return there / f"{self.name}-{variant}.bin"

    def load_overload(self, signature, _):
        file = self.file(signature)
        payload = disk_cache.load(file) if file else None
        try:
            kernel = pickle.loads(payload) if payload else None
        except Exception:
            return None
        counts["loaded" if kernel else "compiled"] += 1
        return kernel

    def save_overload(self, signature, kernel):
        file = self.file(signature)
        if file and source_digest.digest_of(
            self.module, source_digest.read_sources()
        ) == source_digest.digest(self.module):
            disk_cache.save(file, pickle.dumps(kernel))

    def flush(self):
        pass


def folder():
    """Return the folder of compiled kernels; None if none are kept."""
    root = disk_cache.root_folder()
    return root and root / fingerprint()


@functools.cache
def fingerprint():
    """Return a digest of the versions and libraries that compiled kernels depend on."""
    import numba_cuda
    from cuda.bindings import nvjitlink

    versions = disk_cache.FORM, numba.__version__, numba_cuda.__version__, np.__version__, nvjitlink.version()
    return hashlib.sha256(repr((versions, *map(library, LIBRARIES))).encode()).hexdigest()[:20]


def library(name):
    """Return the path, size and modification time of a library."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = Path(load_nvidia_dynamic_lib(name).abs_path)
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns
