"""Safetensors files, read and checked by the package of that name, their tensors mapped.

The package makes a copy of each tensor. So it only checks a file, all of whose bytes have their place then;
arrays are made here, in the file's own memory. kvkit's description is a text of JSON in its metadata.
"""

import errno
import json
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import brief
from kvkit.files import description, mapping
from kvkit.files.contents import Contents
from kvkit.files.errors import file_error, quoted, reading_errors
from kvkit.files.packages import needed
from kvkit.files.paths import check_target, named
from kvkit.files.replace import replacing
from kvkit.typed import Array, FilePath
from kvkit.version import __version__

METADATA = "kvkit"
VERSION = 1
DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": bool,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "U16": np.uint16,
        "I16": np.int16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "U32": np.uint32,
        "I32": np.int32,
        "F32": np.float32,
        "U64": np.uint64,
        "I64": np.int64,
        "F64": np.float64,
        "C64": np.complex64,
    }.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read(path: FilePath) -> Contents:
    """Read the tensors of a file, and its metadata: texts, and kvkit's own."""
    package = needed(path, "safetensors", "files")
    with reading_errors(path, "not a safetensors file, or cut short"):
        with package.safe_open(path, "np"):
            pass
        with open(path, "rb") as file:
            data, mapped = mapping.contents(file)
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
    texts = header.pop("__metadata__", None) or {}
    body = data[8 + length :]
    arrays = {name: tensor(path, name, about, body) for name, about in header.items()}
    about = {}
    if METADATA in texts:
        with reading_errors(path, f"its metadata {METADATA} is damaged"):
            about = json.loads(texts.pop(METADATA))
    if not isinstance(about, dict):
        raise file_error(path, f"its metadata {METADATA} is no object")
    if about.get("version", VERSION) != VERSION:
        found = brief(repr(about["version"]))
        raise file_error(path, f"its metadata {METADATA} has version {found}, not {VERSION}", "update kvkit")
    said = description.said(path, about.get("description"))
    return Contents(arrays, texts | about, mapped, ".safetensors", said)


def tensor(path: FilePath, name: str, about: Mapping[str, Any], body: Array) -> Array:
    """Return one tensor of a file, or refuse a damaged one."""
    with reading_errors(path, f"tensor {quoted(name)} is damaged"):
        kind, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
        if kind not in DTYPES:
            cure = "give one of 8 bits or more an element"
            raise file_error(
                path, f"tensor {quoted(name)} is of type {brief(kind)}, which numpy has not", cure
            )
        array: Array = body[begin:end].view(DTYPES[kind]).reshape(shape)
        return array


def write(path: FilePath, arrays: Mapping[str, ArrayLike], metadata: Mapping[str, Any] | None = None) -> None:
    """Write tensors, and metadata as one text of JSON."""
    check_target(path)
    package = needed(path, "safetensors", "files")
    whole = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.newbyteorder("=") not in NAMES:
            raise file_error(
                path, f"{name} has dtype {array.dtype}, which no safetensors file can say", "convert it"
            )
        whole[name] = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
    specs = {
        name: package.TensorSpec(
            dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in whole.items()
    }
    text = json.dumps({"version": VERSION, "producer": f"kvkit {__version__}", **(metadata or {})})
    with named(path), replacing(path) as file:
        try:
            package.serialize_file(specs, file.name, metadata={METADATA: text})
        except package.SafetensorError as error:  # nothing but the machine can be wrong by now
            raise OSError(errno.EIO, brief(str(error))) from None
