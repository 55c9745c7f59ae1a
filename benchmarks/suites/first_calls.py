"""Cases of first calls: CPU seconds of a process that makes one call.

A first process compiles everything, and all its seconds count. For a later process the seconds after numpy's
import count.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.suites.measuring import Case, Work

ATTEND = "cache.update(new, new, 0); cache.attend(new, 0)"
CALLS = {  # statements after `import numpy as np, kvkit`, and the most seconds that they may take
    "multi_head_attention, 64 tokens": (
        "new = np.ones((1, 64, 4, 64), np.float16)",
        "kvkit.multi_head_attention(new, new, new, num_heads=4, head_dim=64)",
        8,
    ),
    "DynamicCache, update and attend, 64 tokens": (
        "from kvkit.cache import DynamicCache",
        f"new, cache = np.ones((1, 4, 64, 64), np.float16), DynamicCache(); {ATTEND}",
        8,
    ),
    "QuantizedCache, update and attend, 257 tokens": (
        "from kvkit.cache import QuantizedCache",
        f"new, cache = np.ones((1, 4, 257, 64), np.float16), QuantizedCache(num_layers=1); {ATTEND}",
        10,
    ),
    "key_value_cache, 4,096 tokens": (
        "new = np.ones((1, 4096, 4, 64), np.float16)",
        "kvkit.key_value_cache(new, new, 0, np.zeros((1, 1, 2, 4096, 4, 64), np.float16))",
        3,
    ),
    "ascend.reshape_and_cache, 64 tokens": (
        "new, cache = np.ones((64, 4, 64), np.float16), np.zeros((2, 4, 16, 4, 64), np.float16)",
        "kvkit.ascend.reshape_and_cache(new, new, cache[0], cache[1], np.arange(64, dtype=np.int32))",
        3,
    ),
}
AGAIN = 0.35  # most seconds of a call whose code is on disk, without numpy's import


def process(lines, cache, is_compiled):
    """Return CPU seconds of a process: all, or if its code is on disk, those after numpy's import."""
    begin = "time.process_time()" if is_compiled else "0"
    code = ["import time, numpy as np", f"begin = {begin}", "import kvkit", *lines]
    code.append("print(time.process_time() - begin)")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables |= {"KVKIT_CACHE_DIR": str(cache), "PYTHONPYCACHEPREFIX": str(home() / "bytecode")}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    return float(subprocess.check_output([sys.executable, "-c", "\n".join(code)], env=variables, text=True))


@functools.cache
def home():
    """Return a folder for compiled code and for Python's bytecode."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def first(*lines):
    """Prepare a call that compiles everything."""

    def prepare():
        def run(i):
            with tempfile.TemporaryDirectory(dir=home()) as cache:
                return process(lines, cache, False)

        return Work(run, timed=True)

    return prepare


def again(*lines):
    """Prepare a call in a process that finds its code on disk."""

    def prepare():
        process(lines, home() / "code", True)
        return Work(lambda i: process(lines, home() / "code", True), timed=True)

    return prepare


CASES = [
    *(Case(f"first {name}", first(*lines), limit=limit, rounds=3) for name, (*lines, limit) in CALLS.items()),
    *(Case(f"again {name}", again(*lines), limit=AGAIN) for name, (*lines, _) in CALLS.items()),
]
