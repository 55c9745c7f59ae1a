"""A file that is changed while it is mapped: what is read then is neither the old nor the new.

Where it was shortened the system ends whoever reads behind its end, by SIGBUS and without a word.
"""

import contextlib
import ctypes
import os
import signal

from kvkit.files.errors import file_error

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int)


def changed(path, status):
    """Whether a file is no longer as its status said."""
    with contextlib.suppress(OSError):
        now = os.stat(path)
        return os.path.samestat(now, status) and (now.st_size, now.st_mtime_ns) != (
            status.st_size,
            status.st_mtime_ns,
        )
    return False  # it has gone, and the mapping keeps its bytes


def complaint(path):
    return file_error(path, "another program changed it while it was in use", "run this again")


def check(path, status):
    """Refuse results of a file that was changed; `status` is None if none is mapped."""
    if status and changed(path, status):
        raise complaint(path)


@contextlib.contextmanager
def watched(path, status):
    """Say so if the system ends the process because a mapped file was shortened."""
    if status is None or os.name != "posix":  # Windows lets nobody change a mapped file
        yield
        return

    def ended(number):
        # Whoever reads an array holds nothing that Python needs to speak.
        if changed(path, status):
            os.write(2, f"kvkit: {complaint(path)}\n".encode())
            os._exit(1)
        libc.signal(number, None)  # another fault: it comes again, and ends the process

    libc, handler = ctypes.CDLL(None), FUNCTION(ended)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGBUS, before)
