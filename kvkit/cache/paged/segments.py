"""Attend to sequences that lie in segments, because tokens were removed: one launch over all, then a merge.

The kernels see a segment as a sequence. A key of position p' and rope shift d is stored rotated for p' - d.
The queries of its segment are rotated by -d, too: <R(p) q, R(p') k> depends on p - p' alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from kvkit import cpu, merge
from kvkit.cache.blocks.sequence import PageSegment
from kvkit.cache.layers.attention import FLOAT32, hidden_from
from kvkit.calls.prepared import form_of
from kvkit.checks import attention, masks
from kvkit.checks.records import NO_MASK, StepIndex
from kvkit.errors import argument_error
from kvkit.rope import Rope
from kvkit.typed import Array, Pair


class SegmentQueries(NamedTuple):
    """Pairs some queries of a sequence with a segment that they attend to. Kernels take it as a sequence."""

    sequence: int
    number: int  # of the segment in its sequence
    segment: PageSegment
    queries: tuple[int, int]  # [begin, end) among the queries of the sequence
    causal: bool  # whether the queries are the last tokens of the segment; else they see all of it


class SegmentedStep:
    """Holds the pairs of queries and segments of a step's sequences, and their index tensors.

    A sequence whose last 3 tokens are the queries q6, q7, q8 has these pairs::

        segment 0, tokens 0..3    q6 q7 q8, not causal
        segment 1, tokens 4..6    q6 causal; q7 q8 not causal
        segment 2, tokens 7..8    q7 q8 causal

    Parameters
    ----------
    sequences : sequence of Sequence
    counts, lengths : list of int
        How many queries, which are its last tokens, and how many tokens each sequence has.
    pages : ndarray of int64, shape [B, MaxP]
        See `Step.pages`.
    page_size : int
    is_causal : bool
    """

    def __init__(
        self,
        sequences: Any,
        counts: list[int],
        lengths: list[int],
        pages: Array,
        page_size: int,
        is_causal: bool = True,
    ) -> None:
        self.sequences, self.counts, self.lengths = sequences, counts, lengths
        self.starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))  # of each sequence's queries
        segments = [seq._segments(page_size, length) for seq, length in zip(sequences, lengths, strict=True)]
        pairs = [
            pair
            for i, own in enumerate(segments)
            for number, segment in enumerate(own)
            for pair in pairs_of(i, number, segment, counts[i], lengths[i], is_causal)
        ]
        self.pairs = sorted(pairs, key=lambda pair: pair.causal)
        self.non_causal = sum(not pair.causal for pair in self.pairs)  # these come first
        self.most_segments = max(map(len, segments), default=0)  # of a sequence
        rows = [self.starts[pair.sequence] + np.arange(*pair.queries) for pair in self.pairs]
        self.queries = np.concatenate([np.empty(0, np.int64), *rows])  # the queries of all pairs
        self.segment_of = np.repeat([pair.number for pair in self.pairs], [len(own) for own in rows])
        self.ends = np.cumsum([0, *map(len, rows)])  # pair i has the queries ends[i]..ends[i + 1]
        attended = [(pair.sequence, pair.segment) for pair in self.pairs]
        self.step_index = index_of_segments(attended, self.ends, pages, page_size)
        stored = [(i, segment) for i, own in enumerate(segments) for segment in own]
        no_queries = np.zeros(len(stored) + 1, np.int64)
        self.contexts = index_of_segments(stored, no_queries, pages, page_size)  # to read every token once

    def attend(
        self, step: Any, query: Array, layer_idx: int, mask: Mask | None, weights: attention.Weights
    ) -> Pair:
        """Attend with checked queries [tokens, Hq, D]; return float32 outputs and lse."""
        (tokens, heads, _), dim = query.shape, step._value_dim
        # One result for each segment of a sequence, of weight 0 (lse -inf) where a query sees none of it.
        outputs = np.zeros((max(self.most_segments, 1), tokens, heads, dim), np.float32)
        lses = np.full(outputs.shape[:3], -np.inf, np.float32)
        lses[0] = self._sinks_alone(weights.sinks, heads)
        if not self.pairs:
            return outputs[0], lses[0]
        rotated = self._rotated(query.astype(np.float32)[self.queries], layer_idx)
        joined, place = self._joined_mask(mask, weights), NO_MASK
        if joined is not None:
            place = masks.own_mask(FLOAT32, joined, heads, len(rotated), joined.shape[-1])
        out, lse = np.empty((*rotated.shape[:2], dim), np.float32), np.empty(rotated.shape[:2], np.float32)
        form = None
        if joined is None and weights.sinks is None:
            form = form_of((rotated,), (id(self), weights.scale, weights.softcap))
        arrays = {"query": rotated, "out": out, "lse": lse}
        prepared = step._calls.find(form)
        if prepared:
            prepared.run_at(step._places(layer_idx, arrays))
        else:
            # Kernels leave out the causal rule in the first `decoding` sequences: here the non-causal pairs.
            own = weights._replace(causal=True, left=-1, right=-1, mask=place, **self._sinks(weights.sinks))
            context = step._float32_context(layer_idx)
            launch = cpu.attention.prepare.prepare_attention(
                rotated, out, lse, context, self.step_index, self.non_causal, own
            )
            cpu.launches.start(launch)
            step._keep(form, layer_idx, arrays, launch)
        outputs[self.segment_of, self.queries], lses[self.segment_of, self.queries] = out, lse
        return merge.merge_checked(FLOAT32, list(outputs), list(lses))

    def _rotated(self, query: Array, layer_idx: int) -> Array:
        """Rotate the queries of each segment back by the rope shift of its keys, in place; return them."""
        for pair, begin, end in zip(self.pairs, self.ends, self.ends[1:], strict=False):
            shift = pair.segment.shift
            rope = self.sequences[pair.sequence]._ropes[layer_idx] if shift else None
            if isinstance(rope, Rope):
                query[begin:end] = rope.shift(query[begin:end], -shift)
        return query

    def _sinks_alone(self, sinks: Array | None, heads: int) -> Array:
        """Return the lse of queries whose sequence has no token, [tokens, Hq]: sinks; -inf for the others."""
        alone = np.full((self.starts[-1], heads), -np.inf, np.float32)
        for i, length in enumerate(self.lengths if sinks is not None else ()):
            if not length and sinks is not None:
                alone[self.starts[i] : self.starts[i + 1]] = sinks[i] if sinks.ndim == 2 else sinks
        return alone

    def _sinks(self, sinks: Array | None) -> dict[str, Any]:
        """Return sinks that count in one segment of each query: the causal one, or else the first."""
        if sinks is None:
            return {}
        causal = self.non_causal < len(self.pairs)
        counts = np.array([pair.causal if causal else pair.number == 0 for pair in self.pairs])
        if sinks.ndim == 2:  # [sequences, Hq]
            sinks = sinks[[pair.sequence for pair in self.pairs]]
        of_pairs = np.where(counts[:, None], sinks.astype(np.float32), np.float32(-np.inf))
        return {"sinks": of_pairs, "sink_sequences": len(of_pairs)}

    def _joined_mask(self, mask: Mask | None, weights: attention.Weights) -> Array | None:
        """Return window and mask as one mask [Hq or 1, queries, longest segment]; None without both."""
        left, right = weights.left, weights.right
        if mask is None and (left, right) == (-1, -1):
            return None
        blocks = []
        for pair in self.pairs:
            first_query = self.lengths[pair.sequence] - self.counts[pair.sequence]
            keys = np.arange(pair.segment.begin, pair.segment.end)
            distance = keys - (first_query + np.arange(*pair.queries))[:, None]  # [queries, keys]
            visible = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
            blocks.append(visible[None] if mask is None else hidden_from(mask(pair), visible))
        shape = max(map(len, blocks)), self.ends[-1], max(block.shape[2] for block in blocks)
        joined = np.zeros(shape, blocks[0].dtype)
        for block, begin, end in zip(blocks, self.ends, self.ends[1:], strict=False):
            joined[:, begin:end, : block.shape[2]] = block
        return joined


Mask = Callable[[SegmentQueries], Array]  # returns the mask of a pair, [Hq or 1, queries or 1, keys or 1]


def packed_mask(mask: Array, seqstarts: Array, kvstarts: Array, pair: SegmentQueries) -> Array:
    """Return the part of a mask [Hq or 1, tokens, contexts or 1] that belongs to a pair."""
    begin, end = (seqstarts[pair.sequence] + query for query in pair.queries)
    rows, first = mask[:, begin:end], kvstarts[pair.sequence]
    return rows if mask.shape[2] == 1 else rows[..., first + pair.segment.begin : first + pair.segment.end]


def batch_mask(mask: Array, pair: SegmentQueries) -> Array:
    """Return the part of a mask [B or 1, Hq or 1, q or 1, keys or 1] that belongs to a pair."""
    own = mask[pair.sequence if len(mask) > 1 else 0]
    own = own if own.shape[1] == 1 else own[:, slice(*pair.queries)]
    return own if own.shape[2] == 1 else own[..., pair.segment.begin : pair.segment.end]


def pairs_of(
    sequence: int, number: int, segment: PageSegment, count: int, length: int, is_causal: bool
) -> list[SegmentQueries]:
    """Return the pairs of a segment with the queries inside it, and with those after it."""
    first_query = length - count
    if not is_causal:
        return [SegmentQueries(sequence, number, segment, (0, count), False)] if count else []
    begin, end = max(segment.begin - first_query, 0), max(segment.end - first_query, 0)
    pairs = [
        SegmentQueries(sequence, number, segment, (begin, end), True),
        SegmentQueries(sequence, number, segment, (end, count), False),
    ]
    return [pair for pair in pairs if pair.queries[0] < pair.queries[1]]


def index_of_segments(
    segments: list[tuple[int, PageSegment]], ends: Array, pages: Array, page_size: int
) -> StepIndex:
    """Return index tensors in which (sequence, segment) i is a sequence with queries from ends[i] on."""
    lengths = np.array([segment.end - segment.begin for _, segment in segments], np.int64)
    kvstarts = np.concatenate(([0], np.cumsum(lengths)))
    widths = -(-lengths // page_size)
    table = np.full((len(segments), max(widths, default=0)), -1, np.int64)
    for row, width, (i, segment) in zip(table, widths, segments, strict=True):
        row[:width] = pages[i, segment.page : segment.page + width]
    zeros = np.zeros(len(segments), np.int64)
    return StepIndex(
        np.asarray(ends, np.int64), kvstarts, zeros, zeros, table, page_size, tokens=int(ends[-1]),
        context=int(kvstarts[-1]), rows=0,
    )  # fmt: skip


def check_window(
    sequences: Any, first_queries: Iterable[int], window: tuple[int, int], is_alibi: bool
) -> None:
    """Raise if a window or ALiBi reaches over removed tokens: kernels count rows there, not positions.

    `first_queries` are the indices of each sequence's first query among its tokens.
    """
    left, _ = window
    for seq, first_query in zip(sequences, first_queries, strict=True):
        if seq._intact is None:
            continue
        if is_alibi:
            wanted = "False for sequences whose tokens were removed or moved (a mask can have the bias)"
            raise argument_error("is_alibi", wanted, True)
        begin = max(first_query - max(left, 0), 0)  # the first token that a window reaches
        if window == (-1, -1) or begin >= seq.length:  # tokens of an open step have no holes
            continue
        positions = np.append(seq.positions, seq.next_position)
        shares = begin > 0 and positions[begin - 1] == positions[begin]  # a token outside by its row alone
        if shares or (np.diff(positions[begin:]) != 1).any():
            wanted = "one without holes, because a window counts positions"
            raise argument_error("window", wanted, f"{window} over removed tokens")
