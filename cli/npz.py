"""Read and write .npz files as `kvkit.files.npz` does, with a bar on a terminal for large ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvkit.files import npz
from kvkit.files.npz import Contents, FileError, check_target, keep_for_changes, read
from kvkit_cli.show import progress

__all__ = ["Contents", "FileError", "check_target", "keep_for_changes", "read", "write"]


def write(
    path: Path, arrays: dict[str, Any], metadata: dict[str, Any] | None = None, quiet: bool = False
) -> None:
    """Write arrays and metadata. The old file stays until the new one is complete."""
    total = sum(np.asarray(array).nbytes for array in arrays.values())
    with progress(f"writing {Path(path).name}", total, quiet) as advance:
        npz.write(path, arrays, metadata, advance)
