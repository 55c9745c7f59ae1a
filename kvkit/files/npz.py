"""The file contract: named arrays in a .npz file, as numpy writes them, and what numpy leaves out.

A file is a zip archive of members NAME.npy. When kvkit wrote it the array ``kvkit.json`` is a text in JSON
(which numpy copies with the others; files of kvkit 0.1 have a member of this name that is no array):

    version     1, the version of this contract
    producer    "kvkit 0.1.0"
    dtypes      {name: dtype}, which says bfloat16 where a .npy header can only say "2 bytes"
    operator, attributes    what made the arrays, in a file of results

numpy.load opens such a file, and numpy.savez makes one that is as good: a 2-byte void array is bfloat16.

Reading copies small files. Of larger ones it maps arrays that are stored uncompressed into memory,
copy-on-write: data is read when it is used, once, and changing an array never changes the file. The zip
checksum of mapped data is therefore not compared; sizes are, and what is copied is checked whole. A mapped
file may be replaced, but not changed: the system ends a process that reads what was cut off a file.
Writing aligns the data of every array to 64 bytes, gives equal bytes for equal arrays, and replaces the old
file in one step or not at all.
"""

import contextlib
import errno
import json
import os
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvkit.errors import KvkitError, brief
from kvkit.files import foreign, locks, members
from kvkit.files.replace import replacing
from kvkit.version import __version__

VERSION = 1
METADATA = "kvkit.json"
SMALL = 2**24  # bytes of a file that is read at once
AGAIN = "save or copy the file again"
OUTDATED = f"save it again, without the array {METADATA} if others have changed"


class FileError(KvkitError):
    """A file is not what it should be: path, what is wrong, what to do."""


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    arrays: dict[str, np.ndarray]
    metadata: dict
    mapped: os.stat_result | None = None  # status of the file, if arrays may be


def read(path, check=lambda forms, metadata: None):
    """The arrays and the metadata of a file; stored arrays are copied or mapped copy-on-write.

    `check` may refuse the file: it sees the form of every array and the metadata before any is unpacked.
    """
    check_source(path)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        mapped = status if status.st_size > SMALL else None
        check_kind(path, foreign.kind(file))
        with explained(path, "not a zip archive, or cut short"):
            archive = zipfile.ZipFile(file)
        with archive:
            found = {info.filename: info for info in archive.infolist()}
            check_kind(path, foreign.kind_of_archive(found))
            check_names(path, [info.filename for info in archive.infolist()])
            metadata, forms, arrays = {}, {}, {}
            for name, info in found.items():
                with explained(path, f"member {quoted(name)} is damaged"):
                    if name == METADATA:
                        metadata = json.loads(members.text(archive, info))
                    elif name == f"{METADATA}.npy":
                        metadata = json.loads(members.text_of_array(archive, info))
                    else:
                        forms[name.removesuffix(".npy")] = members.form(archive, info)
            check_metadata(path, metadata, forms)
            check(forms, metadata)
            for name, form in forms.items():
                with explained(path, f"member {quoted(name + '.npy')} is damaged"):
                    arrays[name] = members.read(archive, found[f"{name}.npy"], mapped and file, form)
    return Contents(arrays, metadata, mapped)


def check_source(path):
    """There must be a file to read."""
    if not os.path.exists(path):
        raise FileError(f"{path}: no such file: check the name")
    if not os.path.isfile(path):
        raise FileError(f"{path}: not a regular file: give a .npz file")


def check_kind(path, other):
    if other:
        raise FileError(f"{path}: not a .npz file, but {other}")


@contextlib.contextmanager
def explained(path, wrong):
    """Say in our words that bytes make no sense: zipfile, numpy and json have a dozen exceptions for it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except MemoryError:
        raise
    except Exception as error:
        # A seek to an absurd place is the file's fault; any other OSError is the machine's.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise FileError(f"{path}: {wrong} ({brief(str(error) or type(error).__name__)}): {AGAIN}") from error


def quoted(name):
    return f"'{brief(name)}'"


def check_names(path, names):
    known = set()
    for name in names:
        if name != METADATA and (not name.endswith(".npy") or name == ".npy"):
            raise FileError(f"{path}: member {quoted(name)} is no array: keep only NAME.npy and {METADATA}")
        if name.removesuffix(".npy") in known:
            raise FileError(f"{path}: member {quoted(name)} is there twice: {AGAIN}")
        known.add(name.removesuffix(".npy"))


def check_metadata(path, metadata, forms):
    dtypes = metadata.get("dtypes", {}) if isinstance(metadata, dict) else None
    if not isinstance(dtypes, dict):
        raise FileError(f"{path}: {METADATA} or its dtypes are no object: {AGAIN}")
    if metadata.get("version", VERSION) != VERSION:
        found = brief(repr(metadata["version"]))
        raise FileError(f"{path}: {METADATA} has version {found}, not {VERSION}: update kvkit")
    for name, dtype in dtypes.items():
        found = forms[name].dtype.name if name in forms else "absent"
        if found != dtype:
            said = f"{brief(name)} is {brief(dtype)}"
            raise FileError(f"{path}: {METADATA} says that {said}, but it is {found}: {OUTDATED}")


def check_target(path):
    """Whether `write` can make or replace this file; to be asked before long work."""
    target = Path(os.path.realpath(path))
    folder = path if os.path.islink(path) else Path(path).parent  # as it was named
    if not target.parent.is_dir():
        raise FileError(f"{path}: there is no folder {folder}: make it first")
    if target.exists() and not target.is_file():
        raise FileError(f"{path}: not a regular file: give another name")
    # The file itself need not be writeable to be replaced, but whoever made it read-only meant it.
    for place, name in ((target.parent, folder), (target, path)):
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))


@contextlib.contextmanager
def named(path):
    """Let errors of the machine name this file, not a temporary one or none."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def alone(path):
    """Until the block ends this file is ours to change; refused if another process has it in this way."""
    check_source(path)
    with locks.alone(path) as held:
        if not held:
            raise FileError(f"{path}: another run is changing it in place: wait until that has ended")
        yield


def write(path, arrays, metadata=None, advance=lambda count: None):
    """Write arrays, and metadata beside what is always said; the old file is whole until the new one is.

    `advance` hears of every number of bytes that is done.
    """
    check_target(path)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    if METADATA in arrays:
        raise FileError(
            f"{path}: {METADATA} is the name of what kvkit says of a file: give that array another"
        )
    for name, array in arrays.items():
        if not members.has_name(array.dtype) or not array.dtype.itemsize:
            raise FileError(f"{path}: {name} has dtype {array.dtype}, which no .npz file can say: convert it")
    about = {"version": VERSION, "producer": f"kvkit {__version__}", **(metadata or {})}
    about["dtypes"] = {name: array.dtype.name for name, array in arrays.items()}
    text = json.dumps(about, indent=2) + "\n"
    if len(text) > members.TEXT_LIMIT:
        raise FileError(
            f"{path}: a description of {len(text)} bytes, which nobody would read: write several files"
        )
    with named(path), replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            members.write(archive, f"{name}.npy", array, file.tell(), advance)
        members.write(archive, f"{METADATA}.npy", np.array(text.encode()), file.tell())
