"""Check the arguments of a sharded cache: sizes, new tokens, queries and masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import distributed
import numpy as np

import kvkit
from kvkit.checks import attention
from kvkit.checks.arguments import Scoring
from kvkit.checks.records import NO_MASK
from kvkit.checks.values import float_format, integer, text
from kvkit.errors import argument_error, describe
from kvkit.formats.elements import BY_NAME, FLOATS, QUANTIZED, STORED
from kvkit.typed import Array

QUANT_BITS = {str(fmt): bits for bits, fmt in QUANTIZED.items()}  # {"int8": 8, "int4": 4}
FORMATS = *map(str, FLOATS), *QUANT_BITS, *STORED


class AttendCall(NamedTuple):
    """Holds the checked arguments of `ShardedCache.attend`, for all query heads."""

    query: Array
    mask: Array | None
    window: tuple[int, int]
    softmax_scale: float
    softcap: float
    slopes: Array | None
    sinks: Array | None


def checked_sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of a cache, or of one in a folder; return them with defaults filled in."""
    text("format", arguments["format"], FORMATS)
    text("split", arguments["split"], ("tokens", "heads"))
    names = "num_layers", "page_size", "num_kv_heads", "head_dim", "num_blocks", "shards"
    sizes = {name: integer(name, arguments[name], 1) for name in names}
    interleave = sizes["page_size"] if arguments["interleave"] is None else arguments["interleave"]
    default = arguments["format"] if arguments["format"] in map(str, FLOATS) else "float16"
    dtype = float_format("dtype", arguments["dtype"] or default).name
    return arguments | sizes | {"dtype": dtype, "interleave": integer("interleave", interleave, 1)}


def shard_sizes(arguments: dict[str, Any], heads: slice) -> dict[str, Any]:
    """Return the arguments of the `PagedCache` of a shard that has some key heads."""
    names = "num_layers", "head_dim", "quant_group", "num_blocks", "page_size"
    fmt = arguments["format"]
    formats = {"quant_bit": QUANT_BITS.get(fmt, 0), "quant_format": fmt if fmt in STORED else None}
    formats |= {"dtype": BY_NAME[arguments["dtype"]].dtype, "num_kv_heads": heads.stop - heads.start}
    return {name: arguments[name] for name in names} | formats


def shard_count(client: Any, count: Any) -> int:
    """Check the client, and return the number of shards: `count`, by default one for each worker."""
    if not isinstance(client, distributed.Client):
        raise argument_error("client", "a distributed.Client", describe(client))
    return integer("shards", (len(client.nthreads()) or 1) if count is None else count, 1)


def check_new_tokens(arguments: dict[str, Any], batch: int, key_states: Any, value_states: Any) -> None:
    """Check new keys and values; they have ``batch`` rows, or any number if it is 0."""
    heads, dim, dtype = (arguments[name] for name in ("num_kv_heads", "head_dim", "dtype"))
    for name, array in (("key_states", key_states), ("value_states", value_states)):
        shape: tuple[int, ...] = getattr(array, "shape", ())  # [B, Hkv, q, D]
        fits = len(shape) == 4 and shape[0] and shape[2] and (shape[1], shape[3]) == (heads, dim)
        if not fits or (batch and shape[0] != batch) or array.dtype.name != dtype:
            raise argument_error(name, f"{dtype} [{batch or 'B'}, {heads}, q, {dim}]", describe(array))
    if key_states.shape != value_states.shape:
        wanted = f"shape {key_states.shape}, that of the keys"
        raise argument_error("value_states", wanted, value_states.shape)


def checked_attention(
    arguments: dict[str, Any], batch: int, length: int, query: Any, mask: Any, **options: Any
) -> AttendCall:
    """Check a call of attention with the queries of the last of ``length`` tokens; return the call.

    `arguments` are those of the cache, `options` those of `Scoring`.
    """
    heads, dim, dtype = (arguments[name] for name in ("num_kv_heads", "head_dim", "dtype"))
    shape: tuple[int, ...] = getattr(query, "shape", ())  # [B, Hq, q, D]
    fits = len(shape) == 4 and (shape[0], shape[3]) == (batch, dim) and 0 < shape[2] <= length
    if not fits or not shape[1] or shape[1] % heads or query.dtype.name != dtype:
        wanted = f"{dtype} [{batch}, a multiple of {heads}, at most {length}, {dim}]"
        raise argument_error("query", wanted, describe(query))
    weights = attention.checked_weights(query.swapaxes(1, 2), NO_MASK, Scoring(**options))
    slopes = kvkit.alibi_slope(num_heads=shape[1]) if weights.alibi else None
    check_mask(mask, shape, length)
    window = weights.left, weights.right
    return AttendCall(query, mask, window, weights.scale, weights.softcap, slopes, weights.sinks)


def check_mask(mask: Any, query_shape: tuple[int, ...], length: int) -> None:
    """Check a mask over ``length`` tokens for queries of the shape [B, Hq, q, D]."""
    if mask is None:
        return
    batch, full_sizes = query_shape[0], query_shape[:3]
    shape: tuple[int, ...] = mask.shape if isinstance(mask, np.ndarray) else ()
    is_padding = shape == (batch, length) and mask.dtype == np.bool_
    is_full = len(shape) == 4 and all(n in (1, full) for n, full in zip(shape, full_sizes, strict=False))
    if not is_padding and not (is_full and shape[3] == length):
        wanted = f"bool [{batch}, {length}], or 4 axes right-aligned to {[*full_sizes, length]}"
        raise argument_error("attention_mask", wanted, describe(mask))
