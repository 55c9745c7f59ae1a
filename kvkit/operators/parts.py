"""Inputs and attributes that several operators have."""

from kvkit.operators.words import FLOATS, INDEX, MASK, REQUIRED, T2, Attribute, Input, Output

CACHE_ATTRIBUTES = (
    Attribute("num_layer", 1, "layers in the cache"),
    Attribute("layer_idx", 0, "the layer to use, 0 <= layer_idx < num_layer"),
    Attribute("quant_bit", 0, "0 keeps floats; 8 or 4 quantizes to int8 or int4 codes"),
    Attribute("quant_group", 8, "elements that share a scale; divides Dh, even for int4"),
)
NUM_REPEAT = Attribute("num_repeat", 1, "copies of each head in the outputs (grouped-query attention)")
STATIC_LAYOUT = Attribute("cache_layout", 0, "axis order of cache and scale, 0 or 1")
DYNAMIC_CACHE = (
    Attribute("cache_mode", 0, "0: cachestarts are offsets; 1: they are a page table"),
    Attribute("cache_layout", 0, "axis order of cache and scale, 0 to 3"),
    Attribute("page_size", 128, "rows in a page, for cache_mode 1"),
)
HEADS = (
    Attribute("num_heads", REQUIRED, "heads of query"),
    Attribute("head_dim", REQUIRED, "elements of a head of query and key"),
    Attribute("is_causal", True, "a query sees no key after its own position", bool),
    Attribute("is_alibi", False, "add ALiBi biases, which are causal", bool),
    Attribute("num_kv_heads", 0, "heads of key and value; 0 for num_heads"),
)
BEYOND = (
    Attribute("softmax_scale", None, "factor of the scores; 1 / sqrt(head_dim) if None", float),
    Attribute("window", (-1, -1), "keys left and right that a query sees; -1 for no limit", tuple),
    Attribute("softcap", 0.0, "scores become softcap * tanh(score / softcap); 0 for no cap", float),
)
RETURN_LSE = Attribute("return_lse", False, "return the logarithms of the softmax denominators too", bool)
SINKS = Input(
    "sinks", FLOATS, ("(num_heads)",), "a score for each head without a value", optional=True, keyword=True
)
STATIC_LAYOUTS = ("(MaxB, L, 2, MaxS, H, Dh)", "(L, MaxB, 2, H, MaxS, Dh)")
DYNAMIC_LAYOUTS = ("(MaxT, L, 2, H, Dh)", "(L, MaxT, 2, H, Dh)", "(L, 2, MaxT, H, Dh)", "(L, 2, H, MaxT, Dh)")


def cache_inputs(layouts):
    cache = tuple(f"{i}: {shape}" for i, shape in enumerate(layouts))
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
