"""Check the arrays of a layer that scorers read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvkit.checks.values import checked_format
from kvkit.errors import argument_error, describe
from kvkit.eviction.padding import checked_padding, of_real_queries
from kvkit.eviction.products import product
from kvkit.formats.elements import FLOATS
from kvkit.typed import Array

BLOCK_ELEMENTS = 2**21  # the most weights that are computed at once


class Inputs(NamedTuple):
    """Holds the keys, values, queries and weights of a layer that a scorer reads, as float32 or None."""

    keys: Array  # [B, Hkv, S, D]
    values: Array | Any  # [B, Hkv, S, Dv]
    queries: Array | Any  # [B, Hq, W, D], of the last W tokens
    weights: Array | Any  # [B, Hq, W, S], or their sums over queries [B, Hq, S]
    real: Array | Any = None  # bool [B, S]: which tokens are no padding; None if all are

    def of_rows(self, rows: Array, columns: Array | None = None) -> Inputs:
        """Return the inputs of some rows, without padded queries; only those of some `columns`, if given."""
        (queries, weights), real = self.queries_of(rows), self.real
        own = Inputs(self.keys[rows], self.values, queries, weights, None if real is None else real[rows])
        own = own if self.values is None else own._replace(values=self.values[rows])
        if columns is None:
            return own
        values = None if own.values is None else own.values[:, :, columns]
        weights = None if weights is None else weights[..., columns]
        return Inputs(own.keys[:, :, columns], values, queries, weights)

    def queries_of(self, rows: Array) -> tuple[Any, Any]:
        """Return the queries and weights of some rows of equal masks, without padded queries."""
        queries, weights = (None if side is None else side[rows] for side in (self.queries, self.weights))
        if self.real is None:
            return queries, weights
        real = self.real[rows[0]]
        queries = None if queries is None else of_real_queries(queries, real)
        if weights is not None and weights.ndim == 4:
            weights = of_real_queries(weights, real)
        return queries, weights

    @property
    def heads(self) -> int:
        """Return Hkv, the number of key heads."""
        return int(self.keys.shape[1])

    @property
    def tokens(self) -> int:
        """Return S, the number of stored tokens."""
        return int(self.keys.shape[2])

    @property
    def query_heads(self) -> int:
        """Return Hq, the number of query heads."""
        return int((self.weights if self.queries is None else self.queries).shape[1])

    def last_queries(self, window: int) -> Array:
        """Return the queries of the last `window` tokens, [B, Hkv, G, W, D]."""
        if (have := self.queries.shape[2]) < window:
            raise argument_error("queries", f"those of the last {window} tokens (or window={have})", have)
        batch, heads, _, dim = self.queries.shape
        return self.queries[:, :, -window:].reshape(batch, self.heads, heads // self.heads, window, dim)


def checked_inputs(
    keys: Array,
    values: Array | None = None,
    queries: Array | None = None,
    weights: Array | None = None,
    attn_mask: Array | None = None,
) -> Inputs:
    """Check a layer's arrays, and widen them to float32. What padding holds does not matter."""
    checked_format("keys", keys, FLOATS, 4)
    batch, heads, tokens, dim = keys.shape
    real = None if attn_mask is None else checked_padding(attn_mask, (batch, tokens))
    keys = finite_floats("keys", keys, 4, real)
    if not keys.size:
        raise argument_error("keys", "at least one row, head, token and element", f"shape {keys.shape}")
    if values is not None:
        values = finite_floats("values", values, 4, real)
        if values.shape[:3] != keys.shape[:3]:
            raise argument_error("values", f"shape ({batch}, {heads}, {tokens}, any)", values.shape)
    if queries is not None:
        queries = finite_floats("queries", queries, 4, real)
        check_query_heads("queries", queries, keys, dim, 1 <= queries.shape[2] <= tokens)
    if weights is not None:
        weights = finite_floats("weights", weights, 3 if np.ndim(weights) == 3 else 4, real)
        check_query_heads("weights", weights, keys, tokens, weights.ndim == 3 or weights.shape[2] >= 1)
    return Inputs(keys, values, queries, weights, real)


def check_query_heads(name: str, array: Array, keys: Array, last: int, count_fits: bool) -> None:
    """Raise unless an array [B, Hq, .., last] fits the keys and its number of queries fits."""
    batch, heads, tokens, _ = keys.shape
    fits = array.shape[0] == batch and array.shape[1] and not array.shape[1] % heads
    if not fits or array.shape[-1] != last or not count_fits:
        wanted = f"shape ({batch}, a multiple of {heads}, 1 to {tokens}, {last})"
        raise argument_error(name, wanted, array.shape)


def finite_floats(name: str, array: Array, ndim: int, real: Array | None = None) -> Array:
    """Return an array as float32; raise with the place of the first NaN or infinity of a `real` token."""
    checked_format(name, array, FLOATS, ndim)
    wide = array.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(wide.sum()):  # then every number is; finite ones may have an infinite sum
            return wide
    wrong = ~np.isfinite(wide)
    if real is not None and wrong.any() and len(wide) == len(real) and wide.shape[2] <= real.shape[1]:
        tokens = real[:, None, -wide.shape[2] :]  # of keys, or of the last queries
        wrong &= tokens if ndim == 3 else tokens[..., None]
        if name == "weights" and ndim == 4 and wide.shape[3] == real.shape[1]:
            wrong &= real[:, None, None]
    return refuse_first(name, wide, wrong, "finite numbers")


def refuse_first(name: str, array: Array, wrong: Array, wanted: str) -> Array:
    """Return the array; raise with the place of the first number that is `wrong`, if there is one."""
    if wrong.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
        raise argument_error(name, wanted, f"{array[at]} at {at}")
    return array


def scores_array(name: str, array: Array) -> Array:
    """Return scores [B, Hkv, S]; raise if they have another form or a NaN."""
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.dtype.kind != "f" or not array.size:
        raise argument_error(name, "an array of floats [B, Hkv, S]", describe(array))
    return refuse_first(name, array, np.isnan(array), "numbers")


def weight_blocks(inputs: Inputs, window: int) -> Iterator[tuple[int, int, int, Array]]:
    """Yield the causal weights of the last `window` queries, in blocks of queries.

    A block is (row of the batch, key head, its first query, weights [G, queries, S]).
    """
    tokens, has_weights = inputs.tokens, inputs.queries is None
    if has_weights and inputs.weights.shape[2] < window:
        have = inputs.weights.shape[2]
        raise argument_error("weights", f"those of the last {window} queries (or window={have})", have)
    if not has_weights:
        queries = inputs.last_queries(window)
    group = inputs.query_heads // inputs.heads
    size = max(1, BLOCK_ELEMENTS // (group * tokens))
    for b, h in np.ndindex(inputs.keys.shape[:2]):
        for first in range(0, window, size):
            end = min(first + size, window)
            if has_weights:
                rows = inputs.weights[b, h * group : (h + 1) * group, -window:]
                yield b, h, first, rows[:, first:end]
                continue
            scores = product(queries[b, h, :, first:end], inputs.keys[b, h].T)
            scores *= np.float32(queries.shape[-1] ** -0.5)
            last = tokens - window + np.arange(first, end)  # the last key that a query sees
            from_key = int(last[0]) + 1  # keys before it are visible to all queries of the block
            hidden = np.arange(from_key, tokens)[None] > last[:, None]
            scores[..., from_key:][:, hidden] = -np.inf
            yield b, h, first, softmax_in_place(scores)


def softmax_in_place(scores: Array) -> Array:
    """Replace float32 scores by their softmax over the last axis, in place."""
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True, dtype=np.float64).astype(np.float32)
    return scores
