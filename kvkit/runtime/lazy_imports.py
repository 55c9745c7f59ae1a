"""Import modules on first use, because Numba comes with them."""

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

    Numba makes some hundred thousand objects, which the collector would otherwise visit again and again.
    """
    if "numba" in sys.modules:
        return importlib.import_module(name)
    with gc_paused():
        module = importlib.import_module(name)
        if not gc.get_freeze_count():  # do not unfreeze what the program froze
            gc.freeze()
            gc.unfreeze()
    return module
