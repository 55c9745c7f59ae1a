"""Try causes of a difference. The best cause saves most bits of description, its own bits subtracted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkit.errors import printable
from kvkit.formats import BY_DTYPE
from kvkit.tools.causes.evidence import Explanation, Guess, Unexplained
from kvkit.tools.counting import Tolerances, equal_elements, word_view

ORDER = "l", "kv", "b", "n", "h", "c"
LEAST_BITS = 12  # the fewest bits that a cause must save: chance saves as many once in 4096 guesses
LEAST_SHARE = 0.02  # the least share of the differing bytes that a further cause must explain
NEARLY_ALL = 0.9  # the least share of the differing bytes of attention's outputs that a cause must explain
SURE_BITS = 4  # if a guess leaves no more bits unexplained, other causes are not tried
MOST_CAUSES = 3  # the most causes of an array


@dataclass(frozen=True, slots=True)
class Cause:
    """Names a cause that explains some of a difference.

    Attributes
    ----------
    array : str
        The array's name.
    name : str
        The cause's name in the documentation.
    detail : str
        The variant of the cause, or "".
    explained, differing : int
        How many bytes the cause explains, and how many differ.
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
        return f"{printable(self.array)}: {self.name}{detail} explains {of}"


@dataclass(frozen=True)
class Trial:
    """Holds an array that differs, for which causes are tried: the expected one, and what was got."""

    name: str
    axes: tuple[str, ...]  # letters, as in layouts
    expected: np.ndarray
    got: np.ndarray
    like: dict[str, Any] = field(default_factory=dict)  # inputs of the call
    others: dict[str, np.ndarray] = field(default_factory=dict)  # other expected arrays
    tolerances: Tolerances = (0.0, 0.0, 0)
    memo: dict[str, Any] = field(default_factory=dict)  # what several causes need

    @property
    def is_float(self) -> bool:
        """Return whether the array holds floats."""
        fmt = BY_DTYPE.get(self.expected.dtype)
        return fmt is not None and bool(fmt.significant)

    @property
    def before(self) -> np.ndarray | None:
        """Return the array before the call; None if it was not given."""
        before = self.like.get(f"before_{self.name}", self.like.get("before"))
        if not isinstance(before, np.ndarray) or before.shape != self.expected.shape:
            return None
        return before.astype(self.expected.dtype, copy=False)

    @property
    def is_attention(self) -> bool:
        """Return whether the array may be an output or log-sum-exp of attention with the given queries."""
        query, array = self.like.get("query"), self.expected
        if not isinstance(query, np.ndarray) or not self.is_float or self.before is not None:
            return False
        return query.ndim - array.ndim in (0, 1) and array.size % max(math.prod(query.shape[:-1]), 1) == 0

    def axis(self, name: str) -> Any:
        """Return the index of an axis; None if the array lacks it."""
        return self.axes.index(name) if name in self.axes else None

    @property
    def has_rows(self) -> bool:
        """Return whether the array has axes n and c, and only axes of layouts."""
        wanted = [name for name in ORDER if name in self.axes]
        return "n" in wanted and "c" in wanted and len(wanted) == len(self.axes)

    def token_rows(self, array: np.ndarray) -> Any:
        """Return the array as [planes, rows, heads, content]; None unless it `has_rows`."""
        return self.as_rows(array) if self.has_rows else None

    def as_rows(self, array: np.ndarray) -> np.ndarray:
        """Return an array with the axes of this one as [planes, rows, heads, content].

        Axes l and kv become planes, b and n rows, h heads and c content. An array that does not `has_rows`
        becomes [1, rows, 1, last axis].
        """
        if not self.has_rows:
            return array.reshape(1, -1, 1, array.shape[-1] if array.ndim > 1 else 1)
        wanted = [name for name in ORDER if name in self.axes]
        array = array.transpose([self.axes.index(name) for name in wanted])
        sizes = {name: array.shape[i] for i, name in enumerate(wanted)}
        planes = sizes.get("l", 1) * sizes.get("kv", 1)
        return array.reshape(planes, sizes.get("b", 1) * sizes["n"], sizes.get("h", 1), sizes["c"])

    def from_rows(self, rows: np.ndarray) -> np.ndarray:
        """Undo `token_rows`: return [planes, rows, heads, content] with the axes of the array."""
        wanted: list[str] = [name for name in ORDER if name in self.axes]
        shape = [self.expected.shape[self.axes.index(name)] for name in wanted]
        return rows.reshape(shape).transpose([wanted.index(name) for name in self.axes])


Guesses = Iterator[Guess]
CAUSES: dict[str, Callable[[Trial], Guesses]] = {}


def cause(name: str) -> Callable[[Callable[[Trial], Guesses]], Callable[[Trial], Guesses]]:
    """Decorate a function that yields guesses, to enter it into `CAUSES`. Its docstring says the cause."""

    def enter(function: Callable[[Trial], Guesses]) -> Callable[[Trial], Guesses]:
        CAUSES[name] = function
        return function

    return enter


def try_causes(trial: Trial) -> list[Cause]:
    """Return the causes of a difference, the one that saves most bits first; [] if none saves enough.

    Each further cause must explain differences that the earlier ones leave.
    """
    if trial.expected.dtype.itemsize not in (1, 2, 4, 8) or trial.expected.dtype.kind == "c":
        return []
    expected, got = (word_view(trial.as_rows(array)) for array in (trial.expected, trial.got))
    equal = trial.as_rows(equal_elements(trial.expected, trial.got, trial.tolerances))
    before = None if trial.before is None else word_view(trial.as_rows(trial.before))
    unexplained = Unexplained(expected, got, equal, before)
    causes: list[Cause] = []
    while len(causes) < MOST_CAUSES and unexplained.wrong.any():
        best = best_guess(trial, unexplained)
        if best is None:
            break
        name, detail, explanation = best
        explained = unexplained.remove(explanation)
        if causes and explained < LEAST_SHARE * unexplained.differing:
            break
        causes.append(Cause(trial.name, name, detail, explained, unexplained.differing))
    # Outputs are sums: a cause that explains some of them is chance.
    least = NEARLY_ALL * unexplained.differing if trial.is_attention else 0
    return [each for each in causes if each.explained >= least]


def best_guess(trial: Trial, unexplained: Unexplained) -> tuple[str, str, Explanation] | None:
    """Return (cause, variant, explanation) of the guess that saves most bits; None if none saves enough."""
    best: tuple[str, str, Explanation] | None = None
    everything = float(unexplained.row_bits.sum()) - SURE_BITS
    for name, function in CAUSES.items():
        if best is not None and best[2].saved >= everything:
            break
        with np.errstate(all="ignore"):
            for guess in function(trial):
                same = equal_elements(guess.predicted, trial.got, trial.tolerances)
                near = None
                if guess.near is not None:
                    near = trial.as_rows(guess.near & ~same)
                    same = same | guess.near
                predicted = word_view(trial.as_rows(guess.predicted))
                found = unexplained.explain(guess, predicted, trial.as_rows(same), near)
                least = LEAST_BITS if best is None else best[2].saved
                if found is not None and found.saved > least:
                    best = name, guess.detail, found
    return best
