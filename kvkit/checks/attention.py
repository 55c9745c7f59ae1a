"""Check calls of attention: over keys and values, or over a cache after an append."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvkit.checks import caches
from kvkit.checks.arguments import CacheAttention, KeyAttention, Scoring
from kvkit.checks.index_tensors import Sequences, Static
from kvkit.checks.outputs import Results
from kvkit.checks.records import NO_MASK, Context, MaskPlace, Side, StepIndex
from kvkit.checks.values import (
    NamedArrays,
    check_new_tokens,
    checked_format,
    element_step,
    finite_number,
    flag,
    integer,
    is_broadcast,
    named_arrays,
    one_piece,
)
from kvkit.errors import argument_error, describe
from kvkit.formats.elements import BY_NAME, FLOATS, Element
from kvkit.runtime.arrays import address
from kvkit.typed import Array

FLOAT32 = np.dtype(np.float32)
STATIC = Static()


class Weights(NamedTuple):
    """Checked arguments that say how scores become weights."""

    scale: float
    causal: bool
    alibi: bool
    left: int  # the window: keys to the left and to the right of a query, -1 for no limit
    right: int
    softcap: float
    sinks: Array | None
    mask: MaskPlace = NO_MASK
    sink_sequences: int = 1  # sequence b has the sinks of number b % sink_sequences
    slopes: Array | None = None  # ALiBi slopes, float32 [sequences or 1, query heads]
    scales: Array | None = None  # of keys (times `scale`) and values, float32 [2, sequences or 1, heads or 1]


class AttentionCall(NamedTuple):
    """A checked call of attention, before its outputs are made."""

    fmt: Element
    query: Array
    context: Context
    steps: StepIndex
    decoding: int  # the number of sequences that ignore the causal mask
    weights: Weights
    results: Results
    current: tuple[Array, ...] = ()  # new keys and values, which are appended first
    layer: Context | None = None  # the layer of a cache that they are appended to
    written: NamedArrays = ()  # the arrays that the append writes
    blocks: int = 0  # pages of its pools
    # Numbers of rows [pages, rows], which are added to q @ k, and the pages [B, M] of contexts
    row_bias: tuple[Array, Array] | None = None


def checked_attention(call: KeyAttention, sequences: Sequences = STATIC) -> AttentionCall:
    """Check a call of `multi_head_attention`."""
    fmt, query, kv_heads = check_queries(call.query, sequences.axes, call.heads, call.key)
    outer, scoring = sequences.key_axes(query), call.scoring
    key = call.key
    if not call.heads[0] and query.ndim == 4 and isinstance(key, np.ndarray) and key.ndim == 4:
        (heads, tokens), (key_heads, keys) = query.shape[1:3], key.shape[1:3]
        if 0 < key_heads < heads and keys >= tokens and heads % key_heads == 0:  # [batch, heads, tokens, dim]
            wanted = "[batch, tokens, heads, dim], with as many tokens as query or more"
            raise argument_error("key", wanted, f"{key.shape} beside {query.shape}")
    key, value = check_keys_and_values(fmt, call.key, call.value, outer, kv_heads, query.shape[-1])
    key, value = (np.ascontiguousarray(x) if is_broadcast(x) else x for x in (key, value))
    steps = sequences.over_keys(query, key)
    weights = checked_weights(query, sequences.mask(fmt, scoring.attn_mask, query, steps), scoring)
    arrays = {"query": query, "key": key, "value": value}
    inputs = named_arrays(**arrays, attn_mask=scoring.attn_mask, sinks=weights.sinks)
    # (sequence, row) strides; packed keys [tokens, heads, dim] have no axis of sequences: 0
    strides = [(0, *array.strides[:-2])[-2:] for array in (key, value)]
    context = context_of(fmt, key, value, strides)
    shape = (*query.shape[:-1], value.shape[-1])
    key_weights = None
    if flag("return_key_weights", call.return_key_weights):
        key_weights = query.shape[0], query.shape[2], key.shape[1]  # [B, heads, keys]
    results = attention_results(shape, fmt, call.return_lse, inputs, key_weights)
    return AttentionCall(fmt, query, context, steps, sequences.decoding, weights, results)


def checked_cache_attention(call: CacheAttention, sequences: Sequences) -> AttentionCall:
    """Check a call of `multi_head_cache_attention`, and that the cache does not overlap the inputs."""
    fmt, query, kv_heads = check_queries(call.query, sequences.axes, call.heads, call.current_key)
    scoring, head_dim, axes = call.scoring, query.shape[-1], sequences.axes
    weights = checked_weights(query, NO_MASK, scoring)
    if checked_format("current_key", call.current_key, FLOATS, axes) is not fmt:
        raise argument_error("current_key", f"the dtype of query, {fmt}", call.current_key.dtype)
    _, key, value = check_new_tokens(call.current_key, call.current_value, axes)
    shape = (*query.shape[:-2], kv_heads, head_dim)
    if key.shape != shape:
        raise argument_error("current_key", f"shape {shape}", f"{key.shape}{grouped_heads(key.shape, shape)}")
    arrays = {"query": query, "current_key": key, "current_value": value}
    inputs = named_arrays(**arrays, attn_mask=scoring.attn_mask, sinks=weights.sinks)
    cache, scale = call.cache, call.scale
    layer = caches.cache_layer(fmt, kv_heads, head_dim, cache, scale, sequences.layouts, call.place)
    written = caches.check_written(cache, scale, layer, inputs)
    steps = sequences.over_cache("query", query, layer)
    if scoring.attn_mask is not None:
        weights = weights._replace(mask=sequences.mask(fmt, scoring.attn_mask, query, steps))
    return AttentionCall(
        fmt, query, cache_context(layer) if layer.group else layer, steps, sequences.decoding, weights,
        results=attention_results(query.shape, fmt, call.return_lse, [*inputs, *written]),
        current=(key, value), layer=layer, written=written,
    )  # fmt: skip


def check_queries(
    query: Array, ndim: int, heads: tuple[int, int, int], key: Array | None = None
) -> tuple[Element, Array, int]:
    """Check queries; return (format, queries with a contiguous last axis, number of key heads).

    Numbers of heads, and their size, that are 0 are what the arrays show.
    """
    fmt = checked_format("query", query, FLOATS, ndim)
    given = integer("num_heads", heads[0], 0), integer("head_dim", heads[1], 0)
    num_heads, head_dim = (number or shown for number, shown in zip(given, query.shape[-2:], strict=True))
    if not num_heads or not head_dim:
        raise argument_error("query", "at least one head, of one element", f"shape {query.shape}")
    kv_heads = integer("num_kv_heads", heads[2], 0)
    if not kv_heads:
        shown = key.shape[-2] if isinstance(key, np.ndarray) and key.ndim == ndim else num_heads
        kv_heads = shown if shown and num_heads % shown == 0 else num_heads
    if num_heads % kv_heads:
        raise argument_error("num_kv_heads", f"a divisor of the {num_heads} query heads", kv_heads)
    if query.shape[-2:] != (num_heads, head_dim):
        sizes = f"{num_heads} heads of {head_dim} elements (num_heads, head_dim)"
        raise argument_error("query", sizes, f"shape {query.shape}")
    return fmt, one_piece(query), kv_heads


def check_keys_and_values(
    fmt: Element, key: Array, value: Array, outer: Sequence[int | None], kv_heads: int, head_dim: int
) -> tuple[Array, Array]:
    """Check keys and values of a whole context; `outer` are their sizes before heads, None if free."""
    for name, array in (("key", key), ("value", value)):
        if checked_format(name, array, FLOATS, len(outer) + 2) is not fmt:
            raise argument_error(name, f"the dtype of query, {fmt}", array.dtype)
    free = (key.shape[i] if size is None else size for i, size in enumerate(outer))
    wanted = (*free, kv_heads, head_dim)
    if key.shape != wanted:
        raise argument_error("key", f"shape {wanted}", f"{key.shape}{grouped_heads(key.shape, wanted)}")
    if value.shape[:-1] != wanted[:-1] or value.shape[-1] < 1:
        raise argument_error("value", f"the shape of key, {wanted}, or another last axis", value.shape)
    return key, value


def grouped_heads(shape: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return a hint for keys with fewer heads than wanted (grouped-query attention), else an empty text."""
    fewer_heads = shape[-2] and wanted[-2] % shape[-2] == 0
    fits = fewer_heads and (*shape[:-2], shape[-1]) == (*wanted[:-2], wanted[-1])
    return f": for grouped queries give num_kv_heads={shape[-2]}" if fits else ""


def context_of(fmt: Element, key: Array, value: Array, strides: Sequence[Sequence[int]]) -> Context:
    """Return the `Context` of keys and values [.., heads, dim] with these (sequence, row) strides."""
    key_side, value_side = (
        Side(address(array), sequence, row, array.strides[-2])
        for array, (sequence, row) in zip((key, value), strides, strict=True)
    )
    (heads, dim), value_dim = key.shape[-2:], value.shape[-1]
    return Context(
        data_dtype=fmt.name, cache_format=fmt.name, scale_format=None, group=0, heads=heads, dim=dim,
        value_dim=value_dim, sides=(key_side, value_side), key_bytes=dim * key.itemsize,
        value_bytes=value_dim * value.itemsize, elements=(element_step(key), element_step(value)),
    )  # fmt: skip


def cache_context(layer: Context) -> Context:
    """Return a layer of a cache as attention reads it.

    A group as long as a head of float8 is a whole head, a group of 0: it needs no code of its own.
    """
    is_whole = layer.group == layer.dim and BY_NAME[layer.cache_format].minifloat
    return layer._replace(group=0) if is_whole else layer


def checked_weights(query: Array, mask: MaskPlace, scoring: Scoring) -> Weights:
    """Check how scores become weights, for queries [.., heads, dim]; the mask has been checked."""
    num_heads, head_dim = query.shape[-2:]
    given_scale, sinks = scoring.softmax_scale, scoring.sinks
    scale = 1 / math.sqrt(head_dim) if given_scale is None else finite_number("softmax_scale", given_scale)
    try:
        left, right = map(operator.index, scoring.window)
    except (TypeError, ValueError):
        got = describe(scoring.window)
        raise argument_error("window", "a pair of integers (left, right)", got) from None
    if min(left, right) < -1:
        raise argument_error("window", "sizes of at least 0, or -1 for no limit", (left, right))
    softcap = finite_number("softcap", scoring.softcap)
    if softcap != 0 and softcap < np.finfo(np.float32).tiny:
        raise argument_error("softcap", "0 (none) or a positive number of float32", softcap)
    causal, alibi = flag("is_causal", scoring.is_causal), flag("is_alibi", scoring.is_alibi)
    if sinks is not None:
        check_sinks(sinks, num_heads)
    left, right = min(left, 2**62), min(right, 2**62)  # so that a position plus a side fits int64
    return Weights(scale, causal, alibi, left, right, softcap, sinks, mask=mask)


def check_sinks(sinks: Array, num_heads: int) -> None:
    """Check that sinks are one float for each query head."""
    checked_format("sinks", sinks, FLOATS, 1)
    if sinks.shape != (num_heads,):
        raise argument_error("sinks", f"shape ({num_heads},), a number for each query head", sinks.shape)


def attention_results(
    shape: tuple[int, ...],
    fmt: Element,
    return_lse: bool,
    inputs: NamedArrays,
    key_weights: tuple[int, ...] | None = None,
) -> Results:
    """Return the outputs of attention: attn_output, and if requested lse and key_weights of a shape."""
    forms = {"attn_output": (shape, fmt.dtype)}
    if flag("return_lse", return_lse):
        forms["lse"] = shape[:-1], FLOAT32
    if key_weights is not None:
        forms["key_weights"] = key_weights, FLOAT32
    return Results(forms, inputs, alone=len(forms) == 1)
