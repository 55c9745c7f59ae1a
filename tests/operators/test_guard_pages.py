"""Arrays at the border of memory, in processes of their own, which a byte read or written outside ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from borders import needs_borders

pytestmark = needs_borders


def run(*command):
    rooms = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=os.environ | rooms, capture_output=True, text=True)


@pytest.mark.slow
def test_calls_at_borders():
    done = run("-X", "faulthandler", Path(__file__).with_name("guard_fuzz.py"), 400, 1)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, (last, done.stderr)
    counts = json.loads(last)
    assert counts["legal"] + counts["changed"] + counts["refused"] == 400
    assert min(counts["legal"], counts["changed"], counts["refused"]) > 40
