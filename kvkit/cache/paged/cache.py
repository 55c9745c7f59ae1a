"""The paged cache: many sequences in blocks, which they share where they begin alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from kvkit.cache import saving
from kvkit.cache.base import BaseCache, one_call_at_a_time
from kvkit.cache.blocks.allocator import BlockAllocator
from kvkit.cache.blocks.sequence import Sequence, check_bytes
from kvkit.cache.paged.layer import PagedLayer, Rows
from kvkit.cache.paged.step import PagedStep
from kvkit.cache.paged.store import PagedStore
from kvkit.checks.values import integer
from kvkit.typed import Array, FilePath, Pair, States


class PagedCache(BaseCache):
    """Keys and values of many sequences of any lengths, in blocks that sequences with equal beginnings share.

    `blocks` begins, forks, crops and ends sequences; `begin_step` appends their new tokens layer by layer.
    A batch of sequences of one length can also use the methods of other caches: `update`, `attend`, `crop`...

    Parameters
    ----------
    num_blocks, page_size : int
        The number of blocks, and of tokens in each.
    num_layers, num_kv_heads, head_dim : int
        Geometry of the model.
    dtype : dtype
        The dtype of keys, values and queries: float32, float16 or bfloat16.
    quant_bit, quant_group : int
        0 stores keys and values unquantized; 8 and 4 store codes, one scale per ``quant_group`` elements.
    quant_format : {None, "e4m3", "e5m2", "q8_0", "q4_0"}
        Stores 8-bit floats, or ggml's blocks, which contain their scales.
    scale : None, float, array of floats or "found"
        What e4m3 and e5m2 codes are multiplied with. None: 1. A number, or an array of shape [2] (keys,
        values), [2, num_kv_heads] or [num_layers, 2, num_kv_heads]. "found": computed from the data, one
        scale per ``quant_group`` elements (one per head and token if that is `head_dim`).
    scale_dtype : dtype
        The dtype of computed scales.
    cache_layout : int
        Axis order of the storage, as in `kvkit.dynamic_batching.key_value_cache`.
    salt : bytes
        Part of every hash of a prefix, so that caches of different models never match each other's.

    Attributes
    ----------
    cache, scale : ndarray
        The storage, a PMX cache of ``num_blocks * page_size`` rows, and its scales, or None.
    blocks : BlockAllocator
        The sequences: `add`, `extend`, `fork`, `crop`, `free`. Begin steps with `begin_step` of the cache,
        not of `blocks`: it copies shared blocks that the step writes into.
    layers : list of PagedLayer
    rows : Rows
        The sequences of `update` and `attend`, one per row of the batch, and the step that appends to them.
    store : PagedStore
        The arrays, and the place of each layer in them.
    sequences : list of Sequence
        In a loaded cache, the sequences that were given to `save`; else empty.

    Examples
    --------
    Two prompts that begin alike, then one token for each and for a branch. `branch` shares block 1, so the
    write of `first` goes into a copy, block 3:

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
    >>> second.length                                     # tokens in the cache already, of `first`
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
        quant_bit: Literal[0, 4, 8] = 0,
        quant_group: int = 8,
        quant_format: str | None = None,
        scale_dtype: DTypeLike = np.float16,
        cache_layout: int = 3,
        salt: bytes = b"",
        scale: Any = None,
    ) -> None:
        super().__init__()
        blocks = integer("num_blocks", num_blocks, 1), integer("page_size", page_size, 1)
        self.store = PagedStore(
            *blocks,
            num_layers,
            num_kv_heads,
            head_dim,
            dtype,
            quant_bit=quant_bit,
            quant_group=quant_group,
            scale_dtype=scale_dtype,
            cache_layout=cache_layout,
            quant_format=quant_format,
            scale=scale,
        )
        self.cache, self.scale = self.store.cache, self.store.scale
        self.salt = check_bytes("salt", salt)
        identity = self.store.identity + b"\0" + salt
        self.blocks = BlockAllocator(*blocks, identity=identity)
        self.rows = Rows(self.blocks, self.begin_step)
        self.sequences: list[Sequence] = []
        layers = range(self.store.num_layers)
        self.layers = [PagedLayer(self.store, self.rows, i, self._lock) for i in layers]

    @one_call_at_a_time
    def begin_step(self, sequences: Iterable[tuple[Sequence, int]]) -> PagedStep:
        """Make room for new tokens, and copy the shared blocks that they are written into.

        Parameters
        ----------
        sequences : iterable of (Sequence, int)
            Each sequence once, with its number of new tokens.

        Returns
        -------
        PagedStep
            Takes the new tokens of each layer. It must end before the next step begins.

        Raises
        ------
        OutOfBlocksError
            If too few blocks are free or evictable; then nothing has changed.
        """
        index = self.blocks.begin_step(sequences)
        try:
            self.store.copy(index.copies)
            return PagedStep(self.store, index)
        except BaseException:
            index.abandon()
            raise

    # A batch of sequences of one length

    @one_call_at_a_time
    def update(
        self, key_states: Array, value_states: Array, layer_idx: int, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append new tokens to a layer, see `PagedLayer.update`."""
        return self._layer(layer_idx).update(key_states, value_states, cache_position)

    @one_call_at_a_time
    def reserve(self, query_length: SupportsIndex) -> None:
        """Make sure that an update of ``query_length`` tokens has room in every layer."""
        self.rows.reserve(query_length)

    @one_call_at_a_time
    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row; below 0, drop that many; 0 drops none."""
        self.rows.crop(length)

    def _select(self, indices: ArrayLike) -> None:  # no keys and values move
        self.rows.select(indices)

    def _repeat(self, repeats: int) -> None:
        self.rows.select(np.repeat(np.arange(len(self.rows.sequences)), repeats))

    @one_call_at_a_time
    def reset(self) -> None:
        """End the sequences of all rows, and free their blocks."""
        self.rows.reset()

    @one_call_at_a_time
    def to_legacy_cache(self) -> tuple[Pair, ...]:
        """Return a tuple over layers of (keys, values), copies."""
        return tuple((layer.keys, layer.values) for layer in self.layers)

    # To files

    def describe(self) -> dict[str, Any]:
        """Return the arguments of the constructor; ``salt`` in hexadecimal."""
        store = self.store
        sizes = {"num_blocks": self.blocks.num_blocks, "page_size": store.page_size}
        sizes |= {"num_layers": store.num_layers, "num_kv_heads": store.heads, "head_dim": store.dim}
        formats = {"dtype": store.format.name, "scale_dtype": store.cell.name, "salt": self.salt.hex()}
        names = "quant_bit", "quant_group", "quant_format", "cache_layout"
        if store.arguments.quant_format and store.scale is not None:
            formats["scale"] = "found" if store.found else store.scale.tolist()
        return sizes | formats | {name: getattr(store.arguments, name) for name in names}

    @one_call_at_a_time
    def save(self, path: FilePath, sequences: Iterable[Sequence] = ()) -> None:
        """Write a .npz file that `load` reads. An existing file stays intact until the new one is complete.

        It contains all published prefixes, the rows, and the given sequences. In the loaded cache
        `blocks.add` finds the prefixes, `sequences` lists the sequences, and `update` continues the rows.

        Parameters
        ----------
        path : path
        sequences : iterable of Sequence
            Sequences that are in no open step.
        """
        saving.save_paged(self, path, sequences)
