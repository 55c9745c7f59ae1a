"""Define PMX's KeyValueCache: append keys and values to a cache, then read each sequence back."""

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from numpy import ndarray as Array

__all__ = ["dynamic_key_value_cache", "key_value_cache"]


# The axes of a cache, by `cache_layout`: batch, layer, keys or values, row, head, content.
STATIC_LAYOUTS = ("b l kv n h c", "l b kv h n c")
DYNAMIC_LAYOUTS = ("n l kv h c", "l n kv h c", "l kv n h c", "l kv h n c")
LARGEST_CODE = {8: 127, 4: 7}
CACHE_ATTRIBUTES = (
    "num_layer", "layer_idx", "quant_bit", "quant_group", "cache_layout", "cache_mode", "page_size"
)  # fmt: skip


def head_view(array: Array, layout: str, **index: int) -> Array:
    """Return a view of one head of one token; `index` has an integer for each axis but the last."""
    return array[tuple(index[axis] for axis in layout.split()[:-1])]


def cache_row(cachestarts: Array, b: int, t: int, cache_mode: int, page_size: int) -> int:
    """Return the row of a dynamic cache that holds position t of sequence b."""
    if cache_mode == 0:
        return int(cachestarts[b]) + t
    return int(cachestarts[b, t // page_size]) + t % page_size


def divide(a: Any, b: Any, dtype: np.dtype) -> Array:
    """Return a / b, rounded once to a dtype."""
    with np.errstate(all="ignore"):
        return (np.asarray(a, np.float32) / np.asarray(b, np.float32)).astype(dtype)


def quantize_head(x: Array, bits: int, group: int) -> tuple[Array, Array]:
    """Return (codes, int8 [elements]; scales of the dtype of x [groups])."""
    largest = LARGEST_CODE[bits]
    groups = x.reshape(-1, group).astype(np.float32)
    scale = divide(np.abs(groups).max(axis=1), largest, x.dtype)
    scale = np.maximum(scale, np.float32(1e-5).astype(x.dtype))
    quotient = divide(groups, scale[:, None], x.dtype)
    codes = np.clip(np.rint(quotient.astype(np.float32)), -largest, largest)
    with np.errstate(all="ignore"):
        return codes.astype(np.int8).reshape(-1), scale


def dequantize_head(codes: Array, scale: Array, group: int, dtype: np.dtype) -> Array:
    """Return the elements code * scale."""
    with np.errstate(all="ignore"):
        product = codes.reshape(-1, group).astype(np.float32) * scale.astype(np.float32)[:, None]
        return product.astype(scale.dtype).astype(dtype).reshape(-1)


def pack_int4(codes: Array) -> Array:
    """Return bytes of two codes each: the element of even index is in the low nibble."""
    pairs = [(int(codes[2 * k]), int(codes[2 * k + 1])) for k in range(len(codes) // 2)]
    return np.array([(low & 15) | ((high & 15) << 4) for low, high in pairs], np.uint8)


def unpack_int4(packed: Array) -> Array:
    """Return the two codes, int8, of each byte."""
    codes = []
    for byte in packed:
        for nibble in (int(byte) & 15, (int(byte) >> 4) & 15):
            codes.append(nibble - 16 if nibble >= 8 else nibble)
    return np.array(codes, np.int8)


def store_head(x: Array, stored: Array, scale: Any, bits: int, group: int) -> None:
    """Write one head of one token into its place in the cache: as it is if `bits` is 0, or as codes."""
    with np.errstate(all="ignore"):
        if bits == 0:
            stored[:] = x.astype(stored.dtype)
            return
        codes, scales = quantize_head(x, bits, group)
        stored[:] = codes if bits == 8 else pack_int4(codes).view(stored.dtype)
        scale[:] = scales.astype(scale.dtype)


def load_head(stored: Array, scale: Any, bits: int, group: int, dtype: np.dtype) -> Array:
    """Read one head of one token from its place in the cache."""
    if bits == 0:
        with np.errstate(all="ignore"):
            return stored.astype(dtype)
    return dequantize_head(stored if bits == 8 else unpack_int4(stored), scale, group, dtype)


def key_value_cache(
    current_key: Array, current_value: Array, start_pos: Any, cache: Array, scale: Any = None, *,
    num_layer: int = 1, layer_idx: int = 0, quant_bit: int = 0, quant_group: int = 8, num_repeat: int = 1,
    cache_layout: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """Append to a static cache; return (key, value) of all positions."""
    batch, new, heads, dim = current_key.shape
    past = int(np.asarray(start_pos).reshape(-1)[0])
    layout = STATIC_LAYOUTS[cache_layout]

    def place(kv: int, b: int, t: int, h: int) -> tuple[Array, Any]:
        index = {"b": b, "l": layer_idx, "kv": kv, "n": t, "h": h}
        return head_view(cache, layout, **index), head_view(scale, layout, **index) if quant_bit else None

    for kv, current in enumerate((current_key, current_value)):
        for b, i, h in np.ndindex(batch, new, heads):
            store_head(current[b, i, h], *place(kv, b, past + i, h), quant_bit, quant_group)
    out = np.zeros((2, batch, past + new, heads * num_repeat, dim), current_key.dtype)
    for kv, b, t, h in np.ndindex(*out.shape[:-1]):
        out[kv, b, t, h] = load_head(*place(kv, b, t, h // num_repeat), quant_bit, quant_group, out.dtype)
    return out[0], out[1]


def dynamic_key_value_cache(
    current_key: Array, current_value: Array, seqstarts: Array, kvstarts: Array, cachestarts: Array,
    start_pos: Array, max_seqlen: int | None, max_kvlen: int | None, cache: Array, scale: Any = None, *,
    num_layer: int = 1, layer_idx: int = 0, quant_bit: int = 0, quant_group: int = 8, num_repeat: int = 1,
    cache_mode: int = 0, cache_layout: int = 0, page_size: int = 128,
) -> tuple[Array, Array]:  # fmt: skip
    """Append packed sequences to a dynamic cache; return (key, value) of all positions, packed."""
    heads, dim = current_key.shape[1:]
    starts, key_starts, past = ([int(x) for x in index] for index in (seqstarts, kvstarts, start_pos))
    layout = DYNAMIC_LAYOUTS[cache_layout]

    def place(kv: int, b: int, t: int, h: int) -> tuple[Array, Any]:
        row = cache_row(cachestarts, b, t, cache_mode, page_size)
        index = {"l": layer_idx, "kv": kv, "n": row, "h": h}
        return head_view(cache, layout, **index), head_view(scale, layout, **index) if quant_bit else None

    for kv, current in enumerate((current_key, current_value)):
        for b in range(len(past)):
            for i, h in np.ndindex(starts[b + 1] - starts[b], heads):
                x = current[starts[b] + i, h]
                store_head(x, *place(kv, b, past[b] + i, h), quant_bit, quant_group)
    out = np.zeros((2, key_starts[-1], heads * num_repeat, dim), current_key.dtype)
    for kv, b in np.ndindex(2, len(past)):
        for t, h in np.ndindex(key_starts[b + 1] - key_starts[b], heads * num_repeat):
            at = key_starts[b] + t
            out[kv, at, h] = load_head(*place(kv, b, t, h // num_repeat), quant_bit, quant_group, out.dtype)
    return out[0], out[1]
