"""The file contract: what is written is read back, mapping never writes, nothing is half done."""

import functools
import io
import itertools
import json
import os
import struct
import tracemalloc
import warnings
import zipfile
from errno import EACCES, ENOSPC

import ml_dtypes
import numpy as np
import pytest
from verbs import savez, savez_compressed

import kvkit
from kvkit.errors import KvkitError
from kvkit.files import locks, members, npz, replace
from kvkit_cli import show
from kvkit_cli.npz import FileError, keep_for_changes, read, write

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    "?", "i1", "u1", "<i2", "<u4", "<i8", ">i8", "<f2", "<f4", ">f4", "<f8", "<c8", "<U5", "S3", "<M8[s]",
]  # fmt: skip
SHAPES = ((), (1,), (7,), (0,), (3, 0, 2), (2, 3, 5))


def filled(shape, dtype, seed=0):
    """Return an array of random bytes."""
    dtype = np.dtype(dtype)
    if dtype.kind in "US":
        return np.full(shape, "abc", dtype)
    count = int(np.prod(shape))
    bits = np.random.default_rng(seed).integers(0, 2, (count, dtype.itemsize), np.uint8)
    return bits.reshape(-1).view(dtype).reshape(shape)


def assert_same(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def is_mapped(array):
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.npz"


@pytest.fixture(autouse=True)
def mapped(monkeypatch):
    """Map files of any size."""
    monkeypatch.setattr(npz, "MAX_COPIED", -1)


@pytest.fixture
def copied(monkeypatch):
    monkeypatch.setattr(npz, "MAX_COPIED", 2**24)


# Round trips


def in_any_order(dtype):
    """Return arrays by their order in memory and type."""
    base = filled((4, 6, 8), dtype)
    frozen = base.copy()
    frozen.flags.writeable = False
    arrays = {
        "fortran": np.asfortranarray(base), "transposed": base.transpose(1, 2, 0),
        "strided": base[::2, 1::2, ::3],
        "reversed": base[::-1, :, ::-1], "broadcast": np.broadcast_to(base[0], (3, 6, 8)), "frozen": frozen,
        "sliver": base[:, 0, 0], "empty": base[:0, ::2],
    }  # fmt: skip
    return {f"{name} {dtype}": array for name, array in arrays.items()}


@pytest.mark.parametrize("how", ["mapped", "copied", "in chunks"])
@pytest.mark.parametrize("writer", [write, savez, savez_compressed])
def test_round_trip(path, monkeypatch, writer, how):
    monkeypatch.setattr(npz, "MAX_COPIED", 2**24 if how == "copied" else -1)
    if how == "in chunks":
        monkeypatch.setattr(members, "CHUNK_BYTES", 48)
    forms = enumerate(itertools.product(SHAPES, [*DTYPES, BF16]))
    arrays = {f"a{i}": filled(shape, dtype, i) for i, (shape, dtype) in forms}
    arrays |= in_any_order("float32") | in_any_order(BF16)
    writer(path, arrays)
    got = read(path).arrays
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert_same(got[name], array)
        assert type(got[name]) is np.ndarray
        assert got[name].flags.writeable
    for dtype in ("float32", BF16):
        assert got[f"fortran {dtype}"].flags.f_contiguous
        assert got[f"strided {dtype}"].flags.c_contiguous


# Metadata and bytes


def test_metadata(path):
    write(path, {"a": filled((2,), BF16)}, {"operator": "x", "attributes": {"quant_bit": 8}})
    assert read(path).metadata == {
        "version": 1, "producer": f"kvkit {kvkit.__version__}", "operator": "x",
        "attributes": {"quant_bit": 8}, "dtypes": {"a": "bfloat16"},
    }  # fmt: skip


def test_data_is_aligned(path):
    names_ = ["a", "start_pos", "a_much_longer_name", "ünïcode"]
    write(path, {name: filled((3, i + 1), "i1") for i, name in enumerate(names_)})
    for array in read(path).arrays.values():
        assert array.ctypes.data % members.ALIGNMENT == 0
        assert is_mapped(array)


# Mapping


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("writer", [write, savez])
def test_mapped_arrays_never_change_the_file(path, writer, order):
    writer(path, {"cache": np.asarray(filled((5, 7), BF16), order=order), "pos": np.array(3)})
    before = path.read_bytes()
    got = read(path).arrays
    assert all(is_mapped(array) for array in got.values())
    got["cache"][...] = 7
    got["pos"][...] = 9
    assert (got["cache"] == 7).all()
    del got
    assert path.read_bytes() == before


def test_an_unaligned_array_stays_mapped(path):
    with zipfile.ZipFile(path, "w") as archive, archive.open("odd.npy", "w") as member:
        np.save(member, np.arange(5.0))
    array = read(path).arrays["odd"]
    assert not array.flags.aligned
    assert is_mapped(array)
    assert array.sum() == 10


def test_deflated_and_empty_arrays_are_not_mapped(path):
    np.savez_compressed(path, a=np.zeros(100))
    assert not is_mapped(read(path).arrays["a"])
    write(path, {"empty": np.zeros((0, 4))})
    assert not is_mapped(read(path).arrays["empty"])


class Sparse(io.FileIO):
    """Wraps a file so that zeros become holes."""

    def write(self, data):
        if len(data) >= 2**20 and not np.frombuffer(data, np.uint8).any():
            return self.seek(len(data), io.SEEK_CUR) and len(data)
        return super().write(data)


@pytest.mark.slow
def test_beyond_four_gigabytes(path):
    large = np.zeros(2**32 + 5, np.uint8)
    large[-3:] = 1, 2, 3
    with Sparse(path, "w") as file, zipfile.ZipFile(file, "w") as archive:
        members.write(archive, "large.npy", large, file.tell(), lambda count: None)
        members.write(archive, "behind.npy", np.arange(3), file.tell(), lambda count: None)
    got = read(path).arrays
    assert got["large"].shape == large.shape
    assert got["large"][-4:].tolist() == [0, 1, 2, 3]
    assert got["behind"].tolist() == [0, 1, 2]
    assert got["behind"].ctypes.data % members.ALIGNMENT == 0


# Copying


def test_small_files_are_copied(path, copied):
    np.savez(path, a=np.arange(10), b=np.asfortranarray(filled((3, 4), BF16)), c=np.zeros((0, 2)))
    contents = read(path)
    os.truncate(path, 0)
    assert contents.mapped is None
    assert not any(is_mapped(array) for array in contents.arrays.values())
    assert contents.arrays["a"].tolist() == list(range(10))
    assert_same(contents.arrays["b"], filled((3, 4), BF16))
    assert contents.arrays["b"].flags.f_contiguous


def test_what_is_copied_is_checked_whole(path, copied):
    write(path, {"a": np.arange(100)})
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(3).tobytes())] ^= 1
    path.write_bytes(data)
    assert_refused(path, "a.npy.*CRC")


def test_large_files_are_mapped(path, copied, monkeypatch):
    write(path, {"a": np.arange(10)})
    monkeypatch.setattr(npz, "MAX_COPIED", path.stat().st_size - 1)
    contents = read(path)
    assert is_mapped(contents.arrays["a"])
    assert contents.mapped.st_size == path.stat().st_size
    monkeypatch.setattr(npz, "MAX_COPIED", path.stat().st_size)
    assert not is_mapped(read(path).arrays["a"])


# Replacing


def test_the_file_that_is_mapped_can_be_replaced(path):
    write(path, {"cache": np.arange(100_000), "kept": np.arange(5)})
    arrays = read(path).arrays
    arrays["cache"][::2] = -1
    write(path, arrays)
    expected = np.arange(100_000)
    expected[::2] = -1
    assert_same(arrays["cache"], expected)
    assert_same(read(path).arrays["cache"], expected)
    assert_same(read(path).arrays["kept"], np.arange(5))


def fail_in_a_member(monkeypatch, error):
    def chunks(array):
        yield array.tobytes()[:10]
        raise error

    monkeypatch.setattr(members, "iterate_bytes", chunks)


def fail_in(name):
    def patch(monkeypatch, error):
        def failing(*args):
            raise error

        monkeypatch.setattr(f"kvkit.files.replace.os.{name}", failing)

    return patch


@pytest.mark.parametrize("error", [OSError(ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "fail", [fail_in_a_member, fail_in("fsync"), fail_in("replace")], ids=["data", "fsync", "replace"]
)
@pytest.mark.parametrize("old", [True, False], ids=["old", "new"])
def test_a_failing_write_leaves_what_was(path, monkeypatch, fail, error, old):
    if old:
        write(path, {"a": np.arange(9)})
    before = [(entry.name, entry.read_bytes()) for entry in path.parent.iterdir()]
    fail(monkeypatch, error)
    with pytest.raises(type(error)) as caught:
        write(path, {"a": np.zeros(1000), "b": np.ones(3)})
    if isinstance(error, OSError):
        assert (caught.value.errno, caught.value.filename) == (ENOSPC, str(path))
    assert [(entry.name, entry.read_bytes()) for entry in path.parent.iterdir()] == before


def dead(folder, name=f".kvkit-{'0' * 12}.tmp"):
    """Make a temporary file as a killed process leaves it."""
    (folder / name).write_bytes(b"half of it")
    return folder / name


def test_what_a_killed_process_left_is_removed(path, tmp_path):
    dead(tmp_path), dead(tmp_path, ".kvkit-notes.tmp")
    (tmp_path / f".kvkit-{'1' * 12}.tmp").symlink_to("elsewhere")
    (tmp_path / f".kvkit-{'2' * 12}.tmp").mkdir()
    write(path, {"a": np.zeros(1)})
    left = [f".kvkit-{'1' * 12}.tmp", f".kvkit-{'2' * 12}.tmp", ".kvkit-notes.tmp", "file.npz"]
    assert names(tmp_path) == left


def test_what_another_user_left_is_not_ours(path, tmp_path, monkeypatch):
    dead(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    write(path, {"a": np.zeros(1)})
    assert len(names(tmp_path)) == 2


def test_a_file_swept_before_it_is_locked_is_made_again(path, tmp_path, monkeypatch):
    swept, lock = [], replace.lock

    def late(file, wait=False):
        if wait and not swept:
            swept.append(file.name)
            replace.remove_leftovers(tmp_path)
        return lock(file, wait)

    monkeypatch.setattr(replace, "lock", late)
    write(path, {"a": np.ones(1)})
    assert swept
    assert names(tmp_path) == ["file.npz"]
    assert read(path).arrays["a"] == 1


def test_alone(path, tmp_path):
    write(path, {"a": np.zeros(1)})
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    with keep_for_changes(path):
        for name in (path, link):
            with (
                pytest.raises(FileError, match=f"{name}: another process is changing it"),
                keep_for_changes(name),
            ):
                pass
        write(path, {"a": np.ones(1)})
        with keep_for_changes(path):  # the new file; the run that made it has nothing left to do
            pass
    with keep_for_changes(link):
        pass


def test_whoever_waited_for_a_file_gets_the_new_one(path, monkeypatch):
    """The file may be replaced between its opening and its locking."""
    write(path, {"a": np.zeros(1)})
    late, lock = [], locks.lock

    def locking(file, wait=False):
        if not late:
            late.append(write(path, {"a": np.ones(1)}))
        return lock(file, wait)

    monkeypatch.setattr(locks, "lock", locking)
    with keep_for_changes(path):
        with pytest.raises(FileError), keep_for_changes(path):
            pass
        assert read(path).arrays["a"] == 1


def test_mode_is_kept(path):
    write(path, {"a": np.zeros(1)})
    path.chmod(0o640)
    write(path, {"a": np.ones(1)})
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_stays_one(path, tmp_path):
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "data.npz"
    path.symlink_to(real)
    write(path, {"a": np.zeros(1)})
    write(path, {"a": np.ones(1)})
    assert path.is_symlink()
    assert read(real).arrays["a"] == 1
    assert names(tmp_path) == ["file.npz", "real"]
    assert names(tmp_path / "real") == ["data.npz"]


def test_targets_that_cannot_be(path, tmp_path):
    for target, wrong in (
        (tmp_path, "a folder: give a file in it"),
        (tmp_path / "no" / "x.npz", "there is no folder"),
        ("/dev/null", "not a regular file"),
    ):
        with pytest.raises(FileError, match=wrong):
            write(target, {"a": np.zeros(1)})
    assert names(tmp_path) == []


def test_errors_name_what_the_user_named(path, tmp_path, monkeypatch):
    """Not where a link leads, nor a temporary file."""
    path.symlink_to(tmp_path / "no" / "file.npz")
    with pytest.raises(FileError) as caught:
        write(path, {"a": np.zeros(1)})
    assert str(caught.value) == f"{path}: there is no folder {path}: make it first"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=r"^no/x.npz: there is no folder no: make it first$"):
        write("no/x.npz", {"a": np.zeros(1)})
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(PermissionError) as caught:
        write("x.npz", {"a": np.zeros(1)})
    assert caught.value.filename == "."


def test_a_read_only_target_is_respected(path, monkeypatch):
    write(path, {"a": np.zeros(1)})
    monkeypatch.setattr(os, "access", lambda place, mode: place != path)
    with pytest.raises(PermissionError) as caught:
        write(path, {"a": np.ones(1)})
    assert caught.value.errno == EACCES
    assert read(path).arrays["a"] == 0


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.int4, ml_dtypes.float4_e2m1fn, "V2", "V8", object, [("x", "i4")]], ids=str
)
def test_dtypes_that_would_not_come_back_are_refused(path, dtype):
    with pytest.raises(FileError, match=r"file\.npz: a has dtype .*: convert it"):
        write(path, {"a": np.zeros(3, dtype)})
    assert names(path.parent) == []


def test_progress_on_a_terminal_only(path, monkeypatch, capsys):
    monkeypatch.setattr(show, "BAR_FROM", 1)
    write(path, {"a": np.zeros(10)})
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    write(path, {"a": np.zeros(10)}, quiet=True)
    assert capsys.readouterr() == ("", "")
    write(path, {"a": np.zeros(10)})
    out, err = capsys.readouterr()
    assert out == ""
    assert "writing file.npz" in err


# Wrong files


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(text):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


GOOD = npy(np.arange(6))
PICKLED = header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n") + b"\x80\x04K\x01."
VOID = header(b"{'descr': '|V3', 'fortran_order': False, 'shape': (1,), }\n") + b"abc"
RECORD = header(b"{'descr': [('x', '<i4')], 'fortran_order': False, 'shape': (1,), }\n") + b"abcd"
NEGATIVE = header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -4), }\n") + b"abcd"
WIDE = header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (0, %d), }\n" % 2**70)
HUGE = header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }\n" % 2**62) + b"abcd"
DEEPER = header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (%s1,), }\n" % (b"-" * 9000))
NESTED = header(b"{'descr': '|u1', 'fortran_order': False, 'shape': %s, }\n" % (b"-" * 1900))
NOTHING = header(b"{'descr': '<U0', 'fortran_order': False, 'shape': (%d,), }\n" % 2**40)
PYTHON = header(b"{'descr': '|u1', 'shape': __import__('os').getcwd(), 'fortran_order': False}\n")
RUDE = "\x1b[31m\n" * 1000


def raw(data):
    return lambda path: path.write_bytes(data)


def zipped(contents, *methods):
    """Return functions that make an archive of members, one for each method of compression."""

    def make(path, method=zipfile.ZIP_STORED):
        with zipfile.ZipFile(path, "w", method) as archive, warnings.catch_warnings(action="ignore"):
            for member, data in contents:
                archive.writestr(member, data)

    methods = methods or (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    return [functools.partial(make, method=method) for method in methods]


def twice(path):
    zipped([("a.npy", GOOD), ("b.npy", GOOD)])[0](path)
    path.write_bytes(path.read_bytes().replace(b"b.npy", b"a.npy"))


def encrypted(path):
    np.savez(path, a=np.zeros(3))
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)


def set_in_directory(path, offset, value):
    """Change a 4-byte field of the last entry in the zip's directory."""
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + offset : entry + offset + 4] = struct.pack("<I", value)
    path.write_bytes(data)


def of_two_sizes(path):
    zipped([("a.npy", npy(np.zeros(10_000, np.int8)))])[0](path)
    set_in_directory(path, 20, 10_000)


def beyond_its_end(path):
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000,), }\n"
    zipped([("a.npy", header(text))])[0](path)
    size = path.read_bytes().index(b"}") - path.read_bytes().index(b"\x93") + 2 + 1_000_000
    set_in_directory(path, 20, size)
    set_in_directory(path, 24, size)


def changed(count):
    def make(path):
        np.savez_compressed(path, a=np.random.default_rng(0).integers(0, 9, count))
        set_in_directory(path, 16, 0)

    return make


def described_by(array):
    return lambda path: np.savez(path, **{"kvkit.json": array})


DAMAGED, JSON = "a.npy.*is damaged", "kvkit.json.*is damaged"
TORCH = [(f"archive/{name}", b"") for name in ("data.pkl", "byteorder", "data/0", "version")]
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(9)
TENSORS = struct.pack("<Q", 96) + b'{"key":{"dtype":"F32"' + bytes(99)


def said(about, *more):
    return zipped([*more, ("kvkit.json", about if isinstance(about, bytes) else json.dumps(about))])


def array(data):
    return zipped([("a.npy", data)])


WRONG = [  # what makes such files, and what is said of them
    (array(GOOD[:-1]), "a.npy.*has 175 bytes, its header asks for 176"),
    (array(GOOD + b"x"), "a.npy.*has 177 bytes, its header asks for 176"),
    (array(HUGE), "its header asks for"),
    *((array(data), DAMAGED) for data in (b"hello", b"", DEEPER, NESTED, PYTHON, NEGATIVE, WIDE)),
    (array(b"\x93NUMPY\x03\x00" + GOOD[8:]), DAMAGED),
    (array(header(RUDE.encode()[:900])), DAMAGED),
    (array(NOTHING), "kvkit does not know its dtype <U0"),
    (array(PICKLED), "pickled objects"),
    (array(VOID), "its dtype"),
    (array(RECORD), "its dtype"),
    (array(header(b"{'descr': [('%s', '<i4')]}" % (b"x" * 999))), DAMAGED),
    (zipped([("a.npy", GOOD), ("notes.txt", b"x")]), "notes.txt.*is no array: keep only NAME.npy"),
    *((zipped([(name, b"")]), "is no array") for name in ("a/", ".npy", RUDE)),
    (zipped([(f"{RUDE}.npy", b"")]), "is damaged"),
    (zipped([("x" * 5000 + ".npy", GOOD)] * 2), "is there twice"),
    ([twice], ": member 'a.npy' is there twice: save or copy the file again$"),
    (zipped(TORCH), "not a .npz file, but a file of torch.save: load it with torch and write"),
    (zipped([("a.npy", GOOD)], zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA),
     r"'a.npy' is damaged \(it is neither stored nor deflated\): save or"),
    ([encrypted], r"'a.npy' is damaged \(it is encrypted\)"),
    ([of_two_sizes], r"\(it is stored in 10000 bytes, not 10128\)"),
    ([beyond_its_end], DAMAGED),
    (map(changed, (1, 1000, 4096, 100_000)), "a.npy.*CRC"),
    *((said(about), JSON) for about in (b"{", b"\xff", b"[" * 200_000)),
    *((said(about), "kvkit.json or its dtypes are no object") for about in ([], {"dtypes": [1]})),
    (said({"version": 2}), "has version 2, not 1: update kvkit"),
    (said({"version": [RUDE] * 99}), "has version "),
    (said({"dtypes": {"a": "u1"}}, ("a.npy", GOOD)), "a is u1, but it is int64"),
    (said({"dtypes": {"a": "float8_e4m3fn"}}, ("a.npy", GOOD)), "a is float8_e4m3fn, but it is int64"),
    (said({"dtypes": {"a": "float16"}}), ": kvkit.json says that a is float16, but it is absent: "),
    (said({"dtypes": {RUDE: "u1"}}), "but it is absent"),
    (said({"dtypes": {"a": RUDE}}, ("a.npy", GOOD)), "but it is int64"),
    (said({"dtypes": {"a": [RUDE] * 9}}, ("a.npy", GOOD)), "but it is int64"),
    (map(described_by, (np.zeros(3), np.array(["{}"]), np.array(1), np.array(b"{"), np.array("\ud800"))),
     "'kvkit.json.npy' is damaged"),
    (map(raw, (b"", b"hello", b"PK\x03\x04" + bytes(100))), "not a zip archive, or cut short"),
    ([raw(GOOD)], "not a .npz file, but one array without a name: name it with numpy.savez"),
    ([raw(TENSORS)], "not a .npz file, but a safetensors file: read it"),
    ([raw(OLD_TORCH)], "not a .npz file, but a pickle, as torch.save once wrote it"),
    ([raw(b"GGUF\3\0\0\0" + bytes(99))], "not a .npz file, but a GGUF file, a model's weights: kv"),
    ([raw(b"\x89HDF\r\n\x1a\n" + bytes(99))], "not a .npz file, but an HDF5 file: read it with h5py"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "wrong"), [(make, wrong) for makers, wrong in WRONG for make in makers])
def test_wrong_files(path, make, wrong):
    make(path)
    assert_refused(path, wrong)


def assert_refused(path, wrong):
    """Check that reading raises an error of one printable line that names the file."""
    with pytest.raises(FileError, match=wrong) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    assert len(text) < 300 + len(str(path))
    assert isinstance(caught.value, KvkitError)


def test_no_file(path, tmp_path):
    assert_refused(path, "no such file")
    assert_refused(tmp_path, "a folder: give a file in it")
    path.symlink_to(path)
    assert_refused(path, "no such file")


def test_a_deflated_bomb(path):
    """A header and a directory that agree on a size to which so few bytes cannot unpack."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", HUGE)
    size = len(HUGE) - 4 + 2**62
    with zipfile.ZipFile(path) as archive:
        (info,) = archive.infolist()
        info.file_size = size
        with pytest.raises(ValueError, match="cannot unpack"):
            members.read_member_header(archive, info)


def test_a_parser_without_memory_is_the_files_fault(path, monkeypatch):
    write(path, {"a": np.zeros(3)})

    def out_of_memory(*args, **more):
        raise MemoryError

    monkeypatch.setattr(members, "READERS", {(1, 0): out_of_memory})
    assert_refused(path, "its header is no description of an array")


@pytest.mark.parametrize("lie", [False, True])
def test_metadata_of_gigabytes_is_not_unpacked(path, lie):
    """Whatever the directory says of its size."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("kvkit.json", "w") as member,
    ):
        for _ in range(64):
            member.write(bytes(2**22))
    if lie:
        set_in_directory(path, 24, 1000)
    tracemalloc.start()
    assert_refused(path, "kvkit.json.*is damaged")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_metadata_that_could_not_be_read_is_not_written(path, monkeypatch):
    monkeypatch.setattr(members, "TEXT_LIMIT", 1000)
    with pytest.raises(FileError, match="metadata of 1"):
        write(path, {"a": np.zeros(3)}, {"note": "x" * 1000})
    assert not path.exists()


def test_nothing_is_unpacked_in_vain(path, monkeypatch):
    """What the headers, the metadata or the caller object to comes first."""
    np.savez_compressed(path, a=np.zeros(1000), b=np.zeros((2, 3), BF16))
    monkeypatch.setattr(members, "as_bytes", None)  # of an array whose elements are read

    def check(forms, metadata):
        assert metadata == {}
        assert {name: (form.shape, form.dtype) for name, form in forms.items()} == {
            "a": ((1000,), np.float64), "b": ((2, 3), BF16)
        }  # fmt: skip
        raise KvkitError("not that")

    with pytest.raises(KvkitError, match="not that"):
        read(path, check)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("kvkit.json", b'{"dtypes": {"a": "float16"}}')
    assert_refused(path, "a is float16, but it is float64")


def test_a_header_from_python_2(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "a.npy", header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (4L,), }\n") + b"abcd"
        )
    assert read(path).arrays["a"].tobytes() == b"abcd"


# Damage: no traceback, whatever the bytes


@pytest.fixture(params=["copied", "savez_compressed"])
def small(request, path):
    if request.param == "copied":
        request.getfixturevalue("copied")
    arrays = {"a": filled((3, 2), BF16), "pos": np.array(4), "empty": np.zeros((0, 2), np.int8)}
    write(path, arrays) if request.param != "savez_compressed" else np.savez_compressed(path, **arrays)
    return path.read_bytes()


def survives(path, data):
    """Return whether damaged bytes are still read; only a FileError may be raised."""
    path.write_bytes(data)
    try:
        arrays = read(path).arrays
    except FileError:
        return False
    assert all(len(array.tobytes()) == array.nbytes for array in arrays.values())
    return True


def test_every_truncation_is_refused(path, small):
    assert survives(path, small)
    assert not any(survives(path, small[:length]) for length in range(len(small)))


@pytest.mark.parametrize("small", ["kvkit", "copied", "savez_compressed"], indirect=True)
def test_any_changed_byte_is_read_or_refused(path, small):
    rng = np.random.default_rng(0)
    read_on = 0
    for place in range(len(small)):
        value = (small[place] ^ 1, 0xFF, int(rng.integers(256)))[place % 3]
        read_on += survives(path, small[:place] + bytes([value]) + small[place + 1 :])
    assert 0 < read_on < len(small)


def test_any_missing_piece_is_read_or_refused(path, small):
    rng = np.random.default_rng(1)
    for _ in range(200):
        begin, end = np.sort(rng.integers(0, len(small), 2))
        assert survives(path, small[:begin] + small[end:]) in (begin == end, False)


def test_numpy_walks_a_file_and_writes_it_again(path):
    """Without pickles, and with all that is said of it."""
    arrays = {"a": filled((2, 3), BF16), "b": np.arange(5)}
    write(path, arrays, {"operator": "x"})
    with np.load(path) as loaded:
        assert loaded.files == ["a", "b", "kvkit.json"]
        walked = {name: loaded[name] for name in loaded.files}
    for save in (np.savez, np.savez_compressed):
        save(path, **walked, c=np.zeros(2))
        got = read(path)
        assert got.metadata["operator"] == "x"
        assert list(got.arrays) == ["a", "b", "c"]
        for name, array in arrays.items():
            assert_same(got.arrays[name], array)
    np.savez(path, **walked | {"b": np.zeros(5)})
    assert_refused(
        path, "says that b is int64, but it is float64: save it again, without the array kvkit.json"
    )
    np.savez(path, **walked | {"kvkit.json": str(walked["kvkit.json"].item().decode())})
    assert read(path).metadata["operator"] == "x"


def test_a_file_of_the_version_before(path):
    """The description was a member that was no array."""
    with zipfile.ZipFile(path, "w") as archive:
        members.write(archive, "a.npy", filled((2, 3), BF16), archive.fp.tell())
        archive.writestr(
            "kvkit.json", json.dumps({"version": 1, "operator": "x", "dtypes": {"a": "bfloat16"}})
        )
    contents = read(path)
    assert contents.metadata["operator"] == "x"
    assert_same(contents.arrays["a"], filled((2, 3), BF16))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("kvkit.json.npy", npy(np.array(b"{}")))
    assert_refused(path, "'kvkit.json.npy' is there twice")


def test_the_name_of_the_description_is_taken(path):
    with pytest.raises(FileError, match=r"kvkit\.json is the name of kvkit's metadata"):
        write(path, {"kvkit.json": np.zeros(3)})
