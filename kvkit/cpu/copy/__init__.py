"""Copies of tokens and rows from place to place, for each format."""

from kvkit.runtime.lazy_imports import lazy_modules

__getattr__ = lazy_modules(__name__, "codes", "pieces", "rotations", "runs", "transfer")
