"""The words of errors: one form for all of them."""

import numpy as np

from kvkit.errors import KvkitError


def wrong(name, expected, got, kind=KvkitError):
    """The one form of an error message."""
    return kind(f"{name}: expected {expected}, got {got}")


def describe(value):
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    return f"{type(value).__name__} {value!r}" if not isinstance(value, type(None)) else "None"
