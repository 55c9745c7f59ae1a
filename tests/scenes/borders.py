"""Make arrays that begin or end where memory does, so that reading beyond them crashes."""

import ctypes
import mmap
import os

import numpy as np
import pytest

PAGE = mmap.PAGESIZE
UNTOUCHABLE = 0  # PROT_NONE
BEGIN, END = "begin", "end"

needs_borders = pytest.mark.skipif(os.name != "posix", reason="pages are protected by mprotect")


def at_border(array, where=END):
    """Return a copy of an array right after, or right before, a page that crashes whoever touches it."""
    array = np.ascontiguousarray(array)
    pages = -(-array.nbytes // PAGE)
    memory = np.frombuffer(mmap.mmap(-1, (pages + 2) * PAGE), np.uint8)
    for page in (0, pages + 1):
        border = ctypes.c_void_p(memory.ctypes.data + page * PAGE)
        assert ctypes.CDLL(None).mprotect(border, ctypes.c_size_t(PAGE), UNTOUCHABLE) == 0
    begin = PAGE if where == BEGIN else (pages + 1) * PAGE - array.nbytes
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def guarded(shape, fill=np.nan, offset=4):
    """Return float32 numbers at an odd place in a larger buffer, and a check of the rest of it."""
    size = int(np.prod(shape)) * 4
    buffer = np.full(size + 128, 0xA5, np.uint8)
    inside = slice(64 + offset, 64 + offset + size)
    array = buffer[inside].view(np.float32).reshape(shape)
    array[...] = fill

    def untouched():
        around = np.delete(buffer, np.arange(inside.start, inside.stop))
        assert (around == 0xA5).all(), "written outside"

    return array, untouched
