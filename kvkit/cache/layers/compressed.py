"""Define the layers of DeepSeek V4: a window of rows, and rows that each pool many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

import kvkit.compressed
import kvkit.mla
from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers import requests
from kvkit.cache.layers.changes import whole
from kvkit.cache.layers.layer import Layer
from kvkit.cache.layers.positions import (
    Rearrangement,
    RopeLike,
    RowPositions,
    check_rotation,
    planner,
    rotation_of,
)
from kvkit.cache.stores.allocation import copy_of
from kvkit.cache.stores.compressed import (
    PAGE,
    CompressedForm,
    CompressedStore,
    IndexKeys,
    RowPool,
    moved_ring,
)
from kvkit.cache.stores.span import Span
from kvkit.checks.compressed import rope_at_end
from kvkit.checks.values import checked_format, integer, positive_number
from kvkit.errors import DroppedTokensError, argument_error, check_shape, describe, in_other_order, multiples
from kvkit.formats import BY_NAME, FLOATS
from kvkit.indexer import indexer_scores, topk_rows
from kvkit.typed import Array, Attended, States

EPS = 1e-6
SLACK = 16  # tokens of an update that a ring takes without a new array
CODED_DIMS = 512, 64  # of rows that can be bytes of ds_v4
COMPRESSORS, INDEX_ARRAYS = ("compressor", "indexer"), ("index_keys", "index_scales")  # names in files
Projected = tuple[Array, Array]  # kv and gate of new tokens, [B, q, E] each


class PoolingWeights(NamedTuple):
    """Holds the weights by which a compressor pools tokens."""

    ape: Array  # [ratio, E]
    norm: Array  # [dim]


class CompressedLayer(Layer):
    """A layer of DeepSeek V4, whose tokens attend to a window of rows and to compressed rows.

    A row is key and value of all heads. Without `ratio` there is only the window. A compressed row pools
    `ratio` tokens. With index keys (CSA) it pools the tokens of the row before too, and a query reads the
    `index_topk` rows that its indexer chooses; else (HCA) it reads all. States hold the last tokens.

    Parameters
    ----------
    dim, rope_dim : int
        Elements of a row; the last `rope_dim` are rotated.
    window : int
        How many tokens a query attends to by their own rows, itself included.
    ratio : int
        Tokens of a compressed row: 4 (CSA) and 128 (HCA) in DeepSeek V4; 0 for none.
    index_dim, index_topk : int, optional
        Elements of an index key, and how many rows a query chooses; both or none.
    drafts : int
        How many of the last tokens `crop` can take back. It can take back all in any case.
    format : str, optional
        ``"ds_v4"`` codes rows once, as DeepSeek's 584 bytes, and index keys as 128 codes with a scale.
    eps : float
        Added to the mean of squares in the norm of pooled rows.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> from kvkit.cache import CompressedLayer
    >>> rng, layer = np.random.default_rng(0), CompressedLayer(8, 4, window=6, ratio=4)
    >>> ape, norm = np.zeros((4, 8), np.float32), np.ones(8, np.float32)
    >>> layer.set_weights((ape, norm), rope=kvkit.Rope(4, interleaved=True))
    >>> row, kv, gate = rng.standard_normal((3, 1, 1, 11, 8), np.float32)     # [B, 1, tokens, dim]
    >>> rows, _ = layer.update(row, (kv[:, 0], gate[:, 0]))
    >>> layer.window_rows.shape, layer.rows.shape, layer.get_seq_length()
    ((1, 5, 8), (1, 2, 8), 11)
    >>> layer.attend(rng.standard_normal((1, 2, 11, 8), np.float32)).shape    # then kvkit.rope_back
    (1, 2, 11, 8)
    """

    _attributes = Layer._attributes.extended("floor", "weights")
    _reorders_in_place = False
    _why_kept = _why_not_joined = "compressed rows hold tokens of a window"

    def __init__(
        self,
        dim: int = 512,
        rope_dim: int = 64,
        window: int = 128,
        ratio: int = 0,
        index_dim: int | None = None,
        index_topk: int | None = None,
        drafts: int = 0,
        *,
        format: str | None = None,
        eps: float = EPS,
    ) -> None:
        self.dim, self.rope_dim = integer("dim", dim, 1), integer("rope_dim", rope_dim, 0, dim)
        self.near, self.ratio = integer("window", window, 1), integer("ratio", ratio, 0)
        if (index_dim is None) != (index_topk is None) or (index_dim is not None and not self.ratio):
            wanted = "both index_dim and index_topk beside a ratio, or none of them"
            raise argument_error("index_dim", wanted, describe(index_dim))
        self.index_dim = 0 if index_dim is None else integer("index_dim", index_dim, 1)
        self.index_topk = 0 if index_topk is None else integer("index_topk", index_topk, 1)
        self.drafts, self.format = integer("drafts", drafts, 0), format
        if format is not None and (format != "ds_v4" or (self.dim, self.rope_dim) != CODED_DIMS):
            raise argument_error("format", "None, or ds_v4 for rows of 512 with 64 rotated", repr(format))
        if not self.ratio:
            self.window = self.near  # else a query attends to all tokens, though to most in pools
        self.floor = 0  # the fewest tokens but none that a crop can leave
        self.weights: tuple[PoolingWeights, ...] = ()
        self.eps = positive_number("eps", eps)
        super().__init__()

    def _describe(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {"dim": self.dim, "rope_dim": self.rope_dim, "window": self.near}
        sizes |= {"ratio": self.ratio, "index_dim": self.index_dim or None, "drafts": self.drafts}
        sizes |= {"index_topk": self.index_topk or None, "format": self.format, "eps": self.eps}
        return sizes

    @property
    def _past(self) -> int:
        """Return how many tokens a state needs: `ratio`, or twice as many if windows overlap."""
        return self.ratio * (2 if self.index_dim else 1)

    @one_call_at_a_time
    def set_weights(
        self,
        compressor: tuple[Array, Array],
        indexer: tuple[Array, Array] | None = None,
        *,
        rope: Any = None,
    ) -> None:
        """Set the model's weights that pool tokens, which are saved with the layer.

        Parameters
        ----------
        compressor : tuple (ape [ratio, E], norm_weight [dim])
            As in `kvkit.compress_tokens`; E is dim, with an indexer 2 * dim.
        indexer : tuple (ape [ratio, 2 * index_dim], norm_weight [index_dim]), optional
            Those of index keys.
        rope : Rope or "none", optional
            How rows and index keys are rotated, if the layer does not know it yet.
        """
        if not self.ratio or (indexer is None) == bool(self.index_dim):
            wanted = "a pair for the compressor" + (", one for the indexer" if self.index_dim else " alone")
            raise argument_error(self.name, wanted if self.ratio else "no weights without a ratio", "others")
        pairs = [("compressor", compressor, self.dim)]
        pairs += [("indexer", indexer, self.index_dim)] if indexer is not None else []
        for name, pair, dim in pairs:
            shapes = [(self.ratio, dim * self._past // self.ratio), (dim,)]
            if not isinstance(pair, tuple) or [np.shape(each) for each in pair] != shapes:
                raise argument_error(name, f"a pair of arrays {shapes[0]} and {shapes[1]}", describe(pair))
            for i, array in enumerate(pair):
                checked_format(f"{name}[{i}]", array, FLOATS, 2 - i)
        if rope is not None:
            check_rotation(rope)
        weights = tuple(PoolingWeights(*pair) for _, pair, _ in pairs)
        self.rope, self.weights = self.rope if rope is None else rope, weights

    # Adding tokens

    @one_call_at_a_time
    @whole
    def update(  # type: ignore[override]  # a row in place of keys, what a compressor takes in place of values
        self,
        row: Array,
        compressor: Projected | None = None,
        cache_position: ArrayLike | None = None,
        *,
        indexer: Projected | None = None,
    ) -> tuple[States, States]:
        """Append the rows of new tokens, and pool them.

        Parameters
        ----------
        row : ndarray, shape [B, 1, q, dim]
            float32, float16 or bfloat16: normed and rotated.
        compressor : tuple (kv [B, q, E], gate [B, q, E]), optional
            The projections that become compressed rows, see `kvkit.compress_tokens`; required with a ratio.
        cache_position : array_like of int, shape [q], optional
            Consecutive positions of the new tokens, after the last one.
        indexer : tuple (kv [B, q, 2 * index_dim], gate), optional
            The projections that become index keys; required with them.

        Returns
        -------
        keys, values : ndarray, shape [B, 1, S, dim]
            One array twice: the rows of the window that the new tokens attend to.

        Raises
        ------
        KvkitError
            If an argument is wrong, or weights are missing. Then the layer has not changed.
        """
        dtype, new = self._checked_rows(row), row.shape[2]
        inputs = self._checked_inputs(compressor, indexer, (row.shape[0], new))
        before = self.span.length
        if cache_position is not None:
            self._first_new(cache_position, new)
        length = before + new
        floor = self.floor if self._record_past else max(self.floor, length - self.drafts)
        begin = max(0, before - self.near + 1)
        span = Span(length, max(self.span.oldest, self._first_of(min(length, floor))), begin, 0, before)
        if self.store is None:
            form = CompressedForm(row.shape[0], self.format or dtype.name, self.dim)
            store = self._empty(form, length - span.first, length, length - floor)
        else:
            store = self._with_room(span, floor)
        store.window.write(np.arange(before, length) % store.window.rows, row[:, 0])
        for number, (kv, gate) in enumerate(inputs):
            self._pool(store, number, kv, gate)
        self.floor = floor
        self._set_store(store, span)
        rows = store.window.read(np.arange(begin, length) % store.window.rows)[:, None]
        return rows, rows

    def _checked_rows(self, row: Array) -> np.dtype[Any]:
        """Check new rows; return their dtype."""
        dtype = checked_format("row", row, FLOATS, 4).dtype
        batch, frozen = self.batch_size, None if self.store is None else self.store.geometry.fmt
        check_shape("row", row, (batch or multiples(1), 1, None, self.dim))
        if frozen not in (None, self.format, dtype.name):
            raise argument_error("row", f"an array of {frozen}", describe(row))
        return dtype

    def _checked_inputs(self, compressor: Any, indexer: Any, tokens: tuple[int, ...]) -> list[Projected]:
        """Check what compressors take of new tokens, arrays [*tokens, E]; return it for each compressor."""
        inputs, overlap = [], 2 if self.index_dim else 1
        given = ("compressor", compressor, self.dim * bool(self.ratio)), ("indexer", indexer, self.index_dim)
        for name, pair, dim in given:
            shape = *tokens, dim * overlap
            if not dim and pair is not None:
                raise argument_error(name, "None for this layer", describe(pair))
            if dim and not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise argument_error(name, f"a pair (kv, gate) of arrays {shape}", describe(pair))
            if dim:
                formats = [checked_format(name, each, FLOATS, len(shape)) for each in pair]
                for part, each in zip(("kv", "gate"), pair, strict=True):
                    check_shape(f"{part} of {name}", each, shape, ("batch", "tokens", "dim"))
                if formats[0] is not formats[1]:
                    raise argument_error(name, "kv and gate of one dtype", f"{formats[0]} and {formats[1]}")
                inputs.append((pair[0], pair[1]))
        if inputs and not self.weights:
            raise argument_error(self.name, "a layer with weights (call set_weights first)", "none")
        for weights in self.weights[: len(inputs)]:
            self._rope_of(len(weights.norm))
        return inputs

    def _rope_of(self, dim: int) -> Any:
        """Return how the last elements of rows or index keys of `dim` are rotated."""
        if self.rope is None:
            raise argument_error("rope", "a Rope or 'none' (set_weights(..., rope=rope))", "None")
        return self.rope if isinstance(self.rope, str) else rope_at_end(replace(self.rope, begin=0), dim)

    def _pool(self, store: CompressedStore, number: int, kv: Array, gate: Array) -> None:
        """Pool new tokens [B, q, E] with compressor `number`; write rows or index keys, and the state."""
        batch, new, width = kv.shape
        ape, norm = self.weights[number]
        before = self.span.length
        rows, _ = kvkit.compressed.compress_tokens(
            kv.reshape(-1, width), gate.reshape(-1, width), ape, store.states[number], ratio=self.ratio,
            overlap=bool(self.index_dim), norm_weight=norm, rope=self._rope_of(len(norm)), eps=self.eps,
            positions=np.tile(np.arange(before, before + new), batch), starts=np.arange(batch + 1) * new,
        )  # fmt: skip
        first, end = before // self.ratio, (before + new) // self.ratio
        made = rows.reshape(batch, end - first, norm.shape[0])
        if number and store.index_keys is not None:
            store.index_keys.write(slice(first, end), made)
        elif store.rows is not None:
            store.rows.write(np.arange(first, end), made)

    def _empty(self, form: CompressedForm, rows: int, length: int, held: int) -> CompressedStore:
        """Return an empty store: `rows` rows of a window, `length` tokens, states with `held` more."""
        allocate, batch = self.allocate, form.batch
        dtype = np.uint8 if self.format else BY_NAME[form.fmt].dtype
        window = RowPool.of(batch, self._ring(rows), self.dim, dtype, allocate)
        if not self.ratio:
            return CompressedStore(form, window)
        count = length // self.ratio + PAGE
        pool, keys = RowPool.of(batch, count, self.dim, dtype, allocate), None
        widths = [self.dim * self._past // self.ratio]
        if self.index_dim:
            keys = IndexKeys.of(batch, count, self.index_dim, dtype, allocate)
            widths.append(self.index_dim * self._past // self.ratio)
        ring = self._past + SLACK + max(held, self.drafts)
        states = tuple(allocate((batch, ring, 2, width), np.float32) for width in widths)
        return CompressedStore(form, window, pool, keys, states)

    def _ring(self, rows: int) -> int:
        """Return the size of a ring for `rows` rows of the window, with room for a few more."""
        return SLACK + max(rows, self.near + self.drafts)

    def _with_room(self, span: Span, floor: int) -> CompressedStore:
        """Return a store with room for the tokens of a span, of which a crop can leave `floor`.

        Rows that the present tokens need are not overwritten, whatever becomes of the call: rings are large
        enough for old and new tokens, or they are new arrays.
        """
        before, length, store, allocate = self.span.length, span.length, self.store, self.allocate
        window, rows = store.window, length - span.first
        size = self._ring(rows + rows // 2 if self._record_past else rows)
        if length - self.span.first > window.rows or window.rows > 2 * size + PAGE:
            store = replace(store, window=window.ring(size, allocate, np.arange(span.first, before)))
        if not self.ratio:
            return store
        count, used = length // self.ratio, before // self.ratio
        if count > store.rows.rows:
            store = replace(store, rows=store.rows.grown(count + count // 2 + PAGE, allocate, used))
        keys = store.index_keys
        if keys is not None and count > keys.keys.shape[1]:
            store = replace(store, index_keys=keys.grown(count + count // 2 + PAGE, allocate, used))
        if length - max(0, self.floor - self._past) > store.states[0].shape[1]:
            held, more = np.arange(max(0, min(floor, before) - self._past), before), length - floor
            ring = self._past + SLACK + max(self.drafts, more + more // 2 if self._record_past else more)
            states = tuple(moved_ring(state, ring, held, allocate) for state in store.states)
            store = replace(store, states=states)
        return store

    def _first_of(self, length: int) -> int:
        """Return the first position whose row the next query after `length` tokens attends to."""
        return max(0, length - self.near + 1)

    @one_call_at_a_time
    def reserve(self, query_length: SupportsIndex) -> None:
        """Make room for the rows of `query_length` more tokens."""
        length = self.span.length + integer("query_length", query_length, 0)
        if self.store is not None and self.ratio and length // self.ratio > self.store.rows.rows:
            count, used = length // self.ratio, self._count()
            store = replace(self.store, rows=self.store.rows.grown(count, self.allocate, used))
            if store.index_keys is not None:
                store = replace(store, index_keys=store.index_keys.grown(count, self.allocate, used))
            self._set_store(store, self.span)

    @one_call_at_a_time
    def _release_undo(self) -> None:
        """Move the window to a smaller ring, if the last update needed a large one."""
        span = self.span
        if self.store is not None and not self._record_past:
            usual = self._ring(span.length - span.oldest)
            if self.store.window.rows > 2 * usual + PAGE:
                ring = self.store.window.ring(usual, self.allocate, np.arange(span.oldest, span.length))
                begin = max(span.begin, span.oldest)
                self._set_store(
                    replace(self.store, window=ring), span._replace(begin=begin, before=span.length)
                )

    # Attention

    def attend(  # type: ignore[override]  # has an index in place of a mask
        self,
        query: Array,
        attn_mask: Array | None = None,
        *,
        index: tuple[Array, Array] | None = None,
        sinks: Array | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
    ) -> Attended:
        """Attend with the queries of the last tokens to their window and to compressed rows.

        Parameters
        ----------
        query : ndarray, shape [B, H, q, dim]
            Normed and rotated; float32, float16 or bfloat16.
        attn_mask : None
            Refused: windows of compression count tokens, so padding would shift them.
        index : tuple (queries [B, q, heads, index_dim], weights [B, q, heads]), optional
            The rotated queries and the weights of the indexer; required with index keys.
        sinks : ndarray, shape [H], optional
            One more score for each head. It is part of the softmax and has no value.
        softmax_scale : float, optional
            Factor of the scores; dim ** -0.5 if None.
        return_lse : bool

        Returns
        -------
        attn_output : ndarray, shape [B, H, q, dim]
            In the dtype of the queries. Rows are values with their rotation: `kvkit.rope_back` takes it off.
        lse : ndarray of float32, shape [B, H, q]
            If ``return_lse``, with the sinks.
        """
        with self._lock:
            checked_format("query", query, FLOATS, 4)
            batch, heads, new, dim = query.shape
            if attn_mask is not None:
                raise argument_error("attn_mask", "None (windows of compression count tokens)", "a mask")
            if self.store is None:
                raise argument_error(self.name, "stored tokens (call update before attend)", "none")
            check_shape("query", query, (self.batch_size, None, None, self.dim))
            first = self.span.length - new
            if first < 0 or max(0, first - self.near + 1) < self.span.begin:
                most = self.span.length - self.span.before
                hint = in_other_order(query.shape, (batch, None, range(1, most + 1), dim))
                raise argument_error("query", f"queries of the last update, at most {most}", f"{new}{hint}")
            scale = self._scale_of(softmax_scale)
            places = np.arange(first, self.span.length)
            extra = self._chosen(places, index)
            window = self.store.window
            near = places[:, None] - np.arange(min(self.near, self.span.length))[::-1]
            slots = window.slots(np.where(near < 0, -1, near % window.rows))
            output, lse = kvkit.mla.mla_attention(
                query.swapaxes(1, 2).reshape(batch * new, heads, dim), window.pool, softmax_scale=scale,
                value_dim=dim, indices=slots.reshape(batch * new, -1), extra=extra, sinks=sinks,
                format=self.format, return_lse=True,
            )  # fmt: skip
            output, lse = (x.reshape(batch, new, *x.shape[1:]).swapaxes(1, 2) for x in (output, lse))
            return (output, lse) if return_lse else output

    def _chosen(self, places: Array, index: Any) -> Any:
        """Return the pool of compressed rows, and the slots of each query's; None if there are none."""
        self._check_index(index, (self.batch_size, len(places)))
        if not self.ratio:
            return None
        ready, batch, new = (places + 1) // self.ratio, self.batch_size, len(places)
        rows: RowPool = self.store.rows
        if index is None:
            every = np.arange(ready[-1] if new else 0)
            slots = rows.slots(np.where(every < ready[:, None], every, -1))
        else:
            slots = self._best(index, ready)
        if not slots.shape[-1]:
            return None
        return rows.pool, slots.reshape(batch * new, -1), None

    def _check_index(self, index: Any, shape: tuple[int, ...]) -> None:
        """Check the queries and the weights of the indexer, for queries of a shape."""
        if (index is None) == bool(self.index_dim):
            wanted = "a pair (queries, weights)" if self.index_dim else "None for a layer without index keys"
            raise argument_error("index", wanted, describe(index))
        if index is None:
            return
        if not isinstance(index, (tuple, list)) or len(index) != 2:
            raise argument_error("index", "a pair (queries, weights)", describe(index))
        queries, weights = index
        checked_format("index[0]", queries, FLOATS, len(shape) + 2)
        checked_format("index[1]", weights, FLOATS, len(shape) + 1)
        axes = ("batch", "tokens", "heads", "dim")[2 - len(shape) :]
        check_shape("queries of index", queries, (*shape, None, self.index_dim), axes)
        check_shape("weights of index", weights, (*shape, queries.shape[-2]), axes[:-1])
        if weights.dtype != queries.dtype:
            raise argument_error(
                "index", "queries and weights of one dtype", f"{queries.dtype} and {weights.dtype}"
            )

    def _scale_of(self, softmax_scale: float | None) -> float:
        """Return the checked factor of scores."""
        return self.dim**-0.5 if softmax_scale is None else positive_number("softmax_scale", softmax_scale)

    def _best(self, index: Any, ready: Array) -> Array:
        """Return the slots [B, q, k] of the rows that queries choose among their first `ready`."""
        batch, new, keys = self.batch_size, len(ready), self.store.index_keys
        table = np.repeat(np.arange(batch), new)[:, None]
        queries, weights = (x.reshape(batch * new, *x.shape[2:]) for x in index)
        slots = chosen_slots(queries, weights, np.tile(ready, batch), keys.arrays(), table, self.index_topk)
        page = keys.keys.shape[1]
        places: Array = np.where(slots < 0, -1, slots % page).reshape(batch, new, slots.shape[1])
        first = np.arange(batch)[:, None, None] * self.store.rows.rows
        return np.where(places < 0, -1, places + first)

    # Sizes and rows

    @property
    def window_rows(self) -> Array | None:
        """Return the stored rows of the window, [B, S, dim]; None before the first update."""
        if self.store is None:
            return None
        rows: Array = self.store.window.read(self._places())
        return rows

    def _places(self) -> Array:
        """Return the places of stored rows in the window's ring."""
        return np.arange(self.span.oldest, self.span.length) % self.store.window.rows

    @property
    def rows(self) -> Array | None:
        """Return the compressed rows, [B, n, dim], decoded if they are codes; None without a ratio."""
        if self.store is None or self.store.rows is None:
            return None
        rows: Array = self.store.rows.first(self._count())
        return rows

    def _count(self) -> int:
        """Return the number of compressed rows."""
        return self.span.length // self.ratio if self.ratio else 0

    @property
    def index_keys(self) -> Array | None:
        """Return the index keys, [B, n, index_dim], decoded if they are codes; None if there are none."""
        if self.store is None or self.store.index_keys is None:
            return None
        keys: Array = self.store.index_keys.read(self._count())
        return keys

    @property
    def states(self) -> tuple[Array, ...]:
        """Return the states of the compressor and the indexer, [B, tokens, 2, E], the last tokens' ones."""
        if self.store is None:
            return ()
        held = np.arange(max(0, self.span.length - self._past), self.span.length)
        return tuple(state[:, held % state.shape[1]] for state in self.store.states)

    def _returned(self, length: int, new: int) -> tuple[int, int]:
        return max(0, length - self.near + 1), length + new

    def _stored(self) -> tuple[States, States]:
        rows = self.store.window.read(self._places())[:, None]
        return rows, rows

    @property
    def nbytes(self) -> int:
        if self.store is None:
            return 0
        row = self.store.window.stored(np.zeros(1, int)).nbytes
        size = row * (self.stored_tokens + self._count())
        if self.store.index_keys is not None:
            size += sum(array[:, 0].nbytes for array in self.store.index_keys.arrays()) * self._count()
        return int(size + sum(state[:, 0].nbytes * self._past for state in self.store.states))

    # Removing tokens and changing the batch

    def _length_after_crop(self, length: int, call: str = "crop") -> int:
        left = requests.length_after_crop(length, self.span.length)
        if left not in (0, self.span.length) and left < self.floor:
            wanted = (
                f"0 or at least {self.floor} tokens to stay (drafts={self.drafts}; states hold no others)"
            )
            raise argument_error(self.name, wanted, f"{call} to {left}", DroppedTokensError)
        return left

    @one_call_at_a_time
    def crop(self, length: int) -> None:
        """Drop the last tokens: drafts, recorded ones, or all.

        Parameters
        ----------
        length : int
            As in other layers. At least `floor` tokens must stay, or none.
        """
        left, span = self._length_after_crop(length), self.span
        floor = max(self.floor, left - self.drafts) if left else 0
        oldest = max(span.oldest, self._first_of(floor)) if left else 0
        self.span, self.floor = Span(left, oldest, min(span.begin, oldest), 0, left), floor

    def _plan(self, call: str, *arguments: Any, rope: RopeLike = None, **options: Any) -> Rearrangement:
        # Over all tokens, because compressed rows hold those that have left the window.
        length = self.span.length
        now = RowPositions.contiguous(0, length)
        rotation = rotation_of(rope, self.rope, None if self.store is None else self.dim, False)
        plan = planner(call)(now, rotation, *arguments, **options)
        if plan.crops:
            self._length_after_crop(plan.after.length - length, call)
        elif plan.changes(now):
            raise argument_error(self.name, f"a call that moves no tokens ({self._why_kept})", call)
        return plan

    def _rearrange(self, plan: Rearrangement) -> None:
        """Carry out a plan, which can only drop the last tokens."""
        if plan.crops and plan.after.length < self.span.length:
            self.crop(plan.after.length - self.span.length)

    def _take_rows(self, indices: Array) -> None:
        if self.store is not None:
            self._set_store(self.store.mapped(lambda x: self._copied(x[indices])), self.span.without_undo())

    def _copied(self, array: Array) -> Array:
        return copy_of(array, self.allocate)

    def _forget_rows(self) -> None:
        self.floor = 0
        super()._forget_rows()

    activate_past_recording = Layer._set_past_recording

    # Files

    def _arrays(self) -> dict[str, Array]:
        weights = {
            f"weights.{name}.{field}": array
            for name, each in zip(COMPRESSORS, self.weights, strict=False)
            for field, array in each._asdict().items()
        }
        if self.store is None:
            return weights
        store, held = self.store, np.arange(self._saved_from(), self.span.length)
        arrays = weights | {
            "window": store.window.stored(held % store.window.rows),
            "floor": np.array([self.floor]),
        }
        if store.rows is not None:
            arrays["rows"] = store.rows.stored(np.arange(self._count()))
        if store.index_keys is not None:
            for name, array in zip(INDEX_ARRAYS, store.index_keys.arrays(), strict=False):
                arrays[name] = array[:, : self._count()]
        tokens = np.arange(max(0, min(self.floor, self.span.length) - self._past), self.span.length)
        for name, state in zip(COMPRESSORS, store.states, strict=False):
            arrays[f"states.{name}"] = state[:, tokens % state.shape[1]]
        return arrays

    def _saved_from(self) -> int:
        return min(self.span.oldest, max(self.span.begin, self.span.length - self.near))

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        pairs: list[Any] = [
            tuple(arrays[f"weights.{name}.{field}"] for field in PoolingWeights._fields)
            for name in COMPRESSORS
            if f"weights.{name}.ape" in arrays
        ]
        if pairs:
            self.set_weights(*pairs)
        if not length and "window" not in arrays:
            return
        window, floor = arrays["window"], int(arrays["floor"][0])
        states = [arrays[f"states.{name}"] for name in COMPRESSORS[: bool(self.ratio) + bool(self.index_dim)]]
        batch, count, first = len(window), length // self.ratio if self.ratio else 0, length - window.shape[1]
        if not self.format:
            checked_format("window", window, FLOATS, 3)
        tokens = length - max(0, floor - self._past)
        oldest = self._first_of(floor)
        whole_states = all(state.shape[:2] == (batch, tokens) for state in states)
        if not whole_states or not 0 <= floor <= length or not 0 <= first <= oldest:
            raise argument_error(self.name, f"all rows that {length} tokens need", describe(window))
        form = CompressedForm(batch, self.format or window.dtype.name, self.dim)
        store = self._empty(form, length - first, length, tokens)
        store.window.write_stored(np.arange(first, length) % store.window.rows, window)
        if store.rows is not None:
            store.rows.write_stored(np.arange(count), arrays["rows"])
        if store.index_keys is not None:
            for name, array in zip(INDEX_ARRAYS, store.index_keys.arrays(), strict=False):
                array[:, :count] = arrays[name]
        for ring, state in zip(store.states, states, strict=True):
            ring[:, np.arange(length - tokens, length) % ring.shape[1]] = state
        self.floor = floor
        self._set_store(store, Span(length, oldest, first, 0, length))

    # Where the arrays lie

    def _copy_store(self) -> None:
        if self.store is not None:
            self._set_store(self.store.mapped(self._copied), self.span)

    def _large_arrays(self) -> Iterable[Array]:
        return () if self.store is None else list(self.store.arrays())


def chosen_slots(
    queries: Array, weights: Array, ready: Array, keys: list[Array], tables: Array, topk: int
) -> Array:
    """Return the slots [T, k] of the rows that each query chooses among its first `ready`; -1 after them.

    `queries` are [T, heads, dim], `keys` a pool [blocks, page, dim], and scales if keys are codes. Each query
    has a table of its own, so that the causal rule of operators leaves it `ready` rows.
    """
    count = min(topk, int(ready.max(initial=0)))
    if not count:
        return np.full((len(queries), 0), -1)
    starts, scale = np.arange(len(queries) + 1), keys[1] if len(keys) > 1 else None
    scores = indexer_scores(queries, keys[0], weights, tables, ready, starts, key_scale=scale)
    return topk_rows(scores, count, tables, keys[0].shape[1], starts)


def check_drafts(drafts: Any, pooled: bool) -> int:
    """Return a checked number of drafts, of a model that has compressed rows or has none."""
    if (count := integer("drafts", drafts, 0)) and not pooled:
        raise argument_error("drafts", "0 for a model without compressed rows (crop takes back any)", count)
    return count
