"""A pytest plugin: the CUDA simulator, in which the threads of a block take turns.

Simulated threads are greenlets. One of them goes on alone, until it waits at a barrier or ends, and those
that met at a barrier go on in the opposite order: what a thread reads too early, because a barrier is
missing, is wrong in one order or the other.
"""

import functools
from types import SimpleNamespace

from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel, kernelapi

from kvkit_cuda import prompts, recurrent
from kvkit_cuda.attention import bias, forms, merge
from kvkit_cuda.copy import means, pieces, transfer
from kvkit_cuda.device_runtime import device, ptx
from kvkit_cuda.positions import alibi, angles, index, rotary

# Blocks are small: every thread of theirs runs Python.
THREADS = {transfer: 16, forms: 8, merge: 4} | dict.fromkeys(
    (alibi, angles, bias, means, pieces, index, prompts, recurrent, rotary), 8
)


class Thread(greenlet):
    """Runs a kernel as one thread of a block."""

    def __init__(self, kernel, block, block_index, place):
        super().__init__(kernel)
        self._manager, self.blockIdx, self.threadIdx = block, block_index, kernelapi.Dim3(*place)
        x, y, z = place
        self.thread_id = x + block._block_dim[0] * (y + block._block_dim[1] * z)

    def syncthreads(self):
        self._manager.wait(self, self._manager.barrier, self._manager.live)

    syncthreads_or = kernel.BlockThread.syncthreads_or


class Block(kernel.BlockManager):
    """Holds the threads of a block, and gives turns to those that are ready."""

    def run(self, grid_point, *arguments):
        self.barrier, self.asleep = [], set()
        work, there = functools.partial(self._f, *arguments), kernelapi.Dim3(*grid_point)
        places = list(kernel.np.ndindex(*self._block_dim))[::-1]
        self.ready = [Thread(work, self, there, place) for place in places]
        self.live = len(self.ready)
        try:
            while self.ready:
                thread = self.ready.pop()
                thread.switch()
                if thread.dead:
                    self.live -= 1
                    self.open(self.barrier, self.live)
            if self.asleep:
                raise RuntimeError("threads wait at barriers that others do not come to")
        finally:
            for thread in self.asleep:
                thread.throw()

    def wait(self, thread, there, count):
        """Let a thread wait until all of the `count` threads that a barrier is for are there."""
        there.append(thread)
        self.asleep.add(thread)
        self.open(there, count)
        thread.parent.switch()

    def open(self, there, count):
        if len(there) == count:
            self.ready += there
            self.asleep.difference_update(there)
            there.clear()


def meet(barrier):
    """Let a thread wait for the others of its warp."""
    thread = getcurrent()
    there = barrier.__dict__.setdefault("there", [])
    thread._manager.wait(thread, there, barrier.parties)


def pytest_configure(config):
    kernel.BlockManager = Block
    for module in (kernelapi, device, ptx):
        module.threading = SimpleNamespace(current_thread=getcurrent)
    device.WarpBarrier.wait = meet
    for module, threads in THREADS.items():
        module.THREADS = threads
    # They compute as numpy does, which warns of infinity.
    for name in ("plain", "merge"):
        config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:kvkit_cuda.attention.{name}")
