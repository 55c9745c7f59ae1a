"""Caches coded again: `convert` writes what `encode` gives, and reads what `decode` does."""

import os

import llama_state
import numpy as np
import pytest
from folder_scenes import full_disk

from kvkit import KvkitError, files, formats, tools
from kvkit.cache import PagedCache, QuantizedCache
from kvkit.formats.schemes import cache_format
from kvkit.tools import convert, recoding
from kvkit.tools.readers import open_cache

LAYERS, B, TOKENS, HEADS, D = 2, 2, 32, 2, 64
SAID = files.Description("l kv | b n h c", rope_applied=True)


@pytest.fixture
def cache(rng):
    return rng.standard_normal((LAYERS, 2, B, TOKENS, HEADS, D)).astype(np.float32)


NAMES = "q8_0", "int8:g32", "uint4:g32", "e4m3:head", "kivi2", "mlx4", "nvfp4", "lmdeploy_int4", "bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(cache, name, tmp_path, monkeypatch):
    monkeypatch.setattr(recoding, "ENCODED_TOKENS", 8)  # so that it takes several pieces
    cache[0, 0, 1] = 0  # so that nvfp4 has no scale of the whole there
    source, coded = tmp_path / "source.npz", tmp_path / "coded.safetensors"
    files.write(source, {"cache": [list(layer) for layer in cache], "tokens": np.arange(3)}, SAID)
    done = convert(source, coded, format=name)
    found = files.read(coded)
    assert (done.format, found.description.format, found.description.rope_applied) == ("float32", name, True)
    assert done.bytes == sum(array.nbytes for array in found.arrays.values()) - found.arrays["tokens"].nbytes
    back = convert(coded, None, format="float32")
    read, part = open_cache(coded), slice(TOKENS - 5, TOKENS + 7)  # of both sequences
    for i, layer in enumerate(cache):
        for side, x in enumerate(layer):
            one = name.replace("kivi2", ("kivi_key2", "kivi_value2")[side])
            if one == "bfloat16":
                expected = x.astype(formats.BY_NAME[one].dtype).astype(np.float32)
            else:
                one = cache_format(one)  # scales of 16 bits, of kvkit's own codes
                expected = np.stack([formats.decode(formats.encode(rows, one), one) for rows in x])
            np.testing.assert_array_equal(back.arrays[f"cache.{i}.{side}"], expected)
            rows = (read.layer(i).key, read.layer(i).value)[side].read(part)
            np.testing.assert_array_equal(rows.astype(np.float32), expected.reshape(-1, HEADS, D)[part])


@pytest.mark.skipif(os.name != "posix", reason="an open file has a name there")
def test_a_killed_conversion_leaves_no_file(cache, tmp_path):
    """What waits for the target has no name at any time."""
    seen = []

    def progress(done, total):
        seen.append((2 * done // total, [path.name for path in tmp_path.iterdir()]))

    convert({"cache": list(cache)}, tmp_path / "new.npz", from_layout="l | kv b n h c", format="int8:g32",
            progress=progress)  # fmt: skip
    assert seen == [(1, []), (2, [])]
    assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]


def test_a_full_disk_is_told_by_the_target(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(recoding.tempfile, "TemporaryFile", lambda dir: full_disk())
    with pytest.raises(OSError, match="No space left on device") as caught:
        convert({"cache": list(cache)}, tmp_path / "new.npz", from_layout="l | kv b n h c", format="int8:g32")
    assert caught.value.filename == str(tmp_path / "new.npz")
    assert not list(tmp_path.iterdir())


def test_sequences_of_tables(cache, tmp_path):
    """Of one length in one array, of several lengths in lists."""
    pool = cache.reshape(LAYERS, 2, 8, 8, HEADS, D)  # pages of 8 tokens
    tables = {"block_tables": np.array([[7, 2], [0, 2]]), "context_lens": np.array([11, 11])}
    done = convert({"cache": pool} | tables, None, from_layout="| l kv b n h c", format="float16")
    assert (done.description.sizes["n"], len(done.arrays)) == (11, 2 * LAYERS)  # and no tables
    rows = np.concatenate([pool[1, 0, 0], pool[1, 0, 2, :3]])
    np.testing.assert_array_equal(done.arrays["cache.1.0"][1], rows.astype(np.float16))
    tables["context_lens"] = np.array([11, 10])
    for format, tolerance in (("float16", 1e-3), ("q8_0", 0.01), ("int8:head", 0.02), ("q8_0/q4_0", 0.2)):
        path = tmp_path / f"{format.replace('/', '')}.npz"
        done = convert({"cache": pool} | tables, path, from_layout="| l kv b n h c", format=format)
        assert done.description.layout == "b l kv | n h c"
        assert "n" not in done.description.sizes
        found, layer = open_cache(path), open_cache({"cache": pool} | tables, "| l kv b n h c").layer(1)
        assert found.layer(1).starts == layer.starts == [0, 11, 21]
        for one, other in ((found.layer(1).key, layer.key), (found.layer(1).value, layer.value)):
            expected = other.read(slice(5, 17))
            assert (one.read(slice(5, 17)) - expected).std() < tolerance
        assert tools.study(path, "fp8").tokens == 21
        assert tools.inspect(path).sizes["b"] == 2
    tables["context_lens"] = np.array([11, 0])
    with pytest.raises(KvkitError, match="source: expected sequences that all have tokens, got 11, 0"):
        convert({"cache": pool} | tables, None, from_layout="| l kv b n h c", format="float16")


@pytest.mark.parametrize("kind", ["quantized", "paged"])
def test_saved_caches(cache, kind, tmp_path):
    held = QuantizedCache(f"e4m3:g{D}", num_layers=LAYERS, residual_length=8, sink=2, read_back=True)
    if kind == "paged":
        held = PagedCache(8, 16, LAYERS, HEADS, D, np.float32, quant_format="q8_0")
    for i, layer in enumerate(cache):
        held.update(*layer.swapaxes(2, 3), i)
    held.save(tmp_path / "saved.npz")
    done = convert(tmp_path / "saved.npz", None, format="float32")
    for i, layer in enumerate(held.layers):
        for side, states in enumerate((layer.keys, layer.values)):
            rows = done.arrays[f"cache.{i}.{side}"].swapaxes(1, 2)
            np.testing.assert_array_equal(rows, np.asarray(states))


def test_a_state_of_llama_cpp(cache, tmp_path):
    coded = formats.encode(cache[:, :, 0], "q8_0")["codes"].reshape(LAYERS, 2, TOKENS, -1)
    layers = [[(8, [row.tobytes() for row in side]) for side in layer] for layer in coded]
    stream = [(t, [0]) for t in range(TOKENS)], layers
    path = tmp_path / "state.bin"
    path.write_bytes(llama_state.head(False, 2, []) + llama_state.memory([stream], 0))
    done = convert(path, None, format="float32", sizes={"h": HEADS})
    for i, layer in enumerate(coded.reshape(LAYERS, 2, TOKENS, HEADS, -1)):
        for side, codes in enumerate(layer):
            np.testing.assert_array_equal(done.arrays[f"cache.{i}.{side}"][0], formats.decode(codes, "q8_0"))
