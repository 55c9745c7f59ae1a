"""The attention operators against the oracle: every argument, format, layout and mode."""

import itertools

import attention_scenes as scenes
import numpy as np
import pytest
from attention_scenes import (
    BF16,
    FP16,
    FP32,
    INT4,
    INT8,
    KINDS,
    MIXED,
    QUANTIZED,
    any_kind,
    check,
)
from scenes import FLOATS, ODD_GROUPS, assert_same
from strides import at_an_odd_address, backwards, fused, guarded, heads_first
from surroundings import carve

CACHED = ("static_cache", "dynamic_cache")
kinds = pytest.mark.parametrize("kind", KINDS)
statics = pytest.mark.parametrize("kind", ["static", "static_cache"])
dynamics = pytest.mark.parametrize("kind", ["dynamic", "dynamic_cache"])
cached = pytest.mark.parametrize("kind", CACHED)
floats = pytest.mark.parametrize("formats", [FP32, FP16, BF16], ids=str)
bools = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def make(kind, *args, **options):
    return getattr(scenes, kind)(*args, **options)


# Heads and lengths


@kinds
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 32])
def test_grouped_queries(kind, group, rng):
    for kv_heads, seqlen in itertools.product((1, 3), (1, 5)):
        check(any_kind(kind, rng, FP32, 17, seqlen, heads=group * kv_heads, kv_heads=kv_heads, dim=40))


@kinds
@floats
def test_as_many_key_heads_as_query_heads(kind, formats, rng):
    """num_kv_heads 0 means num_heads."""
    for seqlen in (1, 6):
        check(any_kind(kind, rng, formats, 9, seqlen, heads=5, kv_heads=None, dim=24))


@kinds
@bools
@pytest.mark.parametrize("seqlen", [0, 1, 2, 5, 33, 70, 200])
def test_lengths(kind, causal, seqlen, rng):
    for past in (0, 1, 40):
        check(any_kind(kind, rng, FP32, past, seqlen, is_causal=causal, dim=32))


@kinds
@floats
def test_long_prefill_and_long_past(kind, formats, rng):
    for past, seqlen in ((0, 150), (300, 1), (260, 7)):
        check(any_kind(kind, rng, formats, past, seqlen, batch=1) if "static" in kind else
              make(kind, rng, formats, [(past, seqlen), (3, 1)]))  # fmt: skip


SPLIT = {
    "plain": {},
    "masked": {"is_causal": False},
    "alibi": {"is_alibi": True},
    "sinks": {"sinks": np.array([3, -3, 0, 9], np.float32)},
    "near": {"window": (100, -1)},
    "far": {"window": (3000, -1), "softcap": 5.0},
}


@kinds
@pytest.mark.parametrize("options", SPLIT.values(), ids=SPLIT)
def test_long_contexts(kind, options, rng):
    """Longer than what one piece of work takes, so that parts are put together."""
    for past, seqlen in ((4000, 1), (2500, 5), (1500, 40)):
        if "static" in kind:
            call = make(kind, rng, FP32, past, seqlen, dim=16, batch=1, **options)
        else:
            call = make(kind, rng, FP32, [(0, 1), (past, seqlen), (600, 1)], dim=16, **options)
            if not options.get("is_causal", True):
                call = call.but(attn_mask=scenes.dynamic_mask(rng, call), decoding_batches=2)
        check(call)


@bools
@pytest.mark.parametrize("past", [-1, -2, -5])
def test_fewer_keys_than_queries(causal, past, rng):
    """Queries that see nothing give zeros; the last of five queries sees every key."""
    options = {"is_causal": causal, "dim": 16}
    output, lse = check(scenes.static(rng, FP32, past, 5, **options))
    blind = -past if causal else (5 if past == -5 else 0)
    assert not output[:, :blind].any()
    assert (lse[:, :blind] == -np.inf).all()
    assert np.isfinite(lse[:, blind:]).all()
    check(scenes.dynamic(rng, FP32, [(past, 5), (3, 2), (past, -past), (0, 0)], **options))


EMPTY = {
    "no_sequences": {"batch": 0},
    "no_queries": {"seqlen": 0},
    "nothing": {"batch": 0, "seqlen": 0, "past": 0},
    "no_tokens": {"seqlen": 0, "past": 0},
}


@statics
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
def test_static_with_little_to_do(kind, sizes, rng):
    check(make(kind, rng, **sizes))
    check(make(kind, rng, **sizes, is_alibi=True))


@dynamics
@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(5, 0), (0, 0)], [(0, 0), (0, 3)], [(0, 1)]], ids=str)
def test_dynamic_with_little_to_do(kind, lengths, rng):
    check(make(kind, rng, FP32, lengths))
    check(make(kind, rng, FP32, lengths, is_alibi=True))


@dynamics
@bools
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_decoding_batches(kind, causal, alibi, rng):
    """The first sequences see their whole context, whatever their lengths."""
    lengths = [(2, 3), (0, 1), (5, 4), (0, 6)]
    for decoding in range(len(lengths) + 1):
        check(make(kind, rng, FP32, lengths, decoding=decoding, is_causal=causal, is_alibi=alibi, dim=24))
        for form in (np.int64, np.array):
            check(make(kind, rng, FP32, lengths, decoding=form(decoding), dim=24))


# Bias


@kinds
@bools
@pytest.mark.parametrize("heads", [1, 2, 6, 12])
def test_alibi(kind, causal, heads, rng):
    for seqlen in (1, 9):
        check(any_kind(kind, rng, FP32, 30, seqlen, heads=heads, kv_heads=None, is_alibi=True,
                       is_causal=causal, dim=16))  # fmt: skip


def test_alibi_of_fewer_keys_than_queries(rng):
    check(scenes.static(rng, FP32, -2, 5, is_alibi=True, is_causal=False))
    check(scenes.dynamic(rng, FP32, [(-2, 5), (-3, 3)], is_alibi=True, is_causal=False))


def test_alibi_of_far_tokens(rng):
    """In float16 the distance itself would be rounded from 2048 on."""
    for formats in (FP16, FP32):
        for kind in ("dynamic", "dynamic_cache"):
            check(make(kind, rng, formats, [(3000, 2)], heads=8, kv_heads=1, dim=8, is_alibi=True))


STATIC_MASKS = [
    "queries", "one",
    "heads queries", "one queries", "heads one", "one one",
    "batch heads queries", "batch one queries", "one heads queries", "batch heads one", "one one one",
    "batch one one",
]  # fmt: skip
mask_types = pytest.mark.parametrize("dtype", [None, bool], ids=["additive", "boolean"])


@statics
@mask_types
@pytest.mark.parametrize("axes", STATIC_MASKS)
def test_static_masks(kind, dtype, axes, rng):
    for seqlen, pad, formats in ((1, 3, FP32), (6, 0, FP32), (6, 9, FP16)):
        call = make(kind, rng, formats, 11, seqlen, batch=3, dim=16)
        sizes = {"batch": 3, "heads": 4, "queries": seqlen, "one": 1}
        shape = [sizes[axis] for axis in axes.split()]
        check(call.but(attn_mask=scenes.static_mask(rng, call, shape, dtype, pad)))


@dynamics
@mask_types
@pytest.mark.parametrize("heads", [None, 1, 4], ids="heads_{}".format)
def test_dynamic_masks(kind, dtype, heads, rng):
    for formats, pad, decoding in ((FP32, 0, 0), (FP16, 5, 3), (BF16, 1, 7)):
        call = make(kind, rng, formats, decoding=decoding, dim=16)
        check(call.but(attn_mask=scenes.dynamic_mask(rng, call, heads, dtype, pad)))


@kinds
@mask_types
@bools
def test_masks_alibi_and_causal_add_up(kind, dtype, causal, rng):
    call = any_kind(kind, rng, FP32, 12, 9, is_alibi=True, is_causal=causal, window=(10, -1), dim=24)
    mask = (
        scenes.static_mask(rng, call, (4, 9), dtype, 2)
        if "static" in kind
        else scenes.dynamic_mask(rng, call, 4, dtype, 2)
    )
    check(call.but(attn_mask=mask))


@kinds
@pytest.mark.parametrize("formats", [FP16, BF16], ids=str)
def test_float32_masks_of_16_bit_queries(kind, formats, rng):
    """Biases of which the data's type would keep a few bits."""
    for seqlen in (1, 9):
        call = any_kind(kind, rng, formats, 40, seqlen, dim=16)
        masks = scenes.static_mask if "static" in kind else scenes.dynamic_mask
        mask = masks(rng, call, (4, seqlen) if "static" in kind else 4, np.float32, 3)
        for bias in (0, -4096):
            check(call.but(attn_mask=mask + np.float32(bias)), usual=False)


@kinds
@mask_types
def test_masks_that_hide_everything(kind, dtype, rng):
    """Zeros, and -inf as the log of their sum."""
    call = any_kind(kind, rng, FP16, 5, 3)
    columns = scenes.context(call) if "static" in kind else call["kvstarts"][-1]
    rows = call["query"].shape[-3]
    mask = np.zeros((rows, columns), bool) if dtype else np.full((rows, columns), -np.inf, np.float16)
    output, lse = check(call.but(attn_mask=mask))
    assert not output.any()
    assert (lse == -np.inf).all()


@kinds
@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0), (4, 3, 0), (1, 0, 2, 3)], ids=str)
def test_masks_without_elements_are_no_masks(kind, shape, rng):
    call = any_kind(kind, rng)
    expected = call.copy().run()
    assert_same(call.but(attn_mask=np.zeros(shape, np.float32)).run(), expected)


@kinds
@pytest.mark.parametrize("form", ["strided", "broadcast", "read_only", "backwards", "unaligned"])
def test_forms_of_masks(kind, form, rng):
    for dtype in (np.float32, bool):
        call = any_kind(kind, rng, FP32, 4, 5, dim=16)
        static = "static" in kind
        mask = (
            scenes.static_mask(rng, call, (4, 5), dtype)
            if static
            else scenes.dynamic_mask(rng, call, 4, dtype)
        )
        if form == "strided":
            mask = (
                np.concatenate([mask, mask, mask], -1)
                .swapaxes(0, 1)
                .copy()
                .swapaxes(0, 1)[..., : mask.shape[-1]]
            )
        elif form == "broadcast":
            mask = np.broadcast_to(mask[:1], mask.shape)
        elif form == "read_only":
            mask.flags.writeable = False
        elif form == "backwards":
            mask = mask[::-1, ::-1].copy()[::-1, ::-1]
        else:
            mask = carve(mask, offset=1)[0]
        check(call.but(attn_mask=mask))


# Beyond the specification

WINDOWS = [(0, 0), (3, -1), (-1, 2), (5, 1), (0, -1), (-1, 0), (1000, 1000), (40, 0), (2**62, 2**62)]


@kinds
@bools
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(kind, causal, window, rng):
    for past, seqlen in ((50, 1), (3, 40)):
        check(any_kind(kind, rng, FP32, past, seqlen, window=window, is_causal=causal, dim=16))


def test_windows_that_see_no_key(rng):
    """With fewer keys than queries, or a mask that hides what the window shows."""
    for window in ((0, 0), (2, 0), (0, 1)):
        check(scenes.static(rng, FP32, -3, 5, window=window, is_causal=False))
        check(scenes.dynamic(rng, FP32, [(-3, 5), (4, 1)], window=window, is_causal=False))


@kinds
def test_windows_hold_for_decoding_batches(kind, rng):
    if "static" not in kind:
        check(make(kind, rng, FP32, window=(2, -1), decoding=4))
        check(make(kind, rng, FP32, window=(4, 1), decoding=7))


BEYOND = {
    "scale": {"softmax_scale": 0.3},
    "scale_1": {"softmax_scale": 1},
    "scale_small": {"softmax_scale": np.float32(1e-3)},
    "softcap": {"softcap": 2.0},
    "softcap_large": {"softcap": 50},
    "softcap_small": {"softcap": 1e-3},
    "softcap_and_scale": {"softcap": 3.0, "softmax_scale": 0.5},
    "list_of_a_window": {"window": [4, 0]},
}


@kinds
@pytest.mark.parametrize("options", BEYOND.values(), ids=BEYOND)
def test_scale_and_softcap(kind, options, rng):
    for seqlen in (1, 9):
        check(any_kind(kind, rng, FP32, 20, seqlen, **options))
    check(any_kind(kind, rng, BF16, 20, 3, **options))


@kinds
@pytest.mark.parametrize("dtype", FLOATS)
def test_sinks(kind, dtype, rng):
    for formats, seqlen in ((FP32, 1), (FP32, 9), (FP16, 2)):
        sinks = scenes.normal(rng, 6, dtype)
        sinks[:3] = [8, -40, 100]
        check(any_kind(kind, rng, formats, 20, seqlen, heads=6, sinks=sinks))


@kinds
def test_a_sink_of_minus_infinity_is_none(kind, rng):
    check(any_kind(kind, rng, FP32, sinks=np.full(4, -np.inf, np.float32)))


def test_sinks_of_rows_without_keys(rng):
    """Zeros, and the sink as the log of the sum."""
    sinks = np.array([0.5, -3, 70, 0], np.float32)
    output, lse = check(scenes.static(rng, FP32, -4, 6, heads=4, sinks=sinks))
    assert not output[:, :4].any()
    assert (lse[:, :4] == sinks).all()
    check(scenes.dynamic(rng, FP32, [(-4, 6), (-2, 2)], sinks=sinks))


def everything(rng, kind, formats, past, seqlen, causal=True):
    """A call with all there is beside each other."""
    call = any_kind(kind, rng, formats, past, seqlen, heads=6, is_alibi=True, is_causal=causal,
                    softcap=4.0, softmax_scale=0.2, window=(past, 1),
                    sinks=np.linspace(-2, 2, 6, dtype=np.float32))  # fmt: skip
    if "static" in kind:
        return call.but(attn_mask=scenes.static_mask(rng, call, (6, seqlen)))
    return call.but(attn_mask=scenes.dynamic_mask(rng, call, 6))


@kinds
@bools
def test_everything_together(kind, causal, rng):
    for past, seqlen in ((40, 1), (8, 20)):
        check(everything(rng, kind, FP32, past, seqlen, causal))


@kinds
def test_lse_changes_nothing(kind, rng):
    for call in (any_kind(kind, rng, FP16, 9, 4), everything(rng, kind, FP32, 9, 4)):
        output = call.copy().run()
        assert isinstance(output, np.ndarray)
        assert_same(output, call.run(return_lse=True)[0])


# Formats, layouts, modes


@cached
@pytest.mark.parametrize("formats", [BF16, *MIXED, INT8, INT4, *QUANTIZED, *ODD_GROUPS], ids=str)
def test_formats(kind, formats, rng):
    """Single tokens and longer runs; several groups a head, and one."""
    dim = max(formats.dims) if formats in ODD_GROUPS else 64
    for seqlen in (1, 19):
        check(any_kind(kind, rng, formats, 21, seqlen, dim=dim))
    check(any_kind(kind, rng, formats, 5, 2, dim=formats.group, heads=3, kv_heads=1))


@pytest.mark.slow
@pytest.mark.parametrize("t1", FLOATS)
@pytest.mark.parametrize("bit", [8, 4])
@pytest.mark.parametrize("t3", FLOATS)
def test_all_quantized_formats(t1, bit, t3, rng):
    for group in (2, 4, 8, 16, 32, 64, 128):
        formats = scenes.Formats(t1, "int8", t3, bit, group)
        for kind, layout in (("static_cache", 1), ("dynamic_cache", 3)):
            for dim in (128, group):
                check(any_kind(kind, rng, formats, 21, 1, dim=dim, layout=layout))
                check(any_kind(kind, rng, formats, 3, 19, dim=dim, layout=layout))


@pytest.mark.slow
@pytest.mark.parametrize("t1", FLOATS)
@pytest.mark.parametrize("t2", FLOATS)
def test_all_float_formats(t1, t2, rng):
    for kind, dim in itertools.product(CACHED, (1, 17, 64, 128)):
        for seqlen in (1, 19):
            check(any_kind(kind, rng, scenes.Formats(t1, t2), 30, seqlen, dim=dim))


@pytest.mark.parametrize("formats", [FP16, INT8], ids=str)
@pytest.mark.parametrize("layout", range(4), ids="layout{}".format)
@pytest.mark.parametrize("mode", [0, 1], ids=["offsets", "pages"])
def test_dynamic_layouts(formats, layout, mode, rng):
    for dim in (24, 64):
        check(scenes.dynamic_cache(rng, formats, layout=layout, mode=mode, dim=dim, page_size=7))


@pytest.mark.parametrize("formats", [FP16, INT8], ids=str)
@pytest.mark.parametrize("layout", range(2), ids="layout{}".format)
def test_static_layouts(formats, layout, rng):
    for past, seqlen in ((0, 3), (20, 1), (9, 8)):
        check(scenes.static_cache(rng, formats, past, seqlen, layout=layout))


@pytest.mark.parametrize("formats", [FP32, INT8, INT4], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 128, 2**40])
def test_page_sizes(formats, page_size, rng):
    lengths = [(0, 5), (35, 1), (3, 0), (0, 0), (16, 16), (130, 1), (2, 1)]
    if page_size == 2**40:
        lengths = lengths[:1]
    check(scenes.dynamic_cache(rng, formats, lengths, page_size=page_size))


def test_codes_in_bytes_without_sign(rng):
    """int4 in uint8 holds what int4 in int8 holds."""
    call = scenes.dynamic_cache(rng, INT4)
    unsigned = call.copy().but(cache=call["cache"].copy().view(np.uint8))
    assert_same(unsigned.run(), call.run())
    assert_same(unsigned["cache"].view(np.int8), call["cache"])


HEAD_SIZES = [1, 5, 8, 17, 64, 80, 128, 160]


@kinds
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_head_sizes(kind, dim, rng):
    for formats, seqlen in itertools.product((FP32, FP16), (1, 9)):
        check(any_kind(kind, rng, formats, 13, seqlen, dim=dim, heads=4, kv_heads=2))


@cached
@pytest.mark.parametrize("dim", [8, 72, 80, 128, 160])
def test_head_sizes_of_codes(kind, dim, rng):
    for seqlen in (1, 9):
        check(any_kind(kind, rng, INT8, 13, seqlen, dim=dim))


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (17, 5), (1, 160), (80, 1), (5, 17)], ids=str)
def test_values_of_another_size_than_keys(dims, rng):
    dim, value_dim = dims
    for formats, seqlen in itertools.product((FP32, FP16), (1, 9)):
        for kind in ("static", "dynamic"):
            check(any_kind(kind, rng, formats, 13, seqlen, dim=dim, value_dim=value_dim))


# Forms of arrays


def elements_apart(array):
    return np.repeat(array[..., ::-1], 2, -1)[..., ::-2]


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


ARRAYS = ("query", "key", "value", "current_key", "current_value")


@kinds
@pytest.mark.parametrize(
    "form",
    [fused, heads_first, backwards, elements_apart, guarded, at_an_odd_address, read_only],
    ids=lambda f: f.__name__,
)
def test_forms_of_inputs(kind, form, rng):
    for seqlen in (1, 6):
        call = any_kind(kind, rng, FP16, 7, seqlen, dim=24)
        check(call.but(**{name: form(call[name]) for name in ARRAYS if name in call.inputs}))
        check(call.but(query=form(call["query"])))


@cached
@pytest.mark.parametrize("formats", [FP16, INT8], ids=str)
@pytest.mark.parametrize("layout", range(2), ids="layout{}".format)
@pytest.mark.parametrize("flip", [None, 0, 1, 2, 3])
def test_caches_of_any_strides(kind, formats, layout, flip, rng, poison):
    call = any_kind(kind, rng, formats, 7, 2, layout=layout, dim=24)
    names = [name for name in ("cache", "scale") if call[name] is not None]
    views = {name: poison.around(call[name], 1, flip) for name in names}
    expected = call.expected()
    moved = call.but(**views)
    scenes.assert_near(moved.run(), expected[0], scenes.TOLERANCE["float16"])
    for name, after in zip(("cache", "scale"), expected[2:], strict=True):
        assert_same(moved[name], after, name)


@dynamics
def test_forms_of_index_tensors(kind, rng):
    call = make(kind, rng, dim=8)
    expected = call.copy().run()
    names = [name for name in ("seqstarts", "kvstarts", "start_pos") if name in call.inputs]
    for form in (np.ndarray.tolist, lambda a: a.astype(np.int32), lambda a: np.repeat(a, 2)[::2]):
        changed = call.copy().but(**{name: form(call[name]) for name in names})
        assert_same(changed.run(), expected)


@dynamics
@pytest.mark.parametrize("hint", [None, 1000, np.int64(100), np.array(100), 2**70], ids=repr)
def test_hints_change_nothing(kind, hint, rng):
    call = make(kind, rng, dim=8)
    expected = call.copy().run()
    assert_same(call.but(max_seqlen=hint, max_kvlen=hint).run(), expected)


@pytest.mark.parametrize("start", [3, np.int32(3), np.array(3), np.array([3])], ids=repr)
def test_forms_of_a_single_start_pos(start, rng):
    check(scenes.static_cache(rng, past=3).but(start_pos=start))


# Outputs given by the caller


@kinds
@pytest.mark.parametrize("flip", [None, 0, 1])
def test_out_inside_a_larger_array(kind, flip, rng, poison):
    for seqlen, formats in ((1, FP32), (9, FP16)):
        call = any_kind(kind, rng, formats, 9, seqlen, dim=17)
        expected = call.copy().run(return_lse=True)
        flips = flip, None if flip == expected[1].ndim - 1 else flip
        views = [poison.around(poison.like(array), i, flips[i]) for i, array in enumerate(expected)]
        call.run(return_lse=True, out=tuple(views))
        for view, right in zip(views, expected, strict=True):
            assert_same(view, right)


@kinds
def test_out_of_rows_that_see_nothing(kind, rng, poison):
    """Every element is written, zeros too."""
    call = any_kind(kind, rng, FP32, 3, 4)
    columns = scenes.context(call) if "static" in kind else call["kvstarts"][-1]
    call = call.but(attn_mask=np.full((call["query"].shape[-3], columns), -np.inf, np.float32))
    out = poison.like(call["query"]), poison.like(call["query"][..., 0].copy())
    call.run(return_lse=True, out=out)
    assert not out[0].any()
    assert (out[1] == -np.inf).all()


# Many things at once


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_anything(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    formats = pick(FP32, FP16, BF16, INT8, INT4)
    kv_heads = pick(1, 2, 3)
    options = {
        "kv_heads": kv_heads,
        "heads": kv_heads * pick(1, 2, 5),
        "dim": 32 * pick(1, 2, 3),
        "is_causal": pick(True, False),
        "is_alibi": pick(True, False),
        "window": pick((-1, -1), (int(rng.integers(0, 50)), int(rng.integers(-1, 9)))),
        "softcap": pick(0.0, 5.0),
        "softmax_scale": pick(None, 0.05),
    }
    lengths = [(int(rng.integers(0, 90)), int(rng.integers(0, 40))) for _ in range(rng.integers(0, 6))]
    for kind in ("dynamic", "dynamic_cache"):
        decoding = int(rng.integers(0, len(lengths) + 1))
        call = make(kind, rng, formats, lengths, decoding=decoding, **options)
        check(call)
        dtype = pick(None, bool)
        check(call.but(attn_mask=scenes.dynamic_mask(rng, call, pick(None, 1, options["heads"]), dtype, 3)))
    for kind in ("static", "static_cache"):
        check(make(kind, rng, formats, *pick(*lengths, (3, 2)), batch=pick(1, 3), **options))
