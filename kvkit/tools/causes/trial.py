"""Try causes of a difference: what each would have given, and how much of the difference that explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkit.formats import BY_DTYPE

ORDER = "l", "kv", "b", "n", "h", "c"
LEAST = 0.02  # of the differing bytes, for a cause to be said


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause that explains some of a difference.

    Attributes
    ----------
    array : str
        Where.
    name : str
        What it is called in the documentation.
    detail : str
        Which of its forms.
    explained, differing : int
        Bytes.
    """

    array: str
    name: str
    detail: str
    explained: int
    differing: int

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        share = self.explained / self.differing
        of = f"{self.explained} of {self.differing} bytes ({share:.1%})"
        return f"{self.array}: {self.name}{detail} explains {of}"


@dataclass(frozen=True)
class Trial:
    """An array with named axes: the expected one, and the one that is there instead.

    `like` are inputs by name, `others` the arrays that are expected beside this one.
    """

    name: str
    axes: tuple[str, ...]
    expected: np.ndarray
    got: np.ndarray
    like: dict[str, Any] = field(default_factory=dict)
    others: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def is_float(self) -> bool:
        """Return whether the array holds floats."""
        fmt = BY_DTYPE.get(self.expected.dtype)
        return fmt is not None and bool(fmt.significant)

    def axis(self, name: str) -> Any:
        """Return the index of an axis; None if there is none."""
        return self.axes.index(name) if name in self.axes else None

    def rows(self, array: np.ndarray) -> Any:
        """Return [layers and sides, rows, heads, content], a row a position; None without such axes."""
        wanted = [name for name in ORDER if name in self.axes]
        if "n" not in wanted or "c" not in wanted or len(wanted) != len(self.axes):
            return None
        array = array.transpose([self.axes.index(name) for name in wanted])
        sizes = {name: array.shape[i] for i, name in enumerate(wanted)}
        planes = sizes.get("l", 1) * sizes.get("kv", 1)
        return array.reshape(planes, sizes.get("b", 1) * sizes["n"], sizes.get("h", 1), sizes["c"])

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows with the axes of the array."""
        wanted: list[str] = [name for name in ORDER if name in self.axes]
        shape = [self.expected.shape[self.axes.index(name)] for name in wanted]
        return rows.reshape(shape).transpose([wanted.index(name) for name in self.axes])


Guesses = Iterator[tuple[str, np.ndarray]]
CAUSES: dict[str, Callable[[Trial], Guesses]] = {}


def cause(name: str) -> Callable[[Callable[[Trial], Guesses]], Callable[[Trial], Guesses]]:
    """Enter a function into the table of causes: a decorator.

    It yields (detail, what would be there): an array like the expected one, or a mask of elements that are
    explained where there is nothing to compare byte by byte.
    """

    def enter(function: Callable[[Trial], Guesses]) -> Callable[[Trial], Guesses]:
        CAUSES[name] = function
        return function

    return enter


def octets(array: np.ndarray) -> np.ndarray:
    """Return the bytes of elements, [..., bytes of an element]."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def try_causes(trial: Trial) -> list[Cause]:
    """Return the causes that explain something, the best first; of each the form that explains most."""
    expected, got = octets(trial.expected), octets(trial.got)
    differing = expected != got
    total, found = int(differing.sum()), []
    for name, function in CAUSES.items():
        best = (0, "")
        with np.errstate(all="ignore"):
            for detail, guess in function(trial):
                if guess.dtype == bool and trial.expected.dtype != bool:
                    same = np.broadcast_to(guess[..., None], differing.shape)
                else:
                    same = octets(guess) == got
                best = max(best, (int((differing & same).sum()), detail))
        if best[0] > LEAST * total:
            found.append(Cause(trial.name, name, best[1], best[0], total))
    return sorted(found, key=lambda each: -each.explained)
