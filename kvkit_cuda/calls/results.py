"""The outputs of a call: the arrays that are given, or new ones where an input is."""

import numpy as np

from kvkit_cuda.calls import arrays


def outputs(out, results, source, stream):
    """(operands, what is returned) of the `Results` of a checked call.

    `source` is an input and its operand: results are of its kind.
    """
    array, operand = source
    if out is None:
        made = [
            arrays.like(array, shape, dtype, stream) if operand.on_device else np.empty(shape, dtype)
            for shape, dtype in results.forms.values()
        ]
    else:
        made = [out] if results.alone else out
        if not isinstance(made, (tuple, list)) or len(made) != len(results.forms):
            results.given(out)
    labelled = zip(results.labels, made, strict=True)
    found = [arrays.operand(label, result, stream) for label, result in labelled]
    if out is not None:
        seen = tuple(result.seen for result in found)
        results.given(seen[0] if results.alone else seen)
    return found, made[0] if results.alone else tuple(made)
