"""The operators as data: what each takes and gives, in the words of its specification.

The command line runs and describes them from this table, and a test holds the functions to it.
Importing it compiles nothing and loads no Numba.
"""

import functools
import importlib
from dataclasses import dataclass

FLOATS = ("float32", "float16", "bfloat16")
T1 = (*FLOATS, "int8")
T2 = (*FLOATS, "int8", "uint8")
INDEX = ("int64", "int32")


@dataclass(frozen=True)
class Input:
    """An array argument. `shapes` lists the legal shapes; `inout` arrays are changed in place."""

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    about: str
    optional: bool = False
    inout: bool = False


@dataclass(frozen=True)
class Attribute:
    """A keyword argument with a plain value."""

    name: str
    default: object
    about: str


@dataclass(frozen=True)
class Output:
    """An array that the operator returns."""

    name: str
    dtype: str
    shape: str
    about: str


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
    Attribute("num_repeat", 1, "copies of each head in the outputs (grouped-query attention)"),
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


STATIC_KEY_VALUE_CACHE = Operator(
    "key_value_cache",
    "Append keys and values to a static cache and read the whole context back.",
    "PMX KeyValueCache",
    (
        Input("current_key", T1, ("(B, S, H, Dh)",), "keys of the new tokens"),
        Input("current_value", T1, ("(B, S, H, Dh)",), "values of the new tokens"),
        Input("start_pos", INDEX, ("()", "(1)"), "position of the first new token of every sequence"),
        *_cache_inputs(STATIC_LAYOUTS),
    ),
    (*CACHE_ATTRIBUTES, Attribute("cache_layout", 0, "axis order of cache and scale, 0 or 1")),
    _key_value("(B, start_pos+S, H*num_repeat, Dh)"),
)

DYNAMIC_KEY_VALUE_CACHE = Operator(
    "dynamic_batching.key_value_cache",
    "Append keys and values of packed sequences to a shared cache and read their contexts back.",
    "PMX dynamic_batching.KeyValueCache",
    (
        Input("current_key", T1, ("(seqstarts[B], H, Dh)",), "keys of the new tokens, sequences packed"),
        Input("current_value", T1, ("(seqstarts[B], H, Dh)",), "values of the new tokens, sequences packed"),
        Input(
            "seqstarts",
            INDEX,
            ("(B+1)",),
            "where each sequence begins among the new tokens",
        ),
        Input("kvstarts", INDEX, ("(B+1)",), "where each sequence begins in key and value"),
        Input("cachestarts", INDEX, ("(B)", "(B, MaxP)"), "first row of each sequence, or of its pages"),
        Input("start_pos", INDEX, ("(B)",), "position of each sequence's first new token"),
        Input("max_seqlen", INDEX, ("()",), "at least the longest sequence of new tokens", optional=True),
        Input("max_kvlen", INDEX, ("()",), "at least the longest context", optional=True),
        *_cache_inputs(DYNAMIC_LAYOUTS),
    ),
    (
        *CACHE_ATTRIBUTES,
        Attribute("cache_mode", 0, "0: cachestarts are offsets; 1: they are a page table"),
        Attribute("cache_layout", 0, "axis order of cache and scale, 0 to 3"),
        Attribute("page_size", 128, "rows in a page, for cache_mode 1"),
    ),
    _key_value("(kvstarts[B], H*num_repeat, Dh)"),
)

OPERATORS = {op.name: op for op in (STATIC_KEY_VALUE_CACHE, DYNAMIC_KEY_VALUE_CACHE)}
