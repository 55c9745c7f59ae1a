"""What travels to a shard and back: raw bytes of arrays, and a form, of which a number is enough once it is known."""

import math
import pickle
import struct

import numpy as np

from kvkit.repeats import form

HEAD = struct.Struct("=4q")  # bytes that follow; the form's number, or 0; its bytes, 0 if it is known; of arrays
ALIGNED = 16  # bytes: what follows the head begins at such places, and each array
FORMS = 256  # that are remembered


class Sender:
    """Makes messages of arrays and other values, which the other end's `Receiver` reads in their order."""

    def __init__(self):
        self._numbers = {}

    def message(self, arrays, others):
        """Bytes for arrays, some of which may be None, and a tuple of other values.

        These are told once for messages whose arrays are of the same shapes. Without arrays they are always.
        """
        known = form(arrays, others) if arrays else None
        number, told = self._numbers.get(known, 0), b""
        if not number:
            shapes = [None if array is None else (array.dtype, array.shape) for array in arrays]
            told = padded(pickle.dumps((shapes, others)))
            if known is not None:
                if len(self._numbers) == FORMS:
                    self._numbers.clear()
                number = self._numbers[known] = len(self._numbers) + 1
        data = [padded(array.tobytes()) for array in arrays if array is not None]
        size = sum(map(len, data))
        return b"".join((HEAD.pack(len(told) + size, number, len(told), size), told, *data))


class Receiver:
    """Reads the messages of a `Sender`."""

    def __init__(self):
        self._forms = {}

    def read(self, message):
        """The arrays, views of the message, and the other values."""
        _, number, told, _ = HEAD.unpack_from(message)
        at = HEAD.size + told
        if told:
            self._forms[number] = pickle.loads(memoryview(message)[HEAD.size : at])
        shapes, others = self._forms[number]
        arrays = []
        for each in shapes:
            if each is None:
                arrays.append(None)
                continue
            dtype, shape = each
            arrays.append(np.ndarray(shape, dtype, message, at))
            at += rounded(dtype.itemsize * math.prod(shape))
        return arrays, others


def rounded(size):
    return size + -size % ALIGNED


def padded(data):
    return data + bytes(-len(data) % ALIGNED)
