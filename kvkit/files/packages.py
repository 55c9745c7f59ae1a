"""Packages that some files need, and that are not always there."""

import importlib
from typing import Any

from kvkit.files.errors import file_error
from kvkit.typed import FilePath


def import_package(path: FilePath, name: str, extra: str) -> Any:
    """Import a package, or raise an error that names the extra it comes with."""
    try:
        return importlib.import_module(name)
    except ImportError:
        cure = f"pip install 'kvkit-kernels[{extra}]'"
        raise file_error(
            path, f"this kind of file needs the package {name.partition('.')[0]}", cure
        ) from None
