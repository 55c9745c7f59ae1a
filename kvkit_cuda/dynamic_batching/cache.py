"""Append to a dynamic cache, and gather from it, on the device."""

from kvkit_cuda.dynamic_batching.plan import checked_plan


def key_value_cache(
    current_key,
    current_value,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    max_seqlen,
    max_kvlen,
    cache,
    scale=None,
    *,
    num_layer=1,
    layer_idx=0,
    quant_bit=0,
    quant_group=8,
    num_repeat=1,
    cache_mode=0,
    cache_layout=0,
    page_size=128,
    out=None,
    stream=None,
):
    """The twin of that name in `kvkit` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    current_key, current_value, cache, scale, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    seqstarts, kvstarts, cachestarts, start_pos
        As the twin has them. They are best on the host: the call waits for those that are on the device,
        where a page table is checked and stays.
    max_seqlen, max_kvlen : int or None
        At least the longest sequence of new tokens, and context. They change no result.
    num_layer, layer_idx, quant_bit, quant_group, num_repeat, cache_mode, cache_layout, page_size : int
        As the twin has them.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    key, value : shape [kvstarts[B], H * num_repeat, Dh]
        `out`, or new arrays where ``current_key`` is: numpy's, torch's, CuPy's or else numba's.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has changed.

    Examples
    --------
    Two sequences, three new tokens and one, in pages of four rows:

    >>> import numpy as np, kvkit_cuda
    >>> cache = np.zeros((16, 1, 2, 2, 8), np.int8)
    >>> scale = np.zeros((16, 1, 2, 2, 1), np.float16)
    >>> tokens = np.arange(4, dtype=np.float32)[:, None, None] * np.ones((4, 2, 8), np.float32)
    >>> key, value = kvkit_cuda.dynamic_batching.key_value_cache(
    ...     tokens, tokens, np.array([0, 3, 4]), np.array([0, 3, 4]), np.array([[8], [4]]), np.array([0, 0]),
    ...     None, None, cache, scale, quant_bit=8, cache_mode=1, page_size=4)
    >>> cache[[8, 9, 10, 4], 0, 0, 0, 0]
    array([  0, 127, 127, 127], dtype=int8)
    """
    step = checked_plan(
        ("current_key", current_key),
        seqstarts,
        kvstarts,
        cachestarts,
        start_pos,
        0,
        max_seqlen,
        max_kvlen,
        cache_mode,
        page_size,
        stream,
    )
    return step.key_value_cache(
        current_key,
        current_value,
        cache,
        scale,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        num_repeat=num_repeat,
        cache_layout=cache_layout,
        out=out,
        stream=stream,
    )
