"""Recognise other kinds of files by their first bytes, and say how to make a .npz file from them."""

import struct
from collections.abc import Iterable
from typing import BinaryIO

WITH_NUMPY = "write it with numpy.savez"
BEGINNINGS = {
    b"\x93NUMPY": ("one array without a name", "name it with numpy.savez(OUT, NAME=array)"),
    b"GGUF": ("a GGUF file, a model's weights", "what kvkit takes is made with numpy.savez"),
    b"\x89HDF": ("an HDF5 file", f"read it with h5py and {WITH_NUMPY}"),
    b"\x80": ("a pickle, as torch.save once wrote it", f"load it with torch and {WITH_NUMPY}"),
    b"nsgg": ("a session of llama.cpp", "kvkit inspect says what is in it"),
    b"qsgg": ("the state of a sequence of llama.cpp", "kvkit inspect says what is in it"),
}
TORCH = "a file of torch.save", f"load it with torch and {WITH_NUMPY}"
SAFETENSORS = "a safetensors file", f"read it with safetensors.numpy.load_file and {WITH_NUMPY}"


def kind_of_file(file: BinaryIO) -> tuple[str, str] | None:
    """Return (what an open file is, what to do with it); None if it does not begin as another kind."""
    begin = file.read(9)
    file.seek(0)
    if begin[8:] == b"{" and struct.unpack("<Q", begin[:8])[0] < 2**32:
        return SAFETENSORS
    return next((words for mark, words in BEGINNINGS.items() if begin.startswith(mark)), None)


def kind_of_archive(names: Iterable[str]) -> tuple[str, str] | None:
    """Return (what a zip archive with such members is, what to do with it); None if it may be a .npz file."""
    return TORCH if any(name.endswith("/data.pkl") for name in names) else None
