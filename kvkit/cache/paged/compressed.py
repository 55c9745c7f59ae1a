"""Define `PagedCompressedCache`: many sequences of DeepSeek V4's layers in pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

import kvkit.compressed
import kvkit.mla
from kvkit.cache.blocks.allocator import BlockAllocator, OutOfBlocksError
from kvkit.cache.blocks.sequence import Sequence
from kvkit.cache.blocks.step import Step
from kvkit.cache.caches import Cache
from kvkit.cache.layers import requests
from kvkit.cache.layers.compressed import COMPRESSORS, INDEX_ARRAYS, CompressedLayer, chosen_slots
from kvkit.cache.stores.allocation import in_memory
from kvkit.cache.stores.compressed import PAGE, IndexKeys, RowPool
from kvkit.checks.values import checked_format, integer
from kvkit.errors import CapacityError, DroppedTokensError, KvkitError, argument_error, check_shape, describe
from kvkit.formats import BY_DTYPE, FLOATS
from kvkit.typed import Array, Attended, FilePath, Pair


@dataclass
class SlotUse:
    """Says which slot a sequence has, and the fewest tokens but none that a crop can leave."""

    slot: int
    floor: int = 0


class LayerPools:
    """Holds the pools of one layer: windows and states by slots, compressed rows and index keys by blocks."""

    def __init__(
        self, layer: CompressedLayer, slots: int, blocks: int, page_size: int, more: int, dtype: Any
    ):
        self.layer = layer
        self.page = page_size // layer.ratio if layer.ratio else 0  # rows of a block
        self.ring = -(-(layer.near - 1 + more) // PAGE) * PAGE
        kind = np.uint8 if layer.format else dtype
        self.window = RowPool.of(1, slots * self.ring, layer.dim, kind, in_memory)
        self.rows: Any = None
        self.keys: Any = None
        self.states: list[Array] = []
        if layer.ratio:
            count = blocks * self.page
            self.rows = RowPool.of(1, count, layer.dim, kind, in_memory, self.page)
            dims = [layer.dim]
            if layer.index_dim:
                self.keys = IndexKeys.of(1, count, layer.index_dim, kind, in_memory)
                dims.append(layer.index_dim)
            shape, halves = (slots, layer._past + more, 2), layer._past // layer.ratio
            self.states = [in_memory((*shape, halves * dim), np.float32) for dim in dims]

    def of_blocks(self) -> list[Array]:
        """Return views [blocks, ...] of what blocks store."""
        if self.rows is None:
            return []
        keys = [] if self.keys is None else self.keys.arrays()
        blocks = len(self.rows.pool)
        return [self.rows.pool, *(array.reshape(blocks, self.page, *array.shape[2:]) for array in keys)]

    def of_slots(self) -> list[Array]:
        """Return views [slots, ...] of what slots store."""
        blocks = self.window.pool
        return [blocks.reshape(-1, self.ring // PAGE, *blocks.shape[1:]), *self.states]

    def row_slots(self, table: Array, rows: Array) -> Array:
        """Return the slots of compressed rows of a sequence with a block table; -1 stays."""
        slots: Array = np.where(rows < 0, -1, table[rows // self.page] * self.page + rows % self.page)
        return slots


class PagedCompressedCache:
    """Stores many sequences of DeepSeek V4's layers in pages. Forks share blocks of compressed rows.

    A block belongs to `page_size` tokens: it has their compressed rows and index keys in all layers. A slot
    belongs to a sequence: it has the last rows of its windows, and its states, in rings. `begin_step` takes
    blocks for all new tokens or none. All results are those of one `CompressedLayer` for each sequence.

    Parameters
    ----------
    layers : sequence of CompressedLayer
        Empty layers with their weights and rotations; all have the same `drafts`.
    num_blocks, slots : int
        How many blocks there are, and how many sequences.
    page_size : int
        Tokens of a block, a multiple of every ratio; 256 in vLLM.
    step_tokens : int
        The most new tokens of a sequence in a step. Rings have room for so many, so that a step can be
        abandoned.
    dtype : dtype
        Of rows that are not codes: float32, float16 or bfloat16.

    Attributes
    ----------
    blocks : BlockAllocator
        Counts blocks: `available`, `references`. Sequences come from `add` and `fork` of the cache.
    sequences : list of Sequence

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> from kvkit.cache import CompressedLayer, PagedCompressedCache
    >>> layer, rng = CompressedLayer(8, 4, window=6, ratio=4), np.random.default_rng(0)
    >>> weights = np.zeros((4, 8), np.float32), np.ones(8, np.float32)
    >>> layer.set_weights(weights, rope=kvkit.Rope(4, interleaved=True))
    >>> cache = PagedCompressedCache([layer], num_blocks=8, slots=3, page_size=8, dtype=np.float32)
    >>> first = cache.add()
    >>> with cache.begin_step([(first, 11)]) as step:
    ...     row, kv, gate = rng.standard_normal((3, 11, 8), np.float32)              # [tokens, dim]
    ...     step.update(0, row, (kv, gate))
    ...     output = step.attend(0, rng.standard_normal((11, 2, 8), np.float32))     # [tokens, heads, dim]
    >>> second = cache.fork(first)
    >>> first.blocks, second.blocks, cache.layer_of(second, 0).rows.shape
    ([0, 1], [0, 1], (1, 2, 8))
    """

    def __init__(
        self,
        layers: Iterable[CompressedLayer],
        num_blocks: SupportsIndex,
        slots: SupportsIndex,
        *,
        page_size: SupportsIndex = 256,
        step_tokens: SupportsIndex = 256,
        dtype: DTypeLike,
    ) -> None:
        self.layers, self.dtype = list(layers), np.dtype(dtype)
        if BY_DTYPE.get(self.dtype) not in FLOATS:
            raise argument_error("dtype", "float32, float16 or bfloat16", self.dtype)
        count, size = integer("num_blocks", num_blocks, 1), integer("page_size", page_size, 1)
        self.slots, self.step_tokens = integer("slots", slots, 1), integer("step_tokens", step_tokens, 1)
        for i, layer in enumerate(self.layers):
            name = f"layers[{i}]"
            if type(layer) is not CompressedLayer or layer.store is not None:
                raise argument_error(name, "an empty CompressedLayer", describe(layer))
            if layer.ratio and (not layer.weights or layer.rope is None):
                raise argument_error(name, "weights and a rope (call set_weights)", "none")
            if layer.ratio and size % layer.ratio:
                raise argument_error("page_size", f"a multiple of {layer.ratio}, as {name} has", size)
            if layer.drafts != self.layers[0].drafts:
                raise argument_error(name, f"drafts={self.layers[0].drafts}, as layers[0] has", layer.drafts)
        if not self.layers:
            raise argument_error("layers", "one CompressedLayer or more", "none")
        self.drafts, self.page_size = self.layers[0].drafts, size
        more = self.drafts + self.step_tokens
        self.pools = [LayerPools(layer, self.slots, count, size, more, self.dtype) for layer in self.layers]
        self.blocks = BlockAllocator(count, size, slot_dtype=np.int64)
        self._uses: dict[Sequence, SlotUse] = {}
        self._free = list(range(self.slots))[::-1]

    # Sequences

    @property
    def sequences(self) -> list[Sequence]:
        """Return the sequences that have a slot."""
        return [*self._uses]

    @property
    def nbytes(self) -> int:
        """Return the size of all pools in bytes."""
        return sum(array.nbytes for pools in self.pools for array in (*pools.of_blocks(), *pools.of_slots()))

    def add(self, source: Iterable[CompressedLayer] | None = None) -> Sequence:
        """Begin a sequence, empty or with the tokens of layers of a cache.

        Parameters
        ----------
        source : Cache, or list of CompressedLayer, optional
            Layers like those of this cache, with a batch of one, as `extract` and `kvkit.cache.load` return.

        Raises
        ------
        CapacityError, OutOfBlocksError
            If there is no slot or block; then nothing has changed.
        """
        layers = self._check_add(source)
        length = layers[0].get_seq_length() if layers else 0
        sequence = self.blocks.add()
        if length:
            with self.blocks.begin_step([(sequence, length)]):
                pass  # takes the blocks
        use = self._uses[sequence] = SlotUse(self._free.pop())
        table = np.array(sequence._table, np.int64)
        for pools, layer in zip(self.pools, layers, strict=False):
            self._fill(pools, layer, use.slot, table, length)
        if layers:
            use.floor = max(*(layer.floor for layer in layers), length - self.drafts, 0)
        return sequence

    def _check_add(self, source: Any = None) -> list[CompressedLayer]:
        """Raise the error that `add` would raise; return the layers of `source`."""
        if not self._free:
            raise CapacityError(f"slots: expected one that is free of {self.slots}, got none")
        if source is None:
            return []
        layers = list(source.layers if isinstance(source, Cache) else source)
        if len(layers) != len(self.layers):
            raise argument_error("source", f"{len(self.layers)} layers", len(layers))
        for i, (layer, own) in enumerate(zip(layers, self.layers, strict=True)):
            wanted = f"a CompressedLayer like {own}, with a batch of one and {self.dtype} rows or codes"
            if type(layer) is not CompressedLayer or layer.batch_size != 1:
                raise argument_error(f"source[{i}]", wanted, describe(layer))
            sizes = [x._describe() | {"drafts": 0} for x in (layer, own)]
            same = all(
                np.array_equal(x, y)
                for one, other in zip(layer.weights, own.weights, strict=True)
                for x, y in zip(one, other, strict=True)
            )
            length, floor = layer.get_seq_length(), max(layer.floor, layer.get_seq_length() - self.drafts)
            kind = np.uint8 if own.format else self.dtype
            if sizes[0] != sizes[1] or not same or layer.store.window.blocks.dtype != kind:
                raise argument_error(f"source[{i}]", wanted, describe(layer))
            if layer.rope != own.rope or length != layers[0].get_seq_length():
                raise argument_error(
                    f"source[{i}]", "the same rope, and as many tokens in all layers", length
                )
            if layer.span.oldest > max(0, floor - own.near + 1):
                raise argument_error(f"source[{i}]", "the last rows of the window", describe(layer))
        length = layers[0].get_seq_length()
        if length and self.blocks.open_step is not None:
            raise argument_error("source", "no tokens while a step is open", f"{length} tokens")
        need, available = -(-length // self.page_size), self.blocks.available
        if need > available:
            raise OutOfBlocksError(need, available)
        return layers

    def _fill(self, pools: LayerPools, layer: CompressedLayer, slot: int, table: Array, length: int) -> None:
        """Copy the tokens of a layer with a batch of one to the pools."""
        arrays, own = layer._arrays(), pools.layer
        window = arrays["window"]
        kept = np.arange(length - window.shape[1], length)[-pools.ring :]
        at = slot * pools.ring + kept % pools.ring
        pools.window.write_stored(at, window[:, window.shape[1] - len(kept) :])
        if not own.ratio:
            return
        rows = pools.row_slots(table, np.arange(length // own.ratio))
        pools.rows.write_stored(rows, arrays["rows"])
        if pools.keys is not None:
            for name, array in zip(INDEX_ARRAYS, pools.keys.arrays(), strict=False):
                array[:, rows] = arrays[name]
        for name, state in zip(COMPRESSORS, pools.states, strict=False):
            tokens = arrays[f"states.{name}"][0]
            held = np.arange(length - len(tokens), length)[-state.shape[1] :]
            state[slot, held % state.shape[1]] = tokens[len(tokens) - len(held) :]

    def fork(self, seq: Sequence) -> Sequence:
        """Return a new sequence with the same tokens. Blocks are shared; its slot is a copy."""
        self._check_fork(seq)
        use, fork = self._uses[seq], self.blocks.fork(seq)
        copy = self._uses[fork] = SlotUse(self._free.pop(), use.floor)
        for array in (array for pools in self.pools for array in pools.of_slots()):
            array[copy.slot] = array[use.slot]
        return fork

    def _check_fork(self, seq: Sequence) -> None:
        """Raise the error that `fork` would raise."""
        self._check(seq)
        self._check_add()

    def free(self, seq: Sequence) -> None:
        """End a sequence, and free its slot and the blocks that no fork has."""
        self._check_free(seq)
        self.blocks.free(seq)
        self._free.append(self._uses.pop(seq).slot)

    def _check_free(self, seq: Sequence) -> None:
        """Raise the error that `free` would raise."""
        self._check(seq)

    def crop(self, seq: Sequence, length: SupportsIndex) -> None:
        """Drop the last tokens of a sequence: drafts, or all.

        Parameters
        ----------
        seq : Sequence
        length : int
            How many tokens stay; below 0, how many are dropped. See `CompressedLayer.crop`.
        """
        left, use = self._check_crop(seq, length), self._uses[seq]
        self.blocks.crop(seq, left)
        use.floor = max(use.floor, left - self.drafts) if left else 0

    def _check_crop(self, seq: Sequence, length: SupportsIndex) -> int:
        """Raise the error that `crop` would raise; return how many tokens stay."""
        floor = self._check(seq).floor
        left = requests.length_after_crop(length, seq.length)
        if left not in (0, seq.length) and left < floor:
            wanted = f"0 or at least {floor} tokens to stay (drafts={self.drafts}; states hold no others)"
            raise argument_error("seq", wanted, f"crop to {left}", DroppedTokensError)
        return left

    def can(self, call: str, *arguments: Any) -> str | None:
        """Return the message of the error that a call would raise; None if it would raise none.

        Parameters
        ----------
        call : {"add", "fork", "free", "crop", "begin_step"}
        *arguments
            The arguments of the call.
        """
        if call not in (calls := ("add", "fork", "free", "crop", "begin_step")):
            raise argument_error("call", " or ".join(calls), describe(call))
        try:
            getattr(self, f"_check_{call}")(*arguments)
        except (KvkitError, TypeError) as error:
            return str(error)
        return None

    def _check(self, seq: Any, at_rest: bool = True) -> SlotUse:
        """Check a sequence; return its slot."""
        if not isinstance(seq, Sequence) or seq not in self._uses:
            raise argument_error("seq", "a sequence from `add` or `fork` of this cache", describe(seq))
        self.blocks._check(seq, at_rest=at_rest)
        return self._uses[seq]

    # Steps

    def begin_step(self, sequences: Iterable[tuple[Sequence, int]]) -> CompressedStep:
        """Take blocks for new tokens of all sequences, or of none.

        Parameters
        ----------
        sequences : iterable of (Sequence, int)
            Each sequence once, with its number of new tokens. Tokens are packed in this order.

        Raises
        ------
        OutOfBlocksError
            If too few blocks are free; then nothing has changed.
        """
        ordered = self._check_begin_step(sequences)
        step = self.blocks.begin_step(ordered)
        for source, copy in step.copies.tolist():
            for array in (array for pools in self.pools for array in pools.of_blocks()):
                array[copy] = array[source]
        return CompressedStep(self, step, [self._uses[seq] for seq in step.sequences])

    def _check_begin_step(self, sequences: Any) -> list[tuple[Sequence, int]]:
        """Raise the error that `begin_step` would raise; return the sequences."""
        ordered = list(sequences)
        for seq, count in ordered:
            self._check(seq)
            integer("new tokens", count, 0, self.step_tokens)
        if (missing := self.blocks._missing(ordered)) > 0:
            raise OutOfBlocksError(missing + self.blocks.available, self.blocks.available)
        return ordered

    # Copies and files

    def layer_of(self, seq: Sequence, layer_idx: SupportsIndex) -> CompressedLayer:
        """Return a copy of a sequence in one layer, as a layer with a batch of one."""
        use, own = self._check(seq), self.pools[integer("layer_idx", layer_idx, 0, len(self.layers) - 1)]
        layer = CompressedLayer(**own.layer._describe())
        layer.rope, layer.weights, length = own.layer.rope, own.layer.weights, seq.length
        if not length:
            return layer
        first, floor = max(0, use.floor - layer.near + 1), use.floor
        held = np.arange(first, length)
        arrays = {
            "window": own.window.stored(use.slot * own.ring + held % own.ring),
            "floor": np.array([floor]),
        }
        if layer.ratio:
            rows = own.row_slots(np.array(seq._table, np.int64), np.arange(length // layer.ratio))
            arrays["rows"] = own.rows.stored(rows)
            if own.keys is not None:
                stored = zip(INDEX_ARRAYS, own.keys.arrays(), strict=False)
                arrays |= {name: array[:, rows] for name, array in stored}
            tokens = np.arange(max(0, floor - layer._past), length)
            for name, state in zip(COMPRESSORS, own.states, strict=False):
                arrays[f"states.{name}"] = state[use.slot, tokens % state.shape[1]][None]
        layer._fill(arrays, length)
        return layer

    def extract(self, seq: Sequence) -> Cache:
        """Return a copy of a sequence as a `Cache` of compressed layers, which `add` takes."""
        return Cache([self.layer_of(seq, i) for i in range(len(self.layers))])

    def save(self, path: FilePath, seq: Sequence, *, compress: str | None = None) -> None:
        """Write a .npz file of one sequence, which ``add(kvkit.cache.load(path))`` reads."""
        self.extract(seq).save(path, compress=compress)


class CompressedStep:
    """Takes the new tokens of a step, layer by layer, and attends with them.

    A ``with`` statement commits the step, or abandons it on an exception. `commit` needs an update of every
    layer. After `abandon` all sequences are as before.
    """

    def __init__(self, cache: PagedCompressedCache, step: Step, uses: list[SlotUse]) -> None:
        self.cache, self.index, self.uses = cache, step, uses
        counts = np.diff(step.seqstarts)
        self.slots = np.array([use.slot for use in self.uses], np.int64)
        self.owner = np.repeat(np.arange(len(counts)), counts)  # the sequence of each token
        first = np.repeat(step.start_pos - step.seqstarts[:-1], counts)
        self.positions = first + np.arange(len(first))  # [tokens]
        self.tables = np.maximum(step.pages, 0) // cache.page_size  # [sequences, blocks]
        self.written: set[int] = set()

    def _pools(self, layer_idx: SupportsIndex) -> LayerPools:
        if not self.index.is_open:
            raise argument_error("step", "an open step", "one that has ended")
        return self.cache.pools[integer("layer_idx", layer_idx, 0, len(self.cache.layers) - 1)]

    def update(
        self,
        layer_idx: SupportsIndex,
        row: Array,
        compressor: Pair | None = None,
        indexer: Pair | None = None,
    ) -> None:
        """Append the rows of new tokens to a layer, and pool them.

        Parameters
        ----------
        layer_idx : int
        row : ndarray, shape [tokens, dim]
            As in `CompressedLayer.update`, of all sequences, one after the other.
        compressor, indexer : tuple (kv [tokens, E], gate [tokens, E]), optional
            As there.

        Raises
        ------
        KvkitError
            If an argument is wrong. Then the layer has not changed.
        """
        pools, tokens = self._pools(layer_idx), len(self.positions)
        layer = pools.layer
        checked_format("row", row, FLOATS, 2)
        check_shape("row", row, (tokens, layer.dim), ("tokens", "dim"))
        if row.dtype != self.cache.dtype and not layer.format:
            raise argument_error("row", f"an array of {self.cache.dtype}", describe(row))
        inputs = layer._checked_inputs(compressor, indexer, (tokens,))
        ring = self.slots[self.owner] * pools.ring + self.positions % pools.ring
        pools.window.write(ring, row[None])
        for number, (kv, gate) in enumerate(inputs):
            ape, norm = layer.weights[number]
            rows, finished = kvkit.compressed.compress_tokens(
                kv, gate, ape, pools.states[number], ratio=layer.ratio, overlap=bool(layer.index_dim),
                norm_weight=norm, rope=layer._rope_of(len(norm)), eps=layer.eps, positions=self.positions,
                starts=self.index.seqstarts, state_indices=self.slots,
            )  # fmt: skip
            slots = kvkit.compressed.compressed_slots(
                self.positions, self.tables, pools.page, ratio=layer.ratio, sequence_of_token=self.owner
            )
            (pools.keys if number else pools.rows).write(slots[finished >= 0], rows[None])
        self.written.add(int(layer_idx))

    def attend(
        self,
        layer_idx: SupportsIndex,
        query: Array,
        *,
        index: Pair | None = None,
        sinks: Array | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
    ) -> Attended:
        """Attend with queries [tokens, H, dim] to their windows and compressed rows, after `update`.

        Parameters
        ----------
        layer_idx : int
        query : ndarray, shape [tokens, H, dim]
        index : tuple (queries [tokens, heads, index_dim], weights [tokens, heads]), optional
            Required with index keys.
        sinks, softmax_scale, return_lse
            As in `CompressedLayer.attend`.

        Returns
        -------
        attn_output : ndarray, shape [tokens, H, dim]
        lse : ndarray of float32, shape [tokens, H]
            If ``return_lse``.
        """
        pools, tokens = self._pools(layer_idx), len(self.positions)
        layer = pools.layer
        checked_format("query", query, FLOATS, 3)
        check_shape("query", query, (tokens, None, layer.dim), ("tokens", "heads", "dim"))
        if int(layer_idx) not in self.written:
            raise argument_error("query", f"an update of layer {layer_idx} before", "none")
        layer._check_index(index, (tokens,))
        near = self.positions[:, None] - np.arange(layer.near)[::-1]
        ring = self.slots[self.owner][:, None] * pools.ring + near % pools.ring
        output, lse = kvkit.mla.mla_attention(
            query, pools.window.pool, softmax_scale=layer._scale_of(softmax_scale), value_dim=layer.dim,
            indices=np.where(near < 0, -1, ring), extra=self._extra(pools, index), sinks=sinks,
            format=layer.format, return_lse=True,
        )  # fmt: skip
        return (output, lse) if return_lse else output

    def _extra(self, pools: LayerPools, index: Pair | None) -> Any:
        """Return the pool of compressed rows with the slots that each query attends to; None if none."""
        layer = pools.layer
        if not layer.ratio:
            return None
        ready, tables = (self.positions + 1) // layer.ratio, self.tables[self.owner]
        if index is None:
            every = np.arange(ready.max(initial=0))
            columns = np.minimum(every // pools.page, tables.shape[1] - 1)
            slots = tables[:, columns] * pools.page + every % pools.page
            slots = np.where(every < ready[:, None], slots, -1)
        else:
            blocks = len(pools.rows.pool)
            keys = [x.reshape(blocks, pools.page, *x.shape[2:]) for x in pools.keys.arrays()]
            slots = chosen_slots(*index, ready, keys, tables, layer.index_topk)
        return (pools.rows.pool, slots, None) if slots.shape[1] else None

    def commit(self) -> None:
        """Add the new tokens to the sequences; every layer must have them."""
        missing = set(range(len(self.cache.layers))) - self.written
        if missing and len(self.positions):
            raise argument_error("step", "an update of every layer", f"none of layer {min(missing)}")
        self.index.commit()
        for use, seq in zip(self.uses, self.index.sequences, strict=True):
            use.floor = max(use.floor, seq.length - self.cache.drafts)

    def abandon(self) -> None:
        """End the step without new tokens."""
        self.index.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.index._end(kind, self.commit)
