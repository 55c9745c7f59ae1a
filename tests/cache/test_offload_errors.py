"""Folders that cannot be used, and disks without room."""

import json
import os
import shutil

import numpy as np
import pytest
from folder_scenes import assert_alike_from_now_on, assert_same, fill, four_layers, names, random

import kvkit
from kvkit.cache import Cache, DynamicCache, QuantizedCache, load, loading
from kvkit.cache.stores import mapped


def test_folders_that_cannot_be(tmp_path):
    with pytest.raises(kvkit.KvkitError, match=r"directory: expected a cache .*cache\.json: No such file"):
        Cache.open(tmp_path)
    cache = fill(DynamicCache(1))
    cache.offload(tmp_path / "a")
    with pytest.raises(kvkit.KvkitError, match="directory: expected a cache in memory, got one that is in"):
        cache.offload(tmp_path / "b")
    with pytest.raises(kvkit.KvkitError, match="directory: expected a folder that holds no cache"):
        fill(DynamicCache(1)).offload(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(kvkit.KvkitError, match=r"cache\.json: Not a directory"):
        Cache.open(tmp_path / "file")
    other = fill(DynamicCache(1))
    with pytest.raises(OSError, match="exists"):
        other.offload(tmp_path / "file")
    assert other.get_seq_length() == 0 or other.layers[0].keys.any()
    cache.close()


CLOSED = '{"version": 1, "closed": true, "due": null, "changes": %s}'


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("cache.json", "{", "got .*cache.json: JSONDecodeError"),
        ("cache.json", '{"version": 7}', "got .*cache.json: ValueError.*version 7, not 1"),
        ("cache.json", '{"version": 1}', "got .*cache.json: KeyError"),
        ("cache.json", CLOSED % '"a"', "got .*cache.json: .*changes: expected an integer"),
        ("cache.json", CLOSED % '0, "layers": "x"', "got .*cache.json: .*layers: expected an integer"),
        ("cache.json", CLOSED % '0, "digests": 5', "changed files of layer-000$"),
        ("layer-000.next-x", "", "got .*next-x: ValueError"),
        ("layer-000.json", "[]", "expected a cache that kvkit has written, got .*layer-000.json"),
        ("layer-000.json", '{"version": 1, "kind": "Other", "arguments": {}}', "layer-000.json"),
        ("layer-000.json", '{"version": 1}', "layer-000.json"),
        ("layer-000-1.raw", "short", "layer-000.json: .*layer-000-1.raw is cut short"),
    ],
)  # fmt: skip
def test_damaged_folders_are_refused(tmp_path, file, text, message):
    cache = fill(DynamicCache(1))
    cache.offload(tmp_path, keep=True)
    cache.close()
    (tmp_path / file).write_text(text)
    with pytest.raises(kvkit.KvkitError, match=message):
        Cache.open(tmp_path)


def test_files_are_the_users_own_and_follow_no_link(tmp_path):
    folder, target = tmp_path / "cache", tmp_path / "target"
    folder.mkdir()
    target.write_text("whole")
    for name in ("cache.new", "layer-000.new"):
        (folder / name).symlink_to(target)
    before = os.umask(0)
    try:
        cache = fill(DynamicCache(2))
        cache.offload(folder, keep=True)
        cache.reorder([1, 0])
        fill(cache)
        cache.close()
    finally:
        os.umask(before)
    assert target.read_text() == "whole"
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir() if not path.is_symlink()}
    assert modes == {0o600}
    (folder / "layer-001-0.new").write_text("left by a process that was killed")
    Cache.open(folder).close()
    assert not (folder / "layer-001-0.new").exists()


def test_a_folder_has_one_user(tmp_path):
    cache = fill(DynamicCache(2))
    cache.offload(tmp_path, keep=True)
    for _ in range(2):
        with pytest.raises(kvkit.KvkitError, match="expected a cache that is not open"):
            Cache.open(tmp_path)
        with pytest.raises(kvkit.KvkitError, match="directory: expected a folder that holds no cache"):
            fill(DynamicCache(1)).offload(tmp_path)
        cache.close()
        cache = Cache.open(tmp_path)  # and holds it
    cache.close()
    assert Cache.open(tmp_path, keep=False).close() is None


def test_a_folder_says_how_many_layers_it_has(tmp_path):
    """So a process that ended inside `offload` leaves no cache of fewer layers."""
    cache = fill(Cache(four_layers()))
    cache.offload(tmp_path, only_non_sliding=False, keep=True)
    cache.close()
    for path in tmp_path.glob("layer-003*"):
        path.unlink()
    with pytest.raises(kvkit.KvkitError, match="directory: expected 4 layers, got 3: the process"):
        Cache.open(tmp_path)


def test_changed_files_of_a_closed_folder_are_refused(tmp_path):
    cache = fill(DynamicCache(2))
    cache.offload(tmp_path, keep=True)
    cache.close()
    first, second = sorted(tmp_path.glob("*.raw"))
    contents = first.read_bytes(), second.read_bytes()
    damaged = bytes([contents[0][0] ^ 1]) + contents[0][1:]
    for one, other, message in (
        (*contents[::-1], "layer-000-1.raw is cut short, or of another layer or generation"),
        (damaged, contents[1], "when it was closed, got .* with changed files of layer-000$"),
    ):
        first.write_bytes(one)
        second.write_bytes(other)
        with pytest.raises(kvkit.KvkitError, match=message):
            Cache.open(tmp_path)
    first.write_bytes(contents[0])
    Cache.open(tmp_path).close()


def swapped(first, second):
    contents = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(contents)


CHANGES = {  # of the file that counts, of layer 0; `other` is layer 1's, `older` the one before it
    "swapped": lambda raw, other, older: swapped(raw, other),
    "with their sidecars": lambda raw, other, older: [
        swapped(raw, other),
        swapped(raw.with_name("layer-000.json"), raw.with_name("layer-001.json")),
    ],
    "older": lambda raw, other, older: raw.write_bytes(older),
    "renamed": lambda raw, other, older: raw.write_bytes(older.replace(b"layer-000-1", b"layer-000-2")),
    "short": lambda raw, other, older: os.truncate(raw, raw.stat().st_size - 1),
    "a page": lambda raw, other, older: os.truncate(raw, mapped.PAGE),
    "empty": lambda raw, other, older: os.truncate(raw, 0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", [DynamicCache, QuantizedCache])
def test_a_file_says_of_which_layer_and_generation_it_is(tmp_path, make, change):
    """Also where nothing was closed, and so has no digest."""
    cache, new = make(2, offload=tmp_path / "cache"), random(np.float32, 200, 0, (32, 32))
    for i in range(2):
        cache.update(*new, i)
    older = (tmp_path / "cache" / "layer-000-1.raw").read_bytes()
    cache.reorder([1, 0])
    left = shutil.copytree(tmp_path / "cache", tmp_path / "left")
    cache.close()
    raw, other = (left / f"layer-{i:03}-2.raw" for i in range(2))
    Cache.open(shutil.copytree(left, tmp_path / "whole"), keep=False).close()
    change(raw, other, older)
    with pytest.raises(kvkit.KvkitError, match=r"layer-000-2\.raw is cut short, or of another "):
        Cache.open(left)


@pytest.mark.parametrize("make", [DynamicCache, QuantizedCache])
def test_files_without_a_mark_open(tmp_path, make):
    """Such were written once; of them too none is cut short."""
    cache = make(1, offload=tmp_path / "cache")
    cache.update(*random(np.float32, 200, 0, (32, 32)), 0)
    left = shutil.copytree(tmp_path / "cache", tmp_path / "left")
    sidecar, raw = left / "layer-000.json", left / "layer-000-1.raw"
    text = sidecar.read_text()
    sidecar.write_text(text.replace(f'"word": "{json.loads(text)["word"]}", ', ""))
    os.truncate(raw, raw.stat().st_size - mapped.MARK)
    for new in (random(np.float32, 1, seed, (32, 32)) for seed in range(2)):
        with Cache.open(left) as again:
            expected = [np.asarray(states).tobytes() for states in cache.update(*new, 0)]
            assert [np.asarray(states).tobytes() for states in again.update(*new, 0)] == expected
    os.truncate(raw, raw.stat().st_size - 1)
    with pytest.raises(kvkit.KvkitError, match=r"layer-000-1\.raw is cut short"):
        Cache.open(left)
    cache.close()


def test_a_file_that_a_cache_maps_may_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(loading.npz, "MAX_COPIED", -1)
    cache, ones = DynamicCache(1), np.ones((1, 2, 500, 64), np.float32)
    cache.update(ones, ones, 0)
    cache.save(tmp_path / "saved")
    cache.offload(tmp_path / "folder", keep=True)
    cache.close()
    loaded, opened = load(tmp_path / "saved"), Cache.open(tmp_path / "folder")
    for path in (tmp_path / "saved", tmp_path / "folder" / "layer-000-1.raw"):
        (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
        os.replace(tmp_path / "other", path)
    assert (loaded.layers[0].keys == 1).all()
    assert (opened.layers[0].keys == 1).all()
    opened.close()


def test_an_offload_that_fails_leaves_the_cache_in_memory(tmp_path, monkeypatch):
    expected, cache = fill(Cache(four_layers())), fill(Cache(four_layers()))
    real, left = mapped.allocate_file, 1

    def allocate(file, size):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        real(file, size)

    with monkeypatch.context() as patch:
        patch.setattr(mapped, "allocate_file", allocate)
        with pytest.raises(OSError, match="No space"):
            cache.offload(tmp_path, only_non_sliding=False)
    assert_same(cache, expected)
    assert names(tmp_path) == []
    cache.offload(tmp_path)
    assert_alike_from_now_on(cache, expected, np.float32)
    cache.close()


def test_a_layer_that_was_in_memory_is_lost(tmp_path):
    cache = fill(Cache(four_layers()))
    cache.offload(tmp_path / "cache")
    left = shutil.copytree(tmp_path / "cache", tmp_path / "left")
    with pytest.raises(
        kvkit.KvkitError, match="directory: expected layer 1 in a file, got a process that died"
    ):
        Cache.open(left)
    cache.close()
