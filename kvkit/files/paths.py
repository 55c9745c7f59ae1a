"""Check paths before files are read, written or changed in place."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvkit.errors import argument_error, describe
from kvkit.files import locks
from kvkit.files.errors import FileError, file_error
from kvkit.typed import FilePath


def no_such_file(path: FilePath, kind: str = "file") -> FileError:
    """Return the error of a file or folder that does not exist."""
    return file_error(path, f"no such {kind}", "check the name")


def check_path(path: object) -> None:
    """Refuse what is no path: for the system an integer is an open file."""
    if not isinstance(path, (str, os.PathLike)):
        raise argument_error("path", "a path", describe(path))


def check_source(path: FilePath) -> None:
    """Refuse a path without a file to read."""
    check_path(path)
    if not os.path.exists(path):
        raise no_such_file(path)
    if os.path.isdir(path):
        raise file_error(path, "a folder", "give a file in it")
    if not os.path.isfile(path):
        raise file_error(path, "not a regular file", "give another name")


def check_target(path: FilePath) -> None:
    """Refuse a path where no file can be made or replaced. Callers check before long work."""
    check_path(path)
    target = Path(os.path.realpath(path))
    folder = path if os.path.islink(path) else Path(path).parent  # as the caller named it
    if not target.parent.is_dir():
        raise file_error(path, f"there is no folder {folder}", "make it first")
    if target.is_dir():
        raise file_error(path, "a folder", "give a file in it")
    if target.exists() and not target.is_file():
        raise file_error(path, "not a regular file", "give another name")
    # A read-only file can be replaced, but it is protected on purpose.
    for place, name in ((target.parent, folder), (target, path)):
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))


@contextlib.contextmanager
def name_in_errors(path: FilePath) -> Iterator[None]:
    """Make OSErrors name this file, not a temporary file or none."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def keep_for_changes(path: FilePath) -> Iterator[None]:
    """Lock a file for changes in place until the block ends; refuse one that another process has locked."""
    check_source(path)
    with locks.hold_file(path) as held:
        if not held:
            raise file_error(path, "another process is changing it in place", "wait until it has ended")
        yield
