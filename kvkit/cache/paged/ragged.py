"""Define `RaggedLayer`, whose heads keep different tokens: each head is a sequence in pages of its own."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit import cpu
from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.blocks.allocator import BlockAllocator
from kvkit.cache.blocks.sequence import Moves, SavedSequence
from kvkit.cache.blocks.step import Step
from kvkit.cache.layers import requests
from kvkit.cache.layers.attention import NOT_ROTATED
from kvkit.cache.layers.changes import whole
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.positions import (
    MAX_PIECES,
    Piece,
    Rearrangement,
    RopeLike,
    RowPositions,
    pieces_array,
    planner,
    rotation_of,
)
from kvkit.cache.paged.segments import SegmentedStep, batch_mask
from kvkit.cache.paged.step import PagedStep
from kvkit.cache.paged.store import PagedStore
from kvkit.cache.stores.memory import Geometry, check_geometry
from kvkit.cache.stores.view import views_of
from kvkit.calls.prepared import PreparedCall, PreparedCalls, Refit, form_of
from kvkit.checks import attention, index_tensors, masks
from kvkit.checks.arguments import Scoring
from kvkit.checks.records import NO_MASK, Context, StepIndex
from kvkit.checks.values import checked_format, flag, integer, one_piece
from kvkit.errors import argument_error, check_shape, describe, multiples
from kvkit.rope import Rope
from kvkit.typed import Array, Attended, States

PAGE_SIZE = 16  # tokens
MORE_PAGES = 16  # how many pages a head may get until attention must be prepared again


class HeadStates(NamedTuple):
    """Holds the stored tokens of one key head of a row of the batch."""

    keys: Array  # [tokens, D]
    values: Array  # [tokens, D]
    positions: Array  # [tokens]


class RaggedPlan(NamedTuple):
    """Plans a change of all heads, which is checked and not yet done."""

    plans: list[Rearrangement]  # one for each head


def prepare_heads(
    context: Context,
    step: Step,
    first: Refit,
    query: Array,
    results: tuple[Array, Array, Array | None],
    weights: attention.Weights,
) -> PreparedCall:
    """Attend to the pages of all heads in one launch; return the call, to repeat it in later steps."""
    count, new, *_ = query.shape  # [heads of all rows, q, query heads of a key head, D]
    out, lse, key_weights = results
    pages = np.full((count, step.pages.shape[1] + MORE_PAGES), -1)  # with room for later steps
    pages[:, : step.pages.shape[1]] = step.pages
    steps = StepIndex(
        np.arange(count + 1) * new, step.kvstarts.copy(), step.first_places, np.zeros(count, np.int64),
        pages, PAGE_SIZE, tokens=count * new, context=int(step.kvstarts[-1]), rows=0,
    )  # fmt: skip
    decoding = count if new == 1 else 0
    launch = cpu.attention.prepare.prepare_attention(
        query, out, lse, context, steps, decoding, weights, key_weights=key_weights
    )
    cpu.launches.start(launch)
    return PreparedCall(
        [launch], {"query": query, "out": out, "lse": lse}, attention=launch, first=first, steps=steps
    )


class RaggedLayer(Layer):
    """A layer whose key heads keep different tokens. `Cache.compress` with a budget for heads makes it.

    Every key head of a row of the batch is a sequence in pages of 16 tokens, so a head that keeps fewer
    tokens takes less memory. All pages are in one pool, a paged cache with one layer and one head::

        row 0, head 0   positions 0 1 4 .. 29   (20 tokens)   pages 0, 2
        row 0, head 1   positions 0 .. 8        (9 tokens)    page 1

    New tokens go to all heads. `remove`, `shift`, `divide` and `crop` take positions, and change all heads.

    Attributes
    ----------
    lengths : ndarray of int64, shape [B, Hkv]
        The number of stored tokens of each head.
    sequences : list of Sequence
        One for each head: all heads of row 0 of the batch, then those of row 1, and so on.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import DynamicCache
    >>> cache, keys = DynamicCache(), np.ones((1, 2, 6, 4), np.float32)
    >>> keys[0, 0, 2:] = 3
    >>> states = cache.update(keys, keys, 0)
    >>> cache.compress("knorm", budget=[[2, 3]]).tokens
    [[[2, 3]]]
    >>> layer = cache.layers[0]
    >>> layer.positions, layer.get_seq_length()
    (array([[[ 0,  1, -1],
            [ 0,  1,  2]]]), 6)
    >>> states = cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    >>> layer.lengths, cache.attend(np.ones((1, 4, 1, 4), np.float32), 0).shape
    (array([[3, 4]]), (1, 4, 1, 4))
    """

    _attributes = Layer._attributes.extended("geometry", "pool", "blocks", "sequences", "_changes")

    _why_not_joined = "heads that keep different tokens"

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        self.geometry: Geometry | None = None
        self.pool: Any = None  # the `PagedStore` of all pages
        self.blocks: Any = None  # its `BlockAllocator`
        self.sequences: list[Any] = []
        self._step: Any = None  # the last step, while its index tensors are valid
        self._calls: PreparedCalls[PreparedCall] = PreparedCalls(1)  # cleared with each new pool
        self._changes = 0
        self._row_positions = RowPositions.contiguous(0, 0)  # not used: each sequence has its own

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_step": None}  # a copy has other addresses

    def _fill_heads(self, geometry: Geometry, states: Sequence[HeadStates], length: int) -> None:
        """Store the tokens of every head in an empty layer; `length` is the position of the next token."""
        if (dim := geometry.key_dim) != geometry.value_dim:
            wanted = f"heads of {dim} elements, as keys have, because heads keep different tokens"
            raise argument_error("value_states", wanted, geometry.value_dim)
        counts = [len(head.positions) for head in states]
        pages = sum(-(-count // PAGE_SIZE) for count in counts)
        self._make_pool(geometry, with_spare_pages(pages, len(counts)))
        self.sequences = [self.blocks.add() for _ in counts]
        with self.blocks.begin_step(zip(self.sequences, counts, strict=True)) as step:
            for side in (0, 1):  # keys, values
                self._pool_side(side)[step.slot_mapping] = np.concatenate([head[side] for head in states])
        for seq, own in zip(self.sequences, states, strict=True):
            rows = RowPositions(own.positions, np.zeros_like(own.positions), length)
            if not rows.is_plain():  # the first position that is not its index is behind a hole
                hole = np.flatnonzero(np.append(own.positions, -1) != np.arange(len(own.positions) + 1))[0]
                seq._set_moves(Moves(rows, borders=[], intact=int(hole), ropes=None))

    def _pool_side(self, side: int) -> Array:
        """Return the keys (0) or the values (1) of all pages, a view [rows, D]."""
        pages = self.pool.blocks[0][0, side]  # [page, row, head, D]
        return pages.reshape(-1, pages.shape[-1])

    def _make_pool(self, geometry: Geometry, pages: int) -> None:
        self.geometry, pages = geometry, max(pages, 1)
        dim, dtype = geometry.key_dim, geometry.fmt.dtype
        self.pool = PagedStore(
            pages, PAGE_SIZE, num_layers=1, num_kv_heads=1, head_dim=dim, dtype=dtype, allocate=self.allocate
        )
        self.blocks = BlockAllocator(pages, PAGE_SIZE, slot_dtype=np.int64, copy_rows=self.pool.copy_rows)
        self._step = None
        self._calls.clear()

    def _resize(self, pages: int) -> None:
        """Move the pages in use to a new pool of `pages` pages."""
        old_pool, old_sequences = self.pool, self.sequences
        used = np.unique(np.concatenate([np.array(seq._table, np.int64) for seq in old_sequences]))
        assert self.geometry is not None
        self._make_pool(self.geometry, max(pages, len(used)))
        for new, old in zip(self.pool.blocks, old_pool.blocks, strict=True):
            new[:, :, : len(used)] = old[:, :, used]  # page used[i] becomes page i
        saved = [
            SavedSequence(
                seq.length,
                seq._chain[0],
                np.searchsorted(used, seq._table),
                token_ids=(),
                moves=seq._moves(),
            )
            for seq in old_sequences
        ]
        self.sequences = self.blocks._restore(saved, published=(), blocks=set(range(len(used))))

    # Adding tokens

    @whole
    def _append(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None
    ) -> tuple[States, States]:
        geometry, new = check_geometry(key_states, value_states, self.geometry), key_states.shape[2]
        if cache_position is not None:
            requests.check_positions(cache_position, new, self.get_seq_length())
        if self.geometry is None:
            no_rows = np.empty((0, geometry.key_dim), geometry.fmt.dtype)
            no_tokens = HeadStates(no_rows, no_rows, np.empty(0, np.int64))
            self._fill_heads(geometry, [no_tokens] * (geometry.batch * geometry.heads), 0)
        with self._begin(new) as step:
            for side, states in enumerate((key_states, value_states)):
                packed = np.ascontiguousarray(states).reshape(-1, geometry.key_dim)
                self._pool_side(side)[step.slot_mapping] = packed
        self._step, self._changes = step, self._changes + 1
        return views_of(self, self.pool.format.dtype, (self._shape[3], self._shape[3]))

    def _begin(self, new: int) -> Step:
        """Begin a step of `new` tokens for every head; add pages if there are too few."""
        missing = self.blocks._missing([(seq, new) for seq in self.sequences])
        if missing > 0:
            pages = self.blocks.num_blocks + missing
            self._resize(pages + pages // 4)
        self._overwrites()  # the step counts pages
        step = self.blocks.begin_step([(seq, new) for seq in self.sequences])
        self.pool.copy(step.copies)
        return step

    def _tables(self) -> Step:
        """Return a step with the page tables of all heads: the last one, or one without new tokens."""
        if self._step is None:
            self._step = self.blocks._reading_step(self.sequences)
        return self._step

    @one_call_at_a_time
    @whole
    def reserve(self, query_length: SupportsIndex) -> None:
        new = integer("query_length", query_length, 0)
        if self.sequences:
            self._begin(new).abandon()
            self._step = None

    # Sizes and positions

    def get_seq_length(self) -> int:
        return int(self.sequences[0].next_position) if self.sequences else 0

    def get_mask_sizes(self, query_length: SupportsIndex) -> tuple[int, int]:
        return self.get_seq_length() + integer("query_length", query_length, 0), 0

    @property
    def lengths(self) -> Array:
        """Return the number of stored tokens of each head, int64 [B, Hkv]."""
        heads = 1 if self.geometry is None else self.geometry.heads
        return np.array([seq.length for seq in self.sequences], np.int64).reshape(-1, heads)

    @property
    def stored_tokens(self) -> int:
        """Return the most tokens that a head stores."""
        return int(self.lengths.max(initial=0))

    @property
    def positions(self) -> Array:
        """Return the positions of every head's tokens, int64 [B, Hkv, longest], padded with -1."""
        return self._dense([seq.positions for seq in self.sequences], -1)

    @property
    def rope_shifts(self) -> Array:
        """Return the rope shifts: int64 [pieces, 5] of (batch row, head, first row, end row, shift)."""
        heads, numbered = self.lengths.shape[1], enumerate(self.sequences)
        pieces = [(*divmod(i, heads), *piece) for i, seq in numbered for piece in seq._pieces(seq.length)]
        return np.array(pieces, np.int64).reshape(-1, 5)

    def _dense(self, of_heads: Sequence[Array], padding: int) -> Array:
        """Join an array [tokens, ...] of each head to one array [B, Hkv, longest, ...]; pad shorter ones."""
        longest, like = self.stored_tokens, of_heads[0] if of_heads else np.empty(0, np.int64)
        dense = np.full((len(of_heads), longest, *like.shape[1:]), padding, like.dtype)
        for padded, own in zip(dense, of_heads, strict=True):
            padded[: len(own)] = own
        return dense.reshape(*self.lengths.shape, *dense.shape[1:])

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the keys and of the values that `stored` returns."""
        if (sizes := self.geometry) is None:
            return 0, 0, 0, 0
        return sizes.batch, sizes.heads, self.stored_tokens, sizes.key_dim

    @property
    def batch_size(self) -> int:
        return 0 if self.geometry is None else self.geometry.batch

    def _stored(self) -> tuple[States, States]:
        """Return keys and values [B, Hkv, longest, D], padded with zeros."""
        rows = [seq._rows(PAGE_SIZE) for seq in self.sequences]
        keys, values = (self._dense([self._pool_side(side)[own] for own in rows], 0) for side in (0, 1))
        return keys, values

    def _heads_states(self) -> list[HeadStates]:
        """Return the tokens of every head, with keys rotated for their present positions."""
        states = []
        for seq in self.sequences:
            rows, now = seq._rows(PAGE_SIZE), seq._all_positions()
            keys, values = (self._pool_side(side)[rows] for side in (0, 1))
            if now.shifted and isinstance(self.rope, Rope):
                keys = self.rope.shift(keys.astype(np.float32), now.shifts).astype(keys.dtype)
            states.append(HeadStates(keys, values, now.positions))
        return states

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum()) * 2 * self._pool_side(0)[:1].nbytes if self.sequences else 0

    def _attend(
        self, query: Array, mask: Array | None, scoring: Scoring, return_lse: bool, wants_weights: bool
    ) -> Attended:
        """Attend to each key head as a sequence, with the query heads of its group."""
        wants_lse = flag("return_lse", return_lse)
        batch, heads, new, dim = self._check_query(query)
        count, group = len(self.sequences), heads // self.lengths.shape[1]  # B * Hkv, G
        visible, place = self._visible(mask), NO_MASK
        if visible is not None:
            place = masks.static_mask(self.pool.format, visible, count, group, new, visible.shape[-1])
        queries = one_piece(query.reshape(count, group, new, dim).swapaxes(1, 2))  # [B * Hkv, q, G, D]
        out, lse = np.empty(queries.shape, queries.dtype), np.empty(queries.shape[:3], np.float32)
        key_weights = np.empty((count, group, self.stored_tokens), np.float32) if wants_weights else None
        step, form = self._tables(), None  # a call without a form is not prepared
        if step.in_order and scoring.sinks is None and not wants_weights:
            form = form_of((queries,), (scoring.softmax_scale, scoring.softcap))
        prepared, refit = self._calls.find(form), Refit(step, step.kvstarts, step.pages, mask=place)
        if not prepared or not prepared.run((queries, out, lse), refit):
            weights = attention.checked_weights(query.swapaxes(1, 2), NO_MASK, scoring)
            if weights.sinks is not None:  # [Hq] -> [B * Hkv, G]
                own = weights.sinks.reshape(-1, group)[None].repeat(batch, 0).reshape(count, group)
                weights = weights._replace(sinks=own, sink_sequences=count)
            if step.in_order:
                results, context = (out, lse, key_weights), self.pool.contexts[0]
                weights = weights._replace(mask=place)
                self._calls.keep(form, prepare_heads(context, step, refit, queries, results, weights))
            elif wants_weights:
                raise argument_error("return_key_weights", NOT_ROTATED, True)
            else:
                out, lse = self._attend_segments(step, queries, visible, weights)
        outputs = out.swapaxes(1, 2).reshape(batch, heads, new, dim)
        more = [lse.swapaxes(1, 2).reshape(batch, heads, new)] if wants_lse else []
        more += [] if key_weights is None else [key_weights.reshape(batch, heads, -1)]
        return (outputs, *more) if more else outputs

    def _attend_segments(
        self, step: Step, queries: Array, visible: Array | None, weights: attention.Weights
    ) -> tuple[Array, Array]:
        """Attend to heads whose keys have several rope shifts; return outputs and lse."""
        count, new, group, dim = queries.shape
        lengths = np.diff(step.kvstarts).tolist()
        segmented = SegmentedStep(step.sequences, [new] * count, lengths, step.pages, PAGE_SIZE)
        mask_of_pair = None if visible is None else functools.partial(batch_mask, visible)
        packed = queries.reshape(count * new, group, dim)
        out, lse = segmented.attend(PagedStep(self.pool, step), packed, 0, mask_of_pair, weights)
        return out.astype(queries.dtype).reshape(queries.shape), lse.reshape(queries.shape[:3])

    def _check_query(self, query: Array) -> tuple[int, int, int, int]:
        """Check queries [B, Hq, q, D]; return their shape."""
        if self.geometry is None:
            raise argument_error(self.name, "stored tokens (call update before attend)", "none")
        checked_format("query", query, (self.geometry.fmt,), 4)
        batch, key_heads, dim = self.geometry.batch, self.geometry.heads, self.geometry.key_dim
        _, heads, new, _ = query.shape
        check_shape("query", query, (batch, multiples(key_heads), None, dim))
        last = [*range(self.get_seq_length() - new, self.get_seq_length())]
        if new > 1 and any(seq.positions[-new:].tolist() != last for seq in self.sequences):
            wanted = f"one query, because some head does not store all of the last {new} tokens"
            raise argument_error("query", wanted, new)
        return batch, heads, new, dim

    def _visible(self, mask: Array | None) -> Array | None:
        """Return which stored tokens of every head a padding mask [B, positions] lets queries see.

        The result is a mask of attention, [B * Hkv, 1, 1, longest].
        """
        if mask is None:
            return None
        legal, heads = (self.batch_size, self.get_seq_length()), self.lengths.shape[1]
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != legal:
            wanted = f"bool {list(legal)}, a padding mask by position, because heads keep different tokens"
            raise argument_error("attn_mask", wanted, describe(mask))
        rows = np.repeat(np.arange(len(mask)), heads)[:, None]
        return mask[rows, self.positions.reshape(len(rows), -1)][:, None, None]

    # Removing tokens and changing the batch

    def _length_after_crop(self, length: int, call: str = "crop") -> int:
        return requests.length_after_crop(length, self.get_seq_length())

    @one_call_at_a_time
    def crop(self, length: int) -> None:
        self._rearrange(self._plan("remove", self._length_after_crop(length)))

    def _plan(  # type: ignore[override]  # for every head
        self, call: str, *arguments: Any, rope: RopeLike = None, **options: Any
    ) -> RaggedPlan:
        now = [seq._all_positions() for seq in self.sequences]
        dim = None if self.geometry is None else self.geometry.key_dim
        rotation = rotation_of(rope, self.rope, dim, any(rows.shifted for rows in now))
        of_heads = [arguments] * len(now)
        if call == "retain":  # each head keeps tokens of its own; other calls are the same for all
            of_heads = [(positions,) for positions in self._positions_by_head(*arguments)]
        heads = zip(now, of_heads, strict=True)
        plans = [planner(call)(rows, rotation, *own, **options) for rows, own in heads]
        return RaggedPlan([plan.in_few_pieces() for plan in plans])

    def _positions_by_head(self, positions: ArrayLike) -> list[Array]:
        """Check positions [B, Hkv, m], padded with -1; return the positions of each head."""
        legal = self.lengths.shape
        expected = f"integers {[*legal, 'm']}, -1 after the last"
        try:
            wanted: Array = np.asarray(positions)
        except ValueError:
            raise argument_error("positions", expected, "rows of different lengths") from None
        if wanted.dtype.kind not in "iu" or wanted.ndim != 3 or wanted.shape[:2] != legal:
            raise argument_error("positions", expected, describe(wanted))
        return [own[own >= 0] for own in wanted.reshape(-1, wanted.shape[2])]

    @whole
    def _rearrange(self, plan: RaggedPlan) -> None:  # type: ignore[override]
        heads = list(zip(self.sequences, plan.plans, strict=True))
        if not any(own.changes(seq._all_positions()) for seq, own in heads):
            return
        # At most: each segment may end with a page that is partly filled.
        needed = sum(-(-len(own.after.positions) // PAGE_SIZE) + MAX_PIECES for _, own in heads)
        if needed > self.blocks.available:
            self._resize(self.blocks.num_blocks + needed)
        ropes = [plan.plans[0].rope]
        self._overwrites()
        for seq, own in zip(self.sequences, plan.plans, strict=True):  # new sequences, if resized
            self.blocks._rearrange([seq], own, ropes)
            if own.rotated is not None:
                moves = own.rotated != 0
                self.pool.rotate(seq._rows(PAGE_SIZE)[moves], own.rotated[moves], ropes)
        self.rope, self._step, self._changes = ropes[0], None, self._changes + 1
        with contextlib.suppress(MemoryError, OSError):  # the tokens have gone; the pool may stay as it is
            self._trim()

    @one_call_at_a_time
    @whole
    def _trim(self) -> None:
        """Move to a pool with a sixteenth more pages than are used, if more than a quarter are free now."""
        if self.sequences:
            used = self.blocks.num_blocks - self.blocks.available
            if self.blocks.available > len(self.sequences) + self.blocks.num_blocks // 4:
                self._resize(with_spare_pages(used, len(self.sequences)))

    def _take_rows(self, indices: Iterable[int]) -> None:
        if self.geometry is not None:
            heads, before, rows = self.geometry.heads, self.sequences, list(indices)
            self._overwrites()
            self.sequences = [self.blocks.fork(before[i * heads + h]) for i in rows for h in range(heads)]
            for seq in before:
                self.blocks.free(seq)
            self.geometry = self.geometry._replace(batch=len(rows))
            self._step, self._changes = None, self._changes + 1

    def _lose_rows(self) -> None:
        super()._lose_rows()
        self.geometry = self.pool = self.blocks = self.sequences = self.store  # type: ignore[assignment]

    def _forget_rows(self) -> None:
        super()._forget_rows()
        changes = self._changes
        self._forget()
        self._changes = changes + 1

    def _copy_store(self) -> None:
        if self.pool is not None:
            self._resize(self.blocks.num_blocks)

    def _large_arrays(self) -> Iterable[Array]:
        return () if self.pool is None else (self.pool.cache,)

    # Files

    @property
    def _was_moved(self) -> bool:
        return True

    def _moves(self) -> dict[str, Array]:
        return {}

    def _arrays(self) -> dict[str, Array]:
        """Return the layer's arrays by their names in a saved file. Tokens are listed head after head."""
        if not self.sequences:
            return {}
        rows = np.concatenate([seq._rows(PAGE_SIZE) for seq in self.sequences])
        now = [seq._all_positions() for seq in self.sequences]
        return {
            "keys": self._pool_side(0)[rows],
            "values": self._pool_side(1)[rows],
            "lengths": self.lengths,
            "positions": np.concatenate([head.positions for head in now]),
            "rope_shifts": np.concatenate([head.shifts for head in now]),
        }

    def _load(self, arrays: dict[str, Array], length: int) -> None:
        if not arrays:
            return
        lengths = index_tensors.index("lengths", arrays["lengths"], 2)
        keys, values = (arrays[name] for name in ("keys", "values"))
        geometry = check_geometry(keys[None, None], values[None, None], None)
        geometry = geometry._replace(batch=lengths.shape[0], heads=lengths.shape[1])
        ends = np.cumsum(lengths)
        if lengths.min(initial=0) < 0 or not len(ends) or ends[-1] != len(keys):
            wanted = f"lengths of heads with {len(keys)} tokens in all"
            raise argument_error("lengths", wanted, lengths.tolist())
        parts = [np.split(arrays[name], ends[:-1]) for name in ("keys", "values", "positions", "rope_shifts")]
        now = []
        for *_, positions, shifts in zip(*parts, strict=True):
            borders = [0, *(np.flatnonzero(np.diff(shifts)) + 1).tolist(), *[len(shifts)] * bool(len(shifts))]
            pieces = [Piece(begin, end, int(shifts[begin])) for begin, end in itertools.pairwise(borders)]
            now.append(RowPositions.restored(positions, pieces_array(pieces), length, len(positions)))
        self._fill_heads(geometry, [HeadStates(*head) for head in zip(*parts[:3], strict=True)], length)
        if any(rows.shifted for rows in now):
            plans = [Rearrangement(np.ones(len(rows.positions), bool), rows, self.rope) for rows in now]
            self._rearrange(RaggedPlan(plans))


def with_spare_pages(used: int, heads: int) -> int:
    """Return a size for a pool: a sixteenth more pages than are used, and at least one for each head."""
    return used + max(used // 16, heads)
