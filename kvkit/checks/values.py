"""Checks of plain values."""

import operator
from collections.abc import Collection
from typing import Any

import numpy as np

from kvkit.errors import argument_error, describe


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return an int, given as one, as a numpy integer or as an array of one, within low..high."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu":
        value = value.item()
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise argument_error(name, "an integer", describe(value))
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"an integer from {low} to {high}"
        size = number.bit_length()
        raise argument_error(name, bounds, number if size < 128 else f"a number of {size} bits")
    return number


def choice(name: str, value: Any, legal: Collection[int]) -> int:
    """Return one of the legal integers."""
    chosen = integer(name, value)
    if chosen not in legal:
        raise argument_error(name, " or ".join(map(str, legal)), chosen)
    return chosen


def text(name: str, value: object, legal: Collection[str]) -> str:
    """Return one of the legal texts."""
    if not isinstance(value, str) or value not in legal:
        raise argument_error(name, " or ".join(map(repr, legal)), describe(value))
    return value


def finite_number(name: str, value: Any) -> float:
    """Return a finite number."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not abs(value) < 3e38:
        raise argument_error(name, "a finite number", describe(value))
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """Return a finite number above 0."""
    checked = finite_number(name, value)
    if checked <= 0:
        raise argument_error(name, "a positive number", checked)
    return checked


def flag(name: str, value: Any) -> bool:
    """Return True or False; ONNX says 1 and 0."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(choice(name, value, (0, 1)))


def window_sides(name: str, value: Any) -> tuple[int, int]:
    """Return the two sides (left, right) of a window."""
    try:
        left, right = (operator.index(size) for size in value)
    except (TypeError, ValueError):
        raise argument_error(name, "a pair of integers (left, right)", describe(value)) from None
    if min(left, right) < -1:
        raise argument_error(name, "sizes of at least 0, or -1 for no limit", (left, right))
    return min(left, 2**62), min(right, 2**62)
