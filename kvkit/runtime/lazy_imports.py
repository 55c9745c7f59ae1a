"""Import modules on first use, so that `import kvkit` does not import Numba."""

import contextlib
import difflib
import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

EMPTY: Mapping[str, str] = {}


def folded(name: str) -> str:
    """Return a name in lower case without underscores: ReshapeAndCache is like reshape_and_cache."""
    return name.replace("_", "").lower()


def lazy_names(
    package: str,
    modules: Mapping[str, str],
    others: Iterable[str] = (),
    deeper: Mapping[str, str] = EMPTY,
    renamed: Mapping[str, str] = EMPTY,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports names on first use.

    `modules` maps each name to the module that defines it, or that it names. `others` are further names of
    the package, for `__dir__`. `deeper` are names that its modules have: {name: module}, `renamed` those of
    before: {name: the new one}. An error proposes what is like a wrong name, whatever its case and
    underscores.
    """

    def load(name: str) -> Any:
        if name not in modules:
            known = {folded(each): each for each in (*others, *modules)}
            known |= {folded(each): f"{deeper[each]}.{each}" for each in deeper}
            near = difflib.get_close_matches(folded(name), known, 1)
            meant = renamed.get(name) or (known[near[0]] if near else "")
            hint = f": did you mean {meant!r}?" if meant else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module = import_module(modules[name])
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next look-up finds it without this function
        return value

    return load, lambda: sorted({*others, *modules})


def lazy_modules(package: str, *names: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports some of its modules on first use."""
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
    """Import a module. If that imports Numba, move all objects to the collector's oldest generation.

    Numba makes some hundred thousand objects, which the collector would otherwise visit again and again.
    """
    if "numba" in sys.modules:
        return importlib.import_module(name)
    with gc_paused():
        module = importlib.import_module(name)
        if not gc.get_freeze_count():  # else `unfreeze` would undo a freeze of the user's program
            gc.freeze()
            gc.unfreeze()
    return module
