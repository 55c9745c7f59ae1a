"""The bytes of a file: of a small one copied, of a larger one mapped copy-on-write."""

import os
from typing import BinaryIO

import numpy as np

from kvkit.typed import Array

SMALL = 2**24  # bytes of a file that is read at once


def map_file(file: BinaryIO) -> tuple[Array, os.stat_result | None]:
    """Return all bytes of an open file, a writeable array, and the file's status if they are mapped."""
    status = os.fstat(file.fileno())
    if status.st_size > SMALL:
        return np.memmap(file, np.uint8, "c").view(np.ndarray), status
    file.seek(0)
    return np.frombuffer(bytearray(file.read()), np.uint8), None
