"""Checks of a cache and its scale: everything that does not depend on the index tensors."""

import numpy as np

from kvkit.checks.records import Cache, Side
from kvkit.checks.tensors import FLOAT_NAMES, apart, in_out, said, tensor
from kvkit.checks.values import choice, integer
from kvkit.errors import argument_error, describe
from kvkit.formats.elements import BY_DTYPE, FLOATS, INT8, QUANTIZED, STORED
from kvkit.layouts.grammar import Layout
from kvkit.layouts.places import place
from kvkit.layouts.pmx import sizes_of

ATTRIBUTES = "num_layer", "layer_idx", "quant_bit", "quant_group", "quant_format", "cache_layout"


def taken(attributes):
    """The attributes of `cache_layer`, taken out of those of a call."""
    return {name: attributes.pop(name) for name in ATTRIBUTES}


def cache_layer(
    fmt,
    heads,
    dim,
    cache,
    scale,
    layouts,
    num_layer,
    layer_idx,
    quant_bit,
    quant_group,
    cache_layout,
    quant_format=None,
):
    """The record of a layer, for tokens of a format, heads and their size."""
    num_layer = integer("num_layer", num_layer, 1)
    layer_idx = integer("layer_idx", layer_idx, 0, num_layer - 1)
    layout: Layout = layouts[integer("cache_layout", cache_layout, 0, len(layouts) - 1)]
    quant_bit = choice("quant_bit", quant_bit, (0, 4, 8))
    stored, width = cache_format(fmt, cache, quant_bit, quant_format, dim)
    in_out("cache", cache)
    shape_of("cache", cache, layout, cache_layout, num_layer, heads, width, stored)
    at, sizes = layout.at, cache.shape
    capacity = sizes[at["b"]] if "b" in at else 1, sizes[at["n"]]
    where = place(cache, layout, layer_idx)
    adjoin = where.head == stored.bytes(dim)
    key = Side(where.address, where.sequence, where.row, where.head)
    value = key._replace(address=where.address + where.kv)
    if stored.name in STORED and has_own_scales(stored, heads, scale):
        cell, *cells = given_scales(heads, scale)
        sides = Side(*key[:4], *cells[0]), Side(*value[:4], *cells[1])
        adjoin = adjoin and not cells[0][-1]
        return Cache(fmt.name, stored.name, cell, 0, heads, dim, stored.bytes(dim), capacity, adjoin, sides)
    if not quant_bit and stored.name not in STORED:
        sizes = heads, dim, stored.bytes(dim)
        return Cache(fmt.name, stored.name, None, 0, *sizes, capacity, adjoin, (key, value))

    group = integer("quant_group", quant_group, 1)
    if dim % group:
        raise argument_error("quant_group", f"a divisor of the head size {dim}", group)
    if quant_bit == 4 and group % 2:
        raise argument_error("quant_group", "an even number, for quant_bit 4", group)
    if scale is None:
        raise argument_error("scale", f"an array of scales, for quant_bit {quant_bit}", "None")
    cell = tensor("scale", scale, FLOATS, cache.ndim)
    in_out("scale", scale)
    cells = (*cache.shape[:-1], dim // group)
    if scale.shape != cells:
        raise argument_error(
            "scale", f"shape {cells}: that of cache, {dim // group} groups a head", scale.shape
        )
    apart("cache", cache, (("scale", scale),))
    spot = place(scale, layout, layer_idx)
    adjoin = adjoin and spot.head == cell.bytes(dim // group)
    tail = (spot.sequence, spot.row, spot.head)
    sides = Side(*key[:4], spot.address, *tail), Side(*value[:4], spot.address + spot.kv, *tail)
    return Cache(
        fmt.name, stored.name, cell.name, group, heads, dim, stored.bytes(dim), capacity, adjoin, sides
    )


def has_own_scales(stored, heads, scale):
    """Whether scales come with the codes or from the caller, so that an append finds none."""
    if stored.block and scale is not None:
        raise argument_error("scale", f"None: blocks of {stored} have theirs inside", describe(scale))
    return scale is None or (isinstance(scale, np.ndarray) and scale.shape in ((2,), (2, heads)))


def given_scales(heads, scale):
    """(format, place of those of keys, of values) of scales that a caller gives."""
    if scale is None:
        return None, (0, 0, 0, 0), (0, 0, 0, 0)
    cell = tensor("scale", scale, FLOATS, scale.ndim)
    bad = scale[~(np.isfinite(scale.astype(np.float32)) & (scale > 0))]
    if bad.size:
        raise argument_error("scale", "finite numbers above 0", f"{float(bad[0])}".replace("nan", "NaN"))
    return cell.name, *of_heads(scale, heads)


def of_heads(scale, heads):
    """The places of scales [2] or [2, heads]: of those of keys, of values."""
    head = scale.strides[1] if scale.ndim == 2 and heads > 1 else 0
    return [(scale.ctypes.data + side * scale.strides[0], 0, 0, head) for side in (0, 1)]


def cache_format(fmt, cache, quant_bit, quant_format, dim):
    """The format of the cache's elements, and the length of its last axis."""
    if not isinstance(cache, np.ndarray):
        raise argument_error("cache", "a numpy array", describe(cache))
    if quant_format is not None:
        return named_format(fmt, cache, quant_bit, quant_format, dim)
    if quant_bit:
        if fmt is INT8:
            raise argument_error("current_key", f"dtype {FLOAT_NAMES} for quant_bit {quant_bit}", "int8")
        if cache.dtype != np.int8 and not (quant_bit == 4 and cache.dtype == np.uint8):
            legal = "int8 (or uint8, the same bytes)" if quant_bit == 4 else "int8"
            raise argument_error("cache", f"dtype {legal} for quant_bit {quant_bit}", said(cache.dtype))
        return QUANTIZED[quant_bit], dim // 2 if quant_bit == 4 else dim
    stored = BY_DTYPE.get(cache.dtype)
    if stored is None or (stored is INT8) != (fmt is INT8):
        legal = "int8" if fmt is INT8 else FLOAT_NAMES
        raise argument_error("cache", f"dtype {legal} for quant_bit 0 and {fmt} keys", said(cache.dtype))
    return stored, dim


def named_format(fmt, cache, quant_bit, quant_format, dim):
    """Likewise of what `quant_format` names."""
    stored = STORED.get(quant_format) if isinstance(quant_format, str) else None
    if stored is None:
        raise argument_error("quant_format", f"one of {', '.join(STORED)}, or None", describe(quant_format))
    if quant_bit:
        raise argument_error("quant_bit", f"0, for quant_format '{stored}'", quant_bit)
    if fmt is INT8:
        raise argument_error("current_key", f"dtype {FLOAT_NAMES} for quant_format '{stored}'", "int8")
    if cache.dtype not in (np.uint8, stored.dtype):
        legal = "uint8" if stored.block else f"uint8 or {stored.dtype}"
        raise argument_error("cache", f"dtype {legal} for quant_format '{stored}'", said(cache.dtype))
    if stored.block and dim % stored.block.elements:
        raise argument_error(
            "cache", f"heads of a multiple of {stored.block.elements} for {stored}", f"{dim} elements"
        )
    return stored, stored.bytes(dim)


def shape_of(name, array, layout, cache_layout, num_layer, heads, width, stored):
    """Axes and sizes of a cache in its layout; the number of sequences and rows is free."""
    at, fixed = layout.at, {"l": num_layer, "kv": 2, "h": heads, "c": width}
    if array.ndim != len(at) or [array.shape[at[axis]] for axis in fixed] != list(fixed.values()):
        sizes = ", ".join(str(fixed.get(axis, "any")) for axis in layout.axes)
        note = ", Dh/2 bytes for int4" if stored.name == "int4" else ""
        note = f", {width} bytes a head of {stored}" if stored.block else note
        said = f"shape {sizes_of(layout)} = ({sizes}) for cache_layout {cache_layout}{note}"
        raise argument_error(name, said, array.shape)


def written_apart(cache, scale, layer, inputs):
    """The arrays that an append writes, with their names: apart from the inputs."""
    written = [("cache", cache), ("scale", scale)] if layer.group else [("cache", cache)]
    inputs = inputs if layer.group or scale is None else [*inputs, ("scale", scale)]
    for name, array in written:
        apart(name, array, inputs)
    return written
