"""Caches that a generation loop can hold: layers that grow, stay fixed or slide."""

from kvkit.cache.caches import Cache
from kvkit.cache.constructors import DynamicCache, StaticCache
from kvkit.cache.layers import DynamicLayer, StaticLayer
from kvkit.cache.saved import load
from kvkit.cache.sliding import SlidingWindowLayer, StaticSlidingWindowLayer
from kvkit.errors import CapacityError

__all__ = [
    "Cache",
    "CapacityError",
    "DynamicCache",
    "DynamicLayer",
    "SlidingWindowLayer",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "load",
]
