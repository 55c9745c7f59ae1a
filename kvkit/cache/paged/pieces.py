"""Attend to sequences that lie in segments, because tokens were removed: one launch over all, then a merge.

The kernels see a segment as a sequence. A key of position p' and rope shift d is stored rotated for p' - d.
The queries of its segment are rotated by -d, too: <R(p) q, R(p') k> depends on p - p' alone.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Piece(NamedTuple):
    """Pairs some queries of a sequence with a segment that they attend to. Kernels take it as a sequence."""

    sequence: int
    part: int  # the number of the segment
    segment: PageSegment
    queries: tuple[int, int]  # [begin, end) among the queries of the sequence
    causal: bool  # whether the queries are the last tokens of the segment; else they see all of it


class Pieces:
    """Holds the pieces of a step's sequences, and their index tensors.

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
        self.starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))  # of queries
        segments = [seq.segments(page_size, length) for seq, length in zip(sequences, lengths, strict=True)]
        pieces = [
            piece
            for i, own in enumerate(segments)
            for part, segment in enumerate(own)
            for piece in pieces_of(i, part, segment, counts[i], lengths[i], is_causal)
        ]
        self.pieces = sorted(pieces, key=lambda piece: piece.causal)
        self.free = sum(not piece.causal for piece in self.pieces)  # pieces without a causal rule
        self.parts = max(map(len, segments), default=0)
        rows = [self._packed(piece) for piece in self.pieces]
        self.queries = np.concatenate([np.empty(0, np.int64), *rows])
        self.part_of = np.repeat([piece.part for piece in self.pieces], [len(each) for each in rows])
        self.ends = np.cumsum([0, *map(len, rows)])  # piece i has the queries ends[i]..ends[i + 1]
        taken = [(piece.sequence, piece.segment) for piece in self.pieces]
        self.steps = steps_of(taken, self.ends, pages, page_size)
        every = [(i, segment) for i, own in enumerate(segments) for segment in own]
        self.contexts = steps_of(every, np.zeros(len(every) + 1, np.int64), pages, page_size)

    def _packed(self, piece: Piece) -> Array:
        """Return the numbers of a piece's queries among the queries of all sequences."""
        return self.starts[piece.sequence] + np.arange(*piece.queries)

    def attend(
        self, step: Any, query: Array, layer_idx: int, mask: Mask | None, weights: attention.Weights
    ) -> Pair:
        """Attend with checked queries [tokens, Hq, D]; return float32 outputs and lse."""
        (tokens, heads, _), dim = query.shape, step.value_dim
        outputs = np.zeros((max(self.parts, 1), tokens, heads, dim), np.float32)
        lses = np.full(outputs.shape[:3], -np.inf, np.float32)
        if not self.pieces:
            return outputs[0], lses[0]
        rotated = self._rotated(query.astype(np.float32)[self.queries], layer_idx)
        columns, place = self._mask(mask, weights), NO_MASK
        if columns is not None:
            place = masks.own_mask(FLOAT32, columns, heads, len(rotated), columns.shape[-1])
        out, lse = np.empty((*rotated.shape[:2], dim), np.float32), np.empty(rotated.shape[:2], np.float32)
        form = None
        if columns is None and weights.sinks is None:
            form = form_of((rotated,), (id(self), weights.scale, weights.softcap))
        arrays = {"query": rotated, "out": out, "lse": lse}
        prepared = step.calls.find(form)
        if prepared:
            prepared.run_at(step.places(layer_idx, arrays))
        else:
            own = weights._replace(causal=True, left=-1, right=-1, mask=place, **self._sinks(weights.sinks))
            context = step.float32_context(layer_idx)
            launch = cpu.attention.prepare.prepare_attention(
                rotated, out, lse, context, self.steps, self.free, own
            )
            cpu.launches.start(launch)
            step.keep(form, layer_idx, arrays, launch)
        outputs[self.part_of, self.queries], lses[self.part_of, self.queries] = out, lse
        return merge.merge_checked(FLOAT32, list(outputs), list(lses))

    def _rotated(self, query: Array, layer_idx: int) -> Array:
        """Rotate each piece's queries back by the rope shift of its keys."""
        for piece, begin, end in zip(self.pieces, self.ends, self.ends[1:], strict=False):
            shift = piece.segment.shift
            rope = self.sequences[piece.sequence].rope[layer_idx] if shift else None
            if isinstance(rope, Rope):
                states = query[begin:end]
                states[...] = rope.shift(states, -shift)
        return query

    def _sinks(self, sinks: Array | None) -> dict[str, Any]:
        """Return sinks that count in one piece of each query: the causal one, or else the first."""
        if sinks is None:
            return {}
        causal = self.free < len(self.pieces)
        own = np.array([piece.causal if causal else piece.part == 0 for piece in self.pieces])
        if sinks.ndim == 2:  # of each sequence
            sinks = sinks[[piece.sequence for piece in self.pieces]]
        of_pieces = np.where(own[:, None], sinks.astype(np.float32), np.float32(-np.inf))
        return {"sinks": of_pieces, "sink_sequences": len(of_pieces)}

    def _mask(self, mask: Mask | None, weights: attention.Weights) -> Array | None:
        """Return window and mask as one mask [Hq or 1, tokens, longest piece]; None if there is neither."""
        left, right = weights.left, weights.right
        if mask is None and (left, right) == (-1, -1):
            return None
        blocks = []
        for piece in self.pieces:
            first = self.lengths[piece.sequence] - self.counts[piece.sequence]
            distance = np.arange(piece.segment.begin, piece.segment.end)
            distance = distance - (first + np.arange(*piece.queries))[:, None]  # [queries, keys]
            visible = ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))
            blocks.append(visible[None] if mask is None else hidden_from(mask(piece), visible))
        shape = max(map(len, blocks)), self.ends[-1], max(block.shape[2] for block in blocks)
        columns = np.zeros(shape, blocks[0].dtype)
        for block, begin, end in zip(blocks, self.ends, self.ends[1:], strict=False):
            columns[:, begin:end, : block.shape[2]] = block
        return columns


Mask = Callable[[Piece], Array]  # returns the mask of a piece, [Hq or 1, queries or 1, keys or 1]


def mask_of_piece(mask: Array, seqstarts: Array, kvstarts: Array, piece: Piece) -> Array:
    """Return the part of a mask [Hq or 1, tokens, contexts or 1] that belongs to a piece."""
    begin, end = seqstarts[piece.sequence] + piece.queries
    rows = mask[:, begin:end]
    if mask.shape[2] == 1:
        return rows
    first = kvstarts[piece.sequence]
    return rows[..., first + piece.segment.begin : first + piece.segment.end]


def mask_of_row(mask: Array, piece: Piece) -> Array:
    """Return the part of a mask [B or 1, Hq or 1, q or 1, keys or 1] that belongs to a piece."""
    own = mask[piece.sequence if len(mask) > 1 else 0]
    own = own if own.shape[1] == 1 else own[:, slice(*piece.queries)]
    return own if own.shape[2] == 1 else own[..., piece.segment.begin : piece.segment.end]


def pieces_of(
    sequence: int, part: int, segment: PageSegment, count: int, length: int, is_causal: bool
) -> list[Piece]:
    """Return the pieces of a segment: one for queries inside it, one for queries after it."""
    first = length - count
    if not is_causal:
        return [Piece(sequence, part, segment, (0, count), False)] if count else []
    begin, end = max(segment.begin - first, 0), max(segment.end - first, 0)
    pieces = [
        Piece(sequence, part, segment, (begin, end), True),
        Piece(sequence, part, segment, (end, count), False),
    ]
    return [piece for piece in pieces if piece.queries[0] < piece.queries[1]]


def steps_of(parts: list[tuple[int, PageSegment]], ends: Array, pages: Array, page_size: int) -> StepIndex:
    """Return a step with one sequence for each (sequence, segment). Sequence i has queries ends[i] on."""
    lengths = np.array([segment.end - segment.begin for _, segment in parts], np.int64)
    kvstarts = np.concatenate(([0], np.cumsum(lengths)))
    widths = -(-lengths // page_size)
    table = np.full((len(parts), max(widths, default=0)), -1, np.int64)
    for row, width, (i, segment) in zip(table, widths, parts, strict=True):
        row[:width] = pages[i, segment.page : segment.page + width]
    zeros = np.zeros(len(parts), np.int64)
    return StepIndex(
        np.asarray(ends, np.int64), kvstarts, zeros, zeros, table, page_size, tokens=int(ends[-1]),
        context=int(kvstarts[-1]), rows=0,
    )  # fmt: skip


def check_moved(sequences: Any, counts: list[int], window: tuple[int, int], is_alibi: bool) -> None:
    """Raise if a window or ALiBi reaches over removed tokens: kernels count rows there, not positions."""
    left, _ = window
    for seq, count in zip(sequences, counts, strict=True):
        if seq.intact is None:
            continue
        if is_alibi:
            wanted = "False for sequences whose tokens were removed or moved (a mask can have the bias)"
            raise argument_error("is_alibi", wanted, True)
        reach = max(left, 0) + count - seq.pending  # stored tokens that the windows of the queries reach
        if window == (-1, -1) or reach <= 0:
            continue
        positions = np.append(seq.positions[max(seq.length - reach, 0) :], seq.next_position)
        if (np.diff(positions) != 1).any():
            wanted = "one without holes, because a window counts positions"
            raise argument_error("window", wanted, f"{window} over removed tokens")
