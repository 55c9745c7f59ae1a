"""Prompt caches of MLX: files that mlx-lm wrote, and files that it reads."""

import json
import re
import struct

import mlx_caches as scene
import mlx_edges as edges
import numpy as np
import pytest
import safetensors.numpy

from kvkit import files, formats
from kvkit.errors import KvkitError
from kvkit.files import Description, FileError
from kvkit.tools import check, convert, inspect, study
from kvkit.tools.readers import open_cache

VERSIONS = "0.31.3", "0.32.2"


def written(version, name):
    return scene.WRITTEN / f"mlx_lm-{version}-{name}.safetensors"


def parts_of(path):
    """Return the tensors and texts of a file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return safetensors.numpy.load_file(path), json.loads(data[8 : 8 + length])["__metadata__"]


def check_floats(found):
    for layer, tokens in enumerate((range(scene.TOKENS), scene.kept())):
        for kv, side in enumerate(scene.rows(layer)):
            np.testing.assert_array_equal(found.arrays[f"cache.{layer}.{kv}"], side[:, :, list(tokens)])


def check_codes(found):
    for layer in range(2):
        for kv, side in enumerate(scene.rows(layer)):
            coded = formats.encode(side, "mlx3:g32")
            for name, part in (("cache", "codes"), ("scales", "scale"), ("minima", "minimum")):
                array = np.ascontiguousarray(found.arrays[f"{name}.{layer}.{kv}"])
                np.testing.assert_array_equal(array.view(coded[part].dtype), coded[part])


@pytest.mark.parametrize("version", VERSIONS)
def test_files_that_mlx_lm_wrote(version):
    found = files.read(written(version, "floats"))
    said = {"classes": ["KVCache", "RotatingKVCache"], "metadata": {"model": "none"}}
    assert (found.kind, found.metadata) == ("prompt cache of MLX", said)
    assert found.description == Description("l kv | b h n c", {"l": 2}, "float16", rope_applied=True)
    assert found.notes == ("layer 1 has a window: row 4 is token 8",)
    check_floats(found)
    path = written(version, "codes")
    found = files.read(path)
    assert found.description.sizes == {"l": 2, "b": 1, "h": 2, "n": scene.TOKENS}
    assert (found.description.format, found.metadata["head_dim"]) == ("mlx3:g32", 32)
    check_codes(found)
    assert "mlx3:g32" in str(inspect(path))
    assert study(path, ["int8:g32"]).summary[0].bits == 8.5
    decoded = convert(path, None, format="float32").arrays["cache.1.1"]
    np.testing.assert_allclose(decoded.swapaxes(1, 2), scene.rows(1)[1], rtol=0, atol=0.2)


@pytest.mark.parametrize("layout", ["mlx", "mlx-0.31"])
def test_files_that_kvkit_writes_are_read_again(tmp_path, layout):
    path = tmp_path / "prompt.safetensors"
    cache = [scene.rows(layer) for layer in range(2)]
    pool = convert({"cache": cache}, None, from_layout="hf", to_layout="vllm-lbnhc", page_size=8).arrays
    convert(pool, path, from_layout="vllm-lbnhc", to_layout=layout, page_size="longest")
    found = files.read(path)
    assert found.metadata == {"classes": ["KVCache"] * 2, "metadata": {}}
    assert found.description.sizes == dict(zip("lbhnc", (2, *cache[0][0].shape), strict=True))
    for layer, sides in enumerate(cache):
        for kv, side in enumerate(sides):
            np.testing.assert_array_equal(found.arrays[f"cache.{layer}.{kv}"], side)
    convert(written("0.31.3", "codes"), path, to_layout=layout)
    check_codes(files.read(path))
    with pytest.raises(FileError, match="has all tokens of each b, in order, and nothing else"):
        convert(pool, path, from_layout="vllm-lbnhc", to_layout=layout)
    with pytest.raises(FileError, match="and nothing else"):
        convert({"cache": cache, "x": np.ones(2)}, path, from_layout="hf", to_layout=layout)


@pytest.mark.peers
def test_the_package_writes_and_reads_them(tmp_path):
    mx = pytest.importorskip("mlx.core")
    classes = pytest.importorskip("mlx_lm.models.cache")
    path, new = tmp_path / "prompt.safetensors", hasattr(classes.KVCache(), "keys_and_values")
    for name, check_one in (("floats", check_floats), ("codes", check_codes)):
        made = scene.filled(mx, classes, scene.FILES[name])
        classes.save_prompt_cache(str(path), made, {"model": "none"})
        theirs, texts = parts_of(path)
        ours, said = parts_of(written(VERSIONS[new], name))
        assert (theirs.keys(), texts) == (ours.keys(), said)
        assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}
        check_one(files.read(path))
    for bits in (None, 3, 6):
        cache = {"cache": [scene.rows(0), scene.rows(1)]}
        if bits:
            coded = tmp_path / "coded.npz"
            convert(cache, coded, from_layout="hf", format=f"mlx{bits}:g32")
            convert(coded, path, to_layout="mlx" if new else "mlx-0.31")
        else:
            files.write(path, cache, Description("mlx" if new else "mlx-0.31"))
        loaded = classes.load_prompt_cache(str(path))
        keys, values = loaded[1].state[:2]
        sides = [
            np.array(mx.dequantize(*side, group_size=32, bits=bits) if bits else side)
            for side in (keys, values)
        ]
        assert loaded[1].offset == scene.TOKENS
        for side, x in zip(sides, scene.rows(1), strict=True):
            np.testing.assert_allclose(side, x, rtol=0, atol=(32 / 2**bits if bits else 0))


def changed(path, target, tensors=None, texts=None):
    """Write a file again with other tensors and texts; None removes one."""
    both = [old | (new or {}) for old, new in zip(parts_of(path), (tensors, texts), strict=True)]
    both = [{name: value for name, value in part.items() if value is not None} for part in both]
    safetensors.numpy.save_file({name: np.asarray(x) for name, x in both[0].items()}, target, both[1])
    return target


def test_layers_of_other_classes_keep_their_names(tmp_path):
    texts = {"1.0": "ArraysCache"}
    path = changed(written("0.32.2", "floats"), tmp_path / "x", {"0.2": None}, texts)
    found = files.read(path)
    assert found.notes[0] == "layers are of class ArraysCache, whose arrays kvkit does not know"
    assert {"0.0", "0.1", "cache.0.0", "cache.0.1", "layers"} == set(found.arrays)
    assert found.arrays["layers"].tolist() == [1]
    np.testing.assert_array_equal(found.arrays["cache.0.1"], scene.rows(1)[1][:, :, scene.kept()])
    found = files.read(changed(path, tmp_path / "y", None, {"1.1": "Other"}))
    assert (found.description, "1.5" in found.arrays) == (Description(), True)


@pytest.mark.parametrize(
    ("version", "name", "tensors", "texts", "what"),
    [
        ("0.31.3", "codes", {"1.1.2": None}, {}, "tensor 1.1.2 is missing"),
        ("0.31.3", "codes", {}, {"0.1.2": "x"}, "layer 1 has no bits: 0.1.2 is x"),
        ("0.31.3", "codes", {}, {"0.1.2": "4"}, "it has codes of mlx3:g32, mlx4:g32, not of one"),
        ("0.31.3", "codes", {}, {"2.0": "KVCache"}, "tensor 0.0 is missing"),
        ("0.31.3", "floats", {}, {"2.0": ""}, "in a format that kvkit does not know"),
        ("0.31.3", "floats", {}, {"2.0": "two words"}, "in a format that kvkit does not know"),
        ("0.31.3", "floats", {}, {"0.1.3": "17"}, "layer 1 has 16 rows, which contradicts"),
        ("0.32.2", "floats", {"0.2": np.int32(257)}, {}, "layer 0 has 256 rows, which contradicts"),
        ("0.32.2", "floats", {"0.2": np.int32(-1)}, {}, "layer 0 has no offset: 0.2 is -1"),
        ("0.32.2", "floats", {}, {"1.2": "KVCache"}, "layer 2 has no offset: 2.2 is missing"),
        ("0.32.2", "floats", {}, {"1.0": None}, "in a format that kvkit does not know"),
        ("0.32.2", "floats", {}, {"0.kvkit": "{"}, "its metadata kvkit is damaged"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path, version, name, tensors, texts, what):
    path = changed(written(version, name), tmp_path / "x", tensors, texts)
    with pytest.raises(KvkitError, match=re.escape(what)):
        files.read(path)


@pytest.fixture
def package():
    """Return (mlx.core, the classes of mlx-lm's caches)."""
    mx = pytest.importorskip("mlx.core")
    classes = pytest.importorskip("mlx_lm.models.cache")
    if not hasattr(classes.KVCache(), "keys_and_values"):
        pytest.skip("lists of caches have other names before mlx-lm 0.32")
    return mx, classes


def saved(package, path, layers):
    package[1].save_prompt_cache(str(path), layers)
    return files.read(path)


def test_members_of_lists_are_layers(package, tmp_path):
    """Falcon-H1's layers are lists of a state and a KVCache; others have two KVCaches."""
    mx, classes = package
    hybrid = [
        classes.CacheList(edges.states(mx, classes), edges.filled(mx, classes.KVCache(), sign=i))
        for i in (1, -1)
    ]
    found = saved(package, tmp_path / "hybrid.safetensors", hybrid)
    assert found.notes == ("layers are of class ArraysCache, whose arrays kvkit does not know",)
    assert "layers" not in found.arrays
    for i, sign in enumerate((1, -1)):
        np.testing.assert_array_equal(found.arrays[f"cache.{i}.0"], edges.rows(sign=sign))
        np.testing.assert_array_equal(found.arrays[f"cache.{i}.1"], -edges.rows(sign=sign))
    after_states = [edges.states(mx, classes), *hybrid[:1]]
    assert saved(package, tmp_path / "one.safetensors", after_states).arrays["layers"].tolist() == [1]

    rotating = edges.filled(mx, classes.RotatingKVCache(16, 4), 12)
    pairs = [classes.CacheList(edges.filled(mx, classes.KVCache()), rotating) for _ in range(2)]
    found = saved(package, tmp_path / "pairs.safetensors", pairs)
    assert found.notes[0] == "layers are counted as they lie in lists: 0.0, 0.1, 1.0, 1.1"
    np.testing.assert_array_equal(found.arrays["cache.3.0"], edges.rows(12))
    assert open_cache(tmp_path / "pairs.safetensors").layer(1).key.tokens == 12
    assert not [name for name in found.arrays if not name.startswith("cache.")]

    index = classes.KVCache()  # of DeepSeek V3.2: keys that choose tokens
    index.update_and_fetch(mx.array(edges.rows()), mx.zeros((1, 2, 20, 0)))
    found = saved(
        package,
        tmp_path / "index.safetensors",
        [classes.CacheList(edges.filled(mx, classes.KVCache()), index)],
    )
    assert found.notes == ("layers are of class KVCache without values, whose arrays kvkit does not know",)
    np.testing.assert_array_equal(found.arrays["cache.0.0"], edges.rows())


def test_layers_without_tokens_are_named(package, tmp_path):
    mx, classes = package
    path = tmp_path / "empty.safetensors"
    assert saved(package, path, [classes.KVCache(), classes.KVCache()]).notes == (
        "layers without tokens: 0, 1",
    )
    for tool in study, check:
        with pytest.raises(KvkitError, match=r"\(layers without tokens: 0, 1\)$"):
            tool(path)
    assert "note: layers without tokens: 0, 1" in str(inspect(path))
    found = saved(package, path, [classes.KVCache(), edges.filled(mx, classes.KVCache())])
    assert (found.notes, found.arrays["layers"].tolist()) == (("layers without tokens: 0",), [1])


def test_codes_beside_floats_are_named(package, tmp_path):
    mx, classes = package
    layers = [edges.filled(mx, classes.KVCache()) for _ in range(3)]
    layers[1] = layers[1].to_quantized(64, 4)
    what = r"it has layers of codes \(1\) and of floats \(0, 2\): quantize all layers"
    with pytest.raises(KvkitError, match=what):
        saved(package, tmp_path / "mixed.safetensors", layers)
