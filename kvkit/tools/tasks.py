"""Run independent parts of a tool's work with `mapper`, a function such as `map`, perhaps on a cluster.

`mapper(function, names, *arguments)` calls the function, which must be picklable, as `map` does. The first
argument of each call names the task in errors of a cluster.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

Mapper = Callable[..., Iterable[Any]]


class Lazy:
    """A value that is computed on first use. Pickling sends the recipe, not the value."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    @cached_property
    def value(self) -> Any:
        """Return the function's result."""
        return self.function(*self.arguments)

    def __reduce__(self) -> Any:
        return Lazy, (self.function, *self.arguments)
