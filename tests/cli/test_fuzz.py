"""Mutated files and killed runs, in processes of their own: a crash is found as well as a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def fuzzed(name, *args):
    done = subprocess.run([sys.executable, HERE / name, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files(tmp_path, count):
    codes = fuzzed("file_fuzz.py", tmp_path, count, 1)
    assert sum(codes.values()) == count
    assert set(codes) == {"0", "2"}


@pytest.mark.slow
def test_killed_runs(tmp_path):
    assert fuzzed("kill_fuzz.py", tmp_path, 30, 1)["while a file was written"] > 3
