"""Compressed .npz files hold the same arrays, and are refused where they are damaged."""

import itertools
import json
import zipfile

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkit import files, tools
from kvkit.cache import DynamicCache, PagedCache, QuantizedCache, load
from kvkit.errors import KvkitError
from kvkit.files import compression, npz

DTYPES = "<f2", ">f2", "<f4", "<f8", "u1", "<i8", "bool", "<c16", "<U3", "bfloat16", "float8_e4m3fn"


@pytest.fixture(autouse=True)
def zstd(request):
    """Skip tests of the package where it is missing."""
    if "missing" not in request.node.name:
        pytest.importorskip("zstandard")


def same(one, two):
    """Return whether arrays have equal dtypes, orders, shapes and bytes."""
    orders = [(each.flags.c_contiguous, each.flags.f_contiguous) for each in (one, two)]
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes() and (
        orders[0] == orders[1] or orders[0] == (False, False)
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=4),
    order=st.sampled_from("CFV"),
    constant=st.booleans(),
)
def test_arrays_stay_the_same(tmp_path_factory, name, shape, order, constant):
    """All dtypes, orders, views and sizes come back, with their bytes."""
    dtype = getattr(ml_dtypes, name, None) or np.dtype(name)
    count = int(np.prod(shape)) * 64
    size = np.dtype(dtype).itemsize
    data = np.zeros(count * size, np.uint8)
    if not constant:
        data[:: size or 1] = np.random.default_rng(0).integers(0, 2, len(data[:: size or 1]))
    array = data.view(dtype).reshape(*shape, 64) if count else np.zeros((*shape, 64), dtype)
    array = np.asfortranarray(array) if order == "F" else array[..., ::2] if order == "V" else array
    path = tmp_path_factory.mktemp("zstd") / "a.npz"
    npz.write(path, {"a": array, "scalar": np.float32(3)}, {"note": "kept"}, compress="zstd")
    found = npz.read(path)
    assert same(array, found.arrays["a"])
    assert found.arrays["scalar"] == 3
    assert found.metadata["note"] == "kept"


def test_chunks_smaller_than_an_array(tmp_path, monkeypatch):
    """An array of several chunks comes back, and a file may be mapped."""
    monkeypatch.setattr(compression, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(npz, "MAX_COPIED", 0)
    array = np.random.default_rng(1).normal(size=(50, 77)).astype(np.float32)
    npz.write(tmp_path / "a.npz", {"a": array}, compress="zstd")
    assert same(array, npz.read(tmp_path / "a.npz").arrays["a"])


def states(tokens, scale=1.0):
    """Return keys or values [1, 2, tokens, 64]."""
    return (scale * np.random.default_rng(tokens).standard_normal((1, 2, tokens, 64))).astype(np.float16)


@pytest.mark.parametrize("make", [DynamicCache, lambda: QuantizedCache("int4:g32", residual_length=0)])
def test_caches_have_the_same_fingerprint(tmp_path, make):
    """A compressed cache is smaller, equal, and has the fingerprint of the plain file; equal bytes again."""
    cache = make()
    for layer in range(2):
        cache.update(states(200), states(200, 0.2), layer)
    cache.save(tmp_path / "plain.npz")
    for name in ("one.npz", "two.npz"):
        cache.save(tmp_path / name, compress="zstd")
    plain, packed = (npz.read(tmp_path / f"{name}.npz") for name in ("plain", "one"))
    assert packed.metadata["cache"] == plain.metadata["cache"]
    assert all(same(plain.arrays[name], array) for name, array in packed.arrays.items())
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    assert (tmp_path / "one.npz").stat().st_size < 0.95 * (tmp_path / "plain.npz").stat().st_size
    one, two = load(tmp_path / "one.npz"), load(tmp_path / "plain.npz")
    query = states(1)
    assert one.layers[1].attend(query).tobytes() == two.layers[1].attend(query).tobytes()
    one.save(tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "plain.npz").read_bytes()


def test_paged_cache(tmp_path):
    """A cache in pages is compressed too."""
    cache = PagedCache(
        num_layers=1, num_kv_heads=2, head_dim=64, num_blocks=32, page_size=16, dtype="float16"
    )
    cache.update(states(100), states(100), 0)
    cache.save(tmp_path / "p.npz", compress="zstd")
    again = load(tmp_path / "p.npz")
    assert again.get_seq_length() == 100
    query = states(1)
    assert again.layers[0].attend(query).tobytes() == cache.layers[0].attend(query).tobytes()


def test_tools_and_inspect(tmp_path):
    """`convert` compresses by both ways, and `inspect` says so; a converted file is plain again."""
    from kvkit_cli.main import main

    source, small, plain = (str(tmp_path / f"{name}.npz") for name in ("in", "small", "plain"))
    kept = states(300).swapaxes(1, 2)  # [layers, tokens, heads, dim]
    files.write(source, {"key": kept, "value": kept})
    for options in (["--to", "l kv | n h c"], ["--format", "q8_0"]):
        arguments = ["convert", source, small, *options, "--compress", "zstd"]
        done = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        shown = tools.inspect(small)
        assert shown.metadata["compressed"].startswith("zstd, ")
        assert "compressed: zstd, " in str(shown)
    tools.convert(small, plain, format="float16")
    assert "compressed" not in npz.read(plain).metadata


@pytest.mark.parametrize("value", ["zip", "", True, 3])
def test_wrong_values_write_nothing(tmp_path, value):
    """A compression that is not known is refused, and so are files of other kinds."""
    cache = DynamicCache()
    cache.update(states(3), states(3), 0)
    (tmp_path / "c.npz").write_bytes(b"old")
    with pytest.raises(KvkitError, match=r"^compress: expected 'zstd', got "):
        cache.save(tmp_path / "c.npz", compress=value)
    with pytest.raises(KvkitError, match=r"compress: expected a .npz file"):
        files.write(tmp_path / "c.safetensors", {"a": states(3)}, compress="zstd")
    with pytest.raises(KvkitError, match=r"compress: expected a .npz file"):
        tools.convert({"cache": [[states(3)] * 2]}, tmp_path / "c.bin", from_layout="hf", to_layout="hf",
                      compress="zstd")  # fmt: skip
    assert (tmp_path / "c.npz").read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["c.npz"]


def test_a_missing_package_names_the_line(tmp_path, monkeypatch):
    """Without zstandard, writing and reading name the line that installs it; the old file stays."""
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "c.npz").write_bytes(b"old")
    with pytest.raises(KvkitError, match=r"c.npz: .*package zstandard: pip install '\.\[zstd\]' in a clone"):
        npz.write(tmp_path / "c.npz", {"a": np.zeros(100)}, compress="zstd")
    assert (tmp_path / "c.npz").read_bytes() == b"old"


def rewritten(path, change):
    """Write a compressed file again, with metadata and arrays that `change` has changed."""
    with np.load(path) as held:
        arrays = {name: held[name] for name in held.files}
    about = json.loads(arrays.pop("kvkit.json").item())
    change(about, arrays)
    about["dtypes"] = {name: array.dtype.name for name, array in arrays.items()}
    np.savez(path, **arrays, **{"kvkit.json": np.array(json.dumps(about).encode())})


FORMS = [
    ["<f4", "C", 51, 64], ["<f4", "C", 2**40], ["<f4", "X", 50, 64], ["<f4", "C", -50, -64], ["O", "C", 1600],
    ["<f4", "C", True], ["<f4"], [], None, "text", ["<f4", "C", 50.0, 64.0], [3, "C", 3],
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_lying_forms(tmp_path, form):
    """A form that does not describe the frame is refused by the name of the file."""
    path = tmp_path / "a.npz"
    npz.write(path, {"a": np.zeros((50, 64), np.float32)}, compress="zstd")

    def change(about, arrays):
        about["forms"]["a"] = form

    rewritten(path, change)
    with pytest.raises(npz.FileError, match=r"a\.npz: "):
        npz.read(path)


def test_damaged_frames(tmp_path, monkeypatch):
    """A changed byte of a frame is found, in mapped files too, whose zip checksum is not compared."""
    monkeypatch.setattr(npz, "MAX_COPIED", 0)
    array = (np.arange(3000) % 17).astype(np.float32)
    path = tmp_path / "a.npz"
    for place, missing in itertools.chain(((i, 0) for i in range(60)), ((0, n) for n in (1, 3, 9, 40))):
        npz.write(path, {"a": array}, compress="zstd")

        def change(about, arrays, place=place, missing=missing):
            frame = arrays["a"].copy()
            frame[min(place, len(frame) - 1)] ^= 0x55
            arrays["a"] = frame[: len(frame) - missing] if missing else frame
            arrays["a"][0] ^= 0x55 * bool(missing)

        rewritten(path, change)
        try:
            found = npz.read(path).arrays["a"]
        except npz.FileError:
            continue
        assert found.tobytes() == array.tobytes()  # a bit that zstd ignores


def test_older_versions_refuse(tmp_path):
    """The version says that the file is compressed, so a reader that knows version 1 only refuses it."""
    path = tmp_path / "a.npz"
    npz.write(path, {"a": np.zeros(1000)}, compress="zstd")
    with zipfile.ZipFile(path) as archive, archive.open("kvkit.json.npy") as member:
        assert json.loads(np.load(member).item())["version"] == 2
    rewritten(path, lambda about, arrays: about.update(version=1))
    with pytest.raises(npz.FileError, match="version 1, not 2"):
        npz.read(path)
