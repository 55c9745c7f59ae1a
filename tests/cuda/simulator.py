"""A pytest plugin: the CUDA simulator, in which the threads of a block take turns.

Simulated threads are threads of the host. Here one of them goes on alone, until it waits at a barrier or
ends, and those that met at a barrier go on in the opposite order: what a thread reads too early, because a
barrier is missing, is wrong in one order or the other.
"""

import threading

from numba.cuda.simulator import kernel

from kvkit_cuda import prompts, recurrent
from kvkit_cuda.attention import bias, forms, merge
from kvkit_cuda.copy import means, pieces, transfer
from kvkit_cuda.device_runtime import device
from kvkit_cuda.positions import alibi, angles, index, rotary

# Blocks are small: every thread of theirs is a thread of the host.
THREADS = {transfer: 16, forms: 8, merge: 4} | dict.fromkeys(
    (alibi, angles, bias, means, pieces, index, prompts, recurrent, rotary), 8
)


class Thread(kernel.BlockThread):
    """Runs a thread of a block whenever it has the turn."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self):
        self.turn.acquire()
        if not self._manager.failed:
            super().run()
        self._manager.leave(self)

    def syncthreads(self):
        self._manager.wait(self, self._manager.barrier, self._manager.live)


class Block(kernel.BlockManager):
    """Holds the threads of a block, and whose turn it is."""

    def run(self, grid_point, *arguments):
        self.barrier, self.asleep, self.failed, self.end = [], set(), None, threading.Lock()
        places = list(kernel.np.ndindex(*self._block_dim))[::-1]
        self.ready = [
            Thread(lambda: self._f(*arguments), self, grid_point, place, self._debug) for place in places
        ]
        self.live = len(self.ready)
        self.end.acquire()
        for thread in list(self.ready):
            thread.start()
        self.pass_turn()
        self.end.acquire()
        if self.failed:
            error, trace = self.failed
            raise error.with_traceback(trace)

    def wait(self, thread, there, count):
        """Let a thread wait until all of the `count` threads that a barrier is for are there."""
        there.append(thread)
        self.asleep.add(thread)
        self.open(there, count)
        self.pass_turn()
        thread.turn.acquire()
        if self.failed:
            raise RuntimeError("another thread of the block failed")

    def open(self, there, count):
        if len(there) == count:
            self.ready += there
            self.asleep.difference_update(there)
            there.clear()

    def leave(self, thread):
        self.live -= 1
        if thread.exception:
            self.fail(thread.exception)
        self.open(self.barrier, self.live)
        self.pass_turn()

    def fail(self, why):
        self.failed = self.failed or why
        self.ready += self.asleep
        self.asleep.clear()
        self.barrier.clear()

    def pass_turn(self):
        if not self.ready and self.live:
            self.fail((RuntimeError("threads wait at barriers that others do not come to"), None))
        (self.ready.pop().turn if self.ready else self.end).release()


def meet(barrier):
    """Let a thread wait for the others of its warp."""
    thread = threading.current_thread()
    there = barrier.__dict__.setdefault("there", [])
    thread._manager.wait(thread, there, barrier.parties)


def pytest_configure(config):
    kernel.BlockManager = Block
    device.WarpBarrier.wait = meet
    for module, threads in THREADS.items():
        module.THREADS = threads
    # They compute as numpy does, which warns of infinity.
    for name in ("plain", "merge"):
        config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:kvkit_cuda.attention.{name}")
