"""The checked calls of attention: over keys and values, or over a cache that new ones are appended to."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvkit.checks import caches
from kvkit.checks.outputs import Results
from kvkit.checks.records import NO_MASK, Cache, Context, Side, Steps
from kvkit.checks.tensors import current, in_one_place, named, one_piece, step, tensor
from kvkit.checks.values import flag, integer, number, pair
from kvkit.errors import argument_error
from kvkit.formats.elements import BY_NAME, FLOATS, Element

FLOAT32 = np.dtype(np.float32)


class Call(NamedTuple):
    """A checked call, but for its outputs."""

    fmt: Element
    shape: tuple[int, ...]  # of attn_output
    query: np.ndarray
    context: Context
    steps: Steps
    decoding: int
    weights: "Weights"
    inputs: list[tuple[str, np.ndarray]]
    results: Results
    current: tuple[np.ndarray, ...] = ()  # what is appended first: keys and values,
    layer: Cache | None = None  # to this layer of a cache,
    written: Sequence[tuple[str, np.ndarray]] = ()  # these arrays


def checked_attention(
    sequences, query, key, value, attn_mask, *, num_heads, head_dim, num_kv_heads, return_lse, **attributes
):
    """The checked call of `multi_head_attention`, of `Static` or of `Packed` sequences."""
    fmt, query, kv_heads = queries(query, sequences.axes, num_heads, head_dim, num_kv_heads)
    key, value = keys_and_values(fmt, key, value, sequences.outer(query), kv_heads, query.shape[-1])
    key, value = (np.ascontiguousarray(each) if in_one_place(each) else each for each in (key, value))
    steps = sequences.over_keys(query, key)
    mask = sequences.mask(fmt, attn_mask, query, steps)
    how = weights(query, mask, **attributes)
    inputs = named(query=query, key=key, value=value, attn_mask=attn_mask, sinks=how.sinks)
    context = context_of(fmt, key, value, [(0, *array.strides[:-2])[-2:] for array in (key, value)])
    shape = (*query.shape[:-1], value.shape[-1])
    made = results(shape, fmt, return_lse, inputs)
    return Call(fmt, shape, query, context, steps, sequences.decoding, how, inputs, made)


def checked_cache_attention(
    sequences,
    query,
    current_key,
    current_value,
    cache,
    scale,
    attn_mask,
    *,
    num_heads,
    head_dim,
    num_kv_heads,
    return_lse,
    **attributes,
):
    """The checked call of `multi_head_cache_attention`, likewise; the cache is apart from the inputs."""
    fmt, query, kv_heads = queries(query, sequences.axes, num_heads, head_dim, num_kv_heads)
    head_dim = query.shape[-1]
    tokens = new_tokens(fmt, current_key, current_value, (*query.shape[:-2], kv_heads, head_dim))
    place = caches.taken(attributes)
    layer = caches.cache_layer(fmt, kv_heads, head_dim, cache, scale, sequences.layouts, **place)
    steps = sequences.over_cache("query", query, layer)
    mask = sequences.mask(fmt, attn_mask, query, steps)
    how = weights(query, mask, **attributes)
    inputs = named(
        query=query, current_key=tokens[0], current_value=tokens[1], attn_mask=attn_mask, sinks=how.sinks
    )
    written = caches.written_apart(cache, scale, layer, inputs)
    made = results(query.shape, fmt, return_lse, inputs + written)
    context, decoding = cache_context(layer), sequences.decoding
    return Call(fmt, query.shape, query, context, steps, decoding, how, inputs, made, tokens, layer, written)


def queries(query, ndim, num_heads, head_dim, num_kv_heads):
    """(format, query, key heads) of checked queries."""
    fmt = tensor("query", query, FLOATS, ndim)
    num_heads, head_dim = integer("num_heads", num_heads, 1), integer("head_dim", head_dim, 1)
    kv_heads = integer("num_kv_heads", num_kv_heads, 0) or num_heads
    if num_heads % kv_heads:
        raise argument_error("num_kv_heads", f"a divisor of the {num_heads} query heads", kv_heads)
    if query.shape[-2:] != (num_heads, head_dim):
        sizes = f"{num_heads} heads of {head_dim} elements (num_heads, head_dim)"
        raise argument_error("query", sizes, f"shape {query.shape}")
    return fmt, one_piece(query), kv_heads


def keys_and_values(fmt, key, value, outer, kv_heads, head_dim):
    """Keys and values of a whole context; `outer` sizes that are None are free."""
    for name, array in (("key", key), ("value", value)):
        if tensor(name, array, FLOATS, len(outer) + 2) is not fmt:
            raise argument_error(name, f"the dtype of query, {fmt}", array.dtype)
    free = (key.shape[i] if size is None else size for i, size in enumerate(outer))
    wanted = (*free, kv_heads, head_dim)
    if key.shape != wanted:
        raise argument_error("key", f"shape {wanted}", f"{key.shape}{grouped(key.shape, wanted)}")
    if value.shape[:-1] != wanted[:-1] or value.shape[-1] < 1:
        raise argument_error("value", f"the shape of key, {wanted}, or another last axis", value.shape)
    return key, value


def grouped(shape, wanted):
    """What to do if keys have fewer heads, as those of grouped queries have."""
    others = [pair for i, pair in enumerate(zip(shape, wanted, strict=True)) if i != len(shape) - 2]
    fits = shape[-2] and not wanted[-2] % shape[-2] and all(size == other for size, other in others)
    return f": for grouped queries give num_kv_heads={shape[-2]}" if fits else ""


def new_tokens(fmt, current_key, current_value, shape):
    """New keys and values of the format and shape that queries ask for."""
    if tensor("current_key", current_key, FLOATS, len(shape)) is not fmt:
        raise argument_error("current_key", f"the dtype of query, {fmt}", current_key.dtype)
    _, current_key, current_value = current(current_key, current_value, len(shape))
    if current_key.shape != shape:
        got = f"{current_key.shape}{grouped(current_key.shape, shape)}"
        raise argument_error("current_key", f"shape {shape}", got)
    return current_key, current_value


def context_of(fmt, key, value, sides):
    """A `Context` of arrays [.., heads, dim]; `sides` are their (sequence, row) strides."""
    key_side, value_side = (
        Side(array.ctypes.data, sequence, row, array.strides[-2])
        for array, (sequence, row) in zip((key, value), sides, strict=True)
    )
    sizes = key.shape[-2], key.shape[-1], value.shape[-1]
    spans = sizes[1] * key.itemsize, sizes[2] * key.itemsize
    elements = step(key), step(value)
    return Context(fmt.name, fmt.name, None, 0, *sizes, (key_side, value_side), *spans, elements=elements)


def cache_context(layer):
    """A `Context` of a checked layer of a cache."""
    group = 0 if BY_NAME[layer.stored].minifloat and layer.group == layer.dim else layer.group
    formats = layer.packed, layer.stored, layer.cell, group
    sizes = layer.heads, layer.dim, layer.dim
    return Context(*formats, *sizes, layer.sides, layer.stored_bytes, layer.stored_bytes)


class Weights(NamedTuple):
    """How scores become weights, in canonical form."""

    scale: float
    causal: bool
    alibi: bool
    left: int
    right: int
    softcap: float
    sinks: np.ndarray | None
    mask: tuple[int, ...] = (
        NO_MASK  # address, kind, strides (sequence, head, row, column), packed (2: rows are)
    )
    apart: int = 1  # sequences in a row that have sinks of their own
    slopes: np.ndarray | None = None  # of ALiBi, float32 [sequences or 1, query heads]
    scales: np.ndarray | None = (
        None  # of keys (times `scale`) and values, float32 [2, sequences or 1, heads or 1]
    )


def weights(
    query,
    mask,
    *,
    is_causal=True,
    is_alibi=False,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
):
    """How scores become weights, checked, for queries [.., heads, dim]; what a caller has not is neutral."""
    num_heads, head_dim = query.shape[-2:]
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else number("softmax_scale", softmax_scale)
    left, right = pair("window", window)
    softcap = number("softcap", softcap)
    if softcap != 0 and softcap < np.finfo(np.float32).tiny:
        raise argument_error("softcap", "0 (none) or a positive number of float32", softcap)
    flags = flag("is_causal", is_causal), flag("is_alibi", is_alibi)
    if sinks is not None:
        tensor("sinks", sinks, FLOATS, 1)
        if sinks.shape != (num_heads,):
            raise argument_error("sinks", f"shape ({num_heads},), a number for each query head", sinks.shape)
    return Weights(scale, *flags, left, right, softcap, sinks, mask)


def results(shape, fmt, return_lse, inputs):
    """What attention gives: its output, and the logarithms of the softmax denominators if they are wanted."""
    forms = {"attn_output": (shape, fmt.dtype)}
    wants_lse = flag("return_lse", return_lse)
    if wants_lse:
        forms["lse"] = shape[:-1], FLOAT32
    return Results(forms, inputs, alone=not wants_lse)
