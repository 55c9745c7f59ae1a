"""A step of packed sequences, checked once for all layers of a model."""

import numpy as np

from kvkit import cpu, launch
from kvkit.checks.attention import checked_cache_attention
from kvkit.checks.key_value_cache import checked_key_value_cache
from kvkit.checks.sequences import planned
from kvkit.dynamic_batching.replay import Replays, form, is_pair, unaligned


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
    return Plan(planned(None, **locals()))


class Plan:
    """The operators over one checked step; `plan` makes it. Its methods may be called for any caches.

    Calls that differ only in the addresses of their arrays, and have neither mask nor sinks, are checked and
    prepared once (see `replay`).
    """

    __slots__ = ("_replays", "_sequences")

    def __init__(self, sequences):
        self._sequences, self._replays = sequences, Replays()

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
        given = launch.arguments(locals())
        arrays, form_ = (current_key, current_value, cache, scale), None
        if out is None or is_pair(out):
            attributes = num_layer, layer_idx, quant_bit, quant_group, num_repeat, cache_layout
            form_ = form((*arrays, *(out or ())), (*attributes, unaligned(out)))
        if form_ in self._replays:
            made = out
            if out is None:
                tokens = self._sequences.steps.context
                shape = tokens, current_key.shape[1] * num_repeat, current_key.shape[2]
                made = np.empty(shape, current_key.dtype), np.empty(shape, current_key.dtype)
            if self._replays.play(form_, (*arrays, *made)):
                return tuple(made)
        call = checked_key_value_cache(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.transfers(call, made, new=out is None)
        cpu.launches.start(*launches)
        if form_ and call.current_key is current_key and call.current_value is current_value:
            inputs = {"current_key": current_key, "current_value": current_value}
            written = {"cache": cache, "scale": scale, "key": made[0], "value": made[1]}
            self._replays.keep(form_, inputs, written, launches)
        return made

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
        given = launch.arguments(locals())
        tokens, form_ = (query, current_key, current_value), None
        if attn_mask is None and sinks is None and return_lse is False:
            form_ = form(
                (*tokens, cache, scale, out),
                (
                    num_heads, head_dim, is_causal, is_alibi, num_kv_heads, num_layer, layer_idx, quant_bit,
                    quant_group, cache_layout, softmax_scale, window, softcap,
                ),
            )  # fmt: skip
        if form_ in self._replays:
            made = np.empty(query.shape, query.dtype) if out is None else out
            if self._replays.play(form_, (*tokens, cache, scale, made)):
                return made
        call = checked_cache_attention(self._sequences, **given)
        made = call.results.taken(out)
        launches = launch.attention(call, made)
        cpu.launches.start(*launches)
        used = call.query, *call.current
        if form_ and all(a is b for a, b in zip(tokens, used, strict=True)):
            written = {"cache": cache, "scale": scale, "out": made[0]}
            self._replays.keep(form_, dict(call.inputs), written, launches)
        return launch.returned(made)
