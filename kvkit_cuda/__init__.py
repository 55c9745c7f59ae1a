"""The GPU twin of `kvkit`: the same operators for arrays of CUDA devices, and for numpy arrays.

Importing it touches neither Numba nor a driver; the first call does.
"""

from kvkit.errors import DeviceError, KvkitError
from kvkit.version import __version__
from kvkit_cuda import ascend, dynamic_batching
from kvkit_cuda.states import merge_attention_states
from kvkit_cuda.static import key_value_cache, multi_head_attention, multi_head_cache_attention
from kvkit_cuda.static_positions import alibi_mask, alibi_slope, rotary_position_embedding

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


def __dir__():
    return __all__
