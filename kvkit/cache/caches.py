"""Define `Cache`, a list of layers, and its calls that change all layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.cache import compression, heads, reading, saving
from kvkit.cache.base import BaseCache, one_call_at_a_time
from kvkit.cache.layers import requests
from kvkit.cache.layers.changes import all_layers
from kvkit.cache.layers.layer import Layer
from kvkit.cache.stores import allocation
from kvkit.checks.values import integer
from kvkit.errors import add_keyword_hint, argument_error, describe
from kvkit.files.paths import check_path
from kvkit.typed import Array, FilePath, Pair, States


class Cache(BaseCache):
    """Stores the keys and values of a model in a list of layers.

    Parameters
    ----------
    layers : iterable of layers
        One for each attention layer.
    offload : path, optional
        A folder to keep the layers in, see `offload`.
    rope : Rope, "none" or list of them, optional
        How keys are rotated, in all layers or in each. `shift` needs it.

    Attributes
    ----------
    layers : list of layers
    folder : Path
        The folder of the layers' files; None if all layers are in memory.

    Examples
    --------
    A generation loop, for a model whose layers make queries, keys and values [B, heads, q, D]:

    >>> import numpy as np
    >>> from kvkit.cache import Cache, DynamicLayer, SlidingWindowLayer
    >>> cache, prompt = Cache([DynamicLayer(), SlidingWindowLayer(4)]), np.ones((1, 6, 8), np.float32)
    >>> hidden = prompt                                             # [B, q, width]
    >>> for _ in range(3):
    ...     for i in range(len(cache)):
    ...         query = key = value = hidden.reshape(1, -1, 2, 4).swapaxes(1, 2)
    ...         keys, values = cache.update(key, value, i)
    ...         hidden = cache.attend(query, i).swapaxes(1, 2).reshape(1, -1, 8)
    ...     hidden = hidden[:, -1:]                                 # the next token
    >>> cache.get_seq_length(), [layer.keys.shape[2] for layer in cache.layers]
    (8, [8, 3])
    """

    _make_layer: Callable[[], Layer] | None = None  # where layers are made on first use
    _in_files: tuple[allocation.Allocate, bool] = allocation.in_memory, True  # arguments of `_place`

    def __init__(self, layers: Iterable[Layer], *, offload: FilePath | None = None, rope: Any = None) -> None:
        super().__init__()
        self.layers = list(layers)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, Layer):
                raise argument_error(f"layers[{i}]", "a layer", describe(layer))
            if any(layer is other for other in self.layers[:i]):
                raise argument_error(f"layers[{i}]", "a layer of its own", "an earlier one again")
            if layer._source not in (None, *self.layers):
                raise argument_error(f"layers[{i}]", "a new SharedLayer", "one of another cache")
            layer.name = f"layers[{i}]"
            layer._connect(self.layers, i)
        self.rope = rope
        for layer, rotation in zip(self.layers, self._ropes(rope), strict=True):
            layer.rope = layer.rope if rotation is None else rotation
        self._latest: Any = None  # the layer of the last update
        if offload is not None:
            self.offload(offload)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} layers: {self.get_seq_length()} tokens>"

    @property
    def nbytes(self) -> int:
        """Return the size of all stored keys and values in bytes, without spare rows."""
        return sum(layer.nbytes for layer in self.layers)

    # Adding tokens

    def update(
        self,
        key_states: Array,
        value_states: Array,
        layer_idx: int,
        cache_position: ArrayLike | None = None,
        **options: Any,
    ) -> tuple[States, States]:
        """Append new tokens to layer ``layer_idx``, see the ``update`` of layers.

        If a layer has no room, earlier layers already have their tokens. Call `reserve` first to avoid this.
        """
        with self._lock:
            layer = self._layer(layer_idx)
            try:
                states = layer.update(key_states, value_states, cache_position, **options)
            except TypeError as error:
                add_keyword_hint(error, layer.update, options)
                raise
            if layer is not self._latest:
                self._enter(layer, layer_idx)
            return states

    def _enter(self, layer: Layer, layer_idx: int) -> None:
        """Add a new layer; free the memory that only the last update of the previous layer needed."""
        if layer_idx == len(self.layers):
            self.layers.append(layer)
        latest = self._latest
        if latest is not None and not (latest._is_shared and latest.span.length - latest.span.before > 1):
            latest._release_undo()  # not yet if a shared layer will attend with the queries of a prompt
        self._latest = layer
        if self.folder is not None and self.layers:
            allocation.prefetch(self.layers[(layer_idx + 1) % len(self.layers)]._large_arrays())

    @one_call_at_a_time
    def reserve(self, query_length: SupportsIndex) -> None:
        self._check_reserve(query_length)
        for layer in self.layers:
            layer.reserve(query_length)

    def _missing(self, number: int) -> Any:
        """Make the next layer, if layers are made on first use; `update` adds it to the layers."""
        if self._make_layer is None:
            return super()._missing(number)
        if number > (count := len(self.layers)):
            raise argument_error("layer_idx", f"at most {count}, as layers are made in order, from 0", number)
        layer = self._make_layer()
        layer.name = f"layers[{number}]"
        layer.rope = self.rope
        if self.folder is not None:
            self._place(layer, *self._in_files)
        return layer

    # Removing tokens and changing the batch. All layers are checked before one changes

    @all_layers
    def crop(self, length: int) -> None:
        """Drop the last tokens of every layer, see `DynamicLayer.crop`."""
        self._check_crop(length)  # raises before any layer has changed
        for layer in self.layers:
            layer.crop(length)

    @one_call_at_a_time
    def _plan(self, call: str, *arguments: Any, rope: Any = None, **options: Any) -> list[Any]:
        pairs = zip(self.layers, self._ropes(rope), strict=True)
        return [
            layer._plan(call, *arguments, rope=rotation, **options) if layer._of is None else None
            for layer, rotation in pairs
        ]

    @all_layers
    def _rearrange(self, plan: list[Any]) -> None:
        """Carry out the plans of all layers."""
        for layer, own in zip(self.layers, plan, strict=True):
            if own is not None:
                layer._rearrange(own)

    @all_layers
    def append(self, other: Cache, at: SupportsIndex | None = None, rope: Any = None) -> None:
        """Add the tokens of another cache behind the present ones, or before the token of position `at`.

        All layers are checked before one changes, and all change or none. See the `append` of layers.

        Parameters
        ----------
        other : Cache
            With layers of the same kinds. It does not change.
        at : int, optional
            The position that the first new token gets; None: that of the next token.
        rope : Rope, "none" or list of them, optional
            How keys were rotated in both caches, in all layers or in each, as in `shift`.

        Raises
        ------
        KvkitError
            If an argument is wrong, or some layers cannot be joined; `can` says so beforehand.

        Examples
        --------
        Two documents, each read from position 0 on, become one context:

        >>> import numpy as np, kvkit
        >>> from kvkit.cache import DynamicCache
        >>> first, second = (DynamicCache(rope=kvkit.Rope(4)) for _ in range(2))
        >>> for cache, tokens in ((first, 5), (second, 3)):
        ...     states = cache.update(*np.ones((2, 1, 1, tokens, 4), np.float32), 0)
        >>> first.append(second)
        >>> first.get_seq_length(), first.layers[0].rope_shifts.tolist()
        (8, [[0, 5, 0], [5, 8, 5]])
        """
        for layer, plan in zip(self.layers, self._plan_joins(other, at, rope), strict=True):
            if plan is not None:
                layer._join(plan)

    def _check_append(self, other: Cache, at: SupportsIndex | None = None, rope: Any = None) -> None:
        """Raise the error that `append` would raise."""
        self._plan_joins(other, at, rope)

    def _plan_joins(self, other: Any, at: SupportsIndex | None, rope: Any) -> list[Any]:
        """Check an `append`; return a plan for each layer, None for one that reads the rows of another."""
        if other is self or not isinstance(other, Cache):
            wanted = "another cache of layers (of pages: PagedCache.fork and update take its tokens)"
            raise argument_error("other", wanted, "the cache itself" if other is self else describe(other))
        if len(other) != len(self):
            raise argument_error("other", f"a cache of {len(self)} layers", len(other))
        plans = []
        for layer, theirs, rotation in zip(self.layers, other.layers, self._ropes(rope), strict=True):
            shared = layer._of is not None and layer._of == theirs._of
            plans.append(None if shared else layer._plan_join(theirs, at, rotation))
        return plans

    @one_call_at_a_time
    def compress(
        self,
        scorer: str | compression.ScoreFunction | Sequence[Array],
        *,
        keep: float | None = None,
        count: int | None = None,
        budget: str | ArrayLike = "uniform",
        per_head: bool = False,
        threshold: ArrayLike | None = None,
        first: int | None = None,
        last: int | None = None,
        queries: Sequence[Array] | None = None,
        weights: Sequence[Array] | None = None,
        renumber: bool = False,
        rope: Any = None,
        attn_mask: Array | None = None,
        **options: Any,
    ) -> compression.CompressionReport:
        """Keep the tokens with the best scores in every layer, and free the memory of the other tokens.

        In a layer, all heads and all rows of the batch keep the same tokens, by their mean scores.
        With `per_head`, or a budget for heads, each head keeps its own best tokens; then a `DynamicLayer`
        becomes a `RaggedLayer`. Layers with a window do not change. After an error no layer has changed.

        Parameters
        ----------
        scorer : str, callable or list of arrays
            The name of a scorer of `kvkit.eviction`; a function (layer_idx, keys, values, queries) that
            returns scores [B, Hkv, S], larger for tokens to keep; or a list with the scores of each layer.
        keep, count : float, int, optional
            The share, or the number, of a layer's tokens that stay. Give one of the two.
        budget : str or array_like of int
            ``"uniform"``: every layer keeps the same number. ``"pyramid"``: later layers keep fewer, if the
            last one then has at least 64 tokens, else the same number (`kvkit.eviction.budgets`). ``"ada"``
            and ``"global"`` divide the tokens among the heads of a layer, or of all layers, by their scores.
            Or the counts themselves, in place of `keep`: [L], [L, Hkv] or [L, B, Hkv], as
            `kvkit.eviction.budgets` returns them.
        per_head : bool
            Whether each head chooses its own tokens. ``"ada"``, ``"global"``, counts of heads and
            `threshold` imply it.
        threshold : float or array_like, optional
            Keep every token whose score is at least this, in place of `keep`: a number, or one for each head.
        first, last : int
            How many of the first and of the last tokens stay whatever their scores.
        queries, weights : list of ndarray, optional
            The inputs of the scorer for each layer, as in `kvkit.eviction.scores`.
        renumber : bool
            Whether the remaining tokens get the positions 0, 1, 2, ...; rotated keys need a `rope` for that.
        rope : Rope, "none" or list of them, optional
            As in `shift`.
        attn_mask : ndarray of bool, shape [B, n], optional
            False for padding, with a column for each position up to `get_seq_length`, as `attend` takes it.
            Each row is scored without its padding, as if it were alone, and a function is called for such
            rows. Padding never stays, shares and counts are of the other tokens, and a row with no more
            tokens than the scorer always keeps stays whole. Where rows share a choice, columns that are
            tokens in more rows stay first.
        **options
            Options of the scorer. A scorer with an option `first`, `last` or `threshold` gets that argument.

        Returns
        -------
        CompressionReport
            The stored `tokens` of each layer, ``bytes_before`` and ``bytes_after``, and the layers `skipped`.

        Raises
        ------
        KvkitError
            If an argument is wrong or missing, or a layer cannot lose tokens.

        Examples
        --------
        >>> import numpy as np
        >>> from kvkit.cache import DynamicCache
        >>> cache, states = DynamicCache(), np.ones((1, 2, 8, 4), np.float32)
        >>> keys, values = cache.update(states, states, 0)
        >>> cache.compress("streaming", keep=0.5, sinks=1)
        CompressionReport(tokens_before=[8], tokens=[4], bytes_before=512, bytes_after=256, skipped={})
        >>> cache.layers[0].positions, cache.get_seq_length()
        (array([0, 5, 6, 7]), 8)
        """
        request = self._compression(
            options, scorer=scorer, keep=keep, count=count, budget=budget, per_head=per_head,
            threshold=threshold, first=first, last=last, queries=queries, weights=weights, renumber=renumber,
            rope=rope, attn_mask=attn_mask,
        )  # fmt: skip
        if not compression.chooses_by_head(self.layers, request):
            return compression.compress(self.layers, self._rearrange, request)
        layers, report = heads.compress_by_head(self.layers, request)
        self._replace_layers(layers)
        return report

    @all_layers
    def _replace_layers(self, layers: list[Any]) -> None:
        """Take other layers, which hold some tokens of the present ones."""
        self._latest, self.layers[:] = None, layers
        for i, layer in enumerate(self.layers):
            layer._connect(self.layers, i)

    # What the other calls would refuse, see `can`

    def _check_crop(self, length: int) -> None:
        """Raise the error that `crop` would raise."""
        for layer in self.layers:
            layer._length_after_crop(length)

    def _check_reorder(self, indices: ArrayLike) -> None:
        """Raise the error that `reorder` would raise."""
        for layer in self.layers:
            requests.check_rows(indices, layer.batch_size)

    def _check_repeat(self, repeats: int) -> None:
        """Raise the error that `repeat` would raise."""
        integer("repeats", repeats, 1)

    def _check_reserve(self, query_length: SupportsIndex) -> None:
        """Raise the error that `reserve` would raise."""
        new = integer("query_length", query_length, 0)
        for layer in self.layers:
            layer._check_room(layer.get_seq_length(), new)

    def _check_reset(self) -> None:
        """Raise the error that `reset` would raise: none."""

    def _check_compress(self, *arguments: Any, **options: Any) -> None:
        """Raise the error that `compress` would raise."""
        named = inspect.signature(type(self).compress).bind(self, *arguments, **options)
        named.apply_defaults()
        values = {name: value for name, value in named.arguments.items() if name != "self"}
        request = self._compression(values.pop("options"), **values)
        if compression.chooses_by_head(self.layers, request):
            heads.compress_by_head(self.layers, request)
        else:
            compression.plan_layers(self.layers, request)

    def _compression(self, options: dict[str, Any], **arguments: Any) -> compression.Compression:
        """Return the checked arguments of `compress`, which are given by name; `options` are the scorer's."""
        ends = {name: arguments.pop(name) for name in ("first", "last", "threshold")}
        arguments["rope"] = self._ropes(arguments["rope"])
        split = compression.split_options(arguments["scorer"], options, **ends)
        return compression.Compression(**arguments | split)

    def _select(self, indices: ArrayLike) -> None:
        self._check_reorder(indices)
        self._change_batch(lambda layer: layer.reorder(indices))

    def _repeat(self, repeats: int) -> None:
        self._change_batch(lambda layer: layer.repeat(repeats))

    @all_layers
    def _change_batch(self, change: Callable[[Layer], None]) -> None:
        """Change the batch of every layer; those that need new arrays come before those that lose rows."""
        for layer in sorted(self.layers, key=lambda layer: layer._reorders_in_place):
            change(layer)

    @all_layers
    def reset(self) -> None:
        """Remove all tokens; the `reset` of each layer says what stays."""
        for layer in self.layers:
            layer.reset()

    activate_past_recording = all_layers(BaseCache.activate_past_recording)

    # Files

    @one_call_at_a_time
    def to_legacy_cache(self) -> tuple[Pair, ...]:
        for layer in self.layers:
            if layer.store is None or layer.span.oldest or layer._row_positions is not None:
                raise argument_error(layer.name, "a layer that stores all its tokens", layer)
        return tuple((layer.keys.copy(), layer.values.copy()) for layer in self.layers)

    @one_call_at_a_time
    def save(self, path: FilePath, *, compress: str | None = None) -> None:
        """Write a .npz file that `load` reads. An existing file stays intact until the new one is complete.

        Afterwards quantized layers attend to codes wherever they have them, as the loaded cache will.

        Parameters
        ----------
        path : path
        compress : {"zstd"}, optional
            Compress the arrays without loss; this and `load` then need the extra ``zstd``. A compressed file
            is unpacked into memory, where the arrays of another are mapped.

        Raises
        ------
        KvkitError
            If a layer cannot be saved, or the package zstandard is missing. Nothing has been written.
        """
        saving.save(self, path, compress)

    @all_layers
    def _lie_in(self, allocate: allocation.Allocate, only_non_sliding: bool) -> None:
        further = [self._make_layer()] if self._make_layer else []  # made on first use
        for layer in (*self.layers, *further):
            layer._describe()  # raises for a layer that cannot be saved
        for layer in self.layers:
            self._place(layer, allocate, only_non_sliding)
        self._in_files = allocate, only_non_sliding

    def _place(self, layer: Layer, allocate: allocation.Allocate, only_non_sliding: bool) -> None:
        """Move a layer to where `allocate` makes arrays, unless it stays in memory."""
        if layer.window is None or not only_non_sliding:
            layer._lie_in(allocate)

    @classmethod
    def open(cls, directory: FilePath, keep: bool = True) -> Cache:
        """Open the cache that `close` has saved in its folder, in files of this folder.

        Parameters
        ----------
        directory : path
        keep : bool
            Whether `close` saves the cache again; otherwise the saved file stays as it is.

        Raises
        ------
        KvkitError
            If the folder has no saved cache, or a damaged one.
        """
        check_path(directory)
        path, in_files = reading.saved_path(directory), allocation.InFiles(directory)
        cache = Cache(reading.read_layers(path, reading.read_file(path), in_files))
        cache._use_files(in_files, True, keep)  # `read_layers` has moved them there
        return cache
