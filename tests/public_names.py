"""Print the names that `dir` shows of every public module and class; `tests/public_names.txt` stores them.

`python tests/public_names.py > tests/public_names.txt` after a name is meant to appear or to go.
"""

import inspect

import kvkit
from kvkit import (
    ascend,
    cache,
    dynamic_batching,
    eviction,
    files,
    formats,
    integrations,
    layouts,
    tools,
)

MODULES = kvkit, ascend, cache, dynamic_batching, eviction, files, formats, integrations, layouts, tools


def public_names():
    """Return lines "NAME: what dir() shows", for the modules, then for the classes that they show."""
    lines, classes = [], {}
    for module in MODULES:
        shown = [name for name in dir(module) if not name.startswith("_")]
        lines.append(f"{module.__name__}: {' '.join(shown)}")
        values = {name: getattr(module, name) for name in shown}
        classes |= {
            f"{value.__module__}.{name}": value
            for name, value in values.items()
            if inspect.isclass(value) and not issubclass(value, Exception)
        }
    for name, cls in sorted(classes.items()):
        own = [each for each in cls.__mro__ if each.__module__ != "builtins"]  # Pythons differ in int's names
        shown = {each for base in own for each in vars(base) if not each.startswith("_")}
        lines.append(f"{name}: {' '.join(each for each in dir(cls) if each in shown)}")
    return lines


if __name__ == "__main__":
    print(*public_names(), sep="\n")
