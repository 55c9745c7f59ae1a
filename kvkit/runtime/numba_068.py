"""Shorten compilation with Numba 0.68, through parts of Numba that are not documented.

Numba optimises and assembles each helper by itself, links it into its callers, and optimises and assembles
them again. The first pass is most of a first call's time, so the classes below leave it out. With other
versions of Numba kernels compile the usual way.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import llvmlite.binding as llvm
import numba
from numba.core import cgutils, compiler, ir_utils, ssa, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.lowering import Lower
from numba.core.registry import CPUDispatcher
from numba.core.typing.context import Context

KNOWN = "0.68."  # the beginning of the versions of Numba that these classes fit
UNUSED_PASSES = {  # they handle closures, arrays, `with` and loops over literals, which kernels do not have
    typed_passes.InlineOverloads,
    typed_passes.IRLegalization,  # says where variables end, whose references would be counted
    typed_passes.NopythonRewrites,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.IRProcessing,
    untyped_passes.InlineClosureLikes,
    untyped_passes.LiteralUnroll,
    untyped_passes.WithLifting,
}
# Operators on plain numbers, without powers, whose literal exponents have rules of their own.
POWERS = {pow, operator.pow, operator.ipow}
OF_PLAIN = {getattr(operator, name) for name in operator.__all__} - POWERS | {bool, min, max}


def is_known() -> bool:
    """Return whether the classes below fit the installed version of Numba."""
    return numba.__version__.startswith(KNOWN)


def inlined_helper(function: Callable[..., Any], options: dict[str, Any], separate: bool) -> "InlinedHelper":
    """Return a helper that is compiled no further than LLVM instructions, for kernels to link."""
    helper = InlinedHelper(
        function, targetoptions=options | {"nopython": True}, pipeline_class=HelperCompiler
    )
    helper.separate = separate
    return helper


class InlinedHelper(CPUDispatcher):
    """A helper that only kernels call. It has no address; kernels find it in Numba's target context."""

    separate = False  # whether it stays a function of its own in kernels

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Type a call without literals, so that calls with 1 and with 2 share one copy of the code."""
        return super().get_call_template(tuple(map(numba.types.unliteral, args)), kws)

    def add_overload(self, result: Any) -> None:
        """Make the compiled code known to kernels."""
        if self.separate:
            function = result.library.get_function(result.fndesc.llvm_func_name)
            function.add_function_attribute("noinline")
        entry = object()
        self.targetctx.insert_user_function(entry, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=entry)


def shared_formula(function: Callable[..., Any], options: dict[str, Any]) -> "SharedFormula":
    """Return a formula that CPU kernels link as a helper, and that other targets inline."""
    return SharedFormula(function, targetoptions=options | {"nopython": True}, pipeline_class=HelperCompiler)


class SharedFormula(InlinedHelper):
    """A helper that Python may call too: the simulator of GPUs does."""

    @functools.cached_property
    def compiled(self) -> Any:
        """Return the formula as a function that Python calls."""
        options = {name: self.targetoptions[name] for name in ("error_model", "boundscheck")}
        return numba.njit(pipeline_class=FormulaCompiler, **options)(self.py_func)

    def __call__(self, *args: Any) -> Any:
        """Return the formula's value."""
        return self.compiled(*args)


class HelperLibrary(JITCodeLibrary):
    """The LLVM instructions of a helper, not optimised, to be linked into kernels."""

    _linking_libraries: list

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Mark the library as complete, without optimising it."""
        self._finalized = True

    def linked(self) -> list:
        """Return the libraries that this code calls."""
        return self._linking_libraries


# Options of LLVM's optimisation that differ from Numba's, for `jit.callback`.
PASSES: dict[str, dict[str, Any]] = {
    "all": {},
    "few": {"opt": 1, "loop_vectorize": False, "slp_vectorize": False},  # less code, two thirds of the time
    "none": {"opt": 0},  # slow code, in half of the time
}


class KernelLibrary(HelperLibrary):
    """Links helpers into their kernel as internal functions, so that LLVM can drop their error paths."""

    passes = "all"

    def finalize(self) -> None:
        """Link all helpers that the kernel reaches, and assemble."""
        waiting, reached = [*self._linking_libraries], {}  # type: ignore[has-type]
        while waiting:
            library = waiting.pop()
            if library not in reached:
                reached[library] = True
                waiting += library.linked() if isinstance(library, HelperLibrary) else []
        self._linking_libraries = [*reached]
        JITCodeLibrary.finalize(self)

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if function.linkage == llvm.Linkage.linkonce_odr:
                function.linkage = llvm.Linkage.internal
        passes, builder = self._codegen._module_pass_manager(**PASSES[self.passes])
        passes.run(self._final_module, builder)


class CachingContext(Context):
    """Numba's typing context with a cache of operators on numbers; Numba tries some 30 rules for each use."""

    resolved: ClassVar[dict] = {}

    def __init__(self, context: Context) -> None:
        self.__dict__ = context.__dict__

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        """Return the signature of a call with these types."""
        plain = tuple(map(numba.types.unliteral, args))
        if kws or getattr(func, "typing_key", None) not in OF_PLAIN or not all(map(is_number, plain)):
            return super().resolve_function_type(func, args, kws)
        if (func, plain) not in self.resolved:
            self.resolved[func, plain] = super().resolve_function_type(func, plain, kws)
        return self.resolved[func, plain]


def is_number(kind: Any) -> bool:
    """Return whether a Numba type is a plain number."""
    return isinstance(kind, (numba.types.Number, numba.types.Boolean))


class NumberLower(Lower):
    """Emits LLVM instructions, and finds the implementation of an operator on numbers only once."""

    implementations: ClassVar[dict] = {}

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        """Emit a binary operator, without Numba's search for three special forms that numbers do not have."""
        signature = self.fndesc.calltypes[expr]
        if op not in OF_PLAIN or not all(map(is_number, signature.args)):
            return super().lower_binop(resty, expr, op)
        context, builder, key = self.context, self.builder, (op, signature.args)
        if key not in self.implementations:
            function = context.typing_context.resolve_value_type(op)
            own = function.get_call_type(context.typing_context, signature.args, {})
            self.implementations[key] = context.get_function(function, own), own
        implementation, own = self.implementations[key]
        operands = [
            context.cast(builder, self.loadvar(side.name), self.typeof(side.name), kind)
            for side, kind in zip((expr.lhs, expr.rhs), signature.args, strict=True)
        ]
        implementation._context = context
        result = implementation(builder, operands)
        return context.cast(builder, result, signature.return_type, resty)

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        """Emit an assignment. What the variable had before is not counted as a reference that ends."""
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars and not self._disable_sroa_like_opt:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        """Emit the place of a variable, without a note for debuggers."""
        return cgutils.alloca_once(self.builder, lltype, name=name, zfill=False)


@register_pass(mutates_CFG=True, analysis_only=False)
class NumberLowering(typed_passes.NativeLowering):
    """Numba's pass that emits LLVM instructions, with `NumberLower` in place of its own class."""

    _name = "number_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        """Return the class that emits instructions."""
        return NumberLower


@register_pass(mutates_CFG=True, analysis_only=False)
class Inlining(untyped_passes.InlineInlinables):
    """Numba's pass that inlines formulas, which leaves those that kernels link to LLVM: it is much faster."""

    _name = "inlining_of_what_is_not_linked"

    def _do_work(self, state: Any, work_list: Any, block: Any, i: int, expr: Any, worker: Any) -> bool:
        called = ir_utils.guard(ir_utils.get_definition, state.func_ir, expr.func)
        if getattr(called, "op", None) == "getattr":
            called = ir_utils.resolve_func_from_module(state.func_ir, called)
        else:
            called = getattr(called, "value", None)
        if isinstance(called, SharedFormula):
            return False
        return super()._do_work(state, work_list, block, i, expr, worker)


@register_pass(mutates_CFG=True, analysis_only=False)
class SingleAssignment(untyped_passes.ReconstructSSA):
    """Numba's pass that gives each assignment a variable, without a look at where variables end."""

    _name = "single_assignment"

    def run_pass(self, state: Any) -> bool:
        """Change the function's variables."""
        state.func_ir = ssa.reconstruct_ssa(state.func_ir)
        self._patch_locals(state)
        state.func_ir._definitions = ir_utils.build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class PhiStripping(typed_passes.PreLowerStripPhis):
    """Numba's pass that removes phi nodes, without a look at where variables end."""

    _name = "phi_stripping"

    def run_pass(self, state: Any) -> bool:
        """Replace the function's phi nodes."""
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = ir_utils.build_definitions(state.func_ir.blocks)
        return True


class QuietPasses(PassManager):
    """Runs passes without Numba's events before and after each, for which it prints all types."""

    def _runPass(self, index: int, each: Any, state: Any) -> None:
        each.analysis = self._analysis
        each.run_initialization(state)
        each.run_pass(state)
        each.run_finalizer(state)


OWN_PASSES = {
    typed_passes.NativeLowering: NumberLowering,
    typed_passes.PreLowerStripPhis: PhiStripping,
    untyped_passes.InlineInlinables: Inlining,
    untyped_passes.ReconstructSSA: SingleAssignment,
}


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
        flags.no_compile = flags.no_cpython_wrapper = True
        flags.nrt = flags.auto_parallel.enabled  # kernels count no references
        flags.no_cfunc_wrapper = self.library_class is HelperLibrary  # kernels are called by its address
        library = self.library_class(targetctx.codegen(), "kvkit")
        library.enable_object_caching()
        super().__init__(CachingContext(typingctx), targetctx, library, args, return_type, flags, locals)

    def define_pipelines(self) -> Any:
        """Return Numba's passes without `UNUSED_PASSES`."""
        managers = super().define_pipelines()
        if self.state.flags.auto_parallel.enabled:
            return managers
        quiet = []
        for manager in managers:
            passes = QuietPasses(manager.pipeline_name)
            passes.passes = [
                (OWN_PASSES.get(each, each), why) for each, why in manager.passes if each not in UNUSED_PASSES
            ]
            passes.finalize()
            quiet.append(passes)
        return quiet


class KernelCompiler(HelperCompiler):
    """Compiles a kernel together with the helpers it reaches."""

    library_class = KernelLibrary

    def __init__(self, *arguments: Any, passes: str = "all") -> None:
        super().__init__(*arguments)
        self.state.library.passes = passes


class FormulaCompiler(KernelCompiler):
    """Compiles a formula together with the helpers it reaches, for Python."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, passes="few")
        self.state.flags.no_compile = self.state.flags.no_cpython_wrapper = False
