"""Compiled code is kept on disk: fast in the next process, never stale, and never needed."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

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
from kvkit import jit
folder = jit.cache_folder()
print(json.dumps({"seconds": seconds, "scale": float(scale.max()), "folder": str(folder)}))
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the package that a test may edit."""
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


def test_second_process_is_fast_and_compiles_nothing(copy, tmp_path):
    first = call(copy, tmp_path / "cache")
    kept = files(first["folder"])
    assert kept
    seconds = [call(copy, tmp_path / "cache")["seconds"] for _ in range(3)]
    assert files(first["folder"]) == kept
    assert min(seconds) < 0.5


def test_an_edit_of_any_file_leads_to_new_code(copy, tmp_path):
    before = call(copy, tmp_path / "cache")
    formats = copy / "kvkit" / "formats.py"
    formats.write_text(formats.read_text().replace("(-127, 127)", "(-100, 100)"))
    after = call(copy, tmp_path / "cache")
    assert (before["scale"], after["scale"]) == (pytest.approx(3 / 127), pytest.approx(3 / 100))


def test_an_edit_after_the_import_poisons_nothing(copy, tmp_path):
    """Code of the old sources must not be found under the new ones."""
    edit = (
        "import kvkit, pathlib\n"
        "path = pathlib.Path(kvkit.__file__).parent / 'formats.py'\n"
        "path.write_text(path.read_text().replace('(-127, 127)', '(-100, 100)'))\n"
    )
    assert call(copy, tmp_path / "cache", edit + CALL)["scale"] == pytest.approx(3 / 127)
    assert call(copy, tmp_path / "cache")["scale"] == pytest.approx(3 / 100)


def test_an_edit_of_what_code_comes_from_leads_to_new_code(copy):
    """The digest changes with each file that a kernel's module imports, directly or not, and no other."""
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, str(copy)], capture_output=True, text=True, cwd=copy
    )
    assert done.returncode == 0, done.stderr
    changed = json.loads(done.stdout)
    walk = changed["kvkit.cpu.transfer"]
    for name in (
        "cpu.transfer",
        "cpu.rows",
        "cpu.memory",
        "cpu.simd.lanes",
        "formats",
        "index",
        "jit",
        "numeric",
    ):
        assert f"kvkit.{name}" in walk, name
    assert not [name for name in walk if name.startswith(("kvkit.cache", "kvkit.static", "kvkit.ascend"))]
    assert {"kvkit.cpu.attend_walk", "kvkit.cpu.online", "kvkit.index"} <= set(changed["kvkit.cpu.attend"])


DIGESTS = """
import json, pathlib, sys
from kvkit import sources
root, kernels = pathlib.Path(sys.argv[1]), ("kvkit.cpu.transfer", "kvkit.cpu.attend")
assert sources.PACKAGE == root.resolve() / "kvkit", sources.PACKAGE
plain, changed = {name: sources.digest(name) for name in kernels}, {name: [] for name in kernels}
for name, text in sources.IMPORTED.items():
    edited = sources.IMPORTED | {name: text + b"# edited"}
    for kernel in kernels:
        if sources.digest_of(kernel, edited) != plain[kernel]:
            changed[kernel].append(name)
assert sources.texts() == sources.IMPORTED
print(json.dumps(changed))
"""


def test_one_thread_and_all_are_found_by_the_next_process(copy, tmp_path):
    """Variants of one kernel, compiled in one process."""
    code = CALL.replace(
        "print(", "big = np.ones((1, 4096, 2, 64), np.float32)\n"
        "kvkit.key_value_cache(big, big, 0, np.zeros((1, 1, 2, 4096, 2, 64), np.float32))\nprint("
    )  # fmt: skip
    kept = files(call(copy, tmp_path / "cache", code)["folder"])
    assert files(call(copy, tmp_path / "cache", code)["folder"]) == kept
    walks = [name for name in kept if name.startswith("kvkit-cpu-transfer-walk-")]
    assert len(walks) == 2


def test_numba_and_cpu_are_part_of_the_key(monkeypatch):
    from kvkit import jit

    plain = jit.fingerprint.__wrapped__()
    monkeypatch.setattr(jit.numba, "__version__", "0.0.1")
    assert jit.fingerprint.__wrapped__() != plain
    monkeypatch.undo()
    codegen = type(jit.cpu_target.target_context.codegen())
    monkeypatch.setattr(codegen, "magic_tuple", lambda self: ("another", "cpu", "+features"))
    assert jit.fingerprint.__wrapped__() != plain


@pytest.mark.parametrize("setting", ["NUMBA_OPT=0", "NUMBA_BOUNDSCHECK=1", "NUMBA_LOOP_VECTORIZE=0"])
def test_settings_of_numba_are_part_of_the_key(copy, setting):
    code = "import json; from kvkit import jit; print(json.dumps(jit.fingerprint()))"
    variables = dict([setting.split("=")])
    assert call(copy, "unused", code, **variables) != call(copy, "unused", code)


def test_no_home_directory(copy, monkeypatch, tmp_path):
    from kvkit import jit

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(jit.Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("KVKIT_CACHE_DIR", raising=False)
    assert jit.cache_folder.__wrapped__() is None
    monkeypatch.setenv("KVKIT_CACHE_DIR", str(tmp_path))
    assert jit.cache_folder.__wrapped__().parent == tmp_path


def test_an_editors_lock_file_is_no_source(copy, tmp_path):
    """Emacs makes dangling links of such names."""
    (copy / "kvkit" / ".#check.py").symlink_to("someone@host.1")
    assert call(copy, tmp_path / "cache")["folder"] != "None"


def test_folder_that_cannot_be_made(copy, tmp_path):
    (tmp_path / "a-file").write_text("in the way")
    assert call(copy, tmp_path / "a-file" / "cache")["scale"] == pytest.approx(3 / 127)


def test_no_folder_wanted(copy):
    assert call(copy, "")["folder"] == "None"


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None], ids=["empty", "garbage", "cut"])
def test_damaged_files_are_compiled_again(copy, tmp_path, damage):
    folder = Path(call(copy, tmp_path / "cache")["folder"])
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-10] if damage is None else damage)
    assert call(copy, tmp_path / "cache")["scale"] == pytest.approx(3 / 127)


def test_code_is_for_its_owner_only(copy, tmp_path):
    """Others must not be able to plant code that this user would load."""
    folder = Path(call(copy, tmp_path / "cache")["folder"])
    assert not folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def test_a_full_disk_costs_nothing_but_time(monkeypatch, tmp_path):
    from kvkit import index, jit

    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit.tempfile, "NamedTemporaryFile", full)
    begin = time.perf_counter()
    add = jit.kernel(index.share.py_func, "int64(int64, int64, int64)")
    assert add(7, 1, 2) == 4
    assert time.perf_counter() - begin < 60
    assert not list(tmp_path.iterdir())


STORE = """
import json, sys
import numpy as np
from kvkit.cpu.rows import rows
codes = []
for group in {groups}:
    x = np.arange(1, 2 * group + 1, dtype=np.float32)
    cache, scale = np.zeros(2 * group, np.int8), np.zeros(2, np.float32)
    code = rows("store", "float32", "int8", "float32", group, groups=16)
    code.ctypes(x.ctypes.data, 0, 0, cache.ctypes.data, 0, 0, scale.ctypes.data, 0, 0, 1, 1, 1, 2 * group)
    codes.append([cache.tolist(), (scale * 127).tolist()])
print(json.dumps(codes))
"""


def test_code_of_several_processes_lives_together(copy, tmp_path):
    """Functions of one name and number, compiled by processes of their own, stay apart in another one."""
    groups = (2, 4, 8)
    alone = [call(copy, tmp_path / "cache", STORE.format(groups=(group,)))[0] for group in groups]
    for group, (_, largest) in zip(groups, alone, strict=True):
        assert largest == pytest.approx([group, 2 * group])
    for order in (groups, groups[::-1]):
        together = call(copy, tmp_path / "cache", STORE.format(groups=order))
        assert together == [alone[groups.index(group)] for group in order]
