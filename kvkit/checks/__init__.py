"""Checks of arguments: a check returns what kernels need, or raises before anything has been written.

The passes over index tensors are compiled. Each is imported, and Numba with it, when it is first used.
"""

from typing import TYPE_CHECKING

from kvkit.runtime.lazy_imports import lazy_modules

if TYPE_CHECKING:
    from kvkit.checks import position_scan as position_scan
    from kvkit.checks import scan as scan
    from kvkit.checks import slots as slots
    from kvkit.checks import table_rules as table_rules

__getattr__ = lazy_modules(__name__, "position_scan", "scan", "slots", "table_rules")
