"""Arrays in files: the same bits as in memory in every kind of cache, and nothing left on the disk."""

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from folder_scenes import (
    DIMS,
    assert_alike_from_now_on,
    assert_same,
    fill,
    five_layers,
    names,
    random,
    run,
)
from kind_scenes import KINDS, append, attend, bits, tokens

import kvkit
from kvkit import KvkitError
from kvkit.cache import (
    Cache,
    DynamicCache,
    DynamicLayer,
    PagedCache,
    QuantizedLayer,
)
from kvkit.cache.stores import allocation

kinds = pytest.mark.parametrize("kind", KINDS)


def operations(cache, kind):
    """Yield (name, result) of calls that grow, shrink, move and copy the tokens of a cache."""
    rows, other = getattr(cache, "rows", cache), KINDS[kind]()
    append(other, 3, 5)
    for seed, count in enumerate((9, 1, 1, 2, 7)):
        yield f"append {count}", append(cache, count, 10 * seed)
    cache.activate_past_recording()
    yield "record", append(cache, 1, 60)
    cache.crop(-1)
    for layer in () if cache is not rows else cache.layers:
        layer._stop_past_recording()
    calls = [(rows, "remove", (3, 5)), (rows, "remove", (9, 11)), (rows, "shift", (4, None, 3))]
    calls += [(rows, "divide", (12, None, 2)), *([(cache, "append", (other,))] if cache is rows else ())]
    calls += [(cache, "reorder", ([1, 0],)), (cache, "repeat", (2,)), (cache, "reorder", ([3, 0, 0],))]
    for seed, (owner, call, arguments) in enumerate(calls):
        try:
            getattr(owner, call)(*arguments)
        except KvkitError as error:
            yield f"{call}: {error}", attend(cache)
        else:
            yield call, append(cache, 1, 70 + seed)
    if isinstance(cache.layers[0], (DynamicLayer, QuantizedLayer)) and not cache.layers[0].latent_dim:
        cache.compress("knorm", keep=0.5)
    yield "compress", attend(cache)
    for count in (30, 1):
        yield f"append {count}", append(cache, count, 90 + count)


def mapped(cache):
    """Return whether all arrays of rows lie in files."""
    large = [array for layer in cache.layers for array in layer._large_arrays()]
    return all(allocation.mapping_of(array) is not None for array in large if array.size)


@kinds
def test_all_calls_give_the_bits_of_memory(kind, tmp_path):
    """Of caches that are offloaded empty, with tokens, and again after every call."""
    memory, empty, later, moved = (KINDS[kind]() for _ in range(4))
    empty.offload(tmp_path / "a", only_non_sliding=False)
    runs = [operations(cache, kind) for cache in (memory, empty, later, moved)]
    for number, results in enumerate(zip(*runs, strict=True)):
        names_of, arrays = zip(*results, strict=True)
        assert len(set(names_of)) == 1
        for cache, own in zip((empty, later, moved), arrays[1:], strict=True):
            assert bits(own) == bits(arrays[0]), names_of[0]
            assert cache.nbytes == memory.nbytes
        if number == 3:
            later.offload(tmp_path / "b", only_non_sliding=False)
        moved.offload(tmp_path / f"c{number % 2}", only_non_sliding=False)
        assert mapped(empty)
        assert mapped(moved)
    assert {path.name: names(path) for path in tmp_path.iterdir()} == {"a": [], "b": [], "c0": [], "c1": []}
    for cache in (empty, later, moved):
        cache.close()


@kinds
def test_a_closed_cache_that_was_kept_is_opened_with_its_bits(kind, tmp_path):
    memory, files = KINDS[kind](), KINDS[kind]()
    files.offload(tmp_path, only_non_sliding=False, keep=True)
    for cache in (memory, files):
        append(cache, 9, 0)
        append(cache, 2, 10)
    files.close()
    assert (names(tmp_path), files.get_seq_length(), files.nbytes) == (["cache.npz"], 0, 0)
    kept = (tmp_path / "cache.npz").read_bytes()
    open_folder = PagedCache.open if kind.startswith("paged") else Cache.open
    with open_folder(tmp_path, keep=False) as again:
        assert again.folder == tmp_path
        assert mapped(again) or again.layers[0].window is not None
        for expected, got in zip(operations(memory, kind), operations(again, kind), strict=True):
            assert bits(got[1]) == bits(expected[1]), got[0]
    assert (tmp_path / "cache.npz").read_bytes() == kept
    with open_folder(tmp_path) as again:
        append(again, 1, 20)
    assert (tmp_path / "cache.npz").read_bytes() != kept


@pytest.mark.parametrize("only_non_sliding", [True, False])
def test_sliding_layers_may_stay_in_memory(tmp_path, only_non_sliding):
    memory, files = (fill(Cache(five_layers()), dims=DIMS) for _ in "ab")
    files.offload(tmp_path, only_non_sliding, keep=True)
    in_files = [
        allocation.mapping_of(next(iter(layer._large_arrays()))) is not None for layer in files.layers
    ]
    assert in_files == ([True, False, True, False, True] if only_non_sliding else [True] * 5)
    assert_alike_from_now_on(files, memory, np.float32, DIMS)
    files.close()
    with Cache.open(tmp_path) as again:
        assert_alike_from_now_on(again, memory, np.float32, DIMS)
    with Cache.open(tmp_path, keep=False) as third:
        assert_same(third, memory)


def full(*arguments):
    raise OSError(28, "No space left on device")


@kinds
def test_no_room_on_the_disk_leaves_a_cache_as_it_was(kind, tmp_path, monkeypatch):
    cache, memory = KINDS[kind](), KINDS[kind]()
    cache.offload(tmp_path / "a", only_non_sliding=False)
    for each in (cache, memory):
        append(each, 9, 0)
    calls = [lambda: cache.offload(tmp_path / "b", only_non_sliding=False)]
    if not kind.startswith(("paged", "static", "state", "delta")):  # these have their room
        calls.append(lambda: append(cache, 200, 1))
    if not kind.startswith(("paged", "ragged")):  # whose rows share pages
        calls.append(lambda: cache.repeat(40))
    for call in calls:
        before = cache.get_seq_length(), cache.folder
        with monkeypatch.context() as patch:
            patch.setattr(allocation.os, "posix_fallocate", full)
            with pytest.raises(OSError, match="No space") as caught:
                call()
        assert caught.value.filename in (str(tmp_path / "a"), str(tmp_path / "b"))
        assert (cache.get_seq_length(), cache.folder) == before
    for expected, got in zip(operations(memory, kind), operations(cache, kind), strict=True):
        assert bits(got[1]) == bits(expected[1]), got[0]
    cache.close()


def test_a_full_disk_leaves_an_earlier_saved_file_and_the_cache_open(tmp_path, monkeypatch):
    cache = fill(DynamicCache(2, offload=tmp_path))
    cache.close(keep=True)
    kept = (tmp_path / "cache.npz").read_bytes()
    cache = Cache.open(tmp_path)
    fill(cache)
    before = [layer.keys.tobytes() for layer in cache.layers]
    with monkeypatch.context() as patch:
        patch.setattr(kvkit.files.replace.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            cache.close()
    assert (names(tmp_path), (tmp_path / "cache.npz").read_bytes()) == (["cache.npz"], kept)
    assert [layer.keys.tobytes() for layer in cache.layers] == before
    cache.close()
    with Cache.open(tmp_path) as again:
        assert [layer.keys.tobytes() for layer in again.layers] == before


def test_folders_that_hold_no_saved_cache_are_refused(tmp_path):
    said = r"directory: expected a folder with cache.npz, which close\(keep=True\) writes, got .*, "
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(KvkitError, match=said + "without it"):
            Cache.open(folder)
    (tmp_path / "cache.json").write_text("{}")
    with pytest.raises(KvkitError, match=said + "offloaded by an older version"):
        PagedCache.open(tmp_path)
    (tmp_path / "cache.json").unlink()
    with PagedCache(4, 4, 1, 1, 8, np.float16, offload=tmp_path / "paged") as cache:
        cache.close(keep=True)
    with pytest.raises(KvkitError, match=r"expected a `Cache`, got a PagedCache \(PagedCache.open\)"):
        Cache.open(tmp_path / "paged")
    fill(DynamicCache(1, offload=tmp_path / "plain")).close(keep=True)
    with pytest.raises(KvkitError, match=r"expected a PagedCache, got a Cache \(Cache.open\)"):
        PagedCache.open(tmp_path / "plain")
    (tmp_path / "plain" / "cache.npz").write_bytes(b"PK")
    with pytest.raises(KvkitError):
        Cache.open(tmp_path / "plain")


@pytest.mark.skipif(os.name == "nt", reason="kills")
def test_nothing_is_left_of_a_killed_process(tmp_path):
    script = """
        import sys, time, numpy as np
        from kvkit.cache import DynamicCache, PagedCache
        states = np.ones((1, 4, 4096, 64), np.float32)
        folder = sys.argv[1]
        caches = DynamicCache(2, offload=folder), PagedCache(512, 16, 2, 4, 64, np.float32, offload=folder)
        for cache in caches:
            for i in range(2):
                cache.update(states, states, i)
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert names(tmp_path) == []
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == []


CALLS = {
    "update": lambda cache, folder: fill(cache),
    "update of a layer": lambda cache, folder: cache.layers[0].update(*random(np.float32, 2, 0)),
    "attend": lambda cache, folder: cache.attend(random(np.float32, 2, 0)[0], 0),
    "reserve": lambda cache, folder: cache.reserve(1),
    "crop": lambda cache, folder: cache.crop(-1),
    "reorder": lambda cache, folder: cache.reorder([1, 0]),
    "repeat": lambda cache, folder: cache.repeat(2),
    "reset": lambda cache, folder: cache.reset(),
    "prefetch": lambda cache, folder: cache.prefetch(0),
    "flush": lambda cache, folder: cache.flush(),
    "to_legacy_cache": lambda cache, folder: cache.to_legacy_cache(),
    "offload": lambda cache, folder: cache.offload(folder),
    "save": lambda cache, folder: cache.save(folder / "saved.npz"),
}
OF_TOKENS = {
    "remove": lambda cache, folder: cache.remove(0, 2),
    "retain": lambda cache, folder: cache.retain([0]),
    "compress": lambda cache, folder: cache.compress("knorm", keep=0.5),
}


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_closed_cache_refuses_every_call_with_one_sentence(kind, copied, tmp_path):
    cache = DynamicCache(2) if kind == "dynamic" else PagedCache(9, 4, 2, 3, 4, np.float32)
    cache = fill(cache, dims=(4, 4))
    cache.offload(tmp_path / "first")
    cache.close()
    cache = pickle.loads(pickle.dumps(cache)) if copied else cache
    (tmp_path / "second").mkdir()
    said = "cache: expected one that is open (a kept one: Cache.open), got one that was closed"
    for call in (CALLS | (OF_TOKENS if kind == "dynamic" else {})).values():
        with pytest.raises(KvkitError, match=f"^{re.escape(said)}$"):
            call(cache, tmp_path / "second")
    tokens_of = cache if kind == "dynamic" else cache.rows
    assert tokens_of.can("remove", 0, 2) == said
    assert names(tmp_path / "second") == []
    cache.close()


def test_a_step_that_is_open_in_a_paged_cache(tmp_path):
    """It is refused to move its arrays; an ended one reads on what it has read."""
    cache = PagedCache(8, 4, 1, 2, 8, np.float32)
    seq, new = cache.blocks.add(), tokens(6, dim=8)[0].swapaxes(0, 1)
    step = cache.begin_step([(seq, 6)])
    for call in (cache.offload, cache.save):
        with pytest.raises(KvkitError, match="a cache without an open step"):
            call(tmp_path / "a")
    step.update(new, new, 0)
    step.commit()
    before = step.attend(new, 0)
    cache.offload(tmp_path / "a")
    assert step.attend(new, 0).tobytes() == before.tobytes()
    with cache.begin_step([(seq, 0)]) as later:
        pass
    assert later.attend(new[:0], 0).shape == (0, 2, 8)
    cache.remove(seq, 1, 3)  # copies rows of the moved arrays
    keys, _ = cache.begin_step([(seq, 0)]).gather(0)
    assert keys.tobytes() == np.delete(new, [1, 2], 0).tobytes()


def test_layers_made_later_are_in_files_too(tmp_path):
    cache = DynamicCache(offload=tmp_path)
    for i in range(3):
        cache.update(*random(np.float16, 5, i), i)
    assert mapped(cache)
    expected = [layer.keys.tobytes() for layer in cache.layers]
    cache.close(keep=True)
    again = Cache.open(tmp_path)
    assert [layer.keys.tobytes() for layer in again.layers] == expected
    again.close()


@pytest.mark.slow
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
    cache, asked = fill(DynamicCache(3, offload=tmp_path)), []
    monkeypatch.setattr(allocation, "prefetch", lambda sides: asked.append(list(sides)))
    for i in range(3):
        cache.update(*random(np.float32, 1, i), i)
    cache.prefetch(2)
    for sides, layer in zip(asked, (1, 2, 0, 2), strict=True):
        assert [id(side) for side in sides] == [id(side) for side in cache.layers[layer].store.sides]
    cache.flush()
    cache.close()


def test_prefetching_and_flushing_go_through(tmp_path):
    """Of whole arrays, of views that begin inside a page, and of arrays in memory."""
    caches = DynamicCache(2, offload=tmp_path), PagedCache(64, 4, 2, 3, 4, np.float32, offload=tmp_path)
    for cache in (*caches, DynamicCache(2)):
        fill(cache, dims=(4, 4))
        before = [np.asarray(layer.keys).tobytes() for layer in cache.layers]
        cache.prefetch(1)
        allocation.prefetch_thread().submit(lambda: None).result()
        cache.flush()
        assert [np.asarray(layer.keys).tobytes() for layer in cache.layers] == before


def test_a_disk_that_cannot_reserve_space_is_filled_with_zeros(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(allocation.os, "posix_fallocate", unsupported)
    array = allocation.InFiles(tmp_path)((3, 2**19), np.float32)
    assert not array.any()
    monkeypatch.setattr(allocation.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        allocation.InFiles(tmp_path)((3, 2**19), np.float32)
