"""Append to a static cache on the device, and gather from it."""

from kvkit import check, layout, steps


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
        it, unless arrays are copied back.

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
    from kvkit_cuda import arrays, device, launch

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
