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


def place(layout: str, **index: Any) -> tuple[Any, ...]:
    """Return the index of [n, h, c] in a cache of this layout, for rows n and numbers of the other axes."""
    return tuple(index.get(axis, slice(None)) for axis in layout.split())


def cache_row(cachestarts: Array, b: int, t: int, cache_mode: int, page_size: int) -> int:
    """Return the row of a dynamic cache that holds position t of sequence b."""
    if cache_mode == 0:
        return int(cachestarts[b]) + t
    return int(cachestarts[b, t // page_size]) + t % page_size


def divide(a: Any, b: Any, dtype: np.dtype) -> Array:
    """Return a / b, rounded once to a dtype."""
    with np.errstate(all="ignore"):
        return (np.asarray(a, np.float32) / np.asarray(b, np.float32)).astype(dtype)


def quantize_heads(x: Array, bits: int, group: int) -> tuple[Array, Array]:
    """Return (codes, int8 [.., elements]; scales of the dtype of x [.., groups])."""
    largest = LARGEST_CODE[bits]
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group).astype(np.float32)
    scale = divide(np.abs(groups).max(axis=-1), largest, x.dtype)
    scale = np.maximum(scale, np.float32(1e-5).astype(x.dtype))
    quotient = divide(groups, scale[..., None], x.dtype)
    codes = np.clip(np.rint(quotient.astype(np.float32)), -largest, largest)
    with np.errstate(all="ignore"):
        return codes.astype(np.int8).reshape(x.shape), scale


def dequantize_heads(codes: Array, scale: Array, group: int, dtype: np.dtype) -> Array:
    """Return the elements code * scale of codes [.., elements] and scales [.., groups]."""
    with np.errstate(all="ignore"):
        groups = codes.reshape(*scale.shape, group).astype(np.float32)
        product = groups * scale.astype(np.float32)[..., None]
        return product.astype(scale.dtype).astype(dtype).reshape(codes.shape)


def pack_int4(codes: Array) -> Array:
    """Return bytes of two codes each: the element of even index is in the low nibble."""
    nibbles = codes.astype(np.uint8) & 15
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Array) -> Array:
    """Return the two codes, int8, of each byte."""
    pairs = np.stack([packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4], axis=-1)
    nibbles = pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1]).astype(np.int8)
    return np.where(nibbles >= 8, nibbles - 16, nibbles)


def store_heads(x: Array, cache: Array, scale: Any, at: Any, bits: int, group: int) -> None:
    """Write heads to the index `at` of a cache: as they are if `bits` is 0, or as codes."""
    with np.errstate(all="ignore"):
        if bits == 0:
            cache[at] = x.astype(cache.dtype)
            return
        codes, scales = quantize_heads(x, bits, group)
        cache[at] = codes if bits == 8 else pack_int4(codes).view(cache.dtype)
        scale[at] = scales.astype(scale.dtype)


def load_heads(cache: Array, scale: Any, at: Any, bits: int, group: int, dtype: np.dtype) -> Array:
    """Read heads from the index `at` of a cache."""
    if bits == 0:
        with np.errstate(all="ignore"):
            return cache[at].astype(dtype)
    codes = cache[at] if bits == 8 else unpack_int4(cache[at])
    return dequantize_heads(codes, scale[at], group, dtype)


def key_value_cache(
    current_key: Array, current_value: Array, start_pos: Any, cache: Array, scale: Any = None, *,
    num_layer: int = 1, layer_idx: int = 0, quant_bit: int = 0, quant_group: int = 8, num_repeat: int = 1,
    cache_layout: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """Append to a static cache; return (key, value) of all positions."""
    batch, new, heads, dim = current_key.shape
    past = int(np.asarray(start_pos).reshape(-1)[0])
    layout, stored = STATIC_LAYOUTS[cache_layout], (quant_bit, quant_group)
    out = np.zeros((2, batch, past + new, heads * num_repeat, dim), current_key.dtype)
    for kv, b in np.ndindex(2, batch):
        index: dict[str, Any] = {"b": b, "l": layer_idx, "kv": kv}
        at = place(layout, **index, n=past + np.arange(new))
        store_heads((current_key, current_value)[kv][b], cache, scale, at, *stored)
        at = place(layout, **index, n=np.arange(past + new))
        out[kv, b] = np.repeat(load_heads(cache, scale, at, *stored, out.dtype), num_repeat, axis=1)
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
    layout, stored = DYNAMIC_LAYOUTS[cache_layout], (quant_bit, quant_group)

    def places(kv: int, b: int, positions: range) -> tuple[Any, ...]:
        rows = [cache_row(cachestarts, b, t, cache_mode, page_size) for t in positions]
        return place(layout, l=layer_idx, kv=kv, n=np.array(rows, np.int64))

    for kv, b in np.ndindex(2, len(past)):
        x = (current_key, current_value)[kv][starts[b] : starts[b + 1]]
        store_heads(x, cache, scale, places(kv, b, range(past[b], past[b] + len(x))), *stored)
    out = np.zeros((2, key_starts[-1], heads * num_repeat, dim), current_key.dtype)
    for kv, b in np.ndindex(2, len(past)):
        tokens = slice(key_starts[b], key_starts[b + 1])
        at = places(kv, b, range(tokens.stop - tokens.start))
        out[kv, tokens] = np.repeat(load_heads(cache, scale, at, *stored, out.dtype), num_repeat, axis=1)
    return out[0], out[1]
