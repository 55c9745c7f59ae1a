"""The outputs of a call: the arrays that are given, or new ones where an input is."""

import sys

import numpy as np

from kvkit_cuda import arrays, device


def outputs(out, forms, source, checked, stream):
    """(operands, what is returned) of results of these shapes and dtypes.

    `source` is an input and its operand: results are of its kind. `checked` refuses what `out` may not be; it
    gets the arrays as the checks of `kvkit` see them.
    """
    array, operand = source
    if out is None:
        made = [
            new(array, operand, shape, dtype, stream) if operand.on_device else np.empty(shape, dtype)
            for shape, dtype in forms
        ]
        return [arrays.operand("out", result, stream) for result in made], made
    found = []
    if isinstance(out, (tuple, list)):
        found = [arrays.operand(f"out[{i}]", result, stream) for i, result in enumerate(out)]
    checked(tuple(operand.seen for operand in found) or out)
    return found[: len(forms)], list(out[: len(forms)])


def new(given, operand, shape, dtype, stream):
    """A new array on the device, of the kind of `given`, of any dtype."""
    if operand.seen.dtype == dtype:
        return arrays.like(given, shape, dtype, stream)
    library = type(given).__module__.partition(".")[0]
    if library == "torch":
        return given.new_empty(shape, dtype=getattr(sys.modules[library], dtype.name))
    if library == "cupy" and dtype.kind != "V":  # it does not know bfloat16
        return sys.modules[library].empty(shape, dtype)
    return device.empty(shape, dtype, stream)
