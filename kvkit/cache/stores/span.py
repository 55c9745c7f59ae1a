"""Define `Span`: which tokens of a layer are stored, and in which rows."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Says which tokens of a layer are stored, and in which rows.

    `length` counts all tokens so far. Tokens from position `oldest` on are stored. Tokens from position
    `begin` on can be attended to: the last update returned them. The token at position p is stored in row
    ``p - origin``. `before` is the length before the last update, which can be undone if `before` is less
    than `length`. Once tokens were removed or moved, "position" means the number of a row here, and
    `RowPositions` has the positions.
    """

    length: int = 0
    oldest: int = 0
    begin: int = 0
    origin: int = 0
    before: int = 0

    @property
    def first(self) -> int:
        """Return the first position whose row is still needed."""
        return min(self.oldest, self.begin)

    def rows_from(self, first: int) -> tuple[int, int]:
        """Return the rows [begin, end) of all tokens from position `first` on."""
        return first - self.origin, self.length - self.origin

    def moved(self, keep: int) -> Span:
        """Return the span after the tokens from `keep` on have moved to the first rows of a store."""
        if keep > self.begin:
            return self._replace(begin=keep, before=self.length, origin=keep)
        return self._replace(origin=keep)

    def cropped(self, length: int, oldest: int) -> Span:
        """Return the span of the first `length` tokens, stored from `oldest` on."""
        oldest = max(self.oldest, oldest)
        return Span(length, oldest, min(self.begin, oldest, length), self.origin, length)

    def widened(self) -> Span:
        """Return the span with all tokens that the last update returned counted as stored."""
        return self._replace(oldest=self.first)

    def without_undo(self) -> Span:
        """Return the span without the possibility to undo the last update."""
        return self._replace(before=self.length)
