"""Caches of layers that differ, of latent rows and of groups: errors say what is the matter."""

import struct

import numpy as np
import pytest
from click.testing import CliRunner

from kvkit import files, tools
from kvkit.errors import KvkitError
from kvkit.files import lmcache
from kvkit.tools.readers import open_cache
from kvkit_cli.main import main

pytestmark = pytest.mark.cpu


def by_layer(*shapes):
    """Return layers [tokens, heads, content] of keys and values."""
    count = iter(range(100))
    return {f"{side}.{i}": np.arange(np.prod(shape), dtype=np.float16).reshape(shape) + next(count)
            for i, shape in enumerate(shapes) for side in ("key", "value")}  # fmt: skip


GEMMA = by_layer((20, 8, 32), (20, 2, 64), (20, 8, 32))  # layers with a window have other heads
HYBRID = by_layer((8, 2, 16), (30, 2, 16))


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        (GEMMA, "equal heads in each layer, got 8 heads of 32 elements of float16, 2 heads of 64 elements of"
                " float16 (--layers 0,2: takes those of equal heads)"),
        (HYBRID, "as many blocks and tokens in each layer, got (1, 8) and (1, 30) (--layers 0,2: takes"),
    ],
    ids=["heads", "lengths"],
)  # fmt: skip
def test_layers_that_differ(tmp_path, arrays, what):
    path, out = str(tmp_path / "layers.npz"), str(tmp_path / "out.npz")
    files.write(path, arrays)
    shown = CliRunner().invoke(main, ["convert", path, out, "--to", "hf"])
    assert (shown.exit_code, what in shown.stderr) == (2, True), shown.stderr
    shapes = [array.shape for name, array in arrays.items() if name.startswith("key")][:2]
    said = " and ".join(str((1, *shape)) for shape in shapes)
    shown = CliRunner().invoke(main, ["check", path])
    assert f"cache: expected layers and sequences of one length, with equal heads, got {said}" in shown.stderr
    assert "kvkit convert --layers" in shown.stderr
    chosen = "0,2" if arrays is GEMMA else "0"
    assert CliRunner().invoke(main, ["convert", path, out, "--to", "hf", "--layers", chosen]).exit_code == 0
    done = tools.convert(path, out, format="float32")
    assert done.description.sizes.keys() == ({"l", "b", "n"} if arrays is GEMMA else {"l", "b", "h", "c"})
    for i in range(len(shapes)):  # all tokens of each layer, which were as many as multiples of layer 0's
        key = arrays[f"key.{i}"].astype(np.float32)
        assert np.array_equal(open_cache(out).layer(i).key.read(slice(None)), key)


@pytest.mark.parametrize("layout", ["| l n h c", "l | b n h c", "l | b h n c"])
def test_pairs_move_to_a_layout_without_kv(tmp_path, layout):
    """As pairs are read with such a layout; both sides become arrays of their own."""
    arrays = {side: np.stack([GEMMA[f"{side}.{i}"] for i in (0, 2)]) for side in ("key", "value")}
    done = tools.convert(arrays, tmp_path / "out.npz", to_layout=layout, verify=True)
    assert done.description.layout.replace("kv", "").split() == layout.split()
    found = open_cache(tmp_path / "out.npz")
    assert np.array_equal(found.layer(1).value.read(slice(None)), arrays["value"][1])
    whole = {"cache": [[array, array] for array in np.zeros((2, 1, 3, 5, 8))]}
    with pytest.raises(KvkitError, match="to_layout: expected an axis kv, for the keys and values"):
        tools.convert(whole, None, from_layout="hf", to_layout=layout)


def latent_cache():
    keys, values = (np.arange(2 * 20 * dim, dtype=np.float32).reshape(2, 1, 1, 20, dim) for dim in (512, 64))
    return keys, values


@pytest.mark.transformers
def test_latent_rows_in_a_cache_of_transformers(tmp_path):
    """Keys are the latent part and values the rotated one; planes join to whole rows."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    keys, values = latent_cache()
    for i in range(2):
        cache.update(torch.from_numpy(keys[i]), torch.from_numpy(values[i]), i)
    saved = {f"past_key_values.{i}.{side}": getattr(layer, f"{side}s")
             for i, layer in enumerate(cache.layers) for side in ("key", "value")}  # fmt: skip
    torch.save(saved, tmp_path / "cache.pt")
    note = "keys of 512 elements and values of 64 in one head may be the latent and the rotated part of rows"
    note += " (MLA): the layout 'kv l | b 1 n c' reads them so"
    for source in cache, tmp_path / "cache.pt":
        for found in tools.inspect(source), tools.study(source, "fp8"), tools.check(source):
            assert note in found.notes
        with pytest.raises(KvkitError, match=r"may be the latent and the rotated part of rows \(MLA\)"):
            tools.convert(source, None, to_layout="vllm-lbnhc")
    done = tools.convert(tmp_path / "cache.pt", None, from_layout="kv l | b 1 n c", to_layout="l | b n c")
    assert np.array_equal(done.arrays["cache"][1][0], np.concatenate([keys[1, 0, 0], values[1, 0, 0]], -1))


def test_a_chunk_of_lmcache_with_two_groups(tmp_path):
    """Groups of layers lie one behind the other: their sizes divide no chunk, and no header tells both."""
    groups = [np.zeros((2, layers, 16, 2 * dim), np.float16) for layers, dim in ((3, 16), (1, 40))]
    data = b"".join(group.tobytes() for group in groups)
    path = tmp_path / "org-model@1@0@1234abcd@half.pt"
    path.write_bytes(data)
    with pytest.raises(
        KvkitError, match="has them in groups, one behind the other, which kvkit does not part"
    ):
        tools.convert(path, None, to_layout="hf", sizes={"l": 3, "h": 2, "c": 16})
    header = struct.pack("<7i", len(data), 1, 2, *groups[0].shape)
    path.with_suffix(".data").write_bytes(header + data)
    with pytest.raises(
        KvkitError, match="its header tells the shape of fewer elements: a chunk of layers of two"
    ):
        files.read(path.with_suffix(".data"))
    assert len(header) == lmcache.HEADER
