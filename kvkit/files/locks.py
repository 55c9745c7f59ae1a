"""Lock open files. The system releases a lock when its process ends, even if it is killed."""

import contextlib
import os
from collections.abc import Iterator
from typing import IO

from kvkit.typed import FilePath

try:
    import fcntl
except ImportError:  # Windows: no file is locked, and none counts as locked
    fcntl = None  # type: ignore[assignment]
AVAILABLE = fcntl is not None


def lock(file: IO[bytes], wait: bool = False) -> bool | None:
    """Try to lock an open file; return whether this process has the lock, or None if there are no locks."""
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
def hold_file(path: FilePath) -> Iterator[bool]:
    """Lock a file until the block ends; yield False if another process has it."""
    while True:
        with open(path, "r+b") as file:
            held = lock(file) is not False
            if held and not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                continue  # another process has replaced the file: open the new one
            yield held
            return
