"""Ascend's ReshapeAndCache and the operators beside it on the device; index tensors are made on the host."""

from kvkit.ascend import CompressType, Slots, compressed_slots, razor_windows, slots
from kvkit_cuda.mirror import SUMS, twin

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

reshape_and_cache = twin("ascend.reshape_and_cache")
paged_cache_load = twin("ascend.paged_cache_load")
block_copy = twin("ascend.block_copy")
paged_attention = twin("ascend.paged_attention", SUMS)
nd_to_nz = twin("ascend.nd_to_nz")
nz_to_nd = twin("ascend.nz_to_nd")
