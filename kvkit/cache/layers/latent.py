"""Define layers of latent attention (MLA), where one row of a token is the key and value of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

import kvkit.mla
from kvkit.cache.base import one_call_at_a_time
from kvkit.cache.layers.attention import checked_mask
from kvkit.cache.layers.dynamic import DynamicLayer
from kvkit.cache.layers.joining import Join
from kvkit.cache.layers.positions import Rearrangement, RopeLike
from kvkit.cache.stores.memory import Geometry
from kvkit.cache.stores.span import Span
from kvkit.cache.stores.view import views_of
from kvkit.calls.latent import ROWS, gather_rows
from kvkit.checks.arguments import Scoring
from kvkit.checks.index_tensors import index
from kvkit.checks.latent import LatentPool
from kvkit.checks.values import checked_format, integer, one_piece, positive_number
from kvkit.errors import argument_error, check_shape, describe, in_other_order
from kvkit.formats import BY_NAME, FLOATS, encode
from kvkit.formats.known import named
from kvkit.indexer import indexer_scores, topk_rows
from kvkit.merge import merge_attention_states
from kvkit.rope import Rope
from kvkit.static.attention import multi_head_attention
from kvkit.typed import Array, Attended, Pair, States


class LatentLayer(DynamicLayer):
    """A layer of latent rows, as in DeepSeek, GLM and Kimi: one row for each token, for all heads.

    A row is the latent vector c, then the rotated key r. Its key is [c, r] and its value c, so that one
    array [B, 1, S, latent_dim + rope_dim] holds both.

    Parameters
    ----------
    latent_dim, rope_dim : int
        The elements of c and of r. Without r (``rope_dim=0``) a row is c alone.
    format : str, optional
        ``"ds_mla"`` stores rows as DeepSeek's 656 bytes. Attention decodes some thousands of rows at a time.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import LatentLayer
    >>> layer, rng = LatentLayer(), np.random.default_rng(0)
    >>> latent, kpe = rng.standard_normal((1, 1, 7, 512)), rng.standard_normal((1, 1, 7, 64))
    >>> keys, values = layer.update(latent.astype(np.float16), kpe.astype(np.float16))
    >>> keys.shape, values.shape, layer.nbytes                   # values are the first elements of keys
    ((1, 1, 7, 576), (1, 1, 7, 512), 8064)
    >>> q_latent, q_pe = np.ones((1, 16, 1, 512), np.float16), np.ones((1, 16, 1, 64), np.float16)
    >>> layer.attend(q_latent, q_pe, softmax_scale=192**-0.5).shape    # `mla_expand` makes head outputs
    (1, 16, 1, 512)
    """

    index_dim = 0  # elements of a row after its key

    def __init__(
        self,
        latent_dim: int = 512,
        rope_dim: int = 64,
        format: str | None = None,
    ) -> None:
        self.latent_dim = integer("latent_dim", latent_dim, 1)
        self.rope_dim = integer("rope_dim", rope_dim, 0)
        self.format = format
        self._codes: LatentCodes | None = None
        self._joined = self.latent_dim + self.rope_dim + self.index_dim
        if format is not None:
            self._codes = LatentCodes(self.latent_dim, self.rope_dim, format)
            self._joined = self._codes.bytes
        super().__init__()

    def _describe(self) -> dict[str, Any]:
        sizes = {"latent_dim": self.latent_dim, "rope_dim": self.rope_dim}
        return sizes | ({"format": self.format} if self.format else {})

    # Adding tokens

    def update(  # the parts of rows in place of keys and values
        self, latent: Array, kpe: Array | None = None, cache_position: ArrayLike | None = None
    ) -> tuple[States, States]:
        """Append the rows of new tokens; return the keys and values of all tokens.

        Parameters
        ----------
        latent : ndarray, shape [B, 1, q, latent_dim]
            float32, float16 or bfloat16: the normed latent vectors.
        kpe : ndarray, shape [B, 1, q, rope_dim]
            The rotated keys, of the same dtype. Only rows without them (``rope_dim=0``) do without.
        cache_position : array_like of int, shape [q], optional
            Consecutive positions of the new tokens, after the last one.

        Returns
        -------
        keys : ndarray, shape [B, 1, S, latent_dim + rope_dim]
        values : ndarray, shape [B, 1, S, latent_dim]
            Views of the rows. They are valid until the next call that changes the layer.
        """
        with self._lock:
            keys = self._joined_rows(latent, kpe)
            if self._codes is None:
                return self._append(keys, keys[..., : self.latent_dim], cache_position)
            rows = self._codes.encode(keys)
            self._append(rows, rows, cache_position)
            dims = self.latent_dim + self.rope_dim, self.latent_dim
            return views_of(self, np.dtype(np.float32), dims)

    def _geometry_of(self, key_states: Array, value_states: Array) -> Geometry:
        if self._codes is None:
            return super()._geometry_of(key_states, value_states)
        batch, _, _, width = key_states.shape
        if batch != (self.batch_size or batch) or key_states.dtype != np.uint8 or width != self._joined:
            wanted = f"[{self.batch_size or 'B'}, 1, q, {self._joined}] bytes"
            raise argument_error("latent", wanted, describe(key_states))
        return Geometry(batch, 1, width, width, BY_NAME["uint8"], width)

    def _joined_rows(self, latent: Array, kpe: Array | None) -> Array:
        """Check the two parts of new rows, and join them."""
        checked_format("latent", latent, FLOATS, 4)
        check_shape("latent", latent, (self.batch_size or None, 1, None, self.latent_dim))
        if kpe is None and not self.rope_dim:
            return latent
        return join_parts(("latent", "kpe"), latent, kpe, self.rope_dim)

    def attend(  # type: ignore[override]  # a query has two parts, and a scale is required
        self,
        q_latent: Array,
        q_pe: Array | None = None,
        attn_mask: Array | None = None,
        *,
        softmax_scale: float,
        sinks: Array | None = None,
        return_lse: bool = False,
    ) -> Attended:
        """Attend causally with the absorbed queries of the last tokens. Every head reads the same rows.

        Parameters
        ----------
        q_latent : ndarray, shape [B, H, q, latent_dim]
            ``q_nope @ w_uk`` of each head, as `kvkit.mla_absorb` returns it; without `q_pe` both parts.
        q_pe : ndarray, shape [B, H, q, rope_dim]
            The rotated part of queries.
        attn_mask, sinks, return_lse
            As in other layers.
        softmax_scale : float
            Factor of the scores, 1 / sqrt(size of an expanded head): 192 ** -0.5 for DeepSeek's 128 + 64.

        Returns
        -------
        attn_output : ndarray, shape [B, H, q, latent_dim]
            In the dtype of the queries.
        lse : ndarray of float32, shape [B, H, q]
            If ``return_lse``.
        """
        with self._lock:
            query = joined_query(q_latent, q_pe, self.rope_dim)
            softmax_scale = positive_number("softmax_scale", softmax_scale)
            return self._attend_to_rows(query, attn_mask, softmax_scale, sinks, return_lse)

    def _attend_to_rows(
        self, query: Array, mask: Array | None, softmax_scale: float, sinks: Array | None, return_lse: bool
    ) -> Attended:
        """Attend with joined queries to all rows."""
        if self._codes is None:
            scoring = Scoring(softmax_scale=softmax_scale, sinks=sinks)
            return self._attention(self, query, mask, scoring, return_lse)
        output, lse = attend_to_codes(self, self._codes, query, mask, softmax_scale, sinks)
        return (output, lse) if return_lse else output

    # Sizes and positions

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the keys that `stored` returns."""
        return self.batch_size, 1, self.stored_tokens, self.latent_dim + self.rope_dim

    @property
    def _changes(self) -> Span:
        """Return what differs after each call that changes the rows, for views."""
        return self.span

    def _stored(self) -> tuple[States, States]:
        keys = super()._stored()[0]
        keys = keys if self._codes is None else self._codes.decode(keys)
        return keys, keys[..., : self.latent_dim]

    @property
    def nbytes(self) -> int:
        if self.store is None:
            return 0
        return self.stored_tokens * self.batch_size * self._joined * self.store.sides[0].itemsize

    def _arrays(self) -> dict[str, Array]:
        return {} if self.store is None else {"rows": super()._stored()[0]}

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        rows = arrays["rows"]
        width = rows.shape[-1] if self._codes else self.latent_dim
        super()._fill({"keys": rows, "values": rows[..., :width]}, length)

    # Moving rows. Only the last elements of a row are rotated

    def _plan(self, call: str, *arguments: Any, rope: RopeLike = None, **options: Any) -> Rearrangement:
        self.rope, rope = (placed_rotation(rotation, self.latent_dim) for rotation in (self.rope, rope))
        return super()._plan(call, *arguments, rope=rope, **options)

    def _plan_join(self, other: Any, at: SupportsIndex | None = None, rope: RopeLike = None) -> Join:
        self.rope, rope = (placed_rotation(rotation, self.latent_dim) for rotation in (self.rope, rope))
        return super()._plan_join(other, at, rope)

    _check_append = _plan_join

    def _check_movable(self, call: str, plan: Rearrangement) -> None:
        super()._check_movable(call, plan)
        if self._codes is not None and plan.after.shifts.any():
            wanted = "a call that keeps positions: codes cannot be rotated (unrotated keys: rope='none')"
            raise argument_error(self.name, wanted, call)


def join_parts(names: tuple[str, str], latent: Array, rotated: Array | None, rope_dim: int) -> Array:
    """Check and join the parts of latent rows or queries; `names` are the names of both arguments."""
    fmt, shape = checked_format(names[0], latent, FLOATS, 4), (*latent.shape[:3], rope_dim)
    if rotated is None or checked_format(names[1], rotated, FLOATS, 4) is not fmt or rotated.shape != shape:
        hint = in_other_order(() if rotated is None else rotated.shape, shape)
        raise argument_error(names[1], f"{shape} of {fmt}, as {names[0]}", f"{describe(rotated)}{hint}")
    return np.concatenate((latent, rotated), axis=3)


def joined_query(q_latent: Array, q_pe: Array | None, rope_dim: int) -> Array:
    """Return queries [B, H, q, latent_dim + rope_dim] from their parts, or from `q_latent` alone."""
    if q_pe is None:
        checked_format("q_latent", q_latent, FLOATS, 4)
        return q_latent
    return join_parts(("q_latent", "q_pe"), q_latent, q_pe, rope_dim)


def placed_rotation(rope: RopeLike, latent_dim: int) -> RopeLike:
    """Return a rotation of whole latent rows from one of their rotated part, the last elements."""
    if latent_dim and isinstance(rope, Rope) and not rope.begin:
        return replace(rope, begin=latent_dim)
    return rope


class IndexedLayer(LatentLayer):
    """A layer of latent rows with index keys, by which sparse attention (DSA) chooses the rows to read.

    A row is [c, r, index key].

    Parameters
    ----------
    latent : LatentLayer
        An empty layer, which says how rows are stored.
    index_dim : int
        The number of elements of an index key.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.cache import IndexedLayer, LatentLayer
    >>> layer, rng = IndexedLayer(LatentLayer(8, 4), index_dim=4), np.random.default_rng(0)
    >>> def states(*shape):
    ...     return rng.standard_normal(shape, np.float32)
    >>> keys, values = layer.update(states(1, 1, 9, 8), states(1, 1, 9, 4))
    >>> layer.update_index(states(1, 9, 4)).shape
    (1, 9, 4)
    >>> rows = layer.best_rows(states(1, 1, 2, 4), states(1, 1, 2), k=3)       # of one query with two heads
    >>> layer.attend(states(1, 6, 1, 8), states(1, 6, 1, 4), softmax_scale=0.3, indices=rows).shape
    (1, 6, 1, 8)
    """

    def __init__(self, latent: LatentLayer, index_dim: int = 128) -> None:
        if type(latent) is not LatentLayer or latent.store is not None or latent.format:
            raise argument_error("latent", "an empty LatentLayer without a format", describe(latent))
        self.index_dim = integer("index_dim", index_dim, 1)
        super().__init__(latent.latent_dim, latent.rope_dim)

    def _describe(self) -> dict[str, Any]:
        latent = {"kind": LatentLayer.__name__, "arguments": super()._describe()}
        return {"latent": latent, "index_dim": self.index_dim}

    @property
    def index_keys(self) -> Array | None:
        """Return the stored index keys, shape [B, S, index_dim]; None before the first update."""
        return self._index_rows() if self.store is not None else None

    def _index_rows(self) -> Array:
        begin, end = self.span.rows_from(self.span.oldest)
        return self.store.sides[0][:, 0, begin:end, self.latent_dim + self.rope_dim :]

    @one_call_at_a_time
    def update_index(self, index_keys: Array) -> Array:
        """Store the index keys of the last update's tokens; return the index keys of all tokens.

        Parameters
        ----------
        index_keys : ndarray, shape [B, q, index_dim]
            Rotated index keys, of the dtype of the rows.

        Returns
        -------
        ndarray, shape [B, S, index_dim]
            A view, valid until the next call that changes the layer.
        """
        if self.store is None:
            raise argument_error(self.name, "stored tokens (call update before update_index)", "none")
        new, dtype = self.span.length - self.span.before, self.store.geometry.fmt.dtype
        if not isinstance(index_keys, np.ndarray) or index_keys.dtype != dtype:
            raise argument_error("index_keys", f"an array of {dtype}", describe(index_keys))
        check_shape(
            "index_keys", index_keys, (self.batch_size, new, self.index_dim), ("batch", "new tokens", "dim")
        )
        stored = self._index_rows()
        stored[:, stored.shape[1] - new :] = index_keys
        return stored

    @one_call_at_a_time
    def best_rows(self, index_query: Array, index_weights: Array, k: int = 2048) -> Array:
        """Return the numbers of the `k` stored rows with the best scores for each query.

        Parameters
        ----------
        index_query : ndarray, shape [B, q, heads, index_dim]
            The rotated queries of the last tokens.
        index_weights : ndarray, shape [B, q, heads]
            As in `kvkit.indexer_scores`.
        k : int
            How many rows a query reads.

        Returns
        -------
        ndarray of int32, shape [B, q, k]
            Ascending, then -1 where there are fewer.
        """
        if self.store is None:
            raise argument_error(self.name, "stored tokens (call update before best_rows)", "none")
        fmt = checked_format("index_query", index_query, FLOATS, 4)
        batch, new = index_query.shape[:2]
        if batch != self.batch_size or not new:
            wanted = f"the last queries of {self.batch_size} sequences"
            raise argument_error("index_query", wanted, describe(index_query))
        shape, weights_fmt = index_query.shape[:3], checked_format("index_weights", index_weights, FLOATS, 3)
        if weights_fmt is not fmt or index_weights.shape != shape:
            raise argument_error("index_weights", f"{shape} of {fmt}", describe(index_weights))
        keys = self._index_rows()
        length = keys.shape[1]
        tables, lens = np.arange(batch)[:, None], np.full(batch, length)
        starts = np.arange(batch + 1) * new
        query, weights = (x.reshape(batch * new, *x.shape[2:]) for x in (index_query, index_weights))
        scores = indexer_scores(query, keys, weights, tables, lens, starts)
        slots = topk_rows(scores, integer("k", k, 1), tables, length, starts)
        return np.where(slots < 0, slots, slots % length).reshape(batch, new, -1)

    def attend(  # type: ignore[override]  # has another argument, `indices`
        self,
        q_latent: Array,
        q_pe: Array | None = None,
        attn_mask: Array | None = None,
        *,
        softmax_scale: float,
        indices: ArrayLike | None = None,
        sinks: Array | None = None,
        return_lse: bool = False,
    ) -> Attended:
        """Attend as a `LatentLayer`, or only to the stored rows whose numbers `indices` [B, q, K] lists.

        Numbers below 0 are ignored. With `indices` a mask is refused: leave out the rows that it would hide.
        """
        if indices is None:
            return super().attend(
                q_latent, q_pe, attn_mask, softmax_scale=softmax_scale, sinks=sinks, return_lse=return_lse
            )
        with self._lock:
            query = joined_query(q_latent, q_pe, self.rope_dim)
            if self.store is None:
                raise argument_error("indices", "rows of stored tokens (call update before attend)", "none")
            if attn_mask is not None:
                raise argument_error("attn_mask", "None beside indices", describe(attn_mask))
            batch, heads, new, _ = query.shape
            keys = self.store.rows(*self.span.rows_from(self.span.oldest))[0][:, 0]  # [B, S, dim]
            chosen, length = index("indices", indices, 3, batch), keys.shape[1]
            if chosen.shape[1] != new or batch != len(keys) or (chosen >= length).any():
                wanted = f"[{len(keys)}, {new}, K] numbers below {length}"
                raise argument_error("indices", wanted, describe(chosen))
            slots = np.where(chosen < 0, -1, chosen + np.arange(batch)[:, None, None] * length)
            output, lse = kvkit.mla.mla_attention(
                query.swapaxes(1, 2).reshape(batch * new, heads, -1), keys, softmax_scale=softmax_scale,
                sinks=sinks, indices=slots.reshape(batch * new, -1), value_dim=self.latent_dim,
                return_lse=True,
            )  # fmt: skip
            output, lse = (x.reshape(batch, new, *x.shape[1:]).swapaxes(1, 2) for x in (output, lse))
            return (output, lse) if return_lse else output

    def _check_movable(self, call: str, plan: Rearrangement) -> None:
        super()._check_movable(call, plan)
        if plan.after.shifts.any():
            wanted = "a call that keeps positions: index keys are rotated (if they are not: rope='none')"
            raise argument_error(self.name, wanted, call)

    def _arrays(self) -> dict[str, Array]:
        stored = super()._arrays()
        return stored | {"index_keys": self._index_rows()} if stored else stored

    def _fill(self, arrays: Mapping[str, Array], length: int) -> None:
        super()._fill(arrays, length)
        self._index_rows()[...] = arrays["index_keys"]


class LatentCodes:
    """Encodes latent rows as DeepSeek's rows of 656 bytes: codes, scales, then the rotated part."""

    def __init__(self, latent_dim: int, rope_dim: int, format: str) -> None:
        self.dims = latent_dim, rope_dim
        if not isinstance(format, str) or format.partition(":")[0] != "ds_mla":
            wanted = "None or ds_mla (`kvkit study` shows what other formats do to latent rows)"
            raise argument_error("format", wanted, repr(format))
        self.format = named(format)
        if self.dims != (512, 64):
            zeros = "" if rope_dim else " (without a rope, store zeros as its 64 elements)"
            raise argument_error("format", f"rows of 512 + 64, for ds_mla{zeros}", self.dims)
        self.bytes = encode(np.zeros((1, sum(self.dims)), np.float32), self.format)["codes"].shape[1]

    def encode(self, keys: Array) -> Array:
        """Return rows [B, 1, q, latent_dim + rope_dim] as bytes [B, 1, q, bytes]."""
        codes = encode(keys.reshape(-1, sum(self.dims)), self.format)["codes"]
        return codes.reshape(*keys.shape[:3], self.bytes)

    def decode(self, rows: Array) -> Array:
        """Return bytes [..., bytes] as float32 [..., latent_dim + rope_dim]."""
        flat = rows.reshape(-1, self.bytes)
        pool = LatentPool((flat[:, None],), self.format, sum(self.dims))
        return gather_rows(pool, np.arange(len(flat))).reshape(*rows.shape[:-1], sum(self.dims))


def attend_to_codes(
    layer: LatentLayer,
    codes: LatentCodes,
    query: Array,
    mask: Array | None,
    softmax_scale: float,
    sinks: Array | None,
) -> Pair:
    """Attend with queries [B, H, q, dim] to encoded rows; decode some thousands of rows at a time."""
    fmt, span = checked_format("query", query, FLOATS, 4), layer.span
    batch, heads, new, dim = query.shape
    if layer.store is None or batch != layer.batch_size or dim != sum(codes.dims) or new > span.length:
        wanted = f"[{layer.batch_size}, heads, at most {span.length}, {sum(codes.dims)}]"
        hint = in_other_order(query.shape, (layer.batch_size, None, None, sum(codes.dims)))
        raise argument_error("query", wanted, f"{query.shape}{hint}")
    if mask is not None:
        mask = checked_mask(layer, fmt, mask, (batch, heads, new))
        mask = mask if mask.dtype == np.bool_ else mask.astype(np.float32)
    wide = one_piece(query.swapaxes(1, 2)).astype(np.float32)  # [B, q, H, dim]
    begin, end = span.rows_from(span.begin)
    count, step = end - begin, max(1, ROWS // batch)
    last = max(0, count - max(new, step))  # the last piece contains the rows of all queries
    merged: Pair | None = None
    for first in [*range(0, last, step), last]:
        stop = count if first == last else min(first + step, last)
        rows = codes.decode(layer.store.sides[0][:, 0, begin + first : begin + stop])[:, :, None]
        part = multi_head_attention(
            wide, rows, rows[..., : layer.latent_dim], None if mask is None else mask[..., first:stop],
            num_heads=heads, head_dim=dim, num_kv_heads=1, is_causal=stop == count,
            softmax_scale=softmax_scale, sinks=sinks if stop == count else None, return_lse=True,
        )  # fmt: skip
        flat = part[0].reshape(batch * new, heads, -1), part[1].reshape(batch * new, heads)
        merged = flat if merged is None else merge_attention_states(*zip(merged, flat, strict=True))
    output, lse = (x.reshape(batch, new, *x.shape[1:]).swapaxes(1, 2) for x in merged or ())
    return output.astype(fmt.dtype, copy=False), lse
