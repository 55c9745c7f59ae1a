"""Everything kvkit_cuda takes from numba-cuda: jit options, launches, memory and streams.

No other file knows it. Where `NUMBA_ENABLE_CUDASIM=1` is set the simulator takes the place of a device: its
memory is the host's, and its threads are Python's.
"""

import ctypes
import functools
import threading
from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba import config, cuda, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkit.checks.words import describe, wrong
from kvkit.errors import DeviceError

SIMULATED = bool(config.ENABLE_CUDASIM)
# What is launched is the PTX that the tests have seen: no link-time optimization; and no fastmath, which
# flushes subnormal numbers and approximates quotients.
OPTIONS = {"fastmath": False, "lto": False, "opt": True}
CROWDED = OPTIONS | {"shared_memory_carveout": "MaxShared"}  # so that as many blocks as can be run at once
WARP = 32
OLDEST = 8, 0  # compute capability of a device whose tensor cores take bfloat16
LEGACY_DEFAULT = 1  # the default stream by its address, as protocols have it; numba's 0 is none of theirs
BLOCKS = 16  # for each multiprocessor: twice as many as it can hold, so that none waits for the last ones
NEED = "an NVIDIA GPU, its driver and `pip install 'kvkit-kernels[cuda]'` (kvkit itself needs none)"


def require():
    """Raise unless kernels can run."""
    if not cuda.is_available():
        raise wrong("kvkit_cuda", NEED, "no CUDA device that Numba can use", DeviceError)
    if not SIMULATED and (found := tuple(cuda.get_current_device().compute_capability)) < OLDEST:
        oldest, own = (".".join(map(str, numbers)) for numbers in (OLDEST, found))
        expected = f"compute capability {oldest} or later"
        raise wrong("kvkit_cuda", expected, f"{name()}, of {own}", DeviceError)


def name():
    """What the device calls itself."""
    return str(cuda.get_current_device().name)


# Functions


def kernel(function, signature, options=OPTIONS):
    """Compile `function` into something to `launch`."""
    return cuda.jit(function) if SIMULATED else cuda.jit(signature, **options)(function)


def launch(kernel, blocks, threads, stream, arguments):
    """Run a kernel, if there is anything to do for it."""
    if all(blocks):
        configured(kernel, blocks, threads, stream)(*arguments)


ADVICE = threading.Lock()


def configured(kernel, *form):
    """A kernel for a grid. numba would warn of small ones, which decoding has; here it does not."""
    with ADVICE:
        wanted, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
        try:
            return kernel[form]
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = wanted


# A cast for kernels whose registers are scarce: a simulated one adds addresses to such numbers.
int32 = int if SIMULATED else np.int32


def inlined(function):
    """A function of threads, which becomes part of the kernels that call it."""
    return function if SIMULATED else cuda.jit(function, device=True, inline="always", fastmath=False)


def part(function):
    """The same for a long one: it is compiled once, and LLVM copies what numba would copy more slowly."""
    return function if SIMULATED else cuda.jit(function, device=True, forceinline=True, fastmath=False)


def ptx(function, signature, capabilities):
    """The PTX of a kernel for each of some compute capabilities; needs no device."""
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


BOARDS: tuple[dict, dict] = {}, {}


def told(value):
    """(lane, values): what each lane of a simulated warp tells the others; its threads call it together.

    Two boards take turns, so that nobody writes what another one still reads.
    """
    thread = threading.current_thread()
    thread.turn = turn = not getattr(thread, "turn", False)  # type: ignore[attr-defined]
    board, place = BOARDS[turn], thread.thread_id  # type: ignore[attr-defined]
    board[place] = value
    thread.syncthreads()  # type: ignore[attr-defined]
    first = place - place % WARP
    return place % WARP, [board.get(i) for i in range(first, first + WARP)]


def simulated_memory(size):
    """Memory of the thread's block; it has only one."""
    block = threading.current_thread()._manager  # type: ignore[attr-defined]
    return block.__dict__.setdefault("memory", np.empty(size, np.uint8))


def _exchange_simulated(members, value, distance):
    lane, values = told(value)
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
    """The rounded product of float32 numbers: never part of a fused sum, as compilers for devices like it."""

    def codegen(context, builder, signature, values):
        if SIMULATED:
            return builder.fmul(*values)
        form = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        name = "llvm.nvvm.mul.rn.f"
        return builder.call(cgutils.get_or_insert_function(builder.module, form, name), values)

    return types.float32(types.float32, types.float32), codegen


def _from_lane_simulated(value, lane):
    _, values = told(value)
    return values[lane]


def _from_lane(value, lane):
    return cuda.shfl_sync(0xFFFFFFFF, value, lane)


def _meet_simulated():
    threading.current_thread().syncthreads()  # type: ignore[attr-defined]


def _meet():
    cuda.syncwarp()


# (): what the threads of a warp, which call it together, have written to shared memory all of them see now.
meet = inlined(_meet_simulated if SIMULATED else _meet)
# (value, lane) -> the value of a thread of the warp, all of whose threads call it together.
from_lane = inlined(_from_lane_simulated if SIMULATED else _from_lane)


@functools.cache
def most_blocks():
    """More blocks than these are of no use."""
    return 2 if SIMULATED else BLOCKS * cuda.get_current_device().MULTIPROCESSOR_COUNT


# Streams


def stream(given):
    """The stream that a caller names: None, a number, or an object of numba, torch, CuPy or cuda.core."""
    if given is None:
        return cuda.legacy_default_stream()
    if hasattr(given, "synchronize") and hasattr(given, "handle"):
        return given if int(given.handle) else cuda.legacy_default_stream()
    if hasattr(given, "__cuda_stream__"):
        given = given.__cuda_stream__()[1]
    for name in ("cuda_stream", "ptr"):  # torch, CuPy
        given = getattr(given, name, given)
    if isinstance(given, int) and not isinstance(given, bool):
        return cuda.external_stream(given or LEGACY_DEFAULT)
    raise wrong("stream", "a CUDA stream or its address", describe(given))


def number(stream):
    """The address of a stream."""
    return LEGACY_DEFAULT if SIMULATED else int(stream.handle)


# Memory


def interface(array):
    """What the CUDA array interface says of an array; None if it has none, or DLPack knows better."""
    if SIMULATED and isinstance(array, type(cuda.device_array(1, np.uint8))):
        return array.__array_interface__
    if str(getattr(array, "dtype", None)) == "torch.bfloat16":
        return None  # torch 2.5 says that it is float16, older ones fail
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except RuntimeError:  # JAX's word for bfloat16
        if hasattr(array, "__dlpack__"):
            return None
        raise


def by_dlpack(array, stream):
    """(address, shape, byte strides, dtype, whether read-only, owner) of a tensor that DLPack passes on."""
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(array, stream_ptr=number(stream))
    strides = view.strides and tuple(stride * view.dtype.itemsize for stride in view.strides)
    return view.ptr, tuple(view.shape), strides, view.dtype, view.readonly, view


def empty(shape, dtype, stream):
    """A new array of numba's."""
    return cuda.device_array(shape, dtype, stream=stream)


def address(array):
    """Where an array of numba's lies."""
    return interface(array)["data"][0]


def upload(array, stream):
    """A copy of a numpy array on the device, without its shape."""
    contents = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return cuda.to_device(contents, stream=stream) if contents.size else empty(1, np.uint8, stream)


def tables(arrays, stream):
    """Copies of int64 arrays on the device, by one transfer on a stream."""
    there = upload(np.concatenate([array.reshape(-1) for array in arrays]), stream).view(np.int64)
    copies, begin = [], 0
    for array in arrays:
        copies.append(there[begin : begin + array.size].reshape(array.shape))
        begin += array.size
    return copies


def read(place, size, stream):
    """So many bytes of the device, when the stream has come so far."""
    host = np.empty(size, np.uint8)
    if SIMULATED:
        ctypes.memmove(host.ctypes.data, place, size)
        return host
    there = {"data": (place, False), "shape": (size,), "strides": None, "typestr": "|u1", "version": 3}
    cuda.from_cuda_array_interface(there, sync=False).copy_to_host(host, stream=stream)
    stream.synchronize()
    return host


def finish(stream):
    """Wait until a stream has done what it was given."""
    if not SIMULATED:
        stream.synchronize()


def wait_for(producer, stream):
    """Wait until a stream that is known by its address has done what it was given, if it is another one."""
    if not SIMULATED and (producer or LEGACY_DEFAULT) != number(stream):
        cuda.external_stream(producer).synchronize()
