"""Provide the parts of numba-cuda that kernels use: compilation, and exchange between threads.

Only `host`, `compiled` and `needs` use numba-cuda too, for the host's side. With `NUMBA_ENABLE_CUDASIM=1` the
simulator replaces the device: its memory is the host's, and its threads are Python's.
"""

import contextlib
import functools
import threading
from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba import config, cuda, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit_cuda.device_runtime import compiled

SIMULATED = bool(config.ENABLE_CUDASIM)
# No link-time optimization, so that launches run the PTX that the tests have seen; no fastmath, because it
# flushes subnormal numbers and approximates quotients.
OPTIONS = {"fastmath": False, "lto": False, "opt": True}
MAX_SHARED = OPTIONS | {"shared_memory_carveout": "MaxShared"}  # as many blocks as possible run at once
WARP = 32
EVERYONE = 0xFFFFFFFF  # the mask of a warp's threads
TIMEOUT = 120  # seconds that a simulated thread waits for others, which may have failed
SHARED_MEMORY = 99 * 1024  # bytes that a block may have on every supported device
# By compute capability: the bytes that a block may have where they are more.
MORE_SHARED_MEMORY = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}


def kernel(function, signature, key=None, options=OPTIONS):
    """Compile `function`, or load it, as a kernel.

    `key` has the values of the variables that the function closes over, which identify a variant.
    """
    if SIMULATED:
        return cuda.jit(function)
    dispatcher = cuda.jit(**options)(function)
    dispatcher._cache = compiled.Folder(function, (key, options), capability())
    dispatcher.compile(signature)
    return dispatcher


def variants(make, signature, options=OPTIONS):
    """Return f(*form), which compiles the kernel `make(*form)` once for each form."""

    @functools.cache
    def variant(*form):
        return kernel(make(*form), signature, form, options)

    return variant


def capability():
    """Return the compute capability of the current device."""
    return tuple(cuda.get_current_device().compute_capability)


def shared_memory():
    """Return the bytes of shared memory that a block may have on the current device."""
    if SIMULATED:
        return max(MORE_SHARED_MEMORY.values())
    return MORE_SHARED_MEMORY.get(capability(), SHARED_MEMORY)


# A cast that saves registers. The simulator keeps Python's int, because it adds addresses to such numbers.
int32 = int if SIMULATED else np.int32


def inlined(function):
    """Compile a device function that numba inlines into its callers."""
    return function if SIMULATED else cuda.jit(function, device=True, inline="always", fastmath=False)


def either(emulation, function):
    """Return the function, inlined, or in the simulator its emulation."""
    return emulation if SIMULATED else inlined(function)


def simulates(function):
    """Return a decorator of a function's emulation, which the simulator runs in its place."""
    return functools.partial(either, function=function)


def force_inlined(function):
    """Compile a long device function that LLVM inlines, which is faster than numba's inlining."""
    return function if SIMULATED else cuda.jit(function, device=True, forceinline=True, fastmath=False)


def ptx(function, signature, capabilities):
    """Return the PTX of a kernel for each of some compute capabilities; needs no device."""
    from numba.cuda import compiler

    options = {"fastmath": OPTIONS["fastmath"], "opt": OPTIONS["opt"], "abi": "numba", "abi_info": None}
    with current_as(capabilities[0]):
        code, _ = compiler._compile_pyfunc_with_fixup(
            function, signature, cc=capabilities[0], device=False, **options
        )
    return [code.get_asm_str(cc=capability) for capability in capabilities]


@contextlib.contextmanager
def current_as(capability):
    """Let numba-cuda, which looks for the current device as it compiles, find one of this capability."""
    from numba.cuda import codegen, dispatcher

    known = dispatcher.get_current_device, codegen.devices
    found = SimpleNamespace(compute_capability=capability)
    dispatcher.get_current_device = lambda: found
    codegen.devices = SimpleNamespace(get_context=lambda: SimpleNamespace(device=found))
    try:
        yield
    finally:
        dispatcher.get_current_device, codegen.devices = known


class WarpBarrier(threading.Barrier):
    """A barrier at which the threads of a simulated warp exchange values.

    Two boards alternate, so that no thread overwrites a value that another one still reads.
    """

    def __init__(self, lanes):
        super().__init__(len(lanes), timeout=TIMEOUT)
        self.turns = dict.fromkeys(lanes, 0)
        self.boards: tuple[dict, dict] = {}, {}

    def share(self, lane, value, combine):
        self.turns[lane] = turn = self.turns[lane] + 1
        board = self.boards[turn % 2]
        board[lane] = value
        self.wait()
        if board.get("turn") != turn:
            board["result"] = combine([board.get(i) for i in range(WARP)])
            board["turn"] = turn
        return board["result"]


def share_with_warp(value, members=-1, combine=list):
    """Return the lane and `combine` of the values of all lanes of a simulated warp.

    Its `members` call this together, and one of them combines.
    """
    thread = threading.current_thread()
    block, place = thread._manager, thread.thread_id  # type: ignore[attr-defined]
    members, warp, lane = int(members) & 2**WARP - 1, place // WARP, place % WARP
    barrier = block.__dict__.get((warp, members))
    if barrier is None:
        there = min(WARP, int(np.prod(block._block_dim)) - warp * WARP)
        new = WarpBarrier([i for i in range(there) if members >> i & 1])
        barrier = block.__dict__.setdefault((warp, members), new)
    return lane, barrier.share(lane, value, combine)


def simulated_memory(size):
    """Return the shared memory of the thread's block."""
    block = threading.current_thread()._manager  # type: ignore[attr-defined]
    return block.__dict__.setdefault("memory", np.empty(size, np.uint8))


def _exchange_simulated(members, value, distance):
    lane, values = share_with_warp(value, members)
    return values[lane ^ distance]


# (members, value, distance) -> the value, of 32 bits, of the thread whose lane differs in the bit `distance`.
# `members` is the mask of the threads that call it.
exchange = either(_exchange_simulated, lambda members, x, distance: cuda.shfl_xor_sync(members, x, distance))


def add_others(count):
    """Return f(values, distance), which adds the `count` float32 values of the thread `distance` apart.

    All threads of a warp call it.
    """

    def _add_others_simulated(values, distance):
        other = _exchange_simulated(-1, values.copy(), distance)
        with np.errstate(all="ignore"):
            values += other

    def _add_others(values, distance):
        for i in range(count):
            values[i] += cuda.shfl_xor_sync(-1, values[i], distance)

    return either(_add_others_simulated, _add_others)


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


# (): a barrier of a warp; all of its threads then see what they wrote to shared memory.
sync_warp = either(lambda: share_with_warp(None), lambda: cuda.syncwarp())
# (flag) -> whether any thread of the warp has it; all its threads call it.
any_of_warp = either(
    lambda flag: share_with_warp(flag, combine=any)[1], lambda flag: cuda.any_sync(EVERYONE, flag)
)
# (value, lane) -> the value of a lane of the warp; all its threads call it.
from_lane = either(lambda x, i: share_with_warp(x)[1][i], lambda x, i: cuda.shfl_sync(EVERYONE, x, i))
