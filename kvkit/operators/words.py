"""The words that tables of operators are written in."""

import functools
import importlib
import inspect
from dataclasses import dataclass

from kvkit import formats
from kvkit.operators.attributes import ATTRIBUTES

FLOATS = tuple(fmt.name for fmt in formats.FLOATS)
T1 = tuple(fmt.name for fmt in formats.BY_DTYPE.values())
T2 = (*T1, "uint8")
MASK = tuple(formats.MASKS)
INDEX = ("int64", "int32")


@dataclass(frozen=True)
class Input:
    """An array argument. `shapes` lists the legal shapes; `inout` arrays are changed in place.

    Inputs are passed by position, in order, but for those that are `keyword`. Scales that are `found` go to
    arrays of as many axes as a cache has; those of heads are given.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    about: str
    optional: bool = False
    inout: bool = False
    keyword: bool = False
    found: bool = False

    def changes(self, array):
        """Whether an array given for it is changed in place."""
        return self.inout or (self.found and getattr(array, "ndim", 0) > 1)


@dataclass(frozen=True)
class Output:
    """An array that the operator returns, always or if the attribute `only_with` is set."""

    name: str
    dtype: str
    shape: str
    about: str
    only_with: str = ""


@dataclass(frozen=True)
class Operator:
    """An operator of kvkit: `name` is its path inside the package.

    Its attributes are the keyword arguments of its function that are neither inputs nor `out`.
    One that has no outputs of its own returns the arrays that it changes. An optional array that is not given
    comes back as None.
    """

    name: str
    summary: str
    source: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]

    @functools.cached_property
    def attributes(self):
        """What the function takes by keyword beside arrays."""
        arrays = {"out", *(array.name for array in self.inputs)}
        return tuple(
            ATTRIBUTES[p.name].of(p.default)
            for p in inspect.signature(self.function()).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in arrays
        )

    def function(self, package="kvkit"):
        """The function of this name in a package (`kvkit` or its twin)."""
        return functools.reduce(getattr, self.name.split("."), importlib.import_module(package))

    def returned(self, attributes):
        """The names of what a call with these attributes returns."""
        outputs = [array.name for array in self.outputs if not array.only_with or attributes[array.only_with]]
        return outputs or [array.name for array in self.inputs if array.inout]
