"""The operators over static batches on the device."""

import functools

from kvkit import check, layout, steps
from kvkit.static import attention as twin


def key_value_cache(
    current_key,
    current_value,
    start_pos,
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
    """`kvkit.key_value_cache` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    current_key, current_value, start_pos, cache, scale, out
        As `kvkit.key_value_cache` has them, each an array of the current device (with the CUDA array
        interface or DLPack; used where it is) or of numpy (copied to the device, and back if it changes).
    num_layer, layer_idx, quant_bit, quant_group, num_repeat, cache_layout : int
        As `kvkit.key_value_cache` has them.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    key, value : shape [B, start_pos + S, H * num_repeat, Dh]
        `out`, or new arrays where ``current_key`` is: numpy's, torch's, CuPy's or else numba's.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has changed.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> cache = np.zeros((1, 1, 2, 16, 2, 8), np.float16)
    >>> prompt = np.ones((1, 3, 2, 8), np.float32)
    >>> key, value = kvkit_cuda.key_value_cache(prompt, prompt, 0, cache)
    >>> key, value = kvkit_cuda.key_value_cache(2 * prompt[:, :1], prompt[:, :1], 3, cache)
    >>> key[0, :, 0, 0]
    array([1., 1., 1., 2.], dtype=float32)
    """
    from kvkit_cuda.calls import arrays, launch
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    start_pos = arrays.host("start_pos", start_pos, stream)

    def checked(current_key, current_value, cache, scale):
        fmt, current_key, current_value = check.current(current_key, current_value, 4)
        batch, seqlen, heads, dim = current_key.shape
        repeat = check.integer("num_repeat", num_repeat, 1)
        layer = check.cache_layer(
            fmt,
            heads,
            dim,
            cache,
            scale,
            layout.STATIC,
            num_layer,
            layer_idx,
            quant_bit,
            quant_group,
            cache_layout,
        )
        past = check.integer("start_pos", start_pos, 0)
        step = steps.static(batch, seqlen, past, layer)
        shape = (batch, past + seqlen, heads * repeat, dim)
        return launch.Call(fmt, current_key, current_value, layer, step, repeat, shape)

    return launch.append_and_load(checked, current_key, current_value, cache, scale, out, stream)


def multi_head_attention(
    query,
    key,
    value,
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
    """`kvkit.multi_head_attention` on a CUDA device: the same arguments, results and checks.

    Sums are in another order than on the CPU, so the last bits differ; they depend on no device.

    Parameters
    ----------
    query, key, value, attn_mask, sinks, out
        As `kvkit.multi_head_attention` has them, each an array of the current device (with the CUDA array
        interface or DLPack; used where it is) or of numpy (copied to the device, and back if it changes).
    num_heads, head_dim, is_causal, is_alibi, num_kv_heads, softmax_scale, window, softcap, return_lse
        As `kvkit.multi_head_attention` has them.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    attn_output : shape [B, S, num_heads, Dv]
        `out`, or a new array where ``query`` is: numpy's, torch's, CuPy's or else numba's.
    lse : float32, shape [B, S, num_heads]
        With ``return_lse``, likewise.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> query, key = np.zeros((1, 2, 1, 4), np.float32), np.ones((1, 3, 1, 4), np.float32)
    >>> value = np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    >>> kvkit_cuda.multi_head_attention(query, key, value, num_heads=1, head_dim=4).ravel()
    array([0.5, 1. ], dtype=float32)
    """
    from kvkit_cuda.calls import launch
    from kvkit_cuda.ground import device

    device.require()
    checked = functools.partial(
        twin.checked_attention,
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
    return launch.attend(checked, given, out, return_lse, device.stream(stream))


def multi_head_cache_attention(
    query,
    current_key,
    current_value,
    start_pos,
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
    """`kvkit.multi_head_cache_attention` on a CUDA device: the same arguments, results and checks.

    What is stored has the bits that the CPU stores; see `multi_head_attention` for those of the results.
    Tensor cores read codes as a load gives them, rounded to the type of the data; other kernels as the CPU
    does, as products with their scales in float32.

    Parameters
    ----------
    query, current_key, current_value, start_pos, cache, scale, attn_mask, sinks, out
        As `kvkit.multi_head_cache_attention` has them, each an array of the current device (with the CUDA
        array interface or DLPack; used where it is) or of numpy (copied to the device, and back if it
        changes).
    num_heads, head_dim, is_causal, is_alibi, num_kv_heads, num_layer, layer_idx, quant_bit, quant_group
        As `kvkit.multi_head_cache_attention` has them.
    cache_layout, softmax_scale, window, softcap, return_lse
        Likewise.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    attn_output : shape [B, S, num_heads, head_dim]
        `out`, or a new array where ``query`` is: numpy's, torch's, CuPy's or else numba's.
    lse : float32, shape [B, S, num_heads]
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
    >>> cache = np.zeros((1, 1, 2, 16, 1, 4), np.float16)
    >>> new, sizes = np.ones((1, 1, 1, 4), np.float32), {"num_heads": 1, "head_dim": 4}
    >>> first = kvkit_cuda.multi_head_cache_attention(new, new, 2 * new, 0, cache, **sizes)
    >>> second = kvkit_cuda.multi_head_cache_attention(new, new, 4 * new, 1, cache, **sizes)
    >>> first[0, 0, 0, 0], second[0, 0, 0, 0]
    (np.float32(2.0), np.float32(3.0))
    """
    from kvkit_cuda.calls import arrays, launch
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    checked = functools.partial(
        twin.checked_cache_attention,
        start_pos=arrays.host("start_pos", start_pos, stream),
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
    return launch.attend(checked, given, out, return_lse, stream)
