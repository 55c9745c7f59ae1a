"""Compiled kernels on disk, in the folder of compiled code and by its rules (see `kvkit.runtime.disk_cache`).

A kernel's file name is a digest of all that its code depends on: the sources that its module imports, its
signature and key, the compute capability, and the versions of numba-cuda and NVIDIA's libraries.
"""

import functools
import hashlib
import pickle
import re

import numba
import numpy as np

from kvkit.runtime import disk_cache, source_digest

LIBRARIES = "nvvm", "nvJitLink"  # compiler and linker
HEAD = 2**16  # bytes at the beginning of an ELF file, where its notes are
BUILD_ID = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"  # name of 4 bytes, 20 bytes follow, NT_GNU_BUILD_ID
counts = {"loaded": 0, "compiled": 0}  # kernels of this process


class Folder:
    """A kernel's cache with the interface that numba-cuda expects; an invalid file counts as a miss."""

    cache_path = None

    def __init__(self, function, key, capability):
        self.module, self.key = function.__module__, (key, capability)
        self.name = re.sub(r"(\W|<locals>)+", "-", f"{self.module}.{function.__qualname__}")

    def file(self, signature):
        """Return the path of a kernel's file; None if kernels are not kept."""
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
            kernel = None
        counts["loaded" if kernel else "compiled"] += 1
        return kernel

    def save_overload(self, signature, kernel):
        file = self.file(signature)
        now = source_digest.digest_of(self.module, source_digest.read_sources())
        if file and now == source_digest.digest(self.module):  # sources have not changed since they were read
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

    versions = (
        disk_cache.FILE_VERSION,
        numba.__version__,
        numba_cuda.__version__,
        np.__version__,
        nvjitlink.version(),
    )
    return hashlib.sha256(repr((versions, *map(library, LIBRARIES))).encode()).hexdigest()[:20]


def library(name):
    """Return the build ID of a library, which does not depend on where or when it is installed."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return build_id(load_nvidia_dynamic_lib(name).abs_path)


def build_id(path):
    """Return the build ID that a linker wrote near a library's beginning, else a digest of its contents."""
    with open(path, "rb") as file:
        _, note, after = file.read(HEAD).partition(BUILD_ID)
        file.seek(0)
        return after[:20].hex() if note else hashlib.file_digest(file, "sha256").hexdigest()
