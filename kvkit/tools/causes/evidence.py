"""Measure in bits how much of a difference a guess explains: its minimum description length.

Without a guess, a difference is a list of rows with their wrong elements. A guess needs the bits of its own
numbers and of the set of rows to which it applies; of these rows, only what it does not predict is listed::

    expected  1 2 3 4   got  0 0 0 0    as a list: 11 wrong bytes, 75 bits
              5 6 7 8        1 2 3 4    "the next row": 1 bit. Rows 1 and 2 are predicted, and row 0 is blank
              9 8 7 6        5 6 7 8    because its bytes moved away, so nothing is left to list
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma, log
from typing import Any

import numpy as np

MOSTLY = 0.75  # the share of a row's elements that a guess must predict to explain the row
INEXACT = 3  # bits of an element that its prediction only approximates


@dataclass(frozen=True)
class Guess:
    """Holds the prediction of an array by a cause; shapes [planes, rows, heads] are as in `Trial.as_rows`."""

    detail: str  # the variant of the cause
    predicted: np.ndarray
    bits: float = 0.0  # bits of the numbers that the prediction needs
    row_bits: Any = 0.0  # such bits for each row [planes, rows, heads]
    near: np.ndarray | None = None  # mask of elements that are predicted up to rounding
    # If rows move: flat index of each row's new place [planes, rows, heads], -1 if it is unknown or outside.
    targets: np.ndarray | None = None


@dataclass(frozen=True)
class Explanation:
    """Says which rows a guess explains, and how many bits that saves. Masks are [planes, rows, heads]."""

    saved: float  # bits
    rows: np.ndarray  # mask of the rows that the guess predicts
    vacated: np.ndarray  # mask of differing rows that the guess moved away and does not predict
    same: np.ndarray  # mask of elements that are predicted [planes, rows, heads, content]
    row_bits: np.ndarray  # bits that list what the guess leaves wrong in each row


class Unexplained:
    """Holds the wrong elements that no guess explains yet, and the bits that list them row by row.

    A row with k wrong elements of c takes the bits that name these k, and the bits of each wrong word. A word
    is drawn, with equal probability, from the expected words of differing rows or from all words.
    """

    def __init__(self, expected: np.ndarray, got: np.ndarray, equal: Any, before: Any) -> None:
        self.wrong = ~equal  # [planes, rows, heads, content]
        content, rows = got.shape[-1], self.wrong.any(axis=-1)
        share = max(float(rows.mean()), 1 / rows.size)
        self.marker_bits = entropy(share) / share  # bits that mark a row as differing
        counts = range(content + 1)  # of wrong elements; then the bits that say how many, and which
        self.place_bits = np.array([log2_choices(content, k) + np.log2(content + 1) for k in counts])
        self.word_bits = word_bits(expected[rows], got)
        self.row_bits = self.bits_of(self.wrong)
        octets = expected.view(np.uint8) != got.view(np.uint8)
        octets = octets.reshape(*got.shape, got.dtype.itemsize).sum(axis=-1)
        self.bytes = np.where(self.wrong, octets, 0)  # differing bytes of each wrong element
        self.differing = int(self.bytes.sum())
        # Rows to which nothing was written, as far as one can see.
        self.blank = is_constant(got) if before is None else is_constant(got) | (before == got).all(-1)

    def bits_of(self, wrong: np.ndarray) -> Any:
        """Return the bits that list the wrong elements of each row [planes, rows, heads]."""
        count = wrong.sum(axis=-1)
        bits = self.place_bits[count] + self.marker_bits + np.where(wrong, self.word_bits, 0).sum(axis=-1)
        return np.where(count > 0, bits, 0)

    def explain(self, guess: Guess, predicted: np.ndarray, same: Any, near: Any) -> Explanation | None:
        """Return what a guess explains; None if it saves no bits.

        `predicted` are its words; `same` and `near` mark the elements that it predicts, perhaps nearly.
        """
        row_bits = self.bits_of(~same)
        if near is not None:
            row_bits = row_bits + INEXACT * near.sum(axis=-1)
        gain = self.row_bits - row_bits - guess.row_bits
        # A row that is predicted only in part gains no bits, but the guess may cost some there.
        gain = np.where(same.mean(axis=-1) >= MOSTLY, gain, np.minimum(gain, 0))
        if guess.targets is not None:  # a constant row is no evidence for its origin
            gain = np.where(is_constant(predicted), np.minimum(gain, 0), gain)
        if gain.max(initial=0) <= 0:
            return None
        saved, rows = choose_rows(gain)
        vacated = np.zeros_like(rows)
        if guess.targets is not None:  # a row that moved away explains what it left behind, if that is blank
            helped = rows & (gain > 0)
            vacated = (guess.targets >= 0) & helped.reshape(-1)[guess.targets]
            vacated &= ~helped & self.wrong.any(axis=-1)
            saved += float(self.row_bits[vacated & self.blank].sum())
        return Explanation(saved - guess.bits, rows, vacated, same, row_bits)

    def remove(self, found: Explanation) -> int:
        """Remove the elements that are explained from the wrong ones; return how many bytes they are."""
        explained = self.wrong & (found.same & found.rows[..., None] | found.vacated[..., None])
        self.wrong = self.wrong & ~explained
        self.row_bits = np.where(found.rows, np.minimum(found.row_bits, self.row_bits), self.row_bits)
        self.row_bits = np.where(found.vacated, 0, self.row_bits)
        return int(self.bytes[explained].sum())


def word_bits(expected: np.ndarray, got: np.ndarray) -> Any:
    """Return -log2(p) of each word of `got`, where p = share in `expected` / 2 + 1 / number of words / 2."""
    words, counts = count_words(expected)
    any_word, total = 2.0 ** -(8 * got.dtype.itemsize + 1), 2 * max(1, expected.size)
    if len(words) == 2 ** (8 * got.dtype.itemsize):
        return -np.log2(counts / total + any_word).astype(np.float32)[got]
    at = np.minimum(np.searchsorted(words, got), len(words) - 1)
    return -np.log2(np.where(words[at] == got, counts[at] / total, 0.0) + any_word).astype(np.float32)


def count_words(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (ascending words, how often each occurs): for up to 16 bits, of all possible words."""
    if array.dtype.itemsize > 2:
        return np.unique(array, return_counts=True)
    size = 2 ** (8 * array.dtype.itemsize)
    return np.arange(size).astype(array.dtype), np.bincount(array.reshape(-1), minlength=size)


def is_constant(rows: np.ndarray) -> Any:
    """Return a mask of the rows [..., content] whose elements are all equal."""
    return (rows == rows[..., :1]).all(axis=-1)


def choose_rows(gain: np.ndarray) -> tuple[float, np.ndarray]:
    """Return (bits saved, mask) of the best set of rows to apply a guess to, by each row's gain in bits.

    Three sets are compared, because a set takes bits itself: all rows (none); a box, that is a subset of each
    axis [planes, rows, heads], such as head 3 of all layers (`subset_bits` of each axis); and any rows.
    """
    choices = [(float(gain.sum()), np.ones(gain.shape, bool))]
    sets = [np.ones(size, bool) for size in gain.shape]
    weights = np.maximum(gain, 0)  # at first, because losses of other heads would hide a row that gains
    for axis in (1, 2, 0, 1, 2, 0):
        rest = tuple(i for i in range(3) if i != axis)
        inside = np.ix_(*(np.ones_like(s) if i == axis else s for i, s in enumerate(sets)))
        sets[axis] = weights[inside].sum(axis=rest) > 0
        weights = gain
        if not sets[axis].any():
            break
    else:
        inside = np.ix_(*sets)
        box = np.zeros(gain.shape, bool)
        box[inside] = True
        choices.append((float(gain[inside].sum()) - sum(map(subset_bits, sets)), box))
    bits_to_name_a_row = np.log2(gain.size / max(1, int((gain > 0).sum()))) + 1.5  # about
    several = gain > bits_to_name_a_row
    choices.append((float(gain[several].sum()) - subset_bits(several.reshape(-1)), several))
    return max(choices, key=lambda each: each[0])


def subset_bits(members: np.ndarray) -> float:
    """Return the bits that name the members of a set, a mask: everything, a range, or any others."""
    count, size = int(members.sum()), len(members)
    if count == size:
        return 0.0 if size == 1 else 1.0
    positions = np.flatnonzero(members)
    size_bits = float(np.log2(size))
    if count and positions[-1] - positions[0] + 1 == count:
        return 2 + (size_bits if count == 1 else 2 * size_bits)
    return 2 + size_bits + log2_choices(size, count)


def entropy(share: float) -> float:
    """Return the entropy in bits of a yes or no, by the probability of yes."""
    return sum(-p * float(np.log2(p)) for p in (share, 1 - share) if p > 0)


def log2_choices(size: int, count: int) -> float:
    """Return log2 of the number of ways to choose `count` of `size`."""
    return (lgamma(size + 1) - lgamma(count + 1) - lgamma(size - count + 1)) / log(2)
