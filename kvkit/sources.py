"""A digest of the package's source files, taken when `kvkit` is imported.

Compiled code is kept under it. Taken later, after an edit, it would file what was compiled from the old
sources under the new ones, so this is the one module that works at import: a millisecond.
"""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def digest():
    """Of every source file, by name and content; None if one cannot be read."""
    total = hashlib.sha256()
    try:
        for path in sorted(PACKAGE.rglob("[!.]*.py")):
            total.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    except OSError:
        return None
    return total.hexdigest()


IMPORTED = digest()
