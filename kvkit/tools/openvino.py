"""Split the pools of OpenVINO's paged attention into codes, scales and zeros (float32)::

a block of keys, for each head      scales of all channels | their zeros | codes of token 0 | of token 1 ...
a row of values, for each head      its scale | its zero | its codes
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvkit import files
from kvkit.errors import argument_error, describe
from kvkit.files import Contents
from kvkit.files.contents import CACHE, nested
from kvkit.layouts.views import KV
from kvkit.typed import Array

PLAIN = "openvino"  # the layout of pools of floats, and of codes without scales
CODE_POOLS = {
    "openvino-u8": ("openvino_u8", 8),
    "openvino-u4": ("openvino_u4", 4),
}
POOLS = "key_cache", "value_cache"
NUMBERS = "scale", "zero"
SIZE = 4  # bytes of a scale


def split_blocks(contents: Contents, layout: str) -> tuple[Contents, dict[str, KV]]:
    """Return (contents with pools of codes, separate scales and zeros; views of scales and zeros)."""
    format, bits = CODE_POOLS[layout]
    names = POOLS if CACHE not in contents.arrays and contents.cache is None else (f"{CACHE}.0", f"{CACHE}.1")
    pools = [nested(contents.arrays, name) for name in names]
    if any(pool is None for pool in pools):
        raise argument_error("source", f"arrays {' and '.join(POOLS)}, for {layout}", "others")
    layers = [pool if isinstance(pool, list) or pool.ndim == 5 else [pool] for pool in pools]
    keys = [key_parts(bytes_of_pool(names[0], array), bits) for array in layers[0]]
    values = [value_parts(bytes_of_pool(names[1], array)) for array in layers[1]]
    views = {  # keys [blocks, 1, heads, channels] and values [blocks, tokens, heads] of each layer
        part: KV(
            tuple(np.swapaxes(layer[i], 1, 2) for layer in keys),
            tuple(np.swapaxes(layer[i], 1, 2)[..., 0] for layer in values),
        )
        for i, part in enumerate(NUMBERS)
    }
    arrays: dict[str, Any] = {name: x for name, x in contents.arrays.items() if not name.startswith(names)}
    for name, side in zip(POOLS, (keys, values), strict=True):
        arrays[name] = [layer[2] for layer in side]
        arrays |= {f"{name}_{part}": [layer[i] for layer in side] for i, part in enumerate(NUMBERS)}
    described = replace(contents.description, layout=PLAIN, format=contents.description.format or format)
    return replace(contents, arrays=files.flat(arrays), description=described), views


def with_tables(contents: Contents) -> Contents:
    """Return the contents with OpenVINO's tables under the names that all tools use."""
    arrays, pool = contents.arrays, nested(contents.arrays, POOLS[0])
    if pool is None or not {"block_indices", "block_indices_begins", "past_lens"} <= arrays.keys():
        return contents
    begins, lengths = (arrays[name].astype(np.int64) for name in ("block_indices_begins", "past_lens"))
    lengths = lengths + np.diff(arrays.get("subsequence_begins", np.zeros_like(begins)))  # tokens of the step
    last = lengths - (np.diff(begins) - 1) * np.shape(pool[0])[-2]
    found = {"kv_indptr": begins, "kv_indices": arrays["block_indices"], "kv_last_page_len": last}
    return replace(contents, arrays=arrays | found)


def bytes_of_pool(name: str, array: Array) -> Array:
    """Return a pool's bytes [blocks, heads, rows, width]."""
    if array.ndim != 4 or array.dtype.itemsize != 1 or not array.flags.c_contiguous:
        wanted = "contiguous bytes [blocks, heads, rows, width]"
        raise argument_error(name, wanted, describe(array))
    return array.view(np.uint8)


def key_parts(pool: Array, bits: int) -> Sequence[Array]:
    """Return scales and zeros [blocks, heads, 1, channels] and codes [blocks, heads, tokens, bytes]."""
    blocks, heads, rows, width = pool.shape
    size = width * 8 // bits * SIZE  # bytes of the scales of all channels
    before = 2 * size // width  # rows of codes that scales and zeros take
    if rows <= before:
        raise argument_error("key_cache", f"more than the {before} rows of scales and zeros", rows)
    flat = pool.reshape(blocks, heads, -1)
    numbers = [flat[..., i : i + size].view(np.float32)[:, :, None] for i in (0, size)]
    return *numbers, pool[:, :, before:]


def value_parts(pool: Array) -> Sequence[Array]:
    """Return scales and zeros [blocks, heads, tokens, 1] and codes [blocks, heads, tokens, bytes]."""
    if pool.shape[-1] <= 2 * SIZE or pool.shape[-1] % SIZE:
        raise argument_error("value_cache", "rows of a scale, a zero and codes", describe(pool))
    numbers = [pool[..., i : i + SIZE].view(np.float32) for i in (0, SIZE)]
    return *numbers, pool[..., 2 * SIZE :]
