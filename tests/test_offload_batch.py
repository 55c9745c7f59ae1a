"""The batch changes in all layers of a folder, or in none, whatever ends the change."""

import numpy as np
import pytest
from quantized_cache_scenes import OPTIONS
from test_cache_files import four_layers, random
from test_offload import names
from test_offload_quantized_crashes import watched

from kvkit.cache import Cache, QuantizedLayer, mapped

CHANGES = {
    "reorder": lambda cache: cache.reorder([1, 0]),
    "select": lambda cache: cache.select([1]),
    "repeat": lambda cache: cache.repeat(2),
}
DIMS = 4, 8


def filled(*counts):
    """Layers of all kinds."""
    cache = Cache([*four_layers(), QuantizedLayer(**OPTIONS | {"residual_length": 2})])
    for count in counts:
        for i in range(5):
            cache.update(*random(np.float32, count, count + i, DIMS), i)
    return cache


def contents(cache):
    return [
        (layer.batch_size, layer.get_seq_length(), *map(np.ndarray.tobytes, (layer.keys, layer.values)))
        for layer in cache.layers
    ]


def next_step(cache):
    """What every layer says to another token."""
    results = []
    for i in range(5):
        new = [np.repeat(x[:1], cache.layers[i].batch_size, axis=0) for x in random(np.float32, 1, i, DIMS)]
        results += [np.asarray(x).tobytes() for x in cache.update(*new, i)]
    return results


def opened(folder, files):
    """What a folder of these files opens to, and what follows; the folder is deleted."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with Cache.open(folder, keep=False) as cache:
        found = contents(cache), next_step(cache)
    assert not list(folder.iterdir())
    folder.rmdir()
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_process_may_end_at_any_line(tmp_path, change):
    cache, states = filled(6, 1), []
    for changes in (0, 1):
        expected = filled(6, 1)
        for _ in range(changes):
            CHANGES[change](expected)
        states.append((contents(expected), next_step(expected)))
    assert states[0] != states[1]
    cache.offload(tmp_path / "cache", only_non_sliding=False)
    found, moments = [], []

    def seen(files):
        moments.append(files)
        found.append(states.index(opened(tmp_path / "crashed", files)))

    watched(tmp_path / "cache", seen, lambda: CHANGES[change](cache))
    assert found == sorted(found)
    assert found.count(0) > 10
    assert found.count(1) > 5
    assert (contents(cache), next_step(cache)) == states[1]
    cache.close()

    # An opening that completes the change may end at any line too.
    (tmp_path / "half").mkdir()
    for name, data in moments[found.index(1)].items():
        (tmp_path / "half" / name).write_bytes(data)
    found.clear()
    watched(tmp_path / "half", seen, lambda: Cache.open(tmp_path / "half"))
    assert len(found) > 5
    assert set(found) == {1}


@pytest.mark.parametrize("only_non_sliding", [True, False])
@pytest.mark.parametrize(
    ("name", "most"), [("allocate", 3), ("write", 4), ("replace", 1)], ids=["data", "sidecar", "replace"]
)
def test_no_room_on_the_disk_leaves_every_layer_as_it_was(
    tmp_path, monkeypatch, only_non_sliding, name, most
):
    """Whichever file it is for; and layers that are in memory."""
    cache, module = filled(6, 1), mapped if name == "allocate" else mapped.os
    real = getattr(module, name)
    cache.offload(tmp_path, only_non_sliding)
    before, files = contents(cache), names(tmp_path)
    for number in range(most + (0 if only_non_sliding or name == "replace" else 2)):
        room = iter(range(number))

        def full(*arguments, room=room):
            if next(room, None) is None:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match="No space"):
                cache.repeat(2)
        assert contents(cache) == before
        assert names(tmp_path) == files
    cache.repeat(2)
    assert [layer.batch_size for layer in cache.layers] == [4] * 5
    next_step(cache)
    cache.close()
    assert names(tmp_path) == []
