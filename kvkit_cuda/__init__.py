"""The GPU twin of `kvkit`: the same operators for arrays of CUDA devices, and for numpy arrays.

Importing it touches neither Numba nor a driver; the first call does.
"""

from kvkit.errors import DeviceError, KvkitError
from kvkit.version import __version__
from kvkit_cuda import ascend, dynamic_batching
from kvkit_cuda.mirror import ANGLES, BITS, CODES, SUMS, twin

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
    "paged_append",
    "paged_attention",
    "rotary_position_embedding",
    "swap_blocks",
]

key_value_cache = twin("key_value_cache", BITS)
multi_head_attention = twin("multi_head_attention", SUMS)
multi_head_cache_attention = twin("multi_head_cache_attention", BITS, CODES, SUMS)
merge_attention_states = twin("merge_attention_states")
paged_attention = twin("paged_attention", SUMS)
paged_append = twin("paged_append")
swap_blocks = twin("swap_blocks")
rotary_position_embedding = twin("rotary_position_embedding", ANGLES)
alibi_slope = twin("alibi_slope")
alibi_mask = twin("alibi_mask")


def __dir__():
    return __all__
