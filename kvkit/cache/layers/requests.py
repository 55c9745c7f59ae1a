"""What a layer may be asked for: positions, crops, rows of its batch."""

import numpy as np

from kvkit.checks import index_tensors
from kvkit.checks.values import integer
from kvkit.errors import argument_error


def first_position(cache_position, new, length):
    """The first of the consecutive positions of new tokens, after `length` ones."""
    positions = index_tensors.index("cache_position", cache_position, 1)
    if len(positions) != new:
        raise argument_error("cache_position", f"{new} positions, one for each new token", len(positions))
    start = int(positions[0]) if new else length
    if new and not np.array_equal(positions, np.arange(start, start + new)):
        raise argument_error("cache_position", f"consecutive positions from {start} on", positions)
    return start


def cropped(length, seen):
    """Tokens left by a crop of so many."""
    given = integer("length", length)
    left = min(given or seen, seen) if given >= 0 else seen + given
    if left < 0:
        raise argument_error("length", f"at most {seen} tokens to drop, those seen", -given)
    return left


def batch_rows(indices, batch):
    """Rows of a batch, which may be any before the first update, when it is 0."""
    indices = index_tensors.index("indices", indices, 1)
    if not len(indices):
        raise argument_error("indices", "at least one", "none")
    illegal = indices[(indices < 0) | (indices >= batch)] if batch else indices[:0]
    if len(illegal):
        raise argument_error("indices", f"rows of the batch, 0 to {batch - 1}", illegal[0])
    return indices
