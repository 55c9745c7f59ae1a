"""Errors about where arrays lie, and about out=."""

import numpy as np
import pytest
import scenes
from refusals import (
    FLOAT,
    TENSORS,
    kinds,
    legal,
    refused,
)
from surroundings import carve

# Memory


@kinds
@pytest.mark.parametrize("name", ["cache", "scale"])
def test_read_only(kind, name):
    scene = legal(kind)
    scene[name].flags.writeable = False
    refused(scene, name)


@kinds
@pytest.mark.parametrize("name", ["cache", "scale"])
def test_last_axis_not_contiguous(kind, name):
    scene = legal(kind)
    refused(scene.but(**{name: np.repeat(scene[name], 2, -1)[..., ::2]}), name)
    refused(scene.but(**{name: scene[name][..., ::-1]}), name)


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
def test_cache_overlaps_scale(kind):
    scene = legal(kind)
    flat = scene["scale"].reshape(-1)
    cache = np.resize(flat, scene["cache"].nbytes // 4).view(np.int8).reshape(scene["cache"].shape)
    scale = cache.reshape(-1).view(np.float32)[: flat.size].reshape(scene["scale"].shape)
    refused(scene.but(cache=cache, scale=scale), "cache")


@kinds
@pytest.mark.parametrize("name", ["current_key", "current_value"])
def test_cache_overlaps_new_tokens(kind, name):
    scene = legal(kind, FLOAT, dim=24)
    cache = scene["cache"]
    inside = cache[:2, 1, 0, :2] if kind == "static" else cache[:5, 1, 0]
    assert inside.shape == scene[name].shape
    refused(scene.but(**{name: inside}), "cache")


# out=


def blank_outputs(scene):
    return tuple(np.full_like(array, 7) for array in scene.copy().run())


BAD_OUTPUTS = {
    "one_array": lambda key, value: key,
    "three_arrays": lambda key, value: (key, value, value.copy()),
    "none_in_it": lambda key, value: (key, None),
    "list_in_it": lambda key, value: (key, value.tolist()),
    "dtype": lambda key, value: (key.astype(np.float64), value),
    "other_float": lambda key, value: (key, value.astype(np.float32)),
    "rank": lambda key, value: (key, value[None]),
    "rows": lambda key, value: (key[:-1], value),
    "heads": lambda key, value: (key, np.repeat(value, 2, -2)),
    "dim": lambda key, value: (key[..., :-1].copy(), value),
    "last_axis": lambda key, value: (key, np.repeat(value, 2, -1)[..., ::2]),
    "folded": lambda key, value: (np.broadcast_to(key[..., :1, :], key.shape), value),
    "one_for_both": lambda key, value: (key, key),
    "key_overlaps_value": lambda key, value: (key, key[::-1]),
}


@kinds
@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_outputs(kind, case):
    scene = legal(kind)
    refused(scene, "out", out=BAD_OUTPUTS[case](*blank_outputs(scene)))


@kinds
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_read_only_outputs(kind, which):
    scene = legal(kind)
    out = blank_outputs(scene)
    out[which].flags.writeable = False
    refused(scene, "out", out=out)


@kinds
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_outputs_that_overlap(kind, name, which):
    """With caches, and with new tokens that still are to be read when outputs are written."""
    scene = legal(kind)
    out = list(blank_outputs(scene))
    size = max(out[which].nbytes, scene[name].nbytes)
    memory = np.zeros(size + 8, np.uint8)
    moved = memory[: scene[name].nbytes].view(scene[name].dtype).reshape(scene[name].shape)
    moved[...] = scene[name]
    out[which] = memory[: out[which].nbytes].view(out[which].dtype).reshape(out[which].shape)
    refused(scene.but(**{name: moved}), ("out", "cache", "scale"), out=tuple(out))


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


def test_refusal_leaves_surroundings_alone():
    scene = legal("dynamic")
    views = {name: carve(scene[name], 1) for name in TENSORS}
    refused(scene.but(**{name: view for name, (view, _) in views.items()}, max_kvlen=1), "max_kvlen")
    for _, untouched in views.values():
        untouched()
