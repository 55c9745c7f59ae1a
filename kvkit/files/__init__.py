"""Caches in files: read by content and not by name, written with a description, replaced atomically.

read, write     .npz, .npy, .safetensors; read also torch's, MLX's and llama.cpp's
Contents, Description    what a file holds, and says of it
example         the path of a small file: what a language model computed for two texts
nested, flat    the arrays of a cache as its layout has them, lists and all; and by name
WRITTEN         the suffixes of files that can be written
FileError       what is raised
"""

from kvkit.files.contents import Contents, flat, nested
from kvkit.files.description import Description
from kvkit.files.errors import FileError
from kvkit.files.opening import WRITTEN, example, read, write

__all__ = ["WRITTEN", "Contents", "Description", "FileError", "example", "flat", "nested", "read", "write"]
