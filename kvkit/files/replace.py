"""Replacing a file so that at every moment either the old one or the new one is there, whole."""

import contextlib
import os
import secrets
import stat
from pathlib import Path


@contextlib.contextmanager
def replacing(path):
    """A new binary file that takes the place of `path` when the block ends well, and vanishes if it does not.

    The old file keeps its bytes for whoever has it open or mapped; a symbolic link leads to the new.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".kvkit-{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder):
    """Make the new name itself outlive a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
