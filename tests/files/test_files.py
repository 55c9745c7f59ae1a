"""One door for files of any kind: arrays come back bit for bit, with what was said of them."""

import os
import struct
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import kvkit
from kvkit import KvkitError, files
from kvkit.files import Description, FileError, mapping, members, npz, pt, replace, tensors

DTYPES = [np.dtype(kind) for kind in ("f4", "f2", "i1", "u1", "i8", ml_dtypes.bfloat16)]
DTYPES += [
    np.dtype(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
]
SAID = Description(
    "l kv | b h n c", {"l": 2, "h": 3, "c": 8}, "float16", "csr", True, 1e5, "halves", "hadamard", (64, 32),
    "2",
)  # fmt: skip


def filled(rng, shape, dtype):
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


def assert_same(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


@pytest.fixture(params=[-1, 2**24], ids=["mapped", "copied"])
def small(request, monkeypatch):
    for module in (npz, mapping):
        monkeypatch.setattr(module, "MAX_COPIED", request.param)
    return request.param


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_comes_back_with_what_is_said_of_it(tmp_path, rng, small, suffix, dtype):
    cache = [[filled(rng, (2, 3, n, 8), dtype) for _ in range(2)] for n in (5, 7)]
    table, strided = np.arange(6, dtype=np.int32).reshape(2, 3), filled(rng, (4, 6), dtype).T[::2]
    path = tmp_path / f"cache{suffix}"
    arrays = {"cache": cache, "block_tables": table, "strided": strided, "none": strided[:0]}
    written = []
    files.write(path, arrays, SAID, metadata={"model": "m"}, advance=written.append)
    assert sum(written) == sum(array.nbytes for array in files.flat(arrays).values())
    found = files.read(path.rename(tmp_path / "no suffix"))
    assert (found.kind, found.description, found.metadata["model"]) == (suffix, SAID, "m")
    for got, expected in zip(files.nested(found.arrays), cache, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    for name in ("block_tables", "strided", "none"):
        assert_same(found.arrays[name], arrays[name])
    assert (found.mapped is not None) == (small < 0)
    before = path.with_name("no suffix").read_bytes()
    found.arrays["block_tables"][...] = 0
    assert path.with_name("no suffix").read_bytes() == before


@pytest.mark.parametrize("dtype", [*DTYPES[:6], np.dtype("<U3")], ids=str)
def test_npy(tmp_path, rng, small, dtype):
    array = np.full((3, 4), "abc") if dtype.kind == "U" else filled(rng, (3, 4, 5), dtype)
    for one in (array, np.asfortranarray(array), array[::2], array[:0]):
        files.write(tmp_path / "x.npy", one)
        assert_same(files.read(tmp_path / "x.npy").arrays["cache"], one)
    if dtype.kind != "V":
        assert_same(np.load(tmp_path / "x.npy"), array[:0])


def test_what_a_file_cannot_hold_is_refused(tmp_path):
    float8 = np.zeros(3, ml_dtypes.float8_e4m3fn)
    for name, arrays, what in (
        ("x.npy", float8, "no .npy file can name: write a .npz or .safetensors"),
        ("x.npy", float8.astype(ml_dtypes.float8_e5m2), "no .npy file can name"),
        ("x.npy", [float8, float8], "one array, not 2"),
        ("x.safetensors", np.zeros(3, "U4"), "no safetensors file can name: convert it"),
        ("x.safetensors", {"__metadata__": float8}, "can be called __metadata__: rename it"),
        ("x.npz", np.array([None]), "no .npz file can name"),
        *(
            ("x.npz", {name: float8}, "no array in it can be called")
            for name in ("", "a\0", "\ud800", "a" * 70_000)
        ),
        ("x.pt", float8, "kvkit writes no .pt: give a name in .npz, .npy, .safetensors"),
        ("x", float8, "no files without a suffix"),
    ):
        with pytest.raises(FileError, match=what):
            files.write(tmp_path / name, arrays)
    assert list(tmp_path.iterdir()) == []


def test_others_read_our_safetensors_and_we_theirs(tmp_path, rng, torch):
    import safetensors.torch

    array = filled(rng, (3, 5), np.dtype("f2"))
    files.write(tmp_path / "x.safetensors", {"a": array.T})
    assert_same(safetensors.numpy.load_file(tmp_path / "x.safetensors")["a"], array.T)
    brain = torch.arange(6).to(torch.bfloat16).reshape(2, 3)
    safetensors.torch.save_file({"b": brain}, tmp_path / "y.safetensors", {"format": "pt"})
    found = files.read(tmp_path / "y.safetensors")
    assert_same(found.arrays["b"], np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3))
    assert (found.metadata, found.description) == ({"format": "pt"}, Description())


@pytest.mark.parametrize("kind", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_floats_without_a_negative_zero_in_safetensors(tmp_path, torch, kind):
    import safetensors.torch

    array = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, kind)).reshape(2, 128)
    files.write(tmp_path / "x.safetensors", {"a": array})
    theirs = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert theirs["a"].dtype == getattr(torch, kind)
    safetensors.torch.save_file(theirs, tmp_path / "y.safetensors")
    assert_same(files.read(tmp_path / "y.safetensors").arrays["a"], array)


def test_files_of_torch(tmp_path, torch):
    torch.manual_seed(0)
    keys = torch.randn(2, 3, 5, 8).to(torch.bfloat16)
    odd = torch.randn(4, 6).T.to(torch.float8_e5m2)
    path = tmp_path / "cache.pt"
    torch.save({"cache": [(keys, keys * 2), (keys * 3, keys * 4)], "more": {"odd": odd, "theta": 1e4}}, path)
    found = files.read(path)
    assert found.metadata == {"more.theta": 1e4}
    for layer, pair in enumerate(files.nested(found.arrays)):
        for kv, array in enumerate(pair):
            expected = (keys * (1 + 2 * layer + kv)).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            assert_same(array, expected)
    assert_same(found.arrays["more.odd"], odd.view(torch.uint8).numpy().view(ml_dtypes.float8_e5m2))
    torch.save(((keys, keys), (keys, keys)), path)
    assert sorted(files.read(path).arrays) == ["cache.0.0", "cache.0.1", "cache.1.0", "cache.1.1"]
    torch.save(keys, path)
    assert list(files.read(path).arrays) == ["cache"]


def test_files_of_torch_that_repeat_an_element(tmp_path, torch):
    """Heads that are repeated are read as they are; a disk full of one element is refused."""
    path, heads = tmp_path / "cache.pt", torch.ones(1, 2, 1, 50, 8)
    torch.save({"key": heads.expand(1, 2, 4, 50, 8)}, path)
    found = files.read(path).arrays["key"]
    assert (found.shape, found.strides[2]) == ((1, 2, 4, 50, 8), 0)
    torch.save({"key": torch.zeros(1).expand(2**20, 8, 100)}, path)
    assert path.stat().st_size < 2000
    with pytest.raises(
        FileError, match=r"strides of 0 repeat its \d+ bytes in tensors of 3355443200 bytes: save"
    ):
        files.read(path)


def test_files_of_torch_that_would_run_code_are_refused(tmp_path, torch):
    path = tmp_path / "cache.pt"
    torch.save({"a": Mine()}, path)
    with pytest.raises(FileError, match="without running code of its own"):
        files.read(path)
    torch.save({"a": torch.zeros(3).to_sparse()}, path)
    with pytest.raises(FileError, match="cannot be an array of numpy"):
        files.read(path)
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, path)
    with pytest.raises(FileError, match=r"two entries are called a\.b: give each its own name"):
        files.read(path)
    torch.save(torch.zeros(1000), path)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(FileError, match=str(path)):
        files.read(path)


class Mine:
    pass


@pytest.mark.parametrize(("package", "extra"), [("safetensors", "files"), ("torch", "torch")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package, extra):
    path = tmp_path / ("x" if extra == "torch" else "x.safetensors")
    if extra == "torch":
        torch = pytest.importorskip("torch")
        torch.save(torch.zeros(2), path)
    else:
        files.write(path, np.zeros(2))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FileError, match=rf"needs the package {package}: pip install '\.\[{extra}\]'"):
        files.read(path)


# Wrong files


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "it is empty: save or copy the file again"),
        (b"hello world", "like no kind of file that kvkit reads: give .npz"),
        (b"GGUF\3\0\0\0" + bytes(99), "a GGUF file, a model's weights: kvkit takes"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", "a pickle, as torch.save once wrote it: load it with torch"),
        (b"PK\x03\x04" + bytes(100), "not a zip archive, or cut short"),
        (b"\x93NUMPY\x01\x00\x05\x00hello", "not an array of numpy's"),
        (
            struct.pack("<Q", 96) + b'{"key":{"dtype":"F32"' + bytes(99),
            "not a safetensors file, or cut short",
        ),
        (struct.pack("<Q", 2**31) + b"{", "not a safetensors file, or cut short"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path, data, what):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FileError, match=what) as caught:
        files.read(tmp_path / "x")
    assert str(caught.value).startswith(f"{tmp_path / 'x'}: ")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize(
    ("said", "what"),
    [
        ([], "its description is no object"),
        ({"colour": 1}, "its description has colour, which kvkit does not know: update kvkit"),
        ({"layout": "x" * 9999}, "says that layout is 'xxx"),
        ({"layout": "\x1b[31m"}, "says that layout is"),
        ({"sizes": {"l": -1}}, "says that sizes is"),
        ({"sizes": {"q": 1}}, "says that sizes is"),
        ({"sizes": [1]}, "says that sizes is"),
        ({"rope_base": float("nan")}, "says that rope_base is"),
        ({"rope_applied": 1}, "says that rope_applied is 1"),
        ({"rotation_blocks": [1]}, "says that rotation_blocks is"),
        ({"lse_base": 2}, "says that lse_base is 2"),
    ],
    ids=str,
)
def test_descriptions_that_make_no_sense_are_refused(tmp_path, suffix, said, what):
    path = tmp_path / f"x{suffix}"
    files.write(path, np.zeros(3), metadata={"description": said})
    with pytest.raises(FileError, match=what) as caught:
        files.read(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}'])
def test_damaged_metadata_of_safetensors_is_refused(tmp_path, text):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(3)}, path, {tensors.METADATA: text})
    with pytest.raises(FileError, match="its metadata kvkit"):
        files.read(path)


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_mutated_files_are_read_or_refused(tmp_path, rng, suffix, count):
    path = tmp_path / f"x{suffix}"
    files.write(
        path, filled(rng, (4, 5, 6), np.dtype("f4")), Description("| b n c") if suffix != ".npy" else None
    )
    whole, read, errors = path.read_bytes(), 0, []
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(min(len(data), 300)))
            kind = rng.integers(4)
            if kind == 0:
                data[at] = rng.integers(256)
            elif kind == 1:
                del data[at : at + int(rng.integers(1, 20))]
            elif kind == 2:
                data[at:at] = rng.bytes(int(rng.integers(1, 20)))
            else:
                data[at : at + 1] = str(rng.choice([0, 9, 2**31, 2**63])).encode()
        path.write_bytes(data)
        try:
            files.read(path)
            read += 1
        except FileError as error:
            errors.append(str(error))
    assert read
    assert errors
    assert all(map(str.isprintable, errors))


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".safetensors"])
def test_a_file_is_locked_until_it_has_its_name(tmp_path, monkeypatch, suffix):
    """Writers of other files sweep the folder meanwhile. A kill leaves nothing that they cannot sweep."""
    arrays = {
        "bytes": np.arange(3, dtype=np.uint8),
        "numbers": np.arange(4.0),
        "none": np.zeros((0, 2), "f4"),
    }
    given, rename = arrays if suffix != ".npy" else arrays["numbers"], os.replace

    def swept(temporary, target):
        replace.remove_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [temporary.name]
        assert replace.TEMPORARY.fullmatch(temporary.name)
        rename(temporary, target)
        renamed.append(target.name)

    renamed: list[str] = []
    monkeypatch.setattr(os, "replace", swept)
    path = tmp_path / f"x{suffix}"
    files.write(path, given)
    assert renamed == [path.name]
    if suffix == ".safetensors":
        for name, array in safetensors.numpy.load_file(path).items():
            assert_same(array, arrays[name])


def test_a_file_of_torch_holds_so_many_arrays_and_so_deep():
    torch = SimpleNamespace(Tensor=np.ndarray)
    most, deepest = pt.MAX_ARRAYS, pt.MAX_DEPTH
    limits = (most, 0, False), (most + 1, 0, True), (0, deepest, False), (0, deepest + 1, True)
    for arrays, depth, refused in limits:
        call = partial(pt.collect_tensors, "x.pt", torch, 7, "n", depth, dict.fromkeys(range(arrays)), {})
        with (
            pytest.raises(FileError, match="more than 100000 arrays, or 8 levels")
            if refused
            else nullcontext()
        ):
            call()


FULL_DISK = """
import resource, sys
import numpy as np
from kvkit.cache import DynamicCache
from kvkit.tools import vectors
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))  # no file may be larger, as on a full disk
states = np.ones((1, 4, 64, 64), np.float32)
calls = {
    "pack": lambda: vectors.make("pack", operator="key_value_cache"),
    "offloaded": lambda: DynamicCache(1, offload="offloaded").update(states, states, 0),
    "saved": lambda: filled().save("saved.npz"),
}
def filled():
    cache = DynamicCache(1)
    cache.update(states, states, 0)
    return cache
for name, call in calls.items():
    try:
        call()
    except OSError as error:
        print(name, error.strerror, name in str(error.filename))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of file sizes are Linux's")
def test_a_full_disk_is_named_with_the_file(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK], cwd=tmp_path, capture_output=True, text=True,
                          check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})  # fmt: skip
    assert done.stdout.splitlines() == [
        f"{name} File too large True" for name in ("pack", "offloaded", "saved")
    ]


def test_a_header_is_parsed_again_after_a_failure_by_chance(tmp_path, monkeypatch):
    """Python 3.11 has such failures while another thread parses."""
    np.save(tmp_path / "x.npy", np.arange(3))
    parse, failures = members.READERS[1, 0], [SystemError("AST constructor recursion depth mismatch")] * 3

    def parse_or_fail(data, **options):
        if failures:
            data.read(7)
            raise failures.pop()
        return parse(data, **options)

    monkeypatch.setitem(members.READERS, (1, 0), parse_or_fail)
    assert files.read(tmp_path / "x.npy").arrays["cache"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("path", [0, None, 1.5, ["x.npz"]])
@pytest.mark.parametrize(
    "call", [files.read, kvkit.load, kvkit.inspect, lambda path: kvkit.DynamicCache(1).save(path)]
)
def test_what_is_no_path_is_refused(call, path):
    """An integer would be an open file to the system: `load(0)` would read the keyboard."""
    with pytest.raises(KvkitError, match=r"expected a path.*, got "):
        call(path)
