"""Caches and attention: PMX."""

from kvkit.layouts import pmx
from kvkit.operators.parts import (
    CACHESTARTS,
    DECODING,
    DYNAMIC_MASKS,
    KVSTARTS,
    LIMITS,
    SEQSTARTS,
    SINKS,
    START_POS,
    START_POSITIONS,
    STATIC_MASKS,
    attention,
    cache_inputs,
    key_value,
    mask,
    tokens,
)
from kvkit.operators.words import FLOATS, T1, Input, Operator, Output

STATIC_KEY_VALUE_CACHE = Operator(
    "key_value_cache",
    "Append keys and values to a static cache and read the whole context back.",
    "PMX KeyValueCache",
    (*tokens("B, S", T1, "key", "value"), START_POS, *cache_inputs(pmx.STATIC)),
    key_value("(B, start_pos+S, H*num_repeat, Dh)"),
)
STATIC_ATTENTION = Operator(
    "multi_head_attention",
    "Attend with every query to the keys and values of its sequence.",
    "PMX MultiHeadAttention",
    (
        Input("query", FLOATS, ("(B, S, num_heads, head_dim)",), "queries"),
        Input("key", FLOATS, ("(B, M, num_kv_heads, head_dim)",), "keys"),
        Input("value", FLOATS, ("(B, M, num_kv_heads, Dv)",), "values"),
        mask(*STATIC_MASKS),
        SINKS,
    ),
    attention("B, S", "Dv"),
)
STATIC_CACHE_ATTENTION = Operator(
    "multi_head_cache_attention",
    "Append keys and values to a static cache and attend to the whole context, read where it lies.",
    "PMX MultiHeadCacheAttention",
    (
        Input("query", FLOATS, ("(B, S, num_heads, head_dim)",), "queries of the new tokens"),
        *tokens("B, S", FLOATS, "key", "value"),
        START_POS,
        *cache_inputs(pmx.STATIC),
        mask(*STATIC_MASKS),
        SINKS,
    ),
    attention("B, S", "head_dim"),
)
MERGE = Operator(
    "merge_attention_states",
    "Put attention over parts of a context together.",
    "the online softmax of FlashAttention",
    (
        Input("outputs", FLOATS, ("(parts, ..., num_heads, Dv)",), "attn_output of each part"),
        Input("lses", FLOATS[:1], ("(parts, ..., num_heads)",), "lse of each part"),
    ),
    (
        Output("attn_output", "that of outputs", "(..., num_heads, Dv)", "attention over all parts"),
        Output("lse", "float32", "(..., num_heads)", "that of all parts"),
    ),
)
DYNAMIC_KEY_VALUE_CACHE = Operator(
    "dynamic_batching.key_value_cache",
    "Append keys and values of packed sequences to a shared cache and read their contexts back.",
    "PMX dynamic_batching.KeyValueCache",
    (
        *tokens("seqstarts[B]", T1, "key", "value"),
        SEQSTARTS,
        KVSTARTS,
        CACHESTARTS,
        START_POSITIONS,
        *LIMITS,
        *cache_inputs(pmx.DYNAMIC),
    ),
    key_value("(kvstarts[B], H*num_repeat, Dh)"),
)
DYNAMIC_ATTENTION = Operator(
    "dynamic_batching.multi_head_attention",
    "Attend with every query to the keys and values of its own sequence, sequences packed.",
    "PMX dynamic_batching.MultiHeadAttention",
    (
        Input("query", FLOATS, ("(seqstarts[B], num_heads, head_dim)",), "queries"),
        Input("key", FLOATS, ("(kvstarts[B], num_kv_heads, head_dim)",), "keys"),
        Input("value", FLOATS, ("(kvstarts[B], num_kv_heads, Dv)",), "values"),
        SEQSTARTS,
        KVSTARTS,
        DECODING,
        *LIMITS,
        mask(*DYNAMIC_MASKS),
        SINKS,
    ),
    attention("seqstarts[B]", "Dv"),
)
DYNAMIC_CACHE_ATTENTION = Operator(
    "dynamic_batching.multi_head_cache_attention",
    "Append packed keys and values to a shared cache and attend to each context, read where it lies.",
    "PMX dynamic_batching.MultiHeadCacheAttention",
    (
        Input("query", FLOATS, ("(seqstarts[B], num_heads, head_dim)",), "queries of the new tokens"),
        *tokens("seqstarts[B]", FLOATS, "key", "value"),
        SEQSTARTS,
        KVSTARTS,
        CACHESTARTS,
        START_POSITIONS,
        DECODING,
        *LIMITS,
        *cache_inputs(pmx.DYNAMIC),
        mask(*DYNAMIC_MASKS),
        SINKS,
    ),
    attention("seqstarts[B]", "head_dim"),
)
