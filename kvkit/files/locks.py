"""Locks on open files, which the system gives back when a process ends, however it ends."""

import contextlib
import os

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, and nothing is taken for locked
    fcntl = None  # type: ignore[assignment]


def lock(file, wait=False):
    """Whether this open file is now locked by this process; None where files cannot be."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


@contextlib.contextmanager
def alone(path):
    """Whether nobody else has this file locked in such a way: until the block ends, nobody else will."""
    while True:
        with open(path, "r+b") as file:
            held = lock(file) is not False
            if held and not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                continue  # whoever had it has replaced it
            yield held
            return
