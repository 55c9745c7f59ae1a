"""Make the pack of the suite `pmx` once for a process of tests."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from kvkit.tools import vectors


@functools.cache
def pmx_pack():
    """Return the folder of a pack, which is removed when the process ends."""
    room = Path(tempfile.mkdtemp(prefix="kvkit-pack-"))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    vectors.make(room / "pmx", "pmx")
    return room / "pmx"
