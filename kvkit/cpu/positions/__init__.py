"""Rotary embedding and ALiBi masks."""

from kvkit.runtime.lazy_imports import lazy_modules

__getattr__ = lazy_modules(__name__, "alibi", "rotary")
