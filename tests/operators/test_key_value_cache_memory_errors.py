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
