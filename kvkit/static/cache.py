"""Append tokens to a static cache, and read contexts back."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from kvkit.calls.targets import CallTarget, repeated_operator
from kvkit.checks.arguments import CacheArguments, CacheTransfer
from kvkit.layouts import pmx
from kvkit.typed import Array, Pair


@repeated_operator
@pmx.documented(pmx.STATIC)
def key_value_cache(
    on: CallTarget,
    current_key: Array,
    current_value: Array,
    start_pos: SupportsIndex,
    cache: Array,
    scale: Array | None = None,
    *,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: Literal[0, 4, 8] = 0,
    quant_group: int = 8,
    quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None,
    num_repeat: int = 1,
    cache_layout: int = 0,
    out: Pair | None = None,
) -> Pair:
    """Append keys and values to a static cache and read the whole context back.

    All sequences have the same length. The results are read from the cache: if its format is narrower than
    the inputs, the new tokens come back rounded, like the old ones.

    Parameters
    ----------
    current_key, current_value : ndarray, shape [B, S, H, Dh]
        Keys and values of the new tokens: float32, float16, bfloat16, or int8 (copied as it is).
    start_pos : int
        Position of the first new token.
    cache : ndarray, changed in place
        Any float dtype; int8 for ``quant_bit`` 8; int8 or uint8 with a last axis of Dh/2 for ``quant_bit``
        4. Strided views are fine if their last axis is contiguous. Index 0 of the axis of size 2 holds
        keys, 1 values. The axes by ``cache_layout``:
        {layouts}
    scale : ndarray, optional, changed in place
        Scales of a quantized cache, float32, float16 or bfloat16, in its shape with last axis Dh/quant_group.
    num_layer, layer_idx : int
        The number of layers in the cache, and the layer to use.
    quant_bit, quant_group : int
        0 stores floats; 8 and 4 store codes, with one scale per ``quant_group`` elements of a head.
    quant_format : str, optional
        The format of a uint8 cache (``quant_bit`` 0): "e4m3" or "e5m2", 8-bit floats that saturate; or
        "q8_0" or "q4_0", ggml's blocks of 34 or 18 bytes for 32 elements, with their scales inside. 8-bit
        floats are multiplied with ``scale``: None for 1; shape [2] or [2, H] for constant scales of keys and
        values (and of heads); or the cache's shape with a last axis of Dh/quant_group, where the call writes
        the scales that it computes, amax / largest code.
    num_repeat : int
        How many times each head is repeated in the outputs, for grouped-query attention.
    out : tuple of ndarray, optional
        Output arrays for key and value; made if not given.

    Returns
    -------
    key, value : ndarray, shape [B, start_pos + S, H * num_repeat, Dh]
        The dtype is that of ``current_key``.

    Raises
    ------
    KvkitError
        If an argument is wrong; then neither ``cache`` nor ``scale`` has changed.

    Notes
    -----
    PMX operator ``KeyValueCache``.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.zeros((1, 1, 2, 16, 2, 8), np.float16)
    >>> prompt = np.ones((1, 3, 2, 8), np.float32)
    >>> key, value = kvkit.key_value_cache(prompt, prompt, 0, cache)
    >>> key, value = kvkit.key_value_cache(2 * prompt[:, :1], prompt[:, :1], 3, cache)
    >>> key[0, :, 0, 0]
    array([1., 1., 1., 2.], dtype=float32)
    """
    place = CacheArguments(num_layer, layer_idx, quant_bit, quant_group, quant_format, cache_layout)
    call = CacheTransfer(current_key, current_value, cache, scale, place, num_repeat)
    key, value = on.run_in_cache(start_pos, call, out)
    return key, value
