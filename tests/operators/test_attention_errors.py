"""What the attention operators do not take; each argument alone is broken in `test_refusals.py`."""

import attention_scenes as scenes
import ml_dtypes
import numpy as np
import pytest
from attention_scenes import FP32, INT8, KINDS, check
from page_tables import PAGED, REFUSED
from refusals import legal_attention as legal
from refusals import refused
from scenes import INT64_MAX, INT64_MIN

CACHED = ("static_cache", "dynamic_cache")
kinds = pytest.mark.parametrize("kind", KINDS)
packed = pytest.mark.parametrize("kind", ["static", "dynamic"])
cached = pytest.mark.parametrize("kind", CACHED)
statics = pytest.mark.parametrize("kind", ["static", "static_cache"])
dynamics = pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
INT4 = scenes.Formats("fp32", "int8", "fp32", 4, 8)


@kinds
def test_the_calls_to_be_broken_are_legal(kind):
    for formats in (FP32, INT8, INT4):
        check(legal(kind, formats))


# Attributes

SINKS = {
    "too_few": np.zeros(3, np.float32),
    "too_many": np.zeros(5, np.float32),
    "of_key_heads": np.zeros(2, np.float32),
}


@kinds
@pytest.mark.parametrize("case", SINKS)
def test_sinks(kind, case):
    refused(legal(kind).but(sinks=SINKS[case]), "sinks")


@dynamics
def test_more_decoding_batches_than_sequences(kind):
    for value in (4, 2**70):
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


@kinds
def test_another_float_type(kind):
    """Queries, keys and values are of one type."""
    for name in TENSORS[kind][:3]:
        refused(legal(kind).but(**{name: legal(kind)[name].astype(np.float16)}), TENSORS[kind][:3])


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
    (2, 2, 3, 5), (), (1, 1, 1, 4), (1, 1, 1, 3, 5), (1, 2, 4, 3, 5),
]  # fmt: skip
DYNAMIC_MASKS = [(10,), (4, 9), (3, 10), (5, 10), (1, 10), (2, 4, 10), (3, 4, 10), (4, 4, 9), (4, 1, 10),
                 (1, 4, 4, 10), (2, 4, 4, 10), ()]  # fmt: skip


@kinds
def test_masks_of_other_shapes(kind):
    for shape in STATIC_MASKS if "static" in kind else DYNAMIC_MASKS:
        for dtype in (np.float32, bool):
            refused(legal(kind).but(attn_mask=np.zeros(shape, dtype)), "attn_mask")


@kinds
def test_mask_types(kind):
    for dtype in ("float16", "int64", "uint8"):
        refused(legal(kind).but(attn_mask=np.zeros((4, 10), dtype)), "attn_mask")


def test_a_mask_of_another_16_bit_type():
    rng = np.random.default_rng(1)
    call = scenes.static(rng, scenes.FP16, 3, 2)
    refused(call.but(attn_mask=np.zeros((2, 5), ml_dtypes.bfloat16)), "attn_mask")
    call = scenes.static(rng, scenes.BF16, 3, 2)
    refused(call.but(attn_mask=np.zeros((2, 5), np.float16)), "attn_mask")


# Outputs given by the caller


def test_out_in_another_type_needs_a_float32_lse():
    call = legal("static", scenes.FP16)
    shape = call["query"].shape
    out = np.zeros(shape, np.float16), np.zeros(shape[:-1], np.float16)
    refused(call, "out", out=out, return_lse=True)


# Cache, scale and their attributes

MISMATCHED = {
    "quant_group_no_divisor": ("quant_group", {"quant_group": 7}),
    "quant_bit_0_with_codes": ("cache", {"quant_bit": 0}),
    "quant_bit_4_with_int8": ("cache", {"quant_bit": 4}),
}


@cached
def test_formats_that_do_not_belong_together(kind):
    for name, change in MISMATCHED.values():
        refused(legal(kind, INT8).but(**change), name)
    scale = legal(kind, INT8)["scale"]
    for array in (None, scale[..., :0], scale.view(np.int16)):
        refused(legal(kind, INT8).but(scale=array), "scale")


@cached
def test_caches(kind):
    call = legal(kind, INT8)
    cache = call["cache"]
    for array in (cache[..., ::2], cache.view(np.uint8), cache.astype(np.float16)):
        refused(call.but(cache=array), "cache")


def test_static_start_pos():
    for start in (5, 2**40, INT64_MAX, 2**70):
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


@dynamics
def test_hints_that_are_too_small(kind):
    for name in ("max_seqlen", "max_kvlen"):
        for value in (2, 0):
            refused(legal(kind).but(**{name: value}), name)


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
