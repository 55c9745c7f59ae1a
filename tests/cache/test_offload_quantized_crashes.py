"""A process may end at any line: the files of its quantized layers open to the last step that was whole."""

import copy
import os
import shutil
import signal
import sys
import warnings

import numpy as np
import pytest
from folder_scenes import as_folder, run, watched
from quantized_cache_scenes import (
    KINDS,
    OPTIONS,
    assert_alike_from_now_on,
    assert_same,
    do,
    feed,
    states,
)
from scenes import first_quick

from kvkit.cache import Cache, DynamicLayer, QuantizedLayer


def some_operations(rng, count):
    """Yield (name, argument) of calls that any layer takes; in the last quarter past is recorded."""
    batch, length = 2, 0
    for i in range(count):
        names = ["update", "update", "update", "crop", "reorder", "repeat", "reserve"]
        name = rng.choice(names) if i else "update"
        argument = int(rng.integers(0, 60))
        if i == 3 * count // 4:
            name, argument = "activate_past_recording", None
        elif name == "update":
            argument = int(rng.choice([0, 1, 1, 2, 7, 40]))
            length += argument
        elif name == "crop":
            argument = -(argument % (min(length, 20) + 1))
            length += argument
        elif name == "reorder":
            argument = rng.integers(0, batch, max(1, batch + rng.integers(-1, 2)))
            batch = len(argument)
        elif name == "repeat":
            argument = 2 if batch < 3 else 1
            batch *= argument
        yield name, argument


def many_updates(rng, count):
    """Return updates that fill a tail, and then need the place of earlier tokens."""
    return [("update", int(tokens)) for tokens in rng.integers(1, 25, count)]


@pytest.mark.parametrize("case", first_quick(range(3)))
@pytest.mark.parametrize("operations", [some_operations, many_updates])
def test_a_process_may_end_at_any_line(tmp_path, case, operations):
    """What opens has the tokens from before the call that was cut off, or from after it, and goes on."""
    folder = tmp_path / "cache"
    cache, memory = Cache([QuantizedLayer(**KINDS[case])], offload=folder), QuantizedLayer(**KINDS[case])
    moments = [0, 0]
    for seed, (name, argument) in enumerate(operations(np.random.default_rng(case + 3), 14)):
        before = copy.deepcopy(memory)
        do(memory, name, argument, seed)

        def opens(contents, before=before):
            where = as_folder(tmp_path / "crashed", contents)
            with Cache.open(where, keep=False) as again:
                layer = again.layers[0]
                expected = [copy.deepcopy(each) for each in (before, memory)]
                which = state(layer) != state(expected[0])
                assert state(layer) == state(expected[which])
                assert_same(layer, expected[which])
                assert_alike_from_now_on(layer, expected[which])
            moments[which] += 1
            shutil.rmtree(where)

        watched(folder, opens, lambda now=(name, argument, seed): do(cache.layers[0], *now))
        assert_same(cache.layers[0], memory)
    assert min(moments) >= 10
    cache.close()


def state(layer):
    length = layer.get_seq_length()
    stored = sum(array.nbytes for array in layer.arrays().values())
    held = length and (length, layer.batch_size, stored, layer.keys.tobytes())
    return layer.record_past, held


@pytest.mark.parametrize("case", range(3))
def test_a_crash_between_two_layers_takes_the_first_one_back(tmp_path, case):
    """With the codes of that step: their originals are still there."""
    expected = [QuantizedLayer(**KINDS[case]), DynamicLayer()]
    cache = Cache([QuantizedLayer(**KINDS[case]), DynamicLayer()], offload=tmp_path / "cache")
    given = states(200)
    for number, end in enumerate((30, 31, 32, 33, 34, 35, 61, 62, 140)):
        feed(cache.layers[0], given, end)
        shutil.copytree(tmp_path / "cache", tmp_path / str(number))
        with warnings.catch_warnings():
            if not number:
                warnings.filterwarnings("ignore", ".*the first step is undone", UserWarning)
            again = Cache.open(tmp_path / str(number))
        with again:
            assert_same(again.layers[0], expected[0])
            assert_alike_from_now_on(again.layers[0], copy.deepcopy(expected[0]))
        for layer in (cache.layers[1], *expected):
            feed(layer, given, end)
    cache.close()


def test_a_killed_process(tmp_path):
    done = run(
        """
        import os, signal, sys
        sys.path[:0] = sys.argv[2].split(os.pathsep)
        from quantized_cache_scenes import OPTIONS, feed, states
        from kvkit.cache import Cache, QuantizedLayer
        from kvkit.cache.stores.coded import File
        cache = Cache([QuantizedLayer(**OPTIONS)], offload=sys.argv[1])
        feed(cache.layers[0], states(60), 50, 51, 52, 53)
        File.commit = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        feed(cache.layers[0], states(60), 60)
        """,
        tmp_path,
        os.pathsep.join(sys.path),
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    expected = QuantizedLayer(**OPTIONS)
    feed(expected, states(60), 50, 51, 52, 53)
    with Cache.open(tmp_path, keep=False) as cache:
        assert_same(cache.layers[0], expected)
        assert_alike_from_now_on(cache.layers[0], expected)
