"""Launches: prepared calls of kernels, which can be made again for other arrays of the same form."""

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

from kvkit.turns import OneTurn

# One at a time: threads of two launches would fight for the cores, and Numba's workqueue aborts.
running = OneTurn()

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


def start(*launches):
    """Run launches in order."""
    with running:
        for launch in launches:
            launch.run()


class Repeat:
    """Launches to run again while arrays lie elsewhere: owners, by name, that had these addresses."""

    __slots__ = ("_launches", "_moved", "owners")

    def __init__(self, launches, addresses):
        self._launches = launches
        self._moved = [
            (launch.numbers, place, owner, int(launch.numbers[place]) - addresses[owner])
            for launch in launches
            for place, owner in launch.owners.items()
            if owner in addresses
        ]
        self.owners = {owner for _, _, owner, _ in self._moved}

    def run(self, addresses, change=None):
        """Run them for the same owners elsewhere.

        `change` may change other numbers before; if it says that they need another launch none is run, and
        the answer is False.
        """
        with running:
            if change is not None and not change():
                return False
            for numbers, place, owner, offset in self._moved:
                numbers[place] = addresses[owner] + offset
            for launch in self._launches:
                launch.run()
        return True
