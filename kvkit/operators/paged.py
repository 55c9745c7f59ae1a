"""Pools of pages of any engine."""

from kvkit.operators.parts import SINKS, attention
from kvkit.operators.words import FLOATS, INDEX, MASK, T1, Input, Operator

POOL = "(num_blocks, page_size, H, {}), or as layout has its axes"
BOTH = "(num_blocks, 2, page_size, H, D), likewise, for both"


def _pools(dtypes, inout=False):
    """Keys and values in pages, of which one that changes may be left out."""
    key, value = (POOL.format("Dk"), BOTH), (POOL.format("Dv"), BOTH)
    return (
        Input("key_cache", dtypes, key, "keys, in pages", optional=inout, inout=inout),
        Input("value_cache", dtypes, value, "values, likewise", optional=True, inout=inout),
    )


def _of_heads(name, heads, about):
    shapes = f"({heads})", f"(B, {heads})"
    return Input(name, FLOATS, shapes, about, optional=True, keyword=True)


def _scale(name, about):
    shapes = "(H)", "(B, H)", "of codes: those of the pool without c", "or with groups of it: (...)"
    return Input(name, FLOATS, shapes, about, optional=True, keyword=True)


def _found_scale(name, about):
    shapes = "(H)", "to be found: those of the pool without c, or with groups of it: (...)"
    return Input(name, FLOATS, shapes, about, optional=True, keyword=True, found=True)


PAGED_ATTENTION = Operator(
    "paged_attention",
    "Attend with packed queries to keys and values in pages, read where an engine has them.",
    "FlashAttention, FlashInfer and vLLM",
    (
        Input("query", FLOATS, ("(tokens, num_heads, Dk)",), "queries of all sequences"),
        *_pools(T1),
        Input("block_tables", INDEX, ("(B, M)",), "pages of each context; in Python also (indptr, indices)"),
        Input("context_lens", INDEX, ("(B)",), "keys of each sequence"),
        Input(
            "query_starts",
            INDEX,
            ("(B+1)",),
            "where each sequence begins among the queries; one query each if there is none",
            optional=True,
        ),
        Input(
            "attn_mask",
            MASK,
            ("(tokens, longest context or more)", "(num_heads or 1, tokens, longest context or more)"),
            "added to the scores, of the dtype of query or float32, or boolean: True may attend",
            optional=True,
        ),
        _scale("key_scale", "what keys are multiplied by; in Python also a number"),
        _scale("value_scale", "what values are multiplied by, likewise"),
        _of_heads("alibi_slopes", "num_heads", "what a score loses for each step from query to key"),
        SINKS,
    ),
    attention("tokens", "Dv"),
)
PAGED_APPEND = Operator(
    "paged_append",
    "Store packed keys and values in the slots of pools of pages.",
    "vLLM reshape_and_cache, FlashInfer append_paged_kv_cache",
    (
        Input(
            "key", T1, ("(tokens, H, Dk)",), "keys of the new tokens; None leaves key_cache", optional=True
        ),
        Input("value", T1, ("(tokens, H, Dv)",), "values of the new tokens, likewise", optional=True),
        *_pools(T1, inout=True),
        Input("slot_mapping", INDEX, ("(tokens)",), "the slot of each token; below 0: store nothing"),
        _found_scale("key_scale", "what keys are divided by, where they become codes"),
        _found_scale("value_scale", "what values are divided by, likewise"),
    ),
    (),
)
SWAP_BLOCKS = Operator(
    "swap_blocks",
    "Copy blocks from one cache to another, or within one.",
    "vLLM swap_blocks",
    (
        Input("source", T1, ("(num_blocks, ...)",), "blocks to copy"),
        Input("target", T1, ("(num_blocks, ...)",), "blocks to write", inout=True),
        Input("pairs", INDEX, ("(N, 2)",), "a block of source, and the block of target that becomes like it"),
    ),
    (),
)
