"""Ascend's ReshapeAndCache and the operators beside it on the device; index tensors are made on the host."""

from kvkit.ascend import CompressType, Slots, compressed_slots, razor_windows, slots
from kvkit_cuda.ascend.attention import paged_attention
from kvkit_cuda.ascend.blocks import block_copy, paged_cache_load
from kvkit_cuda.ascend.matrices import nd_to_nz, nz_to_nd
from kvkit_cuda.ascend.reshape import reshape_and_cache

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
