"""The CPU kernels. Each room is imported, and Numba with it, when it is first used."""

from kvkit import garbage


def __getattr__(name):
    if name in ("alibi", "attention", "codes", "launches", "merge", "pieces", "rotary", "runs", "transfer"):
        return garbage.imported(f"kvkit.cpu.{name}")
    raise AttributeError(name)
