"""What a layer may be asked for: positions, crops, rows of its batch."""

import numpy as np

from kvkit.checks import index_tensors
from kvkit.checks.values import integer
from kvkit.checks.words import wrong


def first_position(layer, cache_position, new):
    """The first of the positions of new tokens."""
    positions = index_tensors.index("cache_position", cache_position, 1)
    if len(positions) != new:
        raise wrong("cache_position", f"{new} positions, one for each new token", len(positions))
    start = int(positions[0]) if new else layer._length
    if new and not np.array_equal(positions, np.arange(start, start + new)):
        raise wrong("cache_position", f"consecutive positions from {start} on", positions)
    if start != layer._length and not layer._may_start(start):
        raise wrong("cache_position", f"positions from {layer._length} on, the tokens seen", start)
    return start


def cropped(layer, length):
    """Tokens left by a legal crop."""
    given = integer("length", length)
    left = min(given or layer._length, layer._length) if given >= 0 else layer._length + given
    if left < 0:
        raise wrong("length", f"at most {layer._length} tokens to drop, those seen", -given)
    if layer._oldest > layer._croppable_to(left):
        raise RuntimeError(
            f"crop of {layer.name}: the window of {left} tokens needs tokens that are not stored; "
            "call activate_past_recording() before they are dropped"
        )
    return left


def rows(layer, indices):
    """Rows of the batch."""
    indices = index_tensors.index("indices", indices, 1)
    if not len(indices):
        raise wrong("indices", "at least one", "none")
    if layer._store is not None:
        batch = layer._store.geometry.batch
        illegal = indices[(indices < 0) | (indices >= batch)]
        if len(illegal):
            raise wrong("indices", f"rows of the batch, 0 to {batch - 1}", illegal[0])
    return indices
