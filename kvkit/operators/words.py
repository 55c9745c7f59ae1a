"""The words that tables of operators are written in."""

import functools
import importlib
import inspect
from dataclasses import dataclass

FLOATS = ("float32", "float16", "bfloat16")
T1 = (*FLOATS, "int8")
T2 = (*FLOATS, "int8", "uint8")
MASK = (*FLOATS, "bool")
INDEX = ("int64", "int32")
REQUIRED = inspect.Parameter.empty  # the default of what has none


@dataclass(frozen=True)
class Input:
    """An array argument. `shapes` lists the legal shapes; `inout` arrays are changed in place.

    Inputs are passed by position, in order, but for those that are `keyword`.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    about: str
    optional: bool = False
    inout: bool = False
    keyword: bool = False


@dataclass(frozen=True)
class Attribute:
    """A keyword argument with a plain value, of type `kind`; `modes` name an integer's values, from 0 on."""

    name: str
    default: object
    about: str
    kind: type = int
    modes: tuple[tuple[str, str], ...] = ()  # (name, what it means)

    @property
    def names(self):
        return [name for name, _ in self.modes]


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

    One that has no outputs of its own returns the arrays that it changes. An optional array that is not given
    comes back as None.
    """

    name: str
    summary: str
    source: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[Output, ...]

    def function(self, package="kvkit"):
        """The function of this name in a package (`kvkit` or its twin)."""
        return functools.reduce(getattr, self.name.split("."), importlib.import_module(package))

    def returned(self, attributes):
        """The names of what a call with these attributes returns."""
        outputs = [array.name for array in self.outputs if not array.only_with or attributes[array.only_with]]
        return outputs or [array.name for array in self.inputs if array.inout]
