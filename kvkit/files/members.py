"""Map, unpack or write arrays as members of a zip archive. Errors here are ValueErrors."""

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

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
VOID16 = np.dtype("V2")  # numpy writes bfloat16 so
FLOAT8: dict[str, np.dtype[Any]] = {  # numpy writes these as "V1"; only the file's metadata names the dtype
    dtype.name: dtype
    for dtype in map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu))
}
ALIGNMENT = 64
CHUNK = 2**24
DEFLATE_LIMIT = 1032  # the most bytes that a deflated byte unpacks to
HEADER_LIMIT = 2048  # characters; 64 axes of 2**63 elements need 1,400
TEXT_LIMIT = 2**24
ENCRYPTED = 1  # a bit of a member's flags
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
LOCAL_HEADER, ZIP64_EXTRA = 30, 20
PADDING = struct.Struct("<HHH")  # extra field 0xD935 as Android's zipalign has it: size, alignment, zeros


@dataclass(frozen=True)
class ArrayHeader:
    """The header of an array: shape, dtype, order, and where the array begins after the header."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    begin: int


def read_form(archive: zipfile.ZipFile, member: zipfile.ZipInfo, said: object = None) -> ArrayHeader:
    """Return the form of a member's array; the sizes in its headers must agree.

    `said` is the name of its dtype in the metadata, if there is one.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is neither stored nor deflated")
    if member.flag_bits & ENCRYPTED:
        raise ValueError("it is encrypted")
    with archive.open(member) as data:
        found, size = read_header(data, member.file_size, said)
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != size:
        raise ValueError(f"it is stored in {member.compress_size} bytes, not {size}")
    if size > DEFLATE_LIMIT * member.compress_size:
        raise ValueError(f"{member.compress_size} bytes cannot unpack to {size}")
    return found


def read_header(data: IO[bytes], length: int, said: object = None) -> tuple[ArrayHeader, int]:
    """Return (form, bytes) of an array and its header, which must have `length` bytes."""
    try:
        shape, fortran, dtype = READERS[npy.read_magic(data)](data, max_header_size=HEADER_LIMIT)
    except (MemoryError, RecursionError):  # Python's parser
        raise ValueError("its header is no description of an array") from None
    found = ArrayHeader(shape, resolve_dtype(dtype, said), "F" if fortran else "C", data.tell())
    size = found.begin + math.prod(shape) * found.dtype.itemsize
    if size != length:
        raise ValueError(f"it has {length} bytes, its header asks for {size}")
    return found, size


def read(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: IO[bytes] | None, form: ArrayHeader
) -> Array:
    """Read a member's array: mapped copy-on-write from the archive's file if given, or copied."""
    shape, dtype, order = form.shape, form.dtype, form.order
    if file is None or member.compress_type == zipfile.ZIP_DEFLATED:
        with archive.open(member) as data:
            data.read(form.begin)
            return unpack_into(data, np.empty(shape, dtype, order))
    if 0 in shape:
        return np.empty(shape, dtype, order)  # an empty mapping is impossible
    mapped = np.memmap(file, dtype, "c", data_offset(member, file) + form.begin, shape, order)
    return mapped.view(np.ndarray)


def read_text(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Read the bytes of a small member."""
    if member.file_size > TEXT_LIMIT:
        raise ValueError(f"it has {member.file_size} bytes, more than {TEXT_LIMIT}")
    with archive.open(member) as data:
        found = data.read(member.file_size)
        data.read(1)  # zipfile compares the checksum here
    return found


def read_text_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str | bytes:
    """Read a 0-d array of bytes or characters as a text."""
    found = read_form(archive, member)
    if found.shape or found.dtype.kind not in "SU":
        raise ValueError(f"it is an array of {found.dtype} and shape {found.shape}, not a text")
    characters: str | bytes = np.frombuffer(read_text(archive, member), found.dtype, offset=found.begin)[0]
    return characters


def resolve_dtype(dtype: np.dtype[Any], said: object = None) -> np.dtype[Any]:
    """Return the dtype of a header; raise unless it is a plain one."""
    if dtype == VOID16:
        return BFLOAT16
    if dtype == np.dtype("V1") and isinstance(said, str) and said in FLOAT8:
        return FLOAT8[said]
    if dtype.hasobject:
        raise ValueError("it holds pickled objects; save plain arrays")
    if not is_storable(dtype) or not dtype.itemsize:
        raise ValueError(f"its dtype {dtype} is none that kvkit knows")
    return dtype


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Return whether a file can name this dtype: a plain one of numpy's, bfloat16 or float8."""
    return is_extension_dtype(dtype) or (dtype.kind in "biufcmMSU" and dtype.isbuiltin != 2)


def is_extension_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is bfloat16 or float8, which numpy does not have."""
    return dtype == BFLOAT16 or dtype in FLOAT8.values()


def data_offset(member: zipfile.ZipInfo, file: IO[bytes]) -> int:
    """Return where a stored member's bytes begin, by the lengths in its local header."""
    file.seek(member.header_offset)
    name, extra = struct.unpack_from("<HH", file.read(LOCAL_HEADER), 26)
    return int(member.header_offset + LOCAL_HEADER + name + extra)


def unpack_into(data: IO[bytes], array: Array) -> Array:
    """Fill an array from the rest of a member; at its end zipfile compares the checksum."""
    rest = memoryview(as_bytes(array))  # type: ignore[arg-type]
    while rest:
        count = data.readinto(rest[:CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise ValueError("its data ends early")
        rest = rest[count:]
    data.read(1)
    return array


def member_info(name: str) -> zipfile.ZipInfo:
    """Return a member's entry without the date or the system."""
    member = zipfile.ZipInfo(name)
    member.create_system = 3
    return member


def make_header(array: Array) -> bytes:
    """Return the header of an array in version 1.0; dtypes that numpy lacks are void."""
    made, said = BytesIO(), npy.header_data_from_array_1_0(array)
    if array.dtype in FLOAT8.values():  # some of them pass for floats of numpy's
        said["descr"] = "|V1"
    npy.write_array_header_1_0(made, said)
    return made.getvalue()


def write(
    archive: zipfile.ZipFile,
    name: str,
    array: Array,
    position: int,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write an array at `position` in the archive, its data aligned; `advance` gets each chunk's size."""
    head = make_header(array)
    member = member_info(name)
    begin = position + LOCAL_HEADER + len(name.encode()) + PADDING.size + ZIP64_EXTRA + len(head)
    zeros = -begin % ALIGNMENT
    member.extra = PADDING.pack(0xD935, 2 + zeros, ALIGNMENT) + bytes(zeros)
    with archive.open(member, "w", force_zip64=True) as data:
        data.write(head)
        for chunk in iterate_bytes(array):
            data.write(chunk)
            advance(len(chunk))


def iterate_bytes(array: Array) -> Iterator[bytes | memoryview]:
    """Yield an array's bytes in the order its header says, straight from its memory if they lie there so."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        whole = memoryview(as_bytes(array))  # type: ignore[arg-type]
        yield from (whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK))
        return
    bits = array.view(f"u{array.itemsize}") if is_extension_dtype(array.dtype) else array
    count = max(CHUNK // array.itemsize, 1)
    for piece in np.nditer(bits, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=count):
        yield np.asarray(piece).tobytes()


def as_bytes(array: Array) -> Array:
    """Return the memory of an array without gaps, as bytes."""
    return array.ravel(order="K").view(np.uint8)
