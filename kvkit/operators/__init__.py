"""Describe each operator as data: its arguments and results, by the names of its specification.

The command line runs and describes them from this table. Names, order, defaults, summaries and most shapes
are read from the functions; `arrays.py` and `attributes.py` have the rest, by the names of arguments.
Importing it compiles nothing and loads no Numba.
"""

from kvkit.operators.arrays import Input
from kvkit.operators.attributes import REQUIRED, Attribute
from kvkit.operators.operator import Operator, Output, attention, key_value, mask, rotated

__all__ = ["OPERATORS", "REQUIRED", "Attribute", "Input", "Operator", "Output"]

ALIBI = "biases and attn_mask, then -inf; B in front for an attn_mask of 4 axes"
PACKED_ALIBI = "biases on the diagonal blocks, and attn_mask"
SLOPES = Output(
    "slopes", "float32", "(num_heads)", "2^(-8(h+1)/P) for head h below P, the largest power of 2"
)
MERGED = (
    Output("attn_output", "that of outputs", "(..., num_heads, Dv)", "attention over all parts"),
    Output("lse", "float32", "(..., num_heads)", "that of all parts"),
)
POSITIONS = Output("positions", "int64", "(seqstarts[B])", "start_pos[b] + i for token i of sequence b")
NZ = "(b, n/n0, m up to a multiple of 16, n0)"
LOADED = tuple(
    Output(side, f"that of {side}_cache", f"(tokens, num_head, {dim}); NZ: (tokens, num_head*{dim})", about)
    for side, dim, about in (("key", "Dk", "keys"), ("value", "Dv", "values; with value_cache"))
)
LATENT = attention("tokens", "value_dim")
ABSORBED = Output("latent_query", "that of query", "(tokens, H, L)", "queries whose keys are latent rows")
EXPANDED = Output("head_output", "that of latent_output", "(tokens, H, V)", "the values of heads")
SCORES = Output("scores", "float32", "(tokens, longest context)", "-inf where a query may not look")
ROWS = Output("rows", "int32", "(tokens, k)", "slots by ascending position, then -1")
TABLE: tuple[tuple[str, str, tuple[Output, ...]], ...] = (  # name, specification, outputs
    ("key_value_cache", "PMX KeyValueCache", key_value("B, start_pos+S")),
    ("multi_head_attention", "PMX MultiHeadAttention", attention("B, S", "Dv", "M")),
    ("multi_head_cache_attention", "PMX MultiHeadCacheAttention", attention("B, S", "head_dim")),
    ("merge_attention_states", "the online softmax of FlashAttention", MERGED),
    ("paged_attention", "FlashAttention, FlashInfer and vLLM", attention("tokens", "Dv", "longest context")),
    ("paged_append", "vLLM reshape_and_cache, FlashInfer append_paged_kv_cache", ()),
    ("swap_blocks", "vLLM swap_blocks", ()),
    ("mla_attention", "FlashMLA, FlashInfer and vLLM: attention over latent caches", LATENT),
    ("mla_append", "vLLM concat_and_cache_mla, FlashInfer append_paged_mla_kv_cache", ()),
    ("mla_absorb", "DeepSeek-V2, multi-head latent attention", (ABSORBED,)),
    ("mla_expand", "DeepSeek-V2, multi-head latent attention", (EXPANDED,)),
    ("indexer_scores", "DeepSeek-V3.2, lightning indexer", (SCORES,)),
    ("topk_rows", "DeepSeek-V3.2, selection of rows", (ROWS,)),
    ("rotary_position_embedding", "PMX RotaryPositionEmbedding", rotated("B, S")),
    ("alibi_slope", "PMX ALiBiSlope", (SLOPES,)),
    ("alibi_mask", "PMX ALiBiMask", mask("seqlen_q, seqlen_kv", ALIBI)),
    *(
        (f"dynamic_batching.{name}", f"PMX dynamic_batching.{specification}", outputs)
        for name, specification, outputs in (
            ("key_value_cache", "KeyValueCache", key_value("kvstarts[B]")),
            ("multi_head_attention", "MultiHeadAttention", attention("seqstarts[B]", "Dv")),
            ("multi_head_cache_attention", "MultiHeadCacheAttention", attention("seqstarts[B]", "head_dim")),
            ("position_index", "PositionIndex", (POSITIONS,)),
            ("rotary_position_embedding", "RotaryPositionEmbedding", rotated("seqstarts[B]")),
            ("alibi_mask", "ALiBiMask", mask("seqstarts[B], kvstarts[B]", PACKED_ALIBI)),
        )
    ),
    ("ascend.reshape_and_cache", "Ascend ATB ReshapeAndCache", ()),
    ("ascend.paged_cache_load", "Ascend ATB PagedCacheLoad", LOADED),
    ("ascend.block_copy", "Ascend ATB BlockCopy", ()),
    ("ascend.paged_attention", "Ascend ATB PagedAttention", attention("B", "Dv")),
    (
        "ascend.nd_to_nz",
        "Ascend ATB TransData",
        (Output("y", "that of x", NZ, "n/n0 rounded up; zeros behind x"),),
    ),
    ("ascend.nz_to_nd", "Ascend ATB TransData", (Output("x", "that of y", "(b, m, n)", "matrices"),)),
)
OPERATORS = {name: Operator(name, source, outputs) for name, source, outputs in TABLE}
