"""Define `Step`: the new tokens of sequences in blocks, as index tensors for operators."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from kvkit.errors import argument_error
from kvkit.typed import Array

IN_ORDER = "sequences without removed or moved tokens, for a page table"


@dataclass(frozen=True, eq=False)
class Step:
    """Holds the index tensors of the tokens to compute next. `BlockAllocator.begin_step` makes it.

    Sequences have the order that `begin_step` got; their new tokens are packed in this order. `commit` ends
    the step: it adds the new tokens to the sequences, and lets others share filled blocks. `abandon` ends it
    without new tokens. A ``with`` statement commits, or abandons on an exception.

    Attributes
    ----------
    sequences : tuple of Sequence, length B
        In the order of the tensors.
    seqstarts, kvstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins among the new tokens, and among all contexts.
    start_pos : ndarray of int64, shape [B]
        Tokens in the cache before the step.
    pages : ndarray of int64, shape [B, MaxP]
        The first row of each page, segment by segment; -1 after the last page.
    decoding_batches, max_seqlen, max_kvlen : int
        How many sequences at the front have one new token each, the most new tokens, the longest context.
    copies : ndarray of int64, shape [copies, 2]
        Blocks to copy, (source, destination), in all layers before any write.

    Examples
    --------
    >>> from kvkit.cache import BlockAllocator
    >>> blocks = BlockAllocator(num_blocks=4, page_size=2)
    >>> with blocks.begin_step([(blocks.add(), 3), (blocks.add(), 1)]) as step:
    ...     step.cachestarts.tolist(), step.slot_mapping.tolist()
    ([[0, 2], [4, -1]], [0, 1, 2, 4])
    """

    sequences: tuple[Any, ...]
    seqstarts: Array
    kvstarts: Array
    start_pos: Array
    pages: Array
    first_places: Array  # [B]: the row of the first new token, counted from the sequence's first page
    moved: Array  # bool [B]: sequences with gaps inside pages or shifted keys, for which pages do not suffice
    decoding_batches: int
    max_seqlen: int
    max_kvlen: int
    copies: Array
    allocator: Any  # the BlockAllocator that made the step

    @cached_property
    def in_order(self) -> bool:
        """Return whether tokens fill pages in order and no key is shifted, so that page tables suffice."""
        return not self.moved.any()

    @property
    def cachestarts(self) -> Array:
        """Return the first row of each page, for ``cache_mode`` 1: int64, shape [B, MaxP]; then -1.

        Operators expect token i of a sequence in page ``i // page_size``. So this raises if tokens of a
        sequence were removed or moved and lie in segments: use `PagedStep.attend` then.
        """
        if not self.in_order:
            raise argument_error("step", IN_ORDER, "one of several segments (PagedStep.attend reads them)")
        return self.pages

    @cached_property
    def slot_mapping(self) -> Array:
        """Return the cache row of every new token: int32 or ``slot_dtype``, shape [seqstarts[B]]."""
        page_size = self.allocator.page_size
        sequence = np.repeat(np.arange(len(self.sequences)), np.diff(self.seqstarts))
        place = np.arange(len(sequence)) + (self.first_places - self.seqstarts[:-1])[sequence]
        rows = self.pages[sequence, place // page_size] + place % page_size
        return rows.astype(self.allocator.slot_dtype)

    @cached_property
    def block_tables(self) -> Array:
        """Return the blocks of every sequence: int32, shape [B, MaxP], then -1. See `cachestarts`."""
        return (self.cachestarts // self.allocator.page_size).astype(np.int32)

    @cached_property
    def context_lens(self) -> Array:
        """Return the number of tokens of every sequence, new ones included: int32, shape [B]."""
        return np.diff(self.kvstarts).astype(np.int32)

    def _subset(self, chosen: Array) -> Step:
        """Return a step with only the sequences at these indices, for attention."""
        counts, lengths = np.diff(self.seqstarts)[chosen], np.diff(self.kvstarts)[chosen]
        of_sequences = "start_pos", "pages", "first_places", "moved"
        return replace(
            self, sequences=tuple(self.sequences[i] for i in chosen), seqstarts=starts(counts),
            kvstarts=starts(lengths), decoding_batches=decoding_front(counts), max_seqlen=int(counts.max()),
            max_kvlen=int(lengths.max()), **{name: getattr(self, name)[chosen] for name in of_sequences},
        )  # fmt: skip

    @property
    def is_open(self) -> bool:
        """Return whether the step has been neither committed nor abandoned."""
        return self.allocator.open_step is self

    def commit(self) -> None:
        """Add the new tokens to the sequences, and publish filled blocks. Write every layer first."""
        self.allocator._commit(self)

    def abandon(self) -> None:
        """Free the blocks of the new tokens and of copies. Sequences are as if the step had not begun.

        Blocks that were no longer published because of the step stay so.
        """
        self.allocator._abandon(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._end(kind, self.commit)

    def _end(self, kind: object, commit: Callable[[], None]) -> None:
        """End a `with` block that raised an error of a kind, or none; what is not committed is abandoned."""
        try:
            if kind is None and self.is_open:  # else it was committed or abandoned in the block
                commit()
        finally:
            if self.is_open:
                self.allocator._abandon_open_step()


def tensors(sequences: list[Any], counts: list[int], page_size: int) -> dict[str, Any]:
    """Return the index tensors of a step as keywords for `Step`; all blocks are allocated already."""
    start_pos = np.array([seq.length for seq in sequences], np.int64)
    seqlens = np.array(counts, np.int64)
    kvlens = start_pos + seqlens
    width = max((len(seq._table) for seq in sequences), default=0)
    padding = array("q", [-1]) * width
    tables = b"".join([(seq._table + padding)[:width] for seq in sequences])
    blocks = np.frombuffer(tables, np.int64).reshape(len(sequences), width)
    first_places, moved = start_pos, np.zeros(len(sequences), bool)
    if any(seq._borders or seq._row_positions is not None for seq in sequences):
        # Free rows at the ends of all segments but the last.
        gaps = np.array([sum(-length % page_size for length in seq._segment_lengths()) for seq in sequences])
        shifted = [seq._row_positions is not None and seq._row_positions.shifted for seq in sequences]
        first_places, moved = start_pos + gaps, (gaps > 0) | shifted
    return {
        "seqstarts": starts(seqlens), "kvstarts": starts(kvlens), "start_pos": start_pos,
        "pages": np.where(blocks < 0, -1, blocks * page_size), "first_places": first_places, "moved": moved,
        "decoding_batches": decoding_front(seqlens), "max_seqlen": max(counts, default=0),
        "max_kvlen": int(kvlens.max(initial=0)),
    }  # fmt: skip


def decoding_front(counts: Array) -> int:
    """Return how many sequences at the front have one new token."""
    return int(np.logical_and.accumulate(counts == 1).sum())


def starts(lengths: Array) -> Array:
    """Return the cumulative sums of lengths, from 0 on."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def slot_type(dtype: DTypeLike, slots: int) -> np.dtype[Any]:
    """Return a dtype for slot mappings; raise unless it can number every slot."""
    wanted = f"int64, or int32 if it reaches all {slots} slots"
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise argument_error("slot_dtype", wanted, repr(dtype)) from None
    if kind not in (np.int32, np.int64) or slots - 1 > np.iinfo(kind).max:
        raise argument_error("slot_dtype", wanted, kind)
    return kind
