"""Shorter compilation with Numba 0.68, through parts of Numba that it does not document.

Numba optimises and assembles a helper like a kernel, then links it into its callers and does so again. That
is most of a first call's time. The classes below leave it out. Other versions of Numba compile the usual way.
"""

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import llvmlite.binding as llvm
import numba
from numba.core import compiler, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import CPUDispatcher
from numba.core.typing.context import Context

KNOWN = "0.68."  # versions of Numba whose insides these classes fit
UNUSED_PASSES = {  # for what kernels do not have: closures, arrays, `with`, loops over literals
    typed_passes.InlineOverloads,
    typed_passes.NopythonRewrites,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.InlineClosureLikes,
    untyped_passes.LiteralUnroll,
    untyped_passes.WithLifting,
}
# Operators of plain numbers. A literal exponent has rules of its own.
OPERATORS = {getattr(operator, name) for name in operator.__all__} - {pow, operator.pow, operator.ipow}
OPERATORS |= {bool, min, max}


def is_known() -> bool:
    """Return whether this is a version of Numba that the classes fit."""
    return numba.__version__.startswith(KNOWN)


def inlined_helper(function: Callable[..., Any], options: dict[str, Any]) -> "InlinedHelper":
    """Return a helper whose code waits to be linked into kernels."""
    return InlinedHelper(function, targetoptions=options | {"nopython": True}, pipeline_class=HelperCompiler)


class InlinedHelper(CPUDispatcher):
    """A helper that only kernels call. It has no address; kernels find it in Numba's target context."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Ignore which arguments are literals, so that there is one copy of the code."""
        return super().get_call_template(tuple(map(numba.types.unliteral, args)), kws)

    def add_overload(self, result: Any) -> None:
        """Make the compiled code known to kernels."""
        entry = object()
        self.targetctx.insert_user_function(entry, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=entry)


class HelperLibrary(JITCodeLibrary):
    """The LLVM instructions of a helper, not optimised, to be linked into kernels."""

    _linking_libraries: list

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Leave the instructions as they are."""
        self._finalized = True

    def linked(self) -> list:
        """Return the libraries that this code calls."""
        return self._linking_libraries


class KernelLibrary(HelperLibrary):
    """Links helpers into their kernel as internal functions, so that LLVM can drop their error paths."""

    def finalize(self) -> None:
        """Link all helpers that the kernel reaches, and assemble."""
        left, found = [*self._linking_libraries], {}  # type: ignore[has-type]
        while left:
            library = left.pop()
            if library not in found:
                found[library] = True
                left += library.linked() if isinstance(library, HelperLibrary) else []
        self._linking_libraries = [*found]
        JITCodeLibrary.finalize(self)

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if function.linkage == llvm.Linkage.linkonce_odr:
                function.linkage = llvm.Linkage.internal
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class CachingContext(Context):
    """Numba's typing context with a cache for operators on numbers, for which Numba tries some 30 rules."""

    resolved: ClassVar[dict] = {}

    def __init__(self, context: Context) -> None:
        self.__dict__ = context.__dict__

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        """Return the signature of a call with these types."""
        plain = tuple(map(numba.types.unliteral, args))
        if kws or getattr(func, "typing_key", None) not in OPERATORS or not all(map(is_number, plain)):
            return super().resolve_function_type(func, args, kws)
        if (func, plain) not in self.resolved:
            self.resolved[func, plain] = super().resolve_function_type(func, plain, kws)
        return self.resolved[func, plain]


def is_number(kind: Any) -> bool:
    """Return whether a type of Numba's is that of a plain number."""
    return isinstance(kind, (numba.types.Number, numba.types.Boolean))


class HelperCompiler(compiler.Compiler):
    """Compiles a helper into a `HelperLibrary`, without passes that kernels have no use for."""

    library_class: type = HelperLibrary

    def __init__(
        self,
        typingctx: Any,
        targetctx: Any,
        library: Any,
        args: Any,
        return_type: Any,
        flags: Any,
        locals: Any,
    ) -> None:
        flags.no_compile = True
        library = self.library_class(targetctx.codegen(), "kvkit")
        library.enable_object_caching()
        super().__init__(CachingContext(typingctx), targetctx, library, args, return_type, flags, locals)

    def define_pipelines(self) -> Any:
        """Return Numba's passes without `UNUSED_PASSES`."""
        managers = super().define_pipelines()
        if not self.state.flags.auto_parallel.enabled:
            for manager in managers:
                manager.passes = [(each, why) for each, why in manager.passes if each not in UNUSED_PASSES]
                manager.finalize()
        return managers


class KernelCompiler(HelperCompiler):
    """Compiles a kernel together with the helpers it reaches."""

    library_class = KernelLibrary
