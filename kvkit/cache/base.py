"""The interface of layers and caches, wherever their tokens lie: all that a caller needs to know."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar, cast

from numpy.typing import ArrayLike

from kvkit.checks.values import integer
from kvkit.errors import argument_error
from kvkit.runtime.locks import CallLock, LayerLock
from kvkit.typed import Array, Attended, Pair, States

Method = TypeVar("Method", bound=Callable[..., Any])


def one_call_at_a_time(method: Method) -> Method:
    """Decorate a method of a cache or layer so that other threads' calls wait for it."""

    @functools.wraps(method)
    def waiting(self: Any, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            return method(self, *arguments, **options)

    return cast(Method, waiting)


class BaseLayer(ABC):
    """Keys and values of one attention layer. Threads that call it wait for each other.

    Attributes
    ----------
    window : int or None
        How many tokens a query sees, itself included; None for all.
    takes_window : bool
        Whether `attend` takes the window of a call.
    croppable : bool
        Whether tokens can be dropped one after the other, down to the first that is recorded.
    record_past : bool
        Whether what would be dropped, or coded, is kept until the next crop.
    """

    _lock: LayerLock
    window: int | None = None
    takes_window = False
    croppable = True
    record_past = False

    @abstractmethod
    def update(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append the keys and values of new tokens; return those that their attention needs.

        Parameters
        ----------
        key_states : ndarray, shape [B, Hkv, q, Dk]
            float32, float16 or bfloat16, of any strides. The first call decides on dtype, B, Hkv, Dk and Dv;
            of a paged layer, whose cache has decided on the others, on B.
        value_states : ndarray, shape [B, Hkv, q, Dv]
            Of the same dtype.
        cache_position : array_like of int, shape [q], optional
            Consecutive positions of the new tokens; they follow the last token. Only a `StaticLayer` may
            also go back: then later tokens are dropped.

        Returns
        -------
        keys : ndarray, shape [B, Hkv, S, Dk]
        values : ndarray, shape [B, Hkv, S, Dv]
            Past and new tokens, see `get_mask_sizes`. Views of the cache, or each a `KVView` where they are
            codes or lie in blocks: not to be written, and valid until the next call that changes the layer.

        Raises
        ------
        KvkitError
            If an argument is wrong.
        CapacityError, OutOfBlocksError
            If there is no room. After any error the layer is as it was.
        """

    @abstractmethod
    def attend(
        self,
        query: Array,
        attention_mask: Array | None = None,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Array | None = None,
        return_lse: bool = False,
    ) -> Attended:
        """Attend with the queries of the last tokens, causally and within the layer's window.

        Keys and values are read where they lie; nothing of the size of the context is made. Query i of q is
        the token at position n - q + i when n tokens have been seen; so the queries of an update's last
        tokens alone are as good. Query head h uses key head ``h // (Hq // Hkv)``.

        Parameters
        ----------
        query : ndarray, shape [B, Hq, q, Dk]
            float32, float16 or bfloat16, of any strides.
        attention_mask : ndarray, optional
            bool [B, n]: which positions may be seen at all (padding may not). Or with 4 axes, right-aligned
            to [B, Hq, q, kv_length], where the first three may be 1: bool, or added to the scores, of the
            dtype of ``query`` or float32; kv_length is that of `get_mask_sizes`, as asked before the update.
            Columns of a static layer that hold no token may be left out.
        is_causal, window : bool and (int, int), optional
            Of paged layers only, as in `kvkit.multi_head_attention`; others are causal, each in its window.
        softmax_scale : float, optional
            Factor of the scores; 1 / sqrt(Dk) if None.
        softcap : float
            If not 0, scores become ``softcap * tanh(score / softcap)`` before masks are added.
        sinks : ndarray, shape [Hq], optional
            A score for each head that takes part in the softmax and has no value.
        return_lse : bool
            Whether the logarithms of the softmax denominators are returned too.

        Returns
        -------
        attn_output : ndarray, shape [B, Hq, q, Dv]
            Of the dtype of ``query``. In memory [B, q, Hq, Dv], so that swapping both axes back and joining
            the heads, as the next projection needs it, copies nothing.
        lse : ndarray of float32, shape [B, Hq, q]
            With ``return_lse``; -inf for a query that sees no key.

        Raises
        ------
        KvkitError
            If an argument is wrong, or if the window of a query has left the layer.

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
        """Return the number of tokens seen."""

    def get_max_length(self) -> int:
        """Return the most tokens that the layer holds; -1 for no limit."""
        return -1

    def get_mask_sizes(self, query_length: SupportsIndex) -> tuple[int, int]:
        """Return (kv_length, kv_offset): how many keys the next update returns, and the first's position."""
        begin, end = self._returned(self.get_seq_length(), integer("query_length", query_length, 0))
        return end - begin, begin

    def _returned(self, length: int, new: int) -> tuple[int, int]:
        """Return the positions [begin, end) that an update of `new` tokens after `length` returns."""
        return 0, length + new

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """B, rows of the batch; 0 before the first update."""

    @property
    def keys(self) -> States:
        """Stored keys, shape [B, Hkv, stored, Dk]; None before the first update."""
        return self.stored()[0] if self.batch_size else None

    @property
    def values(self) -> States:
        """Stored values, shape [B, Hkv, stored, Dv]; None before the first update."""
        return self.stored()[1] if self.batch_size else None

    @abstractmethod
    def stored(self) -> tuple[States, States]:
        """Stored keys and values, arrays [B, Hkv, stored, D]."""

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored, without room to grow."""
        return sum(side.nbytes for side in self.stored()) if self.batch_size else 0

    def activate_past_recording(self) -> None:  # noqa: B027  most layers have nothing to do
        """From now on keep what would be dropped or coded until the next crop; elsewhere nothing is."""


class BaseCache(ABC):
    """The keys and values of a model, in layers. Threads that call it wait for each other."""

    layers: list[Any]

    def __init__(self) -> None:
        self._lock = CallLock()

    def __len__(self) -> int:
        return len(self.layers)

    # Tokens come

    @abstractmethod
    def update(
        self, key_states: Array, value_states: Array, layer_idx: int, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append to layer ``layer_idx``."""

    def attend(
        self, query: Array, layer_idx: int, attention_mask: Array | None = None, **options: Any
    ) -> Attended:
        """Attend to layer ``layer_idx``, see the ``attend`` of layers.

        Of a call longer than its window a sliding layer gives the first tokens up as soon as another layer
        is updated, and a quantized one the originals of what it has coded; until then every query of the call
        can attend to all that it sees.
        """
        with self._lock:
            return self._layer(layer_idx).attend(query, attention_mask, **options)

    @abstractmethod
    def reserve(self, query_length: SupportsIndex) -> None:
        """Check, and make, room for so many more tokens in every layer: their updates cannot fail for it."""

    def _layer(self, layer_idx: SupportsIndex) -> Any:
        """Return a layer by its number."""
        number = integer("layer_idx", layer_idx, 0)
        return self.layers[number] if number < len(self.layers) else self._missing(number)

    def _missing(self, number: int) -> Any:
        """Refuse, or make, the layer of a number that there is not."""
        raise argument_error("layer_idx", f"a layer of {len(self.layers)}", number)

    # What is there

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has seen; 0 if there is no such layer."""
        number = integer("layer_idx", layer_idx, 0)
        return self.layers[number].get_seq_length() if number < len(self.layers) else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the most tokens that a layer, or the largest layer, holds; -1 for no limit."""
        if layer_idx is not None:
            return self._layer(layer_idx).get_max_length()
        lengths = [layer.get_max_length() for layer in self.layers]
        return -1 if -1 in lengths else max(lengths, default=-1)

    def get_mask_sizes(self, query_length: SupportsIndex, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) of the next update of so many tokens; call it before that update."""
        return self._layer(layer_idx).get_mask_sizes(query_length)

    # Tokens go, and the batch changes

    @abstractmethod
    def crop(self, length: int) -> None:
        """Drop the last tokens of every layer: keep ``length``, or if negative drop so many; 0 drops none."""

    @one_call_at_a_time
    def reorder(self, indices: ArrayLike) -> None:
        """Let row b of the batch become what row ``indices[b]`` was; there may be any number of indices."""
        self._select(indices)

    select = reorder_cache = batch_select_indices = reorder

    @abstractmethod
    def _select(self, indices: ArrayLike) -> None:
        """Reorder the rows of the batch, which `reorder` locks the cache for."""

    @one_call_at_a_time
    def repeat(self, repeats: int) -> None:
        """Repeat every row of the batch: rows A, B become A, A, B, B."""
        self._repeat(integer("repeats", repeats, 1))

    batch_repeat_interleave = repeat

    @abstractmethod
    def _repeat(self, repeats: int) -> None:
        """Repeat the rows of the batch, which `repeat` locks the cache for."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every token."""

    @one_call_at_a_time
    def activate_past_recording(self) -> None:
        """Let layers keep what would leave their window until the next `crop`, which may then go back."""
        for layer in self.layers:
            layer.activate_past_recording()

    # To other forms

    @abstractmethod
    def to_legacy_cache(self) -> tuple[Pair, ...]:
        """Return a tuple over layers of (keys, values), copies of shape [B, Hkv, n, D]."""
