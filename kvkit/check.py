"""Validation of values and tensors, and the form of every error; `steps` has that of the index tensors.

A check returns what the kernels need, in canonical form, or raises before anything has been written.
"""

import math
import operator
from dataclasses import dataclass

import numpy as np

from kvkit.errors import KvkitError
from kvkit.formats import BY_DTYPE, FLOATS, INT8, QUANTIZED, Format
from kvkit.layout import Layout, place

FLOAT_NAMES = ", ".join(fmt.name for fmt in FLOATS)


def wrong(name, expected, got):
    """The one form of an error message."""
    return KvkitError(f"{name}: expected {expected}, got {got}")


# Plain values


def integer(name, value, low=None, high=None):
    """An int, a numpy integer or an array of one, within low..high."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu":
        value = value.item()
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise wrong(name, "an integer", describe(value))
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"an integer from {low} to {high}"
        size = number.bit_length()
        raise wrong(name, bounds, number if size < 128 else f"a number of {size} bits")
    return number


def choice(name, value, legal):
    number = integer(name, value)
    if number not in legal:
        raise wrong(name, " or ".join(map(str, legal)), number)
    return number


def describe(value):
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    return f"{type(value).__name__} {value!r}" if not isinstance(value, type(None)) else "None"


# Tensors


def tensor(name, array, legal, ndim):
    """The format of an array that must be one of `legal` and have `ndim` axes."""
    if not isinstance(array, np.ndarray):
        raise wrong(name, "a numpy array", describe(array))
    fmt = BY_DTYPE.get(array.dtype)
    if fmt is None or fmt not in legal:
        raise wrong(name, f"dtype {' or '.join(f.name for f in legal)}", array.dtype)
    if array.ndim != ndim:
        raise wrong(name, f"{ndim} axes", f"shape {array.shape}")
    return fmt


def current(current_key, current_value, ndim):
    """The new keys and values: one format, one shape, rows in one piece each."""
    fmt = tensor("current_key", current_key, (*FLOATS, INT8), ndim)
    if tensor("current_value", current_value, (*FLOATS, INT8), ndim) is not fmt:
        raise wrong("current_value", f"the dtype of current_key, {fmt}", current_value.dtype)
    if current_value.shape != current_key.shape:
        raise wrong("current_value", f"the shape of current_key, {current_key.shape}", current_value.shape)
    if min(current_key.shape[-2:]) < 1:
        raise wrong("current_key", "at least one head and one element a head", f"shape {current_key.shape}")
    return fmt, one_piece(current_key), one_piece(current_value)


def packed_tokens(name, array):
    """(name, tokens) of packed new tokens; None if it is no such array, which its own check will say."""
    return (name, len(array)) if isinstance(array, np.ndarray) and array.ndim == 3 else None


def new_tokens(fmt, current_key, current_value, shape):
    """New keys and values of the format and shape that queries ask for."""
    if tensor("current_key", current_key, FLOATS, len(shape)) is not fmt:
        raise wrong("current_key", f"the dtype of query, {fmt}", current_key.dtype)
    _, current_key, current_value = current(current_key, current_value, len(shape))
    if current_key.shape != shape:
        raise wrong("current_key", f"shape {shape}", current_key.shape)
    return current_key, current_value


def one_piece(array):
    """The array, or a copy whose last axis is contiguous."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def in_out(name, array):
    """An array that kernels write: writeable, rows in one piece, no two elements in one place."""
    apart = array.ndim > 0 and array.shape[-1] > 1 and array.strides[-1] != array.itemsize
    if apart and not array.flags.c_contiguous:
        raise wrong(name, "a contiguous last axis", f"strides {array.strides} of {array.itemsize}-byte items")
    written(name, array)


def written(name, array):
    """An array that kernels write: writeable, no two elements in one place."""
    if not array.flags.writeable:
        raise wrong(name, "a writeable array", "a read-only one")
    if array.flags.c_contiguous:
        return
    span = array.itemsize
    for stride, size in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if size > 1 and stride < span:
            raise wrong(name, "elements apart", f"shape {array.shape} with strides {array.strides}")
        span += stride * (size - 1)


def apart(name, array, others):
    """An array that kernels write shares no byte with the others."""
    for other_name, other in others:
        if np.may_share_memory(array, other) and _share(array, other):
            raise wrong(name, f"memory apart from {other_name}", "arrays that overlap")


def written_apart(cache, scale, layer, inputs):
    """The arrays that an append writes, with their names: apart from the inputs."""
    written = [("cache", cache)] if layer.cell is None else [("cache", cache), ("scale", scale)]
    for name, array in written:
        apart(name, array, inputs)
    return written


def _share(a, b):
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def outputs(out, names, shape, fmt):
    """Check arrays that are given for the results."""
    if not isinstance(out, (tuple, list)) or len(out) != len(names):
        raise wrong("out", f"a tuple of {len(names)} arrays ({', '.join(names)})", describe(out))
    for name, array in zip(names, out, strict=True):
        label = f"out ({name})"
        tensor(label, array, (fmt,), len(shape))
        if array.shape != shape:
            raise wrong(label, f"shape {shape}", array.shape)
        in_out(label, array)


def holdable(name, shape, fmt, what="outputs"):
    """Check that an array can have a shape, which `name` decides."""
    if math.prod(max(size, 1) for size in shape) * fmt.dtype.itemsize > np.iinfo(np.int64).max:
        raise wrong(name, f"{what} that an array can hold", f"shape {shape}")


# The cache


@dataclass(frozen=True, slots=True)
class Cache:
    """A layer of a checked cache as kernels see it: format names, and address and strides of each side."""

    packed: str
    stored: str
    cell: str | None
    group: int
    heads: int
    dim: int
    stored_bytes: int  # of a head
    capacity: tuple[int, int]  # sequences, rows
    heads_adjoin: bool
    sides: tuple[tuple[int, ...], ...]  # [key|value]: cache, then scale (address, sequence, row, head)


def cache_layer(
    fmt: Format,
    heads: int,
    dim: int,
    cache,
    scale,
    layouts,
    num_layer,
    layer_idx,
    quant_bit,
    quant_group,
    cache_layout,
):
    """Everything about cache and scale that does not depend on the index tensors."""
    num_layer = integer("num_layer", num_layer, 1)
    layer_idx = integer("layer_idx", layer_idx, 0, num_layer - 1)
    layout: Layout = layouts[integer("cache_layout", cache_layout, 0, len(layouts) - 1)]
    quant_bit = choice("quant_bit", quant_bit, (0, 4, 8))
    stored, width = cache_format(fmt, cache, quant_bit, dim)
    in_out("cache", cache)
    shape_of("cache", cache, layout, num_layer, heads, width, stored)
    at, sizes = layout.at, cache.shape
    capacity = sizes[at["sequence"]] if "sequence" in at else 1, sizes[at["row"]]
    where = place(cache, layout, layer_idx)
    adjoin = where.head == stored.bytes(dim)
    key = (where.address, where.sequence, where.row, where.head)
    value = (where.address + where.kv, *key[1:])
    if not quant_bit:
        sides = (*key, 0, 0, 0, 0), (*value, 0, 0, 0, 0)
        return Cache(fmt.name, stored.name, None, 0, heads, dim, stored.bytes(dim), capacity, adjoin, sides)

    group = integer("quant_group", quant_group, 1)
    if dim % group:
        raise wrong("quant_group", f"a divisor of the head size {dim}", group)
    if quant_bit == 4 and group % 2:
        raise wrong("quant_group", "an even number, for quant_bit 4", group)
    if scale is None:
        raise wrong("scale", f"an array of scales, for quant_bit {quant_bit}", "None")
    cell = tensor("scale", scale, FLOATS, cache.ndim)
    in_out("scale", scale)
    cells = (*cache.shape[:-1], dim // group)
    if scale.shape != cells:
        raise wrong("scale", f"shape {cells}: that of cache, {dim // group} groups a head", scale.shape)
    apart("cache", cache, (("scale", scale),))
    spot = place(scale, layout, layer_idx)
    adjoin = adjoin and spot.head == cell.bytes(dim // group)
    tail = (spot.sequence, spot.row, spot.head)
    sides = (*key, spot.address, *tail), (*value, spot.address + spot.kv, *tail)
    return Cache(
        fmt.name, stored.name, cell.name, group, heads, dim, stored.bytes(dim), capacity, adjoin, sides
    )


def cache_format(fmt, cache, quant_bit, dim):
    """The format of the cache's elements, and the length of its last axis."""
    if not isinstance(cache, np.ndarray):
        raise wrong("cache", "a numpy array", describe(cache))
    if quant_bit:
        if fmt is INT8:
            raise wrong("current_key", f"dtype {FLOAT_NAMES} for quant_bit {quant_bit}", "int8")
        if cache.dtype != np.int8 and not (quant_bit == 4 and cache.dtype == np.uint8):
            legal = "int8 (or uint8, the same bytes)" if quant_bit == 4 else "int8"
            raise wrong("cache", f"dtype {legal} for quant_bit {quant_bit}", cache.dtype)
        return QUANTIZED[quant_bit], dim // 2 if quant_bit == 4 else dim
    stored = BY_DTYPE.get(cache.dtype)
    if stored is None or (stored is INT8) != (fmt is INT8):
        legal = "int8" if fmt is INT8 else FLOAT_NAMES
        raise wrong("cache", f"dtype {legal} for quant_bit 0 and {fmt} keys", cache.dtype)
    return stored, dim


def shape_of(name, array, layout, num_layer, heads, width, stored):
    """Axes and sizes of a cache in its layout; the number of sequences and rows is free."""
    fixed = {"layer": num_layer, "kv": 2, "head": heads, "dim": width}
    known = array.ndim == len(layout.axes)
    if not known or any(array.shape[layout.at[axis]] != size for axis, size in fixed.items()):
        sizes = ", ".join(str(fixed.get(axis, "any")) for axis in layout.axes)
        note = ", Dh/2 bytes for int4" if stored.name == "int4" else ""
        raise wrong(name, f"shape {layout} = ({sizes}) for cache_layout {layout.number}{note}", array.shape)
