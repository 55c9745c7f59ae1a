"""Keep compiled code on disk, in a folder that no other user may write to, because the code is run.

A folder and its files are used only if they belong to this user or to root, and nobody else may write to
them. Links are not followed. A file begins with a digest of its folder's name, its own name and its contents,
so a renamed file is not used. An invalid file counts as a miss.
"""

import contextlib
import errno
import functools
import hashlib
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FILE_VERSION = 2  # version of the format of the files
DAY = 24 * 3600
UNUSED = 30 * DAY  # seconds without use after which a file is removed
FOLDERS, FILES = re.compile("[0-9a-f]{20}"), re.compile(r"[\w-]+\.bin|tmp\w+")
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
POSIX = os.name == "posix"  # Windows has no descriptors of folders; there a user's profile is private


def root_folder() -> Path | None:
    """Return the folder of all compiled code; None if no code is kept."""
    chosen = os.environ.get("KVKIT_CACHE_DIR")
    if chosen == "":
        return None
    try:
        return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkit")
    except RuntimeError:  # there is no home directory
        return None


def check_owner(handle: int, path: Path) -> None:
    """Refuse a file or folder that somebody else owns or may write to."""
    if POSIX:
        status = os.fstat(handle)
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "others may write to it", str(path))


@contextlib.contextmanager
def open_folder(folder: Path, make: bool = False) -> Iterator[tuple[Callable[[str], str | Path], int | None]]:
    """Open a folder; yield (function from a file's name to its path, `dir_fd`), as functions of `os` take."""
    if make:
        with contextlib.suppress(FileExistsError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(0o700)
    if not POSIX:
        yield folder.joinpath, None
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | NO_LINK)
    try:
        check_owner(handle, folder)
        yield str, handle
    finally:
        os.close(handle)


def digest(file: Path, payload: bytes) -> bytes:
    """Return the digest that a file with these contents begins with."""
    return hashlib.sha256(f"{file.parent.name}/{file.name}\0".encode() + payload).digest()


def load(file: Path) -> bytes | None:
    """Return the contents saved under this path; None if there is no valid file."""
    try:
        with open_folder(file.parent) as (at, folder):
            handle = os.open(at(file.name), os.O_RDONLY | NO_LINK, dir_fd=folder)
            with open(handle, "rb") as stream:
                check_owner(handle, file)
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    return None
                blob = stream.read()
                if abs(time.time() - status.st_mtime) > DAY:
                    with contextlib.suppress(OSError, NotImplementedError, TypeError):
                        os.utime(handle)
    except OSError:
        return None
    return blob[32:] if blob[:32] == digest(file, blob[32:]) else None


def save(file: Path, payload: bytes) -> None:
    """Save contents under a path. A full or read-only disk only costs the next process a compilation."""
    with contextlib.suppress(OSError):
        write(file, digest(file, payload) + payload)
        prune_once()


def write(file: Path, blob: bytes) -> None:
    """Write a file atomically."""
    with open_folder(file.parent, make=True) as (at, folder):
        temporary = at(f"tmp{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK
        handle = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with open(handle, "wb") as stream:
                stream.write(blob)
            os.replace(temporary, at(file.name), src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise


def refusal(folder: Path) -> str | None:
    """Return why a folder cannot keep files; None if it can."""
    probe = folder / f"tmp{secrets.token_hex(8)}"
    try:
        write(probe, b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


@functools.cache
def prune_once() -> None:
    """Remove files that were not used for a month, once in a process, after it has saved code."""
    if folder := root_folder():
        prune(folder, UNUSED)


def prune(root: Path, unused: float) -> tuple[int, int]:
    """Remove files that were not used for `unused` seconds, and empty folders; return (files, bytes)."""
    count = size = 0
    with contextlib.suppress(OSError):
        for folder in [path for path in root.iterdir() if FOLDERS.fullmatch(path.name)]:
            with contextlib.suppress(OSError), open_folder(folder) as (at, handle):
                for name in filter(FILES.fullmatch, os.listdir(folder if handle is None else handle)):
                    with contextlib.suppress(OSError):
                        status = os.stat(at(name), dir_fd=handle, follow_symlinks=False)
                        if time.time() - status.st_mtime >= unused:
                            os.unlink(at(name), dir_fd=handle)
                            count, size = count + 1, size + status.st_size
            with contextlib.suppress(OSError):
                folder.rmdir()
    return count, size


def clean() -> tuple[int, int]:
    """Remove all compiled code; return how many (files, bytes)."""
    folder = root_folder()
    return prune(folder, -math.inf) if folder else (0, 0)
