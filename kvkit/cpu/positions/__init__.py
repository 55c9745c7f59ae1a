"""Rotate queries and keys, and write ALiBi slopes and masks."""

from typing import TYPE_CHECKING

from kvkit.runtime.lazy_imports import lazy_modules

if TYPE_CHECKING:  # so that editors and type checkers follow a call
    from kvkit.cpu.positions import alibi as alibi
    from kvkit.cpu.positions import rotary as rotary

__getattr__ = lazy_modules(__name__, "alibi", "rotary")
