"""Compile kernels for a device that is absent: no driver is used, and launches run nothing."""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import dispatcher

from kvkit_cuda.device_runtime import compiled, device, host, needs


class Stream:
    """A stream that has no work."""

    handle = host.LEGACY_DEFAULT


def compile_for(capability):
    """Make this process, for the rest of its life, compile kernels for a compute capability and run none."""

    def kernel(function, signature, key=None, options=device.OPTIONS):
        folder, arguments = compiled.Folder(function, (key, options), capability), signature.args
        if folder.load_overload(signature, None) is None:
            with device.current_as(capability):
                options = cuda.jit(**options)(function).targetoptions
                kernel_code = dispatcher._Kernel(function, arguments, **options)
                kernel_code._codelibrary.get_cubin()
            folder.save_overload(signature, kernel_code)

    def empty(shape, dtype, stream):
        memory = np.zeros(shape, dtype)
        return host.Table(memory.ctypes.data, memory.shape, memory)

    device.kernel, device.capability = kernel, lambda: capability
    replaced: Any = host  # some of its functions are cached ones
    replaced.require, replaced.require_device = needs.packages, lambda which: needs.device("", capability)
    host.current, host.most_blocks = lambda: 0, lambda: host.BLOCKS_PER_PROCESSOR
    host.stream, host.capturing = lambda given: Stream(), lambda stream: False
    host.finish, host.wait_for = lambda stream: None, lambda producer, stream: None
    host.empty, host.upload = empty, lambda array, stream: empty(max(array.nbytes, 1), np.uint8, stream)
    host.read, host.launch = lambda place, size, stream: np.zeros(size, np.uint8), lambda *launch: None
