"""A pytest plugin: kernels of kvkit_cuda are compiled as for a GPU, and a machine runs their PTX.

It takes the place of the few functions by which `ground.device` reaches a driver; everything else, inline
PTX above all, is what a GPU gets. Kernels may use the arrays of a call and what was allocated, nothing else.
"""

import functools

import numpy as np
import pytest
from numba import cuda
from ptx_machine import Machine, Program
from ptx_memory import Memory

from kvkit_cuda.calls import arrays, tables
from kvkit_cuda.device_runtime import device, host

CAPABILITY = 9, 0
assert not device.SIMULATED
machine = Machine()


class Array:
    """Stands for an array of the device; its memory is the host's."""

    def __init__(self, array):
        self.array, self.shape, self.size, self.dtype = array, array.shape, array.size, array.dtype
        if array.size:
            machine.memory.allow(array.ctypes.data, array.nbytes)

    @property
    def __cuda_array_interface__(self):
        return self.array.__array_interface__

    def view(self, dtype):
        return Array(self.array.view(dtype))

    def reshape(self, *shape):
        return Array(self.array.reshape(*shape))

    def __getitem__(self, index):
        return Array(self.array[index])

    def copy_to_host(self, *_, **__):
        return self.array.copy()


class Stream:
    """Stands for a stream on which all work is done when a call returns."""

    handle = 0

    def __int__(self):
        return self.handle

    def synchronize(self):
        pass


class Kernel:
    """Holds a kernel that is compiled at its first launch."""

    def __init__(self, function, signature, key=None, options=None):
        self.function, self.signature = function, signature

    @functools.cached_property
    def program(self):
        (text,) = device.ptx(self.function, self.signature, [CAPABILITY])
        return Program(text)


def launch(kernel, blocks, threads, stream, arguments, shared=0):
    threads = threads if isinstance(threads, tuple) else (threads,)
    machine.launch(kernel.program, blocks, threads, host.words(arguments), shared)


def upload(array, stream):
    return Array(
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy() if array.size else np.zeros(1, np.uint8)
    )


def fill(there, arrays, stream):
    there.array[...] = host.concatenate(arrays).view(np.uint8)


def empty(shape, dtype=np.float64, stream=0):
    made = np.empty(shape, dtype)
    made.reshape(-1).view(np.uint8).fill(0xFF)
    return Array(made)


def operand(name, array, stream):
    """Allow kernels to use the arrays of a call."""
    found = seen_before(name, array, stream)
    if found.on_device and found.seen.size:
        begin, end = np.lib.array_utils.byte_bounds(found.seen)
        machine.memory.allow(begin, end - begin)
    return found


seen_before = arrays.operand


@pytest.fixture(autouse=True)
def fresh_memory():
    """Forbid tests the memory that an earlier test was allowed to use, workspaces included."""
    machine.memory = Memory()
    tables.SCRATCH.clear()


def pytest_configure():
    device.kernel, device.capability = Kernel, lambda: CAPABILITY
    host.launch = launch
    host.require = lambda: None
    cuda.stream = cuda.default_stream = cuda.legacy_default_stream = Stream
    cuda.external_stream = lambda address: Stream()
    cuda.synchronize = lambda: None
    host.most_blocks = lambda: 2
    host.empty, host.upload = empty, upload
    host.read = lambda place, size, stream: np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * size).from_address(place)
    ).copy()
    host.NATIVE = False
    host.current = lambda: 0
    host.device_of = lambda place: 0
    host.require_device = lambda which: None
    host.fill = fill
    host.finish = lambda stream: None
    host.wait_for = lambda producer, stream: None
    arrays.operand = operand
    cuda.to_device = lambda array, **_: Array(np.ascontiguousarray(array).copy())
    cuda.device_array = empty
