"""Caches that a generation loop can hold: layers that grow, stay fixed, slide, are coded, or share blocks."""

from kvkit.cache.blocks import BlockAllocator, OutOfBlocksError
from kvkit.cache.blocks_sequence import Sequence
from kvkit.cache.blocks_step import Step
from kvkit.cache.caches import Cache
from kvkit.cache.constructors import DynamicCache, QuantizedCache, StaticCache
from kvkit.cache.layers import DynamicLayer, StaticLayer
from kvkit.cache.paged import PagedCache
from kvkit.cache.paged_layer import PagedLayer
from kvkit.cache.paged_step import PagedStep
from kvkit.cache.quant_spec import QuantSpec
from kvkit.cache.quantized import QuantizedLayer
from kvkit.cache.quantized_view import KVView
from kvkit.cache.saved import load
from kvkit.cache.sliding import SlidingWindowLayer, StaticSlidingWindowLayer
from kvkit.errors import CapacityError

__all__ = [
    "BlockAllocator",
    "Cache",
    "CapacityError",
    "DynamicCache",
    "DynamicLayer",
    "KVView",
    "OutOfBlocksError",
    "PagedCache",
    "PagedLayer",
    "PagedStep",
    "QuantSpec",
    "QuantizedCache",
    "QuantizedLayer",
    "Sequence",
    "SlidingWindowLayer",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "Step",
    "load",
]
