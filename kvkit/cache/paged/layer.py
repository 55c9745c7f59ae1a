"""Define the layers and the batch of a paged cache: sequences of one length, [batch, heads, tokens, dim]."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from kvkit import cpu
from kvkit.cache.base import BaseLayer, MovableTokens, one_call_at_a_time
from kvkit.cache.blocks.changes import Guard, whole_or_refused
from kvkit.cache.layers import requests
from kvkit.cache.layers.attention import check_mask_axes, mask_of_stored
from kvkit.cache.layers.positions import RowPositions, pieces_array
from kvkit.cache.paged.segments import check_window
from kvkit.cache.paged.step import fill_results
from kvkit.cache.stores.memory import Geometry, check_geometry
from kvkit.cache.stores.view import views_of
from kvkit.calls.prepared import form_of
from kvkit.checks import attention, masks
from kvkit.checks.arguments import Scoring
from kvkit.checks.values import checked_format, flag, integer, one_piece
from kvkit.errors import CACHE_AXES, argument_error, check_shape, multiples
from kvkit.formats import FLOATS
from kvkit.runtime.locks import LayerLock
from kvkit.typed import Array, Attended, States


class Batch(MovableTokens):
    """Holds the sequences of a batch, and the open step that appends to all layers.

    They have the same positions: tokens are removed and moved in all sequences and layers at once.
    """

    def __init__(self, cache: Any, lock: LayerLock) -> None:
        self._cache, self._lock = cache, lock
        self.sequences: list[Any] = []
        self.step: Any = None  # the last `PagedStep`, while its index tensors are valid
        self.changes = 0

    def _append(self, batch: int, tokens: int, layer_idx: int) -> Any:
        """Return the step in which a layer gets `tokens`: the open step of earlier layers, or a new one."""
        step = self.step
        if step is not None and step.index.is_open:
            if tokens != step.index.max_seqlen:
                wanted = f"{step.index.max_seqlen} tokens, as in other layers"
                raise argument_error("key_states", wanted, tokens)
            step._to_write(layer_idx)  # raises if the layer has these tokens
            return step
        sequences = self.sequences or [self._cache.blocks.add() for _ in range(batch)]
        self.step = self._cache.begin_step([(seq, tokens) for seq in sequences])
        self.sequences = sequences
        return self.step

    def _abandon_step(self) -> None:
        """Abandon a step that some layers have not written, because the rows will change."""
        if self.step is not None and self.step.index.is_open:
            self.step.abandon()
        self._forget_step()

    def _forget_step(self) -> None:
        """Forget the last step, because the rows have changed or moved."""
        self.step, self.changes = None, self.changes + 1

    def _tables(self) -> Any:
        """Return a step with the page tables of the rows: the last one, or one without new tokens."""
        if self.step is None:
            self.step = self._cache._reading_step(self.sequences)
        return self.step

    @whole_or_refused
    def reserve(self, tokens: SupportsIndex) -> None:
        self._cache.begin_step([(seq, tokens) for seq in self.sequences]).abandon()
        self.step = None

    def _check_crop(self, length: int) -> None:
        """Raise the error that `crop` would raise."""
        integer("length", length, -self.sequences[0].next_position if self.sequences else 0)

    def _check_reorder(self, indices: ArrayLike) -> None:
        """Raise the error that `reorder` would raise."""
        requests.check_rows(indices, len(self.sequences))

    def _check_reset(self) -> None:
        """Raise the error that `reset` would raise: none."""

    def _check_compress(self, *arguments: Any, **options: Any) -> None:
        """Raise the error that `compress` would raise."""
        self._cache._check_compress(self, *arguments, **options)

    @whole_or_refused
    def crop(self, length: int) -> None:
        self._check_crop(length)
        self._abandon_step()
        for seq in self.sequences:
            self._cache.blocks.crop(seq, length)

    @whole_or_refused
    def reorder(self, indices: ArrayLike) -> None:
        rows = requests.check_rows(indices, len(self.sequences))
        if self.sequences:
            self._abandon_step()
            selected = [self._cache.blocks.fork(self.sequences[i]) for i in rows.tolist()]
            self.reset()
            self.sequences = selected

    @whole_or_refused
    def reset(self) -> None:
        self._abandon_step()
        for seq in self.sequences:
            self._cache.blocks.free(seq)
        self.sequences = []

    def _plan(self, call: str, *arguments: Any, **options: Any) -> Any:
        return self._cache._plan_for(self.sequences, call, *arguments, **options)

    @whole_or_refused
    def _rearrange(self, plan: Any) -> None:
        self._cache._rearrange(plan)
        self._forget_step()

    @property
    def _store(self) -> Any:
        """Return the arrays of the cache."""
        return self._cache.store

    @property
    def _guard(self) -> Guard:
        """Return what says whether all changes of the blocks have ended."""
        return self._cache.blocks._guard

    @property
    def _has_open_step(self) -> bool:
        """Return whether a step is open, of these rows or of other sequences."""
        return self._cache.blocks.open_step is not None

    def _abandon_open_step(self) -> None:
        """Abandon the open step, which a failed update has begun."""
        self._cache.blocks._abandon_open_step()
        self._forget_step()

    @property
    def layers(self) -> Any:
        """Return the layers of the cache."""
        return self._cache.layers

    def compress(self, scorer: Any, **options: Any) -> Any:
        """Keep the tokens with the best scores in all rows and layers, see `PagedCache.compress`."""
        return self._cache.compress(self, scorer, **options)


def heads_first(results: Attended) -> Attended:
    """Swap tokens and heads in the outputs of attention, and in lse if there is one."""
    if isinstance(results, tuple):
        return tuple(result.swapaxes(1, 2) for result in results)
    return results.swapaxes(1, 2)


class PagedLayer(BaseLayer):
    """A layer of a `PagedCache`, for a batch of sequences of one length. The cache makes it.

    Every layer must get the new tokens of a step before any layer gets those of the next step.

    Attributes
    ----------
    key_cache, value_cache : ndarray, shape [num_blocks, page_size, num_kv_heads, head_dim]
        Views of the storage, for operators on blocks; codes if it is quantized.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import PagedCache
    >>> cache = PagedCache(8, 4, num_layers=1, num_kv_heads=2, head_dim=16, dtype=np.float16)
    >>> layer, tokens = cache.layers[0], np.ones((3, 2, 5, 16), np.float16)
    >>> keys, values = layer.update(tokens, tokens)
    >>> keys.shape, layer.attend(tokens[:, :, -1:]).shape, layer.key_cache.shape
    ((3, 2, 5, 16), (3, 2, 1, 16), (8, 4, 2, 16))
    """

    _takes_window = True  # a window hides tokens, but they stay stored

    def __init__(self, rows: Batch, layer_idx: int, lock: LayerLock) -> None:
        self.rows, self._layer_idx, self._lock = rows, layer_idx, lock
        self._updates = 0

    @property
    def _store(self) -> Any:
        """Return the arrays of all layers; None in a closed cache."""
        return self.rows._store

    @property
    def key_cache(self) -> Array:
        """Return the keys of all blocks."""
        return self._store.blocks[0][self._layer_idx][0]

    @property
    def value_cache(self) -> Array:
        """Return the values of all blocks."""
        return self._store.blocks[0][self._layer_idx][-1]

    def _large_arrays(self) -> list[Array]:
        """Return the arrays of rows, and of their scales, which may lie in files."""
        return [blocks[self._layer_idx] for blocks in self._store.blocks]

    def _share_lock(self, lock: LayerLock) -> None:
        """Take the lock of a closed cache, which a layer in blocks has anyway."""
        self._lock = lock

    def _forget_rows(self) -> None:
        """Do nothing: the cache, which closes, drops the arrays of all layers."""

    @one_call_at_a_time
    def update(
        self, key_states: Array, value_states: Array, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        store, rows = self._store, self.rows
        checked_format("key_states", key_states, FLOATS, 4, CACHE_AXES)
        batch, tokens = len(rows.sequences) or max(key_states.shape[0], 1), key_states.shape[2]
        dims = store.value_dim, store.rope_dim or store.dim
        check_geometry(key_states, value_states, Geometry(batch, store.heads, *dims, store.format))
        if cache_position is not None:
            requests.check_positions(cache_position, tokens, self.get_seq_length())
        store.check_apart(self._layer_idx, {"key_states": key_states, "value_states": value_states})
        key, value = (one_piece(states).swapaxes(1, 2) for states in store.rows_of(key_states, value_states))
        begins = not rows._has_open_step
        try:
            step = rows._append(batch, tokens, self._layer_idx)
            step._append(key, value, self._layer_idx)
            self._updates += 1
            if len(step.written) == store.num_layers:
                step.commit()
        except BaseException:
            if begins:
                rows._abandon_open_step()
            raise
        return views_of(self, store.format.dtype, (store.dim, store.value_dim))

    @one_call_at_a_time
    def attend(  # type: ignore[override]  # has two more options
        self,
        query: Array,
        attn_mask: Array | None = None,
        *,
        is_causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Array | None = None,
        return_lse: bool = False,
        return_key_weights: bool = False,
    ) -> Attended:
        store, step = self._store, self.rows.step
        self.rows._guard.check()
        if not self.rows.sequences:
            raise argument_error("layer", "stored tokens (call update before attend)", "none")
        options = is_causal, window, softmax_scale, softcap, sinks, return_lse, return_key_weights
        form = form_of((query,), (self.get_seq_length(), attn_mask, *options))
        prepared = step and step._calls.find(form)
        if prepared:
            query = one_piece(query.swapaxes(1, 2))
            return heads_first(step._attend_again(prepared, query, self._layer_idx))
        batch, heads, tokens = self._check_query(query, is_causal)
        length = self.stored_tokens
        mask = None if attn_mask is None else self._checked_mask(attn_mask, (batch, heads, tokens))
        place = masks.static_mask(store.format, mask, batch, heads, tokens, length)
        query = one_piece(query.swapaxes(1, 2))  # [B, q, Hq, D]
        scoring = Scoring(
            is_causal=is_causal, softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks
        )
        weights = attention.checked_weights(query, place, scoring)
        shape = *query.shape[:-1], store.value_dim
        results = attention.attention_results(shape, store.format, return_lse, []).arrays(None)
        out, lse, *_ = (*results, None)  # results have no lse unless it is requested
        step, first_query = self.rows._tables(), length - tokens
        # All rows of the batch have the same positions, so the first sequence is enough.
        check_window(self.rows.sequences[:1], [first_query], (weights.left, weights.right), is_alibi=False)
        key_weights = None
        if flag("return_key_weights", return_key_weights):
            if not step.index.in_order:
                wanted = "False for sequences that lie in segments, because tokens were removed or moved"
                raise argument_error("return_key_weights", wanted, True)
            form = None  # such a call is not prepared
            key_weights = np.empty((batch, heads, length), np.float32)
        if not step.index.in_order:
            results = step._attend_rows(query, self._layer_idx, mask, weights, length)
            return heads_first(fill_results(out, lse, slice(None), results))
        launch = cpu.attention.prepare.prepare_attention(
            query, out, lse, store.contexts[self._layer_idx], step._equal_index(tokens, length),
            batch if tokens == 1 else 0, weights, key_weights=key_weights,
        )  # fmt: skip
        attended = heads_first(step._start(form, launch, query, out, lse, self._layer_idx))
        if key_weights is None:
            return attended
        return (attended, key_weights) if lse is None else (*attended, key_weights)

    def _check_query(self, query: Array, is_causal: bool) -> tuple[int, int, int]:
        """Check queries; return (B, Hq, q)."""
        store, (batch, _, length, _) = self._store, self._shape
        checked_format("query", query, (store.format,), 4, CACHE_AXES)
        _, heads, tokens, _ = query.shape
        check_shape("query", query, (batch, multiples(store.heads), None, store.dim))
        if is_causal and tokens > length:
            raise argument_error("query", f"at most {length} tokens, those in the layer", tokens)
        return batch, heads, tokens

    def _checked_mask(self, mask: Array, sizes: tuple[int, int, int]) -> Array:
        """Check a mask for queries of `sizes` (B, Hq, q); return it with 4 axes."""
        masks.check_mask_type(self._store.format, mask, "attn_mask")
        if mask.ndim == 2 and mask.dtype == np.bool_:
            mask = mask if self._row_positions is None else mask_of_stored(self, mask, sizes[0])
            mask = mask[:, None, None]
        check_mask_axes(mask, sizes, self.get_seq_length(), (self.stored_tokens,))
        return mask

    @property
    def _ahead(self) -> int:
        """Return how many tokens of the open step the layer has: all if it is written, or none."""
        step = self.rows.step
        written = step is not None and self._layer_idx in step.written
        return self.rows.sequences[0]._pending if written else 0

    def get_seq_length(self) -> int:
        return self.rows.sequences[0].next_position + self._ahead if self.rows.sequences else 0

    def get_mask_sizes(self, query_length: SupportsIndex) -> tuple[int, int]:
        new, stored = integer("query_length", query_length, 0), self.stored_tokens
        return stored + new, self.get_seq_length() - stored

    @property
    def _row_positions(self) -> RowPositions | None:  # type: ignore[override]  # those of the sequences
        """Return the positions once tokens were removed or moved; None before."""
        return self.rows.sequences[0]._row_positions if self.rows.sequences else None

    @property
    def stored_tokens(self) -> int:
        return self.rows.sequences[0].length + self._ahead if self.rows.sequences else 0

    @property
    def positions(self) -> Array:
        rows = self._row_positions or RowPositions.contiguous(0, 0)
        return rows.between(0, self.stored_tokens).positions

    @property
    def rope_shifts(self) -> Array:
        return pieces_array(self.rows.sequences[0]._pieces(self.stored_tokens) if self.rows.sequences else [])

    @property
    def batch_size(self) -> int:
        return len(self.rows.sequences)

    @property
    def nbytes(self) -> int:
        """Return the size of the stored tokens in bytes; shared blocks count once."""
        length, size = self.stored_tokens, self._store.page_size
        tokens_of = {
            block: min(end - begin - i * size, size)
            for seq in self.rows.sequences
            for begin, end, page, _ in seq._segments(size, length)
            for i, block in enumerate(seq._table[page : page + -(-(end - begin) // size)])
        }  # {block: its tokens}
        block_bytes = sum(array[self._layer_idx, :, 0].nbytes for array in self._store.blocks)
        return sum(tokens_of.values()) * block_bytes // size

    def _plan(self, call: str, *arguments: Any, **options: Any) -> Any:
        wanted = f"{call} in all layers: PagedCache.rows.{call}, or PagedCache.{call}(seq, ...)"
        raise argument_error(type(self).__name__, wanted, f"{call} of a layer in blocks")

    def _rearrange(self, plan: Any) -> None:
        """Do nothing: the cache carries out plans for all layers together."""

    # Attributes that a `KVView` reads

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """Return the shape of keys and values."""
        return len(self.rows.sequences), self._store.heads, self.stored_tokens, self._store.dim

    @property
    def _changes(self) -> int:
        """Return how often keys and values have changed."""
        return self.rows.changes + self._updates

    @one_call_at_a_time
    def _stored(self) -> tuple[States, States]:
        self.rows._guard.check()
        step = self.rows._tables()
        return step._gather_rows(self._layer_idx, self._shape[2])
