"""Operators of Ascend ATB over caches in blocks, and functions that build their index tensors."""

from kvkit.ascend.attention import paged_attention
from kvkit.ascend.blocks import block_copy, paged_cache_load
from kvkit.ascend.matrices import nd_to_nz, nz_to_nd
from kvkit.ascend.reshape import reshape_and_cache
from kvkit.ascend.tables import Slots, compressed_slots, razor_windows, slots
from kvkit.operators.compression import CompressType
from kvkit.runtime.lazy_imports import lazy_names

__all__ = [
    "CompressType", "Slots", "block_copy", "compressed_slots", "nd_to_nz", "nz_to_nd", "paged_attention",
    "paged_cache_load", "razor_windows", "reshape_and_cache", "slots",
]  # fmt: skip
__getattr__, __dir__ = lazy_names(__name__, {}, __all__)  # a wrong name is answered; modules are not listed
