"""Printed by `python -m kvkit_cuda.stubs`."""

from typing import Any, TypeAlias

from kvkit.ascend.tables import Slots, compressed_slots, razor_windows, slots
from kvkit.compression import CompressType

__all__ = [
    "CompressType",
    "Slots",
    "block_copy",
    "compressed_slots",
    "nd_to_nz",
    "nz_to_nd",
    "paged_attention",
    "paged_cache_load",
    "razor_windows",
    "reshape_and_cache",
    "slots",
]
Array: TypeAlias = Any  # of numpy, or of a device and any library

def block_copy(
    key_cache,
    value_cache,
    src,
    dst,
    cum_sum,
    *,
    stream: object = None,
): ...
def nd_to_nz(
    x,
    *,
    out=None,
    stream: object = None,
): ...
def nz_to_nd(
    y,
    m,
    n,
    *,
    out=None,
    stream: object = None,
): ...
def paged_attention(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    *,
    razor_offset=None,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
    stream: object = None,
): ...
def paged_cache_load(
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    seq_starts=None,
    *,
    cache_format="ND",
    out=None,
    stream: object = None,
): ...
def reshape_and_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    compress_type=...,
    wins=None,
    seq_lens=None,
    offset_index=None,
    cache_format="ND",
    empty_window="copy",
    stream: object = None,
): ...
