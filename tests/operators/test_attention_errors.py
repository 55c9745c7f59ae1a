"""Every error of the attention operators: named, said in one form, and nothing written."""

import attention_scenes as scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import FP32, INT8, KINDS, check
from refusals import NO_ARRAYS, swapped
from scenes import INT64_MAX, INT64_MIN
from test_errors import NOT_INTEGERS
from test_pmx_vectors import PAGED, REFUSED

from kvkit import KvkitError

CACHED = ("static_cache", "dynamic_cache")
kinds = pytest.mark.parametrize("kind", KINDS)
packed = pytest.mark.parametrize("kind", ["static", "dynamic"])
cached = pytest.mark.parametrize("kind", CACHED)
statics = pytest.mark.parametrize("kind", ["static", "static_cache"])
dynamics = pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
INT4 = scenes.Formats("fp32", "int8", "fp32", 4, 8)


def legal(kind, formats=FP32, **options):
    """B 2, heads 4 over 2, n 3, m 5, head size 8; dynamic: (2, 3), (0, 0), (4, 1)."""
    rng = np.random.default_rng(3)
    options = {"dim": 8, **options}
    if kind.startswith("static"):
        return getattr(scenes, kind)(rng, formats, 2, 3, **options)
    pages = {"page_size": 3} if kind == "dynamic_cache" else {}
    return getattr(scenes, kind)(rng, formats, [(2, 3), (0, 0), (4, 1)], **pages, **options)


def refused(call, name, **more):
    """The call raises an error about `name` (or one of them) that says what was expected and got."""
    outputs = more.get("out", ())
    written = [call.inputs.get("cache"), call.inputs.get("scale")]
    written += list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    written = [array for array in written if isinstance(array, np.ndarray)]
    before = [array.tobytes() for array in written]
    with pytest.raises(KvkitError) as error:
        call.run(**more)
    message = str(error.value)
    assert message.startswith(name), message
    assert ": expected " in message
    assert ", got " in message
    assert [array.tobytes() for array in written] == before


@kinds
def test_the_calls_to_be_broken_are_legal(kind):
    for formats in (FP32, INT8, INT4):
        check(legal(kind, formats))


# Attributes

ATTRIBUTES = {
    "num_heads_not_that_of_query": (("num_heads", "query"), {"num_heads": 8}),
    "num_heads_0": ("num_heads", {"num_heads": 0}),
    "num_heads_negative": ("num_heads", {"num_heads": -4}),
    "head_dim_not_that_of_query": (("head_dim", "query"), {"head_dim": 16}),
    "head_dim_0": ("head_dim", {"head_dim": 0}),
    "head_dim_negative": ("head_dim", {"head_dim": -8}),
    "num_kv_heads_no_divisor": ("num_kv_heads", {"num_kv_heads": 3}),
    "num_kv_heads_beyond_heads": ("num_kv_heads", {"num_kv_heads": 8}),
    "num_kv_heads_negative": ("num_kv_heads", {"num_kv_heads": -2}),
    "num_kv_heads_not_that_of_key": (("num_kv_heads", "key", "current_key"), {"num_kv_heads": 1}),
    "num_kv_heads_0_is_num_heads": (("num_kv_heads", "key", "current_key"), {"num_kv_heads": 0}),
    "softcap_negative": ("softcap", {"softcap": -1.0}),
    "softcap_that_float32_has_not": ("softcap", {"softcap": 1e-46}),
    "window_below_minus_1": ("window", {"window": (-2, 0)}),
    "window_right_below_minus_1": ("window", {"window": (0, -5)}),
    "window_of_one": ("window", {"window": (3,)}),
    "window_of_three": ("window", {"window": (1, 2, 3)}),
}


@kinds
@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes(kind, case):
    name, change = ATTRIBUTES[case]
    refused(legal(kind).but(**change), name)


@kinds
@pytest.mark.parametrize("name", ["num_heads", "head_dim", "num_kv_heads"])
@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_attributes_that_are_no_integers(kind, name, value):
    refused(legal(kind).but(**{name: value}), name)


@kinds
@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, "1", True, [1.0], 1j, np.ones(2)], ids=repr)
def test_numbers_that_are_none(kind, name, value):
    refused(legal(kind).but(**{name: value}), name)


@kinds
def test_softcap_is_not_optional(kind):
    refused(legal(kind).but(softcap=None), "softcap")


@kinds
@pytest.mark.parametrize("value", [None, 3, "ab", (1.0, 2), (None, 1), ("1", "2"), np.ones(2)], ids=repr)
def test_windows_that_are_none(kind, value):
    refused(legal(kind).but(window=value), "window")


@kinds
@pytest.mark.parametrize("name", ["is_causal", "is_alibi", "return_lse"])
@pytest.mark.parametrize("value", [None, "yes", 2, -1, 1.0, [True], np.array([True, False])], ids=repr)
def test_flags_that_are_none(kind, name, value):
    refused(legal(kind).but(**{name: value}), name)


SINKS = {
    "too_few": np.zeros(3, np.float32),
    "too_many": np.zeros(5, np.float32),
    "of_key_heads": np.zeros(2, np.float32),
    "scalar": np.array(1, np.float32),
    "two_axes": np.zeros((1, 4), np.float32),
    "float64": np.zeros(4),
    "integers": np.zeros(4, np.int8),
    "list": [0.0] * 4,
    "number": 1.0,
    "byte_order": swapped(np.zeros(4, np.float32)),
}


@kinds
@pytest.mark.parametrize("case", SINKS)
def test_sinks(kind, case):
    refused(legal(kind).but(sinks=SINKS[case]), "sinks")


@dynamics
@pytest.mark.parametrize("value", [-1, 4, 2**70, 1.0, True, None, "1", [1], np.array([1, 1])], ids=repr)
def test_decoding_batches(kind, value):
    refused(legal(kind).but(decoding_batches=value), "decoding_batches")


# Kinds of arrays

TENSORS = {
    "static": ("query", "key", "value"),
    "dynamic": ("query", "key", "value"),
    "static_cache": ("query", "current_key", "current_value", "cache"),
    "dynamic_cache": ("query", "current_key", "current_value", "cache"),
}
TENSOR_CASES = [(kind, name) for kind, names in TENSORS.items() for name in names]
tensors = pytest.mark.parametrize(("kind", "name"), TENSOR_CASES, ids=str)


@tensors
@pytest.mark.parametrize("form", NO_ARRAYS)
def test_no_arrays(kind, name, form):
    call = legal(kind)
    refused(call.but(**{name: NO_ARRAYS[form](call[name])}), name)


@tensors
@pytest.mark.parametrize("dtype", ["float64", "int16", "int8", "bool", "complex64", "object"])
def test_dtypes(kind, name, dtype):
    call = legal(kind)
    names = ("current_key", "current_value") if name.startswith("current") else name
    refused(call.but(**{name: np.zeros(call[name].shape, dtype)}), names)


@tensors
def test_byte_order(kind, name):
    call = legal(kind)
    refused(call.but(**{name: swapped(call[name])}), name)


@tensors
def test_ranks(kind, name):
    call = legal(kind)
    refused(call.but(**{name: call[name][None]}), name)
    refused(call.but(**{name: call[name][0]}), name)
    refused(call.but(**{name: np.array(0, np.float32)}), name)


@tensors
def test_another_float_type(kind, name):
    """Queries, keys and values are of one type."""
    if name == "cache":
        return
    call, others = legal(kind), ("query", "key", "value", "current_key", "current_value")
    refused(call.but(**{name: call[name].astype(np.float16)}), others)


@kinds
def test_codes_are_no_queries(kind):
    """int8 data may pass through a cache; attention needs floats."""
    call = legal(kind)
    names = TENSORS[kind]
    refused(call.but(**{name: np.zeros(call[name].shape, np.int8) for name in names}), "query")


@tensors
def test_shapes(kind, name):
    """Each axis shorter or longer than the others say."""
    call = legal(kind)
    free = {("static_cache", "cache"): (0, 3), ("dynamic_cache", "cache"): (0,), ("static", "query"): (1,),
            ("static", "value"): (3,), ("dynamic", "value"): (2,)}  # fmt: skip
    for axis in range(call[name].ndim):
        if axis in free.get((kind, name), ()):
            continue
        array = call[name]
        wrong = [np.delete(array, -1, axis), np.concatenate([array, array.take([0], axis)], axis)]
        for shape in wrong:
            names = (*TENSORS[kind], "seqstarts", "kvstarts")
            refused(call.but(**{name: np.ascontiguousarray(shape)}), names)


@packed
def test_values_of_no_size(kind):
    call = legal(kind)
    refused(call.but(value=call["value"][..., :0]), "value")


@kinds
def test_heads_of_no_size(kind):
    call = legal(kind)
    names = TENSORS[kind]
    empty = {name: call[name][..., :0] for name in names}
    refused(call.but(**empty, head_dim=0), ("query", "head_dim"))


# Masks

STATIC_MASKS = [
    (2, 3, 5), (3, 4), (3, 1), (5,), (2, 5), (3, 4, 3, 5), (1, 1, 2, 3, 5), (4, 2, 5), (2, 4, 3, 4),
    (2, 2, 3, 5), (), (1, 1, 1, 4),
]  # fmt: skip
DYNAMIC_MASKS = [(10,), (4, 9), (3, 10), (5, 10), (1, 10), (2, 4, 10), (3, 4, 10), (4, 4, 9), (4, 1, 10),
                 (1, 4, 4, 10), (2, 4, 4, 10), ()]  # fmt: skip


@statics
@pytest.mark.parametrize("shape", STATIC_MASKS, ids=str)
def test_static_masks(kind, shape):
    for dtype in (np.float32, bool):
        refused(legal(kind).but(attn_mask=np.zeros(shape, dtype)), "attn_mask")


@dynamics
@pytest.mark.parametrize("shape", DYNAMIC_MASKS, ids=str)
def test_dynamic_masks(kind, shape):
    for dtype in (np.float32, bool):
        refused(legal(kind).but(attn_mask=np.zeros(shape, dtype)), "attn_mask")


@kinds
@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int64", "uint8", "object"])
def test_mask_types(kind, dtype):
    refused(legal(kind).but(attn_mask=np.zeros((4, 10), dtype)), "attn_mask")


def test_a_mask_of_another_16_bit_type():
    rng = np.random.default_rng(1)
    call = scenes.static(rng, scenes.FP16, 3, 2)
    refused(call.but(attn_mask=np.zeros((2, 5), ml_dtypes.bfloat16)), "attn_mask")
    call = scenes.static(rng, scenes.BF16, 3, 2)
    refused(call.but(attn_mask=np.zeros((2, 5), np.float16)), "attn_mask")


@kinds
@pytest.mark.parametrize("form", [form for form in NO_ARRAYS if form != "none"])
def test_masks_that_are_none(kind, form):
    mask = np.zeros((4, 3, 16) if "static" in kind else (4, 10), np.float32)
    refused(legal(kind).but(attn_mask=NO_ARRAYS[form](mask)), "attn_mask")


@kinds
def test_byte_order_of_a_mask(kind):
    mask = np.zeros((4, 3, 16) if "static" in kind else (4, 10), np.float32)
    refused(legal(kind).but(attn_mask=swapped(mask)), "attn_mask")


# Outputs given by the caller


@kinds
def test_out(kind):
    call = legal(kind)
    shape = call["query"].shape
    wrong = [
        np.zeros(shape),
        np.zeros(shape, np.float16),
        np.zeros(shape[:-1], np.float32),
        np.zeros((*shape[:-1], shape[-1] + 1), np.float32),
        np.zeros((shape[0] + 1, *shape[1:]), np.float32),
        np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2],
        np.broadcast_to(np.zeros(shape[1:], np.float32), shape),
        [],
        "out",
        (np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32)),
    ]
    readable = np.zeros(shape, np.float32)
    readable.flags.writeable = False
    for out in (*wrong, readable):
        refused(call.copy(), "out", out=out)


@kinds
def test_out_with_lse(kind):
    call = legal(kind)
    shape = call["query"].shape
    output, lse = np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32)
    readable = lse.copy()
    readable.flags.writeable = False
    pairs = [
        output,
        (output,),
        (output, lse, lse),
        (lse, output),
        (output, None),
        (None, lse),
        (output, lse.astype(np.float64)),
        (output, lse.astype(np.float16)),
        (output, lse[..., :1]),
        (output, output[..., 0]),
        (output, readable),
        (output, lse[..., None]),
    ]
    for out in pairs:
        refused(call.copy(), "out", out=out, return_lse=True)


def test_out_in_another_type_needs_a_float32_lse():
    call = legal("static", scenes.FP16)
    shape = call["query"].shape
    out = np.zeros(shape, np.float16), np.zeros(shape[:-1], np.float16)
    refused(call, "out", out=out, return_lse=True)


@kinds
def test_out_over_an_input(kind):
    """Output memory that an input, the cache or a mask lies in."""
    call = legal(kind)
    size = call["query"].size
    names = [name for name in (*TENSORS[kind], "attn_mask") if name != "scale"]
    for name in names:
        memory = np.zeros(4096, np.float32)
        shape = (4, 3, 16) if "static" in kind else (4, 4, 16)
        array = np.zeros(shape, np.float32) if name == "attn_mask" else call[name]
        inside = memory[: array.size].reshape(array.shape)
        inside[...] = array
        start = array.size - 1
        out = memory[start : start + size].reshape(call["query"].shape)
        changed = call.copy().but(**{name: inside})
        before = memory.copy()
        refused(changed, ("out", "cache"), out=out)
        scenes.assert_same(memory, before)
        lse = memory[start : start + size // 8].reshape(call["query"].shape[:-1])
        refused(changed, ("out", "cache"), out=(np.zeros_like(call["query"]), lse), return_lse=True)
        scenes.assert_same(memory, before)


@kinds
def test_out_over_sinks(kind):
    call = legal(kind)
    memory = np.zeros(call["query"].size + 3, np.float32)
    out = memory[3:].reshape(call["query"].shape)
    refused(call.but(sinks=memory[:4]), "out", out=out)


# Cache, scale and their attributes

CACHE_ATTRIBUTES = {
    "num_layer_0": ("num_layer", {"num_layer": 0}),
    "num_layer_not_that_of_cache": ("cache", {"num_layer": 4}),
    "layer_idx_past_the_end": ("layer_idx", {"layer_idx": 3}),
    "layer_idx_negative": ("layer_idx", {"layer_idx": -1}),
    "quant_bit_unknown": ("quant_bit", {"quant_bit": 2}),
    "quant_group_0": ("quant_group", {"quant_group": 0}),
    "quant_group_no_divisor": ("quant_group", {"quant_group": 7}),
    "cache_layout_negative": ("cache_layout", {"cache_layout": -1}),
    "cache_layout_unknown": ("cache_layout", {"cache_layout": 4}),
    "cache_in_another_layout": ("cache", {"cache_layout": 1}),
    "quant_bit_0_with_codes": ("cache", {"quant_bit": 0}),
    "quant_bit_4_with_int8": ("cache", {"quant_bit": 4}),
}
CACHE_INTEGERS = ("num_layer", "layer_idx", "quant_bit", "quant_group", "cache_layout")


@cached
@pytest.mark.parametrize("case", CACHE_ATTRIBUTES)
def test_cache_attributes(kind, case):
    name, change = CACHE_ATTRIBUTES[case]
    refused(legal(kind, INT8).but(**change), name)


@cached
@pytest.mark.parametrize("name", CACHE_INTEGERS)
def test_cache_attributes_that_are_no_integers(kind, name):
    for value in (1.0, True, "8", None):
        refused(legal(kind, INT8).but(**{name: value}), name)


@cached
def test_scales(kind):
    call = legal(kind, INT8)
    scale = call["scale"]
    readable = scale.copy()
    readable.flags.writeable = False
    wrong = [None, scale[..., :0], scale[None], scale.astype(np.float64), scale.view(np.int16), readable]
    for array in wrong:
        refused(call.but(scale=array), "scale")


@cached
def test_caches(kind):
    call = legal(kind, INT8)
    cache = call["cache"]
    readable, wide = cache.copy(), np.repeat(cache, 2, -1)
    readable.flags.writeable = False
    for array in (cache[..., ::2], wide[..., ::2], readable, cache.view(np.uint8), cache.astype(np.float16)):
        refused(call.but(cache=array), "cache")
    codes = scenes.poison(np.random.default_rng(0), (4096,), np.int8)
    shared = codes[: cache.size].reshape(cache.shape)
    scale = call["scale"]
    overlap = codes[: scale.nbytes].view(scale.dtype).reshape(scale.shape)
    refused(call.but(cache=shared, scale=overlap), ("cache", "scale"))


@cached
def test_cache_over_the_queries(kind):
    """A store would change what is still to be read."""
    call = legal(kind)
    flat = call["cache"].reshape(-1)
    for name in ("query", "current_key", "current_value"):
        inside = flat[: call[name].size].reshape(call[name].shape)
        refused(call.but(**{name: inside}), ("cache", name))


@cached
def test_cache_over_the_mask_or_sinks(kind):
    call = legal(kind)
    flat = call["cache"].reshape(-1)
    shape = (1, 3, 5) if "static" in kind else (1, 4, 10)
    inside = flat[: int(np.prod(shape))].reshape(shape)
    refused(call.but(attn_mask=inside), ("cache", "attn_mask"))
    refused(call.but(sinks=flat[:4]), ("cache", "sinks"))


STATIC_STARTS = [-1, 5, 2**40, INT64_MAX, 2**70, 1.0, True, None, "1", np.array([1, 1])]


@pytest.mark.parametrize("start", STATIC_STARTS, ids=repr)
def test_static_start_pos(start):
    refused(legal("static_cache").but(start_pos=start), "start_pos")


def test_more_sequences_than_the_cache_has():
    call = legal("static_cache")
    refused(call.but(cache=call["cache"][:1].copy()), "cache")


# Index tensors

PACKED_STARTS = {
    "seqstarts_begins_at_1": ("seqstarts", 0, 1),
    "kvstarts_begins_at_1": ("kvstarts", 0, 1),
    "seqstarts_ends_early": ("seqstarts", -1, 3),
    "seqstarts_ends_late": ("seqstarts", -1, 5),
    "seqstarts_ends_at_int64_max": ("seqstarts", -1, INT64_MAX),
    "seqstarts_falls": ("seqstarts", 2, 2),
    "seqstarts_falls_below_0": ("seqstarts", 1, INT64_MIN),
    "kvstarts_falls": ("kvstarts", 2, 4),
    "kvstarts_falls_below_0": ("kvstarts", 1, INT64_MIN),
    "kvstarts_ends_early": ("kvstarts", -1, 9),
    "kvstarts_ends_late": ("kvstarts", -1, 11),
}


@dynamics
@pytest.mark.parametrize("case", PACKED_STARTS)
def test_starts(kind, case):
    name, where, value = PACKED_STARTS[case]
    call = legal(kind)
    array = call[name].copy()
    array[where] = value
    refused(call.but(**{name: array, "max_seqlen": None, "max_kvlen": None}), name)


INDEX = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
INDEX_CASES = [("dynamic", name) for name in INDEX[:2]] + [("dynamic_cache", name) for name in INDEX]


@pytest.mark.parametrize(("kind", "name"), INDEX_CASES, ids=str)
def test_kinds_of_index_tensors(kind, name):
    call = legal(kind)
    for dtype in ("float64", "bool", "uint64", "int16"):
        refused(call.but(**{name: np.clip(call[name], 0, 100).astype(dtype)}), name)
    for form in ("none", "number", "other_library", "bytes"):
        refused(call.but(**{name: NO_ARRAYS[form](call[name])}), name)
    refused(call.but(**{name: call[name][None]}), name)
    refused(call.but(**{name: call[name][:-1]}), INDEX)
    refused(call.but(**{name: np.concatenate([call[name], call[name][-1:]])}), INDEX)
    refused(call.but(**{name: swapped(call[name])}), name)


@dynamics
def test_no_starts(kind):
    for name in ("seqstarts", "kvstarts"):
        refused(legal(kind).but(**{name: np.zeros(0, np.int64)}), name)


@dynamics
@pytest.mark.parametrize("name", ["max_seqlen", "max_kvlen"])
@pytest.mark.parametrize("value", [2, 0, -1, -(2**70), 1.0, True, "1"], ids=repr)
def test_hints(kind, name, value):
    refused(legal(kind).but(**{name: value}), name)


@pytest.mark.parametrize("name", ["cache_mode", "page_size"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None], ids=repr)
def test_modes(name, value):
    refused(legal("dynamic_cache").but(**{name: value}), name)


def paged_call(change, formats):
    """The page table of the specification with a call around it."""
    case = {**PAGED, **change}
    rng = np.random.default_rng(1)
    lengths = [(5, 1), (0, 6), (3, 0)]
    call = scenes.dynamic_cache(rng, formats, lengths, dim=8, page_size=4)
    axes = {"cache": call["cache"], "scale": call["scale"]}
    sized = {name: np.resize(a, (24, *a.shape[1:])) for name, a in axes.items() if a is not None}
    for array in sized.values():
        array[...] = 0
    index = {name: np.array(case[name]) for name in INDEX}
    hints = {name: case.get(name) for name in ("max_seqlen", "max_kvlen")}
    return call.but(**sized, **index, **hints)


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("formats", [FP32, INT8], ids=str)
def test_page_tables(change, formats):
    check(paged_call({}, formats))
    names = ("cachestarts", "kvstarts", "max_seqlen", "max_kvlen")
    refused(paged_call(REFUSED[change], formats), names)
