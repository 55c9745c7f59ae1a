"""Both operators against the oracle, by bits: outputs, and every byte of cache and scale."""

import itertools

import numpy as np
import pytest
import scenes
from scenes import ALL_FORMATS, MOVED, QUANTIZED, Formats, assert_all_same, assert_same, check
from strides import strided

FP32 = MOVED[0]
NARROWED = Formats("fp32", "fp16")
INT8 = Formats("fp16", "int8", "fp32", 8, 8, (24, 40))
INT4 = Formats("fp32", "int8", "fp16", 4, 8, (24, 40))
PASS_THROUGH = MOVED[-1]
assert NARROWED in MOVED
FEW = [NARROWED, PASS_THROUGH, QUANTIZED[8], QUANTIZED[2]]

dynamic_layouts = pytest.mark.parametrize("layout", range(4), ids="layout{}".format)
static_layouts = pytest.mark.parametrize("layout", range(2), ids="layout{}".format)
modes = pytest.mark.parametrize("mode", [0, 1], ids=["offsets", "pages"])
few_formats = pytest.mark.parametrize("formats", FEW, ids=str)
kinds = pytest.mark.parametrize("kind", ["static", "dynamic"])


def scene(kind, rng, formats, **choices):
    if kind == "dynamic":
        choices = {"layout": 2, "mode": 1, **choices}
    return getattr(scenes, kind)(rng, formats, **choices)


# Formats, layouts, modes


def every_place():
    """Each format in each layout and mode: the quick suite has all places of a few, one of others."""
    for i, formats in enumerate(ALL_FORMATS):
        for layout, mode in itertools.product(range(4), range(2)):
            quick = formats in FEW or 2 * layout + mode == i % 8
            marks = () if quick else pytest.mark.slow
            name = f"{formats}-layout{layout}-{'pages' if mode else 'offsets'}"
            yield pytest.param(formats, layout, mode, id=name, marks=marks)


@pytest.mark.parametrize(("formats", "layout", "mode"), list(every_place()))
def test_dynamic(formats, layout, mode, rng):
    for dim in formats.dims:
        check(scenes.dynamic(rng, formats, layout, mode, dim=dim))


@pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)
@static_layouts
def test_static(formats, layout, rng):
    for dim in formats.dims:
        check(scenes.static(rng, formats, layout, dim=dim))


@pytest.mark.parametrize("formats", [f for f in QUANTIZED if f.bit == 4 and f.group == 8], ids=str)
@kinds
def test_int4_in_uint8(formats, kind, rng):
    signed = scene(kind, rng, formats)
    unsigned = signed.copy().but(cache=signed["cache"].copy().view(np.uint8))
    assert_all_same(unsigned.results(), signed.oracle())
    assert unsigned["cache"].dtype == np.uint8


@few_formats
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("repeat", [1, 2, 3])
@kinds
def test_heads_and_repeats(formats, heads, repeat, kind, rng):
    for layout in range(2):
        check(scene(kind, rng, formats, layout=layout, heads=heads, repeat=repeat))


@few_formats
@dynamic_layouts
@pytest.mark.parametrize("page_size", [1, 2, 7, 128, 1000])
def test_page_sizes(formats, layout, page_size, rng):
    lengths = [(0, 5), (3, 1), (0, 0), (9, 6), (7, 0)]
    check(scenes.dynamic(rng, formats, layout, 1, lengths=lengths, page_size=page_size))


# Infinities and NaNs


@pytest.mark.parametrize("formats", QUANTIZED[::5], ids=str)
@kinds
def test_nan_and_inf_stay_in_their_group(formats, kind, rng):
    """What becomes of their group is open; every other byte is as without them."""
    plain = scene(kind, rng, formats)

    def with_groups(contents):
        marked = plain.copy()
        groups = marked["current_key"].reshape(-1, formats.group)
        groups[::3] = np.resize(np.array(contents), groups[::3].shape)
        return marked

    def by_group(results):
        widths = (formats.group, formats.group, formats.group * formats.bit // 8, 1)
        return [array.reshape(-1, width) for array, width in zip(results, widths, strict=True)]

    results = by_group(with_groups([np.nan, 1, np.inf, -np.inf, 2]).results())
    answers = [by_group(with_groups(contents).oracle()) for contents in ([97, 0], [0, 13])]
    for got, one, other in zip(results, *answers, strict=True):
        open_groups = (one != other).any(axis=1)
        assert_same(got[~open_groups], one[~open_groups])
        assert open_groups.sum() in (0, (len(plain["current_key"].reshape(-1, formats.group)) + 2) // 3)


@pytest.mark.parametrize("formats", MOVED[:-1], ids=str)
@kinds
def test_nan_and_inf_are_kept(formats, kind, rng):
    plain = scene(kind, rng, formats, dim=40)
    key = plain["current_key"]
    key[...] = np.resize(np.array([np.nan, np.inf, -np.inf, 1.0]), key.shape)
    for got, expected in zip(plain.copy().results()[:3], plain.oracle()[:3], strict=True):
        assert np.array_equal(got.astype(np.float32), expected.astype(np.float32), equal_nan=True)


# Nothing to do

EMPTY = {
    "no_sequences": [],
    "only_empty_sequences": [(0, 0), (0, 0)],
    "only_loads": [(3, 0), (5, 0)],
    "only_new": [(0, 3), (0, 1)],
}


@few_formats
@modes
@pytest.mark.parametrize("lengths", EMPTY.values(), ids=EMPTY)
def test_dynamic_with_little_to_do(formats, mode, lengths, rng):
    check(scenes.dynamic(rng, formats, 1, mode, lengths=lengths))


@few_formats
@static_layouts
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"batch": 0}, id="no_sequences"),
        pytest.param({"seqlen": 0}, id="no_new_tokens"),
        pytest.param({"seqlen": 0, "start": 0}, id="no_tokens"),
        pytest.param({"start": 0}, id="no_past"),
        pytest.param({"batch": 0, "start": 0, "seqlen": 0}, id="nothing"),
    ],
)
def test_static_with_little_to_do(formats, layout, sizes, rng):
    check(scenes.static(rng, formats, layout, **sizes))


@few_formats
def test_a_full_cache(formats, rng):
    full = scenes.static(rng, formats, start=3, seqlen=2)
    rows = full["cache"].shape[3]
    check(full.but(start_pos=rows - 2))


# Index tensors

INDEX = ("seqstarts", "kvstarts", "cachestarts", "start_pos")


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def clipped_to_int32(array):
    return np.clip(array, -(2**31), 2**31 - 1).astype(np.int32)


def unaligned(array):
    buffer = np.zeros(array.nbytes + 1, np.uint8)
    moved = buffer[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


INDEX_FORMS = [strided, read_only, clipped_to_int32, np.asfortranarray, unaligned]


@few_formats
@modes
@pytest.mark.parametrize("form", INDEX_FORMS, ids=lambda form: form.__name__)
def test_forms_of_index_tensors(formats, mode, form, rng):
    plain = scenes.dynamic(rng, formats, 0, mode)
    check(plain.but(**{name: form(plain[name]) for name in INDEX}))


STARTS = [3, np.int32(3), np.int64(3), np.array(3), np.array([3]), np.array([3], np.int32)]


@pytest.mark.parametrize("start", STARTS, ids=repr)
def test_forms_of_a_single_start_pos(start, rng):
    check(scenes.static(rng, FP32, start=3).but(start_pos=start))


@pytest.mark.parametrize("hint", [None, 22, 23, np.int64(100), np.array(100), scenes.INT64_MAX], ids=repr)
def test_hints_change_nothing(hint, rng):
    check(scenes.dynamic(rng, FP32, 0, 1).but(max_seqlen=hint, max_kvlen=hint))


# Forms of the new keys and values


def part_of_fused_rows(array):
    """As a slice of rows that hold query, key and value side by side."""
    heads, dim = array.shape[-2:]
    fused = np.full((*array.shape[:-2], 5 * heads + 1, dim), 9, np.float32).astype(array.dtype)
    part = fused[..., 3 * heads : 4 * heads, :]
    part[...] = array
    return part


def heads_before_tokens(array):
    return np.ascontiguousarray(array.swapaxes(-3, -2)).swapaxes(-3, -2)


def last_axis_not_contiguous(array):
    return np.ascontiguousarray(array.swapaxes(-3, -1)).swapaxes(-3, -1)


def every_other_element(array):
    return np.repeat(array, 2, axis=-1)[..., ::2]


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1]


KEY_FORMS = [
    read_only,
    part_of_fused_rows,
    heads_before_tokens,
    last_axis_not_contiguous,
    every_other_element,
    backwards,
    unaligned,
]


@few_formats
@kinds
@pytest.mark.parametrize("form", KEY_FORMS, ids=lambda form: form.__name__)
def test_forms_of_current_key(formats, kind, form, rng):
    for layout in range(2):
        plain = scene(kind, rng, formats, layout=layout)
        check(plain.but(current_key=form(plain["current_key"]), current_value=form(plain["current_value"])))
        check(plain.but(current_key=form(plain["current_key"])))


@kinds
def test_one_array_may_be_key_and_value(kind, rng):
    plain = scene(kind, rng, INT8)
    check(plain.but(current_value=plain["current_key"]))


@kinds
def test_a_broadcast_key(kind, rng):
    plain = scene(kind, rng, NARROWED, dim=24)
    shape = plain["current_key"].shape
    check(plain.but(current_key=np.broadcast_to(np.arange(24, dtype=np.float32), shape)))
