"""The CPU kernels. Each room is imported, and Numba with it, when it is first used."""

import importlib


def __getattr__(name):
    if name in ("alibi", "attention", "codes", "launches", "merge", "pieces", "rotary", "runs", "transfer"):
        return importlib.import_module(f"kvkit.cpu.{name}")
    raise AttributeError(name)
