"""The outputs of every operator: new arrays, or those that a caller gives, which are checked in one place.

What is wrong with an array is said of `out` where a call gives one output, else of `out (NAME)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.tensors import NamedArrays, check_apart, check_output, check_writeable
from kvkit.errors import argument_error, describe
from kvkit.runtime import result_pool
from kvkit.typed import Array


class Results(NamedTuple):
    """What a checked call gives: shape and dtype of each output, by name and in order."""

    forms: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    inputs: NamedArrays  # what they must be apart from, and what else is written
    alone: bool = False  # `out` is the array itself, not a tuple
    in_place: bool = False  # each may be the input of its name, exactly
    rows: bool = True  # whose last axis must be in one piece

    @property
    def labels(self) -> list[str]:
        """Return what errors call each output."""
        return ["out"] if self.alone else [f"out ({name})" for name in self.forms]

    def arrays(self, out: object, new: Callable[..., Array] = result_pool.empty) -> tuple[Array, ...]:
        """Return a tuple of new arrays, or of those that are given."""
        if out is None:
            return tuple([new(shape, dtype) for shape, dtype in self.forms.values()])
        return self.checked(out)

    def checked(self, out: Any) -> tuple[Array, ...]:
        """Return a tuple of the arrays that are given, if they will do."""
        if not self.alone and (not isinstance(out, (tuple, list)) or len(out) != len(self.forms)):
            raise argument_error(
                "out", f"a tuple of {len(self.forms)} arrays ({', '.join(self.forms)})", describe(out)
            )
        arrays = (out,) if self.alone else tuple(out)
        outputs = list(zip(self.labels, arrays, strict=True))
        for (label, array), form in zip(outputs, self.forms.values(), strict=True):
            self._check_form(label, array, *form)
        for i, (name, (label, array)) in enumerate(zip(self.forms, outputs, strict=True)):
            inputs = self.inputs
            if self.in_place:
                inputs = [
                    (other, old) for other, old in inputs if other != name or not same_place(array, old)
                ]
            check_apart(label, array, [*outputs[i + 1 :], *inputs])
        return arrays

    def _check_form(self, label: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise argument_error(label, "a numpy array", describe(array))
        if array.dtype != dtype:
            raise argument_error(label, f"dtype {dtype}", array.dtype)
        if array.ndim != len(shape):
            raise argument_error(label, f"{len(shape)} axes", f"shape {array.shape}")
        if array.shape != shape:
            raise argument_error(label, f"shape {shape}", array.shape)
        (check_output if self.rows else check_writeable)(label, array)


def same_place(a: Array, b: Array) -> bool:
    """Return whether equal indices of two arrays of one shape are one place."""
    return a is b or (a.strides == b.strides and a.ctypes.data == b.ctypes.data)
