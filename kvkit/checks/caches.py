"""Checks of a cache and its scale that do not depend on the index tensors."""

from collections.abc import Sequence

import numpy as np

from kvkit.checks.arguments import CacheArguments
from kvkit.checks.records import Context, Side
from kvkit.checks.values import (
    FLOAT_NAMES,
    NamedArrays,
    check_apart,
    check_array,
    check_output,
    checked_format,
    choice,
    dtype_hint,
    integer,
)
from kvkit.errors import argument_error, describe
from kvkit.formats.elements import BY_DTYPE, FLOATS, INT8, QUANTIZED, STORED, Element
from kvkit.layouts.grammar import Layout
from kvkit.layouts.pmx import shape_text
from kvkit.runtime.arrays import address
from kvkit.typed import Array


def cache_layer(
    fmt: Element, heads: int, dim: int, cache: Array, scale: Array | None, layouts: Sequence[Layout],
    arguments: CacheArguments,
) -> Context:  # fmt: skip
    """Check a cache and its scale against the format, heads and head size of tokens; return one layer."""
    num_layer = integer("num_layer", arguments.num_layer, 1)
    layer_idx = integer("layer_idx", arguments.layer_idx, 0, num_layer - 1)
    layout = layouts[integer("cache_layout", arguments.cache_layout, 0, len(layouts) - 1)]
    quant_bit = choice("quant_bit", arguments.quant_bit, (0, 4, 8))
    stored, width = cache_format(fmt, cache, quant_bit, arguments.quant_format, dim)
    sizes = {"l": num_layer, "kv": 2, "h": heads, "c": width}
    at = layout.at  # sequences and rows are free
    if cache.ndim != len(at) or [cache.shape[at[axis]] for axis in sizes] != [*sizes.values()]:
        text = ", ".join(str(sizes.get(axis, "any")) for axis in layout.axes)
        note = ", Dh/2 bytes for int4" if stored.name == "int4" else ""
        note = f", {width} bytes a head of {stored}" if stored.block else note
        legal = f"shape {shape_text(layout)} = ({text}) for cache_layout {arguments.cache_layout}{note}"
        raise argument_error("cache", legal, cache.shape)
    key, value = layer_sides(cache, layout, layer_idx)
    stored_bytes = width * cache.itemsize
    layer = Context(
        data_dtype=fmt.name, cache_format=stored.name, scale_format=None, group=0, heads=heads, dim=dim,
        value_dim=dim, key_bytes=stored_bytes, value_bytes=stored_bytes,
        capacity=(cache.shape[at["b"]] if "b" in at else 1, cache.shape[at["n"]]),
        heads_adjoin=key.head == stored_bytes, sides=(key, value),
    )  # fmt: skip
    named = stored.name in STORED  # by `quant_format`
    if named and stored.block and scale is not None:
        raise argument_error("scale", f"None, because blocks of {stored} contain scales", describe(scale))
    if scale is None if named else not quant_bit:
        return layer
    if named and isinstance(scale, np.ndarray) and scale.shape in ((2,), (2, heads)):  # the caller's
        scale_format = checked_format("scale", scale, FLOATS, scale.ndim)
        bad = scale[~(np.isfinite(scale.astype(np.float32)) & (scale > 0))]
        if bad.size:
            got = f"{float(bad[0])}".replace("nan", "NaN")
            raise argument_error("scale", "finite numbers above 0", got)
        layer = at_scales(layer, scale)
        adjoin = layer.heads_adjoin and not layer.sides[0].scale_head
        return layer._replace(scale_format=scale_format.name, heads_adjoin=adjoin)

    group = integer("quant_group", arguments.quant_group, 1)
    if dim % group:
        raise argument_error("quant_group", f"a divisor of the head size {dim}", group)
    if quant_bit == 4 and group % 2:
        raise argument_error("quant_group", "an even number, for quant_bit 4", group)
    if scale is None:
        raise argument_error("scale", f"an array of scales, for quant_bit {quant_bit}", "None")
    scale_format = checked_format("scale", scale, FLOATS, cache.ndim)
    wanted = (*cache.shape[:-1], dim // group)
    if scale.shape != wanted:
        legal = f"shape {wanted}: that of cache, {dim // group} groups a head"
        raise argument_error("scale", legal, scale.shape)
    check_apart("cache", cache, (("scale", scale),))
    key_scales, value_scales = layer_sides(scale, layout, layer_idx)
    return layer._replace(
        scale_format=scale_format.name,
        group=group,
        heads_adjoin=layer.heads_adjoin and key_scales.head == scale_format.bytes(dim // group),
        # The address and strides of a side are its first four fields.
        sides=(key.with_scales(*key_scales[:4]), value.with_scales(*value_scales[:4])),
    )


def layer_sides(array: Array, layout: Layout, layer: int) -> tuple[Side, Side]:
    """Return address and strides of a layer's keys and values in a cache, or of scales in their array.

    A static cache has an axis of sequences. In a dynamic cache sequences share the rows: their stride is 0.
    """
    strides, at = array.strides, layout.at
    sequence = strides[at["b"]] if "b" in at else 0
    key = Side(address(array) + layer * strides[at["l"]], sequence, strides[at["n"]], strides[at["h"]])
    return key, key._replace(address=key.address + strides[at["kv"]])


def at_scales(layer: Context, scale: Array) -> Context:
    """Return the layer with scales [2] or [2, heads] of keys and values, which are read in place."""
    head = scale.strides[1] if scale.ndim == 2 and layer.heads > 1 else 0  # 0: one scale for all heads
    at, (key, value) = address(scale), layer.sides
    sides = key.with_scales(at, head=head), value.with_scales(at + scale.strides[0], head=head)
    return layer._replace(sides=sides)


def cache_format(
    fmt: Element, cache: Array, quant_bit: int, quant_format: str | None, dim: int
) -> tuple[Element, int]:
    """Return the format of the cache's elements, and the length of its last axis."""
    if type(cache) is not np.ndarray:
        check_array("cache", cache)
    if quant_format is not None:
        return named_format(fmt, cache, quant_bit, quant_format, dim)
    if quant_bit:
        if fmt is INT8:
            raise argument_error("current_key", f"dtype {FLOAT_NAMES} for quant_bit {quant_bit}", "int8")
        if cache.dtype != np.int8 and not (quant_bit == 4 and cache.dtype == np.uint8):
            legal = "int8 (or uint8, the same bytes)" if quant_bit == 4 else "int8"
            raise argument_error("cache", f"dtype {legal} for quant_bit {quant_bit}", dtype_hint(cache.dtype))
        return QUANTIZED[quant_bit], dim // 2 if quant_bit == 4 else dim
    stored = BY_DTYPE.get(cache.dtype)
    if stored is None or (stored is INT8) != (fmt is INT8):
        legal = f"dtype {'int8' if fmt is INT8 else FLOAT_NAMES} for quant_bit 0 and {fmt} keys"
        raise argument_error("cache", legal, dtype_hint(cache.dtype))
    return stored, dim


def named_format(
    fmt: Element, cache: Array, quant_bit: int, quant_format: str, dim: int
) -> tuple[Element, int]:
    """Return the format that `quant_format` names, and the length of the cache's last axis."""
    stored = STORED.get(quant_format) if isinstance(quant_format, str) else None
    if stored is None:
        raise argument_error("quant_format", f"one of {', '.join(STORED)}, or None", describe(quant_format))
    if quant_bit:
        raise argument_error("quant_bit", f"0, for quant_format '{stored}'", quant_bit)
    if fmt is INT8:
        raise argument_error("current_key", f"dtype {FLOAT_NAMES} for quant_format '{stored}'", "int8")
    if cache.dtype not in (np.uint8, stored.dtype):
        legal = "uint8" if stored.block else f"uint8 or {stored.dtype}"
        raise argument_error("cache", f"dtype {legal} for quant_format '{stored}'", dtype_hint(cache.dtype))
    if stored.block and dim % stored.block.elements:
        legal = f"heads of a multiple of {stored.block.elements} for {stored}"
        raise argument_error("cache", legal, f"{dim} elements")
    return stored, stored.bytes(dim)


def check_written(cache: Array, scale: Array | None, layer: Context, inputs: NamedArrays) -> NamedArrays:
    """Check that an append can write its arrays and overwrites no input; return them with their names."""
    written = [("cache", cache)]
    if scale is not None:
        if layer.group:
            written.append(("scale", scale))
        else:  # the caller's own scales are only read
            inputs = [*inputs, ("scale", scale)]
    for name, array in written:
        check_output(name, array)
        check_apart(name, array, inputs)
    return written
