"""The outputs of a call: the arrays that are given, or new ones where an input is."""

import numpy as np

from kvkit_cuda import arrays


def outputs(out, forms, source, checked, stream):
    """(operands, what is returned) of results of these shapes and dtypes.

    `source` is an input and its operand: results are of its kind. `checked` refuses what `out` may not be; it
    gets the arrays as the checks of `kvkit` see them.
    """
    array, operand = source
    if out is None:
        made = [
            arrays.like(array, shape, dtype, stream) if operand.on_device else np.empty(shape, dtype)
            for shape, dtype in forms
        ]
        return [arrays.operand("out", result, stream) for result in made], made
    found = []
    if isinstance(out, (tuple, list)):
        found = [arrays.operand(f"out[{i}]", result, stream) for i, result in enumerate(out)]
    checked(tuple(operand.seen for operand in found) or out)
    return found[: len(forms)], list(out[: len(forms)])
