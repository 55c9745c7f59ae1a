"""Read a file's bytes: copy small files, map larger ones copy-on-write."""

import os
from typing import BinaryIO

import numpy as np

from kvkit.typed import Array

MAX_COPIED = 2**24  # bytes; larger files are mapped


def map_file(file: BinaryIO) -> tuple[Array, os.stat_result | None]:
    """Return a file's bytes as a writeable array, and the file's status if it is mapped, else None."""
    status = os.fstat(file.fileno())
    if status.st_size > MAX_COPIED:
        return np.memmap(file, np.uint8, "c").view(np.ndarray), status
    file.seek(0)
    return np.frombuffer(bytearray(file.read()), np.uint8), None
