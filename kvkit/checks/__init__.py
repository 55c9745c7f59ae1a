"""All that refuses: a check returns what kernels need, or raises before anything has been written.

The passes over index tensors are compiled; each is imported, and Numba with it, when it is first used.
"""

from kvkit.runtime import lazy_imports


def __getattr__(name):
    if name in ("position_scan", "scan", "slots", "table_rules"):
        return lazy_imports.import_module(f"kvkit.checks.{name}")
    raise AttributeError(name)
