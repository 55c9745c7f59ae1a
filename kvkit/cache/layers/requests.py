"""Check the positions of new tokens, the length of a crop, and rows of a batch."""

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit.checks import index_tensors
from kvkit.checks.values import integer
from kvkit.errors import argument_error
from kvkit.typed import Array


def check_positions(cache_position: ArrayLike, new: int, length: int) -> int:
    """Check the consecutive positions of new tokens, after `length` ones; return the first."""
    positions = index_tensors.index("cache_position", cache_position, 1)
    if len(positions) != new:
        raise argument_error("cache_position", f"{new} positions, one for each new token", len(positions))
    start = int(positions[0]) if new else length
    if new and not np.array_equal(positions, np.arange(start, start + new)):
        raise argument_error("cache_position", f"consecutive positions from {start} on", positions)
    return start


def length_after_crop(length: SupportsIndex, seen: int) -> int:
    """Return how many of the `seen` tokens a crop to `length` leaves: 0 keeps all, below 0 drops tokens."""
    given = integer("length", length)
    left = min(given or seen, seen) if given >= 0 else seen + given
    if left < 0:
        raise argument_error("length", f"at most {seen} tokens to drop", -given)
    return left


def check_rows(indices: ArrayLike, batch: int) -> Array:
    """Check row indices against the batch size. Before the first update (`batch` is 0) any are legal."""
    rows: Array = index_tensors.index("indices", indices, 1)
    if not len(rows):
        raise argument_error("indices", "at least one", "none")
    illegal = rows[(rows < 0) | (rows >= batch)] if batch else rows[:0]
    if len(illegal):
        raise argument_error("indices", f"rows of the batch, 0 to {batch - 1}", illegal[0])
    return rows
