"""Make arrays of every kind on a device; those of a simulated device are host arrays that do not say so."""

import ctypes
from typing import ClassVar

import ml_dtypes
import numpy as np
from numba import cuda


class Array:
    """Stands for an array of another library on the device."""

    def __init__(self, array, **more):
        form = array.__array_interface__
        self.array = array
        self.__cuda_array_interface__ = {name: form[name] for name in ("data", "shape", "strides", "typestr")}
        self.__cuda_array_interface__ |= {"version": 3, **more}


class Tensor(Array):
    """Stands for a tensor of torch, whose dtypes are attributes of its module."""

    def new_empty(self, shape, dtype):
        return Tensor(np.empty(shape, dtype))


int8, int32, int64, float16, float32 = np.int8, np.int32, np.int64, np.float16, np.float32
bfloat16 = ml_dtypes.bfloat16


class Capsule:
    """Stands for a tensor that has only DLPack. Its memory and its capsule live as long as it does."""

    CUDA = 2
    CODES: ClassVar = {
        "i": 0, "u": 1, "float": 2, "bfloat16": 4, "b": 6, "float8_e4m3fn": 10, "float8_e5m2": 12,
    }  # fmt: skip

    def __init__(self, array):
        self.array = array

        class Tensor(ctypes.Structure):
            _fields_ = (
                ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
            )  # fmt: skip

        name = next((name for name in (array.dtype.name, array.dtype.kind) if name in self.CODES), "float")
        code = self.CODES[name]
        numbers = ctypes.c_int64 * array.ndim
        self.kept = numbers(*array.shape), numbers(*(stride // array.itemsize for stride in array.strides))
        self.tensor = Tensor(
            array.ctypes.data, (ctypes.c_int32 * 2)(self.CUDA, 0), array.ndim, code, 8 * array.itemsize, 1,
            *(ctypes.cast(part, ctypes.POINTER(ctypes.c_int64)) for part in self.kept),
        )  # fmt: skip

    def __dlpack_device__(self):
        return self.CUDA, 0

    def __dlpack__(self, stream=None, **versions):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


class OnTheHost:
    """Stands for a tensor on the CPU that has only DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **more):
        return self.array.__dlpack__(**more)


KINDS = {"interface": Array, "torch": Tensor, "dlpack": Capsule, "numba": cuda.to_device}


def contents(array):
    """Return the elements of a result of any kind as a numpy array."""
    return array if isinstance(array, np.ndarray) else getattr(array, "array", getattr(array, "_ary", None))


def moved(array, elements=0, dim=0):
    """Return a copy that begins `elements` elements after a multiple of 16 bytes, with heads `dim` apart."""
    wide = np.empty((*array.shape[:-1], array.shape[-1] + dim), array.dtype)
    buffer = np.empty(wide.nbytes + 64, np.uint8)
    begin = -buffer.ctypes.data % 16 + elements * array.itemsize
    copy = buffer[begin : begin + wide.nbytes].view(array.dtype).reshape(wide.shape)[..., : array.shape[-1]]
    copy[...] = array
    return Array(copy)
