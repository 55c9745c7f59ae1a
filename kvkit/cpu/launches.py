"""Launches: prepared calls of kernels, which can be made again for other arrays of the same form."""

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

# One at a time: threads of two launches would fight for the cores, and Numba's workqueue aborts.
running = threading.Lock()

DATA = object.__basicsize__  # numpy's PyArrayObject is a Python object's header, then the data pointer
pointer_at = ctypes.c_void_p.from_address


def address(array):
    """`array.ctypes.data` in a sixth of its time, which a decode step spends many times a layer."""
    return pointer_at(id(array) + DATA).value


def threads():
    """Threads that kernels may use."""
    count = numba.get_num_threads()
    forbid_nested_threads()
    return count


@functools.cache
def forbid_nested_threads():
    """Undo what Numba asks of OpenMP for the whole process: torch would be three times as slow.

    Where torch is imported after Numba has started its threads both use one OpenMP library, and MKL's threads
    in torch's ones would start threads of their own.
    """
    if numba.threading_layer() == "omp":
        pool = importlib.import_module("numba.np.ufunc.omppool")
        forbid = getattr(ctypes.CDLL(pool.__file__), "omp_set_max_active_levels", None)
        if forbid:  # OpenMP 2.0 has no such levels
            forbid(1)


@dataclass(slots=True)
class Launch:
    """A call of kernels on `numbers`; `owners` says which array each address among them points into."""

    numbers: np.ndarray
    owners: dict[int, str]
    run: Callable[[], object]
    alive: tuple = ()  # whatever else the numbers point into

    def offsets(self, addresses):
        """(place, owner, offset) of each address among the numbers, from what the owner's address is now."""
        return [
            (place, owner, int(self.numbers[place]) - addresses[owner])
            for place, owner in self.owners.items()
        ]


def start(*launches):
    """Run launches in order."""
    with running:
        for launch in launches:
            launch.run()
