"""Read chunks of LMCache from a disk or a store: raw elements, described by the file name or a header.

A file is called MODEL@RANKS@RANK@HASH@TYPE.pt (``local_disk``) or .data (``fs``), with @LAYER after the type
if each layer has a file. A .data file, or an object of Mooncake's store, may begin with a header of integers:
bytes, arrangement, type, four lengths. Files of ``fs`` below the distributed storage name no type.
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
from kvkit.typed import Array, FilePath

NAME = re.compile(
    r"(?P<model>.+)@(?P<ranks>\d+)@(?P<rank>\d+)@(?P<hash>[0-9a-f]+)@(?P<type>[a-z][a-z0-9_]*)"
    r"(?:@(?P<layer>\d+))?(?:@[^@%]+%[^@]*)*\.(?:pt|data)"
)
PLAIN = re.compile(
    r"(?P<model>.+)@0x(?P<ranks>[0-9a-f]{8})@(?P<group>[0-9a-f]+)@(?P<hash>[0-9a-f]+)(?:@.*)?\.data"
)
TYPES = {
    "half": np.float16, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float": np.float32,
    "float32": np.float32, "uint8": np.uint8, "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
NUMBERED = {1: "half", 2: "half", 3: "bfloat16", 4: "float", 6: "uint8", 7: "fp8", 8: "fp8_e5m2"}
LINES = {1: "| kv l n (h c)", 2: "| n kv (h c)", 3: "| kv n (h c)", 6: "| 1 l n c"}  # by arrangement
HEADER = 7  # integers
SAY = "its elements alone are in the file: say l, h and c in sizes, n is what is left"


def about(path: FilePath) -> dict[str, Any] | None:
    """Parse the name of a chunk; return None for other names."""
    name = os.path.basename(os.fspath(path))
    match = NAME.fullmatch(name) or PLAIN.fullmatch(name)
    return match and {key: text for key, text in match.groupdict().items() if text is not None}


def read(path: FilePath, said: dict[str, Any]) -> Contents:
    """Read a chunk; `said` is the result of `about` for its name."""
    with open(path, "rb") as file:
        data, mapped = mapping.map_file(file)
    found = headed(data)
    if found is not None:
        array, line = found
        axes = line.replace("(h c)", "").split()[1:]
        sizes = {axis: size for axis, size in zip(axes, array.shape, strict=False) if axis in "ln"}
        notes = (llama.HEADS,) if "h" in line else ()
        described = Description(line, sizes, array.dtype.name, rope_applied=True)
        return Contents({"cache": array}, said, mapped, "chunk of LMCache", described, notes)
    dtype = TYPES.get(said.get("type", ""))
    if dtype is None or len(data) % np.dtype(dtype).itemsize:
        note = "neither its name nor a header says the type of its elements: these are its bytes"
        return Contents({"bytes": data}, said, mapped, "chunk of LMCache", notes=(note,))
    array = data.view(dtype)
    line = "| (n kv h c)" if "layer" in said else "| (kv l n h c)"
    described = Description(line, {}, array.dtype.name, rope_applied=True)
    return Contents({"cache": array}, said, mapped, "chunk of LMCache", described, (SAY,))


def headed(data: Array) -> tuple[Array, str] | None:
    """Return the elements after a header and their line; None if there is no header."""
    if len(data) < 4 * HEADER:
        return None
    size, kind, dtype, *lengths = data[: 4 * HEADER].view("<i4").tolist()
    while lengths and lengths[-1] == 0:
        lengths.pop()
    if kind not in LINES or dtype not in NUMBERED or len(lengths) not in (3, 4) or min(lengths) < 1:
        return None
    element = np.dtype(TYPES[NUMBERED[dtype]])
    if size != len(data) - 4 * HEADER or size != math.prod(lengths) * element.itemsize:
        return None
    return data[4 * HEADER :].view(element).reshape(lengths), LINES[kind]
