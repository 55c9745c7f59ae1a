"""A call of attention as the kernels see it: one record of addresses, strides and counts, passed by value.

Beside it go the tables of the step, which are on the device already, so that a planned call copies nothing.
"""

from collections import namedtuple
from typing import NamedTuple

import numpy as np
from numba import types

from kvkit.formats import BY_DTYPE, MASKS
from kvkit.layouts.places import packed_strides

FIELDS = (
    "keys key_sequence key_row key_head key_cells cell_sequence cell_row cell_head",
    "values value_sequence value_row value_head value_cells",
    "query query_sequence query_token query_head out out_sequence out_token out_head",
    "lse lse_sequence lse_token lse_head sinks sink_kind sink_head apart",
    "mask mask_kind mask_sequence mask_head mask_row mask_column mask_packed",
    "decoding causal alibi left right scale cap page_size",
    "heads group dim value_dim cell_group partials",
    "free key_step value_step key_element value_element value_table",  # of pools; else neutral
    "key_scales value_scales scale_sequence scale_head sloped slopes_sequence",
)
Task = namedtuple("Task", " ".join(FIELDS))  # type: ignore[misc]
RECORD = types.NamedUniTuple(types.int64, len(Task._fields), Task)
NOWHERE = 0, 0, 0, 0
# Whose addresses they are, in a launch whose first argument the record is.
OWNED = {
    "keys": "cache", "values": "cache", "key_cells": "scale", "value_cells": "scale", "query": "query",
    "out": "result 0", "lse": "result 1", "partials": "scratch",
}  # fmt: skip
OWNERS = {(0, Task._fields.index(field)): name for field, name in OWNED.items()}


class Reach(NamedTuple):
    """How far what kernels may hold in 32 bits goes, in whatever step takes the place of a call's own."""

    rows: int  # more than the number of any row
    context: int  # of the longest one


def reach(steps, rows):
    """That of a step of so many rows; each page of its table holds no more."""
    return Reach(rows, steps.table.shape[1] * min(steps.page_size, rows))


def task(query, out, lse, context, page_size, decoding, weights):
    """The record of a checked call, its arrays on the device; `scale` and `cap` are the bits of float32s."""
    sinks = weights.sinks
    numbers = (
        *context.sides[0], *context.sides[1][:5],
        query.ctypes.data, *packed_strides(query), out.ctypes.data, *packed_strides(out),
        *((lse.ctypes.data, *packed_strides(lse[..., None])) if lse is not None else NOWHERE),
        *((sinks.ctypes.data, kind(sinks), sinks.strides[0]) if sinks is not None else NOWHERE[:3]),
        weights.apart, *weights.mask,
        decoding, weights.causal, weights.alibi, weights.left, weights.right,
        bits(weights.scale), bits(weights.softcap), page_size,
        context.heads, query.shape[-2] // context.heads, context.dim, context.value_dim,
        context.group or context.dim, 0,
        *[0] * 12,
    )  # fmt: skip
    return Task._make(map(int, numbers))


def bits(number):
    return int(np.float32(number).view(np.uint32))


def kind(array):
    """The number by which kernels know the type of an array that they read an element at a time."""
    return MASKS[BY_DTYPE[array.dtype].name]
