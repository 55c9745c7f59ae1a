"""Every jit option of kvkit, and the folder where compiled code is kept.

Numba's own ``cache=True`` looks at one source file only and goes stale when a helper in another file
changes. Here a compiled function is filed under a digest of every file of the package that its module
imports, directly or not, in a folder for this numba, llvmlite, Python and CPU: an edit of what it can come
from, an upgrade or another machine leads to new code.
"""

import ctypes
import functools
import hashlib
import operator
import pickle
import re
import sys
import types
import uuid
from typing import ClassVar

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import ccallback, compiler, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime import rtsys
from numba.core.typing.context import Context
from numba.core.typing.ctypes_utils import to_ctypes

from kvkit.runtime import disk_cache, lazy_imports, locks, notices, source_digest

DATA = object.__basicsize__  # numpy's PyArrayObject is a Python object's header, then the data pointer
pointer_at = ctypes.c_void_p.from_address
INDEX = numba.types.CPointer(numba.types.int64)  # where int64 lie
LIVE_CODE: list = []  # kernels know callbacks by address only, so their code must outlive every variable
STATE = 8  # letters of the digest of its sources in the name of a file
KNOWN = "0.68."  # versions of Numba whose insides `Part` fits
OPTIONS = {"error_model": "numpy", "boundscheck": False}


def shared(function):
    """A scalar formula that kernels of both targets inline: no signature, no fastmath."""
    return numba.njit(inline="always", **OPTIONS)(function)


def helper(function):
    """A function that only CPU kernels call; its code becomes part of theirs."""
    named, options = own_name(function), OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    if numba.__version__.startswith(KNOWN):
        return Part(named, targetoptions=options | {"nopython": True}, pipeline_class=PartCompiler)
    return numba.njit(**options)(named)


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


def callback(function, signature, key=(), parallel=False):
    """Compile `function` (or load it) into machine code that kernels call by its address.

    `key` names what the function closes over: with the signature it tells its variants apart.
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
        code = compile_code(own_name(function), signature, options)
        save_code(file, function.__module__, code)
    LIVE_CODE.append(code)
    return code


def compile_code(function, signature, options):
    """The code of a function. Numba makes little garbage."""
    pipeline = WholeCompiler if numba.__version__.startswith(KNOWN) else compiler.Compiler
    whole = ccallback.CFunc(function, signature, {}, dict(options), pipeline)
    with lazy_imports.gc_paused():
        whole.compile()
    return Code(whole.native_name, whole._library, signature)  # type: ignore[attr-defined]


class Code:
    """Machine code, in a library of Numba's."""

    def __init__(self, name, library, signature):
        self.name, self.library, self.signature = name, library, signature
        self.address = library.get_pointer_to_function(name)

    @functools.cached_property
    def ctypes(self):
        """A function for Python, which lets other threads run meanwhile."""
        arguments, result = self.signature
        return ctypes.CFUNCTYPE(*map(c_type, (result, *arguments)))(self.address)


def c_type(given):
    """What Python passes for an argument: of a pointer an address."""
    return ctypes.c_void_p if isinstance(given, numba.types.CPointer) else to_ctypes(given)


def address(array):
    """`array.ctypes.data` in a sixth of its time, which a decode step spends many times a layer."""
    return pointer_at(id(array) + DATA).value


def full_name(function):
    return f"{function.__module__}.{function.__qualname__}"


def cached_file(function, signature, key):
    """Where a variant of a function is kept; None if it is not."""
    folder, source = cache_folder(), source_digest.digest(function.__module__)
    if folder is None or source is None:
        return None
    variant = hashlib.sha256(f"{signature} {key!r} {source}".encode()).hexdigest()[:20]
    name = re.sub(r"(\W|<locals>)+", "-", full_name(function))
    return folder / f"{name}-{source[:STATE]}-{variant}.bin"


def load_code(file, signature):
    """The code in a file; None if it is missing or odd.

    Numba's registries, which only a compilation needs, take longer than all else and are left alone.
    """
    payload = disk_cache.load(file) if file else None
    if payload is None:
        return None
    try:
        name, needed, library = pickle.loads(payload)
        target = cpu_target.target_context
        if not all(map(llvm.address_of_symbol, needed)):
            rtsys.initialize(target)
            if not all(map(llvm.address_of_symbol, needed)):
                return None
        code = Code(name, target.codegen().unserialize_library(library), signature)
    except Exception:
        return None
    return code if code.address else None


def save_code(file, module, code):
    """Keep code, unless the sources it comes from have changed meanwhile."""
    if file and source_digest.digest_of(module, source_digest.read_sources()) == source_digest.digest(module):
        name, kind, (machine_code, bitcode) = code.library.serialize_using_object_code()
        names = needed(llvm.parse_bitcode(bitcode))
        if numba.__version__.startswith(KNOWN):
            bitcode = outline(code.name)
        disk_cache.save(file, pickle.dumps((code.name, names, (name, kind, (machine_code, bitcode)))))


def outline(name):
    """Bitcode that defines nothing but a name: all that a loader of machine code asks it for."""
    return llvm.parse_assembly(f'define void @"{name}"() {{ ret void }}').as_bitcode()


def needed(module):
    """The names that a module of LLVM's takes from elsewhere. A missing one would end the process."""
    names = [one.name for one in (*module.functions, *module.global_variables) if one.is_declaration]
    return [name for name in names if not name.startswith("llvm.")]


# Numba optimises and assembles a helper like a kernel, before it links it into its callers and does so again.
# That is most of a first call's time. What follows leaves it out, in versions of Numba that are known to be
# made so.


class Part(CPUDispatcher):
    """A helper that only kernels call: known to them by a name of its own, since it has no address."""

    def get_call_template(self, args, kws):
        """One copy, whichever of the arguments are literals."""
        return super().get_call_template(tuple(map(numba.types.unliteral, args)), kws)

    def add_overload(self, result):
        entry = object()
        self.targetctx.insert_user_function(entry, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=entry)


class PartLibrary(JITCodeLibrary):
    """LLVM's instructions of a helper, which wait to be linked."""

    _linking_libraries: list

    def _optimize_functions(self, module):
        module.data_layout = self._codegen._data_layout

    def finalize(self):
        self._finalized = True

    def linked(self):
        """The libraries that its code calls."""
        return self._linking_libraries


class WholeLibrary(PartLibrary):
    """Those of a kernel and its helpers, which nobody else calls: so LLVM sees that none of them fails."""

    def finalize(self):
        left, found = [*self._linking_libraries], {}  # type: ignore[has-type]
        while left:
            library = left.pop()
            if library not in found:
                found[library] = True
                left += library.linked() if isinstance(library, PartLibrary) else []
        self._linking_libraries = [*found]
        JITCodeLibrary.finalize(self)

    def _optimize_final_module(self):
        for function in self._final_module.functions:
            if function.linkage == llvm.Linkage.linkonce_odr:
                function.linkage = llvm.Linkage.internal
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class Types(Context):
    """Numba's knowledge of types, that remembers what an operator makes of numbers: it asks some 30 rules."""

    resolved: ClassVar[dict] = {}

    def __init__(self, known):
        self.__dict__ = known.__dict__

    def resolve_function_type(self, func, args, kws):
        plain = tuple(map(numba.types.unliteral, args))
        if kws or getattr(func, "typing_key", None) not in OPERATORS or not all(map(is_number, plain)):
            return super().resolve_function_type(func, args, kws)
        if (func, plain) not in self.resolved:
            self.resolved[func, plain] = super().resolve_function_type(func, plain, kws)
        return self.resolved[func, plain]


# A literal exponent has rules of its own.
OPERATORS = {getattr(operator, name) for name in operator.__all__} - {pow, operator.pow, operator.ipow}
OPERATORS |= {bool, min, max}


def is_number(given):
    return isinstance(given, (numba.types.Number, numba.types.Boolean))


class PartCompiler(compiler.Compiler):
    """Compiles a helper into such a library."""

    library_class: type = PartLibrary

    def __init__(self, typingctx, targetctx, library, args, return_type, flags, locals):
        flags.no_compile = True
        library = self.library_class(targetctx.codegen(), "kvkit")
        library.enable_object_caching()
        super().__init__(Types(typingctx), targetctx, library, args, return_type, flags, locals)

    def define_pipelines(self):
        managers = super().define_pipelines()
        if not self.state.flags.auto_parallel.enabled:
            for manager in managers:
                manager.passes = [(each, why) for each, why in manager.passes if each not in UNUSED]
                manager.finalize()
        return managers


UNUSED = {  # passes for what kernels do not have: closures, arrays, `with`, loops over literals
    typed_passes.InlineOverloads,
    typed_passes.NopythonRewrites,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.InlineClosureLikes,
    untyped_passes.LiteralUnroll,
    untyped_passes.WithLifting,
}


class WholeCompiler(PartCompiler):
    library_class = WholeLibrary


@functools.cache
def cache_folder():
    """Where this process keeps compiled code; None if it keeps none."""
    root = disk_cache.root_folder()
    return root / fingerprint() if root and source_digest.SOURCES is not None else None


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
    versions = disk_cache.FORM, numba.__version__, llvmlite.__version__, np.__version__, sys.version
    target = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((versions, settings, target)).encode()).hexdigest()[:20]
