"""What random calls do not say of the operators: NaN, the error of codes, full caches."""

import ml_dtypes
import numpy as np
import pytest
import scenes
from hypothesis import given
from hypothesis import strategies as st
from scenes import DTYPES, MOVED, ODD_GROUPS, QUANTIZED, QUICK_QUANTIZED, Formats, assert_same, check, raw

NARROWED = Formats("fp32", "fp16")
INT8 = Formats("fp16", "int8", "fp32", 8, 8, (24, 40))
PASS_THROUGH = MOVED[-1]
FEW = [NARROWED, PASS_THROUGH, QUANTIZED[8], QUANTIZED[2]]

few_formats = pytest.mark.parametrize("formats", FEW, ids=str)
kinds = pytest.mark.parametrize("kind", ["static", "dynamic"])


def scene(kind, rng, formats, **choices):
    if kind == "dynamic":
        choices = {"layout": 2, "mode": 1, **choices}
    return getattr(scenes, kind)(rng, formats, **choices)


@pytest.mark.parametrize("formats", QUICK_QUANTIZED[::4], ids=str)
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
        return [
            raw(array).reshape(-1, width * array.itemsize)
            for array, width in zip(results, widths, strict=True)
        ]

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


@few_formats
def test_a_full_cache(formats, rng):
    full = scenes.static(rng, formats, start=3, seqlen=2)
    rows = full["cache"].shape[3]
    check(full.but(start_pos=rows - 2))


@kinds
def test_one_array_may_be_key_and_value(kind, rng):
    plain = scene(kind, rng, INT8)
    check(plain.but(current_value=plain["current_key"]))


@kinds
def test_a_broadcast_key(kind, rng):
    plain = scene(kind, rng, NARROWED, dim=24)
    shape = plain["current_key"].shape
    check(plain.but(current_key=np.broadcast_to(np.arange(24, dtype=np.float32), shape)))


@pytest.mark.parametrize(
    "known",
    [QUICK_QUANTIZED, pytest.param(QUANTIZED + ODD_GROUPS, marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
@given(st.integers(0, 2**32 - 1).map(np.random.default_rng), st.data())
def test_quantization_error(known, rng, data):
    """At most half a step, and the roundings of quotient, stored scale, product and result."""
    formats = data.draw(st.sampled_from(known))
    scene = scenes.static(rng, formats, start=0, seqlen=5)
    small = np.clip(scene["current_key"].astype(np.float64), -3e4, 3e4).astype(DTYPES[formats.t1])
    key, _ = scene.but(current_key=small).run()
    groups = small.astype(np.float64).reshape(-1, formats.group)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    t1, t3 = (ml_dtypes.finfo(DTYPES[t]) for t in (formats.t1, formats.t3))
    eps1, eps3 = float(t1.eps), float(t3.eps)
    step = np.maximum(largest / {8: 127, 4: 7}[formats.bit], 1e-5) * (1 + eps1)
    roundings = (eps1 + eps3) * (largest + step) + 64 * float(t3.smallest_subnormal)
    error = np.abs(key.astype(np.float64).reshape(groups.shape) - groups)
    assert (error <= step / 2 + roundings).all()
