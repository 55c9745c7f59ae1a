"""Attention over what a layer has just stored, read where it lies."""

import numpy as np

from kvkit import attention, check, cpu, steps
from kvkit.check import describe, wrong
from kvkit.formats import FLOATS

NUMBERS = int, float, type(None)


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
        batch, new, query_heads, dim = query.shape
        out = np.empty((batch, new, query_heads, layer.store.geometry.value_dim), query.dtype)
        wants_lse = attention.flag("return_lse", return_lse)
        lse = np.empty((batch, new, query_heads), np.float32) if wants_lse else None
        mask = cpu.attention.NO_MASK
        if attention_mask is not None:
            mask = mask_of(layer, fmt, attention_mask, (batch, query_heads, new))
        form = None
        if sinks is None and isinstance(softmax_scale, NUMBERS) and isinstance(softcap, NUMBERS):
            numbers = type(softmax_scale), softmax_scale, type(softcap), softcap
            form = (query.shape, query.strides, fmt, wants_lse, *numbers)
        if form is None or self.call is None or not self.call.again(form, layer, query, out, lse, mask):
            left = -1 if layer.window is None else layer.window - 1
            weights = attention.weights(
                query_heads, dim, True, False, softmax_scale, (left, -1), softcap, sinks, mask
            )
            call = Call(form, layer, fmt, query, out, lse, weights)
            self.call = call if form else None
        attn_output = out.swapaxes(1, 2)
        return attn_output if lse is None else (attn_output, lse.swapaxes(1, 2))


def asked(layer, query):
    """Format and checked queries, [B, q, Hq, D] in memory; the layer holds all that they can see."""
    span = layer.span
    if layer.store is None:
        raise wrong(layer.name, "keys and values: update comes first", "none")
    batch, heads, dim, *_ = layer.store.geometry
    fmt = check.tensor("query", query, FLOATS, 4)
    _, query_heads, new, _ = query.shape
    if query_heads % heads or not query_heads or query.shape != (batch, query_heads, new, dim):
        wanted = f"shape [{batch}, a multiple of {heads}, q, {dim}] (batch, key heads and head size)"
        raise wrong("query", wanted, query.shape)
    if span.begin > max(0, span.length - new - (layer.window or 0) + 1) or new > span.length:
        wanted = f"tokens whose window {layer.name} still holds"
        raise wrong("query", wanted, f"{new} of {span.length} tokens")
    return fmt, check.one_piece(query.swapaxes(1, 2))


def mask_of(layer, fmt, mask, sizes):
    """A checked mask, as kernels see it: its columns are the rows of the store from the first returned on."""
    span, (batch, query_heads, new) = layer.span, sizes
    if not isinstance(mask, np.ndarray):
        raise wrong("attention_mask", "a numpy array", describe(mask))
    first = span.begin if mask.ndim == 2 else 0  # a padding mask counts positions from 0
    count = span.length - span.begin
    returned = sum(layer.get_mask_sizes(0))
    if mask.ndim == 2:
        legal = {(batch, span.length), (batch, max(returned, span.length))}
        if mask.dtype != np.bool_ or mask.shape not in legal:
            wanted = f"bool [{batch}, {span.length}], a padding mask, or 4 axes"
            raise wrong("attention_mask", wanted, describe(mask))
        mask = mask[:, None, None]
    elif mask.ndim != 4 or mask.shape[3] not in (count, max(returned - span.begin, count)):
        wanted = f"bool [{batch}, {span.length}], or [{batch}, {query_heads}, {new}, {count}], 1 in front"
        raise wrong("attention_mask", wanted, f"shape {mask.shape}")
    mask = mask[..., first : first + count]
    return attention.static_mask(fmt, mask, batch, query_heads, new, count)


class Call:
    """Attention over one store, prepared; made again while only addresses and lengths change.

    What the kernels are prepared for is shapes and how the work is shared out, which changes once in some
    hundred tokens.
    """

    __slots__ = ("counts", "form", "kvlen", "launch", "planned", "step", "store")

    def __init__(self, form, layer, fmt, query, out, lse, weights):
        self.form, self.store = form, layer.store
        first, end = layer.span.rows_from(layer.span.begin)
        self.kvlen = end - first
        context = self.store.context(fmt.name, first, end)
        batch, new = query.shape[:2]
        self.step, self.counts = steps.equal(batch, new, self.kvlen), np.arange(batch + 1)
        self.launch = cpu.attention.prepare(query, out, lse, context, self.step, 0, weights)
        self.planned = self._plan()
        cpu.launches.start(self.launch)

    def _plan(self):
        """What decides the launch: units, items, parts, tiles, and whether one thread is enough."""
        at, numbers = cpu.attention.AT, self.launch.numbers
        *planned, products = numbers[at["units"] : at["products"] + 1].tolist()
        return planned, products < cpu.attention.SMALL

    def again(self, form, layer, query, out, lse, mask):
        """Make the call for another query, mask and length; False if it has to be prepared."""
        store = self.store
        if form != self.form or layer.store is not store:
            return False
        at, numbers, address = cpu.attention.AT, self.launch.numbers, cpu.launches.address
        length, _, begin, origin, _ = layer.span
        row, kvlen = begin - origin, length - begin
        with cpu.launches.running:
            if kvlen != self.kvlen:
                self.kvlen = None
                np.multiply(self.counts, kvlen, out=self.step.kvstarts)
                schedule(numbers)
                if self._plan() != self.planned:
                    return False
                self.kvlen = kvlen
            numbers[at["query"]], numbers[at["out"]] = address(query), address(out)
            store.begin_at(numbers, row)
            numbers[at["mask"] : at["mask"] + len(mask)] = mask
            if lse is not None:
                numbers[at["lse"]] = address(lse)
            self.launch.run()
        return True


def schedule(numbers):
    """Share the work of a changed task out."""
    attend = cpu.attention.attend
    attend.compiled(False)(attend.code("schedule").address, 1, cpu.launches.address(numbers))
