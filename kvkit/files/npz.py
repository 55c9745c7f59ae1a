"""The file contract: named arrays in a .npz file, as numpy writes them, and what numpy leaves out.

A file is a zip archive of members NAME.npy. When kvkit wrote it the array ``kvkit.json`` is a text in JSON
(which numpy copies with the others; the oldest files have a plain text of that name instead):

    version     1, the version of this contract
    producer    "kvkit 0.1.0"
    dtypes      {name: dtype}, which says bfloat16 and float8 where a .npy header can only say "2 bytes"
    description     of a cache: its layout, sizes, format, tables, positions; see `kvkit.files.description`
    operator, attributes    what made the arrays, in a file of results

numpy.load opens such a file, and numpy.savez makes one that is as good: a 2-byte void array is bfloat16.

Reading copies small files. Of larger ones it maps arrays that are stored uncompressed into memory,
copy-on-write: data is read when it is used, once, and changing an array never changes the file. The zip
checksum of mapped data is therefore not compared; sizes are, and what is copied is checked whole. A mapped
file may be replaced, but not changed: the system ends a process that reads what was cut off a file.
Writing aligns the data of every array to 64 bytes, gives equal bytes for equal arrays, and replaces the old
file in one step or not at all.
"""

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvkit.errors import brief
from kvkit.files import description, file_kinds, members
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
METADATA = "kvkit.json"
TEXTS = {METADATA: members.read_text, f"{METADATA}.npy": members.read_text_array}  # how it is read
OUTDATED = f"save it again, without the array {METADATA} if others have changed"


def read(
    path: FilePath,
    check: Callable[[dict[str, ArrayHeader], dict[str, Any]], object] = lambda forms, metadata: None,
) -> Contents:
    """Read the arrays and the metadata of a file; stored arrays are copied or mapped copy-on-write.

    `check` may refuse the file: it sees the form of every array and the metadata before any is unpacked.
    """
    check_source(path)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        mapped = status if status.st_size > MAX_COPIED else None
        check_kind(path, file_kinds.kind_of_file(file))
        with reading_errors(path, "not a zip archive, or cut short"):
            archive = zipfile.ZipFile(file)
        with archive:
            found = {info.filename: info for info in archive.infolist()}
            check_kind(path, file_kinds.kind_of_archive(found))
            check_names(path, [info.filename for info in archive.infolist()])
            metadata: dict[str, Any] = {}
            forms: dict[str, ArrayHeader] = {}
            arrays: dict[str, Array] = {}
            for name, read_text in TEXTS.items():
                if name in found:
                    with reading_errors(path, f"member {quoted(name)} is damaged"):
                        metadata = json.loads(read_text(archive, found.pop(name)))
            check_metadata(path, metadata)
            said = metadata.get("dtypes", {})
            for name, info in found.items():
                with reading_errors(path, f"member {quoted(name)} is damaged"):
                    short = name.removesuffix(".npy")
                    forms[short] = members.read_form(archive, info, said.get(short))
            check_dtypes(path, said, forms)
            check(forms, metadata)
            for name, form in forms.items():
                with reading_errors(path, f"member {quoted(name + '.npy')} is damaged"):
                    arrays[name] = members.read(archive, found[f"{name}.npy"], mapped and file, form)
    described = description.parse_description(path, metadata.get("description"))
    return Contents(arrays, metadata, mapped, ".npz", described, notes_in(metadata))


def check_kind(path: FilePath, other: tuple[str, str] | None) -> None:
    """Refuse a file of another kind."""
    if other:
        what, cure = other
        raise file_error(path, f"not a .npz file, but {what}", cure)


def check_names(path: FilePath, names: Iterable[str]) -> None:
    """Refuse members that are no arrays, or there twice."""
    known = set()
    for name in names:
        if name != METADATA and (not name.endswith(".npy") or name == ".npy"):
            raise file_error(path, f"member {quoted(name)} is no array", f"keep only NAME.npy and {METADATA}")
        if name.removesuffix(".npy") in known:
            raise file_error(path, f"member {quoted(name)} is there twice")
        known.add(name.removesuffix(".npy"))


def check_new_name(path: FilePath, name: str) -> None:
    """Refuse a name that a zip archive cannot hold."""
    size = len(name.encode(errors="replace"))
    if not name or "\0" in name or size > 65_000 or name.encode(errors="ignore").decode() != name:
        raise file_error(path, f"no array in it can be called {brief(repr(name))}", "give it another name")


def check_metadata(path: FilePath, metadata: Any) -> None:
    """Refuse metadata of another form or version."""
    dtypes = metadata.get("dtypes", {}) if isinstance(metadata, dict) else None
    if not isinstance(dtypes, dict):
        raise file_error(path, f"{METADATA} or its dtypes are no object")
    if metadata.get("version", VERSION) != VERSION:
        found = brief(repr(metadata["version"]))
        raise file_error(path, f"{METADATA} has version {found}, not {VERSION}", "update kvkit")


def check_dtypes(path: FilePath, dtypes: Mapping[str, str], forms: Mapping[str, ArrayHeader]) -> None:
    """Refuse arrays of other dtypes than the metadata says."""
    for name, dtype in dtypes.items():
        found = forms[name].dtype.name if name in forms else "absent"
        if found != dtype:
            said = f"{brief(name)} is {brief(dtype)}"
            raise file_error(path, f"{METADATA} says that {said}, but it is {found}", OUTDATED)


def write(
    path: FilePath,
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, Any] | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write arrays and metadata. An existing file stays intact until the new one is complete.

    `advance` is called with the number of bytes of each part that has been written.
    """
    check_target(path)
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    if METADATA in whole:
        raise file_error(
            path, f"{METADATA} is the name of what kvkit says of a file", "give that array another"
        )
    for name, array in whole.items():
        check_new_name(path, name)
        if not members.is_storable(array.dtype) or not array.dtype.itemsize:
            raise file_error(
                path, f"{name} has dtype {array.dtype}, which no .npz file can say", "convert it"
            )
    about = {"version": VERSION, "producer": f"kvkit {__version__}", **(metadata or {})}
    about["dtypes"] = {name: array.dtype.name for name, array in whole.items()}
    text = json.dumps(about, indent=2) + "\n"
    if len(text) > members.TEXT_LIMIT:
        size = f"a description of {len(text)} bytes, which nobody would read"
        raise file_error(path, size, "write several files")
    with name_in_errors(path), replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in whole.items():
            members.write(archive, f"{name}.npy", array, file.tell(), advance)
        members.write(archive, f"{METADATA}.npy", np.array(text.encode()), file.tell())
