"""The checked calls of a cache in shards: what it is made of, new tokens, queries and masks."""

from typing import NamedTuple

import distributed
import numpy as np

import kvkit
from kvkit.checks import attention
from kvkit.checks.tensors import float_format
from kvkit.checks.values import integer, text
from kvkit.checks.words import describe, wrong
from kvkit.formats.elements import BY_NAME, FLOATS, QUANTIZED, STORED

CODES = {str(fmt): bits for bits, fmt in QUANTIZED.items()}
FORMATS = *map(str, FLOATS), *CODES, *STORED


def arguments(given):
    """The arguments of a cache but for where its shards are, as they are saved."""
    text("format", given["format"], FORMATS)
    text("split", given["split"], ("tokens", "heads"))
    names = "num_layers", "page_size", "num_kv_heads", "head_dim", "num_blocks", "shards"
    sizes = {name: integer(name, given[name], 1) for name in names}
    interleave = sizes["page_size"] if given["interleave"] is None else given["interleave"]
    kept = given["format"] if given["format"] in map(str, FLOATS) else "float16"
    dtype = float_format("dtype", given["dtype"] or kept).name
    return given | sizes | {"dtype": dtype, "interleave": integer("interleave", interleave, 1)}


def of_shard(cache, heads):
    """The arguments of a shard's `PagedCache`, which has some key heads."""
    names = "num_layers", "head_dim", "quant_group", "num_blocks", "page_size"
    stored, heads = cache["format"], heads.stop - heads.start
    formats = {"quant_bit": CODES.get(stored, 0), "quant_format": stored if stored in STORED else None}
    formats |= {"dtype": BY_NAME[cache["dtype"]].dtype, "num_kv_heads": heads}
    return {name: cache[name] for name in names} | formats


def shards(client, count, transport):
    """How many there are."""
    text("transport", transport, ("actors", "pipes"))
    if (transport == "pipes") != (client is None) or not isinstance(client, distributed.Client | None):
        wanted = "None, with transport='pipes'" if transport == "pipes" else "a distributed.Client"
        raise wrong("client", wanted, describe(client))
    if count is None:
        count = 2 if client is None else len(client.nthreads()) or 1
    return integer("shards", count, 1)


def new_tokens(cache, batch, key_states, value_states):
    """Keys and values of tokens of so many rows; of any, if there are none yet."""
    heads, dim, dtype = cache["num_kv_heads"], cache["head_dim"], cache["dtype"]
    for name, array in (("key_states", key_states), ("value_states", value_states)):
        shape: tuple[int, ...] = getattr(array, "shape", ())
        fits = len(shape) == 4 and shape[0] and shape[2] and (shape[1], shape[3]) == (heads, dim)
        if not fits or shape[0] != (batch or shape[0]) or array.dtype.name != dtype:
            raise wrong(name, f"{dtype} [{batch or 'B'}, {heads}, q, {dim}]", describe(array))
    if key_states.shape != value_states.shape:
        raise wrong("value_states", f"shape {key_states.shape}, that of the keys", value_states.shape)


class Options(NamedTuple):
    """How scores become weights, of all query heads."""

    window: tuple[int, int]
    softmax_scale: float
    softcap: float
    slopes: np.ndarray | None
    sinks: np.ndarray | None


def queries(cache, batch, length, query, sinks, is_alibi, **options):
    """`Options`, for queries of the last tokens of so many."""
    heads, dim, dtype = cache["num_kv_heads"], cache["head_dim"], cache["dtype"]
    shape: tuple[int, ...] = getattr(query, "shape", ())
    fits = len(shape) == 4 and (shape[0], shape[3]) == (batch, dim) and 0 < shape[2] <= length
    if not fits or not shape[1] or shape[1] % heads or query.dtype.name != dtype:
        wanted = f"{dtype} [{batch}, a multiple of {heads}, at most {length}, {dim}]"
        raise wrong("query", wanted, describe(query))
    how = attention.weights(query.swapaxes(1, 2), None, is_alibi=is_alibi, sinks=sinks, **options)
    slopes = kvkit.alibi_slope(num_heads=shape[1]) if how.alibi else None
    return Options((how.left, how.right), how.scale, how.softcap, slopes, sinks)


def mask(given, shape, length):
    """A mask for queries of a shape, or None."""
    if given is None:
        return None
    wanted = f"bool [{shape[0]}, {length}], or 4 axes right-aligned to {[*shape[:3], length]}"
    if not isinstance(given, np.ndarray) or given.shape[-1:] != (length,):
        raise wrong("attention_mask", wanted, describe(given))
    sizes = [(1, whole) for whole in shape[:3]] if given.ndim == 4 else [shape[:1]]
    known = given.ndim == 4 or (given.ndim == 2 and given.dtype == np.bool_)
    if not known or any(n not in fits for n, fits in zip(given.shape, sizes, strict=False)):
        raise wrong("attention_mask", wanted, describe(given))
    return given
