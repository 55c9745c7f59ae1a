"""Ascend's operators on the device; helpers that make index tensors run on the host."""

from kvkit.ascend import CompressType, Slots, compressed_slots, razor_windows, slots
from kvkit_cuda.mirror import SUMS, on_device

__all__ = [
    "CompressType", "Slots", "block_copy", "compressed_slots", "nd_to_nz", "nz_to_nd", "paged_attention",
    "paged_cache_load", "razor_windows", "reshape_and_cache", "slots",
]  # fmt: skip

reshape_and_cache = on_device("ascend.reshape_and_cache")
paged_cache_load = on_device("ascend.paged_cache_load")
block_copy = on_device("ascend.block_copy")
paged_attention = on_device("ascend.paged_attention", SUMS)
nd_to_nz = on_device("ascend.nd_to_nz")
nz_to_nd = on_device("ascend.nz_to_nd")
