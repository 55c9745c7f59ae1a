"""Inputs and outputs that several operators have."""

from kvkit.layouts.pmx import listed
from kvkit.operators.words import FLOATS, INDEX, MASK, T2, Input, Output

SINKS = Input(
    "sinks", FLOATS, ("(num_heads)",), "a score for each head without a value", optional=True, keyword=True
)


def cache_inputs(layouts):
    cache = listed(layouts)
    scale = tuple(shape.replace("Dh)", "Dh/quant_group)") for shape in cache)
    return (
        Input("cache", T2, cache, "by cache_layout; a last axis of Dh/2 for int4", inout=True),
        Input(
            "scale",
            FLOATS,
            scale,
            "for quant_bit 8 and 4",
            optional=True,
            inout=True,
        ),
    )


def key_value(shape):
    return (
        Output("key", "that of current_key", shape, "past and current keys, as the cache gives them back"),
        Output("value", "that of current_key", shape, "past and current values, likewise"),
    )


def mask(*shapes):
    about = "added to the scores, of the dtype of query or float32, or boolean: True may attend"
    return Input("attn_mask", MASK, shapes, about, optional=True)


def attention(tokens, dim):
    return (
        Output("attn_output", "that of query", f"({tokens}, num_heads, {dim})", "weighted sums of values"),
        Output(
            "lse",
            "float32",
            f"({tokens}, num_heads)",
            "logarithms of the softmax denominators",
            only_with="return_lse",
        ),
    )


def tokens(tokens, dtypes, *names):
    shape = (f"({tokens}, H, Dh)",)
    return tuple(Input(f"current_{name}", dtypes, shape, f"{name}s of the new tokens") for name in names)


STATIC_MASKS = (
    "(S, M or more)",
    "(num_heads, S, M or more)",
    "(B, num_heads, S, M or more)",
    "axes but the last may be 1",
)
DYNAMIC_MASKS = ("(seqstarts[B], kvstarts[B] or more)", "(num_heads or 1, seqstarts[B], kvstarts[B] or more)")
START_POS = Input("start_pos", INDEX, ("()", "(1)"), "position of the first new token of every sequence")
SEQSTARTS = Input("seqstarts", INDEX, ("(B+1)",), "where each sequence begins among the new tokens")
KVSTARTS = Input("kvstarts", INDEX, ("(B+1)",), "where each sequence begins among the contexts")
CACHESTARTS = Input("cachestarts", INDEX, ("(B)", "(B, MaxP)"), "first row of each sequence, or of its pages")
START_POSITIONS = Input("start_pos", INDEX, ("(B)",), "position of each sequence's first new token")
DECODING = Input("decoding_batches", INDEX, ("()",), "sequences at the front without the causal mask")
LIMITS = (
    Input("max_seqlen", INDEX, ("()",), "at least the longest sequence of new tokens", optional=True),
    Input("max_kvlen", INDEX, ("()",), "at least the longest context", optional=True),
)
