"""The CPU kernels. Each module is imported, and Numba with it, when it is first used."""

from typing import TYPE_CHECKING

from kvkit.runtime.lazy_imports import lazy_modules

if TYPE_CHECKING:  # so that editors and type checkers follow a call
    from kvkit.cpu import attention as attention
    from kvkit.cpu import copy as copy
    from kvkit.cpu import launches as launches
    from kvkit.cpu import positions as positions
    from kvkit.cpu import recurrent as recurrent

__getattr__ = lazy_modules(__name__, "attention", "copy", "launches", "positions", "recurrent")
