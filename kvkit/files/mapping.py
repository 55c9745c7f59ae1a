"""The bytes of a file: of a small one copied, of a larger one mapped copy-on-write."""

import os

import numpy as np

SMALL = 2**24  # bytes of a file that is read at once


def contents(file):
    """All bytes of an open file, writeable as an array, and its status if they are mapped."""
    status = os.fstat(file.fileno())
    if status.st_size > SMALL:
        return np.memmap(file, np.uint8, "c").view(np.ndarray), status
    file.seek(0)
    return np.frombuffer(bytearray(file.read()), np.uint8), None
