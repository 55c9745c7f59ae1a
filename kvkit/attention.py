"""What the attention operators share: their checks, and the launch."""

import math
import operator
from dataclasses import dataclass, field

import numpy as np

from kvkit import check, cpu
from kvkit.check import describe, integer, wrong
from kvkit.formats import BY_DTYPE, FLOATS, Format
from kvkit.steps import Steps


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call of an attention operator, but for its outputs."""

    fmt: Format
    shape: tuple[int, ...]  # of attn_output
    query: np.ndarray
    context: "cpu.attention.Context"
    steps: Steps
    decoding: int
    weights: "cpu.attention.Weights"
    inputs: list[tuple[str, np.ndarray]]
    current: tuple[np.ndarray, ...] = ()  # what is appended first: keys and values,
    layer: check.Cache | None = None  # to this layer of a cache,
    written: list[tuple[str, np.ndarray]] = field(default_factory=list)  # these arrays


def cached(fmt, query, step, decoding, weights, current, layer, cache, scale, attn_mask):
    """A `Call` that appends to a cache and attends to it; the cache is apart from the inputs."""
    inputs = named(query=query, current_key=current[0], current_value=current[1],
                   attn_mask=attn_mask, sinks=weights.sinks)  # fmt: skip
    written = check.written_apart(cache, scale, layer, inputs)
    context = cache_context(layer)
    return Call(fmt, query.shape, query, context, step, decoding, weights, inputs, current, layer, written)


def queries(query, ndim, num_heads, head_dim, num_kv_heads):
    """(format, query, key heads) of checked queries."""
    fmt = check.tensor("query", query, FLOATS, ndim)
    num_heads, head_dim = integer("num_heads", num_heads, 1), integer("head_dim", head_dim, 1)
    kv_heads = integer("num_kv_heads", num_kv_heads, 0) or num_heads
    if num_heads % kv_heads:
        raise wrong("num_kv_heads", f"a divisor of the {num_heads} query heads", kv_heads)
    if query.shape[-2:] != (num_heads, head_dim):
        sizes = f"{num_heads} heads of {head_dim} elements (num_heads, head_dim)"
        raise wrong("query", sizes, f"shape {query.shape}")
    return fmt, check.one_piece(query), kv_heads


def keys_and_values(fmt, key, value, outer, kv_heads, head_dim):
    """Keys and values of a whole context; `outer` sizes that are None are free."""
    for name, array in (("key", key), ("value", value)):
        if check.tensor(name, array, FLOATS, len(outer) + 2) is not fmt:
            raise wrong(name, f"the dtype of query, {fmt}", array.dtype)
    wanted = (
        *(size if size is not None else key.shape[i] for i, size in enumerate(outer)),
        kv_heads,
        head_dim,
    )
    if key.shape != wanted:
        raise wrong("key", f"shape {wanted}", key.shape)
    if value.shape[:-1] != wanted[:-1] or value.shape[-1] < 1:
        raise wrong("value", f"the shape of key, {wanted}, or another last axis", value.shape)
    return check.one_piece(key), check.one_piece(value)


def context(fmt, key, value, sides):
    """A `Context` of arrays [.., heads, dim]; `sides` are their (sequence, row) strides."""
    places = [
        (array.ctypes.data, *side, array.strides[-2], 0, 0, 0, 0)
        for array, side in zip((key, value), sides, strict=True)
    ]
    sizes = key.shape[-2], key.shape[-1], value.shape[-1]
    spans = sizes[1] * key.itemsize, sizes[2] * key.itemsize
    return cpu.attention.Context(fmt.name, fmt.name, None, 0, *sizes, tuple(places), *spans)


def cache_context(layer):
    """A `Context` of a checked layer of a cache."""
    size = layer.stored_bytes
    return cpu.attention.Context(
        layer.packed, layer.stored, layer.cell, layer.group, layer.heads, layer.dim, layer.dim, layer.sides,
        size, size,
    )  # fmt: skip


def weights(num_heads, head_dim, is_causal, is_alibi, softmax_scale, window, softcap, sinks, mask):
    """How scores become weights, checked."""
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else number("softmax_scale", softmax_scale)
    left, right = pair("window", window)
    softcap = number("softcap", softcap)
    if softcap != 0 and softcap < np.finfo(np.float32).tiny:
        raise wrong("softcap", "0 (none) or a positive number of float32", softcap)
    flags = flag("is_causal", is_causal), flag("is_alibi", is_alibi)
    if sinks is not None:
        check.tensor("sinks", sinks, FLOATS, 1)
        if sinks.shape != (num_heads,):
            raise wrong("sinks", f"shape ({num_heads},), a number for each query head", sinks.shape)
    return cpu.attention.Weights(scale, *flags, left, right, softcap, sinks, mask)


def number(name, value):
    """A finite number."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not abs(value) < 3e38:
        raise wrong(name, "a finite number", describe(value))
    return float(value)


def flag(name, value):
    """True or False; ONNX says 1 and 0."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(check.choice(name, value, (0, 1)))


def pair(name, value):
    """(left, right) of a window."""
    try:
        left, right = (operator.index(size) for size in value)
    except (TypeError, ValueError):
        raise wrong(name, "a pair of integers (left, right)", describe(value)) from None
    if min(left, right) < -1:
        raise wrong(name, "sizes of at least 0, or -1 for no limit", (left, right))
    return min(left, 2**62), min(right, 2**62)


# Masks


def static_mask(fmt, mask, batch, num_heads, seqlen, kvlen):
    """A mask whose axes are right-aligned to [B, num_heads, S, at least kvlen], as kernels see it."""
    if no_mask(fmt, mask):
        return cpu.attention.NO_MASK
    legal = (batch, num_heads, seqlen)[max(0, 4 - mask.ndim) :]
    fits = 2 <= mask.ndim <= 4 and mask.shape[-1] >= kvlen
    if not fits or any(size not in (1, want) for size, want in zip(mask.shape[:-1], legal, strict=True)):
        wanted = f"[{batch}, {num_heads}, {seqlen}, {kvlen} or more], axes of 1, or without leading axes"
        raise wrong("attn_mask", wanted, f"shape {mask.shape}")
    strides = [0] * (4 - mask.ndim) + [
        0 if size == 1 and i < mask.ndim - 1 else stride
        for i, (size, stride) in enumerate(zip(mask.shape, mask.strides, strict=True))
    ]
    return described(mask, strides, False)


def dynamic_mask(fmt, mask, num_heads, tokens, keys):
    """A mask [tokens, at least keys], or with heads in front, as kernels see it."""
    if no_mask(fmt, mask):
        return cpu.attention.NO_MASK
    fits = mask.ndim in (2, 3) and mask.shape[-2] == tokens and mask.shape[-1] >= keys
    if not fits or (mask.ndim == 3 and mask.shape[0] not in (1, num_heads)):
        wanted = f"[{tokens}, {keys} or more], or [{num_heads}, {tokens}, {keys} or more]"
        raise wrong("attn_mask", wanted, f"shape {mask.shape}")
    head = mask.strides[0] if mask.ndim == 3 and mask.shape[0] > 1 else 0
    return described(mask, (0, head, *mask.strides[-2:]), True)


def no_mask(fmt, mask):
    """Whether there is none; its type is right if there is one."""
    if mask is None:
        return True
    if not isinstance(mask, np.ndarray):
        raise wrong("attn_mask", "a numpy array", describe(mask))
    if mask.dtype != np.bool_ and mask.dtype != fmt.dtype and mask.dtype != np.float32:
        legal = " or ".join(dict.fromkeys((fmt.name, "float32", "bool")))
        raise wrong("attn_mask", f"dtype {legal}", mask.dtype)
    return mask.size == 0


def described(mask, strides, packed):
    name = "bool" if mask.dtype == np.bool_ else BY_DTYPE[mask.dtype].name
    return (mask.ctypes.data, cpu.attention.mask_kind(name), *strides, packed)


# Outputs


def outputs(out, shape, fmt, return_lse, inputs):
    """(attn_output, lse or None): new arrays, or those given, apart from every input."""
    wants_lse = flag("return_lse", return_lse)
    if out is None:
        return np.empty(shape, fmt.dtype), np.empty(shape[:-1], np.float32) if wants_lse else None
    if wants_lse and not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise wrong("out", "a tuple of 2 arrays (attn_output, lse)", describe(out))
    attn_output, lse = out if wants_lse else (out, None)
    given([("out", attn_output, shape, fmt)])
    others = list(inputs)
    if wants_lse:
        given([("out (lse)", lse, shape[:-1], BY_DTYPE[np.dtype(np.float32)])])
        others.append(("out (lse)", lse))
        check.apart("out (lse)", lse, inputs)
    check.apart("out", attn_output, others)
    return attn_output, lse


def given(outputs):
    for name, array, shape, fmt in outputs:
        check.tensor(name, array, (fmt,), len(shape))
        if array.shape != shape:
            raise wrong(name, f"shape {shape}", array.shape)
        check.in_out(name, array)


def named(**arrays):
    """The arrays that are there, with their names."""
    return [(name, array) for name, array in arrays.items() if isinstance(array, np.ndarray)]


def attend(query, out, lse, context, steps, decoding, weights):
    """Attention, and the results as the operator returns them."""
    cpu.launches.start(cpu.attention.prepare(query, out, lse, context, steps, decoding, weights))
    return out if lse is None else (out, lse)


def append_and_attend(current_key, current_value, query, out, lse, layer, steps, decoding, weights):
    """Append, then attend to the cache; the results, and the launches."""
    store = cpu.transfer.store(current_key, current_value, layer, steps)
    attention = cpu.attention.prepare(query, out, lse, cache_context(layer), steps, decoding, weights)
    cpu.launches.start(store, attention)
    return out if lse is None else (out, lse), (store, attention)
