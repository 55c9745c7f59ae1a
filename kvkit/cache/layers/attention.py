"""Attention of a layer over its stored tokens, which are read in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.calls.prepared import PreparedCall, PreparedCalls, form_of
from kvkit.checks import attention, index_tensors, masks
from kvkit.checks.arguments import Scoring
from kvkit.checks.records import NO_MASK, MaskPlace
from kvkit.checks.values import checked_format, flag, one_piece
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS, Element
from kvkit.runtime.arrays import places_of
from kvkit.typed import Array, Attended


class LayerAttention:
    """Computes a layer's attention. Keeps the last prepared call, and runs it again where it can."""

    def __init__(self) -> None:
        self._calls: PreparedCalls[PreparedAttention] = PreparedCalls(1)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LayerAttention, ()  # prepared calls hold addresses, which are others in a copy

    def forget(self) -> None:
        """Drop the prepared call, because the arrays of the layer have changed."""
        self._calls.clear()

    def __call__(
        self,
        layer: Any,
        query: Array,
        attention_mask: Array | None,
        softmax_scale: float | None,
        softcap: float,
        sinks: Array | None,
        return_lse: bool,
    ) -> Attended:
        """Attend to a layer; see `Layer.attend`."""
        fmt, query = checked_query(layer, query)
        query = layer.store.query(query)
        batch, new, query_heads, _ = query.shape
        out = np.empty((batch, new, query_heads, layer.store.geometry.value_dim), query.dtype)
        wants_lse = flag("return_lse", return_lse)
        lse = np.empty((batch, new, query_heads), np.float32) if wants_lse else None
        mask = NO_MASK
        if attention_mask is not None:
            mask = checked_mask(layer, fmt, attention_mask, (batch, query_heads, new))
        arrays = {"query": query, "out": out, "lse": lse}
        form = form_of((query,), (wants_lse, softmax_scale, softcap)) if sinks is None else None
        prepared = self._calls.find(form)
        if not prepared or not prepared.run(layer, arrays, mask):
            self._calls.clear()
            left = -1 if layer.window is None else layer.window - 1
            scoring = Scoring(softmax_scale=softmax_scale, window=(left, -1), softcap=softcap, sinks=sinks)
            weights = attention.checked_weights(query, mask, scoring)
            self._calls.keep(form, PreparedAttention(layer, fmt, arrays, weights))
        attn_output = layer.store.output(out).swapaxes(1, 2)
        return attn_output if lse is None else (attn_output, lse.swapaxes(1, 2))


def checked_query(layer: Any, query: Array) -> tuple[Element, Array]:
    """Check queries, and that the tokens they attend to are stored; return (format, [B, q, Hq, D])."""
    span = layer.span
    if layer.store is None:
        raise argument_error(layer.name, "stored tokens (call update before attend)", "none")
    batch, heads, dim, *_ = layer.store.geometry
    fmt = checked_format("query", query, FLOATS, 4)
    _, query_heads, new, _ = query.shape
    if query_heads % heads or not query_heads or query.shape != (batch, query_heads, new, dim):
        wanted = f"shape [{batch}, a multiple of {heads}, q, {dim}] (batch, key heads and head size)"
        raise argument_error("query", wanted, query.shape)
    if span.begin > max(0, span.length - new - (layer.window or 0) + 1) or new > span.length:
        wanted = f"queries of the last tokens, whose windows {layer.name} still stores"
        raise argument_error("query", wanted, f"{new} queries after {span.length} tokens")
    return fmt, one_piece(query.swapaxes(1, 2))


def checked_mask(layer: Any, fmt: Element, mask: Array, sizes: tuple[int, int, int]) -> MaskPlace:
    """Check a mask: its columns begin at position 0 with 2 axes, at the first returned token with 4."""
    span, (batch, query_heads, new) = layer.span, sizes
    if not isinstance(mask, np.ndarray):
        raise argument_error("attention_mask", "a numpy array", describe(mask))
    first = span.begin if mask.ndim == 2 else 0  # a padding mask counts positions from 0
    count = span.length - span.begin
    returned = sum(layer.get_mask_sizes(0))  # length + offset: where the keys of an update end
    if mask.ndim == 2:
        legal = {(batch, span.length), (batch, max(returned, span.length))}
        if mask.dtype != np.bool_ or mask.shape not in legal:
            wanted = f"bool [{batch}, {span.length}], a padding mask, or 4 axes"
            raise argument_error("attention_mask", wanted, describe(mask))
        mask = mask[:, None, None]
    elif mask.ndim != 4 or mask.shape[3] not in (count, max(returned - span.begin, count)):
        wanted = f"bool [{batch}, {span.length}], or [{batch} or 1, {query_heads} or 1, {new} or 1, {count}]"
        raise argument_error("attention_mask", wanted, f"shape {mask.shape}")
    mask = mask[..., first : first + count]
    return masks.static_mask(fmt, mask, batch, query_heads, new, count)


class PreparedAttention:
    """Attention over one store, to be run again while only addresses and lengths change.

    Its launch is for given shapes and a given split of the work. The split changes once in some hundred
    tokens.
    """

    __slots__ = ("_counts", "_mask", "_params", "_prepared", "_step", "_store")

    def __init__(self, layer: Any, fmt: Element, arrays: dict[str, Any], weights: attention.Weights) -> None:
        self._store, self._mask = layer.store, weights.mask
        first, end = layer.span.rows_from(layer.span.begin)
        context = self._store.context(fmt.name, first, end)
        query, out, lse = arrays.values()
        batch, new = query.shape[:2]
        self._step, self._counts = index_tensors.static_step(batch, new, end - first), np.arange(batch + 1)
        launch = cpu.attention.prepare.prepare_attention(query, out, lse, context, self._step, 0, weights)
        self._params = launch.numbers
        self._prepared = PreparedCall([launch], arrays, attention=self._params, version=end - first)
        cpu.launches.start(launch)

    def run(self, layer: Any, arrays: dict[str, Array | None], mask: MaskPlace) -> bool:
        """Attend with another query, mask and length; return False if these need a new prepared call."""
        if layer.store is not self._store:
            return False
        length, _, begin, origin, _ = layer.span
        places = places_of(arrays.values())
        return self._prepared.run_at(places, lambda: self._refit(begin - origin, length - begin, mask))

    def _refit(self, row: int, kvlen: int, mask: MaskPlace) -> bool:
        """Set the first row and the length; return False if the new length needs a new launch."""
        if kvlen != self._prepared.version:
            np.multiply(self._counts, kvlen, out=self._step.kvstarts)
            if not self._prepared.reschedule(kvlen):
                return False
        self._store.begin_at(self._params, row)
        if mask != self._mask:
            at = cpu.attention.prepare.FIELD["mask"]
            self._params[at : at + len(mask)], self._mask = mask, mask
        return True
