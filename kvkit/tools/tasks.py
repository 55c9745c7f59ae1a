"""Do independent parts of a tool's work by `mapper`, a function like `map`, perhaps on a cluster.

Its first argument is a function that can be pickled; the first argument of each call is its title.
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
