"""What arguments of a legal call may not be together: a row for each way to break one.

Each argument alone is broken in `test_refusals.py`.
"""

import ml_dtypes
import numpy as np
import pytest
from calls import CALLS, X, of, of_scene
from refusals import INT4, ROWS, STARTS, refused
from scenes import INT64_MAX, INT64_MIN, MOVED

from kvkit.rope import Rope

MORE = {
    "static cache of int4": lambda: of_scene("static", formats=INT4),
    "cache of int4": lambda: of_scene("dynamic", formats=INT4),
    "static cache of bytes": lambda: of_scene("static", formats=MOVED[-1], dim=24),
    "cache of bytes": lambda: of_scene("dynamic", formats=MOVED[-1], dim=24),
    "merge of lists": of("merge_attention_states", outputs=[X[0], -X[0]], lses=[X[0, ..., 0], X[1, ..., 0]]),
}
PACKED = ("static attention", "dynamic attention")
CACHED = ("static cache attention", "dynamic cache attention")
ATTENTION, DYNAMIC = PACKED + CACHED, ("dynamic attention", "dynamic cache attention")
CODED = ("static cache", "cache", "static attention over codes", "attention over codes")
COPIED = ("static cache", "cache", "static cache of floats", "cache of floats")
FLOATS, BYTES, NIBBLES = (
    (f"static cache of {what}", f"cache of {what}") for what in ("floats", "bytes", "int4")
)
ROTARY = ("static rotary", "rotary")
RUNS = ("blocks kvhead", "blocks rope", "blocks omni")
BLOCKS = ("blocks nd", "blocks nz", *RUNS)
BOTH = ("key", "value", "key_cache", "value_cache")
LATENT = ("latent rows", "latent rows of bytes")
PAGED = ("paged attention", "paged attention per head")
HUGE = np.array([0, 2**61])
E4M3 = ml_dtypes.float8_e4m3fn


def at(name, *entries, **more):
    """Return a change of some entries (place, value) of an array."""

    def change(call):
        array = call[name].copy()
        for where, value in entries:
            array[where] = value
        return {name: array, **more}

    return change


def each(change, *names, **more):
    """Return a change of several arrays of a call in the same way."""
    return lambda call: {name: change(call[name]) for name in names} | more


def query_of(change, **more):
    """Return a change of all tensors of an attention call but its mask."""
    names = ("query", "key", "value", "current_key", "current_value", "cache")
    return lambda call: {name: change(call[name]) for name in names if name in call.inputs} | more


def given(name, *values, **more):
    return [{name: value, **more} for value in values]


def part(*index):
    return lambda array: np.ascontiguousarray(array[index])


def times(count, axis=0):
    return lambda array: np.repeat(array, count, axis)


def masks(*shapes, dtypes=("float32", "bool")):
    return [{"attn_mask": np.zeros(shape, dtype)} for shape in shapes for dtype in dtypes]


def cast(dtype):
    return lambda array: np.zeros(array.shape, dtype)


def entry(name, index, form):
    """Return a change of one array of a list."""
    return lambda call: {name: [form(array) if i == index else array for i, array in enumerate(call[name])]}


# Heads of channels whose capsule has as many numbers as one of other heads.
TWO_HEADS = {name: np.ones(shape, np.float32) for name, shape in (
    ("q", (5, 1, 2)), ("k", (5, 1, 2)), ("v", (5, 2, 1)), ("beta", (5, 2)),
    ("state", (7, 2, 2, 1)))}  # fmt: skip
TWO_HEADS["g"] = -np.ones((5, 2, 2), np.float32)
NO_HINTS = {"max_seqlen": None, "max_kvlen": None}
TABLE = [
    # attention: masks, counts, types
    (DYNAMIC, "decoding_batches", *given("decoding_batches", 4, 2**70)),
    (DYNAMIC, "max_seqlen", *given("max_seqlen", 2, 0)),
    (DYNAMIC, "max_kvlen", *given("max_kvlen", 2, 0)),
    (ATTENTION, "query", query_of(cast(np.int8))),
    (ATTENTION, ("query", "head_dim"), query_of(part(..., np.s_[:0]), head_dim=0)),
    (PACKED, "value", each(part(..., np.s_[:0]), "value")),
    (
        ("static attention", "static cache attention"), "attn_mask",
        *masks((2, 3, 5), (3, 4), (5,), (2, 5), (3, 4, 3, 5), (1, 1, 2, 3, 5), (4, 2, 5), (),
               (2, 4, 3, 4), (2, 2, 3, 5), (1, 1, 1, 4), (1, 1, 1, 3, 5), (1, 2, 4, 3, 5)),
        *masks((3, 5), dtypes=("float16", "int64", "uint8")),
        query_of(cast(np.float16), attn_mask=np.zeros((3, 5), ml_dtypes.bfloat16)),
        query_of(cast(ml_dtypes.bfloat16), attn_mask=np.zeros((3, 5), np.float16)),
    ),
    (
        DYNAMIC, "attn_mask",
        *masks((10,), (4, 9), (3, 10), (5, 10), (1, 10), (2, 4, 10), (3, 4, 10), (4, 4, 9), (4, 1, 10),
               (1, 4, 4, 10), (2, 4, 4, 10), ()),
        *masks((4, 10), dtypes=("float16", "int64", "uint8")),
    ),
    # index tensors of attention: sequences (2, 3), (0, 0), (4, 1) of past and new tokens, pages of three
    (
        DYNAMIC, "seqstarts",
        *(at("seqstarts", entry, **NO_HINTS) for entry in
          ((0, 1), (-1, 3), (-1, 5), (-1, INT64_MAX), (2, 2), (1, INT64_MIN))),
    ),
    (
        DYNAMIC, "kvstarts",
        *(at("kvstarts", entry, **NO_HINTS) for entry in ((0, 1), (2, 4), (1, INT64_MIN), (-1, 9), (-1, 11))),
    ),
    (
        "dynamic cache attention", "cachestarts",
        *(at("cachestarts", ((0, 0), value)) for value in (-1, -(2**62), 10**6, INT64_MAX)),
        each(lambda table: table[[0, 0, 0]], "cachestarts"),
        each(lambda table: table[:, :1].copy(), "cachestarts"),
        each(lambda table: table[:, 0].copy(), "cachestarts"),
        each(lambda table: table[:, 0].copy(), "cachestarts", cache_mode=1),
        {"cache_mode": 0},
    ),
    ("dynamic cache attention", "start_pos", at("start_pos", (0, -1))),
    ("dynamic cache attention", ("kvstarts", "start_pos"), at("start_pos", (0, 3))),
    # places of a static cache
    ("static cache attention", "start_pos", *given("start_pos", 5, 2**40, INT64_MAX, 2**70)),
    ("static cache", "start_pos", *given("start_pos", 6, 2**40, INT64_MAX, 2**70)),
    ("static cache", "start_pos", each(times(4, 1), "current_key", "current_value", start_pos=0)),
    ("static cache", "cache", each(times(3), "current_key", "current_value")),
    ("static cache attention", "cache", each(part(np.s_[:1]), "cache")),
    ("static cache", "cache_layout", *given("cache_layout", 2, 3)),
    ("cache", "max_seqlen", *given("max_seqlen", 2)),
    ("cache", "max_kvlen", *given("max_kvlen", 4, 1)),
    # caches, codes and their scales
    (FLOATS, "cache", each(cast(np.int8), "cache"), each(cast(np.uint8), "cache")),
    (BYTES, "cache", each(cast(np.float32), "cache"), each(cast(np.uint8), "cache")),
    (("static cache", "cache"), "current_key", each(cast(np.int8), "current_key", "current_value")),
    (CODED, "cache", *given("quant_bit", 0, 4), each(cast(np.uint8), "cache"), each(cast("f2"), "cache")),
    (CODED, "scale", *given("scale", None), *given("quant_group", 4), each(cast(np.int8), "scale")),
    (NIBBLES, "cache", *given("quant_bit", 8)),
    (NIBBLES, "scale", *given("scale", None)),
    (NIBBLES, "quant_group", *given("quant_group", 3)),
    (FLOATS, "cache", each(part(..., np.s_[:12]), "current_key", "current_value"),
     each(part(..., np.s_[:1], np.s_[:]), "current_key", "current_value"), *given("cache_layout", 1)),
    (FLOATS, "current_key", each(part(..., np.s_[:0]), "current_key", "current_value", "cache"),
     each(part(..., np.s_[:0], np.s_[:]), "current_key", "current_value", "cache")),
    (COPIED, "current_value", each(part(..., np.s_[:1], np.s_[:]), "current_value")),
    # the index tensors of `key_value_cache`
    *(("cache", "cachestarts", at("cachestarts", change)) for change in ROWS.values()),
    *(("cache", change[0], at(change[-2], change[-1]))
      for change in STARTS.values()),
    ("cache", "cachestarts", {"cache_mode": 0}, each(lambda table: table[:, 0].copy(), "cachestarts"),
     each(part(np.s_[:], np.s_[:1]), "cachestarts"), each(part(np.s_[:], np.s_[:0]), "cachestarts")),
    ("cache", "seqstarts", at("seqstarts", (1, 2), (2, 0), (3, 2))),  # lengths 2, -2, 2: sums are right
    # positions
    *((ROTARY, name, *given(name, 0.0, -1.0, np.nan, np.inf, None, 1e39, scaling_type=kind))
      for name in ("theta", "scaling_factor") for kind in ("linear", "dynamic")),
    (ROTARY, "key", each(cast(np.float16), "key"), each(part(..., np.s_[:6]), "key"),
     each(part(np.s_[:1]), "key"), each(times(2), "key")),
    (ROTARY, "rotary_dim", each(part(..., np.s_[:7]), "query", "key")),
    ("static rotary", "start_pos", *given("start_pos", INT64_MAX - 2)),
    ("static rotary", "pad_len", *given("pad_len", np.array([0, -1]), np.array([INT64_MIN, 0]))),
    (
        ("rotary", "positions"), "seqstarts",
        *given("seqstarts", [1, 2, 3], [0, 1, 2], [0, 2, 4]), *given("seqstarts", [0, 4, 3], max_seqlen=None),
        {"seqstarts": [0, INT64_MAX, INT64_MIN, 3], "start_pos": [0, 0, 0], "max_seqlen": None},
        {"seqstarts": [], "start_pos": []},
    ),
    (("rotary", "positions"), "start_pos", *given("start_pos", [0, -1], [INT64_MIN, 0], [INT64_MAX - 1, 0])),
    (("rotary", "positions"), "max_seqlen", *given("max_seqlen", 1, -(2**80), 2.0)),
    ("alibi", "seqstarts", *given("seqstarts", [1, 1, 4], [0, 4, 1], [])),
    ("alibi", "kvstarts", *given("kvstarts", [0, 4, 1], [0, 4], None),
     {"seqstarts": HUGE, "kvstarts": HUGE, "attn_mask": None}),
    ("alibi", "attn_mask", *masks((4,), (4, 1), (4, 8), (3, 9), (1, 9), (3, 4, 9), (1, 2, 4, 9))),
    ("static alibi", "attn_mask",
     *masks((5,), (3, 4), (3, 1), (2, 5), (2, 3, 5), (2, 3, 3, 5), (1, 2, 4, 3, 5))),
    ("static alibi", "seqlen_q", {"seqlen_q": 2**70}),
    *((call, "num_heads: expected an integer from 1 to 65536", {"num_heads": 2**31})
      for call in ("slopes", "alibi", "static alibi")),
    ("static alibi", "seqlen_kv", {"seqlen_q": 2**40, "seqlen_kv": 2**40, "attn_mask": None}),
    # Ascend: caches in blocks
    (BLOCKS, ("key", "value"), each(cast(np.int8), "key"), each(cast(np.int8), "value")),
    (BLOCKS, "key", each(part(np.s_[:], np.s_[:0]), "key"), each(part(..., np.s_[:0]), "key")),
    (BLOCKS, "value", each(part(np.s_[:], np.s_[:0]), "value"), each(part(..., np.s_[:0]), "value")),
    (BLOCKS, "value: expected an array, because value_cache is one", *given("value", None)),
    (BLOCKS, "value_cache: expected an array, because value is one", *given("value_cache", None)),
    (("blocks nd", "blocks nz"), "wins", *given("wins", np.full(4, 2))),
    (("blocks nd", "blocks nz"), "seq_lens", *given("seq_lens", np.array([4, 3]))),
    (("blocks nd", "blocks nz", "blocks kvhead"), "offset_index", *given("offset_index", np.full(4, -1))),
    (RUNS, "wins", *given("wins", None)),
    (RUNS[1:], "offset_index", *given("offset_index", None)),
    (RUNS, "cache_format", {"cache_format": "NZ"}),
    (("blocks nd", "blocks nz"), "value", each(cast(np.float32), "value", "value_cache"),
     each(cast(ml_dtypes.bfloat16), "value", "value_cache"), each(cast(np.int8), "value", "value_cache")),
    ("blocks nd", "value", each(cast(np.int8), "key", "key_cache")),
    ("blocks nz", "key_cache", each(lambda cache: cache.reshape(4, 8, 5, 8), "key_cache")),
    ("blocks nz", "key", {"key": np.zeros((7, 1, 24), "f2"), "key_cache": np.zeros((4, 2, 5, 16), "f2"),
                          "value": None, "value_cache": None}),
    *((RUNS, "key", each(part(..., np.s_[:dim]), *BOTH)) for dim in (16, 24)),
    (RUNS, "key", each(lambda x: np.zeros((*x.shape[:-1], 33), x.dtype), *BOTH)),
    (RUNS, "value", each(times(2, -1), "value", "value_cache")),
    (RUNS, "key_cache", each(times(2, 2), "key_cache")),
    ("blocks rope", "key", each(cast(np.int8), *BOTH)),
    (RUNS, "seq_lens", *given("seq_lens", *map(np.array, (
        [4, 2], [4, 4], [7, 0], [8, -1], [0, 7], [INT64_MAX, INT64_MAX], [INT64_MAX, 8 - 2**63])))),
    *((("blocks nd", "blocks nz"), f"slot_mapping[{i}]",
       *(at("slot_mapping", (i, slot)) for slot in (20, 21, 2**31, 2**32 + 7, INT64_MAX)))
      for i in (0, 3, 6)),
    # Ascend: attention, loads and copies
    (PAGED, "context_lens", at("context_lens", (1, -1)),
     at("context_lens", (1, INT64_MIN))),
    (PAGED, "block_tables",
     *(at("context_lens", (1, length)) for length in (13, 2**40, INT64_MAX))),
    *((PAGED, f"block_tables[1, {column}]",
       *(at("block_tables", ((1, column), block)) for block in (-1, 10, 2**40, INT64_MAX, INT64_MIN)))
      for column in (0, 1)),
    ("paged attention", "block_tables[1, 0]", at("block_tables", ((1, 0), 7))),
    ("contexts", "key_cache", {"cache_format": "NZ"}),
    ("contexts", "seq_lens", *given("seq_lens", *map(np.array, (
        [5], [1, 5, 8], [0, 5, 3], [0, 5, 8, 9], [5, -1], [[5, 3]], [5.0, 3.0], [2**62, 2**62], [],
        [0, INT64_MAX, INT64_MIN], [0, INT64_MAX, -2], [0, 3, INT64_MIN])))),
    ("contexts", "seq_starts", *given("seq_starts", *map(np.array, ([0], [0, -1], [0, 4, 4], [0.0, 4.0])))),
    ("copies", "key_cache", lambda call: {"key_cache": call["value_cache"]},
     lambda call: {"key_cache": call["value_cache"][::-1]}),
    ("copies", "src[1]", *(at("src", (1, block)) for block in (-1, 4, INT64_MAX, INT64_MIN))),
    ("copies", "dst[1]", *(at("dst", (1, block)) for block in (-1, 4, INT64_MAX, INT64_MIN))),
    ("copies", "dst", *given("dst", np.array([3, 3]), np.array([3, 0]))),
    ("copies", "cum_sum", *given("cum_sum", *map(np.array, (
        [2], [1, 2, 2], [2, 1], [1, 3], [1, 1], [-1, 2], [1.0, 2.0], [[1, 2]], [INT64_MIN, 2],
        [INT64_MAX, 2])))),
    # pools: slots, scales of codes, rotated keys, copies of blocks
    ("slots", "slot_mapping", *given("slot_mapping", np.array([3, 3, -1]), np.array([3, -1]))),
    ("slots", "slot_mapping[2]", at("slot_mapping", (2, 20))),
    ("slots", "key", {"key": None, "value": None}),
    ("slots", "value", each(part(np.s_[:], np.s_[:1]), "value"), each(part(np.s_[1:]), "value")),
    ("slots", "key_cache", *given("key_cache", None), each(part(..., np.s_[:8]), "key"),
     each(cast(np.float32), "key"), each(cast(np.uint8), "key_cache"),
     each(cast(E4M3), "key_cache", key=np.zeros((3, 2, 32), np.int8)),
     lambda call: {"value_cache": call["key_cache"]},
     lambda call: {"key": call["key_cache"].reshape(-1, 2, 32)[:3]}),
    ("slots", "value_cache", *given("value_cache", None), each(part(np.s_[:-1]), "value_cache")),
    ("slots", "layout", *given("layout", "n h c")),
    ("slots", "key_scale", *given("key_scale", 1.0), each(cast(np.int8), "key_cache"),
     each(cast(np.int8), "key_cache", key_scale=0.0),
     *(each(cast(E4M3), "key_cache", key_scale=np.float32(scale)) for scale in ([1, np.nan], [1, 1, 1]))),
    ("rotated slots", "positions", *given("positions", None)),
    ("rotated slots", "key", *given("key", None)),
    ("swaps", "pairs[0]", *given("pairs", [[0, -1]])),
    ("swaps", "pairs[1]", *given("pairs", [[0, 0], [4, 1]])),
    ("swaps", "pairs", *given("pairs", [[0, 1], [2, 1]], [[0, 1, 2]]),
     lambda call: {"source": call["target"], "pairs": [[0, 1], [1, 2]]}),
    ("swaps", "target", each(part(np.s_[:], np.s_[:2]), "source"), each(cast(np.float32), "source"),
     lambda call: {"source": call["target"][:2], "pairs": [[0, 2]]}),
    ("swaps", "source", each(cast(object), "source"), lambda call: {"source": call["source"][0, 0, 0, 0]}),
    ("compressed slots", "sequence_of_token", *given("sequence_of_token", None),
     *(at("sequence_of_token", (1, sequence)) for sequence in (-1, 2, INT64_MAX))),
    ("matrices back", "y",
     *({"m": m, "n": n} for m, n in ((16, 10), (33, 10), (20, 8), (20, 17), (0, 10), (20, 0)))),
    # parts of attention
    ("merge of lists", "outputs", *given("outputs", [], None, 1.0), {"outputs": [], "lses": []},
     lambda call: {"outputs": [array.tolist() for array in call["outputs"]]},
     *(entry("outputs", 1, form) for form in (part(0), part(np.s_[:1]), part(..., np.s_[:4]), cast("f2"))),
     *(entry("outputs", 0, cast(dtype)) for dtype in ("f8", np.int8)),
     {"outputs": [np.float32(1)], "lses": [np.float32(1)]}),
    ("merge of lists", "lses", *given("lses", None), each(lambda lses: lses[:1], "lses"),
     each(lambda lses: [*lses, lses[0]], "lses"), each(lambda lses: [a.tolist() for a in lses], "lses"),
     entry("lses", 0, cast("f2")), entry("lses", 1, cast("f8")), entry("lses", 1, part(np.s_[:], np.s_[:1])),
     entry("lses", 0, lambda lse: lse[..., None])),
    # attention over pools
    ("pools", "block_tables[0, 1]", *(at("block_tables", ((0, 1), page)) for page in (-1, 5, 2**62))),
    ("pools", "block_tables[1][2]", *given("block_tables", (np.array([0, 3, 5]), np.array([0, 1, 5, 3, 4])))),
    ("pools", "block_tables", each(part(np.s_[:], np.s_[:2]), "block_tables"),
     at("context_lens", (np.s_[:], [109, 106])),
     *given("block_tables", *(tuple(map(np.array, lists)) for lists in (
         ([5, 3, 0], range(5)), ([0, 3, 5], range(4)), ([0, 3, 5], range(5), range(5)))))),
    ("pools", "context_lens", at("context_lens", (1, -1))),
    ("pools", "query_starts", *given("query_starts", np.array([0, 5, 4]), np.array([1, 4, 5]))),
    ("pools", "query", *given("query_starts", None), each(part(np.s_[:], np.s_[:3]), "query")),
    ("pools", "key_cache", each(part(..., np.s_[:8]), "query"),
     each(lambda cache: cache[:, None], "key_cache", layout="b kv n h c", value_cache=None)),
    ("pools", "value_cache", *given("value_cache", None), each(part(np.s_[:-1]), "value_cache"),
     each(lambda cache: cache.swapaxes(1, 2), "value_cache", layout="b h n c"),
     each(lambda cache: np.stack([cache] * 2, 1), "key_cache", "value_cache", layout="b kv n h c")),
    ("pools", "key_cache: expected heads of whole blocks of q8_0, 34 bytes one after the other", dict(
        dict.fromkeys(("key_cache", "value_cache"), np.zeros((5, 4, 2, 33), np.uint8)), quant_format="q8_0")),
    ("pools", "layout", *given("layout", "b n n c", "b n h c d", None)),
    ("pools", "key_scale", each(cast(np.int8), "key_cache")),
    *(("pools", name, *given(name, "1", np.nan, [1.0, 1.0], np.ones(3, "f4"), np.ones((4, 2), "f4")))
      for name in ("key_scale", "value_scale")),
    ("pools", "alibi_slopes",
     *given("alibi_slopes", np.ones(3, "f4"), np.ones((3, 4), "f4"), np.ones(4), 0.5)),
    ("pools", "attn_mask", *masks((4, 8), dtypes=("bool",))),
    # latent rows
    ("latent rows", "softmax_scale: expected a positive", {"softmax_scale": 0.0}),
    ("latent rows", "query: expected rows of 576 elements", each(part(..., np.s_[:64]), "query")),
    ("latent rows", "query: expected a multiple of 2 heads",
     lambda call: {"query": call["query"][:, :1], "latent": call["latent"][:, :, None].repeat(2, 2)}),
    ("latent rows", "query: expected an array, or a pair", each(lambda query: (query,), "query")),
    ("latent rows", "query[1]: expected the tokens", lambda call: {"query": (call["query"], call["latent"])}),
    ("latent rows of two pools", "query: expected parts of [512, 64] elements",
     each(lambda query: (query[..., :70], query[..., 70:]), "query")),
    ("latent rows", "value_dim: expected an integer from", {"value_dim": 577}),
    ("latent rows", "block_tables: expected an array, or indices", {"block_tables": None}),
    ("latent rows", "block_tables: expected None beside indices", {"indices": [[0]] * 6}),
    (LATENT, "block_tables", at("block_tables", ((0, 0), 7))),
    ("latent rows of bytes", "format: expected None, ds_mla", {"format": "q8_0"}),
    ("latent rows", "latent: expected an array of bytes", {"format": "ds_mla"}),
    ("latent rows of bytes", "rope_cache: expected None", {"rope_cache": np.ones((4, 4, 576), "f4")}),
    ("latent rows", "rope_cache: expected (7, 4)", lambda call: {"rope_cache": call["latent"][:1]}),
    ("latent rows", "sinks: expected shape (2,)", {"sinks": np.ones(3, "f4"), "lse_of_sinks": False}),
    ("latent rows of bytes", "query: expected rows of 576 elements, as latent has (without a rope: query="
     "(query, np.zeros((6, 2, 64), query.dtype))", each(part(..., np.s_[:512]), "query")),
    ("latent rows of bytes", "latent: expected rows of 656 bytes, for ds_mla, got 352 bytes (as of "
     "nvfp4_ds_mla", each(part(..., np.s_[:352]), "latent")),
    ("latent rows of bytes", "latent: expected [blocks, bytes], or tokens of 584 bytes one behind the other "
     "in each block, got 528 bytes (as of DeepSeek V4.1",
     each(part(..., np.s_[:528]), "latent", format="ds_v4")),
    ("chosen latent rows", "extra: expected (latent, ", {"extra": np.ones((2, 4, 576), "f4")}),
    ("latent append", "slot_mapping: expected slots below 9", at("slot_mapping", (3, 9))),
    ("latent append", "slot_mapping: expected each slot once",
     each(lambda slots: slots[[0, 1, 2, 2]], "slot_mapping")),
    ("latent append", "cache: expected rows of one head",
     each(lambda cache: cache[:, :, None].repeat(2, 2), "cache")),
    ("absorb", "w_uk: expected the heads 2 and 8 elements", each(part(np.s_[:1]), "w_uk")),
    # states
    *(("delta step", f"state_indices: expected {text}",
       at("state_indices", (4, slot), out_state_indices=None))
      for slot, text in ((0, "each slot once, got slot 0 twice"), (-2, "slots from 0 to 6, or -1, got -2"),
                         (7, "slots from 0 to 6, or -1, got 7"))),
    ("delta step of channels", "state: expected 5 states, one for each sequence, got 7",
     {"state_indices": None}),
    *(("delta step", f"out_state_indices: expected {text}", at("out_state_indices", (0, slot)))
      for slot, text in ((0, "slots that no other sequence reads"),
                         (-1, "-1 where state_indices is -1, got"))),
    ("delta step", "g: expected None for rule 'delta', got an array", {"rule": "delta"}),
    ("delta step", "beta: expected an array for rule 'gated_delta', got None",
     {"rule": "gated_delta", "beta": None}),
    ("delta step", "state: expected states of shape (4, 5, 6), got shape (7, 4, 6, 5)",
     {"state_layout": "VK"}),
    ("delta step", "gates: expected a pair (a_log, dt_bias), got tuple of 1 elements",
     {"gates": (np.zeros(4, "f4"),)}),
    ("delta step", "gates[0]: expected shape (4,), got (3,)",
     {"gates": (np.zeros(3, "f4"), np.zeros(4, "f4"))}),
    ("delta step", "state: expected dtype float32 or bfloat16, got float", each(cast("f2"), "state")),
    ("delta step", "state: expected states whose elements are in one piece, got",
     each(lambda state: np.ascontiguousarray(state.swapaxes(2, 3)).swapaxes(2, 3), "state")),
    *((("delta rule", "convolution"), f"starts: expected {text}", *given("starts", np.array(starts)))
      for starts, text in (([1, 2, 2, 5], "to begin with 0, got 1"), ([0, 3, 2, 5], "numbers that do not fa"),
                           ([0, 2, 2, 4], "to end with the 5 tokens, got 4"),
                           (np.zeros(0, int), "to begin with 0, got no entries"))),
    ("delta rule", "return_capsule: expected at least the 3 tokens of a sequence, got 2",
     {"return_capsule": 2}),
    ("delta rule", "return_capsule: expected 0 for 2 heads of v and 1 of k",
     TWO_HEADS | {"return_capsule": 3}),
    # compression
    ("compression", "state", each(part(np.s_[:], np.s_[:1]), "state"), each(cast("f2"), "state"),
     each(part(..., np.s_[:31]), "state")),
    ("compression", "positions", each(lambda positions: positions[::-1], "positions"),
     at("positions", (1, 9)), *given("positions", np.full(9, -1, np.int32))),
    ("compression", "state_indices",
     *given("state_indices", np.array([1, 1, 0]), np.array([3, 9, 0]), np.array([0]))),
    ("compression", "kv", each(part(..., np.s_[1:]), "kv", "gate")),
    ("compression", "gate", each(cast("f2"), "gate")),
    ("compression", "ape", each(part(..., np.s_[1:]), "ape"), {"ratio": 5}),
    ("compression", "rope", *given("rope", Rope(18), Rope(6, begin=12))),
    ("compressed slots", "sequence_of_token: expected sequences from 0 to 1, got 2 at token 1",
     at("sequence_of_token", (1, 2))),
    ("compressed slots", "block_tables: expected a page for row 0 of sequence 0",
     at("block_tables", ((0, 0), -1))),
    ("compressed slots", "block_tables", at("positions", (1, 19))),
]  # fmt: skip


def rows():
    for labels, names, *changes in TABLE:
        for label in (labels,) if isinstance(labels, str) else labels:
            yield label, names, changes


@pytest.mark.parametrize("label", dict.fromkeys(label for label, *_ in rows()))
def test_refused(label):
    for other, names, changes in rows():
        if other == label:
            for change in changes:
                call = (CALLS | MORE)[label]()
                refused(call.but(**(change(call) if callable(change) else change)), names)


def test_messages_name_the_dtype_that_fits():
    for labels, dtype, words in ((FLOATS, np.int8, "dtype float32"), (BYTES, np.float32, "dtype int8")):
        call = (CALLS | MORE)[labels[0]]()
        assert words in refused(call.but(**each(cast(dtype), "cache")(call)), "cache")


LEGAL = {
    # One column for all keys, which `alibi_mask` refuses; without a number of key heads it is that of `key`.
    "static attention": [*masks((3, 1)), {"num_kv_heads": 0}],
    "dynamic attention": [*masks((4, 1)), {"num_kv_heads": 0}],
    "delta rule": [TWO_HEADS],
    "cache": [
        *given("max_seqlen", INT64_MAX, 2**70), *given("max_kvlen", INT64_MAX, 2**70),
        *given("page_size", 2**31, 2**62, INT64_MAX, cachestarts=np.array([[0], [-1], [5], [9]])),
    ],
    "static rotary": [each(part(..., np.s_[:7]), "query", "key", rotary_dim=6), {"start_pos": INT64_MAX - 3}],
    "rotary": [*given("max_seqlen", None, 2, 3, 2**80, np.int32(2), np.array([2]))],
    "positions": [*given("max_seqlen", None, 2, 3, 2**80, np.int32(2), np.array([2]))],
    "static alibi": masks(
        (3, 5), (3, 16), (1, 5), (4, 3, 5), (1, 3, 5), (2, 4, 3, 5), (2, 1, 3, 8), (1, 1, 1, 5)
    ),
    "blocks nd": [at("slot_mapping", (0, slot)) for slot in (-1, -20, -21, -(2**31) - 1, INT64_MIN)],
}  # fmt: skip
LEGAL["blocks nz"] = LEGAL["blocks nd"]


@pytest.mark.parametrize("label", LEGAL)
def test_what_looks_wrong_but_is_legal(label):
    for change in LEGAL[label]:
        call = CALLS[label]()
        call.but(**(change(call) if callable(change) else change)).run()
