"""Check calls with the `def`s of `kvkit`, and compute on the CPU where there is no kernel for GPUs.

The checks see device arrays as `calls.arrays` presents them.
"""

import inspect
from dataclasses import dataclass

import numpy as np

from kvkit.calls.targets import Checks, definition
from kvkit.checks.outputs import Results
from kvkit.operators.arrays import INDEX
from kvkit.operators.operator import IN_PYTHON
from kvkit_cuda.names import origin


@dataclass(frozen=True, slots=True)
class Computed:
    """Holds what the CPU has computed for an operator without a kernel for GPUs."""

    arrays: dict[str, np.ndarray]  # the results that are not arguments, by name
    changed: dict[str, np.ndarray]  # arguments that changed in place, on the host
    results: Results  # of the arrays that `out` may give


def checked(path, values, step=None):
    """Return the checked call of an operator or a plan's method; the sequences of a `step` are checked."""
    given = {name: value for name, value in values.items() if name not in ("self", "stream")}
    return Checks(step and step.sequences).call(definition(origin(path)), given)


def compute_on_cpu(op, values):
    """Call an operator on the CPU, which checks its arguments; arrays on the host change in place.

    With an `out`, which is checked later, copies change instead.
    """
    changed = {each.name: values[each.name] for each in op.inputs if each.inout}
    changed = {name: array for name, array in changed.items() if array is not None}
    if changed and values.get("out") is not None:
        checked(op.name, values)
        changed = {name: array.copy() for name, array in changed.items()}
    more = {name: values[name] for name in IN_PYTHON if name != "out" and name in values}
    given = {each.name: values[each.name] for each in op.parameters} | more | changed
    found = inspect.unwrap(op.function())(**given)
    named = dict(zip(op.returned(values), found if isinstance(found, tuple) else (found,), strict=True))
    arrays = {name: array for name, array in named.items() if name not in changed}
    inputs = [(each.name, values[each.name]) for each in op.inputs if each.dtypes is not INDEX]
    usual = [each.name for each in op.outputs if not each.only_with and each.name not in values]
    forms = {name: (arrays[name].shape, arrays[name].dtype) for name in usual}
    results = Results(forms, [pair for pair in inputs if pair[1] is not None], alone=len(forms) == 1)
    return Computed(arrays, changed, results)
