"""Compress arrays of .npz files with zstd, without loss.

The member of a compressed array is uint8 [bytes], one zstd frame with a checksum, and the file's metadata has
its form. The frame unpacks to chunks of elements: of each chunk the first bytes of all elements, then the
second ones, and so on. Exponents and mantissas of floats then lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvkit.files.members import BFLOAT16_DTYPE, FLOAT8, ArrayHeader, as_bytes, is_storable
from kvkit.files.packages import import_package
from kvkit.typed import Array, FilePath

COMPRESSIONS = ("zstd",)
CHUNK_BYTES = 2**18  # of elements whose bytes are regrouped at once, in files too
LEVEL = 1  # level 3 saves no byte in a hundred more, in half the speed
MOST_UNPACKED = 2**16  # a byte of zstd unpacks to fewer


def frame_of(path: FilePath, array: Array) -> Array | None:
    """Return an array's zstd frame, uint8 [bytes]; None if that is not smaller."""
    zstd = import_package(path, "zstandard", "zstd")
    packer = zstd.ZstdCompressor(level=LEVEL, write_checksum=True).compressobj(size=array.nbytes)
    whole = array if array.flags.c_contiguous or array.flags.f_contiguous else np.ascontiguousarray(array)
    parts = []
    for chunk in element_chunks(as_bytes(whole), array.itemsize):  # [elements, itemsize]
        planes = np.concatenate([chunk[:, place] for place in range(chunk.shape[1])])
        parts.append(packer.compress(planes))
    frame = np.frombuffer(b"".join([*parts, packer.flush()]), np.uint8)
    return frame if frame.nbytes < array.nbytes else None


def unpacked(path: FilePath, frame: Array, header: ArrayHeader) -> Array:
    """Return the array of a zstd frame; raise unless the frame has its bytes."""
    zstd = import_package(path, "zstandard", "zstd")
    wanted = math.prod(header.shape) * header.dtype.itemsize
    size = zstd.get_frame_parameters(frame[:18]).content_size
    if size != wanted or size > MOST_UNPACKED * frame.nbytes:
        raise ValueError(f"{frame.nbytes} bytes of zstd hold {size} bytes, its form asks for {wanted}")
    array = np.empty(header.shape, header.dtype, header.order)
    with zstd.ZstdDecompressor().stream_reader(frame) as data:
        for chunk in element_chunks(as_bytes(array), array.itemsize):
            part = np.empty((array.itemsize, len(chunk)), np.uint8)
            rest = memoryview(part.reshape(-1))  # type: ignore[arg-type]
            while rest:
                count = data.readinto(rest)
                if not count:
                    raise ValueError("its zstd frame ends early")
                rest = rest[count:]
            for place, plane in enumerate(part):  # numpy copies a transposed array four times as slowly
                chunk[:, place] = plane
        data.read(1)  # zstd compares the checksum here
    return array


def element_chunks(data: Array, itemsize: int) -> Iterator[Array]:
    """Yield bytes [elements, itemsize] of parts of an array."""
    elements = data.reshape(-1, itemsize)
    count = max(CHUNK_BYTES // itemsize, 1)
    return (elements[i : i + count] for i in range(0, len(elements), count))


def make_form(array: Array) -> list[Any]:
    """Return [dtype, order, *shape] of an array, as the metadata has it."""
    own = array.dtype == BFLOAT16_DTYPE or array.dtype in FLOAT8.values()
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return [array.dtype.name if own else array.dtype.str, "CF"[fortran], *array.shape]


def parse_form(form: Any) -> ArrayHeader:
    """Return the header that a form describes; raise if it describes none."""
    name, order, *shape = form
    dtype = {BFLOAT16_DTYPE.name: BFLOAT16_DTYPE, **FLOAT8}.get(name) or np.dtype(str(name))
    sizes = all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in shape)
    if order not in ("C", "F") or not sizes or not is_storable(dtype) or not dtype.itemsize:
        raise ValueError(f"its form {form} describes no array")
    return ArrayHeader(tuple(shape), dtype, order, 0)
