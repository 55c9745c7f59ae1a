"""Caches in blocks: Ascend."""

from kvkit.operators.parts import SINKS, attention
from kvkit.operators.words import FLOATS, INDEX, T1, Input, Operator, Output

ND = "(num_blocks, block_size, num_head, {})"
NZ = "NZ: (num_blocks, num_head*{}/n0, block_size, n0)"
COMPRESSED = "compressed: (num_blocks, block_size, 1, {})"


def _blocks(dtypes, *shapes, key_only=True, inout=False):
    """The caches of keys and values."""
    key, value = (tuple(shape.format(dim) for shape in shapes) for dim in ("Dk", "Dv"))
    return (
        Input("key_cache", dtypes, key, "keys, in blocks", inout=inout),
        Input("value_cache", dtypes, value, "values, likewise", optional=key_only, inout=inout),
    )


def _of_each_head(name, about):
    return Input(name, INDEX, ("(B*num_head)",), about, optional=True, keyword=True)


RESHAPE_AND_CACHE = Operator(
    "ascend.reshape_and_cache",
    "Store packed keys and values in the slots of a cache in blocks, whole or compressed per head.",
    "Ascend ATB ReshapeAndCache",
    (
        Input("key", T1, ("(num_tokens, num_head, Dk)",), "keys of the new tokens"),
        Input("value", T1, ("(num_tokens, num_head, Dv)",), "values; with value_cache", optional=True),
        *_blocks(T1, ND, NZ, COMPRESSED, inout=True),
        Input(
            "slot_mapping",
            INDEX,
            ("(num_tokens)", "compressed: (B*num_head)"),
            "the slot of each token, or of each head's first row; below 0: store nothing",
        ),
        _of_each_head("wins", "tokens to keep (KVHEAD), to average (KVHEAD_ROPE) or to leave out (OMNI)"),
        Input("seq_lens", INDEX, ("(B)",), "tokens of each sequence", optional=True, keyword=True),
        _of_each_head("offset_index", "the first token to average or to leave out; -1: none"),
    ),
    (),
)
PAGED_CACHE_LOAD = Operator(
    "ascend.paged_cache_load",
    "Gather the contexts of sequences from a cache in blocks.",
    "Ascend ATB PagedCacheLoad",
    (
        *_blocks(T1, ND, NZ),
        Input("block_tables", INDEX, ("(B, M)",), "blocks of each sequence; one that is not there is zeros"),
        Input("seq_lens", INDEX, ("(B)", "(B+1)"), "tokens of each sequence, or their sums from 0 on"),
        Input(
            "seq_starts", INDEX, ("(B)",), "first token of each sequence, at a block's begin", optional=True
        ),
    ),
    (
        Output("key", "that of key_cache", "(tokens, num_head, Dk); NZ: (tokens, num_head*Dk)", "keys"),
        Output(
            "value",
            "that of value_cache",
            "(tokens, num_head, Dv); NZ: (tokens, num_head*Dv)",
            "values; with value_cache",
        ),
    ),
)
BLOCK_COPY = Operator(
    "ascend.block_copy",
    "Copy blocks of a cache onto others of it.",
    "Ascend ATB BlockCopy",
    (
        *_blocks(T1, ND, NZ, inout=True),
        Input("src", INDEX, ("(S)",), "blocks to copy"),
        Input("dst", INDEX, ("(N)",), "blocks to write, each once"),
        Input("cum_sum", INDEX, ("(S)",), "where the destinations of each source end in dst"),
    ),
    (),
)
PAGED_ATTENTION = Operator(
    "ascend.paged_attention",
    "Attend with a token of each sequence to its context in a cache in blocks.",
    "Ascend ATB PagedAttention",
    (
        Input("query", FLOATS, ("(B, num_heads, Dk)",), "a query of each sequence"),
        *_blocks(FLOATS, ND, COMPRESSED, key_only=False),
        Input("block_tables", INDEX, ("(B, M)", "compressed: (B*num_head, M)"), "blocks of each context"),
        Input("context_lens", INDEX, ("(B)", "compressed: (B*num_head)"), "rows of each context"),
        Input(
            "razor_offset",
            FLOATS[:1],
            ("(num_blocks, block_size)",),
            "added to the products with keys; ln(N)/softmax_scale for a mean of N tokens",
            optional=True,
            keyword=True,
        ),
        SINKS,
    ),
    attention("B", "Dv"),
)
ND_TO_NZ = Operator(
    "ascend.nd_to_nz",
    "Put matrices into the NZ format: groups of columns, rows in sixteens.",
    "Ascend ATB TransData",
    (Input("x", T1, ("(m, n)", "(b, m, n)"), "matrices"),),
    (Output("y", "that of x", "(b, n/n0, m up to a multiple of 16, n0)", "n/n0 rounded up; zeros behind x"),),
)
NZ_TO_ND = Operator(
    "ascend.nz_to_nd",
    "Take matrices out of the NZ format.",
    "Ascend ATB TransData",
    (
        Input("y", T1, ("(b, n/n0, m up to a multiple of 16, n0)",), "what nd_to_nz gives"),
        Input("m", INDEX, ("()",), "rows of a matrix"),
        Input("n", INDEX, ("()",), "columns of a matrix"),
    ),
    (Output("x", "that of y", "(b, m, n)", "matrices"),),
)
