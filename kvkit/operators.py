"""The operators as data: what each takes and gives, in the words of its specification.

The command line runs and describes them from this table, and a test holds the functions to it.
Importing it compiles nothing and loads no Numba.
"""

import functools
import importlib
import inspect
from dataclasses import dataclass

FLOATS = ("float32", "float16", "bfloat16")
T1 = (*FLOATS, "int8")
T2 = (*FLOATS, "int8", "uint8")
MASK = (*FLOATS, "bool")
INDEX = ("int64", "int32")
REQUIRED = inspect.Parameter.empty  # the default of what has none


@dataclass(frozen=True)
class Input:
    """An array argument. `shapes` lists the legal shapes; `inout` arrays are changed in place.

    Inputs are passed by position, in order, but for those that are `keyword`.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    about: str
    optional: bool = False
    inout: bool = False
    keyword: bool = False


@dataclass(frozen=True)
class Attribute:
    """A keyword argument with a plain value, of type `kind`."""

    name: str
    default: object
    about: str
    kind: type = int


@dataclass(frozen=True)
class Output:
    """An array that the operator returns, always or if the attribute `only_with` is set."""

    name: str
    dtype: str
    shape: str
    about: str
    only_with: str = ""


@dataclass(frozen=True)
class Operator:
    """An operator of kvkit: `name` is its path inside the package."""

    name: str
    summary: str
    source: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[Output, ...]

    def function(self, package="kvkit"):
        """The function of this name in a package (`kvkit` or its twin)."""
        return functools.reduce(getattr, self.name.split("."), importlib.import_module(package))


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


def _cache_inputs(layouts):
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


def _key_value(shape):
    return (
        Output("key", "that of current_key", shape, "past and current keys, as the cache gives them back"),
        Output("value", "that of current_key", shape, "past and current values, likewise"),
    )


def _mask(*shapes):
    about = "added to the scores, of the dtype of query, or boolean: True may attend"
    return Input("attn_mask", MASK, shapes, about, optional=True)


def _attention(tokens, dim):
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


def _tokens(tokens, dtypes, *names):
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

STATIC_KEY_VALUE_CACHE = Operator(
    "key_value_cache",
    "Append keys and values to a static cache and read the whole context back.",
    "PMX KeyValueCache",
    (*_tokens("B, S", T1, "key", "value"), START_POS, *_cache_inputs(STATIC_LAYOUTS)),
    (*CACHE_ATTRIBUTES, NUM_REPEAT, STATIC_LAYOUT),
    _key_value("(B, start_pos+S, H*num_repeat, Dh)"),
)
STATIC_ATTENTION = Operator(
    "multi_head_attention",
    "Attend with every query to the keys and values of its sequence.",
    "PMX MultiHeadAttention",
    (
        Input("query", FLOATS, ("(B, S, num_heads, head_dim)",), "queries"),
        Input("key", FLOATS, ("(B, M, num_kv_heads, head_dim)",), "keys"),
        Input("value", FLOATS, ("(B, M, num_kv_heads, Dv)",), "values"),
        _mask(*STATIC_MASKS),
        SINKS,
    ),
    (*HEADS, *BEYOND, RETURN_LSE),
    _attention("B, S", "Dv"),
)
STATIC_CACHE_ATTENTION = Operator(
    "multi_head_cache_attention",
    "Append keys and values to a static cache and attend to the whole context, read where it lies.",
    "PMX MultiHeadCacheAttention",
    (
        Input("query", FLOATS, ("(B, S, num_heads, head_dim)",), "queries of the new tokens"),
        *_tokens("B, S", FLOATS, "key", "value"),
        START_POS,
        *_cache_inputs(STATIC_LAYOUTS),
        _mask(*STATIC_MASKS),
        SINKS,
    ),
    (*HEADS, *CACHE_ATTRIBUTES, STATIC_LAYOUT, *BEYOND, RETURN_LSE),
    _attention("B, S", "head_dim"),
)
MERGE = Operator(
    "merge_attention_states",
    "Put attention over parts of a context together.",
    "the online softmax of FlashAttention",
    (
        Input("outputs", FLOATS, ("(parts, ..., num_heads, Dv)",), "attn_output of each part"),
        Input("lses", FLOATS[:1], ("(parts, ..., num_heads)",), "lse of each part"),
    ),
    (),
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
        *_tokens("seqstarts[B]", T1, "key", "value"),
        SEQSTARTS,
        KVSTARTS,
        CACHESTARTS,
        START_POSITIONS,
        *LIMITS,
        *_cache_inputs(DYNAMIC_LAYOUTS),
    ),
    (*CACHE_ATTRIBUTES, NUM_REPEAT, *DYNAMIC_CACHE),
    _key_value("(kvstarts[B], H*num_repeat, Dh)"),
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
        _mask(*DYNAMIC_MASKS),
        SINKS,
    ),
    (*HEADS, *BEYOND, RETURN_LSE),
    _attention("seqstarts[B]", "Dv"),
)
DYNAMIC_CACHE_ATTENTION = Operator(
    "dynamic_batching.multi_head_cache_attention",
    "Append packed keys and values to a shared cache and attend to each context, read where it lies.",
    "PMX dynamic_batching.MultiHeadCacheAttention",
    (
        Input("query", FLOATS, ("(seqstarts[B], num_heads, head_dim)",), "queries of the new tokens"),
        *_tokens("seqstarts[B]", FLOATS, "key", "value"),
        SEQSTARTS,
        KVSTARTS,
        CACHESTARTS,
        START_POSITIONS,
        DECODING,
        *LIMITS,
        *_cache_inputs(DYNAMIC_LAYOUTS),
        _mask(*DYNAMIC_MASKS),
        SINKS,
    ),
    (*HEADS, *CACHE_ATTRIBUTES, *DYNAMIC_CACHE, *BEYOND, RETURN_LSE),
    _attention("seqstarts[B]", "head_dim"),
)

NUM_HEADS = Attribute("num_heads", REQUIRED, "heads of query")
DATA_TYPE = Attribute("data_type", "float32", "dtype of the mask: float32, float16 or bfloat16", str)
ROTARY = (
    Attribute("rotary_dim", 0, "elements at the front of each head that turn, even; 0 for all"),
    Attribute("theta", 10000.0, "base of the frequencies", float),
    Attribute("bypass_key", False, "copy keys as they are", bool),
    Attribute("max_position_embeddings", 2048, "end of a sequence beyond which 'dynamic' scales"),
    Attribute("scaling_type", "", "'linear' (slower positions), 'dynamic' (larger theta) or ''", str),
    Attribute("scaling_factor", 1.0, "how much 'linear' or 'dynamic' scales", float),
)


def _to_turn(shape):
    return (
        Input("query", FLOATS, (shape,), "queries of the new tokens"),
        Input("key", FLOATS, (shape,), "keys of the new tokens; may have other heads"),
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
    ),
    ROTARY,
    _turned("(B, S, heads, Dh)"),
)
DYNAMIC_ROTARY = Operator(
    "dynamic_batching.rotary_position_embedding",
    "Turn the queries and keys of packed sequences by angles that grow with their positions.",
    "PMX dynamic_batching.RotaryPositionEmbedding",
    (*_to_turn("(seqstarts[B], heads, Dh)"), SEQSTARTS, START_POSITIONS, LIMITS[0]),
    ROTARY,
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
    (),
    (Output("positions", "int64", "(seqstarts[B])", "start_pos[b] + i for token i of sequence b"),),
)
ALIBI_SLOPE = Operator(
    "alibi_slope",
    "The slope of each head's linear bias.",
    "PMX ALiBiSlope",
    (),
    (NUM_HEADS,),
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
    (NUM_HEADS, DATA_TYPE),
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
    (NUM_HEADS, DATA_TYPE),
    (
        Output(
            "mask",
            "data_type",
            "(num_heads, seqstarts[B], kvstarts[B] up to a multiple of 16)",
            "biases on the diagonal blocks, and attn_mask",
        ),
    ),
)

OPERATORS = {
    op.name: op
    for op in (
        STATIC_KEY_VALUE_CACHE,
        STATIC_ATTENTION,
        STATIC_CACHE_ATTENTION,
        MERGE,
        STATIC_ROTARY,
        ALIBI_SLOPE,
        STATIC_ALIBI_MASK,
        DYNAMIC_KEY_VALUE_CACHE,
        DYNAMIC_ATTENTION,
        DYNAMIC_CACHE_ATTENTION,
        POSITION_INDEX,
        DYNAMIC_ROTARY,
        DYNAMIC_ALIBI_MASK,
    )
}
