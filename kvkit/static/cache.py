"""Append to a static cache, and gather from it."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from kvkit.calls.steps import load_static
from kvkit.checks.arguments import CacheArguments, CacheTransfer
from kvkit.interop import returns_input_kind
from kvkit.layouts import pmx
from kvkit.typed import Array, Pair


@returns_input_kind
@pmx.documented(pmx.STATIC)
def key_value_cache(
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

    Every sequence is at the same position. What comes back is what the cache holds: with a narrower or
    quantized cache the new tokens come back rounded like the old ones.

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
        Scales of a quantized cache, float32, float16 or bfloat16: its shape with last axis Dh/quant_group.
    num_layer, layer_idx : int
        Layers in the cache, and the one to use.
    quant_bit, quant_group : int
        0 stores floats, 8 and 4 store codes with one scale for each ``quant_group`` elements of a head.
    quant_format : str, optional
        With ``quant_bit`` 0, what a uint8 cache holds: "e4m3" or "e5m2", floats of 8 bits that saturate; or
        "q8_0" or "q4_0", ggml's blocks of 34 or 18 bytes for 32 elements, with their scales inside. Floats
        of 8 bits are multiplied with ``scale``: 1 if None; given ones of keys and values of shape [2] or
        [2, H]; or, of its shape with last axis Dh/quant_group, the largest magnitudes / the largest code,
        which are written.
    num_repeat : int
        Each head comes back this many times, for grouped-query attention.
    out : tuple of ndarray, optional
        Arrays for key and value; made if not given.

    Returns
    -------
    key, value : ndarray, shape [B, start_pos + S, H * num_repeat, Dh]
        Of the dtype of ``current_key``.

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
    return load_static(start_pos, call, out)
