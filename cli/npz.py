"""The file contract of `kvkit.files.npz`, with a bar on a terminal while much is written."""

from pathlib import Path

import numpy as np

from kvkit.files import npz
from kvkit.files.npz import Contents, FileError, alone, check_target, read
from kvkit_cli.show import progress

__all__ = ["Contents", "FileError", "alone", "check_target", "read", "write"]


def write(path, arrays, metadata=None, quiet=False):
    """Write arrays, and metadata beside what is always said; the old file is whole until the new one is."""
    total = sum(np.asarray(array).nbytes for array in arrays.values())
    with progress(f"writing {Path(path).name}", total, quiet) as advance:
        npz.write(path, arrays, metadata, advance)
