"""Read and write safetensors files: 8 bytes with the header's length, the header (JSON), then all tensors.

The package safetensors only checks the header of a file that is read. kvkit maps tensors, which its reader
would copy, and replaces an old file atomically (`files/replace.py`), which its writer would not. kvkit's own
metadata is one JSON text in the metadata of the file.
"""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import brief
from kvkit.files import description, mapping
from kvkit.files.contents import Contents, notes_in
from kvkit.files.errors import file_error, quoted, reading_errors
from kvkit.files.packages import import_package
from kvkit.files.paths import check_target, name_in_errors
from kvkit.files.replace import replacing
from kvkit.typed import Array, FilePath
from kvkit.version import __version__

METADATA = "kvkit"
TEXTS = "__metadata__"  # the entry of a header that holds texts, beside the tensors
VERSION = 1
DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": bool, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
        "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F32": np.float32, "F64": np.float64, "C64": np.complex64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }.items()
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read(path: FilePath) -> Contents:
    """Read the tensors and the metadata of a file: its texts, and kvkit's metadata parsed."""
    package = import_package(path, "safetensors", "files")
    with reading_errors(path, "not a safetensors file, or cut short"):
        with package.safe_open(path, "np"):
            pass
        with open(path, "rb") as file:
            data, mapped = mapping.map_file(file)
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
    texts = header.pop(TEXTS, None) or {}
    tensors = data[8 + length :]
    arrays, metadata = {}, {}
    for name, entry in header.items():
        with reading_errors(path, f"tensor {quoted(name)} is damaged"):
            kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if kind not in DTYPES:
                what = f"tensor {quoted(name)} has type {brief(kind)}, which numpy lacks"
                raise file_error(path, what, "give a type of 8 bits or more")
            arrays[name] = tensors[begin:end].view(DTYPES[kind]).reshape(shape)
    if METADATA in texts:
        with reading_errors(path, f"its metadata {METADATA} is damaged"):
            metadata = json.loads(texts.pop(METADATA))
    if not isinstance(metadata, dict):
        raise file_error(path, f"its metadata {METADATA} is no object")
    if metadata.get("version", VERSION) != VERSION:
        found = brief(repr(metadata["version"]))
        raise file_error(path, f"its metadata {METADATA} has version {found}, not {VERSION}", "update kvkit")
    described = description.parse_description(path, metadata.get("description"))
    return Contents(arrays, texts | metadata, mapped, ".safetensors", described, notes_in(metadata))


def write(
    path: FilePath,
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, Any] | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write tensors and kvkit's metadata. An existing file stays intact until the new one is complete."""
    write_tensors(path, arrays, {METADATA: text_of(metadata or {})}, advance)


def text_of(metadata: Mapping[str, Any]) -> str:
    """Return kvkit's metadata as one JSON text."""
    return json.dumps({"version": VERSION, "producer": f"kvkit {__version__}", **metadata})


def write_tensors(
    path: FilePath, arrays: Mapping[str, ArrayLike], texts: Mapping[str, str],
    advance: Callable[[int], object],
) -> None:  # fmt: skip
    """Write tensors, with texts as the metadata of the file."""
    check_target(path)
    if TEXTS in arrays:
        raise file_error(path, f"no tensor of a safetensors file can be called {TEXTS}", "rename it")
    contiguous: dict[str, Array] = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.newbyteorder("=") not in DTYPE_NAMES:
            what = f"{name} has dtype {array.dtype}, which no safetensors file can name"
            raise file_error(path, what, "convert it")
        # numpy makes a 0-d array 1-d here: `reshape` undoes that
        contiguous[name] = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
    # Tensors with the largest elements come first: then each tensor begins at a multiple of its element size.
    contiguous = dict(sorted(contiguous.items(), key=lambda item: (-item[1].itemsize, item[0])))
    with name_in_errors(path), replacing(path) as file:
        file.write(header_of(contiguous, texts))
        for array in contiguous.values():
            file.write(array.reshape(-1).view(np.uint8).data)
            advance(array.nbytes)


def header_of(arrays: Mapping[str, Array], texts: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file: the header's length in 8 bytes, and the header, padded to 8."""
    header: dict[str, Any] = {TEXTS: dict(texts)}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        kind = DTYPE_NAMES[array.dtype.newbyteorder("=")]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
