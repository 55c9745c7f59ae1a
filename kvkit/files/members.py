"""One array as a member of a zip archive: mapped, unpacked or written. What is wrong is a ValueError."""

import math
import struct
import zipfile
from io import BytesIO
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VOID16 = np.dtype("V2")  # what numpy writes for bfloat16
ALIGNMENT = 64
CHUNK = 2**24
DEFLATE_LIMIT = 1032  # a deflated byte unpacks to no more than this
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
LOCAL_HEADER, ZIP64_EXTRA = 30, 20
PADDING = struct.Struct("<HHH")  # extra field 0xD935 as Android's zipalign has it: size, alignment, zeros


def read(archive, member, file):
    """A member's array: mapped copy-on-write from the archive's open file if stored, else unpacked.

    The sizes in its headers are held against each other and the file before anything is mapped or allocated.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is neither stored nor deflated")
    with archive.open(member) as data:
        shape, fortran, dtype = READERS[npy.read_magic(data)](data)
        dtype = meant(dtype)
        order: Literal["C", "F"] = "F" if fortran else "C"
        begin = data.tell()
        size = begin + math.prod(shape) * dtype.itemsize
        if size != member.file_size:
            raise ValueError(f"it has {member.file_size} bytes, its header asks for {size}")
        if member.compress_type == zipfile.ZIP_DEFLATED:
            if size > DEFLATE_LIMIT * member.compress_size:
                raise ValueError(f"{member.compress_size} bytes cannot unpack to {size}")
            return unpacked(data, np.empty(shape, dtype, order))
    if size == begin:
        return np.empty(shape, dtype, order)  # there is no such thing as an empty mapping
    mapped = np.memmap(file, dtype, "c", data_offset(member, file) + begin, shape, order)
    return mapped.view(np.ndarray)


def meant(dtype):
    """The dtype that a header means; plain ones only."""
    if dtype == VOID16:
        return BFLOAT16
    if dtype.hasobject:
        raise ValueError("it holds pickled objects; save plain arrays")
    if not has_name(dtype):
        raise ValueError(f"its dtype {dtype} is none that kvkit knows")
    return dtype


def has_name(dtype):
    """Whether a file can say what this dtype is: numpy's plain ones, in a header, and bfloat16."""
    return dtype == BFLOAT16 or (dtype.kind in "biufcmMSU" and dtype.isbuiltin != 2)


def data_offset(member, file):
    """Where a stored member's bytes begin; its local header has name and extra lengths of its own."""
    file.seek(member.header_offset)
    name, extra = struct.unpack_from("<HH", file.read(LOCAL_HEADER), 26)
    begin = member.header_offset + LOCAL_HEADER + name + extra
    if member.compress_size != member.file_size:
        raise ValueError(f"it is stored in {member.compress_size} bytes, not {member.file_size}")
    return begin


def unpacked(data, array):
    """Fill an array from the rest of a member and read to its end, where zipfile compares the checksum."""
    rest = memoryview(flat(array))
    while rest:
        count = data.readinto(rest[:CHUNK])
        if not count:
            raise ValueError("its data ends early")
        rest = rest[count:]
    data.read(1)
    return array


def info(name):
    """A member's entry that says nothing of the day or the system."""
    member = zipfile.ZipInfo(name)
    member.create_system = 3
    return member


def write(archive, name, array, position, advance):
    """Write an array at the archive's `position`, its data aligned; `advance` hears of every chunk's size."""
    header = BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    member = info(name)
    begin = position + LOCAL_HEADER + len(name.encode()) + PADDING.size + ZIP64_EXTRA + header.tell()
    zeros = -begin % ALIGNMENT
    member.extra = PADDING.pack(0xD935, 2 + zeros, ALIGNMENT) + bytes(zeros)
    with archive.open(member, "w", force_zip64=True) as data:
        data.write(header.getvalue())
        for chunk in chunks(array):
            data.write(chunk)
            advance(len(chunk))


def chunks(array):
    """An array's bytes in the order its header says, straight from its memory if they lie there so."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        whole = memoryview(flat(array))
        yield from (whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK))
        return
    bits = array.view(np.uint16) if array.dtype == BFLOAT16 else array
    count = max(CHUNK // array.itemsize, 1)
    for piece in np.nditer(bits, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=count):
        yield np.asarray(piece).tobytes()


def flat(array):
    """The memory of an array without gaps, as bytes."""
    return array.ravel(order="K").view(np.uint8)
