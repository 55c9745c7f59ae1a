"""The words of errors: one form for all of them."""

from collections.abc import Collection

import numpy as np

from kvkit.errors import brief
from kvkit.errors import wrong as wrong


def describe(value):
    """What was given, in a few words: of an array, or of what is like one, never the contents."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (np.generic, type)):
        kind = "an array" if isinstance(value, np.ndarray) else kind
        return f"{kind} of {value.dtype} and shape {tuple(value.shape)}"
    several = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    if several and (len(value) > 8 or not all(isinstance(item, (int, float, str)) for item in value)):
        return f"{kind} of {len(value)} elements"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return f"{kind} {brief(repr(value))}"
