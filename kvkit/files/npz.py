"""Read and write .npz files: named arrays, as numpy.savez writes them, with kvkit's metadata.

A file is a zip archive of members NAME.npy. In files that kvkit wrote, the array ``kvkit.json`` is a JSON
text (in the oldest files it is a plain member of that name):

    version     1, the version of this contract
    producer    "kvkit 0.1.0"
    dtypes      {name: dtype}, because a .npy header cannot name bfloat16 and float8
    description             of a cache: see `kvkit.files.description`
    operator, attributes    the call that computed the arrays, in a file of results
    forms       {name: [dtype, order, *shape]} of arrays that are zstd frames, see `kvkit.files.compression`;
                then the version is 2

numpy.load opens such a file. kvkit reads files of numpy.savez, too: a 2-byte void array is bfloat16.

Small files are copied. In larger files, arrays that are stored uncompressed are mapped copy-on-write: data is
read when it is used, and changing an array never changes the file. The zip checksum of mapped data is not
compared (sizes are); copied data is checked completely. A mapped file may be replaced, but not truncated: the
system ends a process that reads beyond the end. `write` aligns the data of every array to 64 bytes, writes
equal bytes for equal arrays, and replaces an old file atomically.
"""

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks.values import text as checked_text
from kvkit.errors import brief
from kvkit.files import compression, description, file_kinds, members
from kvkit.files.contents import Contents, notes_in
from kvkit.files.errors import FileError, file_error, quoted, reading_errors
from kvkit.files.mapping import MAX_COPIED
from kvkit.files.members import ArrayHeader
from kvkit.files.paths import check_source, check_target, keep_for_changes, name_in_errors
from kvkit.files.replace import replacing
from kvkit.typed import Array, FilePath
from kvkit.version import __version__

__all__ = ["Contents", "FileError", "check_target", "keep_for_changes", "read", "write"]

VERSION = 1
COMPRESSED_VERSION = 2  # of files with compressed arrays
FORMS, COMPRESSED = "forms", "compressed"  # in metadata; the second is for readers, of no file
METADATA = "kvkit.json"
METADATA_READERS = {METADATA: members.read_text, f"{METADATA}.npy": members.read_text_array}  # by member
OUTDATED = f"save it again, without the array {METADATA} if others have changed"


def read(
    path: FilePath,
    check: Callable[[dict[str, ArrayHeader], dict[str, Any]], object] = lambda headers, metadata: None,
) -> Contents:
    """Read the arrays and the metadata of a file.

    `check` may refuse the file: it gets the headers of all arrays, and the metadata, before any is unpacked.
    """
    check_source(path)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        mapped = status if status.st_size > MAX_COPIED else None
        check_kind(path, file_kinds.kind_of_file(file))
        with reading_errors(path, "not a zip archive, or cut short"):
            archive = zipfile.ZipFile(file)
        with archive:
            entries = {info.filename: info for info in archive.infolist()}
            check_kind(path, file_kinds.kind_of_archive(entries))
            check_names(path, [info.filename for info in archive.infolist()])
            metadata: dict[str, Any] = {}
            headers: dict[str, ArrayHeader] = {}
            arrays: dict[str, Array] = {}
            for name, read_text in METADATA_READERS.items():
                if name in entries:
                    with reading_errors(path, f"member {quoted(name)} is damaged"):
                        metadata = json.loads(read_text(archive, entries.pop(name)))
            dtypes = metadata.get("dtypes", {}) if isinstance(metadata, dict) else None
            if not isinstance(dtypes, dict):
                raise file_error(path, f"{METADATA} or its dtypes are no object")
            known = COMPRESSED_VERSION if metadata.get(FORMS) else VERSION
            if metadata.get("version", VERSION) != known:
                version = brief(repr(metadata.get("version")))
                raise file_error(path, f"{METADATA} has version {version}, not {known}", "update kvkit")
            for name, info in entries.items():
                with reading_errors(path, f"member {quoted(name)} is damaged"):
                    short = name.removesuffix(".npy")
                    headers[short] = members.read_member_header(archive, info, dtypes.get(short))
            for name, dtype in dtypes.items():
                found = headers[name].dtype.name if name in headers else "absent"
                if found != dtype:
                    said = f"{brief(name)} is {brief(dtype)}"
                    raise file_error(path, f"{METADATA} says that {said}, but it is {found}", OUTDATED)
            stored, packed = dict(headers), packed_headers(path, metadata, headers)
            headers |= packed
            check(headers, metadata)
            to_map = file if mapped else None
            for name, header in stored.items():
                with reading_errors(path, f"member {quoted(name + '.npy')} is damaged"):
                    array = members.read(archive, entries[f"{name}.npy"], to_map, header)
                    arrays[name] = (
                        compression.unpacked(path, array, packed[name]) if name in packed else array
                    )
    described = description.parse_description(path, metadata.get("description"))
    return Contents(arrays, metadata, mapped, ".npz", described, notes_in(metadata))


def check_kind(path: FilePath, other: tuple[str, str] | None) -> None:
    """Refuse a file of another kind."""
    if other:
        what, cure = other
        raise file_error(path, f"not a .npz file, but {what}", cure)


def check_names(path: FilePath, names: Iterable[str]) -> None:
    """Refuse members that are not arrays, and names that occur twice."""
    seen = set()
    for name in names:
        if name != METADATA and (not name.endswith(".npy") or name == ".npy"):
            raise file_error(path, f"member {quoted(name)} is no array", f"keep only NAME.npy and {METADATA}")
        if name.removesuffix(".npy") in seen:
            raise file_error(path, f"member {quoted(name)} is there twice")
        seen.add(name.removesuffix(".npy"))


def packed_headers(
    path: FilePath, metadata: dict[str, Any], stored: Mapping[str, ArrayHeader]
) -> dict[str, ArrayHeader]:
    """Return the headers of compressed arrays; the metadata then says how large they are in the file."""
    found: dict[str, ArrayHeader] = {}
    forms = metadata.pop(FORMS, None) or {}
    with reading_errors(path, f"the {FORMS} in {METADATA} are damaged"):
        for name, form in forms.items():
            if name not in stored or stored[name].dtype != np.uint8 or len(stored[name].shape) != 1:
                raise ValueError(f"{brief(name)} is no array of bytes")
            found[name] = compression.parse_form(form)
    if found:
        sizes = ({name: math.prod(each.shape) * each.dtype.itemsize for name, each in own.items()}
                 for own in (stored, {**stored, **found}))  # fmt: skip
        now, whole = (sum(own.values()) for own in sizes)
        metadata[COMPRESSED] = f"zstd, {now:,} bytes for {whole:,}"
    return found


def write(
    path: FilePath,
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, Any] | None = None,
    advance: Callable[[int], object] = lambda count: None,
    compress: str | None = None,
) -> None:
    """Write arrays and metadata, perhaps compressed with "zstd".

    An existing file stays intact until the new one is complete.
    """
    check_target(path)
    if compress is not None:
        checked_text("compress", compress, compression.COMPRESSIONS)
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    if METADATA in whole:
        raise file_error(path, f"{METADATA} is the name of kvkit's metadata", "give that array another name")
    for name, array in whole.items():
        size = len(name.encode(errors="replace"))
        if not name or "\0" in name or size > 65_000 or name.encode(errors="ignore").decode() != name:
            what = f"no array in it can be called {brief(repr(name))}"
            raise file_error(path, what, "give it another name")
        if not members.is_storable(array.dtype) or not array.dtype.itemsize:
            what = f"{name} has dtype {array.dtype}, which no .npz file can name"
            raise file_error(path, what, "convert it")
    about = {"version": VERSION, "producer": f"kvkit {__version__}", **(metadata or {})}
    about.pop(COMPRESSED, None)
    if compress is not None:
        tried = {name: compression.frame_of(path, array) for name, array in whole.items()}
        frames = {name: frame for name, frame in tried.items() if frame is not None}
        about[FORMS] = {name: compression.make_form(whole[name]) for name in frames}
        about["version"] = COMPRESSED_VERSION if about[FORMS] else about["version"]
        whole |= frames
    about["dtypes"] = {name: array.dtype.name for name, array in whole.items()}
    text = json.dumps(about, indent=2) + "\n"
    if len(text) > members.TEXT_LIMIT:
        what = f"metadata of {len(text)} bytes, more than the {members.TEXT_LIMIT} that can be read"
        raise file_error(path, what, "write several files")
    with name_in_errors(path), replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in whole.items():
            members.write(archive, f"{name}.npy", array, file.tell(), advance)
        members.write(archive, f"{METADATA}.npy", np.array(text.encode()), file.tell())
