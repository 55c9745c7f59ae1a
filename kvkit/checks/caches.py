"""Checks of a cache and its scale: everything that does not depend on the index tensors."""

import numpy as np

from kvkit.checks.records import Cache
from kvkit.checks.tensors import FLOAT_NAMES, apart, in_out, said, tensor
from kvkit.checks.values import choice, integer
from kvkit.checks.words import describe, wrong
from kvkit.formats import BY_DTYPE, FLOATS, INT8, QUANTIZED
from kvkit.layouts.grammar import Layout
from kvkit.layouts.places import place
from kvkit.layouts.pmx import sizes_of

ATTRIBUTES = "num_layer", "layer_idx", "quant_bit", "quant_group", "cache_layout"


def taken(attributes):
    """The attributes of `cache_layer`, taken out of those of a call."""
    return {name: attributes.pop(name) for name in ATTRIBUTES}


def cache_layer(
    fmt, heads, dim, cache, scale, layouts, num_layer, layer_idx, quant_bit, quant_group, cache_layout
):
    """The record of a layer, for tokens of a format, heads and their size."""
    num_layer = integer("num_layer", num_layer, 1)
    layer_idx = integer("layer_idx", layer_idx, 0, num_layer - 1)
    layout: Layout = layouts[integer("cache_layout", cache_layout, 0, len(layouts) - 1)]
    quant_bit = choice("quant_bit", quant_bit, (0, 4, 8))
    stored, width = cache_format(fmt, cache, quant_bit, dim)
    in_out("cache", cache)
    shape_of("cache", cache, layout, cache_layout, num_layer, heads, width, stored)
    at, sizes = layout.at, cache.shape
    capacity = sizes[at["b"]] if "b" in at else 1, sizes[at["n"]]
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
            raise wrong("cache", f"dtype {legal} for quant_bit {quant_bit}", said(cache.dtype))
        return QUANTIZED[quant_bit], dim // 2 if quant_bit == 4 else dim
    stored = BY_DTYPE.get(cache.dtype)
    if stored is None or (stored is INT8) != (fmt is INT8):
        legal = "int8" if fmt is INT8 else FLOAT_NAMES
        raise wrong("cache", f"dtype {legal} for quant_bit 0 and {fmt} keys", said(cache.dtype))
    return stored, dim


def shape_of(name, array, layout, cache_layout, num_layer, heads, width, stored):
    """Axes and sizes of a cache in its layout; the number of sequences and rows is free."""
    at, fixed = layout.at, {"l": num_layer, "kv": 2, "h": heads, "c": width}
    if array.ndim != len(at) or [array.shape[at[axis]] for axis in fixed] != list(fixed.values()):
        sizes = ", ".join(str(fixed.get(axis, "any")) for axis in layout.axes)
        note = ", Dh/2 bytes for int4" if stored.name == "int4" else ""
        said = f"shape {sizes_of(layout)} = ({sizes}) for cache_layout {cache_layout}{note}"
        raise wrong(name, said, array.shape)


def written_apart(cache, scale, layer, inputs):
    """The arrays that an append writes, with their names: apart from the inputs."""
    written = [("cache", cache)] if layer.cell is None else [("cache", cache), ("scale", scale)]
    for name, array in written:
        apart(name, array, inputs)
    return written
