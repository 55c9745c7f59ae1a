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
from numba.core.runtime import _nrt_python
from numba.core.typing.ctypes_utils import to_ctypes

from kvkit.runtime import disk_cache, lazy_imports, locks, notices, numba_068, source_digest
from kvkit.runtime.arrays import address as address

Function = Callable[..., Any]
Integers = Any  # an address of int64 that kernels index like an array
INDEX = numba.types.CPointer(numba.types.int64)
LIVE_CODE: list["Code"] = []  # never freed, because kernels hold the addresses of callbacks
SOURCE_LETTERS = 8  # letters of a file's name that are the digest of its sources
OPTIONS = {"error_model": "numpy", "boundscheck": False}


def shared(function: Function) -> Any:
    """Compile a scalar formula of both targets: no signature, no fastmath.

    Kernels on GPUs inline it as Numba does, before types are known. CPU kernels link it, and LLVM inlines it.
    """
    options = OPTIONS | {"inline": "always"}
    if numba_068.is_known():
        return numba_068.shared_formula(copy_under_own_name(function), options)
    return numba.njit(**options)(function)


def helper(function: Function, *, separate: bool = False) -> Any:
    """Compile a function that only CPU kernels call; its code becomes part of theirs.

    A `separate` helper is not inlined: LLVM optimises long loops once, not again where they are called.
    """
    named = copy_under_own_name(function)
    options = OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    if numba_068.is_known():
        return numba_068.inlined_helper(named, options, separate)
    return numba.njit(**options)(named)


def copy_under_own_name(function: Function) -> Function:
    """Return a copy of the function, whose machine code has a name that no other process uses.

    Numba numbers functions of one name, and each process counts from 1. Code on disk comes from several
    processes, and the linker takes two symbols of one name for one function.
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


def callback(
    function: Any,
    signature: Any,
    key: Any = (),
    *,
    parallel: bool = False,
    passes: str = "all",
) -> "Code":
    """Load a function from disk, or compile it, as machine code that kernels call by its address.

    `key` has the values of the variables that the function closes over; key and signature identify a variant.
    `passes` says how LLVM optimises it: "few" for a function that decides and calls, whose loops are short or
    in vector forms already, so that a first call is faster; "none" for what only tests call.
    """
    locks.refuse_after_fork()
    options = OPTIONS | {"parallel": True} if parallel else OPTIONS
    if parallel:
        numba.get_num_threads()  # starts the threads; parallel code calls their functions by name
    signature = numba.core.sigutils.normalize_signature(signature)
    file = cached_file(function, signature, (key, parallel))
    code = load_code(file, signature)
    if code is None:
        notices.compiling(full_name(function), llvm.get_host_cpu_name())
        pipeline: Any = compiler.Compiler
        if numba_068.is_known():
            pipeline = functools.partial(numba_068.KernelCompiler, passes=passes)
        named = copy_under_own_name(function)
        kernel = ccallback.CFunc(named, signature, {}, dict(options), pipeline)
        with lazy_imports.gc_paused():
            kernel.compile()
        code = Code(kernel.native_name, kernel._library, signature)  # type: ignore[attr-defined]
        save_code(file, function.__module__, code)
    LIVE_CODE.append(code)
    return code


class Kernel:
    """A function of one signature that closes over nothing; others call its machine code."""

    def __init__(self, function: Function, signature: Any, options: dict[str, Any]) -> None:
        self.function, self.signature, self.options = function, signature, options

    @functools.cached_property
    def code(self) -> "Code":
        """Return the machine code, which is loaded or compiled when it is first asked for."""
        return callback(self.function, self.signature, **self.options)


def compiled(signature: Any, **options: Any) -> Callable[[Function], Kernel]:
    """Return a decorator that makes a kernel; `options` are those of `callback`."""
    return functools.partial(Kernel, signature=signature, options=options)


class Code:
    """Machine code of one function, in a library of Numba."""

    def __init__(self, name: str, library: Any, signature: Any) -> None:
        self.name, self.library, self.signature = name, library, signature
        self.address: int = library.get_pointer_to_function(name)

    @functools.cached_property
    def ctypes(self) -> Any:
        """Return the code as a function that Python calls through ctypes, without the GIL.

        A pointer is passed as an address.
        """
        arguments, result = self.signature
        pointer = numba.types.CPointer
        kinds = [ctypes.c_void_p if isinstance(x, pointer) else to_ctypes(x) for x in (result, *arguments)]
        return ctypes.CFUNCTYPE(*kinds)(self.address)


def full_name(function: Function) -> str:
    """Return the module and name of a function."""
    return f"{function.__module__}.{function.__qualname__}"


def cached_file(function: Function, signature: Any, key: Any) -> Path | None:
    """Return the path of a variant's code on disk; None if code is not kept."""
    folder, source = cache_folder(), source_digest.digest(function.__module__)
    if folder is None or source is None:
        return None
    variant = hashlib.sha256(f"{signature} {key!r} {source}".encode()).hexdigest()[:20]
    name = re.sub(r"(\W|<locals>)+", "-", full_name(function))
    return folder / f"{name}-{source[:SOURCE_LETTERS]}-{variant}.bin"


def load_code(file: Path | None, signature: Any) -> Code | None:
    """Load the code in a file; return None if the file is missing or invalid.

    Numba's registries are not loaded, which would take longer than all else. Only compilation needs them.
    """
    payload = disk_cache.load(file) if file else None
    if payload is None:
        return None
    try:
        name, symbols, library = pickle.loads(payload)
        target = cpu_target.target_context
        # LLVM is told the addresses of Numba's runtime. Numba's own initialization does so too, but also
        # compiles functions that kernels do not call.
        for helper_name, address_of_helper in _nrt_python.c_helpers.items():
            if f"NRT_{helper_name}" in symbols:
                llvm.add_symbol(f"NRT_{helper_name}", address_of_helper)
        if not all(map(llvm.address_of_symbol, symbols)):
            return None
        code = Code(name, target.codegen().unserialize_library(library), signature)
    except Exception:
        return None
    return code if code.address else None


def save_code(file: Path | None, module: str, code: Code) -> None:
    """Keep code on disk, unless its source files have changed since they were read."""
    if file and source_digest.digest_of(module, source_digest.read_sources()) == source_digest.digest(module):
        name, kind, (machine_code, bitcode) = code.library.serialize_using_object_code()
        module_of_code = llvm.parse_bitcode(bitcode)
        symbols = [  # that the code imports: LLVM aborts the process if one is missing
            symbol.name
            for symbol in (*module_of_code.functions, *module_of_code.global_variables)
            if symbol.is_declaration and not symbol.name.startswith("llvm.")
        ]
        if numba_068.is_known():  # Numba needs no more than a definition of the name to load machine code
            bitcode = llvm.parse_assembly(f'define void @"{code.name}"() {{ ret void }}').as_bitcode()
        disk_cache.save(file, pickle.dumps((code.name, symbols, (name, kind, (machine_code, bitcode)))))


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder where this process keeps compiled code; None if it keeps none."""
    root = disk_cache.root_folder()
    return root / fingerprint() if root and source_digest.SOURCES else None


@functools.cache
def fingerprint() -> str:
    """Return a digest of the settings, versions and CPU that machine code depends on."""
    options = "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT"
    settings = tuple(getattr(numba.config, option) for option in options)
    versions = disk_cache.FILE_VERSION, numba.__version__, llvmlite.__version__, np.__version__, sys.version
    target = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((versions, settings, target)).encode()).hexdigest()[:20]
