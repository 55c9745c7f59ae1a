"""Records that kernels read, filled by name, and launches, which run kernels on such records."""

import ctypes
import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import prange, types

from kvkit.cpu import memory
from kvkit.runtime.arrays import DATA, MEMORY
from kvkit.runtime.arrays import address as address
from kvkit.runtime.jit import Code, compiled
from kvkit.runtime.locks import BUSY, OneCallLock
from kvkit.runtime.repeats import Single
from kvkit.typed import Array

# Admits one launch at a time: threads of two would compete for the cores, and Numba's workqueue layer would
# abort the process.
running = OneCallLock()


def threads():
    """Return how many threads kernels may use."""
    count = numba.get_num_threads()
    forbid_nested_threads()
    return count


@functools.cache
def forbid_nested_threads():
    """Turn off nested OpenMP threads, which Numba turns on for the whole process and which slow torch down.

    If torch is imported after Numba has started its threads, both use one OpenMP library, and MKL would start
    more threads inside torch's threads.
    """
    if numba.threading_layer() == "omp":
        pool = importlib.import_module("numba.np.ufunc.omppool")
        forbid = getattr(ctypes.CDLL(pool.__file__), "omp_set_max_active_levels", None)
        if forbid:  # OpenMP 2.0 has no such function
            forbid(1)


class Record:
    """A record of int64 fields, named in lines of text, and of member records with fields `member.field`."""

    def __init__(self, *lines: str, **members: "Record") -> None:
        own = [name for line in lines for name in line.split()]
        inner = [f"{member}.{name}" for member, form in members.items() for name in form.names]
        self.names: tuple[str, ...] = (*own, *inner)  # of all fields, in the order of memory
        self.at: dict[str, int] = {name: i for i, name in enumerate(self.names)}
        kinds: list[Any] = [(member, form.dtype) for member, form in members.items()]
        self.dtype: np.dtype[Any] = np.dtype([(name, np.int64) for name in own] + kinds)
        self._in_order = operator.itemgetter(*self.names)

    def filled(self, fields: Mapping[str, Any]) -> Array:
        """Return a record filled by name; `fields` must have each field and no other.

        A field holds a number, the address of an array, or 0 for None.
        """
        try:
            values = self._in_order(fields)
        except KeyError:
            values = ()
        if len(fields) != len(values):
            wrong = ", ".join(sorted(fields.keys() ^ self.at.keys()))
            raise TypeError(f"a record of {len(self.names)} fields, missing or unknown: {wrong}")
        numbers = [
            value
            if type(value) is int
            else MEMORY[id(value) + DATA >> 3]
            if isinstance(value, np.ndarray)
            else value or 0
            for value in values
        ]
        return np.fromiter(numbers, np.int64, len(numbers))  # faster than `array`


class Workspace:
    """Memory that workers use during a launch; later launches use it again."""

    def __init__(self):
        self.memory, self.words = np.empty(0, np.uint8), np.array([0, -1])  # its begin and its size
        self._view = self.words.data

    def at_least(self, size):
        """Return the address, a multiple of 64, of at least `size` bytes."""
        if self._view[1] < size:
            self.memory = np.empty(size + 63, np.uint8)
            begin = address(self.memory) + -address(self.memory) % 64
            self.words[:] = begin, address(self.memory) + self.memory.size - begin
        return self._view[0]


@dataclass(slots=True)
class Launch:
    """A call of kernels on the record `params`."""

    params: np.ndarray
    owners: dict[int, str]  # by the index of an address in `params`, the array that it points into
    run: Callable[[], object]
    alive: tuple = ()  # other objects that `params` points into
    reschedule: Callable[[], bool] | None = None  # divides the work anew; False if that needs another launch
    # Returns what one call runs, in one thread or a team; None if several threads or Python have a part in it
    single: Callable[[], Single | None] | None = None


INT = types.int64
WORKER = types.void(INT, INT)  # kernel (worker, address of params)


@memory.machine_code
def call_worker(code, worker, params):
    """Call the kernel at address `code` for one worker."""


@compiled(types.void(INT, INT, INT), parallel=True)
def call_workers(code, workers, params):
    """Call the kernel at address `code` once for each worker, in parallel threads."""
    for worker in prange(workers):
        call_worker(code, np.int64(worker), params)


parallel = 0  # the address of another library's GOMP_parallel, if kernels run in its OpenMP threads


@memory.machine_code
def call_parallel(code, member, team, threads, flags):
    """Call GOMP_parallel, which calls f(team) in each of some threads; 0 are as many as the library uses."""


@compiled(WORKER)
def start_team(worker, team):
    """Run a kernel in the threads of another library; `team` is the address of a record of `team_of`."""
    words = memory.integers(team)
    words[3] = 0
    call_parallel(words[5], words[4], team, 0, 0)


@compiled(types.void(INT))
def join_team(team):
    """Run the kernel for workers that no other thread of a team has begun, until none is left."""
    words = memory.integers(team)
    worker = memory.count_up(team + 24)
    while worker < words[2]:
        call_worker(words[0], worker, words[1])
        worker = memory.count_up(team + 24)


def team_of(code: Code, workers: int, params: int) -> Array:
    """Return (kernel, params, workers, how many have begun, code of a thread, GOMP_parallel), in int64."""
    return np.array([code.address, params, workers, 0, join_team.code.address, parallel], np.int64)


def run_workers(code, workers, params):
    """Run a kernel with `workers` workers, each in a thread."""
    if workers == 1:
        code.ctypes(0, params)
    elif parallel:
        start_team.code.ctypes(0, address(team_of(code, workers, params)))
    else:
        call_workers.code.ctypes(code.address, workers, params)


def run_in_workspace(code, most, params, at, grants, counters):
    """Run the machine code of a launch with up to `most` workers and memory that launches share.

    `grants` lists the memory as (field of `params`, workspace, bytes of each worker, bytes of all).
    """
    workers = min(threads(), most) if most > 1 else 1
    for field, workspace, of_each, of_all in grants:
        params[field] = workspace.at_least(workers * of_each + of_all)
    counters.fill(0)
    if most:
        run_workers(code, workers, at)


def run_in_scratch(code, workers, params, place, workspace, room):
    """Run a kernel whose workers have `room` bytes each of a workspace, which begins where `place` says."""
    params[place] = workspace.at_least(workers * room)
    run_workers(code, workers, address(params))


def start(*launches):
    """Run launches in order."""
    with running:
        try:
            BUSY[0] = 1
            for launch in launches:
                launch.run()
        finally:
            BUSY[0] = 0
