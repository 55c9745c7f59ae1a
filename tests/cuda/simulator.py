"""A pytest plugin: the CUDA simulator, made quicker, and right where threads take turns that often."""

import sys
import threading

from numba.cuda.simulator import kernelapi

from kvkit_cuda.attention import bias, forms, merge
from kvkit_cuda.copy import means, pieces, transfer
from kvkit_cuda.positions import alibi, angles, index, rotary

# Simulated threads are threads of the host: blocks are small.
THREADS = {transfer: 16, forms: 8, merge: 4} | dict.fromkeys(
    (alibi, angles, bias, means, pieces, index, rotary), 8
)


class Allocations(dict):
    """Shared arrays by the line that asks for them.

    The simulator looks one up, makes it if there is none, and keeps it: in the midst of that another thread
    would make one of its own.
    """

    lock = threading.Lock()

    def get(self, line):
        self.lock.acquire()
        array = super().get(line)
        if array is not None:
            self.lock.release()
        return array

    def __setitem__(self, line, array):
        super().__setitem__(line, array)
        self.lock.release()


def pytest_configure(config):
    sys.setswitchinterval(1e-4)  # threads wait for each other at every barrier
    begin = kernelapi.FakeCUDAShared.__init__

    def begin_with_lock(self, size):
        begin(self, size)
        self._allocations = Allocations()

    kernelapi.FakeCUDAShared.__init__ = begin_with_lock
    for module, threads in THREADS.items():
        module.THREADS = threads
    # They compute as numpy does, which warns of infinity.
    for kernel in ("plain", "merge"):
        config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:kvkit_cuda.attention.{kernel}")
