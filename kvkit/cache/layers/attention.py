"""Attention over what a layer has just stored, read where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkit import cpu
from kvkit.calls.prepared import PreparedCall, PreparedCalls, form_of
from kvkit.checks import attention, index_tensors, masks, tensors
from kvkit.checks.arguments import Scoring
from kvkit.checks.records import NO_MASK, MaskPlace
from kvkit.checks.values import flag
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS, Element
from kvkit.runtime.addresses import places_of
from kvkit.typed import Array, Attended


class LayerAttention:
    """How a layer attends; what is prepared for a call serves the next ones while it can run again."""

    def __init__(self) -> None:
        self._calls: PreparedCalls[PreparedAttention] = PreparedCalls(1)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LayerAttention, ()  # a call knows addresses, which a copy does not have

    def forget(self) -> None:
        """Let go of the store, which is no longer the layer's."""
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
    """Return the format of checked queries, and them as [B, q, Hq, D]; the layer holds all that they see."""
    span = layer.span
    if layer.store is None:
        raise argument_error(layer.name, "keys and values: update comes first", "none")
    batch, heads, dim, *_ = layer.store.geometry
    fmt = tensors.checked_format("query", query, FLOATS, 4)
    _, query_heads, new, _ = query.shape
    if query_heads % heads or not query_heads or query.shape != (batch, query_heads, new, dim):
        wanted = f"shape [{batch}, a multiple of {heads}, q, {dim}] (batch, key heads and head size)"
        raise argument_error("query", wanted, query.shape)
    if span.begin > max(0, span.length - new - (layer.window or 0) + 1) or new > span.length:
        wanted = f"tokens whose window {layer.name} still holds"
        raise argument_error("query", wanted, f"{new} of {span.length} tokens")
    return fmt, tensors.one_piece(query.swapaxes(1, 2))


def checked_mask(layer: Any, fmt: Element, mask: Array, sizes: tuple[int, int, int]) -> MaskPlace:
    """Check a mask: its columns are the rows of the store from the first returned on."""
    span, (batch, query_heads, new) = layer.span, sizes
    if not isinstance(mask, np.ndarray):
        raise argument_error("attention_mask", "a numpy array", describe(mask))
    first = span.begin if mask.ndim == 2 else 0  # a padding mask counts positions from 0
    count = span.length - span.begin
    returned = sum(layer.get_mask_sizes(0))
    if mask.ndim == 2:
        legal = {(batch, span.length), (batch, max(returned, span.length))}
        if mask.dtype != np.bool_ or mask.shape not in legal:
            wanted = f"bool [{batch}, {span.length}], a padding mask, or 4 axes"
            raise argument_error("attention_mask", wanted, describe(mask))
        mask = mask[:, None, None]
    elif mask.ndim != 4 or mask.shape[3] not in (count, max(returned - span.begin, count)):
        wanted = f"bool [{batch}, {span.length}], or [{batch}, {query_heads}, {new}, {count}], 1 in front"
        raise argument_error("attention_mask", wanted, f"shape {mask.shape}")
    mask = mask[..., first : first + count]
    return masks.static_mask(fmt, mask, batch, query_heads, new, count)


class PreparedAttention:
    """Attention over one store; it runs again while only addresses and lengths change.

    What the kernels are prepared for is shapes and how the work is shared out, which changes once in some
    hundred tokens.
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
        """Attend with another query, mask and length; return False if that has to be prepared."""
        if layer.store is not self._store:
            return False
        length, _, begin, origin, _ = layer.span
        places = places_of(arrays.values())
        return self._prepared.run_at(places, lambda: self._refit(begin - origin, length - begin, mask))

    def _refit(self, row: int, kvlen: int, mask: MaskPlace) -> bool:
        """Begin at another row, and end at another length unless that takes another launch."""
        if kvlen != self._prepared.version:
            np.multiply(self._counts, kvlen, out=self._step.kvstarts)
            if not self._prepared.reschedule(kvlen):
                return False
        self._store.begin_at(self._params, row)
        if mask != self._mask:
            at = cpu.attention.prepare.FIELD["mask"]
            self._params[at : at + len(mask)], self._mask = mask, mask
        return True
