"""What kvkit_cuda asks of NVIDIA's libraries that are installed here; warnings are errors."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvkit.errors import DeviceError
from kvkit_cuda.device_runtime import compiled, needs


def test_a_linker_older_than_its_compiler_is_refused(monkeypatch):
    """The real one is given the PTX of a compiler to come; what it says is told, with a remedy."""
    needs.packages()
    newer = re.sub(r"(?m)^\.version .*", ".version 99.9", needs.small_ptx(needs.OLDEST))
    monkeypatch.setattr(needs, "small_ptx", lambda found: newer)
    words = r" and the PTX of NVVM, version 99.9, got one that fails \(.*\): pip install"
    with pytest.raises(DeviceError, match=words):
        needs.libraries.__wrapped__(needs.OLDEST)


def test_libraries_older_than_the_device_are_refused(monkeypatch):
    """Here those that are installed, for a device to come."""
    needs.packages()
    monkeypatch.setitem(needs.FIRST, (99, 0), "99.8")
    words = r"linker \(nvJitLink\) of CUDA 99.8 or later, for compute capability 99.0 and .*: pip install"
    with pytest.raises(DeviceError, match=words):
        needs.device("GPU", (99, 0))


SCRIPT = """
import {first}
import kvkit_cuda
from kvkit_cuda.device_runtime import needs
try:
    kvkit_cuda.alibi_slope(num_heads=4)
except kvkit_cuda.DeviceError as error:
    print(error)
    if "driver" in str(error):
        from numba import cuda
        needs.libraries(needs.OLDEST)
        print(cuda.implementation)
"""
OTHERS = "numba-cuda as numba.cuda, got that of Numba, which was imported before: import _numba_cuda"


@pytest.mark.parametrize(("first", "words"), [("numba", "(libcuda)"), ("numba.cuda", OTHERS)])
def test_a_folder_whose_pth_files_are_not_read(first, words, tmp_path):
    """As `pip install --target` fills one: numba-cuda and NVIDIA's libraries are found there, or refused."""
    (packages,) = {Path(importlib.util.find_spec(name).origin).parents[1] for name in ("numba", "numba_cuda")}
    for path in packages.iterdir():
        if path.suffix != ".pth":
            (tmp_path / path.name).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-S", "-W", "ignore", "-c", SCRIPT.format(first=first)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert words in lines[0]
    assert lines[1:] == ["NVIDIA"] * (first == "numba")


def test_libraries_are_known_by_their_build_ids(tmp_path):
    """Not by a place or a time; one that has no build ID by its contents."""
    head, note, end = bytes(100), compiled.BUILD_ID, bytes(range(30))
    for name, contents in (("one", head + note + end), ("two", note + end + head), ("other", head + end)):
        (tmp_path / name).write_bytes(contents)
    one, two, other = (compiled.build_id(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two == bytes(range(20)).hex()
    assert other == hashlib.sha256(head + end).hexdigest()
    assert len(compiled.library("nvJitLink")) == 40


def test_all_that_is_missing_is_told():
    """Here a driver is, and nothing else."""
    (message,) = needs.messages()
    assert message.startswith("kvkit_cuda: expected an NVIDIA GPU and its driver, got no driver")
