"""A step of packed sequences, checked once for all layers of a model."""

import numpy as np

from kvkit import attention, check, cpu, layout, steps
from kvkit.launch import append_and_load
from kvkit.repeats import Guarded, Repeats, form


def plan(
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches=0,
    *,
    max_seqlen=None,
    max_kvlen=None,
    cache_mode=0,
    page_size=128,
):
    """Check the index tensors of a step, which are the same for every layer of a model, once.

    Parameters
    ----------
    seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size
        As in `key_value_cache`. They are copied: what happens to the arrays later changes nothing.
    decoding_batches : int
        How many sequences, from the first on, the causal mask leaves alone.

    Returns
    -------
    Plan
        Its methods run the operators of this module for one layer.

    Raises
    ------
    KvkitError
        If an index tensor is wrong.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> step = kvkit.dynamic_batching.plan([0, 3, 4], [0, 3, 4], [8, 4], [0, 0])
    >>> cache = np.zeros((2, 2, 1, 16, 8), np.float16)
    >>> new = np.ones((4, 1, 8), np.float32)
    >>> for layer in range(2):
    ...     output = step.multi_head_cache_attention(
    ...         new, new, new, cache, num_heads=1, head_dim=8, num_layer=2, layer_idx=layer, cache_layout=3)
    >>> output.shape, int(cache[1, 0, 0, :, 0].sum())
    ((4, 1, 8), 4)
    """
    return checked_plan(
        None,
        seqstarts,
        kvstarts,
        cachestarts,
        start_pos,
        decoding_batches,
        max_seqlen,
        max_kvlen,
        cache_mode,
        page_size,
    )


def checked_plan(
    tokens,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    cache_mode,
    page_size,
):
    """A plan for an array of so many tokens, or one that lasts, for any: it alone prepares repetitions."""
    step = steps.dynamic(
        tokens, seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size
    )
    decoding = check.integer("decoding_batches", decoding_batches, 0, len(step.start_pos))
    return Plan(step, decoding, lasting=tokens is None)


# The arrays of calls that repeat, by the names that launches have for them; what is written comes last.
LOADED = "current_key", "current_value", "cache", "scale", "key", "value"
ATTENDED = "query", "current_key", "current_value", "cache", "scale", "out"


def is_pair(out):
    """Whether outputs are two arrays."""
    return isinstance(out, (tuple, list)) and len(out) == 2 and all(isinstance(a, np.ndarray) for a in out)


def unaligned(out):
    """Whether given outputs lie where a load may not write around the caches, which takes other code."""
    return None if out is None else any(cpu.launches.address(array) % 16 for array in out)


class Plan:
    """The operators over one checked step; `plan` makes it. Its methods may be called for any caches.

    Calls that differ only in the addresses of their arrays, and have neither mask nor sinks, are checked and
    prepared once (see `repeats`) if the plan is `lasting`.
    """

    __slots__ = ("_decoding", "_lasting", "_repeats", "_steps")

    def __init__(self, checked, decoding, lasting):
        self._steps, self._decoding = checked, decoding
        self._lasting, self._repeats = lasting, Repeats()

    def key_value_cache(
        self,
        current_key,
        current_value,
        cache,
        scale=None,
        *,
        num_layer=1,
        layer_idx=0,
        quant_bit=0,
        quant_group=8,
        num_repeat=1,
        cache_layout=0,
        out=None,
    ):
        """`dynamic_batching.key_value_cache` for this step."""
        step, given, call = self._steps, (current_key, current_value), None
        if self._lasting and (out is None or is_pair(out)):
            call = form(
                (*given, cache, scale, *(out or ())),
                (num_layer, layer_idx, quant_bit, quant_group, num_repeat, cache_layout, unaligned(out)),
            )
        prepared = self._repeats.get(call) if call else None
        if prepared:
            made = out
            if out is None:
                shape = step.context, current_key.shape[1] * num_repeat, current_key.shape[2]
                made = np.empty(shape, current_key.dtype), np.empty(shape, current_key.dtype)
            if prepared.run(dict(zip(LOADED, (*given, cache, scale, *made), strict=True))):
                return tuple(made)
        fmt, current_key, current_value = check.current(current_key, current_value, 3)
        tokens, heads, dim = current_key.shape
        repeat = check.integer("num_repeat", num_repeat, 1)
        layer = check.cache_layer(
            fmt,
            heads,
            dim,
            cache,
            scale,
            layout.DYNAMIC,
            num_layer,
            layer_idx,
            quant_bit,
            quant_group,
            cache_layout,
        )
        steps.fits(step, ("current_key", tokens), layer)
        shape = (step.context, heads * repeat, dim)
        (key, value), launches = append_and_load(
            fmt, current_key, current_value, cache, scale, layer, step, repeat, shape, out
        )
        if call and current_key is given[0] and current_value is given[1]:
            arrays = dict(zip(LOADED, (*given, cache, scale, key, value), strict=True))
            self._repeats.keep(call, Guarded(launches, arrays, LOADED[2:]))
        return key, value

    def multi_head_cache_attention(
        self,
        query,
        current_key,
        current_value,
        cache,
        scale=None,
        attn_mask=None,
        *,
        num_heads,
        head_dim,
        is_causal=True,
        is_alibi=False,
        num_kv_heads=0,
        num_layer=1,
        layer_idx=0,
        quant_bit=0,
        quant_group=8,
        cache_layout=0,
        softmax_scale=None,
        window=(-1, -1),
        softcap=0.0,
        sinks=None,
        return_lse=False,
        out=None,
    ):
        """`dynamic_batching.multi_head_cache_attention` for this step."""
        step, given, call = self._steps, (query, current_key, current_value), None
        if self._lasting and attn_mask is None and sinks is None and return_lse is False:
            call = form(
                (*given, cache, scale, out),
                (
                    num_heads, head_dim, is_causal, is_alibi, num_kv_heads, num_layer, layer_idx, quant_bit,
                    quant_group, cache_layout, softmax_scale, window, softcap,
                ),
            )  # fmt: skip
        prepared = self._repeats.get(call) if call else None
        if prepared:
            made = np.empty(query.shape, query.dtype) if out is None else out
            if prepared.run(dict(zip(ATTENDED, (*given, cache, scale, made), strict=True))):
                return made
        checked = checked_cache_attention(
            step,
            self._decoding,
            *given,
            cache,
            scale,
            attn_mask,
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            num_layer=num_layer,
            layer_idx=layer_idx,
            quant_bit=quant_bit,
            quant_group=quant_group,
            cache_layout=cache_layout,
            is_causal=is_causal,
            is_alibi=is_alibi,
            softmax_scale=softmax_scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        inputs, (current_key, current_value) = checked.inputs, checked.current
        out, lse = attention.outputs(out, checked.shape, checked.fmt, return_lse, inputs + checked.written)
        results, launches = attention.append_and_attend(
            current_key,
            current_value,
            checked.query,
            out,
            lse,
            checked.layer,
            step,
            self._decoding,
            checked.weights,
        )
        used = checked.query, current_key, current_value
        if call and all(a is b for a, b in zip(given, used, strict=True)):
            arrays = dict(zip(ATTENDED, (*given, cache, scale, out), strict=True))
            self._repeats.keep(call, Guarded(launches, arrays, ATTENDED[3:]))
        return results


def checked_cache_attention(
    step,
    decoding,
    query,
    current_key,
    current_value,
    cache,
    scale,
    attn_mask,
    *,
    num_heads,
    head_dim,
    num_kv_heads,
    num_layer,
    layer_idx,
    quant_bit,
    quant_group,
    cache_layout,
    sinks,
    **attributes,
):
    """The checked call of `multi_head_cache_attention` for a checked step."""
    fmt, query, kv_heads = attention.queries(query, 3, num_heads, head_dim, num_kv_heads)
    tokens, num_heads, head_dim = query.shape
    current = check.new_tokens(fmt, current_key, current_value, (tokens, kv_heads, head_dim))
    layer = check.cache_layer(
        fmt,
        kv_heads,
        head_dim,
        cache,
        scale,
        layout.DYNAMIC,
        num_layer,
        layer_idx,
        quant_bit,
        quant_group,
        cache_layout,
    )
    steps.fits(step, ("query", tokens), layer)
    mask = attention.dynamic_mask(fmt, attn_mask, num_heads, tokens, step.context)
    weights = attention.weights(num_heads, head_dim, sinks=sinks, mask=mask, **attributes)
    return attention.cached(fmt, query, step, decoding, weights, current, layer, cache, scale, attn_mask)
