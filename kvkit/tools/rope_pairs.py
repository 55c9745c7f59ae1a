"""Reorder elements of keys between two rotary embeddings: pairs (i, i + D/2) and pairs (2 i, 2 i + 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error, brief
from kvkit.files import Description
from kvkit.tools.readers import SideReader

HALVES, NEIGHBOURS = "halves", "interleaved"  # the two values of `Description.rope_pairs`
PAIR_NAMES = {"halves": HALVES, "neighbours": NEIGHBOURS, "interleaved": NEIGHBOURS}


@dataclass(frozen=True)
class PairOrder:
    """Describes a change of the pairs of keys."""

    target: str
    before: str
    dim: int | None = None  # how many elements of a head rotate, from the first; None: all

    def places(self, size: int) -> np.ndarray:
        """Return for each element in the new order its old index, for heads of this size.

        From halves to neighbours, 6 elements have the old indices 0 3 1 4 2 5, and back 0 2 4 1 3 5.
        """
        dim = size if self.dim is None else self.dim
        if dim % 2 or dim > size:
            raise argument_error("rope_pairs", f"an even number of rotated elements, up to {size}", dim)
        pairs = np.arange(dim).reshape((2, -1) if self.target == NEIGHBOURS else (-1, 2))
        return np.concatenate([pairs.T.reshape(-1), np.arange(dim, size)])

    def reordered(self, side: SideReader) -> SideReader:
        """Return a reader of keys with their elements in the new order."""
        if self.target == self.before:
            return side
        places = self.places(side.dim)
        return replace(side, read=lambda part: side.read(part)[..., places])


def change_of_pairs(wanted: str | None, given: str | None, described: Description) -> PairOrder:
    """Return the change to the wanted pairs, from the given pairs or those that the file states."""
    if wanted is None:
        raise argument_error("rope_pairs", "the pairs that keys are to have, with from_rope_pairs", "None")
    target, before = pairs_named("rope_pairs", wanted), described.rope_pairs
    if given is not None:
        before = pairs_named("from_rope_pairs", given)
        if described.rope_pairs not in (None, before):
            raise argument_error("from_rope_pairs", f"{word(described.rope_pairs)}, as the file says", given)
    if before is None:
        wanted = "the pairs that keys have, as the file does not name them (a model's GGUF does)"
        raise argument_error("from_rope_pairs", wanted, "None")
    return PairOrder(target, before, described.rope_dim)


def pairs_named(argument: str, name: Any) -> str:
    """Convert a user's name of pairs to the word of descriptions."""
    if name not in PAIR_NAMES:
        raise argument_error(argument, "halves or neighbours", brief(name))
    return PAIR_NAMES[name]


def word(pairs: str | None) -> str | None:
    """Convert the word of descriptions to the user's name of pairs."""
    return "neighbours" if pairs == NEIGHBOURS else pairs
