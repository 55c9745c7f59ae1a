"""Define the layers that attend within chunks of tokens, as the local layers of Llama 4 do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kvkit.cache.layers.attention import LayerAttention, checked_mask, checked_query, hidden_from
from kvkit.cache.layers.positions import Piece
from kvkit.cache.layers.sliding import SlidingWindowLayer, StaticSlidingWindowLayer
from kvkit.checks.arguments import Scoring
from kvkit.checks.values import integer
from kvkit.errors import argument_error
from kvkit.typed import Array, Attended


class ChunkedLayer(SlidingWindowLayer):
    """A layer whose tokens attend within their chunk of n tokens, as local layers of Llama 4 do.

    A query of position p attends to the positions from ``p // n * n`` to p. In a row of the batch that begins
    with padding, chunks count from its first token; so the last n - 1 tokens are stored, which is what any
    row may need.

    Parameters
    ----------
    chunk_size : int
        n, how many tokens a chunk has.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import ChunkedLayer
    >>> layer, tokens = ChunkedLayer(4), np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)
    >>> keys, values = layer.update(np.ones_like(tokens), tokens)
    >>> layer.attend(np.ones_like(tokens)).ravel(), layer.stored_tokens
    (array([0. , 0.5, 1. , 1.5, 4. , 4.5], dtype=float32), 3)
    """

    chunk_size: int

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = integer("chunk_size", chunk_size, 1)
        super().__init__(chunk_size)

    def _describe(self) -> dict[str, Any]:
        return {"chunk_size": self.chunk_size}

    def _attend(self, *arguments: Any) -> Attended:
        return attend_in_chunks(self, self._attention, *arguments)


class StaticChunkedLayer(StaticSlidingWindowLayer):
    """A layer of fixed size whose tokens attend within their chunk of n tokens, see `ChunkedLayer`.

    Parameters
    ----------
    max_cache_len, chunk_size : int
        As in `StaticSlidingWindowLayer`, whose window of ``chunk_size`` tokens it stores.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import StaticChunkedLayer
    >>> layer, tokens = StaticChunkedLayer(8, 4), np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)
    >>> keys, values = layer.update(np.ones_like(tokens), tokens)
    >>> layer.attend(np.ones_like(tokens)).ravel()
    array([0. , 0.5, 1. , 1.5, 4. , 4.5], dtype=float32)
    """

    chunk_size: int

    def __init__(self, max_cache_len: int, chunk_size: int) -> None:
        self.chunk_size = integer("chunk_size", chunk_size, 1)
        super().__init__(max_cache_len, chunk_size)

    def _describe(self) -> dict[str, Any]:
        return {"max_cache_len": self.max_cache_len, "chunk_size": self.chunk_size}

    def _attend(self, *arguments: Any) -> Attended:
        return attend_in_chunks(self, self._attention, *arguments)


class ChunkView:
    """Shows `LayerAttention` the rows [begin, end) of a layer as a layer without a window."""

    window = None

    def __init__(self, layer: Any, begin: int, end: int) -> None:
        self.name, self.store, self.rope, self._row_positions = (
            layer.name, layer.store, layer.rope, layer._row_positions,
        )  # fmt: skip
        self.span = layer.span._replace(begin=begin, length=end)

    def get_seq_length(self) -> int:
        return int(self.span.length)

    def get_mask_sizes(self, _: int) -> tuple[int, int]:
        return self.span.length - self.span.begin, self.span.begin

    def _pieces(self, first: int) -> list[Piece]:
        return list(self._row_positions.pieces(first, self.span.length))


def attend_in_chunks(
    layer: Any,
    attend: LayerAttention,
    query: Array,
    mask: Array | None,
    scoring: Scoring,
    return_lse: bool,
    wants_weights: bool,
) -> Attended:
    """Attend with the queries of each chunk to the rows of that chunk, see `Layer.attend`."""
    span, size = layer.span, layer.chunk_size
    fmt, rows = checked_query(layer, query)  # [B, q, Hq, D]
    (batch, new, heads, _), offsets = rows.shape, np.zeros(1, np.int64)
    if mask is not None:
        columns, mask = mask, checked_mask(layer, fmt, mask, (batch, heads, new))
        if columns.ndim == 2:  # the first chunk of a row begins with its first token
            offsets = columns.argmax(1)
    last = max(span.length - 1, 0)
    first = min(span.length - new, last)  # the position of the first query
    start = int(chunk_begin(first, offsets, size).min())
    if start < span.begin > 0:  # in a static layer with less room than a chunk has
        wanted = f"queries of the last tokens, whose chunks {layer.name} still stores"
        raise argument_error("query", wanted, f"{new} queries after {span.length} tokens")
    borders = [*range(start, last + 1, size), span.length]
    if (
        mask is not None and np.unique(offsets % size).size > 1
    ):  # a mask says where the chunks of each row begin
        begins = chunk_begin(np.arange(first, first + new), offsets[:, None], size)  # [B, q]
        visible = begins[:, None, :, None] <= np.arange(span.begin, span.length)
        mask, borders = hidden_from(mask, visible), [start, span.length]
    parts = []
    key_weights = np.zeros((batch, heads, span.length - span.begin), np.float32)
    for begin, end in itertools.pairwise(borders):
        begin, queries = max(begin, 0), slice(max(begin - first, 0), max(end - first, 0))
        keys, own = slice(begin - span.begin, end - span.begin), mask
        if own is not None:
            own = own[:, :, queries if own.shape[2] > 1 else slice(None), keys]
        view = ChunkView(layer, begin, end)
        attended = attend(view, query[:, :, queries], own, scoring, return_lse, wants_weights)
        *results, last_result = attended if isinstance(attended, tuple) else (attended,)
        if wants_weights:
            key_weights[:, :, keys] += last_result
        parts.append(results if wants_weights else [*results, last_result])
    joined = [
        np.concatenate([side.swapaxes(1, 2) for side in sides], 1).swapaxes(1, 2)
        for sides in zip(*parts, strict=True)
    ]
    joined += [key_weights] if wants_weights else []
    return joined[0] if len(joined) == 1 else tuple(joined)


def chunk_begin(position: Any, offset: Array, size: int) -> Array:
    """Return where the chunk of a position begins, in a row whose first chunk begins at `offset`."""
    begin: Array = offset + (position - offset) // size * size
    return begin
