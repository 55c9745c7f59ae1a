"""All that refuses: a check returns what kernels need, or raises before anything has been written.

The passes over index tensors are compiled; each is imported, and Numba with it, when it is first used.
"""

from kvkit.runtime.lazy_imports import lazy_modules

__getattr__ = lazy_modules(__name__, "position_scan", "scan", "slots", "table_rules")
