"""Caches that a generation loop can hold: layers that grow, stay fixed, slide or are coded."""

from kvkit.cache.caches import Cache
from kvkit.cache.codes import QuantSpec
from kvkit.cache.constructors import DynamicCache, StaticCache
from kvkit.cache.layers import DynamicLayer, StaticLayer
from kvkit.cache.quantized import QuantizedCache, QuantizedLayer
from kvkit.cache.quantized_view import KVView
from kvkit.cache.saved import load
from kvkit.cache.sliding import SlidingWindowLayer, StaticSlidingWindowLayer
from kvkit.errors import CapacityError

__all__ = [
    "Cache",
    "CapacityError",
    "DynamicCache",
    "DynamicLayer",
    "KVView",
    "QuantSpec",
    "QuantizedCache",
    "QuantizedLayer",
    "SlidingWindowLayer",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "load",
]
