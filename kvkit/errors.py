"""What kvkit raises when it is asked for something it cannot do."""

from collections.abc import Collection

import numpy as np


class KvkitError(ValueError):
    """An argument is wrong. The message names it, what was expected and what came; nothing was written."""


class DeviceError(KvkitError):
    """The asked-for backend cannot run on this machine."""


class CapacityError(KvkitError):
    """A cache of fixed size has no room for the new tokens."""


def argument_error(name, expected, got, kind=KvkitError):
    """The one form of an error message."""
    return kind(f"{name}: expected {expected}, got {got}")


def brief(text, most=80):
    """A text from elsewhere as a message may hold it: printable, in one line, and cut."""
    text = str(text)  # of which no more is looked at than can be shown
    shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


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
