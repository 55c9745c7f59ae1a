"""Score the rows of a batch without their padding, and choose the tokens that all rows keep together.

A mask is bool [B, n], with False for padding and a column for each position, as `attend` takes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvkit.errors import argument_error
from kvkit.eviction.padding import checked_padding, of_real_queries
from kvkit.typed import Array, Pair

HEAD_OPTIONS = {"filters", "output_weights"}  # options of scorers whose first axis is of heads


class UnpaddedRow:
    """Gives scorers some tokens of one row of a layer, as if these were alone.

    Keys are rotated for their present positions, which models count without padding. `mask` is bool [n].
    """

    window = None

    def __init__(self, layer: Any, states: Pair, positions: Array, mask: Array | None) -> None:
        self.positions, self.stored_tokens, self._next = positions, len(positions), layer.get_seq_length()
        self.rope, self.rope_shifts = layer.rope, np.empty((0, 3), np.int64)
        self._states = states
        if mask is not None:
            self.positions, self._next = positions - np.cumsum(~mask)[positions], int(mask.sum())

    def get_seq_length(self) -> int:
        """Return the position of the next token."""
        return self._next

    def _stored(self) -> Pair:
        """Return keys and values, [1, heads, tokens, D]."""
        return self._states


def checked_mask(mask: Array | None, layers: list[Any]) -> Array | None:
    """Check a padding mask of layers that have tokens; return None if it hides none."""
    if mask is None or not layers:
        return None
    for layer in layers:
        mask = checked_padding(mask, (layer.batch_size, layer.get_seq_length()), "all positions")
    return None if mask.all() else mask


def real_tokens(layer: Any, mask: Array | None) -> Array:
    """Return which stored tokens of a layer are no padding: bool [B, 1, S]; if heads differ [B, Hkv, S]."""
    if np.ndim(layer.positions) == 1:
        shape = layer.batch_size, 1, layer.stored_tokens
        return np.ones(shape, bool) if mask is None else mask[:, None, layer.positions]
    stored = layer.positions >= 0  # [B, Hkv, longest], padded with -1
    rows = np.arange(len(stored))[:, None, None]
    return stored if mask is None else stored & mask[rows, layer.positions]


def request_for_row(
    request: Any, number: int, b: int, columns: Array, real: Array, head: tuple[int, int] = (0, 1)
) -> Any:
    """Return the arguments of `compress` for row b of a layer with these columns; `real` is bool [S].

    `head` is (number of a key head, number of key heads); (0, 1) for all heads together.
    """

    def of_row(array: Any, heads: int) -> Array:
        group = array.shape[1] // heads
        return array[b : b + 1, head[0] * group : (head[0] + 1) * group]

    def of_layer(arrays: Any) -> Any:
        return None if arrays is None else of_row(arrays[number], head[1])

    queries, weights, scorer = of_layer(request.queries), of_layer(request.weights), request.scorer
    if queries is not None:
        queries = [of_real_queries(queries, real)]
    if weights is not None:
        weights = weights if weights.ndim == 3 else of_real_queries(weights, real)
        weights = [weights[..., columns]]
    if callable(scorer):
        function = scorer

        def scorer(_: int, *states: Any) -> Array:
            return function(number, *states)

    elif not isinstance(scorer, str):
        scorer = [of_row(np.asarray(scorer[number]), head[1])[..., columns]]
    options = dict(request.options)
    for name in HEAD_OPTIONS & options.keys():
        array = np.asarray(options[name])
        group = len(array) // head[1]
        options[name] = array[head[0] * group : (head[0] + 1) * group]
    if "scores" in options:
        options["scores"] = of_row(np.asarray(options["scores"]), head[1])[..., columns]
    if "positions" in options:
        options["positions"] = np.asarray(options["positions"])[columns]
    return replace(
        request, scorer=scorer, queries=queries, weights=weights, options=options,
        rope=[request.rope[number]], attn_mask=None,
    )  # fmt: skip


def column_means(scores: Array, real: Array) -> Array:
    """Return the mean scores of columns over heads and the rows where they are no padding, float64 [S]."""
    if real.all():
        return scores.mean((0, 1), dtype=np.float64)
    of_rows = np.where(real, scores.mean(1, dtype=np.float64), 0)  # [B, S]
    return of_rows.sum(0) / np.maximum(real.sum(0), 1)


def best_columns(means: Array, real: Array, count: int, first: int = 0, last: int = 0) -> Array:
    """Return the ascending columns that all rows keep: those that most rows need, then the best scores.

    A column is kept before all that are padding in more rows. Where all rows have a token, `means` decide,
    and among equal means the earlier columns. The first and last tokens of each row stay in any case.
    """
    place, lengths = np.cumsum(real, -1) - 1, real.sum(-1, keepdims=True)
    stays = (real & ((place < first) | (place >= lengths - last))).any(0)
    if stays.sum() > count:
        wanted = f"room for the {int(stays.sum())} first and last tokens"
        raise argument_error("keep", wanted, count)
    order = np.lexsort((-means, -real.sum(0), ~stays))
    return np.sort(order[:count])
