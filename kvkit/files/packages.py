"""Import the optional packages that some kinds of files need."""

import importlib
from typing import Any

from kvkit.files.errors import file_error
from kvkit.typed import FilePath


def import_package(path: FilePath, name: str, extra: str) -> Any:
    """Import a package; if it is missing, raise an error that names the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError:
        what = f"this kind of file needs the package {name.partition('.')[0]}"
        raise file_error(path, what, f"pip install '.[{extra}]' in a clone") from None
