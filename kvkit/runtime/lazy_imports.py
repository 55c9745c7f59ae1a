"""Modules that are imported when they are first used, because Numba comes with them."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType


def lazy_modules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Return a `__getattr__` for a package that imports these of its modules on first use."""

    def load(name: str) -> ModuleType:
        if name in names:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while Numba imports and compiles, which makes little garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def import_module(name: str) -> ModuleType:
    """Import a module. If Numba comes with it, count its objects as old from the start.

    They are some hundred thousand: looked at again and again they take a fifth of a process's first call.
    """
    if "numba" in sys.modules:
        return importlib.import_module(name)
    with gc_paused():
        module = importlib.import_module(name)
        if not gc.get_freeze_count():  # what others have frozen stays frozen
            gc.freeze()
            gc.unfreeze()
    return module
