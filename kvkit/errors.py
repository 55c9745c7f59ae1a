"""The errors that kvkit raises, and the words of their messages."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np


class KvkitError(ValueError):
    """An argument is wrong. The message names it, what was expected and what was given."""


class DeviceError(KvkitError):
    """The asked-for backend cannot run on this machine."""


class CapacityError(KvkitError):
    """A cache of fixed size has no room for the new tokens."""


class TooFewTokensError(KvkitError):
    """A scorer keeps more tokens, whatever their scores, than there are or may stay."""


def argument_error(
    name: str, expected: object, got: object, kind: type[KvkitError] = KvkitError
) -> KvkitError:
    """Return an error whose message has the form of all: NAME: expected WHAT, got WHAT."""
    return kind(f"{name}: expected {expected}, got {got}")


def printable(text: object) -> str:
    """Return a text from elsewhere in one line, with Python's escapes for its control characters."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(text))


def brief(text: object, most: int = 80) -> str:
    """Return a foreign text so that it fits in a message: printable, in one line, at most `most` long."""
    shown = printable(str(text)[: most + 1])  # the rest is not looked at
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def describe(value: Any) -> str:
    """Describe an argument in a few words; of an array its dtype and shape, never the contents."""
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


def nearest(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """Return known names that are like a name, the likeliest first."""
    originals, low = {known_name.lower(): known_name for known_name in known}, name.lower()
    likely = [key for key in originals if key == low]
    if len(low) > 2:
        likely += [key for key in originals if key.startswith(low)] + [key for key in originals if low in key]
    likely += difflib.get_close_matches(low, originals, n=count)
    return [originals[key] for key in dict.fromkeys(likely)][:count]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` for a name that is like a known one, or ''."""
    likely = nearest(name, known, 1)
    return f" (did you mean {likely[0]}?)" if likely else ""
