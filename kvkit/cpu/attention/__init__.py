"""Attention over keys and values, or over a cache where it lies."""

from kvkit.runtime.lazy_imports import lazy_modules

__getattr__ = lazy_modules(__name__, "merge", "prepare", "segmented")
