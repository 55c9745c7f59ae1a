"""Replace a file atomically: at every moment the old or the new file is there, complete."""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvkit.files.locks import AVAILABLE, lock
from kvkit.typed import FilePath

TEMPORARY = re.compile(r"\.kvkit-[0-9a-f]{12}\.tmp")  # names of temporary files


@contextlib.contextmanager
def replacing(path: FilePath) -> Iterator[BinaryIO]:
    """Yield a new binary file. It replaces `path` when the block ends, and is removed if the block raises.

    Processes that have the old file open or mapped keep its bytes. A symbolic link then leads to the new
    file. Temporary files that killed processes left in the folder are removed.
    """
    target = Path(os.path.realpath(path))
    remove_leftovers(target.parent)
    with new_file(target.parent) as (temporary, file):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        yield file
        file.flush()
        os.fsync(file.fileno())
        if not AVAILABLE:
            file.close()  # an open file keeps its name on Windows
        try:
            os.replace(temporary, target)  # still locked, so that no other process removes it
        except PermissionError as error:
            if os.name == "nt":
                why = "Windows replaces no file that is open or mapped: write to another name"
                raise PermissionError(error.errno, why, str(target)) from error
            raise
    if os.name == "posix":  # makes the new name durable, too
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def new_file(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield (path, file) of a temporary file: locked while it is open, removed afterwards unless renamed."""
    while True:
        path = folder / f".kvkit-{secrets.token_hex(6)}.tmp"
        try:
            with open(path, "xb") as file:
                lock(file, wait=True)
                if AVAILABLE and not os.fstat(file.fileno()).st_nlink:
                    continue  # another process removed it before it was locked
                yield path, file
                return
        finally:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of this user that no process has locked."""
    if not AVAILABLE:
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(entry.path, "rb", opener=open_no_link) as file:
                    if os.fstat(file.fileno()).st_uid == os.geteuid() and lock(file):
                        os.unlink(entry.path)


def open_no_link(path: str, flags: int) -> int:
    """Open a file unless it is a symbolic link: an opener for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
