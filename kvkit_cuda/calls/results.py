"""The outputs of a call: the arrays that are given, or new ones where an input is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvkit_cuda.calls import arrays


@dataclass(frozen=True, slots=True)
class Results:
    """What a checked call gives back.

    `names` are what errors call the arrays: of several, which are a tuple, or of one, which is as it is.
    `refuse` raises if `out` may not be given; it gets arrays as the checks of `kvkit` see them, and `out`
    itself if that is not as many.
    """

    out: object  # as given, or None
    names: str | tuple[str, ...]
    forms: list  # (shape, dtype)
    refuse: Callable
    absent: int = 0  # results that are None

    def operands(self, source, stream):
        """(operands, what is returned); new arrays are where the operand `source` is."""
        alone = isinstance(self.names, str)
        names = (self.names,) if alone else self.names
        made: Any = [self.out] if alone else self.out
        if self.out is None:
            made = [source.like(*form, stream) for form in self.forms]
        elif not isinstance(made, (tuple, list)) or len(made) != len(names):
            self.refuse(self.out)
        found = [arrays.operand(name, result, stream) for name, result in zip(names, made, strict=True)]
        if self.out is not None:
            seen = tuple(result.seen for result in found)
            self.refuse(seen[0] if alone else seen)
        return found, made[0] if alone else (*made, *[None] * self.absent)
