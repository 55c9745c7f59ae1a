"""Positions: PMX."""

from kvkit.operators.parts import (
    DYNAMIC_MASKS,
    KVSTARTS,
    LIMITS,
    SEQSTARTS,
    START_POS,
    START_POSITIONS,
)
from kvkit.operators.words import FLOATS, INDEX, MASK, Input, Operator, Output


def _to_turn(shape):
    return (
        Input("query", FLOATS, (shape,), "queries of the new tokens"),
        Input("key", FLOATS, (shape,), "keys of the new tokens; may have other heads"),
    )


TABLES = tuple(
    Input(name, FLOATS, ("(positions, rotary_dim/2)",), f"{what}, if not those of theta", True, keyword=True)
    for name, what in (("cos", "cosines"), ("sin", "sines"))
)


def _turned(shape):
    return (
        Output("query", "that of query", shape, "queries, turned"),
        Output("key", "that of query", shape, "keys, turned"),
    )


STATIC_ROTARY = Operator(
    "rotary_position_embedding",
    "Turn queries and keys by angles that grow with their positions.",
    "PMX RotaryPositionEmbedding",
    (
        *_to_turn("(B, S, heads, Dh)"),
        START_POS,
        Input("pad_len", INDEX, ("(B)",), "padding tokens in front of each sequence", optional=True),
        *TABLES,
    ),
    _turned("(B, S, heads, Dh)"),
)
DYNAMIC_ROTARY = Operator(
    "dynamic_batching.rotary_position_embedding",
    "Turn the queries and keys of packed sequences by angles that grow with their positions.",
    "PMX dynamic_batching.RotaryPositionEmbedding",
    (*_to_turn("(seqstarts[B], heads, Dh)"), SEQSTARTS, START_POSITIONS, LIMITS[0], *TABLES),
    _turned("(seqstarts[B], heads, Dh)"),
)
POSITION_INDEX = Operator(
    "dynamic_batching.position_index",
    "The position of every packed token.",
    "PMX dynamic_batching.PositionIndex",
    (
        Input("sequences", INDEX, ("(seqstarts[B])",), "the new tokens; only their number matters"),
        SEQSTARTS,
        START_POSITIONS,
        LIMITS[0],
    ),
    (Output("positions", "int64", "(seqstarts[B])", "start_pos[b] + i for token i of sequence b"),),
)
ALIBI_SLOPE = Operator(
    "alibi_slope",
    "The slope of each head's linear bias.",
    "PMX ALiBiSlope",
    (),
    (Output("slopes", "float32", "(num_heads)", "2^(-8(h+1)/P) for head h below P, the largest power of 2"),),
)
STATIC_ALIBI_MASK = Operator(
    "alibi_mask",
    "A mask with ALiBi biases, causal and aligned at the last query and key.",
    "PMX ALiBiMask",
    (
        Input("seqlen_q", INDEX, ("()",), "queries"),
        Input("seqlen_kv", INDEX, ("()",), "keys"),
        Input(
            "attn_mask",
            MASK,
            (
                "(seqlen_q, seqlen_kv or more)",
                "(num_heads, seqlen_q, seqlen_kv or more)",
                "(B, num_heads, seqlen_q, seqlen_kv or more)",
                "axes but the last may be 1",
            ),
            "added; boolean: True may attend",
            optional=True,
        ),
    ),
    (
        Output(
            "mask",
            "data_type",
            "(num_heads, seqlen_q, seqlen_kv up to a multiple of 16)",
            "biases and attn_mask, then -inf; B in front for an attn_mask of 4 axes",
        ),
    ),
)
DYNAMIC_ALIBI_MASK = Operator(
    "dynamic_batching.alibi_mask",
    "A mask with the ALiBi biases of packed sequences on its diagonal blocks.",
    "PMX dynamic_batching.ALiBiMask",
    (
        SEQSTARTS,
        KVSTARTS,
        Input("attn_mask", MASK, DYNAMIC_MASKS, "added; boolean: True may attend", optional=True),
    ),
    (
        Output(
            "mask",
            "data_type",
            "(num_heads, seqstarts[B], kvstarts[B] up to a multiple of 16)",
            "biases on the diagonal blocks, and attn_mask",
        ),
    ),
)
