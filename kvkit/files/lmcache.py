"""Read chunks of LMCache from a disk or a store: raw elements, described by the file name or a header.

A file is called MODEL@RANKS@RANK@HASH@TYPE.pt (backend ``local_disk``) or .data (backend ``fs``), with @LAYER
after the type if each layer has a file. A .data file, or an object of Mooncake's store, may begin with a
header of integers: bytes, arrangement, type, four lengths. Files that ``fs`` writes for the distributed
storage do not name the type.
"""

import math
import os
import re
from typing import Any

import ml_dtypes
import numpy as np

from kvkit.files import llama, mapping
from kvkit.files.contents import Contents
from kvkit.files.description import Description
from kvkit.files.errors import file_error
from kvkit.typed import Array, FilePath

CHUNK_NAME = re.compile(  # files of `local_disk` and `fs`
    r"(?P<model>.+)@(?P<ranks>\d+)@(?P<rank>\d+)@(?P<hash>[0-9a-f]+)@(?P<type>[a-z][a-z0-9_]*)"
    r"(?:@(?P<layer>\d+))?(?:@[^@%]+%[^@]*)*\.(?:pt|data)"
)
UNTYPED = re.compile(  # files of the distributed storage
    r"(?P<model>.+)@0x(?P<ranks>[0-9a-f]{8})@(?P<group>[0-9a-f]+)@(?P<hash>[0-9a-f]+)(?:@.*)?\.data"
)
TYPES = {
    "half": np.float16, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float": np.float32,
    "float32": np.float32, "uint8": np.uint8, "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
TYPE_NUMBERS = {1: "half", 2: "half", 3: "bfloat16", 4: "float", 6: "uint8", 7: "fp8", 8: "fp8_e5m2"}
LINES = {  # {arrangement of a header: layout}
    1: "| kv l n (h c)", 2: "| n kv (h c)", 3: "| kv n (h c)", 6: "| 1 l n c",
}  # fmt: skip
HEADER = 4 * 7  # bytes of seven integers
GROUPED = "a chunk of layers of two kinds has them in groups, one behind the other, which kvkit does not part"
NO_SIZES = "the file has elements without sizes: give sizes={'l': L, 'h': H, 'c': C}; n follows"


def parse_name(path: FilePath) -> dict[str, Any] | None:
    """Return the fields in the name of a chunk; None for other names."""
    name = os.path.basename(os.fspath(path))
    match = CHUNK_NAME.fullmatch(name) or UNTYPED.fullmatch(name)
    return match and {key: text for key, text in match.groupdict().items() if text is not None}


def read(path: FilePath, fields: dict[str, Any]) -> Contents:
    """Read a chunk; `fields` are those of its name."""
    with open(path, "rb") as file:
        data, mapped = mapping.map_file(file)
    sizes: dict[str, int] = {}
    if tells_less(data):
        raise file_error(
            path, f"its header tells the shape of fewer elements: {GROUPED}", "give each group alone"
        )
    if found := elements_after_header(data):
        array, line = found
        axes = line.removeprefix("| ").replace("(h c)", "").split()
        sizes = {axis: size for axis, size in zip(axes, array.shape, strict=False) if axis in "ln"}
        notes = (llama.NO_HEADS,) if "h" in line else ()
    else:
        dtype = TYPES.get(fields.get("type", ""))
        if dtype is None or len(data) % np.dtype(dtype).itemsize:
            note = "neither its name nor a header names the type of its elements: these are its bytes"
            return Contents({"bytes": data}, fields, mapped, "chunk of LMCache", notes=(note,))
        array, line = data.view(dtype), "| (n kv h c)" if "layer" in fields else "| (kv l n h c)"
        notes = (NO_SIZES,)
    described = Description(line, sizes, array.dtype.name, rope_applied=True)
    return Contents({"cache": array}, fields, mapped, "chunk of LMCache", described, notes)


def tells_less(data: Array) -> bool:
    """Return whether a header tells the size of the file, but the shape of fewer elements."""
    if len(data) < HEADER:
        return False
    size, arrangement, number, *shape = data[:HEADER].view("<i4").tolist()
    if size != len(data) - HEADER or arrangement not in LINES or number not in TYPE_NUMBERS:
        return False
    told = math.prod(filter(None, shape)) * np.dtype(TYPES[TYPE_NUMBERS[number]]).itemsize
    return bool(0 < told < size)


def elements_after_header(data: Array) -> tuple[Array, str] | None:
    """Return (elements, layout) of a file that begins with a header; None for other files."""
    if len(data) < HEADER:
        return None
    size, arrangement, number, *shape = data[:HEADER].view("<i4").tolist()
    while shape and shape[-1] == 0:  # unused lengths
        shape.pop()
    if arrangement not in LINES or number not in TYPE_NUMBERS or len(shape) not in (3, 4) or min(shape) < 1:
        return None
    dtype = np.dtype(TYPES[TYPE_NUMBERS[number]])
    if size != len(data) - HEADER or size != math.prod(shape) * dtype.itemsize:
        return None
    return data[HEADER:].view(dtype).reshape(shape), LINES[arrangement]
