"""Describe each operator as data: its arguments and results, by the names of its specification.

The command line runs and describes operators from this table. Names, order, defaults, summaries and most
shapes of arguments are read from the functions. `arrays.py` and `attributes.py` have their dtypes and
meanings. Here are the results, and arguments that mean something else in one operator than in the others.
Importing it compiles nothing and does not load Numba.
"""

from kvkit.operators import arrays
from kvkit.operators.arrays import Input
from kvkit.operators.attributes import REQUIRED, Attribute
from kvkit.operators.operator import Operator, Output, attention, key_value, mask, rotated

__all__ = ["OPERATORS", "REQUIRED", "Attribute", "Input", "Operator", "Output"]

ALIBI = "biases plus attn_mask, -inf in further columns; with a first axis B if attn_mask has 4 axes"
PACKED_ALIBI = "biases on the diagonal blocks, and attn_mask"
SLOPE = "2^(-8(h+1)/P) for head h < P, 2^(-4(2(h-P)+1)/P) for others; P = largest power of 2 up to num_heads"
SLOPES = Output("slopes", "float32", "(num_heads)", SLOPE)
MERGED = (
    Output("attn_output", "that of outputs", "(..., num_heads, Dv)", "attention over all parts"),
    Output("lse", "float32", "(..., num_heads)", "logarithms of the softmax denominators over all parts"),
)
POSITIONS = Output("positions", "int64", "(seqstarts[B])", "start_pos[b] + i for token i of sequence b")
NZ_SHAPE = "(b, n/n0, m rounded up to a multiple of 16, n0)"
NZ = Output("y", "that of x", NZ_SHAPE, "n/n0 is rounded up, too; new elements are 0")
ND = Output("x", "that of y", "(b, m, n)", "matrices")
LOADED = tuple(
    Output(side, f"that of {side}_cache", f"(tokens, num_head, {dim}); NZ: (tokens, num_head*{dim})", about)
    for side, dim, about in (("key", "Dk", "keys"), ("value", "Dv", "values, if value_cache is given"))
)
LATENT_QUERY = Output("latent_query", "that of query", "(tokens, H, L)", "queries whose keys are latent rows")
EXPANDED = Output("head_output", "that of latent_output", "(tokens, H, V)", "the values of heads")
SCORES = Output("scores", "float32", "(tokens, longest context)", "-inf where a query may not look")
ROWS = Output("rows", "int32", "(tokens, k)", "slots by ascending position, then -1")
READOUT = "that of q; float32 if out is", "(N, max(Hq, Hv), dv)", "what queries read from the states"
STEPPED = Output("output", *READOUT)
RUN = (
    Output("output", READOUT[0], "(T, max(Hq, Hv), dv) or with N in front", READOUT[2]),
    Output("state", "that of state", "that of state", "the states after the last tokens"),
    Output("states", "that of state", "(T, Hv, ..)", "the state after each token", "return_states"),
    Output("capsule", "float32", "(N, return_capsule, ..)", "what tokens do to states", "return_capsule"),
)
GATES = (
    Output("g", "float32", "that of a", "logarithms of decays"),
    Output("beta", "float32", "that of b", "the gate of writing"),
)
CONVOLVED = Output("output", "that of x", "that of x", "convolved inputs")
INPUTS = Output("state", "that of x", "(N or slots, C, K-1)", "the last inputs of each sequence")
COMPRESSED = (
    Output("rows", "float32", "(rows, D)", "the rows that these tokens finish"),
    Output("row_of_token", "int64", "(T)", "the row that a token finishes in its sequence, or -1"),
)
COMPRESSED_SLOTS = Output("slots", "int64", "(T)", "where a token's row lies; -1: it finishes none")
ROTATED_BACK = Output("rotated", "that of output", "(T, H, D)", "outputs without the rotation of values")
TABLE = (
    Operator("key_value_cache", "PMX KeyValueCache", key_value("B, start_pos+S")),
    Operator("multi_head_attention", "PMX MultiHeadAttention", attention("B, S", "Dv", keys="M"),
             arrays.TO_KEYS),
    Operator("multi_head_cache_attention", "PMX MultiHeadCacheAttention", attention("B, S", "head_dim"),
             arrays.TO_STATIC_CACHE),
    Operator("merge_attention_states", "the online softmax of FlashAttention", MERGED),
    Operator("paged_attention", "FlashAttention, FlashInfer and vLLM",
             attention("tokens", "Dv", keys="longest context"), arrays.TO_PAGES),
    Operator("paged_append", "vLLM reshape_and_cache, FlashInfer append_paged_kv_cache", (),
             arrays.INTO_PAGES),
    Operator("swap_blocks", "vLLM swap_blocks"),
    Operator("mla_attention", "FlashMLA, FlashInfer and vLLM: attention over latent caches",
             attention("tokens", "value_dim"), arrays.TO_LATENT),
    Operator("mla_append", "vLLM concat_and_cache_mla, FlashInfer append_paged_mla_kv_cache", (),
             arrays.INTO_LATENT),
    Operator("mla_absorb", "DeepSeek-V2, multi-head latent attention", (LATENT_QUERY,), arrays.ABSORBED),
    Operator("mla_expand", "DeepSeek-V2, multi-head latent attention", (EXPANDED,)),
    Operator("indexer_scores", "DeepSeek-V3.2, lightning indexer", (SCORES,), arrays.OF_INDEXER),
    Operator("topk_rows", "DeepSeek-V3.2, selection of rows", (ROWS,), arrays.CHOSEN),
    Operator("compress_tokens", "DeepSeek-V4, compressor of CSA and HCA layers", COMPRESSED,
             arrays.OF_COMPRESSION),
    Operator("compressed_slots", "DeepSeek-V4, slots of compressed rows", (COMPRESSED_SLOTS,),
             arrays.OF_COMPRESSED_SLOTS),
    Operator("rope_back", "DeepSeek-V4, rotation of outputs", (ROTATED_BACK,), arrays.ROTATED_BACK),
    Operator("gated_delta_step", "the gated delta rule: Qwen3-Next, Kimi Linear", (STEPPED,),
             arrays.OF_DELTA_RULE),
    Operator("gated_delta_rule", "the gated delta rule; ONNX LinearAttention", RUN, arrays.OF_DELTA_RULE),
    Operator("gated_delta_replay", "onnxruntime GatedDeltaNet, state_update", (), arrays.OF_REPLAY),
    Operator("delta_gates", "Qwen3-Next, Kimi Linear: gates of the delta rule", GATES, arrays.OF_GATES),
    Operator("causal_conv", "causal-conv1d; ONNX CausalConvWithState", (CONVOLVED, INPUTS),
             arrays.OF_CONVOLUTION),
    Operator("causal_conv_update", "causal-conv1d causal_conv1d_update", (CONVOLVED,),
             arrays.OF_CONVOLUTION),
    Operator("rotary_position_embedding", "PMX RotaryPositionEmbedding", rotated("B, S"), arrays.ROTATED),
    Operator("alibi_slope", "PMX ALiBiSlope", (SLOPES,)),
    Operator("alibi_mask", "PMX ALiBiMask", mask("seqlen_q, seqlen_kv", ALIBI), arrays.BIASED_MASKS),
    Operator("dynamic_batching.key_value_cache", "PMX dynamic_batching.KeyValueCache",
             key_value("kvstarts[B]")),
    Operator("dynamic_batching.multi_head_attention", "PMX dynamic_batching.MultiHeadAttention",
             attention("seqstarts[B]", "Dv"), arrays.TO_KEYS),
    Operator("dynamic_batching.multi_head_cache_attention", "PMX dynamic_batching.MultiHeadCacheAttention",
             attention("seqstarts[B]", "head_dim"), arrays.TO_CACHE),
    Operator("dynamic_batching.position_index", "PMX dynamic_batching.PositionIndex", (POSITIONS,)),
    Operator("dynamic_batching.rotary_position_embedding", "PMX dynamic_batching.RotaryPositionEmbedding",
             rotated("seqstarts[B]"), arrays.ROTATED),
    Operator("dynamic_batching.alibi_mask", "PMX dynamic_batching.ALiBiMask",
             mask("seqstarts[B], kvstarts[B]", PACKED_ALIBI), arrays.PACKED_BIASED_MASKS),
    Operator("ascend.reshape_and_cache", "Ascend ATB ReshapeAndCache", (), arrays.INTO_BLOCKS),
    Operator("ascend.paged_cache_load", "Ascend ATB PagedCacheLoad", LOADED, arrays.FROM_BLOCKS),
    Operator("ascend.block_copy", "Ascend ATB BlockCopy"),
    Operator("ascend.paged_attention", "Ascend ATB PagedAttention", attention("B", "Dv"), arrays.TO_BLOCKS),
    Operator("ascend.nd_to_nz", "Ascend ATB TransData", (NZ,)),
    Operator("ascend.nz_to_nd", "Ascend ATB TransData", (ND,)),
)  # fmt: skip
OPERATORS = {operator.name: operator for operator in TABLE}
