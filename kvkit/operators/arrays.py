"""A table of operators' array arguments: dtypes, shapes and meaning.

Entries are looked up among the operator's own, then as `NAMESPACE.ARGUMENT`, then as `ARGUMENT`. If an entry
lists no shapes, they are read from the function's docstring.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvkit import formats
from kvkit.layouts import pmx

Texts = tuple[str, ...]
FLOATS = tuple(fmt.name for fmt in formats.FLOATS)
DATA_NAMES = tuple(fmt.name for fmt in formats.BY_DTYPE.values())
CACHE = (*DATA_NAMES, "uint8")
MASK = tuple(formats.MASKS)
INDEX = ("int64", "int32")

STATIC, DYNAMIC = pmx.list_shapes(pmx.STATIC), pmx.list_shapes(pmx.DYNAMIC)
POOL = "(num_blocks, page_size, H, {}), or as layout has its axes"
POOL_OF_BOTH = "(num_blocks, 2, page_size, H, D), or as layout has its axes, for keys and values"
ND = "(num_blocks, block_size, num_head, {})"
NZ = "NZ: (num_blocks, num_head*{}/n0, block_size, n0)"
COMPRESSED = "compressed: (num_blocks, block_size, 1, {})"
POOL_SCALES = "(H)", "(B, H)", "of codes: those of the pool without c", "or with groups of it: (...)"
COMPUTED_SCALES = "(H)", "to be computed: those of the pool without c, or with groups of it: (...)"
STATIC_MASKS = [f"({axes} or more)" for axes in ("S, M", "num_heads, S, M", "B, num_heads, S, M")]
PACKED_MASKS = [f"({heads}seqstarts[B], kvstarts[B] or more)" for heads in ("", "num_heads or 1, ")]
SOME_AXES = "axes but the last may be 1"
ADDED = "added to the scores, of the dtype of query or float32, or boolean: True may attend"
ADDED_TO_BIASES = "added; boolean: True may attend"
POSITIONS = "(positions, rotary_dim/2)"
LATENT_DTYPES, LATENT_POOL = (*FLOATS, "int8", "uint8", "float8_e4m3fn"), "(blocks, page_size, {})"


@dataclass(frozen=True)
class Input:
    """Describes an array argument. `shapes` lists the legal shapes; `inout` arrays are changed in place.

    Inputs are passed by position, in order, except for `keyword` inputs. `found` marks an argument of scales
    that the operator finds and writes if the array has more than one axis. With one axis it holds the
    caller's scales of heads.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    about: str
    optional: bool = False
    inout: bool = False
    keyword: bool = False
    found: bool = False

    def changes(self, array: object) -> bool:
        """Return whether an operator changes `array` in place if it gets it as this argument."""
        return self.inout or (self.found and getattr(array, "ndim", 0) > 1)


class ArgumentEntry(NamedTuple):
    """Holds a line of the table: the legal dtypes, what the array means, and its shapes."""

    dtypes: tuple[str, ...]
    about: str
    shapes: tuple[str, ...] = ()


def scales_of(caches: tuple[str, ...]) -> tuple[str, ...]:
    """Return the scale shapes that belong to cache shapes."""
    return tuple(shape.replace("Dh)", "Dh/quant_group)") for shape in caches)


def side_entries(about: str, dtypes: Texts, *shapes: str, prefix: str = "") -> dict[str, ArgumentEntry]:
    """Return the entries of `key_cache` and `value_cache`."""
    key, value = (tuple(shape.format(dim) for shape in shapes) for dim in ("Dk", "Dv"))
    return {
        f"{prefix}key_cache": ArgumentEntry(dtypes, about, key),
        f"{prefix}value_cache": ArgumentEntry(dtypes, about.replace("keys", "values"), value),
    }


ARRAYS = {
    "query": ArgumentEntry(FLOATS, "queries of the new tokens"),
    "key": ArgumentEntry(DATA_NAMES, "keys of the new tokens"),
    "value": ArgumentEntry(DATA_NAMES, "values, if value_cache is given"),
    "current_key": ArgumentEntry(DATA_NAMES, "keys of the new tokens"),
    "current_value": ArgumentEntry(DATA_NAMES, "values of the new tokens"),
    "cache": ArgumentEntry(CACHE, "by cache_layout; a last axis of Dh/2 for int4", STATIC),
    "dynamic_batching.cache": ArgumentEntry(CACHE, "by cache_layout; a last axis of Dh/2 for int4", DYNAMIC),
    "scale": ArgumentEntry(FLOATS, "for quant_bit 8 and 4", scales_of(STATIC)),
    "dynamic_batching.scale": ArgumentEntry(FLOATS, "for quant_bit 8 and 4", scales_of(DYNAMIC)),
    "start_pos": ArgumentEntry(INDEX, "position of the first new token of every sequence", ("()", "(1)")),
    "dynamic_batching.start_pos": ArgumentEntry(
        INDEX, "position of each sequence's first new token", ("(B)",)),
    "seqstarts": ArgumentEntry(INDEX, "where each sequence begins among the new tokens"),
    "kvstarts": ArgumentEntry(INDEX, "where each sequence begins among the contexts"),
    "cachestarts": ArgumentEntry(INDEX, "first row of each sequence, or of its pages"),
    "decoding_batches": ArgumentEntry(INDEX, "sequences at the front without the causal mask"),
    "max_seqlen": ArgumentEntry(INDEX, "at least the longest sequence of new tokens"),
    "max_kvlen": ArgumentEntry(INDEX, "at least the longest context"),
    "sequences": ArgumentEntry(INDEX, "the new tokens; only their number matters"),
    "attn_mask": ArgumentEntry(MASK, ADDED, (*STATIC_MASKS, SOME_AXES)),
    "dynamic_batching.attn_mask": ArgumentEntry(MASK, ADDED, tuple(PACKED_MASKS)),
    "sinks": ArgumentEntry(FLOATS, "a score for each head without a value", ("(num_heads)",)),
    "alibi_slopes": ArgumentEntry(FLOATS, "a score loses its slope times the distance of query and key"),
    "seqlen_q": ArgumentEntry(INDEX, "queries"),
    "seqlen_kv": ArgumentEntry(INDEX, "keys"),
    "pad_len": ArgumentEntry(INDEX, "padding tokens in front of each sequence"),
    "cos": ArgumentEntry(FLOATS, "cosines, if not those of theta", (POSITIONS,)),
    "sin": ArgumentEntry(FLOATS, "sines, if not those of theta", (POSITIONS,)),
    "outputs": ArgumentEntry(FLOATS, "attn_output of each part", ("(parts, ..., num_heads, Dv)",)),
    "lses": ArgumentEntry(FLOATS[:1], "lse of each part", ("(parts, ..., num_heads)",)),
    **side_entries("keys, in pages", DATA_NAMES, POOL, POOL_OF_BOTH),
    "key_scale": ArgumentEntry(FLOATS, "factors of keys; in Python also a number", POOL_SCALES),
    "value_scale": ArgumentEntry(FLOATS, "factors of values; in Python also a number", POOL_SCALES),
    "block_tables": ArgumentEntry(
        INDEX, "pages of each context; in Python also (indptr, indices)", ("(B, M)",)),
    "context_lens": ArgumentEntry(INDEX, "keys of each sequence"),
    "query_starts": ArgumentEntry(
        INDEX, "where each sequence begins among the queries; one query each if there is none"),
    "slot_mapping": ArgumentEntry(INDEX, "the slot of each token; below 0: store nothing"),
    "source": ArgumentEntry(("any",), "blocks to copy"),
    "target": ArgumentEntry(("any",), "blocks to write"),
    "pairs": ArgumentEntry(INDEX, "a block of source, and the block of target that it is copied to"),
    **side_entries("keys, in blocks", DATA_NAMES, ND, NZ, prefix="ascend."),
    "wins": ArgumentEntry(INDEX, "tokens to keep (KVHEAD), to average (KVHEAD_ROPE) or to leave out (OMNI)"),
    "offset_index": ArgumentEntry(INDEX, "the first token to average or to leave out; -1: none"),
    "seq_lens": ArgumentEntry(INDEX, "tokens of each sequence"),
    "seq_starts": ArgumentEntry(INDEX, "first token of each sequence, at a block's begin"),
    "razor_offset": ArgumentEntry(
        FLOATS[:1], "added to the products with keys; ln(N)/softmax_scale for a mean of N tokens"),
    "src": ArgumentEntry(INDEX, "blocks to copy"),
    "dst": ArgumentEntry(INDEX, "blocks to write, each once"),
    "cum_sum": ArgumentEntry(INDEX, "where the destinations of each source end in dst"),
    "x": ArgumentEntry(DATA_NAMES, "matrices"),
    "y": ArgumentEntry(
        DATA_NAMES, "the result of nd_to_nz", ("(b, n/n0, m rounded up to a multiple of 16, n0)",)),
    "m": ArgumentEntry(INDEX, "rows of a matrix"),
    "n": ArgumentEntry(INDEX, "columns of a matrix"),
    "rope_cache": ArgumentEntry(
        FLOATS, "the rotated parts of rows, if they have a pool of their own", (LATENT_POOL.format("R"),)),
    "indices": ArgumentEntry(INDEX, "the rows of each query, block * page_size + offset; -1: none"),
    "index_lens": ArgumentEntry(INDEX, "how many of a query's indices count"),
    "rope": ArgumentEntry(FLOATS, "rotated keys of the new tokens", ("(tokens, R)",)),
    "w_uk": ArgumentEntry(FLOATS, "the up-projection of keys"),
    "latent_output": ArgumentEntry(FLOATS, "attention over latent rows"),
    "w_uv": ArgumentEntry(FLOATS, "the up-projection of values"),
    "keys": ArgumentEntry((*FLOATS, "float8_e4m3fn"), "keys of the indexer, in blocks"),
    "weights": ArgumentEntry(FLOATS, "weights of the indexer's heads"),
    "scores": ArgumentEntry(FLOATS[:1], "scores of the indexer"),
    "k": ArgumentEntry(INDEX, "how many rows to choose"),
}  # fmt: skip
# The entries of one operator or of a few, by argument: TO_ of attention to something, INTO_ of an append.
# None: here this argument is an attribute.
Own = dict[str, ArgumentEntry | None]
TO_KEYS: Own = {
    "query": ArgumentEntry(FLOATS, "queries"),
    "key": ArgumentEntry(FLOATS, "keys"),
    "value": ArgumentEntry(FLOATS, "values"),
}
TO_STATIC_CACHE, TO_CACHE = (
    {
        f"current_{side}": ArgumentEntry(FLOATS, f"{side}s of the new tokens", (f"({tokens}, H, Dh)",))
        for side in ("key", "value")
    }
    for tokens in ("B, S", "seqstarts[B]")
)
PAGED_MASKS = [f"({heads}tokens, longest context or more)" for heads in ("", "num_heads or 1, ")]
TO_PAGES: Own = {
    "query": ArgumentEntry(FLOATS, "queries of all sequences"),
    "attn_mask": ArgumentEntry(MASK, ADDED, tuple(PAGED_MASKS)),
}
INTO_PAGES: Own = {
    "key": ArgumentEntry(DATA_NAMES, "keys of the new tokens; None leaves key_cache", ("(tokens, H, Dk)",)),
    "value": ArgumentEntry(
        DATA_NAMES, "values of the new tokens; None leaves value_cache", ("(tokens, H, Dv)",)
    ),
    "key_scale": ArgumentEntry(FLOATS, "divisors of keys that become codes", COMPUTED_SCALES),
    "value_scale": ArgumentEntry(FLOATS, "divisors of values that become codes", COMPUTED_SCALES),
    "positions": ArgumentEntry(INDEX, "the position of each token, for rope", ("(tokens)",)),
    "rope": None,
}
TO_LATENT: Own = {
    "query": ArgumentEntry(
        FLOATS, "absorbed queries, then their rotated part; in Python also a pair", ("(tokens, H, D)",)),
    "latent": ArgumentEntry(
        LATENT_DTYPES, "latent rows in blocks: floats, or bytes of a format",
        (LATENT_POOL.format("D"), "(blocks, page_size, h, D)", "(blocks, bytes)")),
    "scale": None,
}  # fmt: skip
INTO_LATENT: Own = {
    "latent": ArgumentEntry(FLOATS, "latent vectors of the new tokens", ("(tokens, L)",)),
    "cache": ArgumentEntry(
        LATENT_DTYPES, "latent rows, as latent of mla_attention",
        (LATENT_POOL.format("D"), "(blocks, bytes)")),
}  # fmt: skip
OF_INDEXER: Own = {
    "query": ArgumentEntry(FLOATS, "queries of the indexer"),
    "key_scale": ArgumentEntry(FLOATS[:1], "the scale of each key", ("(blocks, page_size)",)),
    "scale": None,
}
ROTATED: Own = {"key": ArgumentEntry(FLOATS, "keys of the new tokens; may have other heads")}
ALIBI_MASKS = (shape.replace("S, M", "seqlen_q, seqlen_kv") for shape in STATIC_MASKS)
BIASED_MASKS: Own = {"attn_mask": ArgumentEntry(MASK, ADDED_TO_BIASES, (*ALIBI_MASKS, SOME_AXES))}
PACKED_BIASED_MASKS: Own = {"attn_mask": ArgumentEntry(MASK, ADDED_TO_BIASES, tuple(PACKED_MASKS))}
INTO_BLOCKS: Own = {
    **side_entries("keys, in blocks", DATA_NAMES, ND, NZ, COMPRESSED),
    "slot_mapping": ArgumentEntry(
        INDEX, "the slot of each token, or of each head's first row; below 0: store nothing",
        ("(num_tokens)", "compressed: (B*num_head)")),
}  # fmt: skip
FROM_BLOCKS: Own = {
    "seq_lens": ArgumentEntry(INDEX, "tokens of each sequence, or their sums from 0 on"),
    "block_tables": ArgumentEntry(INDEX, "blocks of each sequence; a block outside the cache gives zeros"),
}
TO_BLOCKS: Own = {
    "query": ArgumentEntry(FLOATS, "a query of each sequence", ("(B, num_heads, Dk)",)),
    **side_entries("keys, in blocks", FLOATS, ND, COMPRESSED),
    "block_tables": ArgumentEntry(INDEX, "blocks of each context", ("(B, M)", "compressed: (B*num_head, M)")),
    "context_lens": ArgumentEntry(INDEX, "rows of each context", ("(B)", "compressed: (B*num_head)")),
}
ABSORBED: Own = {"query": ArgumentEntry(FLOATS, "unrotated parts of queries")}
STATE_DTYPES = "float32", "bfloat16"
STATE_SHAPES = ("(N or slots, Hv, dk, dv)", "VK: (N or slots, Hv, dv, dk)")
SLOTS = ArgumentEntry(INDEX, "the slot of each sequence; -1: none", ("(N)",))
OF_DELTA_RULE: Own = {
    "q": ArgumentEntry(FLOATS, "queries"),
    "k": ArgumentEntry(FLOATS, "keys"),
    "v": ArgumentEntry(FLOATS, "values"),
    "state": ArgumentEntry(STATE_DTYPES, "states, which change in place", STATE_SHAPES),
    "g": ArgumentEntry(FLOATS, "logarithms of decays; raw with gates, which only Python takes"),
    "beta": ArgumentEntry(FLOATS, "the gate of writing; raw with gates"),
    "state_indices": SLOTS,
    "out_state_indices": ArgumentEntry(INDEX, "the slots to write, if not those to read", ("(N)",)),
    "starts": ArgumentEntry(INDEX, "where each packed sequence begins", ("(N+1)",)),
    "lengths": ArgumentEntry(INDEX, "the tokens of each sequence; later rows are ignored", ("(N)",)),
    "scale": None,
}
OF_REPLAY: Own = {
    "state": OF_DELTA_RULE["state"],
    "capsule": ArgumentEntry(FLOATS[:1], "a capsule of gated_delta_rule"),
    "accepted": ArgumentEntry(INDEX, "how many tokens of each sequence to take"),
    "state_indices": SLOTS,
}
OF_GATES: Own = {
    "a": ArgumentEntry(FLOATS, "raw decays", ("(.., Hv)", "kda: (.., Hv, dk)")),
    "b": ArgumentEntry(FLOATS, "raw gates of writing", ("(.., Hv)",)),
    "a_log": ArgumentEntry(FLOATS, "logarithms of rates"),
    "dt_bias": ArgumentEntry(FLOATS, "added to a", ("(Hv)", "kda: (Hv, dk)")),
}
OF_CONVOLUTION: Own = {
    "x": ArgumentEntry(FLOATS, "inputs"),
    "weight": ArgumentEntry(FLOATS, "filters; the last column is the token's own", ("(C, K)",)),
    "bias": ArgumentEntry(FLOATS, "added to the sums", ("(C)",)),
    "state": ArgumentEntry(
        FLOATS, "the last inputs, which change in place, oldest first", ("(N or slots, C, K-1)",)),
    "starts": OF_DELTA_RULE["starts"],
    "state_indices": SLOTS,
}  # fmt: skip
OF_COMPRESSION: Own = {
    "kv": ArgumentEntry(FLOATS, "projected tokens"),
    "gate": ArgumentEntry(FLOATS, "raw scores of tokens"),
    "ape": ArgumentEntry(FLOATS, "added to scores, by position modulo ratio"),
    "norm_weight": ArgumentEntry(FLOATS, "factors of the normed row"),
    "state": ArgumentEntry(
        FLOATS[:1], "the last tokens, kv and score, which change in place", ("(N or slots, ring, 2, E)",)),
    "positions": ArgumentEntry(INDEX, "consecutive positions of tokens", ("(T)",)),
    "starts": OF_DELTA_RULE["starts"],
    "state_indices": SLOTS,
    "rope": None,
}  # fmt: skip
OF_COMPRESSED_SLOTS: Own = {
    "positions": ArgumentEntry(INDEX, "positions of tokens; -1: padding", ("(T)",)),
    "block_tables": ArgumentEntry(INDEX, "pages of each sequence's compressed rows", ("(B, M)",)),
    "page_size": ArgumentEntry(INDEX, "rows of a page"),
    "sequence_of_token": ArgumentEntry(INDEX, "the sequence of each token", ("(T)",)),
}
ROTATED_BACK: Own = {
    "output": ArgumentEntry(FLOATS, "outputs of attention"),
    "positions": ArgumentEntry(INDEX, "positions of queries", ("(T)",)),
    "rope": None,
}
CHOSEN: Own = {"page_size": ArgumentEntry(INDEX, "tokens of a block of the latent cache")}
CHANGED = "cache", "scale", "target", "state"
CHANGED_WITHOUT_OUTPUTS = "key_cache", "value_cache", "rope_cache"  # by operators that have no outputs


def find_array(
    operator: str,
    parameter: inspect.Parameter,
    own: Mapping[str, ArgumentEntry | None],
    has_outputs: bool,
    shapes: Mapping[str, tuple[str, ...]],
) -> Input | None:
    """Return the description of an array parameter, or None for an attribute.

    `own` has the operator's own entries, and `shapes` the shapes in its docstring.
    """
    name, namespace = parameter.name, operator.rpartition(".")[0]
    entry = own[name] if name in own else ARRAYS.get(f"{namespace}.{name}", ARRAYS.get(name))
    if entry is None:
        return None
    return Input(
        name, entry.dtypes, entry.shapes or shapes.get(name, ()), entry.about,
        optional=any(word in str(parameter.annotation) for word in ("None", "Values")),  # Values: or None
        inout=name in CHANGED or (name in CHANGED_WITHOUT_OUTPUTS and not has_outputs),
        keyword=parameter.kind is parameter.KEYWORD_ONLY, found=entry.shapes == COMPUTED_SCALES,
    )  # fmt: skip


def read_shapes(docstring: str) -> dict[str, tuple[str, ...]]:
    """Return the shapes of arguments in a numpydoc docstring: those in brackets, and () for integers.

    ``key, value : ndarray, shapes [B, D] and [B, V]``    one shape for each: {"key": ("(B, D)",), ...}
    ``rope : ndarray, shape [B] or [B, D]``               alternatives: {"rope": ("(B)", "(B, D)")}
    """
    shapes: dict[str, tuple[str, ...]] = {}
    section = docstring.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    for names, kind in re.findall(r"^(\w+(?:, \w+)*) : (.*)$", section, re.M):
        arguments = names.split(", ")
        inside = re.findall(r"\[((?:[^\[\]]|\[\w*\])*)\]", kind)  # [...], one level of nesting
        bracketed = ["(" + re.sub(r" ([*/+]) ", r"\1", shape) + ")" for shape in inside]
        has_one_each = "shapes" in kind and len(bracketed) == len(arguments)
        for i, name in enumerate(arguments):
            own = bracketed[i : i + 1] if has_one_each else bracketed
            shapes[name] = (*(["()"] if kind.startswith("int") else []), *own)
    return shapes
