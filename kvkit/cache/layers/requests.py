"""Check arguments of a layer's calls: positions of new tokens, the length of a crop, rows of the batch."""

from collections.abc import Callable
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks import index_tensors
from kvkit.checks.values import integer
from kvkit.errors import argument_error
from kvkit.typed import Array


def check_positions(
    cache_position: ArrayLike, new: int, length: int, may_start: Callable[[int], bool] | None = None
) -> int:
    """Check the consecutive positions of new tokens; return the first.

    It must be `length`, the position after the last token, or one for which `may_start` is true.
    """
    positions = index_tensors.index("cache_position", cache_position, 1)
    if len(positions) != new:
        raise argument_error("cache_position", f"{new} positions, one for each new token", len(positions))
    start = int(positions[0]) if new else length
    if new and not np.array_equal(positions, np.arange(start, start + new)):
        raise argument_error("cache_position", f"consecutive positions from {start} on", positions)
    if start != length and (may_start is None or not may_start(start)):
        raise argument_error("cache_position", f"positions from {length} on, after the last token", start)
    return start


def length_after_crop(length: SupportsIndex, seen: int) -> int:
    """Return how many of `seen` tokens a crop leaves. A `length` of 0 keeps all; below 0, drop that many."""
    length = integer("length", length)
    left = min(length, seen) if length > 0 else seen + length
    if left < 0:
        raise argument_error("length", f"at most {seen} tokens to drop", -length)
    return left


def check_rows(indices: ArrayLike, batch: int) -> Array:
    """Check the rows that `reorder` takes. Before the first update, when `batch` is 0, any are legal."""
    rows: Array = index_tensors.index("indices", indices, 1)
    if not len(rows):
        raise argument_error("indices", "at least one", "none")
    illegal = rows[(rows < 0) | (rows >= batch)] if batch else rows[:0]
    if len(illegal):
        raise argument_error("indices", f"rows of the batch, 0 to {batch - 1}", illegal[0])
    return rows
