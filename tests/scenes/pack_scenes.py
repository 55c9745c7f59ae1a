"""Make the pack of the suite `pmx` once for a process of tests."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np

from kvkit.tools import vectors
from kvkit.tools.vectors import packs


@functools.cache
def pmx_pack():
    """Return the folder of a pack, which is removed when the process ends."""
    room = Path(tempfile.mkdtemp(prefix="kvkit-pack-"))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    vectors.make(room / "pmx", "pmx")
    return room / "pmx"


def answers(pack, folder, edit=None):
    """Write the right results of a pack, but what `edit(case, arguments, name, array)` makes of one."""
    for case in packs.manifest(pack)["cases"]:
        given = packs.arguments(pack, case)
        for group, name, entry in packs.entries(case):
            if group != "arguments":
                array = packs.array(pack, entry)
                array = edit(case, given, name, array) if edit else array
                (folder / case["name"]).mkdir(exist_ok=True, parents=True)
                np.save(folder / case["name"] / f"{name}.npy", array.view(array.dtype.str))
