"""Define `PagedCache`: many sequences in blocks, which sequences with the same beginning share."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.cache import compression, reading, saving
from kvkit.cache.base import BaseCache, one_call_at_a_time
from kvkit.cache.blocks.allocator import BlockAllocator
from kvkit.cache.blocks.changes import Guard, whole_or_refused
from kvkit.cache.blocks.sequence import Sequence, check_bytes
from kvkit.cache.layers.joining import common_rotation, join_positions
from kvkit.cache.layers.latent import placed_rotation
from kvkit.cache.layers.positions import (
    Rearrangement,
    RowPositions,
    check_codes,
    describe_rotation,
    planner,
    rotation_of,
)
from kvkit.cache.layers.shared import SharedLayer
from kvkit.cache.layers.state import StateLayer
from kvkit.cache.paged.latent import PagedLatentLayer
from kvkit.cache.paged.layer import Batch, PagedLayer
from kvkit.cache.paged.step import PagedStep
from kvkit.cache.paged.store import PagedStore, stored_format
from kvkit.cache.stores import allocation
from kvkit.checks.values import integer
from kvkit.errors import argument_error, describe
from kvkit.models.words import MOST_LAYERS
from kvkit.rope import Rope
from kvkit.typed import Array, FilePath, Pair, States


class SequencePlan(NamedTuple):
    """Plans a change of sequences that have equal positions, which is checked and not yet done."""

    sequences: List[Sequence]
    rearrangement: Rearrangement
    ropes: list[Any]  # how keys were rotated in each layer


class PagedCache(BaseCache):
    """Stores keys and values of many sequences of any lengths in blocks. Equal beginnings share blocks.

    `blocks` begins, forks, crops and ends sequences; `begin_step` appends their new tokens layer by layer.
    A batch of sequences of one length can also use the methods of other caches: `update`, `attend`, `crop`...

    Parameters
    ----------
    num_blocks, page_size : int
        The number of blocks, and of tokens in each.
    num_layers, num_kv_heads, head_dim : int
        The sizes of the model's keys and values.
    dtype : dtype
        The dtype of keys, values and queries: float32, float16 or bfloat16.
    format : str, optional
        What blocks hold, in the grammar of all formats: ``"int8:g32"``, ``"int4"``, ``"fp8"``, ``"fp8:g32"``,
        ``"e5m2"``, ``"q8_0"``, ``"q4_0"``, or the name of ``dtype``. It stands for the next four arguments,
        which have the words of PMX's operators.
    quant_bit, quant_group : int
        0 stores keys and values unquantized; 8 and 4 store codes, one scale per ``quant_group`` elements.
    quant_format : {None, "e4m3", "e5m2", "q8_0", "q4_0"}
        Stores 8-bit floats, or ggml's blocks, which contain their scales.
    scale : None, float, array of floats or "found"
        The constant scale of e4m3 and e5m2 codes: a number (None: 1), or an array of shape [2] (keys,
        values), [2, num_kv_heads] or [num_layers, 2, num_kv_heads]. "found": each append computes one scale
        per ``quant_group`` elements (one per head and token if that is `head_dim`).
    scale_dtype : dtype
        The dtype of computed scales.
    cache_layout : int
        Axis order of the storage, as in `kvkit.dynamic_batching.key_value_cache`.
    salt : bytes
        A part of every hash of a prefix, so that caches of different models never share prefixes.
    rope : Rope, "none" or list of them, optional
        How keys are rotated, in all layers or in each. `shift` needs it.
    latent_dim : int
        For latent rows (MLA): how many first elements of a row are its value. ``head_dim`` is then the size
        of a whole row, 576 for DeepSeek's 512 + 64. Each row is stored once. In place of keys and values,
        calls take the latent part and the rotated part of rows; queries are absorbed. 0: keys and values of
        heads.
    others : mapping of int to StateLayer or SharedLayer, optional
        The layers, by number, that have no blocks; `num_layers` counts them. They belong to the batch of
        `update` and `attend`, which can then only lose its last tokens; steps and reports leave them out.
        Such a cache cannot be saved.
    offload : path, optional
        A folder to keep the blocks in, see `offload`.

    Attributes
    ----------
    cache, scale : ndarray
        A PMX cache of ``num_blocks * page_size`` rows, and its scales, or None.
    blocks : BlockAllocator
        The sequences: `add`, `extend`, `fork`, `crop`, `free`. Begin steps with `begin_step` of the cache,
        not of `blocks`: it copies shared blocks that the step writes into.
    layers : list of PagedLayer, or of PagedLatentLayer
    rows : Batch
        The sequences of `update` and `attend`, one per row of the batch. Its `remove`, `retain`, `shift`,
        `divide`, `flatten`, `can` and `compress` change all rows, as in other caches.
    store : PagedStore
        The arrays, and where each layer lies in them.
    sequences : list of Sequence
        In a loaded cache, the sequences that were given to `save`; else empty.

    Examples
    --------
    Two prompts that begin alike, then one token for each and for a branch of the first. `branch` shares
    block 1 with `first`, whose new token therefore goes into a copy, block 3:

    >>> import numpy as np
    >>> from kvkit.cache import PagedCache
    >>> cache = PagedCache(
    ...     num_blocks=16, page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype=np.float16)
    >>> def forward(step):
    ...     hidden = np.ones((step.index.seqstarts[-1], 4, 8), np.float16)  # [tokens, heads, dim]
    ...     for layer in range(2):
    ...         hidden = step.multi_head_cache_attention(hidden, hidden[:, :2], hidden[:, :2], layer)
    ...     return hidden
    >>> first = cache.blocks.add([5, 6, 7, 8, 9])
    >>> with cache.begin_step([(first, 5)]) as step:
    ...     output = forward(step)
    >>> second = cache.blocks.add([5, 6, 7, 8, 1, 2])
    >>> second.length                                     # tokens that it shares with `first`
    4
    >>> with cache.begin_step([(second, 2)]) as step:
    ...     output = forward(step)
    >>> branch = cache.blocks.fork(first)
    >>> for sequence, token in ((first, 3), (second, 4), (branch, 5)):
    ...     cache.blocks.extend(sequence, [token])
    >>> with cache.begin_step([(first, 1), (second, 1), (branch, 1)]) as step:
    ...     output = forward(step)
    >>> first.blocks, second.blocks, branch.blocks
    ([0, 3], [0, 2], [0, 1])
    """

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        *,
        format: str | None = None,
        quant_bit: Literal[0, 4, 8] = 0,
        quant_group: int = 8,
        quant_format: str | None = None,
        scale_dtype: DTypeLike = np.float16,
        cache_layout: int = 3,
        salt: bytes = b"",
        scale: Any = None,
        rope: Any = None,
        latent_dim: int = 0,
        others: Mapping[int, StateLayer | SharedLayer] | None = None,
        offload: FilePath | None = None,
    ) -> None:
        super().__init__()
        self.allocate: allocation.Allocate = allocation.in_memory
        if offload is not None:
            self.allocate = allocation.InFiles(offload)
        blocks = integer("num_blocks", num_blocks, 1), integer("page_size", page_size, 1)
        if format is not None:
            if quant_bit or quant_format:
                raise argument_error("format", "None beside quant_bit or quant_format", repr(format))
            quant_bit, quant_group, quant_format, found, scale_dtype = stored_format(format, dtype, head_dim)
            if found and scale is not None:
                raise argument_error("scale", f"None, because {format} computes scales", describe(scale))
            scale = scale if found is None else found
        self.others = checked_others(others or {}, integer("num_layers", num_layers, 1, MOST_LAYERS))
        self.store = PagedStore(
            *blocks, num_layers - len(self.others), num_kv_heads, head_dim, dtype, quant_bit=quant_bit,
            quant_group=quant_group, scale_dtype=scale_dtype, cache_layout=cache_layout,
            quant_format=quant_format, scale=scale, latent_dim=latent_dim, allocate=self.allocate,
        )  # fmt: skip
        self.cache, self.scale = self.store.cache, self.store.scale
        self.salt = check_bytes("salt", salt)
        identity = self.store.identity + b"\0" + salt
        self.blocks = BlockAllocator(*blocks, identity=identity, copy_rows=self._copy_rows)
        self.rows = Batch(self, self._lock)
        self.sequences: list[Sequence] = []
        make = PagedLatentLayer if latent_dim else PagedLayer
        paged = (make(self.rows, i, self._lock) for i in range(self.store.num_layers))
        self.layers = [self.others[i] if i in self.others else next(paged) for i in range(num_layers)]
        for i, layer in self.others.items():
            layer.name = f"layers[{i}]"
            layer._connect(self.layers, i)
        self.rope = rope
        self._ropes(rope)
        if isinstance(self.allocate, allocation.InFiles):
            self._use_files(self.allocate, only_non_sliding=True, keep=False)

    @one_call_at_a_time
    def begin_step(self, sequences: Iterable[tuple[Sequence, int]]) -> PagedStep:
        """Make room for new tokens, and copy shared blocks that would be written to.

        Parameters
        ----------
        sequences : iterable of (Sequence, int)
            Each sequence once, with its number of new tokens. Tokens are packed in this order.

        Returns
        -------
        PagedStep
            Takes the new tokens of each layer. It must end before the next step begins.

        Raises
        ------
        OutOfBlocksError
            If too few blocks are free or evictable; then nothing has changed.
        """
        is_open = self.blocks.open_step is not None
        try:
            step = self.blocks.begin_step(sequences)
            self.store.copy(step.copies)
            return PagedStep(self.store, step)
        except BaseException:
            if not is_open:
                self.blocks._abandon_open_step()
            raise

    @one_call_at_a_time
    def _reading_step(self, sequences: Iterable[Sequence]) -> PagedStep:
        """Return a step without new tokens, to read what sequences have."""
        return PagedStep(self.store, self.blocks._reading_step(sequences))

    # Removing and moving tokens of one sequence, in all layers

    @one_call_at_a_time
    def remove(  # type: ignore[override]  # takes a sequence
        self,
        seq: Sequence,
        begin: SupportsIndex,
        end: SupportsIndex | None = None,
        *,
        close: bool = False,
        rope: Any = None,
    ) -> None:
        """Remove the tokens of a sequence with positions in [begin, end), in all layers.

        Blocks with no other tokens are released. The block where the range begins stays, even if it is
        shared. The tokens after the range in the block where it ends are copied, to at most two blocks. A
        sequence that would lie in nine segments is copied into one from its first hole on. Published blocks
        and other sequences never change. Blocks that the sequence fills afterwards are not published.

        Parameters
        ----------
        seq : Sequence
        begin, end, close, rope
            As in `Cache.remove`.

        Raises
        ------
        KvkitError
            If an argument is wrong, or a step is open; `can` says so beforehand.
        OutOfBlocksError
            If there is no free block for a copy; then nothing has changed.

        Examples
        --------
        Two sequences share two blocks. One of them loses tokens 2 to 4: tokens 5 to 7 are copied to block 2.

        >>> import numpy as np, kvkit
        >>> from kvkit.cache import PagedCache
        >>> cache = PagedCache(8, 4, num_layers=1, num_kv_heads=1, head_dim=4, dtype=np.float32)
        >>> first, tokens = cache.blocks.add(), np.ones((8, 1, 4), np.float32)
        >>> with cache.begin_step([(first, 8)]) as step:
        ...     step.update(tokens, tokens, layer_idx=0)
        >>> second = cache.blocks.fork(first)
        >>> cache.remove(first, 2, 5, close=True, rope=kvkit.Rope(4))
        >>> first.positions, first.rope_shifts.tolist(), first.next_position
        (array([0, 1, 2, 3, 4]), [[0, 2, 0], [2, 5, -3]], 5)
        >>> first.blocks, second.blocks, second.positions
        ([0, 2], [0, 1], array([0, 1, 2, 3, 4, 5, 6, 7]))
        """
        self._rearrange(self._plan("remove", seq, begin, end, close=close, rope=rope))

    @one_call_at_a_time
    def retain(self, seq: Sequence, positions: ArrayLike) -> None:  # type: ignore[override]
        """Keep only the tokens of a sequence at some positions, see `Cache.retain`."""
        self._rearrange(self._plan("retain", seq, positions))

    @one_call_at_a_time
    def shift(  # type: ignore[override]
        self,
        seq: Sequence,
        begin: SupportsIndex,
        end: SupportsIndex | None,
        delta: SupportsIndex,
        rope: Any = None,
    ) -> None:
        """Add `delta` to the positions of a sequence in [begin, end), see `Cache.shift`. No key is rotated.

        Other sequences do not change. If the range begins or ends inside a block, the tokens from there to
        the end of the block are copied.
        """
        self._rearrange(self._plan("shift", seq, begin, end, delta, rope=rope))

    @one_call_at_a_time
    def divide(  # type: ignore[override]
        self,
        seq: Sequence,
        begin: SupportsIndex,
        end: SupportsIndex | None,
        d: SupportsIndex,
        rope: Any = None,
    ) -> None:
        """Divide the positions of a sequence in [begin, end) by `d`, rounding down, see `Cache.divide`."""
        self._rearrange(self._plan("divide", seq, begin, end, d, rope=rope))

    @one_call_at_a_time
    def flatten(self, seq: Sequence, rope: Any = None) -> None:  # type: ignore[override]
        """Rotate a sequence's shifted keys in memory, in unshared blocks. A cache of codes refuses this."""
        self._rearrange(self._plan("flatten", seq, rope=rope))

    @one_call_at_a_time
    def append(
        self, seq: Sequence, other: Sequence, at: SupportsIndex | None = None, rope: Any = None
    ) -> None:
        """Add the tokens of another sequence behind those of a sequence, or before one of them.

        Blocks are shared: only tokens that then begin inside a block are copied, and no key is rotated, see
        `Cache.append`. The other sequence does not change.

        Parameters
        ----------
        seq, other : Sequence
            They have no block in common, for a block lies once in a sequence; `BlockAllocator.fork` with a
            ``begin`` leaves out what both have.
        at, rope
            As in `Cache.append`.

        Raises
        ------
        KvkitError
            If an argument is wrong, or a step is open.
        OutOfBlocksError
            If no block is free for tokens that must be copied.

        Examples
        --------
        >>> import numpy as np, kvkit
        >>> from kvkit.cache import PagedCache
        >>> cache = PagedCache(8, 4, num_layers=1, num_kv_heads=1, head_dim=4, dtype=np.float32)
        >>> first, second = cache.blocks.add(), cache.blocks.add()
        >>> for seq in (first, second):
        ...     with cache.begin_step([(seq, 6)]) as step:
        ...         step.update(*np.ones((2, 6, 1, 4), np.float32), layer_idx=0)
        >>> cache.append(first, second, rope=kvkit.Rope(4))
        >>> first.blocks, second.blocks, first.rope_shifts.tolist()
        ([0, 1, 2, 3], [2, 3], [[0, 6, 0], [6, 12, 6]])
        """
        plan, row = self._plan_join(seq, other, at, rope)
        self._join(plan, other, row)

    def _check_append(
        self, seq: Sequence, other: Sequence, at: SupportsIndex | None = None, rope: Any = None
    ) -> None:
        """Raise the error that `append` would raise."""
        self._plan_join(seq, other, at, rope)

    def _plan_join(self, seq: Any, other: Any, at: Any, rope: Any) -> tuple[SequencePlan, int]:
        """Check an `append`; return (the plan, the row before which the other tokens go)."""
        for each in (seq, other):
            self.blocks._check_movable(each)
            if each in self.rows.sequences:
                raise argument_error("seq", "sequences from `blocks`", "a row of the batch")
        if common := sorted(set(seq._table) & set(other._table)):
            wanted = "sequences without a common block (blocks.fork(other, begin) leaves it out)"
            raise argument_error("other", wanted, f"block {common[0]} in both")
        now, theirs = seq._all_positions(), other._all_positions()
        known, dim = seq._ropes or self._ropes(self.rope), self.store.dim
        ropes = [rotation_of(*pair, dim, now.shifted) for pair in zip(self._ropes(rope), known, strict=True)]
        ropes = [*map(common_rotation, ropes, other._ropes or [None] * len(ropes))]
        rotation = next((rope for rope in ropes if isinstance(rope, Rope)), ropes[0])
        _, row, moved = join_positions(now, theirs, at, rotation)
        if self.store.format.dtype != self.store.cache.dtype:
            check_codes("seq", "append", moved)
        rotates = moved.rotated is not None and moved.rotated.any()
        return SequencePlan([seq], moved if rotates else moved._replace(rotated=None), ropes), row

    @whole_or_refused
    def _join(self, plan: SequencePlan, other: Sequence, row: int) -> None:
        """Carry out a plan of `_plan_join`."""
        (seq,), moves, ropes = plan
        self.blocks._join(seq, other, row, moves, ropes)
        self._rotate_rows(plan)

    def _plan(self, call: str, *arguments: Any, **options: Any) -> SequencePlan:  # type: ignore[override]
        seq, *others = arguments or (None,)
        self.blocks._check(seq)
        if seq in self.rows.sequences:
            wanted = "a sequence from `blocks`; calls of `rows` change all rows"
            raise argument_error("seq", wanted, "a row of the batch")
        return self._plan_for([seq], call, *others, **options)

    @property
    def _states(self) -> list[Any]:
        """Return the layers with recurrent states."""
        return [layer for layer in self.others.values() if not layer._has_rows]

    def _plan_for(
        self, sequences: List[Sequence], call: str, *arguments: Any, rope: Any = None, **options: Any
    ) -> SequencePlan:
        """Check a call that removes or moves tokens of sequences with equal positions; return its plan."""
        if self._states and sequences is self.rows.sequences:
            raise argument_error("rows", "crop, in a cache with recurrent states", call)
        for seq in sequences:
            self.blocks._check_movable(seq)
        now, known = RowPositions.contiguous(0, 0), self._ropes(self.rope)
        if sequences:
            now, known = sequences[0]._all_positions(), sequences[0]._ropes or known
        of_layers = zip(self._ropes(rope), known, strict=True)
        ropes = [rotation_of(argument, own, self.store.dim, now.shifted) for argument, own in of_layers]
        # A plan only depends on whether keys are rotated: one layer's rotation stands for all.
        rope = next((rope for rope in ropes if isinstance(rope, Rope)), ropes[0])
        plan = planner(call)(now, rope, *arguments, **options).in_few_pieces()
        rotates = plan.rotated is not None and plan.rotated.any()
        if self.store.format.dtype != self.store.cache.dtype:
            check_codes("seq", call, plan)
        if not sequences and plan.changes(now):
            raise argument_error("rows", "tokens", f"{call} of none")
        return SequencePlan(sequences, plan if rotates else plan._replace(rotated=None), ropes)

    @one_call_at_a_time
    def compress(
        self,
        seq: Sequence | Batch,
        scorer: str | compression.ScoreFunction | List[Array],
        *,
        keep: float | None = None,
        count: int | None = None,
        budget: str = "uniform",
        queries: List[Array] | None = None,
        weights: List[Array] | None = None,
        renumber: bool = False,
        rope: Any = None,
        attn_mask: Array | None = None,
        **options: Any,
    ) -> compression.CompressionReport:
        """Keep a sequence's tokens with the best scores in all layers, and release blocks without any.

        A block holds its tokens in all layers and heads, so all keep the same tokens, by their mean scores.
        Published blocks and other sequences never change. After an error nothing has changed.

        Parameters
        ----------
        seq : Sequence, or `rows`
            With `rows` all rows keep the same tokens, as in ``cache.rows.compress(...)``.
        scorer : str, callable or list of arrays
            As in `Cache.compress`. For a sequence, its arrays have a batch of one row.
        budget : str
            Only ``"uniform"``.
        keep, count, queries, weights, renumber, rope, attn_mask, **options
            As in `Cache.compress`.

        Returns
        -------
        CompressionReport
            Its bytes count all blocks that sequences use.

        Raises
        ------
        KvkitError
            If an argument is wrong or missing, or a step is open.
        OutOfBlocksError
            If no block is free for tokens that must be copied out of shared blocks.

        Examples
        --------
        >>> import numpy as np
        >>> from kvkit.cache import PagedCache
        >>> cache = PagedCache(8, 4, num_layers=1, num_kv_heads=1, head_dim=4, dtype=np.float32)
        >>> seq, tokens = cache.blocks.add(), np.ones((16, 1, 4), np.float32)
        >>> with cache.begin_step([(seq, 16)]) as step:
        ...     step.update(tokens, tokens, layer_idx=0)
        >>> cache.compress(seq, "streaming", keep=0.5, sinks=4)
        CompressionReport(tokens_before=[16], tokens=[8], bytes_before=512, bytes_after=256, skipped={})
        >>> seq.positions, seq.next_position
        (array([ 0,  1,  2,  3, 12, 13, 14, 15]), 16)
        """
        request = self._compression(
            options, scorer=scorer, keep=keep, count=count, budget=budget, queries=queries, weights=weights,
            renumber=renumber, rope=rope, attn_mask=attn_mask,
        )  # fmt: skip
        sequences, plan = self._planned_of(seq, rope)
        rearrange = self.rows._rearrange if seq is self.rows else self._rearrange
        return compression.compress_sequences(self, sequences, plan, rearrange, request)

    def _check_compress(self, seq: Sequence | Batch, *arguments: Any, **options: Any) -> None:
        """Raise the error that `compress` would raise."""
        named = inspect.signature(type(self).compress).bind(self, seq, *arguments, **options)
        named.apply_defaults()
        values = {name: value for name, value in named.arguments.items() if name not in ("self", "seq")}
        request = self._compression(values.pop("options"), **values)
        compression.plan_sequences(self, *self._planned_of(seq, values["rope"]), request)

    def _compression(self, options: dict[str, Any], **arguments: Any) -> compression.Compression:
        """Return the checked arguments of `compress`, which are given by name; `options` are the scorer's."""
        lists = ["queries", "weights"]
        if not isinstance(arguments["scorer"], str) and not callable(arguments["scorer"]):
            lists.append("scorer")
        arguments |= {name: self._of_paged_layers(name, arguments[name]) for name in lists}
        arguments["rope"] = self._ropes(arguments["rope"])
        return compression.Compression(**arguments, options=options)

    def _planned_of(self, seq: Sequence | Batch, rope: Any) -> tuple[List[Sequence], Callable[..., Any]]:
        """Return the sequences of a call of `compress`, and the function that plans their moves."""
        if not isinstance(seq, Batch):

            def plan(call: str, *arguments: Any, **options: Any) -> SequencePlan:
                return self._plan(call, seq, *arguments, rope=rope, **options)

            return [seq], plan
        if seq is not self.rows:
            raise argument_error("seq", "a sequence from `blocks`, or `rows`", "another cache's rows")
        return self.rows.sequences, functools.partial(self.rows._plan, rope=rope)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the blocks that sequences use."""
        if self.store is None:  # the cache is closed
            return 0
        block_bytes = sum(array[:, :, 0].nbytes for array in self.store.blocks)
        others = sum(layer.nbytes for layer in self.others.values())
        return (self.blocks.num_blocks - self.blocks.available) * block_bytes + others

    def _copy_rows(self, sources: Array, targets: Array) -> None:
        self.store.copy_rows(sources, targets)

    @property
    def _guard(self) -> Guard:
        """Return what says whether all changes of the blocks have ended."""
        return self.blocks._guard

    @whole_or_refused
    def _rearrange(self, plan: SequencePlan) -> None:  # type: ignore[override]
        self.blocks._rearrange(*plan)
        self._rotate_rows(plan)

    def _rotate_rows(self, plan: SequencePlan) -> None:
        """Rotate keys in memory as planned."""
        sequences, moves, ropes = plan
        if moves.rotated is not None:
            rotated = moves.rotated != 0
            for seq in sequences:
                rows = seq._rows(self.store.page_size)[rotated]
                self.store.rotate(rows, moves.rotated[rotated], ropes)

    def _ropes(self, rope: Any) -> list[Any]:
        ropes = self._of_paged_layers("rope", super()._ropes(rope))
        return [placed_rotation(rotation, self.store.latent_dim) for rotation in ropes]

    def _of_paged_layers(self, name: str, values: Any) -> Any:
        """Return the values of the layers that have blocks, from a list with a value for each layer."""
        if values is None or not self.others:
            return values
        if not isinstance(values, (list, tuple)) or len(values) != len(self.layers):
            wanted = f"a list of {len(self.layers)}, one for each layer"
            raise argument_error(name, wanted, describe(values))
        return [value for i, value in enumerate(values) if i not in self.others]

    # A batch of sequences of one length

    @one_call_at_a_time
    def update(
        self, key_states: Array, value_states: Array, layer_idx: int, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append new tokens to a layer, see `PagedLayer.update`."""
        return self._layer(layer_idx).update(key_states, value_states, cache_position)

    @one_call_at_a_time
    def reserve(self, query_length: SupportsIndex) -> None:
        """Raise unless an update of ``query_length`` tokens has room in every layer."""
        self.rows.reserve(query_length)

    @one_call_at_a_time
    @whole_or_refused
    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row; below 0, drop that many; 0 drops none."""
        self._check_crop(length)  # raises before anything has changed
        self.rows.crop(length)
        for layer in self._states:
            layer.crop(length)

    # What these calls would refuse, see `can`

    def _check_crop(self, length: int) -> None:
        """Raise the error that `crop` would raise."""
        for layer in self._states:
            layer._length_after_crop(length)
        self.rows._check_crop(length)

    def _check_reorder(self, indices: ArrayLike) -> None:
        """Raise the error that `reorder` would raise."""
        self.rows._check_reorder(indices)
        for layer in self._states:
            layer._check_reorder(indices)

    def _check_repeat(self, repeats: int) -> None:
        """Raise the error that `repeat` would raise."""
        integer("repeats", repeats, 1)

    def _check_reset(self) -> None:
        """Raise the error that `reset` would raise: none."""

    @whole_or_refused
    def _select(self, indices: ArrayLike) -> None:  # moves no keys or values
        self._check_reorder(indices)
        self.rows.reorder(indices)
        for layer in self._states:
            layer.reorder(indices)

    def _repeat(self, repeats: int) -> None:
        if self.rows.sequences:
            self._select(np.repeat(np.arange(len(self.rows.sequences)), repeats))

    @one_call_at_a_time
    @whole_or_refused
    def reset(self) -> None:
        """Free the sequences of all rows."""
        self.rows.reset()
        for layer in self._states:
            layer.reset()

    @one_call_at_a_time
    def to_legacy_cache(self) -> tuple[Pair, ...]:
        """Return a tuple over layers of (keys, values), copies."""
        if self._states or self.layers[0]._row_positions is not None:
            raise argument_error("cache", "a layer that stores all its tokens", "one that lost or moved some")
        return tuple((layer.keys, layer.values) for layer in self.layers)

    # Files

    def _describe(self) -> dict[str, Any]:
        """Return the arguments of the constructor for a file: hexadecimal ``salt``, a rope for each layer."""
        store = self.store
        sizes = {"num_blocks": self.blocks.num_blocks, "page_size": store.page_size}
        sizes |= {"num_layers": store.num_layers, "num_kv_heads": store.heads, "head_dim": store.dim}
        sizes |= {"latent_dim": store.latent_dim} if store.latent_dim else {}
        formats = {
            "dtype": store.format.name,
            "scale_dtype": store.scale_format.name,
            "salt": self.salt.hex(),
        }
        names = "quant_bit", "quant_group", "quant_format", "cache_layout"
        if store.arguments.quant_format and store.scale is not None:
            formats["scale"] = "found" if store.computes_scales else store.scale.tolist()
        known = self.rope is not None
        ropes = {"rope": [describe_rotation(rope) for rope in self._ropes(self.rope)]} if known else {}
        return sizes | formats | ropes | {name: getattr(store.arguments, name) for name in names}

    @one_call_at_a_time
    def save(
        self, path: FilePath, sequences: Iterable[Sequence] = (), *, compress: str | None = None
    ) -> None:
        """Write a .npz file that `load` reads. An existing file stays intact until the new one is complete.

        The file has all published prefixes, the rows of the batch, and `sequences`. In the loaded cache
        `blocks.add` finds the prefixes, `sequences` lists the sequences, and `update` continues the rows.

        Parameters
        ----------
        path : path
        sequences : iterable of Sequence
            Sequences that are in no open step.
        compress : {"zstd"}, optional
            Compress the arrays without loss; this and `load` then need the extra ``zstd``.
        """
        self._guard.check()
        if self.others:
            wanted = "layers that all have blocks (or a cache of another kind)"
            raise argument_error("cache", wanted, describe(next(iter(self.others.values()))))
        saving.save_paged(self, path, sequences, compress)

    def _lie_in(self, allocate: allocation.Allocate, only_non_sliding: bool) -> None:
        if self.blocks.open_step is not None:
            raise argument_error("cache", "a cache without an open step", "an open step")
        for layer in self.others.values():
            layer._lie_in(allocate)
        if allocate is self.allocate:
            return
        store = copy.copy(self.store)  # steps of the user go on reading the old arrays
        store.lie_in(allocate)
        # In one line, between whose parts no interrupt comes.
        self.store, self.cache, self.scale, self.allocate = store, store.cache, store.scale, allocate
        self.rows._forget_step()

    def _forget_rows(self) -> None:
        self.rows.sequences = []
        self.rows._forget_step()
        super()._forget_rows()
        # A step of the user can still read the arrays, which live as long as it does.
        self.store = self.cache = self.scale = None  # type: ignore[assignment]  # of no use now

    @classmethod
    def open(cls, directory: FilePath, keep: bool = True) -> PagedCache:
        """Open the cache that `close` has saved in its folder, see `Cache.open`.

        `close` saves the rows of the batch and all published prefixes. To have other sequences too, call
        ``save(folder / "cache.npz", sequences)`` and then ``close(keep=False)``.
        """
        path = reading.saved_path(directory)
        make = functools.partial(PagedCache, offload=directory)
        cache = reading.read_paged(path, reading.read_file(path), make)
        cache._use_files(cache.allocate, only_non_sliding=True, keep=keep)  # type: ignore[arg-type]  # in files
        return cache


def checked_others(
    others: Mapping[int, StateLayer | SharedLayer], count: int
) -> dict[int, StateLayer | SharedLayer]:
    """Check the layers without blocks of a cache of `count` layers; return them by number."""
    if not isinstance(others, Mapping):
        raise argument_error("others", "layers by number, a dict", describe(others))
    for number, layer in others.items():
        numbered = not isinstance(number, bool) and number in range(count)
        if not numbered or not isinstance(layer, (StateLayer, SharedLayer)):
            wanted = f"a StateLayer or SharedLayer by a number below {count}"
            raise argument_error("others", wanted, f"{describe(layer)}, {number}")
        if layer._source is not None:
            raise argument_error("others", "a new SharedLayer", "one of another cache")
    if len(others) == count:
        raise argument_error("others", "fewer layers than num_layers", count)
    return dict(others)
