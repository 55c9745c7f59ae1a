"""Measure the memory that a process of its own maps while it acts, exact to the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MB = 2**20
STATUS = Path("/proc/self/status")
ALLOCATORS = {
    "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1",
    "KVKIT_RESULT_POOL_BYTES": "0", "NUMBA_NUM_THREADS": "2",
}  # fmt: skip
needs_status = pytest.mark.skipif(not STATUS.exists(), reason="reads memory from /proc")


def kilobytes(name):
    with STATUS.open("rb", buffering=0) as status:  # a buffer, 128 KB from Python 3.14, would count itself
        lines = status.read().decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def extra(action):
    """Return the most MB that an action maps at once; first the process is filled up to its peak."""
    ballast = np.empty((kilobytes("VmPeak") - kilobytes("VmSize") << 10) + MB, np.uint8)
    before = kilobytes("VmPeak")
    action()
    assert ballast.size
    return (kilobytes("VmPeak") - before) / 1024


def sizes_by(script):
    """Return what a script leaves in `found`, {name: MB}, after a check that 16 MB are measured as 16 MB.

    Its second run is what counts: compiling takes memory, too.
    """
    text = f"{script}\nimport json\nprint(json.dumps([extra(lambda: np.ones({16 * MB}, np.uint8)), found]))"
    variables = os.environ | ALLOCATORS | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    control, found = json.loads(done.stdout)
    assert 16 <= control < 17
    return found
