"""A step that was cut off is taken back in all layers that had it, and nothing else is."""

import json
import shutil
import warnings

import numpy as np
import pytest
from folder_scenes import as_folder, random, watched
from quantized_cache_scenes import OPTIONS
from scenes import first_quick

from kvkit.cache import (
    Cache,
    DynamicCache,
    DynamicLayer,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

COUNTS = 50, 45, 1, 1  # tokens of the steps; windows move by more than themselves, and their stores shrink

WHOLE = [sum(COUNTS[:number]) for number in range(len(COUNTS) + 1)]  # tokens after so many steps


def layers_of(unused):
    made = [DynamicLayer(), SlidingWindowLayer(4), StaticSlidingWindowLayer(120, 4), StaticLayer(120)]
    made.append(QuantizedLayer(**OPTIONS | {"residual_length": 2}))
    if unused is not None:
        made.insert(unused, DynamicLayer())
    return made


def step(cache, number, used):
    """Run a step of a model that uses these layers; return their results."""
    results = []
    for i in used:
        got = cache.update(*random(np.float32, COUNTS[number], 10 * number + i, (4, 8)), i)
        results += [np.asarray(x).tobytes() for x in got]
    return results


def has_tokens(files):
    """Return whether any layer in these files has tokens."""
    said = [
        json.loads(data) for name, data in files.items() if name.startswith("layer") and name.endswith("json")
    ]
    return any("state" in about and about["state"]["length"] for about in said)


def reopened(folder, files):
    """Open these files in a new folder; return the cache and the warnings."""
    shutil.rmtree(folder, ignore_errors=True)
    as_folder(folder, files)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache = Cache.open(folder, keep=False)
    return cache, [str(each.message) for each in said]


@pytest.mark.parametrize("unused", first_quick([None, 5, 2, 0], 2))
def test_a_process_may_end_at_any_line_of_a_step(tmp_path, unused):
    """What opens is the cache from before the step or from after it, and goes on as if nothing had been."""
    cache = Cache(layers_of(unused))
    used = [i for i in range(len(cache)) if i != unused]
    cache.offload(tmp_path / "cache", only_non_sliding=False)
    found: list[int] = []  # whole steps in what opened, from the one that was going on
    for number in range(len(COUNTS) - 1):

        def opens(files, number=number):
            again, said = reopened(tmp_path / "crashed", files)
            lengths = {again.get_seq_length(i) for i in used}
            assert len(lengths) == 1
            whole = WHOLE.index(lengths.pop())
            expected = Cache(layers_of(unused))
            for i in range(whole):
                step(expected, i, used)
            assert step(again, whole, used) == step(expected, whole, used)
            assert bool(said) == (whole == 0 and has_tokens(files))
            again.close()
            found.append(whole - number)

        found.clear()
        watched(tmp_path / "cache", opens, lambda now=number: step(cache, now, used))
        assert found == sorted(found)
        # Whether a cache whose last layer is never used is amid its first step, only its next step tells.
        untold = {0: {0}, 1: {-1, 0, 1}} if unused == len(used) else {}
        assert set(found) == untold.get(number, {0, 1})
    cache.close()


def lengths_after_a_crash(folder):
    with Cache.open(shutil.copytree(folder, f"{folder}-crashed"), keep=False) as again:
        return [layer.get_seq_length() for layer in again.layers]


def test_layers_without_tokens_take_none_from_the_others(tmp_path):
    """Not when the cache moved to the folder with its first step, and not when it was closed and opened."""
    cache = DynamicCache(3)
    cache.update(*random(np.float32, 5), 0)
    cache.offload(tmp_path / "cache", keep=True)
    assert lengths_after_a_crash(tmp_path / "cache") == [5, 0, 0]
    cache.close()
    cache = DynamicCache(3)
    cache.offload(tmp_path / "other", keep=True)
    cache.update(*random(np.float32, 5), 0)
    cache.close()
    with Cache.open(tmp_path / "other"):
        assert lengths_after_a_crash(tmp_path / "other") == [5, 0, 0]


def test_a_layer_that_another_one_was_filled_after_is_not_amid_its_first_step(tmp_path):
    cache = DynamicCache(3, offload=tmp_path / "cache")
    for i in (0, 2):
        cache.update(*random(np.float32, 5), i)
    assert lengths_after_a_crash(tmp_path / "cache") == [5, 0, 5]
    cache.close()


def test_what_no_single_step_explains_is_kept(tmp_path):
    """As it was, and said, with what to do."""
    cache = DynamicCache(2, offload=tmp_path / "cache")
    for count in (4, 3):
        cache.update(*random(np.float32, count), 0)
    cache.update(*random(np.float32, 2), 1)
    with pytest.warns(UserWarning, match=r"layers hold \[7, 2\] tokens, .* crop them"):
        assert lengths_after_a_crash(tmp_path / "cache") == [7, 2]
    cache.close()


def test_context_of_another_kind_is_no_part_of_a_step(tmp_path):
    """A layer for what an encoder said, before the layers of the decoder."""
    cache = DynamicCache(3, offload=tmp_path / "cache")
    cache.update(*random(np.float32, 30), 0)
    for count in (2, 1):
        for i in (1, 2):
            if (count, i) != (1, 2):
                cache.update(*random(np.float32, count), i)
    with pytest.warns(UserWarning, match=r"layers hold \[30, 2, 2\] tokens"):
        assert lengths_after_a_crash(tmp_path / "cache") == [30, 2, 2]
    cache.close()
