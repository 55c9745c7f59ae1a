"""The operators over static caches: sequences of one length, each with its own part of the cache."""

from kvkit.static.attention import multi_head_attention, multi_head_cache_attention
from kvkit.static.cache import key_value_cache
from kvkit.static.positions import alibi_mask, alibi_slope, rotary_position_embedding

__all__ = [
    "alibi_mask",
    "alibi_slope",
    "key_value_cache",
    "multi_head_attention",
    "multi_head_cache_attention",
    "rotary_position_embedding",
]
