"""Measure in bits how much a guess explains: rows that it predicts need no other description."""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma, log
from typing import Any

import numpy as np

MOSTLY = 0.75  # the share of a row's elements that a guess must predict to explain the row


@dataclass(frozen=True)
class Extent:
    """Holds the rows that a guess explains; masks are [planes, rows, heads]."""

    saved: float  # bits
    rows: np.ndarray  # mask of explained rows
    missing: np.ndarray  # mask of rows whose bytes were moved elsewhere, by the guess
    same: np.ndarray  # mask of elements that are predicted [planes, rows, heads, content]
    cost: np.ndarray  # bits that describe the rest of each row


class Evidence:
    """Holds the differing rows [planes, rows, heads], and the bits that describe each unexplained row.

    A row with k wrong elements of c costs the bits that name these k, and the bits of each wrong element. The
    latter is drawn, with equal probability, from the expected elements of differing rows or from all words.
    """

    def __init__(self, expected: np.ndarray, got: np.ndarray, equal: Any, before: Any) -> None:
        self.expected, self.got, self.open = expected, got, ~equal
        content = got.shape[-1]
        wrong = self.open.any(axis=-1)
        self.share = max(float(wrong.mean()), 1 / wrong.size)
        self.marker = entropy(self.share) / self.share  # bits that mark a row as differing
        self.places = np.array([log2_choices(content, k) + np.log2(content + 1) for k in range(content + 1)])
        self.elements = word_bits(expected[wrong], got)
        self.cost = self.describe(self.open)
        octets = expected.view(np.uint8) != got.view(np.uint8)
        octets = octets.reshape(*got.shape, got.dtype.itemsize).sum(axis=-1)
        self.bytes = np.where(self.open, octets, 0)
        self.differing = int(self.bytes.sum())
        self.background = is_constant(got) if before is None else is_constant(got) | (before == got).all(-1)

    def describe(self, wrong: np.ndarray) -> Any:
        """Return the bits that describe each row [planes, rows, heads] with these wrong elements."""
        count = wrong.sum(axis=-1)
        bits = self.places[count] + self.marker + np.where(wrong, self.elements, 0).sum(axis=-1)
        return np.where(count > 0, bits, 0)

    def extent(
        self, same: Any, predicted: np.ndarray, guess: Any, near: Any, inexact: float
    ) -> Extent | None:
        """Return the rows that a guess explains; None if it saves no bits."""
        cost = self.describe(~same)
        if near is not None:
            cost = cost + inexact * near.sum(axis=-1)
        gain = self.cost - cost - guess.row_bits
        gain = np.where(same.mean(axis=-1) >= MOSTLY, gain, np.minimum(gain, 0))
        if guess.targets is not None:  # a constant row is no evidence for its origin
            gain = np.where(is_constant(predicted), np.minimum(gain, 0), gain)
        if gain.max(initial=0) <= 0:
            return None
        saved, rows = choose_rows(gain)
        missing = np.zeros_like(rows)
        if guess.targets is not None:
            helped = rows & (gain > 0)
            missing = (guess.targets >= 0) & helped.reshape(-1)[guess.targets]
            missing &= ~helped & self.open.any(axis=-1)
            saved += float(self.cost[missing & self.background].sum())
        return Extent(saved - guess.bits, rows, missing, same, cost)

    def settle(self, extent: Extent) -> int:
        """Mark the elements that an extent explains as explained; return their bytes."""
        explained = self.open & (extent.same & extent.rows[..., None] | extent.missing[..., None])
        found = int(self.bytes[explained].sum())
        self.open = self.open & ~explained
        self.cost = np.where(extent.rows, np.minimum(extent.cost, self.cost), self.cost)
        self.cost = np.where(extent.missing, 0, self.cost)
        return found


def word_bits(expected: np.ndarray, got: np.ndarray) -> Any:
    """Return the bits of each word of `got`, which is drawn from the expected words or from all words."""
    words, counts = count_words(expected)
    nowhere, total = 2.0 ** -(8 * got.dtype.itemsize + 1), 2 * max(1, expected.size)
    if len(words) == 2 ** (8 * got.dtype.itemsize):
        return -np.log2(counts / total + nowhere).astype(np.float32)[got]
    at = np.minimum(np.searchsorted(words, got), len(words) - 1)
    return -np.log2(np.where(words[at] == got, counts[at] / total, 0.0) + nowhere).astype(np.float32)


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
    """Return (bits saved, mask) of the best set of rows: all, a box of subsets along the axes, or any set."""
    choices = [(float(gain.sum()), np.ones(gain.shape, bool))]
    sets = [np.ones(size, bool) for size in gain.shape]
    weights = np.maximum(gain, 0)
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
    several = gain > np.log2(gain.size / max(1, int((gain > 0).sum()))) + 1.5
    choices.append((float(gain[several].sum()) - subset_bits(several.reshape(-1)), several))
    return max(choices, key=lambda each: each[0])


def subset_bits(members: np.ndarray) -> float:
    """Return the bits that name a subset of the members: everything, a range, or any other."""
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
