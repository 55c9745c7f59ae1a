"""The operators over dynamic caches on the device."""

from kvkit_cuda.dynamic_batching.attention import multi_head_attention, multi_head_cache_attention
from kvkit_cuda.dynamic_batching.cache import key_value_cache
from kvkit_cuda.dynamic_batching.plan import Plan, plan
from kvkit_cuda.dynamic_batching.positions import alibi_mask, position_index, rotary_position_embedding

__all__ = [
    "Plan",
    "alibi_mask",
    "key_value_cache",
    "multi_head_attention",
    "multi_head_cache_attention",
    "plan",
    "position_index",
    "rotary_position_embedding",
]
