"""List the layouts that PMX's operators number, and write their shapes into docstrings."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvkit.layouts.grammar import Layout
from kvkit.layouts.named import family

STATIC = family("pmx-static")
DYNAMIC = family("pmx-dynamic")
PMX_SIZES = {"b": "MaxB", "l": "L", "kv": "2", "n": "MaxS", "h": "H", "c": "Dh"}

Documented = TypeVar("Documented", bound=Callable[..., Any])


def shape_text(layout: Layout) -> str:
    """Return the shape of a cache in PMX's names of sizes: (MaxT, L, 2, H, Dh)."""
    names = dict(PMX_SIZES) if "b" in layout.axes else PMX_SIZES | {"n": "MaxT"}
    return f"({', '.join(names[axis] for axis in layout.axes)})"


def list_shapes(layouts: Iterable[Layout]) -> tuple[str, ...]:
    """Return a line for each layout: its number and its sizes."""
    return tuple(f"{number}: {shape_text(layout)}" for number, layout in enumerate(layouts))


def documented(layouts: Iterable[Layout]) -> Callable[[Documented], Documented]:
    """Decorate a function to replace ``{layouts}`` in its docstring by these layouts."""

    def decorate(function: Documented) -> Documented:
        def lines(found: re.Match[str]) -> str:
            return "\n".join(found[1] + line for line in list_shapes(layouts))

        function.__doc__ = re.sub(r"( *){layouts}", lines, function.__doc__ or "")
        return function

    return decorate
