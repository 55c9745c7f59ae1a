"""Arrays inside larger buffers, of which a kernel must not touch another byte."""

import numpy as np


def carve(array, offset=0, flip=None, margin=1):
    """A strided view of the array's contents inside a larger buffer of NaNs, and a check of that buffer."""
    big = tuple(size + 2 * margin for size in array.shape)
    inner = (slice(margin, -margin),) * array.ndim
    count = int(np.prod(big)) * array.itemsize

    def view(buffer):
        part = buffer[offset : offset + count].view(array.dtype).reshape(big)[inner]
        return part if flip is None else np.flip(part, flip)

    buffer, inside = np.full(count + offset + 64, 0xFF, np.uint8), np.zeros(count + offset + 64, np.uint8)
    carved = view(buffer)
    carved[...] = array
    view(inside).view(np.uint8)[...] = 0xFF

    def untouched():
        assert (buffer[inside == 0] == 0xFF).all()

    return carved, untouched
