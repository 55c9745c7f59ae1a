"""Read and write caches in files. The content of a file decides its kind, not its name.

read            read .npz, .npy, .safetensors, and files of torch, MLX, llama.cpp and LMCache
write           write .npz, .npy and .safetensors; an existing file is replaced atomically
Contents        the arrays of a file, with metadata
Description     what a file says of its cache: layout, sizes, format, rotation
example         the path of a small file: what a language model computed for two texts
nested, flat    convert arrays by name to nested lists, as a layout has them, and back
WRITTEN         the suffixes of files that can be written
FileError       the error about a file
"""

from kvkit.files.contents import Contents, flat, nested
from kvkit.files.description import Description
from kvkit.files.errors import FileError
from kvkit.files.opening import WRITTEN, example, read, write

__all__ = ["WRITTEN", "Contents", "Description", "FileError", "example", "flat", "nested", "read", "write"]
