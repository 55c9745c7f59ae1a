"""Import modules on first use, because Numba comes with them."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], others: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports names on first use.

    `modules` has the module of each name, which may be that module itself; `others` are names to list.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        found = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, found)  # found directly next time
        return found

    return load, lambda: sorted({*others, *modules})


def lazy_modules(package: str, *names: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports these of its modules on first use."""
    return lazy_names(package, {name: f"{package}.{name}" for name in names})[0]


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
