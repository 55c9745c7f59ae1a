"""Caches in files whose processes are killed at moments that nobody has chosen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_killed_processes(tmp_path):
    command = [sys.executable, Path(__file__).with_name("offload_kill_fuzz.py"), tmp_path, "20", "1"]
    rooms = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=os.environ | rooms, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["amid a call"] > 3
