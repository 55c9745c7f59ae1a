"""Define `Span`: which tokens of a layer are stored, and in which rows."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Says which tokens of a layer are stored, and in which rows.

    A layer with a window of 4 had 6 tokens, and now got 4 more::

        position    0 1 2 | 3 4 5 | 6 | 7 8 9 |
        row               | 0 1 2 | 3 | 4 5 6 |     origin 3
                          begin 3      oldest 7    length 10; before 6

    Once tokens were removed or moved, "position" means the number of a row here, and `RowPositions` has the
    positions.
    """

    length: int = 0  # all tokens so far
    oldest: int = 0  # tokens from this position on are stored
    begin: int = 0  # the last update returned the tokens from here on, which can be attended to
    origin: int = 0  # position p is in row p - origin
    before: int = 0  # the length before the last update; if it is `length`, no update can be undone

    @property
    def first(self) -> int:
        """Return the first position whose row is still needed."""
        return min(self.oldest, self.begin)

    def rows_from(self, first: int) -> tuple[int, int]:
        """Return the rows [begin, end) of all tokens from position `first` on."""
        return first - self.origin, self.length - self.origin

    def moved(self, keep: int) -> Span:
        """Return the span after the tokens from `keep` on have moved to the first rows of a store."""
        if keep > self.begin:  # tokens of the last view are gone, so its update cannot be undone
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
