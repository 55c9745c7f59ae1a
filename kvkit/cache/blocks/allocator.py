"""The allocator, which gives the blocks of a paged cache to sequences.

It only keeps books: it knows neither keys and values nor kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.cache.blocks.pool import Pool, chain_hash, root_hash
from kvkit.cache.blocks.sequence import ID_BYTES, Sequence, check_bytes, encode_ids
from kvkit.cache.blocks.step import Step, slot_type, tensors
from kvkit.checks.values import integer
from kvkit.errors import KvkitError, argument_error, describe
from kvkit.typed import Array


class OutOfBlocksError(KvkitError):
    """A step needs more blocks than are free or can be evicted; nothing has changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed, self.available = needed, available

    def __str__(self) -> str:
        return str(argument_error("num_blocks", f"{self.needed} free or evictable blocks", self.available))


class BlockAllocator:
    """Gives blocks to sequences, shares blocks between them, and makes the index tensors of a step.

    The step that fills a block publishes it: a new sequence that begins with the same tokens shares it.
    Published blocks are never written. Those that no sequence uses stay until their room is needed; the
    least recently used is evicted first. A sequence that writes into a shared block gets a copy.

    Parameters
    ----------
    num_blocks, page_size : int
        The number of blocks, and of tokens in each.
    identity : bytes
        Names what keys and values depend on besides the tokens: geometry, format, model. Part of each hash.
    slot_dtype : dtype
        The dtype of `Step.slot_mapping`: int32 or int64.

    Examples
    --------
    >>> from kvkit.cache import BlockAllocator
    >>> blocks = BlockAllocator(num_blocks=8, page_size=4)
    >>> first = blocks.add([1, 2, 3, 4, 5, 6])
    >>> with blocks.begin_step([(first, 6)]) as step:
    ...     step.slot_mapping
    array([0, 1, 2, 3, 4, 5], dtype=int32)
    >>> second = blocks.add([1, 2, 3, 4, 7])
    >>> second
    <Sequence of 4 tokens in blocks [0]>
    >>> branch = blocks.fork(first)
    >>> with blocks.begin_step([(branch, 1), (second, 1)]) as step:
    ...     step.copies.tolist(), step.slot_mapping.tolist()
    ([[1, 2]], [10, 12])
    """

    def __init__(
        self, num_blocks: int, page_size: int, *, identity: bytes = b"", slot_dtype: DTypeLike = np.int32
    ) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 1, 2**31 - 1)
        self.page_size = integer("page_size", page_size, 1, 2**31 - 1)
        self.slot_dtype = slot_type(slot_dtype, self.num_blocks * self.page_size)
        self._identity = str(self.page_size).encode(), check_bytes("identity", identity)
        self._pool = Pool(self.num_blocks)
        self.open_step: Step | None = None

    @property
    def available(self) -> int:
        """Return how many blocks are free or can be evicted."""
        return self._pool.available

    @property
    def references(self) -> Array:
        """Return how many sequences use each block: int64, shape [num_blocks]."""
        return np.array(self._pool.references)

    # Sequences

    def add(self, token_ids: ArrayLike = (), *, salt: bytes = b"") -> Sequence:
        """Begin a sequence. It shares the published blocks of its first tokens, but never of its last one.

        Parameters
        ----------
        token_ids : array-like of int
            Ids of the tokens to compute. Tokens may have no ids; then their blocks cannot be shared.
        salt : bytes
            Names what else its keys and values depend on, such as an adapter.

        Returns
        -------
        Sequence
            The sequence. Its ``length`` is the number of its tokens that are in the cache already.
        """
        seq = Sequence(self, encode_ids(token_ids), [root_hash(*self._identity, check_bytes("salt", salt))])
        for i in range((seq.known - 1) // self.page_size):
            page = seq.page(i, self.page_size)
            link = chain_hash(seq.chain[-1], page)
            block = self._pool.find(link, page)
            if block is None:
                break
            seq.chain.append(link)
            seq.table.append(block)
            seq.length += self.page_size
        self._pool.share(seq.table)
        return seq

    def extend(self, seq: Sequence, token_ids: ArrayLike) -> None:
        """Append ids of the tokens that come next, so that the blocks they fill can be shared."""
        self.check(seq)
        ids, tokens = encode_ids(token_ids), seq.length + seq.pending
        if seq.known < tokens:
            raise argument_error(
                "seq", f"a sequence with ids for all its {tokens} tokens", f"{seq.known} ids"
            )
        seq.ids += ids

    def fork(self, seq: Sequence) -> Sequence:
        """Return a second sequence of the same tokens, in the same blocks. A write copies a shared block."""
        self.check(seq, at_rest=True)
        self._pool.share(seq.table)
        return seq.copy()

    def crop(self, seq: Sequence, length: int) -> None:
        """Drop a sequence's last tokens.

        Parameters
        ----------
        seq : Sequence
            A sequence without new tokens in an open step.
        length : int
            Tokens to keep; negative: tokens to drop; 0 drops none.
        """
        self.check(seq, at_rest=True)
        length = integer("length", length, -seq.length)
        kept = min(length, seq.length) if length > 0 else seq.length + length
        if kept < seq.length:
            seq.length = kept
            self._keep_pages(seq)
            del seq.ids[ID_BYTES * kept :], seq.chain[1 + kept // self.page_size :]

    def free(self, seq: Sequence) -> None:
        """End a sequence. New sequences can share its published blocks until these are evicted."""
        self.check(seq, at_rest=True)
        seq.allocator, seq.length = None, 0
        self._keep_pages(seq)

    def published(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (block, hash, token ids) of the published blocks, in the order of eviction."""
        return self._pool.published()

    def restore(
        self,
        saved: Iterable[tuple[int, bytes, Array, Array]],
        published: Collection[tuple[int, bytes, bytes]],
        blocks: set[int],
    ) -> list[Sequence]:
        """Restore sequences, (length, root of hashes, block table, token ids) each, in a new allocator.

        All their blocks, and the `published` ones, must be among `blocks`.
        """
        sequences = []
        for length, start, table, ids in saved:
            seq = Sequence(self, encode_ids(ids), [start])
            seq.length = integer("length", length, 0)
            seq.table.extend(table.tolist())
            if len(seq.table) != self._pages(length) or not blocks.issuperset(seq.table):
                raise argument_error("block_table", f"saved blocks for {length} tokens", seq.blocks)
            self._chain(seq)
            sequences.append(seq)
        if not blocks.issuperset(block for block, *_ in published):
            raise argument_error("published", "saved blocks", published)
        self._pool.restore([seq.table for seq in sequences], published)
        return sequences

    # Steps

    def begin_step(self, sequences: Iterable[tuple[Sequence, int]]) -> Step:
        """Reserve blocks for new tokens.

        Parameters
        ----------
        sequences : iterable of (Sequence, int)
            Each sequence once, with its number of new tokens.

        Returns
        -------
        Step
            It must be committed or abandoned before the next step begins.

        Raises
        ------
        OutOfBlocksError
            If too few blocks are free or evictable; then nothing has changed.
        """
        if self.open_step is not None:
            raise argument_error("sequences", "the step before to be committed or abandoned", "an open step")
        given, counts = self._checked(sequences)
        order = sorted(range(len(given)), key=lambda i: counts[i] != 1)
        given, counts = [given[i] for i in order], [counts[i] for i in order]
        needed = self._needed(given, counts)
        if needed > self.available:
            raise OutOfBlocksError(needed, self.available)
        copies: list[tuple[int, int]] = []
        for seq, count in zip(given, counts, strict=True):
            if count:
                if seq.length % self.page_size:
                    self._own_tail(seq, copies)
                while len(seq.table) * self.page_size < seq.length + count:
                    seq.table.append(self._pool.take())
                seq.pending = count
        self.open_step = Step(
            sequences=tuple(given),
            order=np.array(order, np.int64),
            copies=np.array(copies, np.int64).reshape(-1, 2),
            allocator=self,
            **tensors(given, counts, self.page_size),
        )
        return self.open_step

    def commit(self, step: Step) -> None:
        """End a step: see `Step.commit`."""
        self._close(step)
        for seq in step.sequences:
            seq.length += seq.pending
            seq.pending = 0
            for i, page in self._chain(seq):
                self._pool.publish(seq.table[i], seq.chain[i + 1], page)

    def abandon(self, step: Step) -> None:
        """End a step: see `Step.abandon`."""
        self._close(step)
        for seq in step.sequences:
            seq.pending = 0
            self._keep_pages(seq)

    def _close(self, step: Step) -> None:
        if step is not self.open_step:
            raise argument_error("step", "the open step", "one that has ended")
        self.open_step = None

    # Blocks

    def _chain(self, seq: Sequence) -> list[tuple[int, bytes]]:
        """Hash the full blocks that have no hash yet; return (number, token ids) of each."""
        new = []
        for i in range(len(seq.chain) - 1, min(seq.length, seq.known) // self.page_size):
            page = seq.page(i, self.page_size)
            seq.chain.append(chain_hash(seq.chain[-1], page))
            new.append((i, page))
        return new

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _needed(self, given: list[Sequence], counts: list[int]) -> int:
        """Return how many blocks a step needs: those it adds, and one for each copy."""
        added = 0
        writers: dict[int, int] = {}  # of partial blocks
        for seq, count in zip(given, counts, strict=True):
            added += self._pages(seq.length + count) - len(seq.table)
            if count and seq.length % self.page_size:
                writers[seq.table[-1]] = writers.get(seq.table[-1], 0) + 1
        # Where all sequences that use a block write into it, the last one needs no copy.
        return added + sum(min(n, self._pool.references[block] - 1) for block, n in writers.items())

    def _own_tail(self, seq: Sequence, copies: list[tuple[int, int]]) -> None:
        """Make a partial last block writeable, with a copy if other sequences use it."""
        tail = seq.table[-1]
        if self._pool.references[tail] == 1:
            self._pool.withdraw(tail)
        else:
            self._pool.release([tail])
            seq.table[-1] = self._pool.take()
            copies.append((tail, seq.table[-1]))

    def _keep_pages(self, seq: Sequence) -> None:
        """Free the blocks after a sequence's last token."""
        pages = self._pages(seq.length)
        self._pool.release(seq.table[pages:])
        del seq.table[pages:]

    # Arguments

    def check(self, seq: Any, at_rest: bool = False) -> None:
        """Raise unless `seq` is a live sequence of this allocator, and with `at_rest` in no open step."""
        if not isinstance(seq, Sequence) or seq.allocator is not self:
            raise argument_error("seq", "a live sequence of this allocator", describe(seq))
        if at_rest and seq.pending:
            raise argument_error("seq", "a sequence that no open step adds to", describe(seq))

    def _checked(self, sequences: Iterable[tuple[Sequence, int]]) -> tuple[list[Sequence], list[int]]:
        """Check the sequences and counts of a step."""
        try:
            pairs = [(seq, count) for seq, count in sequences]
        except (TypeError, ValueError):
            raise argument_error("sequences", "pairs (sequence, new tokens)", describe(sequences)) from None
        for seq, _ in pairs:
            self.check(seq)
        given = [seq for seq, _ in pairs]
        counts = [integer("new tokens", count, 0) for _, count in pairs]
        if len(set(map(id, given))) < len(given):
            raise argument_error("sequences", "each sequence once", f"one twice among {len(given)}")
        return given, counts
