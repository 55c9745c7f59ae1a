"""The GPU twin of `kvkit`: the same operators for arrays of CUDA devices, and for numpy arrays.

Importing it touches neither Numba nor a driver; the first call does.
"""

import kvkit
from kvkit.errors import DeviceError, KvkitError
from kvkit.version import __version__
from kvkit_cuda import dynamic_batching
from kvkit_cuda.missing import missing
from kvkit_cuda.states import merge_attention_states
from kvkit_cuda.static import key_value_cache, multi_head_attention, multi_head_cache_attention

__all__ = [
    "DeviceError",
    "KvkitError",
    "__version__",
    "dynamic_batching",
    "key_value_cache",
    "merge_attention_states",
    "multi_head_attention",
    "multi_head_cache_attention",
]

__getattr__ = missing(kvkit, __name__)
