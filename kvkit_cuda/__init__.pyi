"""Printed by `python -m kvkit_cuda.stubs`."""

from typing import Any, TypeAlias

from kvkit.errors import DeviceError, KvkitError
from kvkit_cuda import ascend, dynamic_batching

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
Array: TypeAlias = Any  # of numpy, or of a device and any library

__version__: str

def alibi_mask(
    seqlen_q,
    seqlen_kv,
    attn_mask=None,
    *,
    num_heads,
    data_type="float32",
    out=None,
    stream: object = None,
): ...
def alibi_slope(
    *,
    num_heads,
    out=None,
    stream: object = None,
): ...
def key_value_cache(
    current_key,
    current_value,
    start_pos,
    cache,
    scale=None,
    *,
    num_layer=1,
    layer_idx=0,
    quant_bit=0,
    quant_group=8,
    num_repeat=1,
    cache_layout=0,
    out=None,
    stream: object = None,
): ...
def merge_attention_states(
    outputs,
    lses,
    *,
    out=None,
    stream: object = None,
): ...
def multi_head_attention(
    query,
    key,
    value,
    attn_mask=None,
    *,
    num_heads,
    head_dim,
    is_causal=True,
    is_alibi=False,
    num_kv_heads=0,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
    stream: object = None,
): ...
def multi_head_cache_attention(
    query,
    current_key,
    current_value,
    start_pos,
    cache,
    scale=None,
    attn_mask=None,
    *,
    num_heads,
    head_dim,
    is_causal=True,
    is_alibi=False,
    num_kv_heads=0,
    num_layer=1,
    layer_idx=0,
    quant_bit=0,
    quant_group=8,
    cache_layout=0,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
    stream: object = None,
): ...
def rotary_position_embedding(
    query,
    key,
    start_pos,
    pad_len=None,
    *,
    rotary_dim=0,
    theta=10000.0,
    bypass_key=False,
    max_position_embeddings=2048,
    scaling_type="",
    scaling_factor=1.0,
    out=None,
    stream: object = None,
): ...
