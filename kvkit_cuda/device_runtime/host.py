"""Use numba-cuda from the host: devices, streams, memory and launches."""

import contextlib
import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import cuda

from kvkit.errors import DeviceError, argument_error, describe
from kvkit_cuda.device_runtime import needs
from kvkit_cuda.device_runtime.device import SIMULATED, shared_memory

LEGACY_DEFAULT = 1  # address of the default stream in protocols, where numba has 0
PER_THREAD_DEFAULT = 2  # address of each thread's own default stream
BLOCKS_PER_PROCESSOR = (
    16  # blocks for each multiprocessor, twice as many as it holds, so that none idles at the end
)
SCRATCH = "scratch"  # stands in `Launch.owners` for addresses of scratch memory
NATIVE = not SIMULATED  # whether prepared calls may use the driver directly


# Devices


@functools.cache
def require():
    """Raise unless there is a device."""
    if not SIMULATED:
        needs.driver()


@functools.cache
def require_device(which):
    """Raise unless kernels can run on the current device, number `which`."""
    if not SIMULATED:
        needs.device(name(), tuple(cuda.get_current_device().compute_capability))


def name():
    """Return the name of the current device."""
    return str(cuda.get_current_device().name)


def current():
    """Return the number of the current device."""
    return 0 if SIMULATED else cuda.get_current_device().id


def context():
    """Return the address of the driver's current context."""
    return int(driver().binding.cuCtxGetCurrent()[1])


@contextlib.contextmanager
def using(which):
    """Make a device the current one within a block; None leaves the current one."""
    if SIMULATED or which is None or which == current():
        yield
    else:
        with cuda.gpus[which]:
            yield


def device_of(place):
    """Return the number of the device that owns an address; None for the host's memory."""
    if SIMULATED:
        return 0
    binding = driver().binding
    which = binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, found = binding.cuPointerGetAttribute(which, place)
    return None if int(error) else int(found)


@functools.cache
def driver():
    from numba.cuda.cudadrv import driver

    return driver


def most_blocks():
    """Return the most blocks that a launch needs."""
    return 2 if SIMULATED else blocks_of(current())


@functools.cache
def blocks_of(which):
    return BLOCKS_PER_PROCESSOR * cuda.get_current_device().MULTIPROCESSOR_COUNT


# Streams


def stream(given):
    """Return the stream for a caller's None, address, or object of numba, torch, CuPy or cuda.core."""
    if given is None:
        return cuda.legacy_default_stream()
    if hasattr(given, "synchronize") and hasattr(given, "handle"):
        return given if int(given.handle) else cuda.legacy_default_stream()
    number = given.__cuda_stream__()[1] if hasattr(given, "__cuda_stream__") else given
    for name in ("cuda_stream", "ptr"):  # torch, CuPy
        number = getattr(number, name, number)
    if isinstance(number, int) and not isinstance(number, bool):
        found = cuda.external_stream(number or LEGACY_DEFAULT)
        if not SIMULATED:
            found.owner = given  # keeps the driver's stream alive
        return found
    raise argument_error("stream", "a CUDA stream or its address", describe(given))


def stream_address(stream):
    """Return the address of a stream."""
    return LEGACY_DEFAULT if SIMULATED else int(stream.handle)


def finish(stream):
    """Wait until a stream has finished its work."""
    if not SIMULATED:
        stream.synchronize()


def stream_key(number):
    """Return a key of a stream: its address, or a negative number for a thread's own default stream."""
    return -threading.get_ident() if number == PER_THREAD_DEFAULT else number


def wait_for(producer, stream):
    """Let a stream wait for the work so far of another one, given by its address or key.

    The host does not wait. Another thread's own default stream has a negative key; the legacy default stream,
    which waits for it, takes its place.
    """
    own = stream_address(stream)
    if not SIMULATED and (producer or LEGACY_DEFAULT) not in (own, stream_key(own)):
        event = cuda.event(timing=False)
        event.record(cuda.external_stream(max(producer, LEGACY_DEFAULT)))
        event.wait(stream)


def capturing(stream):
    """Return whether a stream is captured into a graph."""
    return is_captured(stream.handle) if NATIVE else False


def is_captured(handle):
    """Return whether a driver's stream is captured into a graph."""
    if not NATIVE:
        return False
    error, status = driver().binding.cuStreamIsCapturing(handle)
    return not error and status != 0


@functools.cache
def driver_stream(number):
    """Return the driver's stream at an address."""
    if not NATIVE:
        return None
    return driver().binding.CUstream(number)


# Launches


class Launch:
    """A kernel, its grid and its arguments; a call launches it.

    `owners` maps (argument, member of a tuple) to the name of the array that it points into. `grow(captured)`
    returns the number of blocks that the present step needs, or if captured any later step may need.
    `scratch` is the bytes of scratch memory, `shared` the bytes of a block's dynamic shared memory.
    """

    __slots__ = ("arguments", "blocks", "grow", "kernel", "owners", "scratch", "shared", "stream", "threads")

    def __init__(
        self, kernel, blocks, threads, stream, arguments, owners=None, grow=None, scratch=0, shared=0
    ):
        self.kernel, self.blocks, self.threads, self.stream = kernel, blocks, threads, stream
        self.arguments, self.owners, self.grow = arguments, owners or {}, grow
        self.scratch, self.shared = scratch, shared

    def __call__(self):
        blocks = self.blocks
        if self.grow:
            blocks = self.grow(capturing(self.stream)), *blocks[1:]
        if all(blocks):
            launch(self.kernel, blocks, self.threads, self.stream, self.arguments, self.shared)

    def prepared(self):
        """Return the launch in a form whose addresses can be exchanged."""
        begins = np.cumsum([0, *(len(words((each,))) for each in self.arguments)])
        owners = {int(begins[i]) + j: name for (i, j), name in self.owners.items()}
        return PreparedLaunch(
            self.kernel, self.blocks, self.threads, self.arguments, owners, self.grow, self.shared
        )


class PreparedLaunch:
    """A launch whose arguments are 64-bit words that the driver reads."""

    __slots__ = ("argument_words", "function", "grid", "grow", "owners", "parameters", "places", "shared")

    def __init__(self, kernel, blocks, threads, arguments, owners=(), grow=None, shared=0):
        self.function, self.owners, self.shared = loaded(kernel, current()), owners, shared
        if shared:
            allow_shared(self.function, current())
        threads = threads if isinstance(threads, tuple) else (threads,)
        self.grid = (*blocks, 1, 1)[:3], (*threads, 1, 1)[:3]
        self.argument_words = np.array([bits(word) for word in words(arguments)], np.int64)
        # The driver reads an array of the addresses of all arguments.
        self.places = self.argument_words.ctypes.data + 8 * np.arange(self.argument_words.size)
        self.parameters, self.grow = self.places.ctypes.data, grow

    def start(self, stream, captured=False):
        """Launch on a driver's stream, unless there are no blocks."""
        (x, y, z), threads = self.grid
        if self.grow is not None:
            x = self.grow(captured)
        if x:
            launched = self.function, x, y, z, *threads, self.shared, stream, self.parameters, 0
            check(launch_kernel()(*launched))


def launch(kernel, blocks, threads, stream, arguments, shared=0):
    """Run a kernel."""
    if SIMULATED:
        kernel[blocks, threads, stream](*arguments)
    else:
        PreparedLaunch(kernel, blocks, threads, arguments, shared=shared).start(stream.handle)


@functools.cache
def launch_kernel():
    return driver().binding.cuLaunchKernel


def check(answer):
    """Raise an error if the driver reports one."""
    if answer[0]:
        raise argument_error("kvkit_cuda", "the driver to take a launch", answer[0].name, DeviceError)


@functools.cache
def loaded(kernel, which):
    """Return the driver's function of a kernel on the current device, number `which`."""
    (overload,) = kernel.overloads.values()
    overload.bind()
    return driver().binding.CUfunction(int(overload.library.get_cufunc().handle))


@functools.cache
def allow_shared(function, which):
    """Allow a kernel without static shared memory to use all that a block may have."""
    binding = driver().binding
    most = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    # Numba's function is a CUkernel, which a driver may refuse as a CUfunction.
    kernel = binding.CUkernel(int(function))
    check(binding.cuKernelSetAttribute(most, shared_memory(), kernel, which))


def bits(word):
    """Return an integer, or the bits of a float64 as one."""
    return np.float64(word).view(np.int64) if isinstance(word, float) else word


def words(arguments):
    """Return a kernel's arguments as 64-bit numbers; arrays become the fields that numba passes.

    They are meminfo, parent, size, item size, address, shape and strides.
    """
    found: list = []
    for each in arguments:
        if isinstance(each, tuple):
            found += each
        elif isinstance(each, float):
            found.append(each)
        elif isinstance(each, (int, np.integer)):
            found.append(int(each))
        else:
            shape, size = each.shape, each.dtype.itemsize
            strides = [size * int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
            found += [0, 0, int(np.prod(shape)), size, address(each), *shape, *strides]
    return found


# Memory


@dataclass(frozen=True, slots=True)
class Table:
    """An int64 array of the device, in C order, in memory that `owner` keeps alive."""

    place: int
    shape: tuple
    owner: object
    dtype: ClassVar = np.dtype(np.int64)


def interface(array):
    """Return the CUDA array interface of an array; None if it has none."""
    if SIMULATED and isinstance(array, type(cuda.device_array(1, np.uint8))):
        return array.__array_interface__
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except RuntimeError:  # JAX raises it for bfloat16
        if hasattr(array, "__dlpack__"):
            return None
        raise


def by_dlpack(array, stream):
    """Return address, shape, byte strides, dtype, whether read-only, and owner of a DLPack tensor."""
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(array, stream_ptr=stream_address(stream))
    strides = view.strides and tuple(stride * view.dtype.itemsize for stride in view.strides)
    return view.ptr, tuple(view.shape), strides, view.dtype, view.readonly, view


def empty(shape, dtype, stream):
    """Return a new device array of numba."""
    return cuda.device_array(shape, dtype, stream=stream)


def address(array):
    """Return the address of a device array of numba, or of a table."""
    return array.place if isinstance(array, Table) else interface(array)["data"][0]


def upload(array, stream):
    """Copy the bytes of a numpy array to the device."""
    contents = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return cuda.to_device(contents, stream=stream) if contents.size else empty(1, np.uint8, stream)


def tables(arrays, stream):
    """Copy int64 arrays to the device in one transfer on a stream."""
    return split(upload(concatenate(arrays), stream), arrays)


def concatenate(arrays):
    return np.concatenate([array.reshape(-1) for array in arrays])


def split(there, arrays):
    """Split device memory into arrays of these shapes, one after the other."""
    copies, begin = [], 0
    for array in arrays:
        if NATIVE:
            copies.append(Table(address(there) + 8 * begin, array.shape, there))
        else:
            copies.append(there.view(np.int64)[begin : begin + array.size].reshape(array.shape))
        begin += array.size
    return copies


def fill(there, arrays, stream):
    """Overwrite device memory with arrays of the same shapes as before."""
    contents = concatenate(arrays).view(np.uint8)
    if SIMULATED:
        there.reshape(-1).view(np.uint8).copy_to_device(contents)
    else:
        driver().driver.cuMemcpyHtoDAsync(address(there), contents.ctypes.data, contents.size, stream.handle)


def read(place, size, stream):
    """Return bytes of the device, after the stream has finished its work."""
    host = np.empty(size, np.uint8)
    if SIMULATED:
        ctypes.memmove(host.ctypes.data, place, size)
        return host
    there = {"data": (place, False), "shape": (size,), "strides": None, "typestr": "|u1", "version": 3}
    cuda.from_cuda_array_interface(there, sync=False).copy_to_host(host, stream=stream)
    stream.synchronize()
    return host
