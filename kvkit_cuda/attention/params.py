"""The parameters of attention kernels: one record of addresses, strides and counts, passed by value.

The step's tables are separate arguments; they are on the device already, so a planned call copies nothing.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
from numba import types

from kvkit.checks.records import Context, Side
from kvkit.checks.values import packed_strides
from kvkit.formats import BY_DTYPE, MASKS
from kvkit_cuda.attention.tiles import LONGEST, reciprocal

# Addresses, byte strides between sequences, rows, tokens or heads, and numbers, grouped by the functions
# below that fill them. Other fields are 0. `decoding` counts the first sequences that see their whole
# context; by_page and by_group are reciprocals; pools have any strides (`calls.attention.pool_fields`).
GROUPS = {
    "places": "keys key_sequence key_row key_head values value_sequence value_row value_head",
    "scales": "key_scales value_scales scale_sequence scale_row scale_head scale_group",
    "rows": "query query_sequence query_token query_head out out_sequence out_token out_head "
    "lse lse_sequence lse_token lse_head",
    "scoring": "decoding causal alibi left right scale value_scale cap sinks sink_kind sink_head"
    " sink_sequences",
    "masks": "mask mask_kind mask_sequence mask_head mask_row mask_column mask_packed",
    "sizes": "page_size heads group dim value_dim by_page by_group",
    "results of splits": "partials",
    "pools": "general key_step value_step key_element value_element value_table "
    "key_head_scales value_head_scales head_scale_sequence head_scale_head sloped slopes_sequence",
}
FIELDS = " ".join(GROUPS.values()).split()
AttentionParams = namedtuple("AttentionParams", FIELDS, defaults=[0] * len(FIELDS))  # type: ignore[misc]
RECORD = types.NamedUniTuple(types.int64, len(FIELDS), AttentionParams)
# The array that each address points into, for launches whose first argument is the record.
OWNED = {
    "keys": "cache", "values": "cache", "key_scales": "scale", "value_scales": "scale", "query": "query",
    "out": "result 0", "lse": "result 1", "partials": "scratch",
}  # fmt: skip
OF_POOLS = OWNED | {
    "keys": "key_cache", "values": "value_cache", "key_scales": "key_scale", "value_scales": "value_scale"
}  # fmt: skip
OWNERS, POOL_OWNERS = (
    {(0, FIELDS.index(field)): name for field, name in owned.items()} for owned in (OWNED, OF_POOLS)
)


class Reach(NamedTuple):
    """Upper bounds over all steps that a prepared call may run, by which kernels choose 32-bit indices."""

    rows: int  # greater than any row id
    context: int  # tokens of the longest context


def reach(tables: Any, rows: int) -> Reach:
    """Return the bounds of `DeviceTables` over a cache of `rows` rows. No page has more rows than it."""
    return Reach(rows, tables.most_pages * min(tables.steps.page_size, rows))


def attention_params(
    query: np.ndarray, out: np.ndarray, lse: np.ndarray | None, context: Context, page_size: int,
    decoding: int, weights: Any,
) -> Any:  # fmt: skip
    """Return the record of a checked call whose arrays are on the device."""
    keys, values = context.sides
    fields = place_fields("key", keys) | place_fields("value", values)
    fields |= {name: getattr(keys, name) for name in ("scale_sequence", "scale_row", "scale_head")}  # of both
    fields |= {"key_scales": keys.scales, "value_scales": values.scales}
    fields |= {"scale_group": context.group or context.dim}
    fields |= row_fields("query", query) | row_fields("out", out)
    fields |= row_fields("lse", lse[..., None]) if lse is not None else {}
    fields |= scoring_fields(weights) | dict(zip(GROUPS["masks"].split(), weights.mask, strict=True))
    fields |= {"decoding": decoding, "page_size": page_size, "dim": context.dim, "heads": context.heads}
    fields |= {"value_dim": context.value_dim, "group": query.shape[-2] // context.heads}
    return AttentionParams(**{name: int(number) for name, number in fields.items()})


def with_short_divisors(record: Any) -> Any:
    """Return the record for kernels that divide only numbers below 2^31, with reciprocals of divisors."""
    record = record._replace(page_size=min(record.page_size, LONGEST))
    return record._replace(by_page=reciprocal(record.page_size), by_group=reciprocal(record.group))


def place_fields(name: str, side: Side) -> dict[str, int]:
    """Return the address and strides of keys or values."""
    strides = {f"{name}_{axis}": getattr(side, axis) for axis in ("sequence", "row", "head")}
    return {f"{name}s": side.address} | strides


def scale_places(params: Any) -> tuple[int, ...]:
    """Return the addresses and strides of scales, to check their alignment."""
    strides = params.scale_sequence, params.scale_row, params.scale_head
    return params.key_scales, params.value_scales, *strides


def row_fields(name: str, rows: np.ndarray) -> dict[str, int]:
    """Return the address and strides of packed rows [.., tokens, heads, elements]."""
    names = name, f"{name}_sequence", f"{name}_token", f"{name}_head"
    return dict(zip(names, (rows.ctypes.data, *packed_strides(rows)), strict=True))


def scoring_fields(weights: Any) -> dict[str, int]:
    """Return the fields of scoring: causal rule, window, sinks; scales and cap as float32 bits."""
    fields = {"causal": weights.causal, "alibi": weights.alibi, "left": weights.left, "right": weights.right}
    scale, value_scale = weights.scale, 1.0
    if is_shared(weights.scales):
        scale, value_scale = weights.scales.ravel().tolist()
    fields |= {"scale": bits(scale), "value_scale": bits(value_scale)}
    fields |= {"cap": bits(weights.softcap), "sink_sequences": weights.sink_sequences}
    if weights.sinks is not None:
        sinks = weights.sinks
        fields |= {"sinks": sinks.ctypes.data, "sink_kind": kind(sinks), "sink_head": sinks.strides[0]}
    return fields


def is_shared(scales: np.ndarray | None) -> bool:
    """Return whether all heads share the scales of keys and values [2, sequences, heads]."""
    return scales is not None and scales.size == len(("keys", "values"))


def bits(number: float) -> int:
    """Return the bits of a float32."""
    return int(np.float32(number).view(np.uint32))


def kind(array: np.ndarray) -> int:
    """Return the number that kernels have for the type of a mask or of sinks."""
    return MASKS[BY_DTYPE[array.dtype].name]
