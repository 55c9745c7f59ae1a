"""Allocate the blocks of a paged cache to sequences, without touching keys or values."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.cache.blocks.changes import Guard, whole_or_refused
from kvkit.cache.blocks.layout import Arrangement, lay_out
from kvkit.cache.blocks.pool import Pool, Published, chain_hash, root_hash
from kvkit.cache.blocks.sequence import ID_BYTES, SavedSequence, Sequence, check_bytes, encode_ids
from kvkit.cache.blocks.step import Step, slot_type, tensors
from kvkit.cache.layers import requests
from kvkit.cache.layers.positions import PLANS, Rearrangement, RowPositions
from kvkit.checks.values import integer
from kvkit.errors import KvkitError, argument_error, describe
from kvkit.typed import Array


class OutOfBlocksError(KvkitError):
    """Says that more blocks are needed than are free or evictable; nothing has changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed, self.available = needed, available

    def __str__(self) -> str:
        return str(argument_error("num_blocks", f"{self.needed} free or evictable blocks", self.available))


class BlockAllocator:
    """Gives blocks to sequences, shares blocks between them, and makes the index tensors of a step.

    The step that fills a block publishes it: a new sequence that begins with the same tokens will share it.
    Published blocks are never written. If no sequence uses one, it stays until room is needed; then the block
    that was used least recently is evicted. A sequence that writes into a shared block gets a copy.

    Parameters
    ----------
    num_blocks, page_size : int
        The number of blocks, and of tokens in each.
    identity : bytes
        All that keys and values depend on besides tokens: geometry, format, model. It is part of each hash.
    slot_dtype : dtype
        The dtype of `Step.slot_mapping`: int32 or int64.
    copy_rows : callable, optional
        ``copy_rows(sources, targets)`` copies cache rows (int64 arrays) in all layers, and reads all rows
        before it writes one. Changes in the middle of a block need it: a `fork` of only some tokens, and
        removing or moving tokens.

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
        self,
        num_blocks: int,
        page_size: int,
        *,
        identity: bytes = b"",
        slot_dtype: DTypeLike = np.int32,
        copy_rows: Callable[[Array, Array], None] | None = None,
    ) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 1, 2**31 - 1)
        self.page_size = integer("page_size", page_size, 1, 2**31 - 1)
        self.slot_dtype = slot_type(slot_dtype, self.num_blocks * self.page_size)
        self._identity = str(self.page_size).encode(), check_bytes("identity", identity)
        self._pool, self._copy_rows = Pool(self.num_blocks), copy_rows
        self.open_step: Step | None = None
        self._guard = Guard()

    @property
    def available(self) -> int:
        """Return how many blocks are free or can be evicted."""
        return self._pool.available

    @property
    def references(self) -> Array:
        """Return how many sequences use each block: int64, shape [num_blocks]."""
        return np.array(self._pool.references)

    # Sequences

    @whole_or_refused
    def add(self, token_ids: ArrayLike = (), *, salt: bytes = b"") -> Sequence:
        """Begin a sequence. It shares published blocks of its first tokens, but never of its last token.

        Parameters
        ----------
        token_ids : array-like of int
            Ids of its tokens. Blocks of tokens without ids cannot be shared.
        salt : bytes
            Anything else that its keys and values depend on, such as an adapter.

        Returns
        -------
        Sequence
            Its ``length`` is the number of its tokens that are in the cache already.
        """
        seq = Sequence(self, encode_ids(token_ids), [root_hash(*self._identity, check_bytes("salt", salt))])
        for i in range((seq._id_count - 1) // self.page_size):
            ids = seq._page_ids(i, self.page_size)
            digest = chain_hash(seq._chain[-1], ids)
            block = self._pool.find(digest, ids)
            if block is None:
                break
            seq._chain.append(digest)
            seq._table.append(block)
            seq.length += self.page_size
        self._pool.share(seq._table)
        return seq

    @whole_or_refused
    def extend(self, seq: Sequence, token_ids: ArrayLike) -> None:
        """Append the ids of the next tokens, so that the blocks that they fill can be shared."""
        self._check(seq)
        ids, tokens = encode_ids(token_ids), seq.length + seq._pending
        if seq._id_count < tokens:
            wanted = f"a sequence with ids for all its {tokens} tokens"
            raise argument_error("seq", wanted, f"{seq._id_count} ids")
        seq._ids += ids

    @whole_or_refused
    def fork(self, seq: Sequence, begin: SupportsIndex = 0, end: SupportsIndex | None = None) -> Sequence:
        """Return a new sequence with the same tokens in the same blocks. Writing to a shared block copies it.

        Parameters
        ----------
        seq : Sequence
        begin, end : int, optional
            The new sequence has only the tokens with positions in [begin, end), at the same positions. If
            ``begin`` is inside a block, the tokens from there to the end of the block are copied.

        Returns
        -------
        Sequence

        Raises
        ------
        OutOfBlocksError
            If no block is free for the copy.
        """
        self._check(seq, at_rest=True)
        begin = integer("begin", begin, 0)
        end = seq.next_position if end is None else integer("end", end, begin)
        if not begin and end >= seq.next_position:
            self._pool.share(seq._table)
            return seq._copy()
        self._check_movable(seq)
        now = seq._all_positions()
        kept = (now.positions >= begin) & (now.positions < end)
        after = RowPositions(now.positions[kept], now.shifts[kept], min(end, now.length))
        plan = Rearrangement(kept, after, rope=None)  # no key is moved
        layout = self._layout(seq, plan, is_own=lambda block: False)  # `seq` keeps its blocks
        self._check_room([layout], freed=0)
        other = seq._copy()
        self._pool.share(block for block in layout.pages if block >= 0)
        self._apply([(other, layout)], plan)
        return other

    @whole_or_refused
    def crop(self, seq: Sequence, length: int) -> None:
        """Drop a sequence's last tokens.

        Parameters
        ----------
        seq : Sequence
            A sequence to which no open step adds tokens. A step without new tokens for it still attends to
            the dropped ones, because freed blocks are not used again before the step ends.
        length : int
            Tokens to keep; negative: tokens to drop; 0 drops none. After tokens were removed or moved,
            positions count: the next token's, or negative by how many it goes back.
        """
        self._check(seq, at_rest=True)
        if seq._intact is not None:
            length = requests.length_after_crop(length, seq.next_position)
            self._move_tokens([seq], PLANS["remove"](seq._all_positions(), None, length))
            return
        length = integer("length", length, -seq.length)
        kept = min(length, seq.length) if length > 0 else seq.length + length
        if kept < seq.length:
            seq.length = kept
            self._keep_pages(seq)
            del seq._ids[ID_BYTES * kept :], seq._chain[1 + kept // self.page_size :]

    def _rearrange(self, sequences: Collection[Sequence], plan: Rearrangement, ropes: list[Any]) -> None:
        """Remove and move tokens of sequences that have equal positions. After an error none has changed.

        No other sequence changes. `ropes` says how the keys of each layer are rotated. Keys that `plan`
        rotates in memory move to unshared blocks; the caller rotates them there.
        """
        for seq in sequences:
            self._check_movable(seq)
        self._move_tokens(sequences, plan)
        for seq in sequences:
            seq._ropes = ropes

    def _move_tokens(self, sequences: Collection[Sequence], plan: Rearrangement) -> None:
        layouts = [(seq, self._layout(seq, plan, self._is_own)) for seq in sequences]
        dropped: list[int] = []  # a block once for each sequence that drops it
        for seq, layout in layouts:
            kept = set(layout.pages)
            dropped += [block for block in seq._table if block not in kept]
        freed = sum(self._pool.references[block] == uses for block, uses in Counter(dropped).items())
        self._check_room([layout for _, layout in layouts], freed)
        self._pool.release(dropped)
        self._apply(layouts, plan)

    def _join(self, seq: Sequence, other: Sequence, row: int, plan: Rearrangement, ropes: list[Any]) -> None:
        """Put the tokens of `other` before token number `row` of `seq`. Both share the blocks of `other`.

        `plan` has the positions of all tokens afterwards, and the keys that the caller will rotate, as in
        `_rearrange`. The sequences have no block in common. After an error none has changed.
        """
        size, own = self.page_size, set(seq._table)
        mine, theirs = seq._rows(size), other._rows(size)
        rows = np.concatenate((mine[:row], theirs, mine[row:]))
        rotated_from = len(rows) if plan.rotated is None else int(np.flatnonzero([*plan.rotated, 1])[0])

        def is_own(block: int) -> bool:
            return block in own and self._is_own(block)

        layout = lay_out(rows, plan.after.shifts, size, is_own, rotated_from)
        dropped = sorted(own.difference(layout.pages))
        self._check_room([layout], sum(self._pool.references[block] == 1 for block in dropped))
        self._pool.share(block for block in layout.pages if block >= 0 and block not in own)
        self._pool.release(dropped)
        ids = seq._ids[: ID_BYTES * min(row, seq._id_count)]
        if seq._id_count >= row and other._id_count >= other.length:
            ids += other._ids[: ID_BYTES * other.length] + seq._ids[ID_BYTES * row :]
        intact = min(row, seq.length if seq._intact is None else seq._intact)
        table, targets = self._take_pages(layout)
        seq._become(
            length=len(rows), _table=array("q", table), _borders=layout.borders, _ids=ids, _ropes=ropes,
            _intact=intact, _row_positions=plan.after,
        )  # fmt: skip
        del seq._chain[1 + intact // size :]
        if len(targets):
            self._copy_rows(layout.sources, targets)  # type: ignore[misc]  # checked

    def _layout(self, seq: Sequence, plan: Rearrangement, is_own: Callable[[int], bool]) -> Arrangement:
        """Return where the tokens will lie after a plan."""
        rows, rotated = seq._rows(self.page_size)[plan.kept], plan.rotated
        # All tokens from the first whose key is rotated are copied, to unshared blocks.
        rotated_from = len(rows) if rotated is None else np.flatnonzero([*rotated, 1])[0]
        return lay_out(rows, plan.after.shifts, self.page_size, is_own, int(rotated_from))

    def _is_own(self, block: int) -> bool:
        """Return whether only one sequence uses a block, and no new one can find it."""
        return self._pool.references[block] == 1 and not self._pool.is_published(block)

    def _check_room(self, layouts: list[Arrangement], freed: int) -> None:
        """Raise if layouts need more blocks than are available or `freed`, or copies that are impossible."""
        new = sum(layout.new for layout in layouts)
        if new > self.available + freed:
            raise OutOfBlocksError(new, self.available + freed)
        if self._copy_rows is None and any(len(layout.sources) for layout in layouts):
            wanted = "a function, because tokens from the middle of a block are to be copied"
            raise argument_error("copy_rows", wanted, "None")

    def _apply(self, layouts: list[tuple[Sequence, Arrangement]], plan: Rearrangement) -> None:
        """Move sequences to new layouts; the blocks that they keep are already counted as used."""
        sources, targets = [], []
        for seq, layout in layouts:
            table, places = self._take_pages(layout)
            if len(layout.sources):
                sources.append(layout.sources)
                targets.append(places)
            self._place(seq, plan, table, layout.borders)
        if sources:  # in one call, because a block that one sequence frees may become another's
            self._copy_rows(np.concatenate(sources), np.concatenate(targets))  # type: ignore[misc]  # checked

    def _take_pages(self, layout: Arrangement) -> tuple[list[int], Array]:
        """Take the new blocks of a layout; return (the block table, the rows to copy to)."""
        size, places = self.page_size, layout.targets
        table = [block if block >= 0 else self._pool.take() for block in layout.pages]
        return table, np.array(table, np.int64)[places // size] * size + places % size

    def _place(self, seq: Sequence, plan: Rearrangement, table: list[int], borders: list[int]) -> None:
        """Give a sequence the tokens of a plan, the blocks of `table` and its segments."""
        now, after = seq._all_positions(), plan.after
        unchanged = plan.kept.copy()  # tokens of the old sequence that have their position and shift still
        same_position = after.positions == now.positions[plan.kept]
        unchanged[plan.kept] = same_position & (after.shifts == now.shifts[plan.kept])
        intact = len(unchanged) if seq._intact is None else seq._intact
        intact = min(int(np.flatnonzero([*~unchanged, True])[0]), intact)
        # After a crop other tokens may follow than those whose ids are known.
        is_crop = after.length < now.length and not plan.kept[-1:].all()
        seq._keep_ids(plan.kept, is_crop=is_crop)
        length, positions = len(after.positions), None if after.is_plain() else after
        seq._become(
            length=length, _table=array("q", table), _borders=borders, _row_positions=positions,
            _intact=None if positions is None and length <= intact else intact,
        )  # fmt: skip
        del seq._chain[1 + min(intact, length) // self.page_size :]

    @whole_or_refused
    def free(self, seq: Sequence) -> None:
        """End a sequence. New sequences can share its published blocks until these are evicted."""
        self._check(seq, at_rest=True)
        seq._allocator, seq.length, seq._borders, seq._row_positions = None, 0, [], None
        self._keep_pages(seq)

    def _published(self) -> Iterator[Published]:
        """Yield the published blocks, in the order of eviction."""
        return self._pool.published()

    def _restore(
        self,
        saved: Iterable[SavedSequence],
        published: Collection[Published],
        blocks: set[int],
    ) -> list[Sequence]:
        """Restore sequences in a new allocator.

        The blocks of their tables and the `published` blocks must be among `blocks`.
        """
        sequences = []
        for length, first_hash, table, ids, moves in saved:
            seq = Sequence(self, encode_ids(ids), [first_hash])
            seq.length = integer("length", length, 0)
            if moves is not None:
                seq._set_moves(moves)
            seq._table.extend(table.tolist())
            if len(seq._table) != self._pages(seq) or not blocks.issuperset(seq._table):
                raise argument_error("block_table", f"saved blocks for {length} tokens", seq.blocks)
            self._chain(seq)
            sequences.append(seq)
        if not blocks.issuperset(block for block, *_ in published):
            raise argument_error("published", "saved blocks", published)
        self._pool.restore([seq._table for seq in sequences], published)
        return sequences

    # Steps

    @whole_or_refused
    def begin_step(self, sequences: Iterable[tuple[Sequence, int]]) -> Step:
        """Reserve blocks for new tokens.

        Parameters
        ----------
        sequences : iterable of (Sequence, int)
            Each sequence once, with its number of new tokens. Tokens are packed in this order.

        Returns
        -------
        Step
            It must be committed or abandoned before the next step begins.

        Raises
        ------
        OutOfBlocksError
            If too few blocks are free or evictable; then nothing has changed.
        """
        ordered, counts = self._checked(sequences)
        needed = self._needed(ordered, counts)
        if needed > self.available:
            raise OutOfBlocksError(needed, self.available)
        copies: list[tuple[int, int]] = []
        for seq, count in zip(ordered, counts, strict=True):
            if count:
                if seq._tail_length % self.page_size:
                    self._own_last_block(seq, copies)
                for _ in range(self._pages(seq, count) - len(seq._table)):
                    seq._table.append(self._pool.take())
                seq._pending = count
        self.open_step = self._step(ordered, counts, copies)
        return self.open_step

    def _reading_step(self, sequences: Iterable[Sequence]) -> Step:
        """Return a step without new tokens that has ended. Nothing changes, so an interrupt does no harm."""
        self._guard.check()
        ordered, counts = self._checked((seq, 0) for seq in sequences)
        return self._step(ordered, counts, copies=[])

    def _step(self, ordered: list[Sequence], counts: list[int], copies: list[tuple[int, int]]) -> Step:
        """Return the index tensors of a step whose blocks are allocated."""
        return Step(
            sequences=tuple(ordered),
            copies=np.array(copies, np.int64).reshape(-1, 2),
            allocator=self,
            **tensors(ordered, counts, self.page_size),
        )

    def _missing(self, sequences: Iterable[tuple[Sequence, int]]) -> int:
        """Return how many blocks a step with these new tokens lacks; below 1, it has room."""
        return self._needed(*self._checked(sequences)) - self.available

    @whole_or_refused
    def _commit(self, step: Step) -> None:
        """End a step: see `Step.commit`."""
        self._close(step)
        for seq in step.sequences:
            seq.length += seq._pending
            seq._pending = 0
            for i, ids in self._chain(seq):
                self._pool.publish(seq._table[i], seq._chain[i + 1], ids)

    @whole_or_refused
    def _abandon(self, step: Step) -> None:
        """End a step: see `Step.abandon`."""
        self._close(step)
        originals = {copy: block for block, copy in step.copies.tolist()}
        for seq in step.sequences:
            seq._pending = 0
            self._keep_pages(seq)
            if seq._table and (copy := seq._table[-1]) in originals:
                seq._table[-1] = originals[copy]
                self._pool.reclaim(originals[copy])
                self._pool.release([copy])

    def _abandon_open_step(self) -> None:
        """Abandon the open step, if there is one, unless an interrupt has changed blocks in part."""
        if self.open_step is not None and not self._guard.interrupted:
            self._abandon(self.open_step)

    def _close(self, step: Step) -> None:
        if step is not self.open_step:
            raise argument_error("step", "the open step", "one that has ended")
        self.open_step = None

    # Blocks

    def _chain(self, seq: Sequence) -> list[tuple[int, bytes]]:
        """Hash the full blocks that have no hash yet; return the (index, token ids) of each."""
        new = []
        tokens = min(seq.length, seq._id_count, seq.length if seq._intact is None else seq._intact)
        for i in range(len(seq._chain) - 1, tokens // self.page_size):
            ids = seq._page_ids(i, self.page_size)
            seq._chain.append(chain_hash(seq._chain[-1], ids))
            new.append((i, ids))
        return new

    def _pages(self, seq: Sequence, new: int = 0) -> int:
        """Return how many blocks a sequence needs for `new` more tokens."""
        pages = -(-(seq._tail_length + new) // self.page_size)
        for length in seq._segment_lengths() if seq._borders else ():
            pages += -(-length // self.page_size)
        return pages

    def _needed(self, ordered: list[Sequence], counts: list[int]) -> int:
        """Return how many blocks a step needs: the new ones and one for each copy."""
        added = 0
        writers: dict[int, int] = {}  # partial block -> how many sequences of the step write into it
        for seq, count in zip(ordered, counts, strict=True):
            added += self._pages(seq, count) - len(seq._table)
            if count and seq._tail_length % self.page_size:
                writers[seq._table[-1]] = writers.get(seq._table[-1], 0) + 1
        # If all sequences that use a block write into it, the last one needs no copy.
        return added + sum(min(n, self._pool.references[block] - 1) for block, n in writers.items())

    def _own_last_block(self, seq: Sequence, copies: list[tuple[int, int]]) -> None:
        """Make a partial last block writeable, with a copy if other sequences use it."""
        last = seq._table[-1]
        if self._pool.references[last] == 1:
            self._pool.withdraw(last)
        else:
            self._pool.release([last])
            seq._table[-1] = self._pool.take()
            copies.append((last, seq._table[-1]))

    def _keep_pages(self, seq: Sequence) -> None:
        """Free the blocks after a sequence's last token."""
        pages = self._pages(seq)
        self._pool.release(seq._table[pages:])
        del seq._table[pages:]

    # Arguments

    def _check(self, seq: Any, at_rest: bool = False) -> None:
        """Raise unless `seq` is a live sequence of this allocator, `at_rest` one without pending tokens."""
        if not isinstance(seq, Sequence) or seq._allocator is not self:
            raise argument_error("seq", "a live sequence of this allocator", describe(seq))
        if at_rest and seq._pending:
            raise argument_error("seq", "a sequence that no open step adds to", describe(seq))

    def _check_movable(self, seq: Any) -> None:
        """Raise unless tokens of `seq` can be removed and moved, which needs that no step is open."""
        self._check(seq)
        if self.open_step is not None:
            raise argument_error("seq", "a sequence between steps", "one while a step is open")

    def _checked(self, sequences: Iterable[tuple[Sequence, int]]) -> tuple[list[Sequence], list[int]]:
        """Check the sequences and counts of a step, and that none is open."""
        if self.open_step is not None:
            raise argument_error("sequences", "the step before to be committed or abandoned", "an open step")
        try:
            pairs = [(seq, count) for seq, count in sequences]
        except (TypeError, ValueError):
            raise argument_error("sequences", "pairs (sequence, new tokens)", describe(sequences)) from None
        for seq, _ in pairs:
            self._check(seq)
        ordered = [seq for seq, _ in pairs]
        counts = [integer("new tokens", count, 0) for _, count in pairs]
        if len(set(map(id, ordered))) < len(ordered):
            raise argument_error("sequences", "each sequence once", f"one twice among {len(ordered)}")
        return ordered, counts
