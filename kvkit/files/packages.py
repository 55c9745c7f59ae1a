"""Packages that some files need, and that are not always there."""

import importlib

from kvkit.files.errors import file_error


def needed(path, name, extra):
    """A package, or an error that names the extra it comes with."""
    try:
        return importlib.import_module(name)
    except ImportError:
        cure = f"pip install 'kvkit-kernels[{extra}]'"
        raise file_error(
            path, f"this kind of file needs the package {name.partition('.')[0]}", cure
        ) from None
