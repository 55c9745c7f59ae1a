"""Attention over what a layer has just stored, read where it lies."""

import numpy as np

from kvkit import cpu
from kvkit.checks import attention, index_tensors, masks, tensors
from kvkit.checks.records import NO_MASK
from kvkit.checks.values import flag
from kvkit.checks.words import describe, wrong
from kvkit.formats import FLOATS
from kvkit.repeats import addresses, form


def attend(
    self,
    query,
    attention_mask=None,
    *,
    softmax_scale=None,
    softcap=0.0,
    sinks=None,
    return_lse=False,
):
    """Attend with the queries of the last tokens, causally and within the layer's window.

    Keys and values are read where they lie; nothing of the size of the context is made. Query i of q is the
    token at position n - q + i when n tokens have been seen; so the queries of an update's last tokens alone
    are as good. Query head h uses key head ``h // (Hq // Hkv)``.

    Parameters
    ----------
    query : ndarray, shape [B, Hq, q, Dk]
        float32, float16 or bfloat16, of any strides.
    attention_mask : ndarray, optional
        bool [B, n]: which positions may be seen at all (padding may not). Or with 4 axes, right-aligned to
        [B, Hq, q, kv_length], where the first three may be 1: bool, or added to the scores and of the dtype
        of ``query``; kv_length is that of `get_mask_sizes`, as asked before the update. Columns of a static
        layer that hold no token may be left out.
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
        Of the dtype of ``query``. In memory [B, q, Hq, Dv], so that swapping both axes back and joining the
        heads, as the next projection needs it, copies nothing.
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
    fmt, query = asked(self, query)
    batch, new, query_heads, _ = query.shape
    out = np.empty((batch, new, query_heads, self._store.geometry.value_dim), query.dtype)
    wants_lse = flag("return_lse", return_lse)
    lse = np.empty((batch, new, query_heads), np.float32) if wants_lse else None
    mask = NO_MASK
    if attention_mask is not None:
        mask = mask_of(self, fmt, attention_mask, (batch, query_heads, new))
    arrays = {"query": query, "out": out, "lse": lse}
    call = form((query,), (wants_lse, softmax_scale, softcap)) if sinks is None else None
    if call is None or self._call is None or not self._call.again(call, self, arrays, mask):
        left = -1 if self.window is None else self.window - 1
        weights = attention.weights(
            query, mask, is_causal=True, is_alibi=False, softmax_scale=softmax_scale,
            window=(left, -1), softcap=softcap, sinks=sinks,
        )  # fmt: skip
        made = Call(call, self, fmt, arrays, weights)
        self._call = made if call else None
    attn_output = out.swapaxes(1, 2)
    return attn_output if lse is None else (attn_output, lse.swapaxes(1, 2))


def asked(layer, query):
    """Format and checked queries, [B, q, Hq, D] in memory; the layer holds all that they can see."""
    if layer._store is None:
        raise wrong(layer.name, "keys and values: update comes first", "none")
    batch, heads, dim, *_ = layer._store.geometry
    fmt = tensors.tensor("query", query, FLOATS, 4)
    _, query_heads, new, _ = query.shape
    if query_heads % heads or not query_heads or query.shape != (batch, query_heads, new, dim):
        wanted = f"shape [{batch}, a multiple of {heads}, q, {dim}] (batch, key heads and head size)"
        raise wrong("query", wanted, query.shape)
    if layer._begin > max(0, layer._length - new - (layer.window or 0) + 1) or new > layer._length:
        wanted = f"tokens whose window {layer.name} still holds"
        raise wrong("query", wanted, f"{new} of {layer._length} tokens")
    return fmt, tensors.one_piece(query.swapaxes(1, 2))


def mask_of(layer, fmt, mask, sizes):
    """A checked mask, as kernels see it: its columns are the rows of the store from the first returned on."""
    batch, query_heads, new = sizes
    if not isinstance(mask, np.ndarray):
        raise wrong("attention_mask", "a numpy array", describe(mask))
    first = layer._begin if mask.ndim == 2 else 0  # a padding mask counts positions from 0
    count = layer._length - layer._begin
    _, returned = layer._span(layer._length, 0)
    if mask.ndim == 2:
        legal = {(batch, layer._length), (batch, max(returned, layer._length))}
        if mask.dtype != np.bool_ or mask.shape not in legal:
            wanted = f"bool [{batch}, {layer._length}], a padding mask, or 4 axes"
            raise wrong("attention_mask", wanted, describe(mask))
        mask = mask[:, None, None]
    elif mask.ndim != 4 or mask.shape[3] not in (count, max(returned - layer._begin, count)):
        wanted = f"bool [{batch}, {layer._length}], or [{batch}, {query_heads}, {new}, {count}], 1 in front"
        raise wrong("attention_mask", wanted, f"shape {mask.shape}")
    mask = mask[..., first : first + count]
    return masks.static_mask(fmt, mask, batch, query_heads, new, count)


class Call:
    """Attention over one store, prepared; made again while only addresses and lengths change.

    What the kernels are prepared for is shapes and how the work is shared out, which changes once in some
    hundred tokens.
    """

    __slots__ = ("counts", "form", "kvlen", "launch", "mask", "planned", "repeat", "step", "store")

    def __init__(self, form, layer, fmt, arrays, weights):
        self.form, self.store, self.mask = form, layer._store, weights.mask
        self.kvlen = layer._length - layer._begin
        context = self.store.context(fmt.name, layer._begin - layer._origin, layer._length - layer._origin)
        batch, new = arrays["query"].shape[:2]
        self.step, self.counts = index_tensors.equal(batch, new, self.kvlen), np.arange(batch + 1)
        self.launch = cpu.attention.prepare(*arrays.values(), context, self.step, 0, weights)
        self.planned = cpu.attention.planned(self.launch.numbers)
        if form is not None:
            self.repeat = cpu.launches.Repeat([self.launch], addresses(arrays))
        cpu.launches.start(self.launch)

    def again(self, form, layer, arrays, mask):
        """Make the call for another query, mask and length; False if it has to be prepared."""
        if form != self.form or layer._store is not self.store:
            return False
        row, kvlen = layer._begin - layer._origin, layer._length - layer._begin
        return self.repeat.run(addresses(arrays), lambda: self.follows(row, kvlen, mask))

    def follows(self, row, kvlen, mask):
        """Let the launch begin at another row, and end at another length unless it takes another launch."""
        numbers = self.launch.numbers
        if kvlen != self.kvlen:
            self.kvlen = None
            np.multiply(self.counts, kvlen, out=self.step.kvstarts)
            cpu.attention.schedule(numbers)
            if cpu.attention.planned(numbers) != self.planned:
                return False
            self.kvlen = kvlen
        self.store.begin_at(numbers, row)
        if mask != self.mask:
            at = cpu.attention.AT["mask"]
            numbers[at : at + len(mask)], self.mask = mask, mask
        return True
