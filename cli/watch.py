"""Detect that another program changes a file while it is mapped, and refuse its arrays.

If a mapped file is shortened, the system ends a process that reads beyond its new end, by SIGBUS and without
a message. Python's module `signal` cannot help: it calls a handler when the present instruction of Python
ends, and the read never ends. So the handler here is a callback of ctypes, which the system calls at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvkit.errors import KvkitError
from kvkit.files.errors import file_error

HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)  # void handler(int signal_number)
DEFAULT_HANDLER = None  # SIG_DFL, a null pointer: the signal ends the process
STDERR = 2


def is_changed(path: Path | None, status: os.stat_result) -> bool:
    """Return whether a file has changed since its status was taken."""
    with contextlib.suppress(OSError):
        now, size_and_time = os.stat(path), (status.st_size, status.st_mtime_ns)
        return os.path.samestat(now, status) and (now.st_size, now.st_mtime_ns) != size_and_time
    return False  # the file was removed or replaced; the mapping keeps its bytes


def changed_error(path: Path | None) -> KvkitError:
    """Return the error that names a changed file."""
    return file_error(path, "another program changed it while it was in use", "run this again")


def refuse_changed(path: Path | None, status: os.stat_result | None) -> None:
    """Raise if a file was changed while it was mapped; `status` is None if it is not mapped."""
    if status and is_changed(path, status):
        raise changed_error(path)


@contextlib.contextmanager
def watching(files: Mapping[Path | None, os.stat_result | None]) -> Iterator[None]:
    """Print a message if the system ends the process because a mapped file was shortened.

    `files` is {path: status of the file when it was mapped, or None if it is not mapped}.
    """
    mapped = {path: status for path, status in files.items() if status is not None}
    if not mapped or os.name != "posix":  # Windows forbids changing a mapped file
        yield
        return

    def on_sigbus(number: int) -> None:
        # ctypes waits for the GIL before this line, in the thread that reads. Either this thread has the GIL
        # already, or another thread has it, which runs on and gives it up.
        changed = next((path for path, status in mapped.items() if is_changed(path, status)), None)
        if changed is not None:
            os.write(STDERR, f"kvkit: {changed_error(changed)}\n".encode())
            os._exit(1)
        libc.signal(number, DEFAULT_HANDLER)  # not our files: the read is tried again, and ends the process

    libc, handler = ctypes.CDLL(None), HANDLER(on_sigbus)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGBUS, before)
