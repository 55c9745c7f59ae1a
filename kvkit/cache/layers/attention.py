"""Attention over what a layer has just stored, read where it lies."""

import numpy as np

from kvkit import cpu
from kvkit.calls.repeats import addresses, form
from kvkit.checks import attention, index_tensors, masks, tensors
from kvkit.checks.records import NO_MASK
from kvkit.checks.values import flag
from kvkit.errors import argument_error, describe
from kvkit.formats import FLOATS


class Attention:
    """How a layer attends; what is prepared for a call serves the next ones while it can be made again."""

    def __init__(self):
        self.call = None

    def __reduce__(self):
        return Attention, ()  # a call knows addresses, which a copy does not have

    def forget(self):
        """Let go of the store, which is no longer the layer's."""
        self.call = None

    def __call__(self, layer, query, attention_mask, softmax_scale, softcap, sinks, return_lse):
        """See `Layer.attend`."""
        fmt, query = asked(layer, query)
        query = layer.store.query(query)
        batch, new, query_heads, _ = query.shape
        out = np.empty((batch, new, query_heads, layer.store.geometry.value_dim), query.dtype)
        wants_lse = flag("return_lse", return_lse)
        lse = np.empty((batch, new, query_heads), np.float32) if wants_lse else None
        mask = NO_MASK
        if attention_mask is not None:
            mask = mask_of(layer, fmt, attention_mask, (batch, query_heads, new))
        arrays = {"query": query, "out": out, "lse": lse}
        call = form((query,), (wants_lse, softmax_scale, softcap)) if sinks is None else None
        if call is None or self.call is None or not self.call.again(call, layer, arrays, mask):
            left = -1 if layer.window is None else layer.window - 1
            weights = attention.weights(
                query, mask, softmax_scale=softmax_scale, window=(left, -1), softcap=softcap, sinks=sinks
            )
            made = Call(call, layer, fmt, arrays, weights)
            self.call = made if call else None
        attn_output = layer.store.output(out).swapaxes(1, 2)
        return attn_output if lse is None else (attn_output, lse.swapaxes(1, 2))


def asked(layer, query):
    """Format and checked queries, [B, q, Hq, D] in memory; the layer holds all that they can see."""
    span = layer.span
    if layer.store is None:
        raise argument_error(layer.name, "keys and values: update comes first", "none")
    batch, heads, dim, *_ = layer.store.geometry
    fmt = tensors.tensor("query", query, FLOATS, 4)
    _, query_heads, new, _ = query.shape
    if query_heads % heads or not query_heads or query.shape != (batch, query_heads, new, dim):
        wanted = f"shape [{batch}, a multiple of {heads}, q, {dim}] (batch, key heads and head size)"
        raise argument_error("query", wanted, query.shape)
    if span.begin > max(0, span.length - new - (layer.window or 0) + 1) or new > span.length:
        wanted = f"tokens whose window {layer.name} still holds"
        raise argument_error("query", wanted, f"{new} of {span.length} tokens")
    return fmt, tensors.one_piece(query.swapaxes(1, 2))


def mask_of(layer, fmt, mask, sizes):
    """A checked mask, as kernels see it: its columns are the rows of the store from the first returned on."""
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


class Call:
    """Attention over one store, prepared; made again while only addresses and lengths change.

    What the kernels are prepared for is shapes and how the work is shared out, which changes once in some
    hundred tokens.
    """

    __slots__ = ("counts", "form", "kvlen", "launch", "mask", "planned", "repeat", "step", "store")

    def __init__(self, form, layer, fmt, arrays, weights):
        self.form, self.store, self.mask = form, layer.store, weights.mask
        first, end = layer.span.rows_from(layer.span.begin)
        self.kvlen = end - first
        context = self.store.context(fmt.name, first, end)
        batch, new = arrays["query"].shape[:2]
        self.step, self.counts = index_tensors.equal(batch, new, self.kvlen), np.arange(batch + 1)
        query, out, lse = arrays.values()
        self.launch = cpu.attention.prepare.prepare(query, out, lse, context, self.step, 0, weights)
        self.planned = cpu.attention.prepare.planned(self.launch.numbers)
        if form is not None:
            self.repeat = cpu.launches.Repeat([self.launch], addresses(arrays))
        cpu.launches.start(self.launch)

    def again(self, form, layer, arrays, mask):
        """Make the call for another query, mask and length; False if it has to be prepared."""
        if form != self.form or layer.store is not self.store:
            return False
        length, _, begin, origin, _ = layer.span
        return self.repeat.run(addresses(arrays), lambda: self.follows(begin - origin, length - begin, mask))

    def follows(self, row, kvlen, mask):
        """Let the launch begin at another row, and end at another length unless it takes another launch."""
        numbers = self.launch.numbers
        if kvlen != self.kvlen:
            self.kvlen = None
            np.multiply(self.counts, kvlen, out=self.step.kvstarts)
            cpu.attention.prepare.schedule(numbers)
            if cpu.attention.prepare.planned(numbers) != self.planned:
                return False
            self.kvlen = kvlen
        self.store.begin_at(numbers, row)
        if mask != self.mask:
            at = cpu.attention.prepare.AT["mask"]
            numbers[at : at + len(mask)], self.mask = mask, mask
        return True
