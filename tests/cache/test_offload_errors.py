"""Folders that cannot be used, and disks without room."""

import os

import numpy as np
import pytest
from test_cache_files import assert_alike_from_now_on, assert_same, four_layers, random
from test_offload import fill, names

import kvkit
from kvkit.cache import Cache, DynamicCache
from kvkit.cache.stores import mapped


def test_folders_that_cannot_be(tmp_path):
    with pytest.raises(kvkit.KvkitError, match=r"directory: expected a cache .*cache\.json: FileNotFound"):
        Cache.open(tmp_path)
    cache = fill(DynamicCache(1))
    cache.offload(tmp_path / "a")
    with pytest.raises(kvkit.KvkitError, match="directory: expected a cache in memory, got one that is in"):
        cache.offload(tmp_path / "b")
    with pytest.raises(kvkit.KvkitError, match="directory: expected a folder that holds no cache"):
        fill(DynamicCache(1)).offload(tmp_path / "a")
    (tmp_path / "file").write_text("")
    other = fill(DynamicCache(1))
    with pytest.raises(OSError, match="exists"):
        other.offload(tmp_path / "file")
    assert other.get_seq_length() == 0 or other.layers[0].keys.any()
    cache.close()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("cache.json", "{", "got .*cache.json: JSONDecodeError"),
        ("cache.json", '{"version": 7}', "got .*cache.json: ValueError.*version 7, not 1"),
        ("cache.json", '{"version": 1}', "got .*cache.json: KeyError"),
        ("layer-000.json", "[]", "expected a cache that kvkit has written, got .*layer-000.json"),
        ("layer-000.json", '{"version": 1, "kind": "Other", "arguments": {}}', "layer-000.json"),
        ("layer-000.json", '{"version": 1}', "layer-000.json"),
        ("layer-000-1.raw", "short", "layer-000.json: .*greater than file size"),
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


@pytest.mark.parametrize(
    "where",
    [lambda full: (mapped, "allocate", full), lambda full: (mapped.os, "write", full),
     lambda full: (mapped.os, "replace", full), lambda full: (mapped.mmap, "mmap", full)],
    ids=["data", "sidecar", "replace", "map"],
)  # fmt: skip
def test_no_room_on_the_disk_leaves_everything_as_it_was(tmp_path, monkeypatch, where):
    expected, cache = fill(Cache(four_layers())), fill(Cache(four_layers()))
    cache.offload(tmp_path, only_non_sliding=False)
    before = names(tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*where(full))
        for call in (
            lambda: cache.update(*random(np.float32, 50), 0),
            lambda: cache.update(*random(np.float32, 50), 1),
            lambda: cache.layers[2].repeat(2),
            lambda: cache.layers[3].reorder([1, 0]),
        ):
            with pytest.raises(OSError, match="No space"):
                call()
            assert_same(cache, expected)
            assert names(tmp_path) == before
    assert_alike_from_now_on(cache, expected, np.float32)
    cache.close()


def test_an_offload_that_fails_leaves_the_cache_in_memory(tmp_path, monkeypatch):
    expected, cache = fill(Cache(four_layers())), fill(Cache(four_layers()))
    real, left = mapped.allocate, 1

    def allocate(file, size):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        real(file, size)

    with monkeypatch.context() as patch:
        patch.setattr(mapped, "allocate", allocate)
        with pytest.raises(OSError, match="No space"):
            cache.offload(tmp_path, only_non_sliding=False)
    assert_same(cache, expected)
    assert names(tmp_path) == []
    cache.offload(tmp_path)
    assert_alike_from_now_on(cache, expected, np.float32)
    cache.close()
