"""Present the arrays of a call to the checks of `kvkit` as numpy arrays, and copy arrays to the device.

The checks read dtypes, shapes, strides and addresses of arrays, never elements. So a device array becomes a
numpy array at its address, whose elements must not be read.
"""

import sys
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from kvkit.errors import argument_error
from kvkit.formats import BFLOAT16
from kvkit.interop import as_integers, as_numpy, extension_dtype, in_kind_of, refuse_masked
from kvkit_cuda.calls import homes
from kvkit_cuda.device_runtime import host

CPU, BY_DLPACK = 1, "__dlpack_device__"


@dataclass(frozen=True, slots=True)
class Operand:
    """An array of a call."""

    seen: np.ndarray  # as the checks see it; if `on_device`, its elements must not be read
    on_device: bool
    owner: object  # keeps the memory alive
    given: object = None  # the caller's array

    def moved(self, stream, contents=True):
        """Return the operand on the device: itself, or a copy; without `contents` only memory for one."""
        if self.on_device:
            return self
        if contents:
            copy = host.upload(self.seen, stream)
            host.finish(stream)  # the transfer may read `seen` until it is finished
        else:
            copy = host.empty(max(self.seen.nbytes, 1), np.uint8, stream)
        return Operand(addressed(host.address(copy), self.seen.shape, None, self.seen.dtype), True, copy)

    def read(self, stream):
        """Return the elements as a numpy array."""
        array = self.seen
        if not self.on_device or array.size == 0:
            return array
        # How far the last index of each axis lies from the first element; strides may be negative.
        ends = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
        before, behind = -sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
        memory = host.read(array.ctypes.data - before, before + behind + array.itemsize, stream)
        return np.ndarray(array.shape, array.dtype, memory, before, array.strides)

    def on_host(self, stream):
        """Return the operand if it is on the host, else a copy there."""
        return replace(self, seen=self.read(stream), on_device=False)

    def take(self, other, stream):
        """Copy the elements of `other`, its copy on the device, back to a host array."""
        if not self.on_device:
            self.seen[...] = other.read(stream)

    def one_piece(self, stream):
        """Return the operand, or a copy if it is on the device and its last axis is not contiguous."""
        array = self.seen
        if not self.on_device or array.ndim == 0 or array.strides[-1] == array.itemsize:
            return self
        copy = Operand(np.ascontiguousarray(self.read(stream)), False, None).moved(stream)
        return replace(copy, given=self.given)

    def like(self, shape, dtype, stream):
        """Return a new array of the same library and device: numpy, torch, CuPy, or else numba."""
        if not self.on_device:
            return in_kind_of(self.given, np.empty(shape, dtype))
        library = homes.library(self.given)
        if hasattr(self.given, "new_empty"):
            return self.given.new_empty(shape, dtype=getattr(sys.modules[library], dtype.name))
        if library == "cupy":
            return sys.modules[library].empty(shape, dtype)
        return host.empty(shape, dtype, stream)


NOTHING = Operand(None, False, None)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Operands:
    """Several arrays that are one argument."""

    parts: list[Operand]
    seen: object

    def like(self, shape, dtype, stream):
        """Return a new array of the library and device of the first part."""
        return self.parts[0].like(shape, dtype, stream)

    def moved(self, stream):
        """Return the operands on the device."""
        return of_parts([part.moved(stream) for part in self.parts])


def moved(here, stream):
    """Return operands on the device, by name; a host array that is given twice is copied once."""
    copies: dict = {}
    for name, operand in here.items():
        at = operand.seen
        host = isinstance(at, np.ndarray) and not operand.on_device
        place = (at.ctypes.data, at.shape, at.strides, at.dtype) if host else name
        copies[name] = copies.get(place) or operand.moved(stream)
        copies[place] = copies[name]
    return {name: copies[name] for name in here}


def of_parts(parts):
    """Return the operands of an argument with these parts."""
    return Operands(parts, [part.seen for part in parts])


def operands(name, given, stream):
    """Return the operands of a sequence of arrays, or of an array's parts along its first axis."""
    if isinstance(given, (list, tuple)):
        return of_parts([operand(f"{name}[{i}]", array, stream) for i, array in enumerate(given)])
    whole = operand(name, given, stream)
    if not isinstance(whole.seen, np.ndarray) or whole.seen.ndim == 0 or not len(whole.seen):
        return Operands([], whole.seen)
    return of_parts([replace(whole, seen=whole.seen[i, ...]) for i in range(len(whole.seen))])


def operand(name, array, stream):
    """Return the operand of an array, or of another value, which the checks will refuse."""
    refuse_masked(name, array)
    if isinstance(array, np.ndarray):
        return Operand(array, False, array, array)
    of_torch = homes.library(array) == "torch"  # its array interface has no stream and no bfloat16
    if of_torch and getattr(array, "requires_grad", False):
        wanted = "a tensor without a gradient (tensor.detach())"
        raise argument_error(name, wanted, "one that requires a gradient")
    described = None if of_torch else host.interface(array)
    if described is not None:
        if described.get("mask") is not None:
            raise argument_error(name, "an array without a mask", "one with a mask")
        if described.get("stream") is not None:
            host.wait_for(described["stream"], stream)
        place, read_only = described["data"]
        form, owner = (place, described["shape"], described.get("strides")), array
        dtype = extension_dtype(array) or np.dtype(described["typestr"])
    elif not hasattr(array, BY_DLPACK):
        return Operand(array, False, array, array)
    elif array.__dlpack_device__()[0] == CPU:
        return Operand(as_numpy(array, name), False, array, array)
    else:
        passed_on = as_integers(array) if of_torch else array
        *form, dtype, read_only, owner = by_dlpack(name, passed_on, stream)
        dtype = extension_dtype(array) or dtype
    seen = addressed(*form, dtype, read_only)
    if any(number % seen.itemsize for number in (seen.ctypes.data, *seen.strides)):
        raise argument_error(name, "elements at multiples of their size", f"address {seen.ctypes.data:#x}")
    return Operand(seen, True, owner, array)


def by_dlpack(name, tensor, stream):
    """Return address, shape, strides, dtype, whether read-only, and owner of a DLPack tensor."""
    try:
        return host.by_dlpack(tensor, stream)
    except (BufferError, TypeError) as error:
        kind = type(tensor).__name__
        raise argument_error(name, "a tensor that DLPack can pass on", f"{kind} ({error})") from None


def addressed(place, shape, strides, dtype, read_only=False):
    """Return a numpy array at an address of the device; reading an element would crash."""
    if dtype.kind == "V" and dtype.itemsize == 2:
        dtype = BFLOAT16.dtype  # array protocols have no name for bfloat16
    form = {"shape": tuple(shape), "strides": strides, "typestr": f"|V{dtype.itemsize}", "version": 3}
    memory = Memory(form | {"data": (place or ALIGNED, read_only)})
    return np.asarray(memory).view(dtype)


def allocated(shape, dtype, owners, stream):
    """Return a new array on the device, as `addressed` does, and add its memory to `owners`."""
    owners.append(host.empty(max(int(np.prod(shape)) * dtype.itemsize, 1), np.uint8, stream))
    return addressed(host.address(owners[-1]), shape, None, dtype)


ALIGNED = 256  # the address of empty arrays


@dataclass(frozen=True)
class Memory:
    """Memory that `numpy.asarray` views."""

    __array_interface__: dict


def on_host(name, value, stream):
    """Return an index tensor, or a tuple of index tensors, on the host, where they are checked."""
    if isinstance(value, tuple):
        return tuple(on_host(f"{name}[{i}]", each, stream) for i, each in enumerate(value))
    return operand(name, value, stream).read(stream)
