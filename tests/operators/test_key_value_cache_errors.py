"""Errors of sections 2 to 5 about attributes, types, shapes and places; a legal call is broken in one way."""

import numpy as np
import pytest
import scenes
from refusals import (
    FLOAT,
    INT4,
    INT8,
    KINDS,
    TENSORS,
    kinds,
    legal,
    refused,
)
from scenes import INT64_MAX, MOVED


def test_the_calls_to_be_broken_are_legal():
    for kind in KINDS:
        for formats in (FLOAT, INT8, INT4):
            scenes.check(legal(kind, formats))


# Attributes


@kinds
def test_int4_groups_are_even(kind):
    scene = legal(kind, INT4)
    refused(scene.but(quant_group=3, scale=scene["scale"]), "quant_group")


def test_only_two_static_layouts():
    refused(legal("static").but(cache_layout=2), "cache_layout")


def test_hints_that_are_too_small():
    for name, value in (("max_seqlen", 2), ("max_kvlen", 4)):
        refused(legal("dynamic").but(**{name: value}), name)


@pytest.mark.parametrize("hint", ["max_seqlen", "max_kvlen"])
@pytest.mark.parametrize("value", [INT64_MAX, 2**70], ids=["int64_max", "beyond_int64"])
def test_huge_hints_are_legal(hint, value):
    scenes.check(legal("dynamic").but(**{hint: value}))


@pytest.mark.parametrize("page_size", [2**31, 2**62, INT64_MAX], ids=["2^31", "2^62", "int64_max"])
def test_huge_pages_are_legal(page_size):
    scenes.check(legal("dynamic").but(page_size=page_size, cachestarts=np.array([[0], [-1], [5], [9]])))


# Formats

MISMATCHED = {
    "float_into_int8": ("cache", FLOAT, lambda s: {"cache": np.zeros(s["cache"].shape, np.int8)}),
    "float_into_uint8": ("cache", FLOAT, lambda s: {"cache": np.zeros(s["cache"].shape, np.uint8)}),
    "int8_into_float": ("cache", MOVED[-1], lambda s: {"cache": s["cache"].astype(np.float32)}),
    "int8_into_uint8": ("cache", MOVED[-1], lambda s: {"cache": s["cache"].view(np.uint8)}),
    "int8_quantized": (
        "current_key",
        INT8,
        lambda s: {n: np.zeros(s[n].shape, np.int8) for n in TENSORS[:2]},
    ),
    "codes_in_uint8": ("cache", INT8, lambda s: {"cache": s["cache"].view(np.uint8)}),
    "codes_in_floats": ("cache", INT8, lambda s: {"cache": s["cache"].astype(np.float32)}),
    "quant_bit_0_with_codes": ("cache", INT8, lambda s: {"quant_bit": 0}),
    "quant_bit_8_with_int4": ("cache", INT4, lambda s: {"quant_bit": 8}),
    "quant_bit_4_with_int8": ("cache", INT8, lambda s: {"quant_bit": 4}),
    "value_unlike_key": (
        "current_value",
        INT8,
        lambda s: {"current_value": s["current_value"].astype("f4")},
    ),
    "scale_missing": ("scale", INT8, lambda s: {"scale": None}),
    "scale_missing_int4": ("scale", INT4, lambda s: {"scale": None}),
    "scale_in_int8": ("scale", INT8, lambda s: {"scale": np.zeros(s["scale"].shape, np.int8)}),
    "scale_of_other_groups": ("scale", INT8, lambda s: {"quant_group": 4}),
}


@kinds
@pytest.mark.parametrize("case", MISMATCHED)
def test_formats_that_do_not_belong_together(kind, case):
    name, formats, change = MISMATCHED[case]
    scene = legal(kind, formats)
    refused(scene.but(**change(scene)), name)


# Shapes


@kinds
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_value_of_another_shape_than_key(kind, axis):
    scene = legal(kind)
    refused(scene.but(current_value=scene["current_value"].take([0], axis)), "current_value")


@kinds
@pytest.mark.parametrize("axis", [-1, -2], ids=["dim", "heads"])
@pytest.mark.parametrize("name", ["key", "cache"])
def test_heads_of_another_size(kind, axis, name):
    """Halved in key and value, or in the cache."""
    scene = legal(kind, FLOAT, dim=24)
    names = TENSORS[:2] if name == "key" else ("cache",)
    # In layout 0 heads and their elements are the last axes of cache and tokens alike.
    changes = {n: np.ascontiguousarray(np.split(scene[n], 2, axis)[0]) for n in names}
    refused(scene.but(**changes), "cache")


@kinds
def test_empty_heads(kind):
    scene = legal(kind, FLOAT)
    for part in (np.s_[..., :0], np.s_[..., :0, :]):
        refused(scene.but(**{n: scene[n][part] for n in TENSORS[:3]}), "current_key")


@kinds
def test_every_axis_of_scale(kind):
    scene = legal(kind)
    for axis in range(scene["scale"].ndim):
        short = np.delete(scene["scale"], -1, axis)
        refused(scene.but(scale=short), "scale")
        refused(scene.but(scale=np.concatenate([short] * 3, axis)), "scale")


@kinds
def test_key_value_axis(kind):
    scene = legal(kind, FLOAT)
    refused(scene.but(cache=scene["cache"].take([0], 2)), "cache")
    refused(scene.but(cache=scene["cache"].take([0, 1, 0], 2)), "cache")


@kinds
def test_a_layout_the_cache_is_not_in(kind):
    refused(legal(kind).but(cache_layout=1), "cache")


def test_too_many_static_sequences():
    refused(legal("static", batch=4).but(**{n: legal("static", batch=7)[n] for n in TENSORS[:2]}), "cache")


def test_static_start_pos():
    for start in (6, 2**40, INT64_MAX, 2**70):  # the first is one too far
        refused(legal("static").but(start_pos=start), "start_pos")


def test_more_new_tokens_than_a_static_cache_has():
    refused(
        legal("static").but(**{n: legal("static", seqlen=8)[n] for n in TENSORS[:2]}, start_pos=0),
        "start_pos",
    )


# Memory


@kinds
@pytest.mark.parametrize("name", ["cache", "scale"])
def test_rows_that_overlap_each_other(kind, name):
    scene = legal(kind)
    array = scene[name]
    for axis in range(array.ndim - 1):
        for stride in (0, array.itemsize):
            strides = [stride if i == axis else s for i, s in enumerate(array.strides)]
            folded = np.lib.stride_tricks.as_strided(array, array.shape, strides, writeable=True)
            refused(scene.but(**{name: folded}), name)


@kinds
def test_unrelated_views_of_one_buffer_are_legal(kind):
    """Outputs between the rows of new tokens: disjoint, though their bounds overlap."""
    scene = legal(kind, FLOAT, dim=24)
    expected = scene.oracle()
    wide = np.zeros((*expected[0].shape[:-1], 3 * 24), np.float32)
    out = wide[..., :24], wide[..., 48:]
    key = wide[tuple(slice(size) for size in scene["current_key"].shape[:-1])][..., 24:48]
    key[...] = scene["current_key"]
    scenes.assert_all_same(scene.but(current_key=key).results(out=out), expected)


def test_refusal_leaves_surroundings_alone(poison):
    scene = legal("dynamic")
    views = {name: poison.around(scene[name], 1) for name in TENSORS}
    refused(scene.but(**views, max_kvlen=1), "max_kvlen")
