"""Quantized layers in files: the same bits as in memory."""

import json
import os

import numpy as np
import pytest
from folder_scenes import ON_DISK, full_disk, names
from quantized_cache_scenes import (
    OPTIONS,
    assert_alike_from_now_on,
    assert_same,
    attended,
    feed,
    states,
)

import kvkit
from kvkit.cache import Cache, QuantizedCache, QuantizedLayer, QuantSpec
from kvkit.cache.stores import mapped


@pytest.mark.parametrize("what", ON_DISK)
def test_no_room_on_the_disk_leaves_everything_as_it_was(tmp_path, monkeypatch, what):
    cache, memory = Cache([QuantizedLayer(**OPTIONS) for _ in "ab"]), QuantizedLayer(**OPTIONS)
    for layer in (cache.layers[0], memory):
        feed(layer, states(20), 19, 20)
    cache.offload(tmp_path)
    before = names(tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(*ON_DISK[what](), full_disk)
        for call in (
            lambda: cache.layers[0].update(*states(300)),
            lambda: cache.layers[0].reserve(300),
            lambda: cache.layers[0].repeat(2),
            lambda: cache.layers[0].reorder([1, 0]),
            lambda: cache.layers[1].update(*states(3)),
        ):
            with pytest.raises(OSError, match="No space"):
                call()
            assert_same(cache.layers[0], memory)
            assert attended(cache.layers[0]) == attended(memory)
            assert cache.layers[1].keys is None
            assert names(tmp_path) == before
    assert_alike_from_now_on(cache.layers[0], memory)
    cache.close()


def test_a_thousand_tokens_make_few_files(tmp_path):
    cache = QuantizedCache(1, residual_length=32, value=QuantSpec(group=16), offload=tmp_path)
    given = states(1000, batch=1, heads=1, dims=(16, 16))
    feed(cache.layers[0], given, *range(1, 1001))
    assert cache.layers[0].home.generation <= 16
    cache.close()


@pytest.mark.parametrize("prompt", [10, 3000])
def test_the_first_tokens_after_a_prompt_take_no_other_file(tmp_path, prompt):
    """Where there were fewer than fill a window the tail is soon too small, and grows once."""
    cache = QuantizedCache(1, residual_length=32, offload=tmp_path)
    given = states(4000, batch=1, heads=1, dims=(32, 32))
    feed(cache.layers[0], given, prompt)
    assert cache.layers[0].home.generation == 1
    feed(cache.layers[0], given, *range(prompt + 1, prompt + 80))
    assert cache.layers[0].home.generation == 1 + (prompt == 10)
    cache.reserve(200)
    reserved = cache.layers[0].home.generation
    feed(cache.layers[0], given, *range(prompt + 80, prompt + 279))
    assert cache.layers[0].home.generation == reserved
    cache.reserve(1)
    assert cache.layers[0].home.generation == reserved
    cache.close()


def test_a_file_is_small_after_a_long_prompt(tmp_path):
    """The originals of a prompt go with the next file, which more tokens than it had room for take."""
    cache = Cache([QuantizedLayer(**OPTIONS)], offload=tmp_path)
    layer, given = cache.layers[0], states(4000)
    feed(layer, given, 3000, 3001, 3600)
    assert layer.home.generation == 1
    feed(layer, given, *range(3601, 3902))
    (path,) = tmp_path.glob("*.raw")
    assert path.stat().st_size < 2 * layer.nbytes + 2 * 8 * 3901 * 2 + 10 * 4096
    cache.close()


def test_a_sidecar_says_all(tmp_path):
    """Raw arrays, and JSON that describes them: numpy alone finds the codes."""
    cache = Cache([QuantizedLayer(**OPTIONS)], offload=tmp_path)
    feed(cache.layers[0], states(50), 45, 50)
    about = json.loads((tmp_path / "layer-000.json").read_text())
    raw, start, found = (tmp_path / f"layer-000-{about['generation']}.raw").read_bytes(), 0, {}
    for name in ("keys", "values"):
        for part, (dtype, *shape) in about[name].items():
            count = int(np.prod(shape))
            found[f"{name}.{part}"] = np.frombuffer(raw, dtype, count, start).reshape(shape)
            start = -(-(start + count * np.dtype(dtype).itemsize) // 4096) * 4096
    for name, expected in cache.layers[0].arrays().items():
        if not name.endswith(("tail", "ends")):
            assert np.array_equal(found[name][:, :, : expected.shape[2]], expected), name
    assert about["state"]["values.coded"] == 43
    cache.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about["state"].update({"keys.coded": 10**6}),
        lambda about: about["state"].update({"keys.before": 10**6}),
        lambda about: about["state"].update({"values.start": -(10**6)}),
        lambda about: about["state"].update({"length": 3}),
        lambda about: about["keys"].update(codes=about["keys"]["tail"]),
        lambda about: about["values"].pop("cells"),
        lambda about: about["arguments"].update(sink=3),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, change):
    cache = Cache([QuantizedLayer(**OPTIONS)])
    feed(cache.layers[0], states(50), 50)
    cache.offload(tmp_path, keep=True)
    cache.close()
    path = tmp_path / "layer-000.json"
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))
    with pytest.raises(
        kvkit.KvkitError, match=r"expected a cache that kvkit has written, got .*layer-000\.json"
    ):
        Cache.open(tmp_path)


def test_prefetch_asks_for_what_is_filled(tmp_path, monkeypatch):
    cache = Cache([QuantizedLayer(**OPTIONS)], offload=tmp_path)
    feed(cache.layers[0], states(50), 50)
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: asked.append(call), raising=False)
    cache.prefetch(0)
    mapped.prefetch_thread().submit(int).result()
    file = cache.layers[0].store.file
    assert {call[0] for call in asked} == {file.descriptor}
    codes = [side.codes.shape[3] * side.coded for side in cache.layers[0].store.sides]
    tails = [side.tail.strides[2] * (side.length - side.codes_end) for side in cache.layers[0].store.sides]
    lengths = [call[2] for call in asked]
    assert [lengths.count(length) >= 4 for length in tails] == [True, True]
    assert [lengths.count(length) >= 4 for length in codes] == [True, True]
    assert all(length > 0 and start + length <= os.path.getsize(file.path) for _, start, length, _ in asked)
    cache.close()
