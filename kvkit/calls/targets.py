"""Run operators on a target: the CPU, or one that only checks calls and takes the records of the checks.

The first argument of an operator's `def` is its target. `operator` binds the CPU to it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from kvkit.calls.axes import explained
from kvkit.calls.steps import run_in_cache
from kvkit.checks.arguments import CacheAttention, CacheTransfer, PoolAttention, PoolTransfer, StepArguments
from kvkit.checks.attention import checked_cache_attention
from kvkit.checks.contexts import Contexts
from kvkit.checks.index_tensors import Packed, Static, packed_in_cache
from kvkit.checks.key_value_cache import checked_key_value_cache
from kvkit.checks.paged import checked_append, checked_paged_attention
from kvkit.interop import returns_input_kind
from kvkit.runtime.repeats import repeatable

P = ParamSpec("P")
Result = TypeVar("Result")
Planned = Packed | Contexts  # what the plan of a step has checked
CHECKS: dict[type, Callable[..., Any]] = {  # of the records that steps get: f(record, sequences)
    CacheAttention: checked_cache_attention, CacheTransfer: checked_key_value_cache,
    PoolAttention: checked_paged_attention, PoolTransfer: checked_append,
}  # fmt: skip


class CallTarget:
    """Runs an operator's `def` on the CPU."""

    run_in_cache = staticmethod(run_in_cache)

    def check(self, check: Callable[P, Result], /, *given: P.args, **named: P.kwargs) -> Result:
        """Return the checked call, which the rest of the `def` computes."""
        return check(*given, **named)

    def repeat(self, check: Callable[..., object], compute: Callable[P, Result]) -> Callable[P, Result]:
        """Return f(*arguments, out), which checks a call unless an earlier call of its form runs again."""
        return compute


class Taken(Exception):
    """Ends a `def` whose checked call was taken."""


class Checks(CallTarget):
    """Checks calls and computes none; it is the step of a plan too."""

    def __init__(self, sequences: Planned | None = None) -> None:
        self.sequences, self.step = sequences, self

    def call(self, function: Callable[..., object], values: Mapping[str, Any]) -> Any:
        """Return the checked call of an operator's `def`, or of a plan's method."""
        try:
            function(self, **values)
        except Taken as taken:
            return taken.args[0]
        raise AssertionError(f"{function.__qualname__} ran")

    def check(self, check: Callable[P, Any], /, *given: P.args, **named: P.kwargs) -> Any:
        """Take the checked call."""
        raise Taken(check(*given, **named))

    def repeat(self, check: Callable[..., object], compute: Callable[P, Result]) -> Callable[P, Result]:
        """Return a function that takes the checked call."""
        return lambda *given, **_: self.check(check, *given[:-1])  # without `out`

    def run_in_cache(self, where: Any, call: CacheTransfer | CacheAttention, out: Any) -> Any:
        """Take the checked call over a cache, for sequences from a position on, or for packed ones."""
        sequences = self.sequences
        if sequences is None and isinstance(where, StepArguments):
            sequences = packed_in_cache((call._fields[0], call[0]), where)
        self.check(CHECKS[type(call)], call, sequences or Static(where))

    def attend(self, call: Any, out: object = None) -> Any:
        """Take the checked call of a plan."""
        self.check(CHECKS[type(call)], call, self.sequences)

    load = append = attend


CPU = CallTarget()


def operator(function: Callable[Concatenate[CallTarget, P], Result]) -> Callable[P, Result]:
    """Decorate the `def` of an operator so that the CPU runs it, for arrays of any library."""
    return returns_input_kind(on_cpu(function))


def repeated_operator(function: Callable[Concatenate[CallTarget, P], Result]) -> Callable[P, Result]:
    """Decorate the `def` of an operator whose calls can run again."""
    return returns_input_kind(repeatable(on_cpu(function)))


def on_cpu(function: Callable[Concatenate[CallTarget, P], Result]) -> Callable[P, Result]:
    """Bind the CPU to the first argument, which signatures and annotations then lack."""
    told = explained(function, lambda _, values: checks_pass(function, Checks(), values))
    bound: Any = functools.update_wrapper(functools.partial(told, CPU), function)
    annotations = {name: kind for name, kind in function.__annotations__.items() if name != "on"}
    bound.__annotations__ = annotations
    bound.__annotate__ = lambda form: annotations  # which `functools.wraps` copies from Python 3.14 on
    bound.__globals__ = function.__globals__  # in which `typing.get_type_hints` reads them
    del bound.__wrapped__
    return cast(Callable[P, Result], bound)


def plan_method(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a method of a plan, whose calls can run again, for arrays of any library."""

    def passes(plan: Any, values: Mapping[str, Any]) -> bool:
        return checks_pass(function, Checks(plan.step.sequences), values)

    return returns_input_kind(repeatable(explained(function, passes)))


def checks_pass(function: Callable[..., object], checks: Checks, values: Mapping[str, Any]) -> bool:
    """Return whether an operator's `def`, or a plan's method, accepts these arguments."""
    try:
        checks.call(function, values)
    except Exception:  # of any kind: the error that is explained stays the first one
        return False
    return True


def definition(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `def` of an operator, whose first argument is its target, or of a plan's method."""
    function = inspect.unwrap(operator)
    return function.func if isinstance(function, functools.partial) else function
