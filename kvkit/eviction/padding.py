"""Score and choose the tokens of each row of a batch as if it were alone, without its padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from kvkit.errors import TooFewTokensError, argument_error, describe
from kvkit.typed import Array

ScoreRows = Callable[[Array, Array], Array]  # (numbers of rows, of columns) -> scores [rows, Hkv, columns]


def checked_padding(mask: Array, shape: tuple[int, int], columns: str = "stored tokens") -> Array:
    """Check a padding mask, bool [B, S] with True for tokens; return it."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != shape:
        integers = isinstance(mask, np.ndarray) and mask.dtype.kind in "iu" and mask.shape == shape
        remedy = ": attn_mask.astype(bool), if 0 is padding" if integers else ""
        wanted = f"bool {list(shape)}, a padding mask of {columns}"
        raise argument_error("attn_mask", wanted, describe(mask) + remedy)
    if not mask.any():
        raise argument_error("attn_mask", "a token that is not padding", "none")
    return mask


def equal_rows(mask: Array) -> Iterator[tuple[Array, Array]]:
    """Yield (numbers of rows, numbers of their tokens) for rows [B, S] of equal masks that have tokens."""
    of_mask: dict[bytes, list[int]] = {}
    for b, row in enumerate(mask):
        of_mask.setdefault(row.tobytes(), []).append(b)
    for rows in of_mask.values():
        columns = np.flatnonzero(mask[rows[0]])
        if len(columns):
            yield np.array(rows), columns


def single_rows(mask: Array) -> Iterator[tuple[Array, Array]]:
    """Yield (the number of a row, numbers of its tokens) for each row of a mask [B, S] that has tokens."""
    for b, row in enumerate(mask):
        if row.any():
            yield np.array([b]), np.flatnonzero(row)


def score_rows(
    groups: Iterable[tuple[Array, Array]], shape: tuple[int, ...], score: ScoreRows, spares: bool = True
) -> Array:
    """Return the scores of groups of rows without their padding, float64 [B, Hkv, S]; padding scores -inf.

    If it `spares` rows with too few tokens for the scorer, these score inf. Raise if every row has too few.
    """
    scores = np.full(shape, -np.inf)
    scored, too_few = False, None
    for rows, columns in groups:
        own: Array | float = np.inf
        try:
            own, scored = score(rows, columns), True
        except TooFewTokensError as error:
            too_few = error
        scores[np.ix_(rows, np.arange(shape[1]), columns)] = own
    if too_few is not None and not (scored and spares):
        raise too_few
    return scores


def of_real_queries(array: Array, real: Array) -> Array:
    """Return an array [rows, Hq, W, ..] of the last W tokens, without those that are not `real`, bool [S]."""
    first = len(real) - array.shape[2]
    return array if first < 0 else array[:, :, real[first:]]  # more queries than tokens are an error later


def stays_whole(scores: Array) -> bool:
    """Return whether the tokens of a row [Hkv, S] all stay, see `score_rows`."""
    return bool(scores.size) and bool(np.isposinf(scores).all())
