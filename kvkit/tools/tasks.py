"""Independent parts of a tool's work, which `mapper` may do elsewhere: a function like `map`.

Its first argument is a function that can be pickled, the first argument of each of whose calls names it.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

Mapper = Callable[..., Iterable[Any]]


class Made:
    """What a function makes of arguments: once where it is asked for, and again wherever this is sent."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    @cached_property
    def it(self) -> Any:
        return self.function(*self.arguments)

    def __reduce__(self) -> Any:
        return Made, (self.function, *self.arguments)
