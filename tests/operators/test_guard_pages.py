"""Arrays at the border of memory, in processes of their own, which a byte read or written outside ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from borders import BEGIN, END, needs_borders

READ = """
import ctypes, sys
import numpy as np
from borders import at_border
array, place = at_border(np.arange(5, dtype=np.int8), sys.argv[1]), int(sys.argv[2])
print(ctypes.c_int8.from_address(array.ctypes.data + place).value)
"""

pytestmark = needs_borders


def run(*command):
    rooms = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=os.environ | rooms, capture_output=True, text=True)


@pytest.mark.parametrize("where", [BEGIN, END])
def test_a_byte_outside_ends_the_process(where):
    inside, outside = (0, -1) if where == BEGIN else (4, 5)
    assert run("-c", READ, where, inside).stdout == f"{inside}\n"
    assert run("-c", READ, where, outside).returncode == -signal.SIGSEGV


@pytest.mark.slow
def test_calls_at_borders():
    done = run("-X", "faulthandler", Path(__file__).with_name("guard_fuzz.py"), 400, 1)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, (last, done.stderr)
    counts = json.loads(last)
    assert counts["legal"] + counts["changed"] + counts["refused"] == 400
    assert min(counts["legal"], counts["changed"], counts["refused"]) > 40
