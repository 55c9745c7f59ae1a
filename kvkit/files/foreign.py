"""Files of other kinds, told by how they begin and not by their names, and how to make a .npz file of one."""

import struct

BEGINNINGS = {
    b"\x93NUMPY": "one array without a name: name it with numpy.savez(OUT, NAME=array)",
    b"GGUF": "a GGUF file, a model's weights: what kvkit takes is made with numpy.savez",
    b"\x89HDF": "an HDF5 file: read it with h5py and write it with numpy.savez",
    b"\x80": "a pickle, as torch.save once wrote it: load it with torch and write it with numpy.savez",
}
TORCH = "a file of torch.save: load it with torch and write it with numpy.savez"
SAFETENSORS = "a safetensors file: read it with safetensors.numpy.load_file and write it with numpy.savez"


def kind(file):
    """What an open file is, and what to do with it; None if it does not begin as one of another kind."""
    begin = file.read(9)
    file.seek(0)
    if begin[8:] == b"{" and struct.unpack("<Q", begin[:8])[0] < 2**32:
        return SAFETENSORS
    return next((words for mark, words in BEGINNINGS.items() if begin.startswith(mark)), None)


def kind_of_archive(names):
    """The same of a zip archive with such members."""
    return TORCH if any(name.endswith("/data.pkl") for name in names) else None
