"""A step of packed sequences on the device, checked and copied there once for all layers of a model."""

import functools

from kvkit import attention, check, layout, steps
from kvkit.dynamic_batching.planned import checked_cache_attention


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
    check=True,
    stream=None,
):
    """`kvkit.dynamic_batching.plan` for the device: index tensors are checked, and copied there, once.

    After the first call of its form a call of the plan's methods copies nothing to the device and allocates
    nothing there, if its arrays lie there and results are given as ``out``.

    Parameters
    ----------
    seqstarts, kvstarts, start_pos
        As the twin has them. They are best on the host, which needs them: those that are on the device are
        read, and the call waits for them.
    cachestarts
        As the twin has it. A page table that is on the device is checked there, and stays there.
    decoding_batches, max_seqlen, max_kvlen, cache_mode, page_size
        As the twin has them.
    check : bool
        False for index tensors that a plan, for the same caches, has checked once. Then of their entries only
        the totals are looked at; wrong ones make kernels read and write any memory.
    stream : optional
        The stream that those on the device are made on.

    Returns
    -------
    Plan
        Its methods run the operators of this module for one layer, with a ``stream`` of their own.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an index tensor is wrong.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> step = kvkit_cuda.dynamic_batching.plan([0, 3, 4], [0, 3, 4], [8, 4], [0, 0])
    >>> cache, new = np.zeros((2, 2, 1, 16, 8), np.float16), np.ones((4, 1, 8), np.float32)
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
        stream,
        check,
    )


def checked_plan(
    array,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    cache_mode,
    page_size,
    stream,
    wanted=True,
):
    """A plan for (name, array) of packed tokens, or one that lasts, for any; checked if so `wanted`."""
    from kvkit_cuda.calls import arrays
    from kvkit_cuda.calls.tables import Tables
    from kvkit_cuda.ground import device

    device.require()
    stream, wanted = device.stream(stream), attention.flag("check", wanted)
    vectors = {"seqstarts": seqstarts, "kvstarts": kvstarts, "start_pos": start_pos}
    table = arrays.operand("cachestarts", cachestarts, stream)
    stays = table.on_device and table.seen.ndim == 2 and table.seen.size > 0
    tokens = None
    if array is not None:
        name, given = array
        tokens = check.packed_tokens(name, arrays.operand(name, given, stream).seen)
    step = steps.unchecked(
        tokens,
        **{name: arrays.host(name, index, stream) for name, index in vectors.items()},
        cachestarts=table.seen if stays else table.read(stream),
        max_seqlen=max_seqlen,
        max_kvlen=max_kvlen,
        cache_mode=cache_mode,
        page_size=page_size,
        take=steps.of_form if stays else steps.index,
    )
    if stays:
        from kvkit_cuda.calls import scan

        tables = scan.taken(step, wanted, stream, lasting=array is None)
    else:
        tables = Tables(steps.checked(step) if wanted else step, lasting=array is None)
    decoding = arrays.host("decoding_batches", decoding_batches, stream)
    return Plan(tables, check.integer("decoding_batches", decoding, 0, len(step.start_pos)))


class Plan:
    """The operators over one checked step; `plan` makes it. Its methods may be called for any caches."""

    __slots__ = ("_decoding", "_tables")

    def __init__(self, tables, decoding):
        self._tables, self._decoding = tables, decoding

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
        stream=None,
    ):
        """`dynamic_batching.key_value_cache` for this step."""
        from kvkit_cuda.calls import launch
        from kvkit_cuda.ground import device

        step = self._tables.steps

        def checked(current_key, current_value, cache, scale):
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
            shape = step.context, heads * repeat, dim
            return launch.Call(fmt, current_key, current_value, layer, step, repeat, shape)

        arrays = current_key, current_value, cache, scale
        return launch.append_and_load(checked, *arrays, out, device.stream(stream), self._tables)

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
        stream=None,
    ):
        """`dynamic_batching.multi_head_cache_attention` for this step."""
        from kvkit_cuda.calls import launch
        from kvkit_cuda.ground import device

        checked = functools.partial(
            checked_cache_attention,
            self._tables.steps,
            self._decoding,
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
        )
        given = {
            "query": query,
            "current_key": current_key,
            "current_value": current_value,
            "cache": cache,
            "scale": scale,
            "attn_mask": attn_mask,
            "sinks": sinks,
        }
        return launch.attend(checked, given, out, return_lse, device.stream(stream), self._tables)
