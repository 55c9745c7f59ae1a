"""The operators over dynamic caches: packed sequences of any lengths that share one pool of rows."""

from kvkit.dynamic_batching.attention import multi_head_attention, multi_head_cache_attention
from kvkit.dynamic_batching.cache import key_value_cache
from kvkit.dynamic_batching.planned import Plan, plan
from kvkit.dynamic_batching.positions import alibi_mask, position_index, rotary_position_embedding
from kvkit.runtime.lazy_imports import lazy_names

__all__ = [
    "Plan", "alibi_mask", "key_value_cache", "multi_head_attention", "multi_head_cache_attention", "plan",
    "position_index", "rotary_position_embedding",
]  # fmt: skip
__getattr__, __dir__ = lazy_names(__name__, {}, __all__)  # a wrong name is answered; modules are not listed
