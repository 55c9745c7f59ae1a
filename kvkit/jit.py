"""Every jit option of kvkit, and the folder where compiled code is kept.

Numba's own ``cache=True`` looks at one source file only and goes stale when a helper in another file
changes. Here a compiled function is filed under a digest of every file of the package that its module
imports, directly or not, in a folder for this numba, llvmlite, Python and CPU: an edit of what it can come
from, an upgrade or another machine leads to new code.
"""

import functools
import hashlib
import pickle
import re
import sys
import types
import uuid

import llvmlite.binding
import numba
import numpy as np
from numba.core import ccallback, compiler, serialize
from numba.core.caching import _Cache
from numba.core.registry import cpu_target

from kvkit import kept, sources, turns, waiting

KEPT: list = []  # callbacks: kernels know only their addresses, so their code must outlive every variable
STATE = 8  # letters of the digest of its sources in the name of a file
OPTIONS = {"error_model": "numpy", "boundscheck": False}


def shared(function):
    """A scalar formula that kernels of both targets inline: no signature, no fastmath."""
    return numba.njit(inline="always", **OPTIONS)(function)


def helper(function):
    """A function that only CPU kernels call; its code becomes part of theirs."""
    return numba.njit(**OPTIONS)(own_name(function))


def own_name(function):
    """The function, under a name for its machine code that no other process gives.

    Numba counts functions to tell namesakes apart, in each process from one. Code from the folder was
    compiled by several processes, and the linker takes two symbols of one name for one function.
    """
    named = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    named.__qualname__ = f"{function.__qualname__}.{uuid.uuid4().hex}"
    return named


def kernel(function, signature, key=(), parallel=False):
    """Compile `function` for `signature` (or load it) into something Python calls.

    `key` names what the function closes over: with the signature it tells its variants apart.
    """
    turns.begin()
    folder = Folder(function, key)
    dispatcher = numba.njit(parallel=parallel, nogil=True, **OPTIONS)(own_name(function))
    dispatcher._cache = folder
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return dispatcher


def callback(function, signature, key=()):
    """Compile `function` (or load it) into machine code that kernels call by its address."""
    turns.begin()
    folder, signature = Folder(function, key), numba.core.sigutils.normalize_signature(signature)
    code = ccallback.CFunc(own_name(function), signature, {}, dict(OPTIONS))
    code._cache = folder  # type: ignore[attr-defined]
    code.compile()
    KEPT.append(code)
    return code


class Folder(_Cache):
    """Numba's cache protocol over one file per compiled variant; a missing or odd file is just a miss."""

    def __init__(self, function, key):
        self.module, self.key = function.__module__, repr(key)
        self.function = f"{self.module}.{function.__qualname__}"
        self.name = re.sub(r"(\W|<locals>)+", "-", self.function)

    @property
    def cache_path(self):
        return str(cache_folder())

    def _file(self, signature):
        """The file of a variant; None if none is kept."""
        source = sources.digest(self.module)
        if cache_folder() is None or source is None:
            return None
        variant = hashlib.sha256(f"{signature} {self.key} {source}".encode()).hexdigest()[:20]
        return cache_folder() / f"{self.name}-{source[:STATE]}-{variant}.bin"

    def load_overload(self, signature, target_context):
        file = self._file(signature)
        payload = kept.load(file) if file else None
        if payload is None:
            waiting.tell(self.function, llvmlite.binding.get_host_cpu_name())
            return None
        target_context.refresh()
        try:
            return compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception:
            return None

    def save_overload(self, signature, result):
        file = self._file(signature)
        if file and sources.digest_of(self.module, sources.texts()) == sources.digest(self.module):
            kept.save(file, serialize.dumps(result._reduce()))

    def enable(self):
        pass

    disable = flush = enable


@functools.cache
def cache_folder():
    """Where this process keeps compiled code; None if it keeps none."""
    root = kept.root()
    return root / fingerprint() if root and sources.IMPORTED is not None else None


@functools.cache
def fingerprint():
    """Of everything but sources that decides what machine code the package compiles to."""
    config = numba.config
    settings = (
        config.OPT,
        config.LOOP_VECTORIZE,
        config.SLP_VECTORIZE,
        config.BOUNDSCHECK,
        config.DEBUGINFO_DEFAULT,
    )
    versions = kept.FORM, numba.__version__, llvmlite.__version__, np.__version__, sys.version
    target = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((versions, settings, target)).encode()).hexdigest()[:20]
