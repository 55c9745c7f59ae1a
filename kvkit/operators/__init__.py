"""The operators as data: what each takes and returns, in the words of its specification.

The command line runs and describes them from this table. Names, order, defaults, summaries and most shapes
are read from the functions; `arrays.py` and `attributes.py` have the rest, by the names of arguments.
Importing it compiles nothing and loads no Numba.
"""

from kvkit.operators.arrays import Input
from kvkit.operators.attributes import REQUIRED, Attribute
from kvkit.operators.operator import Operator, Output, attention, key_value, mask, turned

__all__ = ["OPERATORS", "REQUIRED", "Attribute", "Input", "Operator", "Output"]

OPERATORS = {
    op.name: op
    for op in (
        Operator("key_value_cache", "PMX KeyValueCache", key_value("B, start_pos+S")),
        Operator("multi_head_attention", "PMX MultiHeadAttention", attention("B, S", "Dv")),
        Operator("multi_head_cache_attention", "PMX MultiHeadCacheAttention", attention("B, S", "head_dim")),
        Operator(
            "merge_attention_states",
            "the online softmax of FlashAttention",
            (
                Output("attn_output", "that of outputs", "(..., num_heads, Dv)", "attention over all parts"),
                Output("lse", "float32", "(..., num_heads)", "that of all parts"),
            ),
        ),
        Operator("paged_attention", "FlashAttention, FlashInfer and vLLM", attention("tokens", "Dv")),
        Operator("paged_append", "vLLM reshape_and_cache, FlashInfer append_paged_kv_cache"),
        Operator("swap_blocks", "vLLM swap_blocks"),
        Operator("rotary_position_embedding", "PMX RotaryPositionEmbedding", turned("B, S")),
        Operator(
            "alibi_slope",
            "PMX ALiBiSlope",
            (
                Output(
                    "slopes",
                    "float32",
                    "(num_heads)",
                    "2^(-8(h+1)/P) for head h below P, the largest power of 2",
                ),
            ),
        ),
        Operator(
            "alibi_mask",
            "PMX ALiBiMask",
            mask(
                "seqlen_q, seqlen_kv",
                "biases and attn_mask, then -inf; B in front for an attn_mask of 4 axes",
            ),
        ),
        Operator(
            "dynamic_batching.key_value_cache", "PMX dynamic_batching.KeyValueCache", key_value("kvstarts[B]")
        ),
        Operator(
            "dynamic_batching.multi_head_attention",
            "PMX dynamic_batching.MultiHeadAttention",
            attention("seqstarts[B]", "Dv"),
        ),
        Operator(
            "dynamic_batching.multi_head_cache_attention",
            "PMX dynamic_batching.MultiHeadCacheAttention",
            attention("seqstarts[B]", "head_dim"),
        ),
        Operator(
            "dynamic_batching.position_index",
            "PMX dynamic_batching.PositionIndex",
            (Output("positions", "int64", "(seqstarts[B])", "start_pos[b] + i for token i of sequence b"),),
        ),
        Operator(
            "dynamic_batching.rotary_position_embedding",
            "PMX dynamic_batching.RotaryPositionEmbedding",
            turned("seqstarts[B]"),
        ),
        Operator(
            "dynamic_batching.alibi_mask",
            "PMX dynamic_batching.ALiBiMask",
            mask("seqstarts[B], kvstarts[B]", "biases on the diagonal blocks, and attn_mask"),
        ),
        Operator("ascend.reshape_and_cache", "Ascend ATB ReshapeAndCache"),
        Operator(
            "ascend.paged_cache_load",
            "Ascend ATB PagedCacheLoad",
            (
                Output(
                    "key", "that of key_cache", "(tokens, num_head, Dk); NZ: (tokens, num_head*Dk)", "keys"
                ),
                Output(
                    "value",
                    "that of value_cache",
                    "(tokens, num_head, Dv); NZ: (tokens, num_head*Dv)",
                    "values; with value_cache",
                ),
            ),
        ),
        Operator("ascend.block_copy", "Ascend ATB BlockCopy"),
        Operator("ascend.paged_attention", "Ascend ATB PagedAttention", attention("B", "Dv")),
        Operator(
            "ascend.nd_to_nz",
            "Ascend ATB TransData",
            (
                Output(
                    "y",
                    "that of x",
                    "(b, n/n0, m up to a multiple of 16, n0)",
                    "n/n0 rounded up; zeros behind x",
                ),
            ),
        ),
        Operator(
            "ascend.nz_to_nd", "Ascend ATB TransData", (Output("x", "that of y", "(b, m, n)", "matrices"),)
        ),
    )
}
