"""Everything that kernels take from numba-cuda: jit options, and what threads tell each other.

No other file knows it but `host`, `compiled` and `needs`, for the host's side. Where `NUMBA_ENABLE_CUDASIM=1`
is set the simulator takes the place of a device: its memory is the host's, and its threads are Python's.
"""

import threading
from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba import config, cuda, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit_cuda.device_runtime import compiled

SIMULATED = bool(config.ENABLE_CUDASIM)
# What is launched is the PTX that the tests have seen: no link-time optimization; and no fastmath, which
# flushes subnormal numbers and approximates quotients.
OPTIONS = {"fastmath": False, "lto": False, "opt": True}
CROWDED = OPTIONS | {"shared_memory_carveout": "MaxShared"}  # so that as many blocks as can be run at once
WARP = 32
PATIENCE = 120  # seconds that a thread of a simulated warp waits for others, which may have failed
SHARED_MEMORY = 99 * 1024  # of a block, on every device that is supported


# Functions


def kernel(function, signature, key=None, options=OPTIONS):
    """Compile `function` (or load it) into something to launch.

    `key` names what the function closes over: with its name it tells its variants apart.
    """
    if SIMULATED:
        return cuda.jit(function)
    dispatcher = cuda.jit(**options)(function)
    dispatcher._cache = compiled.Folder(function, (key, options), capability())
    dispatcher.compile(signature)
    return dispatcher


def capability():
    """Return the compute capability of the current device."""
    return tuple(cuda.get_current_device().compute_capability)


# A cast for kernels whose registers are scarce: a simulated one adds addresses to such numbers.
int32 = int if SIMULATED else np.int32


def inlined(function):
    """Make a function of threads part of the kernels that call it."""
    return function if SIMULATED else cuda.jit(function, device=True, inline="always", fastmath=False)


def part(function):
    """Inline a long function of threads by LLVM: it is compiled once, and numba would copy it more slowly."""
    return function if SIMULATED else cuda.jit(function, device=True, forceinline=True, fastmath=False)


def ptx(function, signature, capabilities):
    """Return the PTX of a kernel for each of some compute capabilities; needs no device."""
    from numba.cuda import compiler, dispatcher

    options = {"fastmath": OPTIONS["fastmath"], "opt": OPTIONS["opt"], "abi": "numba", "abi_info": None}
    asked = dispatcher.get_current_device  # for the sake of the kernel's parts
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capabilities[0])
    try:
        code, _ = compiler._compile_pyfunc_with_fixup(
            function, signature, cc=capabilities[0], device=False, **options
        )
    finally:
        dispatcher.get_current_device = asked
    return [code.get_asm_str(cc=capability) for capability in capabilities]


class Meeting(threading.Barrier):
    """A barrier where threads of a simulated warp wait for each other, and say a value each.

    Two boards take turns, so that nobody writes what another one still reads.
    """

    def __init__(self, lanes):
        super().__init__(len(lanes), timeout=PATIENCE)
        self.turns = dict.fromkeys(lanes, 0)
        self.boards: tuple[dict, dict] = {}, {}

    def share(self, lane, value):
        self.turns[lane] ^= 1
        board = self.boards[self.turns[lane]]
        board[lane] = value
        self.wait()
        return [board.get(i) for i in range(WARP)]


def share_with_warp(value, members=-1):
    """Return the lane and the values of all lanes of a simulated warp, whose `members` call it together."""
    thread = threading.current_thread()
    block, place = thread._manager, thread.thread_id  # type: ignore[attr-defined]
    members, warp, lane = int(members) & 2**WARP - 1, place // WARP, place % WARP
    meeting = block.__dict__.get((warp, members))
    if meeting is None:
        there = min(WARP, int(np.prod(block._block_dim)) - warp * WARP)
        made = Meeting([i for i in range(there) if members >> i & 1])
        meeting = block.__dict__.setdefault((warp, members), made)
    return lane, meeting.share(lane, value)


def _meet_simulated():
    share_with_warp(None)


def simulated_memory(size):
    """Return the memory of the thread's block; it has only one."""
    block = threading.current_thread()._manager  # type: ignore[attr-defined]
    return block.__dict__.setdefault("memory", np.empty(size, np.uint8))


def _exchange_simulated(members, value, distance):
    lane, values = share_with_warp(value, members)
    return values[lane ^ distance]


def _exchange(members, value, distance):
    return cuda.shfl_xor_sync(members, value, distance)


# (members, value, distance) -> the int32 of the thread whose number differs in the bit `distance`. `members`
# is the mask of the threads of the warp that call it together.
exchange = inlined(_exchange_simulated if SIMULATED else _exchange)


def add_others(count):
    """(values, distance): to each of `count` float32s is added that of the thread `distance` apart, in a warp
    whose threads all call it.
    """

    def _add_others_simulated(values, distance):
        other = _exchange_simulated(-1, values.copy(), distance)
        with np.errstate(all="ignore"):
            values += other

    def _add_others(values, distance):
        for i in range(count):
            values[i] += cuda.shfl_xor_sync(-1, values[i], distance)

    return inlined(_add_others_simulated if SIMULATED else _add_others)


@intrinsic
def product(typingctx, a, b):
    """Multiply float32 numbers and round: compilers for devices never fuse this into a sum."""

    def codegen(context, builder, signature, values):
        if SIMULATED:
            return builder.fmul(*values)
        form = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        name = "llvm.nvvm.mul.rn.f"
        return builder.call(cgutils.get_or_insert_function(builder.module, form, name), values)

    return types.float32(types.float32, types.float32), codegen


def _from_lane_simulated(value, lane):
    _, values = share_with_warp(value)
    return values[lane]


def _from_lane(value, lane):
    return cuda.shfl_sync(0xFFFFFFFF, value, lane)


def _meet():
    cuda.syncwarp()


# (): what the threads of a warp, which call it together, have written to shared memory all of them see now.
meet = inlined(_meet_simulated if SIMULATED else _meet)
# (value, lane) -> the value of a thread of the warp, all of whose threads call it together.
from_lane = inlined(_from_lane_simulated if SIMULATED else _from_lane)
