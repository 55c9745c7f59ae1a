"""Define the methods that all layers and all caches have, wherever their tokens are stored."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, cast

import numpy as np
from numpy.typing import ArrayLike

from kvkit.cache.layers.positions import (
    Piece,
    RopeLike,
    RowPositions,
    check_call,
    check_rotation,
    pieces_array,
)
from kvkit.cache.stores import allocation
from kvkit.checks.values import flag, integer
from kvkit.errors import KvkitError, add_keyword_hint, argument_error, hints_keywords
from kvkit.runtime.locks import CallLock, LayerLock
from kvkit.typed import Array, Attended, FilePath, Method, Pair, States

SAVED = "cache.npz"  # what `close` saves in the folder of an offloaded cache

RopesLike = RopeLike | list[RopeLike] | tuple[RopeLike, ...]  # one for all layers, or one for each


def one_call_at_a_time(method: Method) -> Method:
    """Decorate a method so that its calls from other threads wait until it ends."""

    @functools.wraps(method)
    def waiting(self: Any, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            try:
                return method(self, *arguments, **options)
            except TypeError as error:
                add_keyword_hint(error, method, options)
                raise

    return cast(Method, waiting)


# {an attribute of other libraries' caches, or of kvkit's before: the one that an error names}
OTHER_ATTRIBUTES = {
    "clear": "reset()", "copy": "copy.deepcopy(cache)", "evict": "compress(scorer, keep=0.5)",
    "keys": "layers[i].keys", "length": "get_seq_length()", "seq_length": "get_seq_length()",
    "shape": "layers[i].keys.shape", "trim": "crop(length)", "truncate": "crop(length)",
    "values": "layers[i].values",
    "early_initialization": "reserve(query_length)", "get_conv_state": "layers[i].states",
    "get_query_offset": "get_seq_length(layer_idx)", "get_recurrent_state": "layers[i].states",
    "get_usable_length": "get_seq_length()", "has_previous_state": "get_seq_length() > 0",
    "is_croppable": "can('crop', -1) is None", "is_dummy": "isinstance(layer, SharedLayer)",
    "is_linear": "isinstance(layer, StateLayer)", "is_recording_past": "can('crop', -1) is None",
    "key_cache": "layers[i].keys", "offload": "cache.offload(folder)",
    "prefetch": "cache.prefetch(layer_idx)", "layer_class_to_replicate": "layers",
    "lazy_initialization": "update(key_states, value_states)", "max_cache_len": "get_max_cache_shape()",
    "offloading": "folder is not None", "seen_tokens": "get_seq_length()", "select": "reorder(indices)",
    "update_conv_state": "layers[i].update(states, tokens)",
    "update_indexer": "layers[i].update_index(index_keys)",
    "update_recurrent_state": "layers[i].update(states, tokens)", "value_cache": "layers[i].values",
}  # fmt: skip
# Attributes that compiled models of torch ask for, and layers that move between devices
OTHER_ATTRIBUTES |= dict.fromkeys(
    ("device", "is_compileable", "supports_early_init"), "kvkit.integrations.transformers.KvkitCache"
)


class ReadOnly(property):
    """A property of a layer that can only be read; an assignment raises AttributeError with the way to it."""

    def __set__(self, layer: Any, value: Any) -> None:
        assert self.fget is not None
        raise AttributeError(
            f"{self.fget.__name__}: expected layer.reset() and layer.update(keys, values), which store "
            "others, got an assignment"
        )


class NoArray:
    """Refuses to become an array of Python objects; with arrays it compares as one object."""

    _an_array: str  # says where an array is
    __array_ufunc__ = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise argument_error("array", f"one array, as {self._an_array}", f"a whole {type(self).__name__}")


class MovableTokens(NoArray, ABC):
    """Removes and moves tokens in a layer, or in all layers of a cache. An error leaves all as it was."""

    _lock: LayerLock
    _an_array = "layer.keys"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            hints_keywords(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            meant = OTHER_ATTRIBUTES.get(name)
            hint = f": it is {meant} here" if meant else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
            )

    @one_call_at_a_time
    def remove(
        self,
        begin: SupportsIndex,
        end: SupportsIndex | None = None,
        *,
        close: bool = False,
        rope: RopesLike = None,
    ) -> None:
        """Remove the tokens with positions in [begin, end).

        Parameters
        ----------
        begin : int
        end : int, optional
            If it is None or not below the next token's position, all tokens from `begin` on are removed. The
            next token then gets position ``begin``, or keeps its own if that is lower.
        close : bool
            Whether later tokens are shifted back, so that no hole is left.
        rope : Rope, "none" or list of them, optional
            How keys were rotated, as in `shift`; only ``close`` needs it.

        Raises
        ------
        KvkitError
            If an argument is wrong, or if a layer cannot remove these tokens; `can` says so beforehand.

        Examples
        --------
        >>> import numpy as np, kvkit
        >>> from kvkit.cache import DynamicLayer
        >>> layer, tokens = DynamicLayer(), np.ones((1, 1, 8, 4), np.float32)
        >>> keys, values = layer.update(tokens, tokens)
        >>> layer.remove(2, 5)
        >>> layer.positions, layer.get_seq_length()
        (array([0, 1, 5, 6, 7]), 8)
        >>> layer.shift(5, None, -3, kvkit.Rope(4))
        >>> layer.positions, layer.rope_shifts.tolist(), layer.get_seq_length()
        (array([0, 1, 2, 3, 4]), [[0, 2, 0], [2, 5, -3]], 5)
        """
        self._rearrange(self._plan("remove", begin, end, close=close, rope=rope))

    @one_call_at_a_time
    def retain(self, positions: ArrayLike) -> None:
        """Keep only the tokens at some positions. The position of the next token does not change.

        Parameters
        ----------
        positions : array_like of int
            Ascending positions of stored tokens.
        """
        self._rearrange(self._plan("retain", positions))

    @one_call_at_a_time
    def shift(
        self, begin: SupportsIndex, end: SupportsIndex | None, delta: SupportsIndex, rope: RopesLike = None
    ) -> None:
        """Add `delta` to the positions of the tokens in [begin, end). No key is written.

        Parameters
        ----------
        begin : int
        end : int, optional
            If it is None or not below the next token's position, the next token moves too.
        delta : int
            Tokens that would get a position below 0 are removed.
        rope : Rope, "none" or list of them, optional
            How keys were rotated, in all layers of a cache or in each; ``"none"`` if they were not. Later
            calls remember it.

        Raises
        ------
        KvkitError
            If positions would not stay ascending, or if two tokens would share one.
        """
        self._rearrange(self._plan("shift", begin, end, delta, rope=rope))

    @one_call_at_a_time
    def divide(
        self, begin: SupportsIndex, end: SupportsIndex | None, d: SupportsIndex, rope: RopesLike = None
    ) -> None:
        """Divide the positions in [begin, end) by `d`, rounding down. Tokens may then share a position.

        Parameters
        ----------
        begin : int
        end : int, optional
            As in `shift`.
        d : int
            2 or more.
        rope : Rope, "none" or list of them, optional
            As in `shift`.
        """
        self._rearrange(self._plan("divide", begin, end, d, rope=rope))

    @one_call_at_a_time
    def flatten(self, rope: RopesLike = None) -> None:
        """Rotate shifted keys in memory, with one rounding, so that no rope shift is left.

        Parameters
        ----------
        rope : Rope, "none" or list of them, optional
            As in `shift`.
        """
        self._rearrange(self._plan("flatten", rope=rope))

    def can(self, call: str, *arguments: Any, **options: Any) -> str | None:
        """Return the message of the error that a call would raise; None if it would raise none.

        Parameters
        ----------
        call : str
            The name of a method that changes what is stored: ``"remove"``, ``"retain"``, ``"shift"``,
            ``"divide"``, ``"flatten"``, ``"append"``, ``"crop"``, ``"reorder"``, ``"repeat"``, ``"reserve"``,
            ``"reset"`` or ``"compress"``, if the object has it.
        *arguments, **options
            The arguments of the call.

        Raises
        ------
        KvkitError
            If the object has no such method.

        Notes
        -----
        It cannot know what only the system knows: whether memory or a disk has room. In pages, `reserve` is
        the check itself, and a call that copies shared blocks may still raise OutOfBlocksError.

        Examples
        --------
        >>> from kvkit.cache import DynamicLayer
        >>> DynamicLayer().can("retain", [3])
        'positions: expected positions that are stored, got 3'
        """

        try:
            with self._lock:
                check_call(self, self._plan, call, *arguments, **options)
        except (KvkitError, TypeError) as error:
            if str(error).startswith("call: "):
                raise
            return str(error)
        return None

    @abstractmethod
    def _plan(self, call: str, *arguments: Any, **options: Any) -> Any:
        """Check a call that removes or moves tokens; return a plan for `_rearrange`."""

    @abstractmethod
    def _rearrange(self, plan: Any) -> None:
        """Carry out a plan that `_plan` returned."""


class BaseLayer(MovableTokens):
    """Stores the keys and values of one attention layer. Calls from several threads run one after another.

    Attributes
    ----------
    window : int or None
        How many tokens a query attends to, itself included; None for all.
    chunk_size : int or None
        How many tokens a chunk has, in which alone its tokens attend; None without chunks.
    latent_dim : int
        How many elements of a latent row are its value; 0 for a layer with keys and values of heads.
    """

    _lock: LayerLock
    window: int | None = None
    chunk_size: int | None = None
    _takes_window = False  # whether `attend` has a `window` argument
    _why_kept: str | None = None  # why `compress` does not change the layer; None if it does
    _of: int | None = None  # the number of the layer whose rows a `SharedLayer` reads
    _has_rows = True  # a row of keys and of values for each stored token
    _is_shared = False  # whether another layer reads its rows
    latent_dim = 0
    _croppable = True  # whether transformers may `crop`; not a static layer with a window
    _record_past = False  # whether tokens that would be dropped or encoded stay until the next crop
    _row_positions: RowPositions | None = None  # None while row r has position r and no key is shifted

    @abstractmethod
    def update(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append the keys and values of new tokens; return the keys and values that these attend to.

        Parameters
        ----------
        key_states : ndarray, shape [B, Hkv, q, Dk]
            float32, float16 or bfloat16, any strides. The first call fixes dtype, B, Hkv, Dk and Dv; for a
            paged layer it fixes only B.
        value_states : ndarray, shape [B, Hkv, q, Dv]
            The same dtype as `key_states`.
        cache_position : array_like of int, shape [q], optional
            Consecutive positions of the new tokens, after the last token. In a `StaticLayer` they may begin
            earlier; then they replace the tokens from there on.

        Returns
        -------
        keys : ndarray, shape [B, Hkv, S, Dk]
        values : ndarray, shape [B, Hkv, S, Dv]
            Past and new tokens, see `get_mask_sizes`. They are views of the cache, for a quantized or paged
            layer each is a `KVView`. Do not write to them. They are valid until the next call that changes
            the layer.

        Raises
        ------
        KvkitError
            If an argument is wrong.
        CapacityError, OutOfBlocksError
            If there is no room. After an error the layer has not changed.
        """

    @abstractmethod
    def attend(
        self,
        query: Array,
        attn_mask: Array | None = None,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Array | None = None,
        return_lse: bool = False,
    ) -> Attended:
        """Attend with the queries of the last tokens, causally and within the layer's window.

        Keys and values are read in place; no copy of the context is made. The q queries are those of the
        last q tokens, which may be fewer than those of the last update.
        Query head h uses key head ``h // (Hq // Hkv)``.

        Parameters
        ----------
        query : ndarray, shape [B, Hq, q, Dk]
            float32, float16 or bfloat16, any strides.
        attn_mask : ndarray, optional
            bool [B, n], n as `get_seq_length` returns it: False for positions that no query attends to, such
            as padding. Or an array of shape [B, Hq, q, kv_length], where the first three may be 1: bool, or
            numbers that are added to the scores, float32 or of the dtype of ``query``. kv_length is what
            `get_mask_sizes` returned before the update; a static layer's columns without tokens may be left
            out.
        is_causal, window : bool and (int, int), optional
            For paged layers only, as in `kvkit.multi_head_attention`. Others are causal within `window`.
        softmax_scale : float, optional
            Factor of the scores; 1 / sqrt(Dk) if None.
        softcap : float
            If not 0, scores become ``softcap * tanh(score / softcap)`` before masks are added.
        sinks : ndarray, shape [Hq], optional
            One more score for each head. It is part of the softmax and has no value.
        return_lse : bool
            Whether to return the logarithms of the softmax denominators too.
        return_key_weights : bool, optional
            Whether to return each key's weight, summed over the queries. Not for latent layers, where keys
            have a rope shift, or where pages of a sequence have holes.

        Returns
        -------
        attn_output : ndarray, shape [B, Hq, q, Dv]
            The dtype of ``query``. Its memory has the order [B, q, Hq, Dv], so that the next projection can
            swap both axes back and join the heads without a copy.
        lse : ndarray of float32, shape [B, Hq, q]
            If ``return_lse``; -inf for a query that attends to no key.
        key_weights : ndarray of float32, shape [B, Hq, S]
            If ``return_key_weights``: the sums of the softmax weights over queries, of the S keys that the
            last update returned.

        Raises
        ------
        KvkitError
            If an argument is wrong, or if tokens in the window of a query are no longer stored.

        Examples
        --------
        >>> import numpy as np
        >>> from kvkit.cache import DynamicLayer
        >>> layer, tokens = DynamicLayer(), np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1)
        >>> keys, values = layer.update(np.ones_like(tokens), tokens)
        >>> layer.attend(np.ones_like(tokens)).ravel()
        array([0. , 0.5, 1. ], dtype=float32)
        """

    @abstractmethod
    def get_seq_length(self) -> int:
        """Return the number of tokens that the layer has seen."""

    def get_max_cache_shape(self) -> int:
        """Return `get_max_length`; transformers calls it so."""
        return self.get_max_length()

    @property
    def is_initialized(self) -> bool:
        """Return whether the layer has had tokens."""
        return self.batch_size > 0

    def get_max_length(self) -> int:
        """Return the most tokens that the layer holds; -1 for no limit."""
        return -1

    def get_mask_sizes(self, query_length: SupportsIndex) -> tuple[int, int]:
        """Return (kv_length, kv_offset): how many keys the next update returns, and the first key's position.

        If `remove` has left holes, kv_offset is larger by the removed positions, so that kv_offset plus the
        index of a key is right for all keys after the last hole.
        """
        begin, end = self._returned(self.get_seq_length(), integer("query_length", query_length, 0))
        return end - begin, begin

    def _returned(self, length: int, new: int) -> tuple[int, int]:
        """Return the positions [begin, end) that an update of `new` tokens after `length` returns."""
        return 0, length + new

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Return B, the number of rows of the batch; 0 before the first update."""

    @ReadOnly
    def keys(self) -> States:
        """Return the stored keys, shape [B, Hkv, stored, Dk]; None before the first update."""
        return self._stored()[0] if self.batch_size else None

    @ReadOnly
    def values(self) -> States:
        """Return the stored values, shape [B, Hkv, stored, Dv]; None before the first update."""
        return self._stored()[1] if self.batch_size else None

    @abstractmethod
    def _stored(self) -> tuple[States, States]:
        """Return the stored keys and values, arrays [B, Hkv, stored, D]."""

    @property
    def is_sliding(self) -> bool:
        """Return whether the layer has a window."""
        return self.window is not None

    @property
    def nbytes(self) -> int:
        """Return the size of the stored keys and values in bytes, without spare rows."""
        return sum(side.nbytes for side in self._stored()) if self.batch_size else 0

    # Row numbers differ from positions once tokens were removed or moved

    @property
    def stored_tokens(self) -> int:
        """Return the number of stored tokens, which is the number of rows."""
        return self.get_seq_length()

    @property
    def positions(self) -> Array:
        """Return the positions of the stored tokens: int64, ascending, one for each row."""
        return np.arange(self.get_seq_length())

    @property
    def rope_shifts(self) -> Array:
        """Return the rope shifts of stored keys: int64 [pieces, 3] of (first row, end row, shift).

        In memory a key of shift d is rotated for its position - d. `attend` takes that into account.
        """
        return pieces_array([Piece(0, self.stored_tokens, 0)] if self.stored_tokens else [])

    def activate_past_recording(self) -> None:
        """Keep tokens that would be dropped or encoded until the next crop. Most layers drop none anyway."""


class CacheLock(CallLock):  # type: ignore[misc]
    """The lock of a cache, which refuses all calls once the cache is closed."""

    __slots__ = ("closed",)

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def __enter__(self) -> bool:  # type: ignore[override]
        super().__enter__()
        if self.closed:
            self.release()
            raise argument_error("cache", "one that is open (a kept one: Cache.open)", "one that was closed")
        return True

    def __reduce__(self) -> Any:
        return type(self), (), (None, {"closed": self.closed})


class BaseCache(MovableTokens):
    """Stores the keys and values of a model in layers. Calls from several threads run one after another."""

    layers: list[Any]
    folder: Path | None = None  # of the layers' files; None if all layers are in memory
    _keep = False  # whether `close` saves the cache in the folder
    _an_array = "cache.layers[0].keys"

    def __init__(self) -> None:
        self._lock: CacheLock = CacheLock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"folder": None}  # a copy lies in memory

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_idx: SupportsIndex) -> tuple[States | None, States | None]:
        """Return the keys and values of a layer."""
        layer = self._layer(layer_idx)
        return layer.keys, layer.values

    def __iter__(self) -> Iterator[tuple[States | None, States | None]]:
        """Yield the keys and values of each layer."""
        return ((layer.keys, layer.values) for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """Return the number of rows of the batch; 0 before the first update."""
        return max((int(layer.batch_size) for layer in self.layers), default=0)

    @property
    def is_sliding(self) -> list[bool]:
        """Return for each layer whether it has a window."""
        return [layer.is_sliding for layer in self.layers]

    # Adding tokens

    @abstractmethod
    def update(
        self, key_states: Array, value_states: Array, layer_idx: int, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append new tokens to layer ``layer_idx``."""

    def attend(
        self, query: Array, layer_idx: int, attn_mask: Array | None = None, **options: Any
    ) -> Attended:
        """Attend to layer ``layer_idx``, see the ``attend`` of layers.

        After a long update, a sliding layer still stores all new tokens, and a quantized layer the rows that
        its new codes were made of, so that the queries of this update can attend to them. The update of
        another layer frees them if they take much more memory than a window.
        """
        with self._lock:
            queries = query if isinstance(query, tuple) else (query,)  # a latent layer takes two parts
            attend = self._layer(layer_idx).attend
            try:
                return attend(*queries, attn_mask=attn_mask, **options)
            except TypeError as error:
                add_keyword_hint(error, attend, options)
                raise

    @abstractmethod
    def reserve(self, query_length: SupportsIndex) -> None:
        """Make room for ``query_length`` more tokens in every layer, so that their updates cannot fail."""

    def _layer(self, layer_idx: SupportsIndex) -> Any:
        """Return layer ``layer_idx``."""
        number = integer("layer_idx", layer_idx, 0)
        return self.layers[number] if number < len(self.layers) else self._missing(number)

    def _missing(self, number: int) -> Any:
        """Raise for the number of a missing layer, or make that layer."""
        raise argument_error("layer_idx", f"the number of one of {len(self.layers)} layers", number)

    def _ropes(self, rope: Any) -> list[Any]:
        """Check the argument `rope`; return how the keys of each layer are rotated."""
        if not isinstance(rope, (list, tuple)):
            if rope is not None:
                check_rotation(rope)
            return [rope] * len(self.layers)
        if len(rope) != len(self.layers):
            raise argument_error("rope", f"one, or {len(self.layers)}, one for each layer", len(rope))
        for rotation in rope:
            check_rotation(rotation)
        return list(rope)

    # Sizes and positions

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has seen; 0 if there is no such layer."""
        number = integer("layer_idx", layer_idx, 0)
        return self.layers[number].get_seq_length() if number < len(self.layers) else 0

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """Return `get_max_length`; transformers calls it so."""
        return self.get_max_length(layer_idx)

    @property
    def is_initialized(self) -> bool:
        """Return whether all layers have had tokens."""
        return len(self) > 0 and all(layer.is_initialized for layer in self.layers)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the most tokens that a layer can hold; without `layer_idx`, any layer. -1 means no limit."""
        if layer_idx is not None:
            return self._layer(layer_idx).get_max_length()
        lengths = [layer.get_max_length() for layer in self.layers]
        return -1 if -1 in lengths else max(lengths, default=-1)

    def get_mask_sizes(self, query_length: SupportsIndex, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) of an update of ``query_length`` tokens; call this before it."""
        return self._layer(layer_idx).get_mask_sizes(query_length)

    # Removing tokens and changing the batch

    @abstractmethod
    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every layer; below 0, drop that many; 0 drops none."""

    @one_call_at_a_time
    def reorder(self, indices: ArrayLike) -> None:
        """Replace row b of the batch by the old row ``indices[b]``. The batch becomes ``len(indices)``."""
        self._select(indices)

    reorder_cache = batch_select_indices = reorder

    @abstractmethod
    def _select(self, indices: ArrayLike) -> None:
        """Reorder the rows of the batch; `reorder` has locked the cache."""

    @one_call_at_a_time
    def repeat(self, repeats: int) -> None:
        """Repeat every row of the batch: rows A, B become A, A, B, B."""
        self._repeat(integer("repeats", repeats, 1))

    batch_repeat_interleave = repeat

    @abstractmethod
    def _repeat(self, repeats: int) -> None:
        """Repeat the rows of the batch; `repeat` has locked the cache."""

    @abstractmethod
    def reset(self) -> None:
        """Remove all tokens."""

    @one_call_at_a_time
    def activate_past_recording(self) -> None:
        """Keep tokens that leave a window, in all layers, so that the next `crop` can return before them."""
        for layer in self.layers:
            layer.activate_past_recording()

    # Conversion

    @abstractmethod
    def to_legacy_cache(self) -> tuple[Pair, ...]:
        """Return a tuple over layers of (keys, values), copies of shape [B, Hkv, n, D]."""

    # Files

    @abstractmethod
    def save(self, path: FilePath, *, compress: str | None = None) -> None:
        """Write a .npz file that `load` reads, whole or not at all; ``compress="zstd"`` compresses it."""

    @abstractmethod
    def _lie_in(self, allocate: allocation.Allocate, only_non_sliding: bool) -> None:
        """Move the arrays to new ones from `allocate`, which will make later arrays too."""

    @one_call_at_a_time
    def offload(self, directory: FilePath, only_non_sliding: bool = True, keep: bool = False) -> None:
        """Move keys and values to memory-mapped files, which the system pages in and out.

        Results stay the same, bit for bit. The files have no names: nothing is left of them once the cache
        is gone, however its process ends. `save`, and `close` with ``keep``, write what shall stay.

        Parameters
        ----------
        directory : path
            A folder on the disk to use; it is made if it does not exist.
        only_non_sliding : bool
            Whether sliding layers, which are small, stay in memory.
        keep : bool
            Whether `close` saves the cache in the folder, for `open`.

        Raises
        ------
        OSError
            If the disk is full. No row has changed then, here and in later calls.
        """
        self._use_files(allocation.InFiles(directory), flag("only_non_sliding", only_non_sliding), keep)

    def _use_files(self, in_files: allocation.InFiles, only_non_sliding: bool, keep: bool) -> None:
        """Move keys and values to files from `in_files`, unless they lie there already."""
        self._keep = flag("keep", keep)
        self._lie_in(in_files, only_non_sliding)
        self.folder = in_files.folder

    @one_call_at_a_time
    def prefetch(self, layer_idx: SupportsIndex) -> None:
        """Start to load an offloaded layer in the background. `update` does this for the next layer."""
        allocation.prefetch(self._layer(layer_idx)._large_arrays())

    @one_call_at_a_time
    def flush(self) -> None:
        """Write offloaded rows to the disk, so that the system can free their memory at once."""
        for layer in self.layers:
            allocation.flush(layer._large_arrays())

    def close(self, keep: bool | None = None) -> None:
        """Free the files of an offloaded cache, with all tokens. A cache in memory stays as it is.

        Afterwards every call that reads or changes tokens raises KvkitError, in layers too; lengths are 0.

        Parameters
        ----------
        keep : bool, optional
            Whether to save the cache in its folder, for `open`; as `offload` was told if it is None. After
            an error of the disk the cache is still open, and an earlier saved file still there.
        """
        if self.folder is None:
            return
        with self._lock:
            if self._keep if keep is None else flag("keep", keep):
                self.save(self.folder / SAVED)
            self._forget_rows()
            self.folder, self._lock.closed = None, True

    def _forget_rows(self) -> None:
        """Drop all tokens and arrays of a cache that closes."""
        for layer in self.layers:
            layer._forget_rows()
            layer._share_lock(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
