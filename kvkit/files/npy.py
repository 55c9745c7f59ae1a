"""Read and write .npy files, which hold one array. Its name is ``cache``."""

from collections.abc import Callable, Mapping
from io import BytesIO

import numpy as np
from numpy.typing import ArrayLike

from kvkit.files import mapping, members
from kvkit.files.contents import CACHE, Contents
from kvkit.files.errors import file_error, reading_errors
from kvkit.files.paths import check_target, name_in_errors
from kvkit.files.replace import replacing
from kvkit.typed import FilePath

MAGIC = b"\x93NUMPY"
LONGEST_HEADER = 2**17  # bytes
OTHERS = "write a .npz or .safetensors file"


def read(path: FilePath) -> Contents:
    """Read the array of a file. A 2-byte void dtype is bfloat16."""
    with open(path, "rb") as file, reading_errors(path, "not an array of numpy's, or cut short"):
        data, mapped = mapping.map_file(file)
        header, _ = members.read_header(BytesIO(data[:LONGEST_HEADER].tobytes()), len(data))
        array = np.ndarray(header.shape, header.dtype, data, header.begin, order=header.order)
    return Contents({CACHE: array}, {}, mapped, ".npy")


def write(
    path: FilePath, arrays: Mapping[str, ArrayLike], advance: Callable[[int], object] = lambda count: None
) -> None:
    """Write the only array of `arrays`; raise if there are several."""
    check_target(path)
    if len(arrays) != 1:
        raise file_error(path, f"a .npy file has one array, not {len(arrays)}", OTHERS)
    (array,) = map(np.asarray, arrays.values())
    if array.dtype in members.FLOAT8.values() or not members.is_storable(array.dtype):
        raise file_error(path, f"dtype {array.dtype}, which no .npy file can name", OTHERS)
    with name_in_errors(path), replacing(path) as file:
        file.write(members.make_header(array))
        for chunk in members.iterate_bytes(array):
            file.write(chunk)
            advance(len(chunk))
