"""Printed by `python -m kvkit_cuda.print_stubs`."""
# fmt: off

from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias

from kvkit.errors import DeviceError, KvkitError
from kvkit.rope import Rope
from kvkit_cuda import ascend, dynamic_batching

__all__ = [
    "DeviceError",
    "KvkitError",
    "PagedPlan",
    "__version__",
    "alibi_mask",
    "alibi_slope",
    "ascend",
    "causal_conv",
    "causal_conv_update",
    "compress_tokens",
    "compressed_slots",
    "delta_gates",
    "dynamic_batching",
    "gated_delta_replay",
    "gated_delta_rule",
    "gated_delta_step",
    "indexer_scores",
    "key_value_cache",
    "merge_attention_states",
    "mla_absorb",
    "mla_append",
    "mla_attention",
    "mla_expand",
    "multi_head_attention",
    "multi_head_cache_attention",
    "paged_append",
    "paged_attention",
    "paged_plan",
    "rope_back",
    "rotary_position_embedding",
    "swap_blocks",
    "topk_rows",
]
Array: TypeAlias = Any  # a numpy array, or a device array of any library

class PagedPlan:
    def paged_append(
        self, key: Array | None, value: Array | None, key_cache: Array | None, value_cache: Array | None, *,
        layout: str = "b n h c", key_scale: float | Array | None = None,
        value_scale: float | Array | None = None, rope: Rope | Mapping[str, Any] | str | None = None,
        stream: object = None
    ) -> tuple[Array | None, Array | None]: ...
    def paged_attention(
        self, query: Array, key_cache: Array, value_cache: Array | None, attn_mask: Array | None = None, *,
        layout: str = "b n h c", key_scale: float | Array | None = None,
        value_scale: float | Array | None = None, quant_format: str | None = None, is_causal: bool = True,
        alibi_slopes: Array | None = None, softmax_scale: float | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Array | None = None,
        return_lse: bool = False, return_key_weights: bool = False,
        out: Array | Sequence[Array] | None = None, stream: object = None
    ) -> Array | Any: ...

__version__: str

def alibi_mask(
    seqlen_q: SupportsIndex, seqlen_kv: SupportsIndex, attn_mask: Array | None = None, *, num_heads: int,
    data_type: Literal["float32", "float16", "bfloat16"] = "float32", out: Array | None = None,
    stream: object = None
) -> Array: ...
def alibi_slope(
    *, num_heads: int, out: Array | None = None, stream: object = None
) -> Array: ...
def causal_conv(
    x: Array, weight: Array, bias: Array | None = None, *, state: Array | None = None,
    starts: Array | None = None, state_indices: Array | None = None, activation: str | None = "silu",
    out: Array | None = None, stream: object = None
) -> tuple[Array, Array]: ...
def causal_conv_update(
    x: Array, weight: Array, bias: Array | None = None, *, state: Array,
    state_indices: Array | None = None, activation: str | None = "silu", out: Array | None = None,
    stream: object = None
) -> Array: ...
def compress_tokens(
    kv: Array, gate: Array, ape: Array, state: Array, *, ratio: SupportsIndex, overlap: bool,
    norm_weight: Array, positions: Array | None = None, starts: Array | None = None,
    state_indices: Array | None = None, rope: Rope | Mapping[str, Any] | None = None, eps: float = 1e-06,
    out: tuple[Array, Array] | None = None, stream: object = None
) -> tuple[Array, Array]: ...
def compressed_slots(
    positions: Array, block_tables: Array, page_size: SupportsIndex, *, ratio: SupportsIndex,
    sequence_of_token: Array | None = None, out: Array | None = None, stream: object = None
) -> Array: ...
def delta_gates(
    a: Array, b: Array, a_log: Array, dt_bias: Array, *, kind: str = "gdn",
    lower_bound: float | None = None, double_beta: bool = False, out: tuple[Array, Array] | None = None,
    stream: object = None
) -> tuple[Array, Array]: ...
def gated_delta_replay(
    state: Array, capsule: Array, accepted: Array, *, state_indices: Array | None = None,
    state_layout: str = "KV", stream: object = None
) -> Array: ...
def gated_delta_rule(
    q: Array, k: Array, v: Array, *, g: Array | None = None, beta: Array | None = None,
    state: Array | None = None, starts: Array | None = None, lengths: Array | None = None,
    state_indices: Array | None = None, norm: bool = False, norm_eps: float = 1e-06,
    scale: float | None = None, state_layout: str = "KV", gates: tuple[Array, Array] | None = None,
    rule: str | None = None, chunk: int = 64, return_states: bool = False, return_capsule: int = 0,
    out: Array | None = None, stream: object = None
) -> tuple[Any, ...]: ...
def gated_delta_step(
    q: Array, k: Array, v: Array, state: Array, *, g: Array | None = None, beta: Array | None = None,
    state_indices: Array | None = None, out_state_indices: Array | None = None, norm: bool = False,
    norm_eps: float = 1e-06, scale: float | None = None, state_layout: str = "KV",
    gates: tuple[Array, Array] | None = None, rule: str | None = None, out: Array | None = None,
    stream: object = None
) -> Array: ...
def indexer_scores(
    query: Array, keys: Array, weights: Array, block_tables: Array | tuple[Array, Array],
    context_lens: Array, query_starts: Array | None = None, *, key_scale: Array | None = None,
    softmax_scale: float | None = None, out: Array | None = None, stream: object = None
) -> Array: ...
def key_value_cache(
    current_key: Array, current_value: Array, start_pos: SupportsIndex, cache: Array,
    scale: Array | None = None, *, num_layer: int = 1, layer_idx: int = 0,
    quant_bit: Literal[0, 4, 8] = 0, quant_group: int = 8,
    quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None, num_repeat: int = 1,
    cache_layout: int = 0, out: tuple[Array, Array] | None = None, stream: object = None
) -> tuple[Array, Array]: ...
def merge_attention_states(
    outputs: Sequence[Array] | Array, lses: Sequence[Array] | Array, *,
    out: tuple[Array, Array] | None = None, stream: object = None
) -> tuple[Array, Array]: ...
def mla_absorb(
    query: Array, w_uk: Array, *, out: Array | None = None, stream: object = None
) -> Array: ...
def mla_append(
    latent: Array, rope: Array, cache: Array, slot_mapping: Array, *, rope_cache: Array | None = None,
    format: str | None = None, stream: object = None
) -> Array: ...
def mla_attention(
    query: Array | tuple[Array, Array], latent: Array,
    block_tables: Array | tuple[Array, Array] | None = None, context_lens: Array | None = None,
    query_starts: Array | None = None, *, softmax_scale: float, rope_cache: Array | None = None,
    value_dim: int = 512, indices: Array | None = None, index_lens: Array | None = None,
    extra: tuple[Array, Array, Array | None] | None = None, format: str | None = None,
    is_causal: bool = True, sinks: Array | None = None, lse_of_sinks: bool = True,
    return_lse: bool = False, out: Array | tuple[Array, Array] | None = None, stream: object = None
) -> Array | Any: ...
def mla_expand(
    latent_output: Array, w_uv: Array, *, out: Array | None = None, stream: object = None
) -> Array: ...
def multi_head_attention(
    query: Array, key: Array, value: Array, attn_mask: Array | None = None, *, num_heads: int = 0,
    head_dim: int = 0, is_causal: bool = True, is_alibi: bool = False, num_kv_heads: int = 0,
    softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    sinks: Array | None = None, return_lse: bool = False, return_key_weights: bool = False,
    out: Array | Sequence[Array] | None = None, stream: object = None
) -> Array | Any: ...
def multi_head_cache_attention(
    query: Array, current_key: Array, current_value: Array, start_pos: SupportsIndex, cache: Array,
    scale: Array | None = None, attn_mask: Array | None = None, *, num_heads: int = 0, head_dim: int = 0,
    is_causal: bool = True, is_alibi: bool = False, num_kv_heads: int = 0, num_layer: int = 1,
    layer_idx: int = 0, quant_bit: Literal[0, 4, 8] = 0, quant_group: int = 8,
    quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None, cache_layout: int = 0,
    softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    sinks: Array | None = None, return_lse: bool = False, out: Array | tuple[Array, Array] | None = None,
    stream: object = None
) -> Array | Any: ...
def paged_append(
    key: Array | None, value: Array | None, key_cache: Array | None, value_cache: Array | None,
    slot_mapping: Array, *, layout: str = "b n h c", key_scale: float | Array | None = None,
    value_scale: float | Array | None = None, positions: Array | None = None,
    rope: Rope | Mapping[str, Any] | str | None = None, stream: object = None
) -> tuple[Array | None, Array | None]: ...
def paged_attention(
    query: Array, key_cache: Array, value_cache: Array | None, block_tables: Array | tuple[Array, Array],
    context_lens: Array, query_starts: Array | None = None, attn_mask: Array | None = None, *,
    layout: str = "b n h c", key_scale: float | Array | None = None,
    value_scale: float | Array | None = None, quant_format: str | None = None, is_causal: bool = True,
    alibi_slopes: Array | None = None, softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Array | None = None,
    return_lse: bool = False, return_key_weights: bool = False,
    out: Array | Sequence[Array] | None = None, stream: object = None
) -> Array | Any: ...
def paged_plan(
    block_tables: Array | tuple[Array, Array], context_lens: Array, query_starts: Array | None = None, *,
    page_size: SupportsIndex, into: object = None, stream: object = None
) -> PagedPlan: ...
def rope_back(
    output: Array, positions: Array, rope: Rope | Mapping[str, Any], *, out: Array | None = None,
    stream: object = None
) -> Array: ...
def rotary_position_embedding(
    query: Array, key: Array, start_pos: SupportsIndex, pad_len: Array | None = None, *,
    rotary_dim: int = 0, interleaved: bool | None = None, cos: Array | None = None,
    sin: Array | None = None, theta: float = 10000.0, bypass_key: bool = False,
    max_position_embeddings: int = 2048, scaling_type: Literal["", "linear", "dynamic"] = "",
    scaling_factor: float = 1.0, out: tuple[Array, Array] | None = None, stream: object = None
) -> tuple[Array, Array]: ...
def swap_blocks(
    source: Array, target: Array, pairs: Array, *, stream: object = None
) -> Array: ...
def topk_rows(
    scores: Array, k: int, block_tables: Array | tuple[Array, Array], page_size: int,
    query_starts: Array | None = None, *, out: Array | None = None, stream: object = None
) -> Array: ...
