"""Every operator in plain numpy: the specification as code, to read and to compare with.

Loops over tokens, heads and elements that share no code with the rest of the package. Inputs are not checked.
Operators that copy or quantize give the exact bytes; attention and rotary embedding are computed in float64
and not rounded. Caches and scales change in place.
"""

from collections.abc import Callable
from typing import Any

from kvkit.reference import alibi, ascend, attention, key_value_cache, latent, paged, positions

OPERATORS: dict[str, Callable[..., Any]] = {
    "key_value_cache": key_value_cache.key_value_cache,
    "multi_head_attention": attention.multi_head_attention,
    "multi_head_cache_attention": attention.multi_head_cache_attention,
    "merge_attention_states": attention.merge_attention_states,
    "rotary_position_embedding": positions.rotary_position_embedding,
    "alibi_slope": alibi.alibi_slope,
    "alibi_mask": alibi.alibi_mask,
    "dynamic_batching.key_value_cache": key_value_cache.dynamic_key_value_cache,
    "dynamic_batching.multi_head_attention": attention.dynamic_multi_head_attention,
    "dynamic_batching.multi_head_cache_attention": attention.dynamic_multi_head_cache_attention,
    "dynamic_batching.rotary_position_embedding": positions.dynamic_rotary_position_embedding,
    "dynamic_batching.alibi_mask": alibi.dynamic_alibi_mask,
    "dynamic_batching.position_index": positions.position_index,
    "ascend.reshape_and_cache": ascend.reshape_and_cache,
    "ascend.paged_cache_load": ascend.paged_cache_load,
    "ascend.block_copy": ascend.block_copy,
    "ascend.nd_to_nz": ascend.nd_to_nz,
    "ascend.nz_to_nd": ascend.nz_to_nd,
    "ascend.paged_attention": ascend.attend_blocks,
    "paged_attention": paged.paged_attention,
    "paged_append": paged.paged_append,
    "swap_blocks": paged.swap_blocks,
    "mla_attention": latent.mla_attention,
    "mla_append": latent.mla_append,
    "mla_absorb": latent.mla_absorb,
    "mla_expand": latent.mla_expand,
    "indexer_scores": latent.indexer_scores,
    "topk_rows": latent.topk_rows,
}
