"""A copy of a paged cache, deep or pickled, has memory of its own."""

import copy
import pickle

import numpy as np
import pytest
from paged_scenes import KINDS, LAYERS, paged
from scenes import assert_same

COPIES = [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]


def go_on(cache, states):
    """Complete the step that layer 0 is in, and make another one; what attention says."""
    results = []
    for layers in (range(1, LAYERS), range(LAYERS)):
        for i in layers:
            cache.update(*states, i)
        results += [cache.attend(states[0], i) for i in range(LAYERS)]
    return results


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_copy_goes_on_by_itself(copied, kind):
    """Made in a step, between two layers; the step after it copies blocks that rows share."""
    states = np.random.default_rng(0).standard_normal((2, 2, 2, 3, 16)).astype(KINDS[kind][0])
    cache = paged(kind)
    for i in range(LAYERS):
        cache.update(*states, i)
        cache.attend(states[0], i)
    cache.select([0, 0])
    cache.update(*states, 0)
    again, before = copied(cache), cache.cache.copy()
    results = go_on(again, -states)
    assert_same(cache.cache, before)
    for got, expected in zip(go_on(cache, -states), results, strict=True):
        assert_same(got, expected)
    assert_same(cache.cache, again.cache)
    assert again.cache is again.store.cache
