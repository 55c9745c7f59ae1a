"""Map, unpack or write arrays as members of a zip archive. Errors here are ValueErrors without the path.

A member that kvkit writes is stored, so that its data can be mapped:

    local header | name | padding | zip64 field | .npy header | data, from a multiple of 64 bytes on
"""

import contextlib
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Any, Literal

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from kvkit.typed import Array

BFLOAT16_DTYPE: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
VOID16 = np.dtype("V2")  # the dtype by which numpy writes bfloat16
FLOAT8: dict[str, np.dtype[Any]] = {  # numpy writes these as "V1"; only the file's metadata names the dtype
    dtype.name: dtype
    for dtype in map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu))
}
ALIGNMENT = 64  # bytes
CHUNK_BYTES = 2**24  # bytes that are read or written at once
DEFLATE_LIMIT = 1032  # the most bytes that a deflated byte unpacks to
HEADER_LIMIT = 2048  # characters; 64 axes of 2**63 elements need 1,400
TEXT_LIMIT = 2**24  # bytes
PARSER_TRIES = 20
ENCRYPTED = 1  # a bit of a member's flags
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}  # by version of .npy
LOCAL_HEADER, ZIP64_FIELD = 30, 20  # bytes
PADDING = struct.Struct("<HHH")  # zipalign's extra field: id 0xD935, size, alignment; zeros follow


@dataclass(frozen=True)
class ArrayHeader:
    """Holds the header of an array in the .npy format."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    begin: int  # the byte after the header, where elements begin


def read_member_header(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, stated: object = None
) -> ArrayHeader:
    """Return the header of a member's array; raise unless its size agrees with the archive's.

    `stated` is the name of the dtype in the file's metadata, if any.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is neither stored nor deflated")
    if member.flag_bits & ENCRYPTED:
        raise ValueError("it is encrypted")
    with archive.open(member) as data:
        header, size = read_header(data, member.file_size, stated)
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != size:
        raise ValueError(f"it is stored in {member.compress_size} bytes, not {size}")
    if size > DEFLATE_LIMIT * member.compress_size:
        raise ValueError(f"{member.compress_size} bytes cannot unpack to {size}")
    return header


def read_header(data: IO[bytes], length: int, stated: object = None) -> tuple[ArrayHeader, int]:
    """Return (header, bytes of header and array); raise unless there are `length` bytes."""
    try:
        shape, fortran, dtype = parse_header(data)
    except (MemoryError, RecursionError):  # Python's parser
        raise ValueError("its header is no description of an array") from None
    header = ArrayHeader(shape, resolve_dtype(dtype, stated), "F" if fortran else "C", data.tell())
    size = header.begin + math.prod(shape) * header.dtype.itemsize
    if size != length:
        raise ValueError(f"it has {length} bytes, its header asks for {size}")
    return header, size


def parse_header(data: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return (shape, whether the order is Fortran's, dtype) of an array whose header begins at position 0.

    The parser of Python 3.11 fails by chance while another thread parses (CPython issue 106905).
    """
    for _ in range(PARSER_TRIES):
        with contextlib.suppress(SystemError):
            return READERS[npy.read_magic(data)](data, max_header_size=HEADER_LIMIT)
        data.seek(0)
    return READERS[npy.read_magic(data)](data, max_header_size=HEADER_LIMIT)


def read(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: IO[bytes] | None, header: ArrayHeader
) -> Array:
    """Read a member's array: a copy, or mapped copy-on-write from `file`, the file of the archive."""
    shape, dtype, order = header.shape, header.dtype, header.order
    if file is None or member.compress_type == zipfile.ZIP_DEFLATED:
        with archive.open(member) as data:
            data.read(header.begin)
            array = np.empty(shape, dtype, order)
            rest = memoryview(as_bytes(array))  # type: ignore[arg-type]
            while rest:
                count = data.readinto(rest[:CHUNK_BYTES])  # type: ignore[attr-defined]
                if not count:
                    raise ValueError("its data ends early")
                rest = rest[count:]
            data.read(1)  # zipfile compares the checksum here
            return array
    if 0 in shape:
        return np.empty(shape, dtype, order)  # an empty mapping is impossible
    file.seek(member.header_offset)
    name_length, extra_length = struct.unpack_from("<HH", file.read(LOCAL_HEADER), 26)
    begin = member.header_offset + LOCAL_HEADER + name_length + extra_length  # of the member's bytes
    mapped = np.memmap(file, dtype, "c", begin + header.begin, shape, order)
    return mapped.view(np.ndarray)


def read_text(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Read the bytes of a small member."""
    if member.file_size > TEXT_LIMIT:
        raise ValueError(f"it has {member.file_size} bytes, more than {TEXT_LIMIT}")
    with archive.open(member) as data:
        text = data.read(member.file_size)
        data.read(1)  # zipfile compares the checksum here
    return text


def read_text_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str | bytes:
    """Read a 0-d array of bytes or characters as a text."""
    header = read_member_header(archive, member)
    if header.shape or header.dtype.kind not in "SU":
        raise ValueError(f"it is an array of {header.dtype} and shape {header.shape}, not a text")
    characters: str | bytes = np.frombuffer(read_text(archive, member), header.dtype, offset=header.begin)[0]
    return characters


def resolve_dtype(dtype: np.dtype[Any], stated: object = None) -> np.dtype[Any]:
    """Return the dtype that a header means: void is bfloat16, or the stated float8; raise for odd ones."""
    if dtype == VOID16:
        return BFLOAT16_DTYPE
    if dtype == np.dtype("V1") and isinstance(stated, str) and stated in FLOAT8:
        return FLOAT8[stated]
    if dtype.hasobject:
        raise ValueError("it holds pickled objects; save plain arrays")
    if not is_storable(dtype) or not dtype.itemsize:
        raise ValueError(f"kvkit does not know its dtype {dtype}")
    return dtype


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Return whether a file can store this dtype: a plain dtype of numpy, bfloat16 or float8."""
    return is_extension_dtype(dtype) or (dtype.kind in "biufcmMSU" and dtype.isbuiltin != 2)


def is_extension_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is bfloat16 or float8, which numpy does not have."""
    return dtype == BFLOAT16_DTYPE or dtype in FLOAT8.values()


def make_header(array: Array) -> bytes:
    """Return the .npy header of an array; dtypes that numpy lacks are void."""
    buffer, fields = BytesIO(), npy.header_data_from_array_1_0(array)
    if array.dtype in FLOAT8.values():  # numpy describes some of them as its own floats
        fields["descr"] = "|V1"
    npy.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def write(
    archive: zipfile.ZipFile,
    name: str,
    array: Array,
    position: int,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write an array at byte `position` of the archive, with aligned data; `advance` gets chunk sizes."""
    head = make_header(array)
    member = zipfile.ZipInfo(name)  # a constant date and system, so that equal arrays give equal files
    member.create_system = 3  # Unix
    begin = position + LOCAL_HEADER + len(name.encode()) + PADDING.size + ZIP64_FIELD + len(head)
    zeros = -begin % ALIGNMENT
    member.extra = PADDING.pack(0xD935, 2 + zeros, ALIGNMENT) + bytes(zeros)
    with archive.open(member, "w", force_zip64=True) as data:
        data.write(head)
        for chunk in iterate_bytes(array):
            data.write(chunk)
            advance(len(chunk))


def iterate_bytes(array: Array) -> Iterator[bytes | memoryview]:
    """Yield an array's bytes in the order that `make_header` states, without a copy if it is contiguous."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        whole = memoryview(as_bytes(array))  # type: ignore[arg-type]
        yield from (whole[i : i + CHUNK_BYTES] for i in range(0, len(whole), CHUNK_BYTES))
        return
    bits = array.view(f"u{array.itemsize}") if is_extension_dtype(array.dtype) else array
    count = max(CHUNK_BYTES // array.itemsize, 1)
    for piece in np.nditer(bits, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=count):
        yield np.asarray(piece).tobytes()


def as_bytes(array: Array) -> Array:
    """Return a contiguous array as bytes, in the order of its memory."""
    return array.ravel(order="K").view(np.uint8)
