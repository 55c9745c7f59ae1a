"""The CPU kernels. Each room is imported, and Numba with it, when it is first used."""

from kvkit.runtime import lazy_imports


def __getattr__(name):
    if name in ("alibi", "attention", "codes", "launches", "merge", "pieces", "rotary", "runs", "transfer"):
        return lazy_imports.import_module(f"kvkit.cpu.{name}")
    raise AttributeError(name)
