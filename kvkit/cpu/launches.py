"""Launches: prepared calls of kernels, which can be made again for other arrays of the same form."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# One at a time: threads of two launches would fight for the cores, and Numba's workqueue aborts.
running = threading.Lock()

DATA = object.__basicsize__  # numpy's PyArrayObject is a Python object's header, then the data pointer
pointer_at = ctypes.c_void_p.from_address


def address(array):
    """`array.ctypes.data` in a sixth of its time, which a decode step spends many times a layer."""
    return pointer_at(id(array) + DATA).value


@dataclass(slots=True)
class Launch:
    """A call of kernels on `numbers`; `owners` says which array each address among them points into."""

    numbers: np.ndarray
    owners: dict[int, str]
    run: Callable[[], object]
    alive: tuple = ()  # whatever else the numbers point into


def start(*launches):
    """Run launches in order. Nothing can fail any more."""
    with running:
        for launch in launches:
            launch.run()
