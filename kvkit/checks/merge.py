"""Check a merge of attention over parts of a context."""

from typing import NamedTuple

import numpy as np

from kvkit.checks.outputs import Results
from kvkit.checks.values import check_array, checked_format
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS, Element
from kvkit.interop import refuse_masked
from kvkit.typed import Array, Arrays


class MergeCall(NamedTuple):
    """The checked parts of a merge, before its outputs are allocated."""

    fmt: Element
    outputs: list[Array]
    lses: list[Array]
    results: Results


def checked_merge(outputs: Arrays, lses: Arrays) -> MergeCall:
    """Check the parts of attention to merge."""
    outputs, lses = listed_arrays("outputs", outputs), listed_arrays("lses", lses)
    if len(lses) != len(outputs):
        raise argument_error("lses", f"{len(outputs)} arrays, as many as outputs", len(lses))
    shape = outputs[0].shape
    fmt = checked_format("outputs[0]", outputs[0], FLOATS, max(len(shape), 1))
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if checked_format(f"outputs[{i}]", output, FLOATS, max(len(shape), 1)) is not fmt:
            raise argument_error(f"outputs[{i}]", f"the dtype of outputs[0], {fmt}", output.dtype)
        if output.shape != shape:
            raise argument_error(f"outputs[{i}]", f"the shape of outputs[0], {shape}", output.shape)
        checked_format(f"lses[{i}]", lse, FLOATS[:1], len(shape) - 1)
        if lse.shape != shape[:-1]:
            raise argument_error(f"lses[{i}]", f"shape {shape[:-1]}", lse.shape)
    inputs = [(f"outputs[{i}]", array) for i, array in enumerate(outputs)]
    inputs += [(f"lses[{i}]", array) for i, array in enumerate(lses)]
    forms = {"attn_output": (shape, fmt.dtype), "lse": (shape[:-1], FLOATS[0].dtype)}
    return MergeCall(fmt, outputs, lses, Results(forms, inputs))


def listed_arrays(name: str, arrays: Arrays) -> list[Array]:
    """Return a list of arrays, from a sequence of arrays or from the first axis of one array."""
    refuse_masked(name, arrays)
    several = isinstance(arrays, (list, tuple)) or (isinstance(arrays, np.ndarray) and arrays.ndim > 0)
    given = list(arrays) if several else []
    if not given:
        raise argument_error(name, "one array or more", describe(arrays))
    for i, array in enumerate(given):
        check_array(f"{name}[{i}]", array)
    return given
