"""Decide where a sequence's tokens lie after some were removed or moved.

A segment fills pages from row 0 on and has one rope shift. Tokens at the beginning of a page stay there, even
if other sequences use the page. Other tokens are copied to new pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvkit.cache.layers.positions import MAX_PIECES
from kvkit.typed import Array


class Arrangement(NamedTuple):
    """Lists the pages and segments of a sequence, and the rows to copy into them."""

    pages: list[int]  # block table; -1, -2, ... stand for new blocks
    borders: list[int]  # see `Sequence`
    sources: Array  # the rows of the cache to copy
    targets: Array  # where to: row r is row r % page_size of page r // page_size of `pages`

    @property
    def new(self) -> int:
        """Return the number of new blocks."""
        return sum(block < 0 for block in self.pages)


def lay_out(
    rows: Array, shifts: Array, page_size: int, is_own: Callable[[int], bool], rotated_from: int
) -> Arrangement:
    """Find an arrangement of at most `MAX_PIECES` segments, counting the one for new tokens.

    Pages have 4 rows, and tokens in rows 2 to 4 were removed. Others share blocks 0, 1 and 2::

        rows 0 1 | 5 6 7 | 8   ->   pages [0, -1, 2], borders [2, 5], rows 5 6 7 are copied to rows 4 5 6

    Parameters
    ----------
    rows, shifts : ndarray of int64, shape [tokens]
        The cache row and the rope shift of each token.
    page_size : int
    is_own : callable
        Whether the sequence may write to a block.
    rotated_from : int
        The first of the tokens that are copied because their keys will be rotated in memory.
    """
    layout = arrange(rows, shifts, page_size, is_own, rotated_from)
    if len(layout.borders) >= MAX_PIECES:
        intact = layout.borders[0]  # tokens before the first hole
        # Copy all tokens after the hole; then also those before it in its page, if others use that page.
        for first in (intact, intact - intact % page_size):
            layout = arrange(rows, shifts, page_size, is_own, min(first, rotated_from))
            if len(layout.borders) < MAX_PIECES:
                break
    return layout


def arrange(
    rows: Array, shifts: Array, page_size: int, is_own: Callable[[int], bool], copied_from: int
) -> Arrangement:
    """Return an arrangement of any number of segments. All tokens from `copied_from` on are copied."""
    pages: list[int] = []
    borders: list[int] = []
    copies: list[tuple[int, int, int]] = []  # first token, end token, first target
    tail_length, shift, new = 0, None, 0  # tokens and shift of the last segment; new pages so far
    for begin, end in runs(rows, shifts, page_size, copied_from):
        block, row = divmod(int(rows[begin]), page_size)
        stays = row == 0 and begin < copied_from
        free = -tail_length % page_size  # rows after the last token in the last page of the segment
        # The segment goes on with a new page, or in free rows that no other sequence reads.
        continues = free == 0 or (not stays and (pages[-1] < 0 or is_own(pages[-1])))
        if shift != shifts[begin] or not continues:  # a new segment begins
            borders += [begin] if begin else []
            tail_length, free, shift = 0, 0, shifts[begin]
        if stays:
            pages.append(block)
        else:
            target = len(pages) * page_size - free
            copies.append((begin, end, target))
            while len(pages) * page_size < target + end - begin:
                new += 1
                pages.append(-new)
        tail_length += end - begin
    if shift:  # new tokens have no rope shift, so they begin a segment
        borders.append(len(rows))
    sources = np.concatenate([rows[:0], *(rows[begin:end] for begin, end, _ in copies)])
    targets = np.concatenate([rows[:0], *(target + np.arange(end - begin) for begin, end, target in copies)])
    return Arrangement(pages, borders, sources, targets)


def runs(rows: Array, shifts: Array, page_size: int, copied_from: int) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of tokens that are neighbours in a page, with one rope shift.

    With pages of 4 rows and without shifts, rows 0 1 5 6 7 8 -> [(0, 2), (2, 5), (5, 6)].
    """
    if not len(rows):
        return []
    ends = (np.diff(rows) != 1) | (rows[1:] % page_size == 0) | (np.diff(shifts) != 0)
    borders = {0, len(rows), min(copied_from, len(rows)), *(np.flatnonzero(ends) + 1).tolist()}
    return list(itertools.pairwise(sorted(borders)))
