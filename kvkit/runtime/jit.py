"""Compile functions with Numba, and keep their machine code on disk.

Numba's own ``cache=True`` looks at one source file only and goes stale when a helper in another file changes.
Here code is filed under a digest of every file of the package that its module imports, directly or not, in a
folder for this numba, llvmlite, Python and CPU. An edit, an upgrade or another machine leads to new code.
"""

import ctypes
import functools
import hashlib
import pickle
import re
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import ccallback, compiler
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.typing.ctypes_utils import to_ctypes

from kvkit.runtime import disk_cache, lazy_imports, locks, notices, numba_068, source_digest
from kvkit.runtime.arrays import address as address

Function = Callable[..., Any]
Integers = Any  # int64 where an address says, as kernels index them
INDEX = numba.types.CPointer(numba.types.int64)  # where int64 lie
LIVE_CODE: list["Code"] = []  # kernels know callbacks by address only: their code must outlive every variable
STATE = 8  # letters of the digest of its sources in the name of a file
OPTIONS = {"error_model": "numpy", "boundscheck": False}


def shared(function: Function) -> Any:
    """Compile a scalar formula that kernels of both targets inline: no signature, no fastmath."""
    return numba.njit(inline="always", **OPTIONS)(function)


def helper(function: Function) -> Any:
    """Compile a function that only CPU kernels call; its code becomes part of theirs."""
    named, options = with_own_name(function), OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    if numba_068.is_known():
        return numba_068.inlined_helper(named, options)
    return numba.njit(**options)(named)


def with_own_name(function: Function) -> Function:
    """Return the function under a name for its machine code that no other process gives.

    Numba counts functions to tell namesakes apart, in each process from one. Code on disk was compiled by
    several processes, and the linker takes two symbols of one name for one function.
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


def callback(function: Any, signature: Any, key: Any = (), parallel: bool = False) -> "Code":
    """Compile a function, or load it, as machine code that kernels call by its address.

    `key` names the variables that the function closes over. With the signature it tells its variants apart.
    """
    locks.refuse_after_fork()
    options = OPTIONS | {"parallel": True} if parallel else OPTIONS
    if parallel:
        numba.get_num_threads()  # starts them: the code calls their functions by name
    signature = numba.core.sigutils.normalize_signature(signature)
    file = cached_file(function, signature, (key, parallel))
    code = load_code(file, signature)
    if code is None:
        notices.compiling(full_name(function), llvm.get_host_cpu_name())
        code = compile_code(with_own_name(function), signature, options)
        save_code(file, function.__module__, code)
    LIVE_CODE.append(code)
    return code


def compile_code(function: Function, signature: Any, options: dict[str, Any]) -> "Code":
    """Compile a function now."""
    pipeline = numba_068.KernelCompiler if numba_068.is_known() else compiler.Compiler
    kernel = ccallback.CFunc(function, signature, {}, dict(options), pipeline)
    with lazy_imports.gc_paused():
        kernel.compile()
    return Code(kernel.native_name, kernel._library, signature)  # type: ignore[attr-defined]


class Code:
    """Machine code in a library of Numba's."""

    def __init__(self, name: str, library: Any, signature: Any) -> None:
        self.name, self.library, self.signature = name, library, signature
        self.address: int = library.get_pointer_to_function(name)

    @functools.cached_property
    def ctypes(self) -> Any:
        """The code as a function for Python, which lets other threads run meanwhile."""
        arguments, result = self.signature
        return ctypes.CFUNCTYPE(*map(ctypes_type, (result, *arguments)))(self.address)


def ctypes_type(kind: Any) -> Any:
    """Return the type by which ctypes passes one of Numba's: a pointer as an address."""
    return ctypes.c_void_p if isinstance(kind, numba.types.CPointer) else to_ctypes(kind)


def full_name(function: Function) -> str:
    """Return the module and name of a function."""
    return f"{function.__module__}.{function.__qualname__}"


def cached_file(function: Function, signature: Any, key: Any) -> Path | None:
    """Return where a variant of a function is kept on disk; None if it is not."""
    folder, source = cache_folder(), source_digest.digest(function.__module__)
    if folder is None or source is None:
        return None
    variant = hashlib.sha256(f"{signature} {key!r} {source}".encode()).hexdigest()[:20]
    name = re.sub(r"(\W|<locals>)+", "-", full_name(function))
    return folder / f"{name}-{source[:STATE]}-{variant}.bin"


def load_code(file: Path | None, signature: Any) -> Code | None:
    """Load the code in a file; None if it is missing or odd.

    Numba's registries, which only a compilation needs, take longer than all else and are not loaded.
    """
    payload = disk_cache.load(file) if file else None
    if payload is None:
        return None
    try:
        name, symbols, library = pickle.loads(payload)
        target = cpu_target.target_context
        if not all(map(llvm.address_of_symbol, symbols)):
            rtsys.initialize(target)
            if not all(map(llvm.address_of_symbol, symbols)):
                return None
        code = Code(name, target.codegen().unserialize_library(library), signature)
    except Exception:
        return None
    return code if code.address else None


def save_code(file: Path | None, module: str, code: Code) -> None:
    """Keep code on disk, unless the sources it comes from have changed meanwhile."""
    if file and source_digest.digest_of(module, source_digest.read_sources()) == source_digest.digest(module):
        name, kind, (machine_code, bitcode) = code.library.serialize_using_object_code()
        symbols = external_symbols(llvm.parse_bitcode(bitcode))
        if numba_068.is_known():
            bitcode = outline(code.name)
        disk_cache.save(file, pickle.dumps((code.name, symbols, (name, kind, (machine_code, bitcode)))))


def outline(name: str) -> bytes:
    """Return bitcode that defines nothing but a name: a loader of machine code asks for no more."""
    return llvm.parse_assembly(f'define void @"{name}"() {{ ret void }}').as_bitcode()


def external_symbols(module: Any) -> list[str]:
    """Return the names that a module of LLVM's takes from elsewhere. A missing one would end the process."""
    names = [one.name for one in (*module.functions, *module.global_variables) if one.is_declaration]
    return [name for name in names if not name.startswith("llvm.")]


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder where this process keeps compiled code; None if it keeps none."""
    root = disk_cache.root_folder()
    return root / fingerprint() if root and source_digest.SOURCES else None


@functools.cache
def fingerprint() -> str:
    """Return a digest of everything but sources that decides what machine code the package compiles to."""
    config = numba.config
    settings = (
        config.OPT,
        config.LOOP_VECTORIZE,
        config.SLP_VECTORIZE,
        config.BOUNDSCHECK,
        config.DEBUGINFO_DEFAULT,
    )
    versions = disk_cache.FORM, numba.__version__, llvmlite.__version__, np.__version__, sys.version
    target = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((versions, settings, target)).encode()).hexdigest()[:20]
