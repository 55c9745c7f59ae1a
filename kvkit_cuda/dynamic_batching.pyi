"""Printed by `python -m kvkit_cuda.print_stubs`."""
# fmt: off

from typing import Any, Literal, SupportsIndex, TypeAlias

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
Array: TypeAlias = Any  # a numpy array, or a device array of any library

class Plan:
    def key_value_cache(
        self, current_key: Array, current_value: Array, cache: Array, scale: Array | None = None, *,
        num_layer: int = 1, layer_idx: int = 0, quant_bit: Literal[0, 4, 8] = 0, quant_group: int = 8,
        quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None, num_repeat: int = 1,
        cache_layout: int = 0, out: tuple[Array, Array] | None = None, stream: object = None
    ) -> tuple[Array, Array]: ...
    def multi_head_cache_attention(
        self, query: Array, current_key: Array, current_value: Array, cache: Array,
        scale: Array | None = None, attn_mask: Array | None = None, *, num_heads: int = 0, head_dim: int = 0,
        is_causal: bool = True, is_alibi: bool = False, num_kv_heads: int = 0, num_layer: int = 1,
        layer_idx: int = 0, quant_bit: Literal[0, 4, 8] = 0, quant_group: int = 8,
        quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None, cache_layout: int = 0,
        softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        sinks: Array | None = None, return_lse: bool = False, out: Array | tuple[Array, Array] | None = None,
        stream: object = None
    ) -> Array | Any: ...

def alibi_mask(
    seqstarts: Array, kvstarts: Array, attn_mask: Array | None = None, *, num_heads: int,
    data_type: Literal["float32", "float16", "bfloat16"] = "float32", out: Array | None = None,
    stream: object = None
) -> Array: ...
def key_value_cache(
    current_key: Array, current_value: Array, seqstarts: Array, kvstarts: Array, cachestarts: Array,
    start_pos: Array, max_seqlen: SupportsIndex | None, max_kvlen: SupportsIndex | None, cache: Array,
    scale: Array | None = None, *, num_layer: int = 1, layer_idx: int = 0,
    quant_bit: Literal[0, 4, 8] = 0, quant_group: int = 8,
    quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None, num_repeat: int = 1,
    cache_mode: Literal[0, 1] = 0, cache_layout: int = 0, page_size: int = 128,
    out: tuple[Array, Array] | None = None, stream: object = None
) -> tuple[Array, Array]: ...
def multi_head_attention(
    query: Array, key: Array, value: Array, seqstarts: Array, kvstarts: Array,
    decoding_batches: SupportsIndex, max_seqlen: SupportsIndex | None, max_kvlen: SupportsIndex | None,
    attn_mask: Array | None = None, *, num_heads: int = 0, head_dim: int = 0, is_causal: bool = True,
    is_alibi: bool = False, num_kv_heads: int = 0, softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Array | None = None,
    return_lse: bool = False, out: Array | tuple[Array, Array] | None = None, stream: object = None
) -> Array | Any: ...
def multi_head_cache_attention(
    query: Array, current_key: Array, current_value: Array, seqstarts: Array, kvstarts: Array,
    cachestarts: Array, start_pos: Array, decoding_batches: SupportsIndex,
    max_seqlen: SupportsIndex | None, max_kvlen: SupportsIndex | None, cache: Array,
    scale: Array | None = None, attn_mask: Array | None = None, *, num_heads: int = 0, head_dim: int = 0,
    is_causal: bool = True, is_alibi: bool = False, num_kv_heads: int = 0, num_layer: int = 1,
    layer_idx: int = 0, quant_bit: Literal[0, 4, 8] = 0, quant_group: int = 8,
    quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None, cache_mode: Literal[0, 1] = 0,
    cache_layout: int = 0, page_size: int = 128, softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Array | None = None,
    return_lse: bool = False, out: Array | tuple[Array, Array] | None = None, stream: object = None
) -> Array | Any: ...
def plan(
    seqstarts: Array, kvstarts: Array, cachestarts: Array, start_pos: Array,
    decoding_batches: SupportsIndex = 0, *, max_seqlen: SupportsIndex | None = None,
    max_kvlen: SupportsIndex | None = None, cache_mode: Literal[0, 1] = 0, page_size: int = 128,
    check: bool = True, into: object = None, stream: object = None
) -> Plan: ...
def position_index(
    sequences: Array, seqstarts: Array, start_pos: Array, max_seqlen: SupportsIndex | None = None, *,
    out: Array | None = None, stream: object = None
) -> Array: ...
def rotary_position_embedding(
    query: Array, key: Array, seqstarts: Array, start_pos: Array, max_seqlen: SupportsIndex | None, *,
    rotary_dim: int = 0, interleaved: bool = True, cos: Array | None = None, sin: Array | None = None,
    theta: float = 10000.0, bypass_key: bool = False, max_position_embeddings: int = 2048,
    scaling_type: Literal["", "linear", "dynamic"] = "", scaling_factor: float = 1.0,
    out: tuple[Array, Array] | None = None, stream: object = None
) -> tuple[Array, Array]: ...
