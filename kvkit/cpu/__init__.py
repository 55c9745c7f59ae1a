"""The CPU kernels. Each module is imported, and Numba with it, when it is first used."""

from kvkit.runtime.lazy_imports import lazy_modules

__getattr__ = lazy_modules(__name__, "attention", "copy", "launches", "positions")
