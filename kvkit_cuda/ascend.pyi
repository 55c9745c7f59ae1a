"""Printed by `python -m kvkit_cuda.print_stubs`."""
# fmt: off

from typing import Any, Literal, SupportsIndex, TypeAlias

from kvkit.ascend.tables import Slots, compressed_slots, razor_windows, slots
from kvkit.operators.compression import CompressType

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
Array: TypeAlias = Any  # a numpy array, or a device array of any library

def block_copy(
    key_cache: Array, value_cache: Array | None, src: Array, dst: Array, cum_sum: Array, *,
    stream: object = None
) -> tuple[Array, Array | None]: ...
def nd_to_nz(
    x: Array, *, out: Array | None = None, stream: object = None
) -> Array: ...
def nz_to_nd(
    y: Array, m: SupportsIndex, n: SupportsIndex, *, out: Array | None = None, stream: object = None
) -> Array: ...
def paged_attention(
    query: Array, key_cache: Array, value_cache: Array, block_tables: Array, context_lens: Array, *,
    razor_offset: Array | None = None, softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Array | None = None,
    return_lse: bool = False, out: Array | tuple[Array, Array] | None = None, stream: object = None
) -> Array | Any: ...
def paged_cache_load(
    key_cache: Array, value_cache: Array | None, block_tables: Array, seq_lens: Array,
    seq_starts: Array | None = None, *, cache_format: Literal["ND", "NZ"] = "ND",
    out: tuple[Array, ...] | None = None, stream: object = None
) -> tuple[Array, Array | None]: ...
def reshape_and_cache(
    key: Array, value: Array | None, key_cache: Array, value_cache: Array | None, slot_mapping: Array, *,
    compress_type: CompressType | int | str = ..., wins: Array | None = None,
    seq_lens: Array | None = None, offset_index: Array | None = None,
    cache_format: Literal["ND", "NZ"] = "ND", empty_window: Literal["copy", "skip"] = "copy",
    stream: object = None
) -> tuple[Array, Array | None]: ...
