"""KV-cache operators for numpy arrays: exact to their specifications, as fast as memory."""

from kvkit import ascend, dynamic_batching, sources  # noqa: F401  (sources: at import, see there)
from kvkit.errors import DeviceError, KvkitError
from kvkit.merge import merge_attention_states
from kvkit.static import (
    alibi_mask,
    alibi_slope,
    key_value_cache,
    multi_head_attention,
    multi_head_cache_attention,
    rotary_position_embedding,
)
from kvkit.version import __version__

__all__ = [
    "DeviceError",
    "KvkitError",
    "__version__",
    "alibi_mask",
    "alibi_slope",
    "ascend",
    "dynamic_batching",
    "key_value_cache",
    "merge_attention_states",
    "multi_head_attention",
    "multi_head_cache_attention",
    "rotary_position_embedding",
]
