"""A process may end at any moment: its files open to the last step that was whole."""

import os
import shutil
import signal
import sys

import numpy as np
import pytest
from scenes import first_quick
from test_cache_files import four_layers, random
from test_offload import fill, names, run

import kvkit
from kvkit.cache import Cache

CRASH = """
    import os, signal, sys
    import numpy as np
    from kvkit.cache import Cache, offload
    from kvkit.cache.stores import mapped
    sys.path[:0] = sys.argv[3].split(os.pathsep)
    from test_cache_files import four_layers, random
    from test_offload import fill

    def die(*arguments, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    cache = Cache(four_layers())
    cache.offload(sys.argv[1], only_non_sliding=False)
    fill(cache)
    where, layer = sys.argv[2].split()
    for i in range(4):
        if i == int(layer):
            if where == "unwritten":
                mapped.Store.write = die
            elif where == "uncommitted":
                mapped.MappedStore.commit = die
            elif where == "growing":
                mapped.MappedStore.fill = die
                mapped.Store.fill = die
            elif where == "replacing":
                mapped.put = offload.put = die
        cache.update(*random(np.float32, 30 if where in ("growing", "replacing") else 1, 9), i)
    die()
"""


def crash(tmp_path, where):
    done = run(CRASH, tmp_path, where, os.pathsep.join(sys.path))
    assert done.returncode == -signal.SIGKILL, done.stderr


MOMENTS = [
    *("uncommitted 0", "unwritten 3", "growing 1", "replacing 0", "nowhere 9"),
    *("uncommitted 1", "uncommitted 2", "uncommitted 3", "unwritten 0", "growing 0"),
]


@pytest.mark.parametrize("where", first_quick(MOMENTS, 5))
def test_a_process_may_end_at_any_moment(tmp_path, where):
    """What opens is the cache before the step that was cut off, or after the last whole one."""
    crash(tmp_path, where)
    expected = Cache(four_layers())
    expected.activate_past_recording()
    fill(expected)
    if where.startswith("nowhere"):
        for i in range(4):
            expected.update(*random(np.float32, 1, 9), i)
    expected.crop(0)
    expected.layers[1].record_past = False
    again = Cache.open(tmp_path)
    assert [layer.get_seq_length() for layer in again.layers] == [expected.get_seq_length()] * 4
    for i in (0, 1, 2):
        assert again.layers[i].keys.tobytes() == expected.layers[i].keys.tobytes()
        assert again.layers[i].values.tobytes() == expected.layers[i].values.tobytes()
    # A static sliding layer that has gone a step back has a token less, which no next one can see.
    last = again.layers[3].keys
    assert last.tobytes() == expected.layers[3].keys[:, :, -last.shape[2] :].tobytes()
    assert last.shape[2] >= 3
    for i in range(4):
        new = random(np.float32, 2, 70)
        got, wanted = again.update(*new, i), expected.update(*new, i)
        assert got[0].tobytes() == wanted[0].tobytes()
        assert again.attend(new[0], i).tobytes() == expected.attend(new[0], i).tobytes()
    again.close()
    files = names(tmp_path)
    assert len(files) == 9
    assert not [name for name in files if name.endswith(".new")]


def test_a_crash_in_the_first_step_leaves_no_tokens(tmp_path):
    done = run(
        """
        import os, signal, sys, numpy as np
        from kvkit.cache import DynamicCache
        cache = DynamicCache(3, offload=sys.argv[1])
        new = np.ones((1, 1, 4, 8), np.float32)
        cache.update(new, new, 0)
        cache.update(new, new, 1)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.warns(UserWarning, match="the first step was cut off.* give its tokens again"):
        cache = Cache.open(tmp_path)
    assert [layer.get_seq_length() for layer in cache.layers] == [0, 0, 0]
    cache.close()


def test_a_layer_that_was_in_memory_is_lost(tmp_path):
    cache = fill(Cache(four_layers()))
    cache.offload(tmp_path / "cache")
    left = shutil.copytree(tmp_path / "cache", tmp_path / "left")
    with pytest.raises(
        kvkit.KvkitError, match="directory: expected layer 1 in a file, got a process that ended"
    ):
        Cache.open(left)
    cache.close()
