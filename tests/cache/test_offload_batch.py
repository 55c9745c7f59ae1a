"""What changes all layers of a folder changes all or none, whatever ends the change."""

import itertools
from hashlib import sha256

import numpy as np
import pytest
from folder_scenes import DIMS, as_folder, files_of, five_layers, full_disk, names, random, traced, watched
from quantized_cache_scenes import OPTIONS

from kvkit import Rope
from kvkit.cache import Cache, DynamicLayer, QuantizedLayer, SlidingWindowLayer
from kvkit.cache.offload import Folder, replaced_files
from kvkit.cache.stores import mapped


def filled(*counts):
    """Return layers of all kinds with tokens."""
    return more(Cache(five_layers()), *counts)


def filled_twice():
    return filled(6, 1)


def more(cache, *counts):
    for count in counts:
        for i in range(len(cache)):
            cache.update(*random(np.float32, count, count + i, DIMS), i)
    return cache


def recorded():
    """Return layers with recorded tokens, in windows and in codes that are not made yet."""
    cache = filled(6)
    cache.activate_past_recording()
    return more(cache, 9)


def recording():
    """Return layers that record and have no tokens yet."""
    cache = Cache([DynamicLayer(), *(SlidingWindowLayer(4) for _ in "abc")])
    cache.activate_past_recording()
    return cache


def coded():
    """Return layers with codes of the latest update, whose original numbers are still there."""
    return more(Cache([DynamicLayer(), *(QuantizedLayer(**OPTIONS) for _ in "abc")]), 30, 20)


def moved():
    """Return layers of all kinds whose rows were removed and shifted."""
    cache = more(Cache(five_layers()), 9)
    remove(cache)
    return more(cache, 1)


def unfixed():
    return more(Cache([DynamicLayer(), SlidingWindowLayer(4), QuantizedLayer(**OPTIONS)]), 9, 1)


def roomy():
    """Return layers whose files become smaller."""
    return more(Cache([DynamicLayer(), SlidingWindowLayer(4), DynamicLayer()]), 90)


def compress(cache):
    cache.compress("streaming", keep=0.2, sinks=1)


def compress_from_zero(cache):
    for layer in cache.layers:
        layer.rope = ROPE
    cache.compress("streaming", count=30, sinks=2, renumber=True)


def holes():
    cache = coded()
    cache.retain([0, *range(9, 30), 40])
    return more(cache, 1)


def remove(cache):
    cache.remove(1, 4, close=True, rope=ROPE)


ROPE = Rope(4)
CHANGES = {
    "remove": (filled_twice, remove),
    "remove codes": (coded, lambda cache: cache.retain([*range(9), 20, *range(40, 50)])),
    "remove sinks": (coded, lambda cache: cache.remove(0, 30)),
    "shift": (unfixed, lambda cache: cache.shift(0, None, 3, ROPE)),
    "remove again": (moved, remove),
    "compress": (unfixed, lambda cache: cache.compress("knorm", count=4)),
    "compress what has room": (roomy, compress),
    "compress and renumber": (coded, compress_from_zero),
    "crop what was moved": (holes, lambda cache: cache.crop(-12)),
    "reorder what was moved": (moved, lambda cache: cache.reorder([1, 0])),
    "reset what was moved": (moved, lambda cache: cache.reset()),
    "reorder": (filled_twice, lambda cache: cache.reorder([1, 0])),
    "select": (filled_twice, lambda cache: cache.select([1])),
    "repeat": (filled_twice, lambda cache: cache.repeat(2)),
    "crop": (coded, lambda cache: cache.crop(-3)),
    "crop to": (recorded, lambda cache: cache.crop(14)),
    "crop all": (coded, lambda cache: cache.crop(-50)),
    "crop what is recorded": (recorded, lambda cache: cache.crop(0)),
    "reset": (recorded, lambda cache: cache.reset()),
    "reset of nothing": (recording, lambda cache: cache.reset()),
}
# Their files change as those of another one do.
OTHERS = "remove sinks", "remove again", "reorder what was moved", "select", "crop to", "crop all"


def contents(cache):
    return [
        (
            *(layer.batch_size, layer.get_seq_length(), layer.record_past),
            *(layer.positions.tolist(), layer.rope_shifts.tolist(), layer.nbytes),
            *(None if x is None else sha256(x.tobytes()).hexdigest() for x in (layer.keys, layer.values)),
        )
        for layer in cache.layers
    ]


def next_step(cache):
    """Return the results of all layers for another token."""
    results = []
    for i in range(len(cache)):
        batch = cache.layers[i].batch_size or 3
        new = [np.repeat(x[:1], batch, axis=0) for x in random(np.float32, 1, i, DIMS)]
        results += [np.asarray(x).tobytes() for x in cache.update(*new, i)]
    return results


def opened(folder, files):
    """Open a folder of these files; return its state and its next step, and delete it."""
    with Cache.open(as_folder(folder, files), keep=False) as cache:
        found = contents(cache), next_step(cache)
    assert not list(folder.iterdir())
    folder.rmdir()
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in OTHERS)) for n in CHANGES])
def test_a_process_may_end_at_any_line(tmp_path, name):
    (make, change), states = CHANGES[name], []
    cache = make()
    for changes in (0, 1):
        expected = make()
        for _ in range(changes):
            change(expected)
        states.append((contents(expected), next_step(expected)))
    assert states[0] != states[1]
    cache.offload(tmp_path / "cache", only_non_sliding=False)
    found, moments = [], []

    def seen(files):
        moments.append(files)
        found.append(states.index(opened(tmp_path / "crashed", files)))

    watched(tmp_path / "cache", seen, lambda: change(cache))
    assert found == sorted(found)
    assert found.count(0) >= 3
    assert found.count(1) >= len(cache)
    assert (contents(cache), next_step(cache)) == states[1]
    cache.close()

    # An opening that completes the change may end at any line too.
    as_folder(tmp_path / "half", moments[found.index(1)])
    found.clear()
    watched(tmp_path / "half", seen, lambda: Cache.open(tmp_path / "half"))
    assert len(found) >= len(cache)
    assert set(found) == {1}


@pytest.mark.parametrize("change", ["crop", "crop all", "reset"])
def test_a_crop_is_done_once(tmp_path, change):
    """Tokens that came after it stay."""
    (cache, expected), change = [CHANGES[change][0]() for _ in "ab"], CHANGES[change][1]
    cache.offload(tmp_path / "cache", only_non_sliding=False)
    for each in (cache, expected):
        change(each)
        for i in range(len(each)):
            batch = each.layers[i].batch_size or 2
            each.update(*(x[:batch] for x in random(np.float32, 3, 7, DIMS)), i)
    files = files_of(tmp_path / "cache")
    assert opened(tmp_path / "crashed", files) == (contents(expected), next_step(expected))
    cache.close()


@pytest.mark.parametrize("name", ["write", "replace"])
def test_no_room_on_the_disk_for_a_crop(tmp_path, monkeypatch, name):
    """Not even to say that there is to be one; what comes then is not cropped by whoever opens the folder."""
    cache = coded()
    cache.offload(tmp_path / "cache")
    before, files = contents(cache), names(tmp_path / "cache")

    with monkeypatch.context() as patch:
        patch.setattr(mapped.os, name, full_disk)
        for change in (lambda: cache.crop(-3), cache.reset):
            with pytest.raises(OSError, match="No space"):
                change()
    assert contents(cache) == before
    assert names(tmp_path / "cache") == files
    more(cache, 1)
    files = files_of(tmp_path / "cache")
    assert opened(tmp_path / "crashed", files) == (contents(cache), next_step(cache))
    cache.close()


@pytest.mark.parametrize("only_non_sliding", [True, False])
@pytest.mark.parametrize("name", ["allocate_file", "write", "replace"])
@pytest.mark.parametrize(
    ("make", "change"),
    [(filled_twice, lambda cache: cache.repeat(2)), (filled_twice, remove), (roomy, compress)],
    ids=["repeat", "remove", "compress"],
)
def test_no_room_on_the_disk_leaves_every_layer_as_it_was(
    tmp_path, monkeypatch, only_non_sliding, name, make, change
):
    """Whichever file it is for; and layers that are in memory."""
    module = mapped if name == "allocate_file" else mapped.os
    real, cache, expected, left = getattr(module, name), make(), make(), 0

    def full(*arguments):
        nonlocal left
        left -= 1
        return real(*arguments) if left >= 0 else full_disk()

    cache.offload(tmp_path, only_non_sliding)
    before, files = contents(cache), names(tmp_path)
    monkeypatch.setattr(module, name, full)
    for number in itertools.count():
        left = number
        if name == "replace" and number:  # the change was committed by the first
            left = 100
        try:
            change(cache)
        except OSError:
            assert contents(cache) == before
            assert names(tmp_path) == files
        else:
            break
    assert number >= (1 if name == "replace" else len(cache) // 2)
    change(expected)
    left = 100
    assert contents(cache) == contents(expected)
    next_step(cache)
    cache.close()
    assert names(tmp_path) == []


LINES = {
    *(
        each.__code__
        for each in (Folder.at_once, Folder.commit_changes, Folder.write_index, Folder.resolve_waiting)
    ),
    *(each.__code__ for each in (mapped.Home.resolve_waiting, mapped.follow_change, mapped.write_sidecar)),
    replaced_files.__code__,
}


def interrupted(call, number):
    """Interrupt the end of a change of a folder at its line `number`; return whether it has such a line."""
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code not in LINES:
            return None
        left -= event == "line"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    try:
        traced(trace, call)
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupt_leaves_a_folder_that_goes_on(tmp_path):
    """Whatever then happens to the cache, a process that ends leaves files that open to what was there."""
    for number in itertools.count():
        cache = more(Cache([DynamicLayer(), DynamicLayer(), SlidingWindowLayer(4)]), 6)
        before = contents(cache)
        cache.offload(tmp_path / "cache", only_non_sliding=False)
        if not interrupted(lambda cache=cache: cache.reorder([1, 0]), number):
            break
        changed = [one != other for one, other in zip(contents(cache), before, strict=True)]
        assert len(set(changed)) == 1
        for change in (
            lambda cache: None,
            lambda cache: more(cache, 40),
            lambda cache: cache.layers[1].reset(),
            lambda cache: cache.update(*random(np.float32, 46, 1, DIMS), 1),
            lambda cache: cache.reorder([1, 0]),
            lambda cache: cache.repeat(2),
        ):
            change(cache)
            files = files_of(tmp_path / "cache")
            assert opened(tmp_path / "crashed", files)[0] == contents(cache)
        cache.close()
        assert names(tmp_path / "cache") == []
    assert number > 30
    cache.close()
