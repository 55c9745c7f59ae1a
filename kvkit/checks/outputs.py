"""Allocate the outputs of every operator, or check the arrays that a caller passes as `out`.

Errors name the argument `out` if the operator has one output, else `out (NAME)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.values import NamedArrays, check_apart, check_array, check_output, check_writeable
from kvkit.errors import argument_error, describe
from kvkit.runtime.arrays import empty_result
from kvkit.typed import Array


class Results(NamedTuple):
    """The shape and dtype of each output of a call, in order, and the rules for arrays passed as `out`."""

    forms: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    inputs: NamedArrays  # arrays that no output may overlap, with their names
    alone: bool = False  # whether `out` is one array, not a tuple
    in_place: bool = False  # whether an output may be the input of the same name
    contiguous_rows: bool = True  # whether outputs need a contiguous last axis

    @property
    def labels(self) -> list[str]:
        """Return the names of the outputs in error messages."""
        return ["out"] if self.alone else [f"out ({name})" for name in self.forms]

    def arrays(self, out: object, new: Callable[..., Array] = empty_result) -> tuple[Array, ...]:
        """Allocate the outputs, or check and return the caller's `out`."""
        if out is None:
            return tuple([new(shape, dtype) for shape, dtype in self.forms.values()])
        return self.checked(out)

    def checked(self, out: Any) -> tuple[Array, ...]:
        """Check the caller's `out` and return it as a tuple."""
        if not self.alone and (not isinstance(out, (tuple, list)) or len(out) != len(self.forms)):
            wanted = f"a tuple of {len(self.forms)} arrays ({', '.join(self.forms)})"
            raise argument_error("out", wanted, describe(out))
        arrays = (out,) if self.alone else tuple(out)
        outputs = list(zip(self.labels, arrays, strict=True))
        for (label, array), form in zip(outputs, self.forms.values(), strict=True):
            self._check_form(label, array, *form)
        for i, (name, (label, array)) in enumerate(zip(self.forms, outputs, strict=True)):
            inputs = self.inputs
            if self.in_place:  # the input of the same name may be the output itself
                inputs = [pair for pair in inputs if pair[0] != name or not same_place(array, pair[1])]
            check_apart(label, array, [*outputs[i + 1 :], *inputs])
        return arrays

    def _check_form(self, label: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Check one output of the caller."""
        check_array(label, array)
        if array.dtype != dtype:
            raise argument_error(label, f"dtype {dtype}", array.dtype)
        if array.ndim != len(shape):
            raise argument_error(label, f"{len(shape)} axes", f"shape {array.shape}")
        if array.shape != shape:
            raise argument_error(label, f"shape {shape}", array.shape)
        (check_output if self.contiguous_rows else check_writeable)(label, array)


def same_place(a: Array, b: Array) -> bool:
    """Return whether two arrays of equal shape have the same address and strides."""
    return a is b or (a.strides == b.strides and a.ctypes.data == b.ctypes.data)
