"""Say which elements of a head rotate as a pair: halves (i and i + D/2) or neighbours (2 i and 2 i + 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error, brief
from kvkit.files import Description
from kvkit.tools.readers import SideReader

HALVES, NEIGHBOURS = "halves", "interleaved"  # the words of descriptions
NAMES = {"halves": HALVES, "neighbours": NEIGHBOURS, "interleaved": NEIGHBOURS}


@dataclass(frozen=True)
class PairOrder:
    """Holds the wanted and the present pairs of keys, for the first `dim` elements of a head."""

    target: str
    before: str
    dim: int | None = None

    def places(self, size: int) -> np.ndarray:
        """Return the old index of each element in the new order, for heads of this size."""
        dim = size if self.dim is None else self.dim
        if dim % 2 or dim > size:
            raise argument_error("rope_pairs", f"an even number of rotated elements, up to {size}", dim)
        pairs = np.arange(dim).reshape((2, -1) if self.target == NEIGHBOURS else (-1, 2))
        return np.concatenate([pairs.T.reshape(-1), np.arange(dim, size)])

    def reordered(self, side: SideReader) -> SideReader:
        """Return keys with the elements of heads in the new order."""
        if self.target == self.before:
            return side
        places = self.places(side.dim)
        return replace(side, read=lambda part: side.read(part)[..., places])


def change_of_pairs(wanted: str | None, given: str | None, said: Description) -> PairOrder:
    """Return the change of pairs to the wanted ones, from the ones given or else stated in a file."""
    if wanted is None:
        raise argument_error("rope_pairs", "the pairs that keys are to have, beside from_rope_pairs", "None")
    target, before = pairs_named("rope_pairs", wanted), said.rope_pairs
    if given is not None:
        before = pairs_named("from_rope_pairs", given)
        if said.rope_pairs not in (None, before):
            raise argument_error("from_rope_pairs", f"{word(said.rope_pairs)}, as the file says", given)
    if before is None:
        wanted = "the pairs that keys have, as the file does not say them (a model's GGUF does)"
        raise argument_error("from_rope_pairs", wanted, "None")
    return PairOrder(target, before, said.rope_dim)


def pairs_named(argument: str, name: Any) -> str:
    """Convert a user's name of pairs to the word of descriptions."""
    if name not in NAMES:
        raise argument_error(argument, "halves or neighbours", brief(name))
    return NAMES[name]


def word(pairs: str | None) -> str | None:
    """Convert the word of descriptions to the user's name of pairs."""
    return "neighbours" if pairs == NEIGHBOURS else pairs
