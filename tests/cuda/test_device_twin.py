"""kvkit_cuda on a GPU, or on the machine for PTX: the scenes of the CPU against oracles and the twin."""

import attention_scenes
import numpy as np
import pytest
import scenes
from attention_scenes import BF16, FP16, INT4, INT8, KINDS, MIXED, PLAIN, QUANTIZED, TOLERANCE, assert_near
from numba import cuda
from scenes import ALL_FORMATS, assert_all_same

import kvkit
from kvkit.tools.vectors.calls import mask_rows
from kvkit.tools.vectors.draws import normal
from kvkit_cuda.device_runtime import device


def by_twin(call):
    """Return (output, lse) by the CPU."""
    return call.copy().run(kvkit, return_lse=True)


def check(call):
    """Check results against the oracle and the CPU, and that a second run has the same bits."""
    twin, twin_lse = by_twin(call)
    again = call.copy()
    got, lse = attention_scenes.check(call)
    near_twin(got, lse, twin, twin_lse)
    for one, other in zip((got, lse), again.run(return_lse=True), strict=True):
        assert one.tobytes() == other.tobytes()


def near_twin(got, lse, twin, twin_lse):
    tolerance = TOLERANCE[str(got.dtype)]
    assert_near(got, twin.astype(np.float64), tolerance, "beside the twin, output")
    assert_near(lse, twin_lse.astype(np.float64), tolerance, "beside the twin, lse")


# The cache


@pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)
def test_key_value_cache(formats, rng):
    for i, dim in enumerate(formats.dims):
        for scene in (
            scenes.static(rng, formats, i % 2, dim=dim, repeat=1 + i % 2),
            *(scenes.dynamic(rng, formats, layout, (i + layout) % 2, dim=dim) for layout in range(4)),
        ):
            twin = scene.copy()
            by_cpu = *twin.run(kvkit), twin["cache"], twin["scale"]
            expected, got = scene.oracle(), scene.results()
            assert_all_same(got, expected)
            assert_all_same(got, by_cpu)


def test_results_stay_on_the_device(rng):
    scene = scenes.static(rng, ALL_FORMATS[0])
    expected = scene.oracle()
    names = [name for name in ("current_key", "current_value", "cache", "scale") if scene[name] is not None]
    given = {name: cuda.to_device(scene[name]) for name in names}
    key, value = scene.but(**given).run(stream=cuda.stream())
    cuda.synchronize()
    scale = given["scale"].copy_to_host() if "scale" in given else None
    got = key.copy_to_host(), value.copy_to_host(), given["cache"].copy_to_host(), scale
    assert_all_same(got, expected)


def test_page_tables_on_the_device(rng):
    """They are checked there: a right one gives the oracle's results, a wrong one the twin's error."""
    lengths = [(int(past), int(seqlen)) for past, seqlen in rng.integers(1, 90, (40, 2))]
    scene = scenes.dynamic(rng, ALL_FORMATS[0], 0, 1, lengths=lengths, page_size=4)
    table = scene["cachestarts"]
    for b, seen in ((7, 0), (39, 11)):  # what the first sequence stores is read, or stored, by another
        broken = table.copy()
        broken[b, 0] = table[seen, scene["start_pos"][seen] // 4]
        with pytest.raises(kvkit.KvkitError) as expected:
            scene.but(cachestarts=broken).copy().run(kvkit)
        with pytest.raises(kvkit.KvkitError) as error:
            scene.but(cachestarts=cuda.to_device(broken)).run()
        assert str(error.value) == str(expected.value)
    expected = scene.oracle()
    key, value = scene.but(cachestarts=cuda.to_device(table)).run()
    assert_all_same((key, value, scene["cache"], scene["scale"]), expected)


# Attention


@pytest.mark.parametrize("formats", [*PLAIN.values(), *MIXED, INT4, *QUANTIZED], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_and_prefill(kind, formats, rng):
    if "cache" not in kind and formats.t1 != formats.t2:
        formats = PLAIN[formats.t1]
    for past, seqlen in ((0, 1), (300, 1), (7, 3), (100, 70)):
        check(attention_scenes.any_kind(kind, rng, formats, past, seqlen, heads=8, kv_heads=2))


@pytest.mark.parametrize("formats", [FP16, BF16, INT8], ids=str)
@pytest.mark.parametrize("dim", [16, 24, 80, 128, 192, 256])
@pytest.mark.parametrize("seqlen", [1, 40])
def test_options(formats, dim, seqlen, rng):
    kind = "dynamic_cache" if formats is INT8 else "dynamic"
    for options in (
        {"window": (50, -1)},
        {"is_causal": False, "window": (9, 5)},
        {"softcap": 8.0},
        {"is_alibi": True},
        {"sinks": normal(rng, 4, np.float32)},
    ):
        check(attention_scenes.any_kind(kind, rng, formats, 120, seqlen, dim=dim, **options))


@pytest.mark.parametrize("dtype", [np.float16, bool])
@pytest.mark.parametrize("seqlen", [1, 40])
def test_masks(dtype, seqlen, rng):
    call = attention_scenes.static(rng, FP16, 90, seqlen)
    call.inputs["attn_mask"] = mask_rows(rng, (2, 4, seqlen, 90 + seqlen), dtype)
    check(call)


@pytest.mark.parametrize("formats", [FP16, BF16, INT8], ids=str)
@pytest.mark.parametrize(("past", "seqlen"), [(5000, 1), (0, 1500), (6000, 200)])
def test_long_contexts(formats, past, seqlen, rng):
    """Split contexts and many tiles, beside the CPU twin."""
    lengths = [(past, seqlen), (past // 2, seqlen)]
    call = attention_scenes.dynamic_cache(rng, formats, lengths, 8, 2, 128, layout=3, page_size=48)
    twin, twin_lse = by_twin(call)
    got, lse = call.run(return_lse=True)
    near_twin(got, lse, twin, twin_lse)


def test_what_rows_do_not_see_does_not_matter(rng):
    call = attention_scenes.static(rng, FP16, 0, 200, batch=1)
    call["value"][0, 150:] = np.nan
    output = call.run()
    assert np.isfinite(output[:, :150].astype(np.float32)).all()
    assert np.isnan(output[:, 150:].astype(np.float32)).all()


def test_a_device_is_there():
    """These tests are for a GPU; in the simulator they only try themselves."""
    assert not device.SIMULATED
