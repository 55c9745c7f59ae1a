"""What travels to a shard and back: numbers, bytes of arrays, and a form, told once and then named."""

import math
import pickle
import struct

import numpy as np

from kvkit.repeats import form

HEAD = struct.Struct("=5q8x")  # bytes that follow, the form's number, its bytes if it is told; two numbers
ALIGNED = 16  # bytes: what follows the head begins at such places, and each array
FORMS = 256  # that are remembered


class Sender:
    """Makes messages, which the `Receiver` at the other end reads in their order."""

    def __init__(self):
        self._known = {}

    def message(self, arrays, others, numbers=(0, 0), name=None):
        """Bytes for arrays, some of which may be None, a tuple of other values, and two integers.

        The form is all but the bytes of arrays and the integers. It is told once, if there are arrays. A
        caller who knows what it depends on may `name` that.
        """
        known = (name or form(arrays, others)) if arrays else None
        number, told = self._known.get(known, 0), b""
        if not number:
            shapes = [None if array is None else (array.dtype, array.shape) for array in arrays]
            told = padded(pickle.dumps((shapes, others)))
            if known is not None:
                if len(self._known) == FORMS:
                    self._known.clear()
                number = self._known[known] = len(self._known) + 1
        data = [padded(array.tobytes()) for array in arrays if array is not None]
        size = len(told) + sum(map(len, data))
        return b"".join((HEAD.pack(size, number, len(told), *numbers), told, *data))


class Receiver:
    """Reads the messages of a `Sender`."""

    def __init__(self):
        self._forms = {}

    def read(self, message):
        """The arrays, which are views of the message, the other values, integers, and the form's number."""
        _, number, told, *numbers = HEAD.unpack_from(message)
        at = HEAD.size + told
        if told:
            self._forms[number] = pickle.loads(memoryview(message)[HEAD.size : at])
        shapes, others = self._forms[number]
        arrays: list[np.ndarray | None] = []
        for each in shapes:
            if each is None:
                arrays.append(None)
                continue
            dtype, shape = each
            arrays.append(np.ndarray(shape, dtype, message, at))
            size = dtype.itemsize * math.prod(shape)
            at += size + -size % ALIGNED
        return arrays, others, numbers, number


def padded(data):
    rest = -len(data) % ALIGNED
    return data + bytes(rest) if rest else data
