"""The tokens of a layer and their rows: the state that layers, stores and folders pass on."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Which tokens of a layer are stored, and in which rows.

    `length` counts all tokens so far. Tokens from position `oldest` on are stored. Tokens from position
    `begin` on can be attended to: the last update returned them. The token at position p is stored in row
    ``p - origin``. `before` is the length before the last update, which can be undone if `before` is less
    than `length`.
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
        """Return the rows [begin, end) of all tokens from a position on."""
        return first - self.origin, self.length - self.origin

    def moved(self, keep: int) -> Span:
        """Return the span after a move of the tokens from `keep` on to the first rows of a store."""
        if keep > self.begin:
            return self._replace(begin=keep, before=self.length, origin=keep)
        return self._replace(origin=keep)

    def cropped(self, length: int, oldest: int) -> Span:
        """Return the span of the first `length` tokens, stored from `oldest` on."""
        oldest = max(self.oldest, oldest)
        return Span(length, oldest, min(self.begin, oldest, length), self.origin, length)

    def widened(self) -> Span:
        """Return the span in which all tokens of the last update's result count as stored."""
        return self._replace(oldest=self.first)

    def without_undo(self) -> Span:
        """Return the span in which the last update can no longer be undone."""
        return self._replace(before=self.length)
