"""The outputs of a call: the arrays that are given, or new ones where an input is."""

import numpy as np

from kvkit import attention
from kvkit_cuda.calls import arrays


def outputs(out, names, forms, source, checked, stream):
    """(operands, what is returned) of results of these shapes and dtypes.

    `names` are what errors call them: of several, which are a tuple, or of one, which is as it is. `source`
    is an input and its operand: results are of its kind. `checked` refuses what `out` may not be; it gets
    arrays as the checks of `kvkit` see them, and `out` itself if that is not as many.
    """
    alone, (array, operand) = isinstance(names, str), source
    names = (names,) if alone else names
    if out is None:
        made = [
            arrays.like(array, shape, dtype, stream) if operand.on_device else np.empty(shape, dtype)
            for shape, dtype in forms
        ]
    else:
        made = [out] if alone else out
        if not isinstance(made, (tuple, list)) or len(made) != len(names):
            checked(out)
    found = [arrays.operand(name, result, stream) for name, result in zip(names, made, strict=True)]
    if out is not None:
        seen = tuple(result.seen for result in found)
        checked(seen[0] if alone else seen)
    return found, made[0] if alone else tuple(made)


def of_attention(out, call, inputs, source, return_lse, stream):
    """`outputs` of a checked call of attention, apart from its inputs."""
    wants_lse = attention.flag("return_lse", return_lse)
    names = ("out", "out (lse)") if wants_lse else "out"
    forms = [(call.shape, call.fmt.dtype), (call.shape[:-1], np.dtype(np.float32))][: 1 + wants_lse]

    def checked(given):
        attention.outputs(given, call.shape, call.fmt, return_lse, inputs)

    return outputs(out, names, forms, source, checked, stream)
