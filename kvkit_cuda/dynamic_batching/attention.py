"""Attention over packed sequences on the device."""

import functools

from kvkit.dynamic_batching import attention as twin
from kvkit_cuda.dynamic_batching.plan import checked_plan


def multi_head_attention(
    query,
    key,
    value,
    seqstarts,
    kvstarts,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    attn_mask=None,
    *,
    num_heads,
    head_dim,
    is_causal=True,
    is_alibi=False,
    num_kv_heads=0,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
    stream=None,
):
    """The twin of that name in `kvkit` on a CUDA device: the same arguments, results and checks.

    Sums are in another order than on the CPU, so the last bits differ; they depend on no device.

    Parameters
    ----------
    query, key, value, attn_mask, sinks, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    seqstarts, kvstarts, decoding_batches
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    max_seqlen, max_kvlen, num_heads, head_dim, is_causal, is_alibi, num_kv_heads, softmax_scale, window
        As the twin has them.
    softcap, return_lse
        Likewise.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    attn_output : shape [seqstarts[B], num_heads, Dv]
        `out`, or a new array where ``query`` is: numpy's, torch's, CuPy's or else numba's.
    lse : float32, shape [seqstarts[B], num_heads]
        With ``return_lse``, likewise.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong.

    Examples
    --------
    Two sequences, of one query and three keys, and of two and two:

    >>> import numpy as np, kvkit_cuda
    >>> query, key = np.zeros((3, 1, 4), np.float32), np.zeros((5, 1, 4), np.float32)
    >>> value = np.arange(5, dtype=np.float32).reshape(5, 1, 1)
    >>> kvkit_cuda.dynamic_batching.multi_head_attention(
    ...     query, key, value, [0, 1, 3], [0, 3, 5], 1, None, None, num_heads=1, head_dim=4).ravel()
    array([1. , 3. , 3.5], dtype=float32)
    """
    from kvkit_cuda.calls import arrays, launch
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    checked = functools.partial(
        twin.checked_attention,
        seqstarts=arrays.host("seqstarts", seqstarts, stream),
        kvstarts=arrays.host("kvstarts", kvstarts, stream),
        decoding_batches=arrays.host("decoding_batches", decoding_batches, stream),
        max_seqlen=max_seqlen,
        max_kvlen=max_kvlen,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        is_causal=is_causal,
        is_alibi=is_alibi,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
    )
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks}
    return launch.attend(checked, given, out, return_lse, stream)


def multi_head_cache_attention(
    query,
    current_key,
    current_value,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches,
    max_seqlen,
    max_kvlen,
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
    cache_mode=0,
    cache_layout=0,
    page_size=128,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
    stream=None,
):
    """The twin of that name in `kvkit` on a CUDA device: the same arguments, results and checks.

    What is stored has the bits that the CPU stores; see `multi_head_attention` for those of the results.
    Tensor cores read codes as a load gives them, rounded to the type of the data; other kernels as the CPU
    does, as products with their scales in float32.

    Parameters
    ----------
    query, current_key, current_value, cache, scale, attn_mask, sinks, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    seqstarts, kvstarts, cachestarts, start_pos, decoding_batches
        As the twin has them. They are best on the host: the call waits for those that are on the device,
        where a page table is checked and stays.
    max_seqlen, max_kvlen, num_heads, head_dim, is_causal, is_alibi, num_kv_heads, num_layer, layer_idx
        As the twin has them.
    quant_bit, quant_group, cache_mode, cache_layout, page_size, softmax_scale, window, softcap, return_lse
        Likewise.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    attn_output : shape [seqstarts[B], num_heads, head_dim]
        `out`, or a new array where ``query`` is: numpy's, torch's, CuPy's or else numba's.
    lse : float32, shape [seqstarts[B], num_heads]
        With ``return_lse``, likewise.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then neither ``cache`` nor ``scale`` has changed.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> cache = np.zeros((16, 1, 2, 2, 8), np.float16)
    >>> new = np.arange(4, dtype=np.float32)[:, None, None] * np.ones((4, 2, 8), np.float32)
    >>> output = kvkit_cuda.dynamic_batching.multi_head_cache_attention(
    ...     np.zeros((4, 4, 8), np.float32), new, new, [0, 3, 4], [0, 3, 4], [[8], [4]], [0, 0], 0,
    ...     None, None, cache, num_heads=4, head_dim=8, num_kv_heads=2, cache_mode=1, page_size=4)
    >>> output[:, 0, 0]
    array([0. , 0.5, 1. , 3. ], dtype=float32)
    """
    step = checked_plan(
        ("query", query),
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
    )
    return step.multi_head_cache_attention(
        query,
        current_key,
        current_value,
        cache,
        scale,
        attn_mask,
        num_heads=num_heads,
        head_dim=head_dim,
        is_causal=is_causal,
        is_alibi=is_alibi,
        num_kv_heads=num_kv_heads,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
        stream=stream,
    )
