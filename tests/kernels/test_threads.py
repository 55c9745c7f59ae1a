"""What kvkit's threads leave of the process for others."""

import subprocess
import sys

SHOW = """
import ctypes, importlib
import numpy as np, numba, kvkit

query = np.ones((1, 256, 4, 64), np.float32)
kvkit.multi_head_attention(query, query, query, num_heads=4, head_dim=64)
layer = numba.threading_layer()
pool = ctypes.CDLL(importlib.import_module("numba.np.ufunc.omppool").__file__) if layer == "omp" else None
print(pool.omp_get_max_active_levels() if pool else 1)
"""


def test_threads_of_others_do_not_nest():
    """Numba allows it for the whole process, which makes torch three times as slow."""
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "1"
