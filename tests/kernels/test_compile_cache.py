"""Compiled code is kept on disk: fast in the next process, never stale, and never needed."""

import functools
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kvkit

PACKAGE = Path(kvkit.__file__).parent
CALL = """
import json, sys, time
import numpy as np, kvkit
x = np.full((1, 1, 1, 8), 3.0, np.float32)
cache, scale = np.zeros((1, 1, 2, 4, 1, 8), np.int8), np.zeros((1, 1, 2, 4, 1, 1), np.float32)
begin = time.process_time()
key, _ = kvkit.key_value_cache(x, x, 0, cache, scale, quant_bit=8)
seconds = time.process_time() - begin
from kvkit.runtime import jit
folder = jit.cache_folder()
print(json.dumps({"seconds": seconds, "scale": float(scale.max()), "folder": str(folder)}))
"""

# A kernel that compiles fast.
SMALL = """
import json
from kvkit.formulas import index
from kvkit.runtime import jit
code = jit.callback(index.share.py_func, "int64(int64, int64, int64)")
print(json.dumps({"folder": str(jit.cache_folder()), "share": code.ctypes(7, 1, 2)}))
"""


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the package that a test may edit."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "kvkit", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "src"


def call(source, cache, code=CALL, **variables):
    """Run an operator in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(source), "KVKIT_CACHE_DIR": str(cache)} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=source
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}


def test_an_edit_after_the_import_poisons_nothing(copy, tmp_path):
    """Code of the old sources must not be found under the new ones."""
    edit = (
        "import pathlib\n"
        "from kvkit.formulas import index\n"
        "path = pathlib.Path(index.__file__)\n"
        "path.write_text(path.read_text().replace('return total', 'return 10 * total'))\n"
    )
    assert call(copy, tmp_path / "cache", edit + SMALL)["share"] == 4
    assert call(copy, tmp_path / "cache", SMALL)["share"] == 36


def test_an_edit_of_what_code_comes_from_leads_to_new_code(copy):
    """The digest changes with each file that a kernel's module imports, directly or not, and no other."""
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, str(copy)], capture_output=True, text=True, cwd=copy
    )
    assert done.returncode == 0, done.stderr
    changed = json.loads(done.stdout)
    walk = changed["kvkit.cpu.copy.transfer"]
    for name in (
        "cpu.copy.transfer",
        "cpu.copy.rows",
        "cpu.memory",
        "cpu.simd.lanes",
        "formats.elements",
        "formulas.index",
        "formulas.numeric",
        "runtime.jit",
    ):
        assert f"kvkit.{name}" in walk, name
    assert not [name for name in walk if name.startswith(("kvkit.cache", "kvkit.static", "kvkit.ascend"))]
    assert {"kvkit.cpu.attention.walk", "kvkit.cpu.attention.online_softmax", "kvkit.formulas.index"} <= set(
        changed["kvkit.cpu.attention.scheduler"]
    )


DIGESTS = """
import json, pathlib, sys
from kvkit.runtime import source_digest as sources
root, kernels = pathlib.Path(sys.argv[1]), ("kvkit.cpu.copy.transfer", "kvkit.cpu.attention.scheduler")
assert sources.PACKAGE == root.resolve() / "kvkit", sources.PACKAGE
plain, changed = {name: sources.digest(name) for name in kernels}, {name: [] for name in kernels}
for name, text in sources.SOURCES.items():
    edited = sources.SOURCES | {name: text + b"# edited"}
    for kernel in kernels:
        if sources.digest_of(kernel, edited) != plain[kernel]:
            changed[kernel].append(name)
assert sources.read_sources() == sources.SOURCES
print(json.dumps(changed))
"""


TRANSFER = """
import json, time
import numpy as np, kvkit
from kvkit.runtime import jit
begin = time.process_time()
for tokens in (1, 4096):
    x = np.random.default_rng(0).standard_normal((1, tokens, 2, 64)).astype(np.float32)
    key, _ = kvkit.key_value_cache(x, x, 0, np.zeros((1, 1, 2, tokens, 2, 64), np.float32))
    assert (key == x).all()
seconds = time.process_time() - begin
print(json.dumps({"seconds": seconds, "folder": str(jit.cache_folder())}))
"""


def test_second_process_is_fast_and_compiles_nothing(copy, tmp_path):
    """What one process compiles, for one thread and for all, the next ones only load."""
    kept = files(call(copy, tmp_path / "cache", TRANSFER)["folder"])
    for name in ("copy-transfer-copy_tokens", "launches-call_workers"):
        assert len([file for file in kept if file.startswith(f"kvkit-cpu-{name}-")]) == 1
    again = call(copy, tmp_path / "cache", TRANSFER)
    assert files(again["folder"]) == kept
    assert any(each["seconds"] < 0.5 for each in (again, call(copy, tmp_path / "cache", TRANSFER)))


@pytest.mark.slow
def test_a_version_of_numba_that_is_not_known(copy, tmp_path):
    """Helpers are then compiled as Numba does, and kernels have the same results."""
    known = call(copy, tmp_path / "cache")
    code = "from kvkit.runtime import numba_068\nnumba_068.KNOWN = 'none'\n" + CALL
    code += "from kvkit.cpu import memory\n"
    code += "assert not isinstance(memory.read('float16'), numba_068.InlinedHelper)"
    unknown = call(copy, tmp_path / "other", code)
    assert unknown["scale"] == known["scale"]
    assert {file.rpartition("-")[0] for file in files(unknown["folder"])} == {
        file.rpartition("-")[0] for file in files(known["folder"])
    }


def test_numba_its_settings_and_the_cpu_are_part_of_the_key(monkeypatch):
    from kvkit.runtime import jit

    codegen, plain = type(jit.cpu_target.target_context.codegen()), jit.fingerprint.__wrapped__()
    for place, name, value in (
        (jit.numba, "__version__", "0.0.1"), (jit.numba.config, "OPT", 0),
        (jit.numba.config, "BOUNDSCHECK", 1),
        (codegen, "magic_tuple", lambda self: ("another", "cpu", "+features")),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert jit.fingerprint.__wrapped__() != plain
    assert jit.fingerprint.__wrapped__() == plain


def test_where_code_is_kept(monkeypatch, tmp_path):
    from kvkit.runtime import disk_cache

    for name in ("KVKIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disk_cache.Path, "home", lambda: tmp_path)
    assert disk_cache.root_folder() == tmp_path / ".cache" / "kvkit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.root_folder() == tmp_path / "xdg" / "kvkit"
    monkeypatch.setenv("KVKIT_CACHE_DIR", str(tmp_path / "moved"))
    assert disk_cache.root_folder() == tmp_path / "moved"


def test_no_home_directory(copy, monkeypatch, tmp_path):
    from kvkit.runtime import disk_cache, jit

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(disk_cache.Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("KVKIT_CACHE_DIR", raising=False)
    assert jit.cache_folder.__wrapped__() is None
    monkeypatch.setenv("KVKIT_CACHE_DIR", str(tmp_path))
    assert jit.cache_folder.__wrapped__().parent == tmp_path


def test_no_folder_wanted(copy):
    assert call(copy, "", SMALL) == {"folder": "None", "share": 4}


def test_code_is_for_its_owner_only(copy, tmp_path):
    """Others must not be able to plant code that this user would load; an editor's lock file is no source."""
    (copy / "kvkit" / ".#check.py").symlink_to("someone@host.1")  # Emacs makes dangling links of such names
    folder = Path(call(copy, tmp_path / "cache", UMASK + SMALL)["folder"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_full_disk_costs_nothing_but_time(monkeypatch, tmp_path):
    from kvkit.formulas import index
    from kvkit.runtime import disk_cache, jit

    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_cache.os, "replace", full)
    begin = time.perf_counter()
    add = jit.callback(index.share.py_func, SHARE)
    assert add.ctypes(7, 1, 2) == 4
    assert time.perf_counter() - begin < 60
    assert not list(tmp_path.iterdir())


UMASK = "import os\nos.umask(0)\n"
SHARE = "int64(int64, int64, int64)"


class Shelf:
    """Holds a folder of compiled code that a test can change."""

    def __init__(self, path, monkeypatch):
        from kvkit.formulas import index
        from kvkit.runtime import jit

        self.path, self.jit, self.function = path / "0123456789abcdef0123", jit, index.share.py_func
        monkeypatch.setattr(jit, "cache_folder", lambda: self.path)

    def make(self, key=()):
        """Compile or load a kernel; return its entry, which tells whether it was loaded."""
        compiled = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.jit.notices, "compiling", lambda *args: compiled.append(args))
            code = self.jit.callback(self.function, SHARE, key)
        assert code.ctypes(7, 1, 2) == 4
        return self.jit.cached_file(self.function, code.signature, (key, False)), not compiled


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    return Shelf(tmp_path, monkeypatch)


def test_code_is_found_again(shelf):
    file, found = shelf.make()
    assert not found
    assert file.exists()
    assert shelf.make() == (file, True)


def test_a_folder_that_cannot_be_made(shelf, tmp_path):
    (tmp_path / "a-file").write_text("in the way")
    shelf.path = tmp_path / "a-file" / "cache"
    for _ in range(2):
        assert not shelf.make()[1]


def test_damaged_files_are_compiled_again(shelf):
    file, _ = shelf.make()
    whole = file.read_bytes()
    for damage in (b"", b"x" * 100, whole[:-10]):
        file.write_bytes(damage)
        assert not shelf.make()[1]
        assert len(file.read_bytes()) > len(whole) // 2
        assert shelf.make()[1]


def open_folder(file, monkeypatch):
    file.parent.chmod(0o770)


def open_file(file, monkeypatch):
    file.chmod(0o606)


def link_to_a_folder(file, monkeypatch):
    file.parent.rename(file.parent.with_name("elsewhere"))
    file.parent.symlink_to("elsewhere")


def link_to_a_file(file, monkeypatch):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def pipe(file, monkeypatch):
    """Put a pipe in place of a file; opening it must not wait."""
    file.unlink()
    os.mkfifo(file, 0o600)


def another_user(file, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(file).st_uid + 1)
    status, fields = os.fstat, list(os.stat(file))
    fields[4] += 2
    monkeypatch.setattr(os, "fstat", lambda handle: os.stat_result([status(handle)[0], *fields[1:]]))


@pytest.mark.parametrize(
    "spoil", [open_folder, open_file, link_to_a_folder, link_to_a_file, pipe, another_user]
)
def test_what_others_may_write_is_not_run(shelf, monkeypatch, spoil):
    file, _ = shelf.make()
    spoil(file, monkeypatch)
    assert not shelf.make()[1]


def test_swapped_files_are_not_run(shelf):
    one, other = (shelf.make(key)[0] for key in ("one", "other"))
    blob = one.read_bytes()
    one.write_bytes(other.read_bytes())
    assert not shelf.make("one")[1]
    one.write_bytes(blob)
    assert shelf.make("one")[1]
    moved = one.parent.with_name("f" * 20)
    one.parent.rename(moved)
    shelf.path = moved
    assert not shelf.make("one")[1]


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"nonsense", pickle.dumps(None), pickle.dumps((1, 2)),
        pickle.dumps(("share", ["no_such_name"], 3)),
    ],
)  # fmt: skip
def test_an_odd_payload_is_a_miss(shelf, payload):
    from kvkit.runtime import disk_cache

    file, _ = shelf.make()
    disk_cache.save(file, payload)
    assert disk_cache.load(file) == payload
    assert not shelf.make()[1]


def test_unused_code_is_removed(shelf):
    """Of any version, and what a killed process left; a use counts for a month."""
    from kvkit.runtime import disk_cache

    names = "kept.bin", "used.bin", "old.bin", "tmpleft", "other.txt"
    here, before = shelf.path, shelf.path.with_name("f" * 20)
    others = shelf.path.with_name("notes")
    for folder in (here, before, others):
        folder.mkdir(0o700)
        for name in names:
            disk_cache.save(folder / name, b"code")
            if name != "kept.bin":
                os.utime(folder / name, (0, time.time() - 31 * disk_cache.DAY))
    (before / "other.txt").unlink()
    (before / "kept.bin").unlink()
    assert disk_cache.load(here / "used.bin") == disk_cache.load(others / "used.bin") == b"code"
    count, size = disk_cache.prune(shelf.path.parent, disk_cache.UNUSED)
    assert (count, size) == (5, 5 * 36)
    assert sorted(path.name for path in here.iterdir()) == ["kept.bin", "other.txt", "used.bin"]
    assert not before.exists()
    assert len(list(others.iterdir())) == 5


def test_who_keeps_code_removes_what_is_unused(tmp_path, monkeypatch):
    """Once a process."""
    from kvkit.runtime import disk_cache

    monkeypatch.setenv("KVKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache, "prune_once", functools.cache(disk_cache.prune_once.__wrapped__))
    disk_cache.write(tmp_path / ("f" * 20) / "old.bin", b"code")
    os.utime(tmp_path / ("f" * 20) / "old.bin", (0, time.time() - 31 * disk_cache.DAY))
    disk_cache.save(tmp_path / ("0" * 20) / "new.bin", b"code")
    assert [path.name for path in tmp_path.rglob("*.bin")] == ["new.bin"]


STORE = """
import json
import numpy as np
from kvkit.cpu.copy.rows import rows
numbers = []
for element in {elements}:
    x, stored = np.arange(1, 20, dtype=np.float32), np.zeros(19, np.uint16)
    code = rows("store", "float32", element)
    code.ctypes(x.ctypes.data, 0, 0, stored.ctypes.data, 0, 0, 0, 0, 0, 1, 1, 1, 19)
    numbers.append(stored.tolist())
print(json.dumps(numbers))
"""


@pytest.mark.slow
def test_code_of_several_processes_lives_together(copy, tmp_path):
    """Functions of one name and number, compiled by processes of their own, stay apart in another one."""
    elements, x = ("float16", "bfloat16"), np.arange(1, 20)
    alone = [call(copy, tmp_path / "cache", STORE.format(elements=(each,)))[0] for each in elements]
    assert alone == [x.astype(kind).view(np.uint16).tolist() for kind in (np.float16, ml_dtypes.bfloat16)]
    assert call(copy, tmp_path / "cache", STORE.format(elements=elements[::-1])) == alone[::-1]
