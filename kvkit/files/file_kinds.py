"""Recognise files that are no .npz files by their first bytes, and say how to make a .npz file of each."""

import struct
from collections.abc import Iterable
from typing import BinaryIO

WITH_NUMPY = "write it with numpy.savez"
BEGINNINGS = {
    b"\x93NUMPY": ("one array without a name", "name it with numpy.savez(OUT, NAME=array)"),
    b"GGUF": ("a GGUF file, a model's weights", "kvkit takes files that numpy.savez writes"),
    b"\x89HDF": ("an HDF5 file", f"read it with h5py and {WITH_NUMPY}"),
    b"\x80": ("a pickle, as torch.save once wrote it", f"load it with torch and {WITH_NUMPY}"),
    b"nsgg": ("a session of llama.cpp", "kvkit inspect says what is in it"),
    b"qsgg": ("the state of a sequence of llama.cpp", "kvkit inspect says what is in it"),
}
TORCH = "a file of torch.save", f"load it with torch and {WITH_NUMPY}"
SAFETENSORS = "a safetensors file", f"read it with safetensors.numpy.load_file and {WITH_NUMPY}"


def kind_of_file(file: BinaryIO) -> tuple[str, str] | None:
    """Return (kind of an open file, what to do with it) for errors; None if it may be a zip archive."""
    begin = file.read(9)
    file.seek(0)
    if begin[8:] == b"{" and struct.unpack("<Q", begin[:8])[0] < 2**32:  # a length, then JSON
        return SAFETENSORS
    return next((words for mark, words in BEGINNINGS.items() if begin.startswith(mark)), None)


def kind_of_archive(names: Iterable[str]) -> tuple[str, str] | None:
    """Return (kind of a zip archive with these members, what to do with it); None for a .npz file."""
    return TORCH if any(name.endswith("/data.pkl") for name in names) else None
