"""Where arrays lie in memory, as numbers that kernels take. Numba is not needed for that."""

import ctypes
from collections.abc import Iterable
from typing import Any

DATA = object.__basicsize__  # numpy's PyArrayObject is a Python object's header, then the data pointer
pointer_at = ctypes.c_void_p.from_address


def address(array: Any) -> int:
    """Return `array.ctypes.data` in a sixth of its time: a decode step asks many times a layer."""
    return pointer_at(id(array) + DATA).value  # type: ignore[return-value]


def places_of(arrays: Iterable[Any]) -> list[int]:
    """Return the addresses of arrays, 0 for None."""
    return [0 if array is None else pointer_at(id(array) + DATA).value for array in arrays]  # type: ignore[misc]
