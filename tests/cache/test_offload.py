"""Layers in files: the same bytes, whatever happens to the process, the disk or the memory."""

import json
import os
import pickle
import re
import sys

import numpy as np
import pytest
from folder_scenes import (
    DIMS,
    assert_alike_from_now_on,
    assert_same,
    fill,
    five_layers,
    four_layers,
    names,
    random,
    run,
)

from kvkit import KvkitError
from kvkit.cache import Cache, DynamicCache, StaticCache, load
from kvkit.cache.stores import mapped
from kvkit.files import FileError


@pytest.mark.parametrize("only_non_sliding", [True, False])
def test_layers_in_files_and_in_memory(tmp_path, only_non_sliding):
    """Of all kinds, and layers that stayed in memory: equal bit for bit while open and opened again."""
    memory, files = (fill(Cache(five_layers()), dims=DIMS) for _ in "ab")
    files.offload(tmp_path, only_non_sliding, keep=True)
    in_files = [layer.store.file is not None for layer in files.layers]
    assert in_files == ([True, False, True, False, True] if only_non_sliding else [True] * 5)
    assert_alike_from_now_on(files, memory, np.float32, DIMS)
    files.close()
    assert files.get_seq_length() == 0
    with Cache.open(tmp_path) as again:
        assert_alike_from_now_on(again, memory, np.float32, DIMS)
    with Cache.open(tmp_path, keep=False) as third:
        assert_same(third, memory)
    assert names(tmp_path) == []


def test_close_deletes_the_files(tmp_path):
    with Cache(four_layers()) as cache:
        fill(cache)
        cache.offload(tmp_path / "new" / "folder", only_non_sliding=False)
        inside = names(tmp_path / "new" / "folder")
        assert inside == ["cache.json"] + [
            f"layer-00{i}{end}" for i in range(4) for end in ("-1.raw", ".json")
        ]
        keys = cache.layers[0].keys
        before = keys.tobytes()
    assert names(tmp_path / "new" / "folder") == []
    assert keys.tobytes() == before
    assert cache.get_seq_length() == 0
    cache.close()
    with pytest.raises(FileError, match=r"Cache\.open opens a folder"):
        load(tmp_path / "new" / "folder")
    assert names(tmp_path / "new" / "folder") == []


CALLS = {
    "update": lambda cache, folder: fill(cache),
    "update of a layer": lambda cache, folder: cache.layers[0].update(*random(np.float32, 2, 0)),
    "attend": lambda cache, folder: cache.attend(random(np.float32, 2, 0)[0], 0),
    "reserve": lambda cache, folder: cache.reserve(1),
    "crop": lambda cache, folder: cache.crop(-1),
    "remove": lambda cache, folder: cache.remove(0, 2),
    "retain": lambda cache, folder: cache.retain([0]),
    "compress": lambda cache, folder: cache.compress("knorm", keep=0.5),
    "reorder": lambda cache, folder: cache.reorder([1, 0]),
    "repeat": lambda cache, folder: cache.repeat(2),
    "reset": lambda cache, folder: cache.reset(),
    "prefetch": lambda cache, folder: cache.prefetch(0),
    "flush": lambda cache, folder: cache.flush(),
    "to_legacy_cache": lambda cache, folder: cache.to_legacy_cache(),
    "offload": lambda cache, folder: cache.offload(folder),
    "save": lambda cache, folder: cache.save(folder / "saved.npz"),
}


@pytest.mark.parametrize("copied", [False, True])
def test_a_closed_cache_refuses_every_call_with_one_sentence(copied, tmp_path):
    cache = fill(DynamicCache(2))
    cache.offload(tmp_path / "first")
    cache.close()
    cache = pickle.loads(pickle.dumps(cache)) if copied else cache
    (tmp_path / "second").mkdir()
    said = "cache: expected one that is open (a kept one: Cache.open), got one that was closed"
    for call in CALLS.values():
        with pytest.raises(KvkitError, match=f"^{re.escape(said)}$"):
            call(cache, tmp_path / "second")
    assert cache.can("remove", 0, 2) == said
    assert names(tmp_path / "second") == []
    cache.close()


def test_layers_made_later_are_in_files_too(tmp_path):
    cache = DynamicCache(offload=tmp_path)
    for i in range(3):
        cache.update(*random(np.float16, 5, i), i)
    assert all(isinstance(layer.store, mapped.MappedStore) for layer in cache.layers)
    expected = [layer.keys.tobytes() for layer in cache.layers]
    cache.folder.keep = True
    cache.close()
    again = Cache.open(tmp_path)
    assert [layer.keys.tobytes() for layer in again.layers] == expected
    again.close()


def test_a_sidecar_says_all(tmp_path):
    """Raw arrays, and JSON that describes them: numpy alone reads a layer."""
    cache = fill(StaticCache(20, 1), np.float16)
    cache.offload(tmp_path)
    about = json.loads((tmp_path / "layer-000.json").read_text())
    word = about.pop("word")
    assert about == {
        "version": 1, "kind": "StaticLayer", "arguments": {"max_cache_len": 20}, "generation": 1,
        "dtype": "float16", "byteorder": sys.byteorder, "keys": [2, 3, 20, 4], "values": [2, 3, 20, 6],
        "state": {
            "length": 8, "oldest": 0, "begin": 0, "origin": 0, "before": 8, "record_past": 0, "changes": 0,
        },
    }  # fmt: skip
    raw = np.fromfile(tmp_path / "layer-000-1.raw", np.float16)
    keys = raw[: 2 * 3 * 20 * 4].reshape(2, 3, 20, 4)
    assert keys[:, :, :8].tobytes() == cache.layers[0].keys.tobytes()
    assert not keys[:, :, 8:].any()
    assert raw.tobytes().endswith(f" kvkit layer-000-1 {word}\n".encode())
    cache.close()


# Memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's limit of private memory")
def test_a_cache_larger_than_its_memory(tmp_path):
    """256 MB of keys and values go through a process that may have 64 MB more than it began with."""
    script = """
        import resource, sys, numpy as np
        from kvkit.cache import DynamicCache
        new = np.ones((1, 8, 1, 64), np.float16)
        prompt = np.ones((1, 8, 4096, 64), np.float16)
        warm = DynamicCache()
        warm.update(new, new, 0)
        expected = warm.attend(new, 0)
        with open("/proc/self/status") as file:
            size = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
        limit = size * 1024 + 64 * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        cache = DynamicCache(16, offload=sys.argv[1] if len(sys.argv) > 1 else None)
        try:
            for step in range(2):
                for i in range(16):
                    cache.update(prompt, prompt, i)
                    assert (cache.attend(new, i) == expected).all()
        except MemoryError:
            print("no memory")
        else:
            print(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 2**20)
        cache.close()
    """
    done = run(script)
    assert done.stdout == "no memory\n", done.stderr
    done = run(script, tmp_path)
    assert done.stdout == "256.0\n", done.stderr


def test_the_next_layer_is_prefetched(tmp_path, monkeypatch):
    """Only what is filled, of the next layer that is in files; the last one is followed by the first."""
    cache = Cache(four_layers())
    cache.offload(tmp_path)
    fill(cache, counts=(6,))
    mapped.prefetch_thread().submit(int).result()
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: asked.append(call), raising=False)
    for i, following in ((0, 2), (1, 2), (2, 0), (3, 0)):
        asked.clear()
        cache.update(*random(np.float32, 1), i)
        mapped.prefetch_thread().submit(int).result()
        store = cache.layers[following].store
        length = cache.get_seq_length(following)
        assert {call[0] for call in asked} == {store.file.descriptor}
        assert len(asked) == 2 * 2 * 3
        assert sum(call[2] for call in asked) == 2 * 3 * length * (4 + 6) * 4
    asked.clear()
    cache.prefetch(2)
    cache.prefetch(1)
    mapped.prefetch_thread().submit(int).result()
    assert {call[0] for call in asked} == {cache.layers[2].store.file.descriptor}
    cache.close()


def test_flush(tmp_path, monkeypatch):
    cache = fill(DynamicCache(2))
    cache.flush()
    cache.offload(tmp_path)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file))
    cache.flush()
    assert {cache.layers[0].store.file.sidecar, cache.layers[1].store.file.sidecar} <= set(synced)
    cache.close()
