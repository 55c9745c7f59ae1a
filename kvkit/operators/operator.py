"""Describe an operator as data, from the signature and the docstring of its function."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from kvkit.operators.arrays import ArgumentEntry, Input, find_array, read_shapes
from kvkit.operators.attributes import ATTRIBUTES, Attribute

IN_PYTHON = "out", "extra", "gates"  # arguments that are arrays for results, or several arrays


@dataclass(frozen=True)
class Output:
    """Describes an array that the operator returns, always or if the attribute `only_with` is set."""

    name: str
    dtype: str
    shape: str
    about: str
    only_with: str = ""


@dataclass(frozen=True)
class Operator:
    """Describes an operator: `name` is its path inside the package, `source` its specification.

    `own` has the entries of arguments that mean something else here than in other operators, see
    `find_array`. An operator without outputs returns the arrays that it changes, except keyword arguments,
    and None for an array not given.
    """

    name: str
    source: str
    outputs: tuple[Output, ...] = ()
    own: Mapping[str, ArgumentEntry | None] = field(default_factory=dict, compare=False)

    @property
    def summary(self) -> str:
        """Return the first line of the function's docstring."""
        return (inspect.getdoc(self.function()) or "").partition("\n")[0]

    @functools.cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...]:
        """Return the arguments of the function that are arrays or plain values."""
        parameters = inspect.signature(self.function()).parameters
        return tuple(parameters[name] for name in parameters if name not in IN_PYTHON)

    @functools.cached_property
    def inputs(self) -> tuple[Input, ...]:
        """Return the arguments that are arrays, or numbers that may be arrays of shape ()."""
        shapes = read_shapes(inspect.getdoc(self.function()) or "")
        find = functools.partial(find_array, own=self.own, has_outputs=bool(self.outputs), shapes=shapes)
        inputs = (find(self.name, parameter) for parameter in self.parameters)
        return tuple(array for array in inputs if array is not None)

    @functools.cached_property
    def attributes(self) -> tuple[Attribute, ...]:
        """Return the other arguments, plain values that are given by keyword."""
        arrays = {array.name for array in self.inputs}
        plain = [parameter for parameter in self.parameters if parameter.name not in arrays]
        return tuple(ATTRIBUTES[each.name].with_default(each.default) for each in plain)

    def function(self, package: str = "kvkit") -> Callable[..., Any]:
        """Return the function of this name in a package (`kvkit` or `kvkit_cuda`)."""
        package_or_function: Any = importlib.import_module(package)
        for name in self.name.split("."):
            package_or_function = getattr(package_or_function, name)
        return cast(Callable[..., Any], package_or_function)

    def call(self, arguments: Mapping[str, Any], package: str = "kvkit") -> Any:
        """Call the function of a package with arguments by name; missing inputs are None."""
        positional = [array.name for array in self.inputs if not array.keyword]
        rest = {name: value for name, value in arguments.items() if name not in positional}
        return self.function(package)(*map(arguments.get, positional), **rest)

    def returned(self, attributes: Mapping[str, object]) -> list[str]:
        """Return the names of the arrays that a call with these attributes returns."""
        outputs = [x.name for x in self.outputs if not x.only_with or attributes.get(x.only_with)]
        return outputs or [array.name for array in self.inputs if array.inout and not array.keyword]

    def to_dict(self) -> dict[str, Any]:
        """Return name, texts, inputs and outputs as values for JSON, without the attributes."""
        inputs, outputs = ([asdict(array) for array in arrays] for arrays in (self.inputs, self.outputs))
        texts = {"name": self.name, "summary": self.summary, "source": self.source}
        return {**texts, "inputs": inputs, "outputs": outputs}


def key_value(tokens: str) -> tuple[Output, ...]:
    """Return the outputs of operators that read a context back."""
    shape, dtype = f"({tokens}, H*num_repeat, Dh)", "that of current_key"
    return (
        Output("key", dtype, shape, "past and current keys, as read from the cache"),
        Output("value", dtype, shape, "past and current values, as read from the cache"),
    )


def attention(tokens: str, dim: str, keys: str | None = None) -> tuple[Output, ...]:
    """Return the outputs of attention; `keys` names the axis of keys in `key_weights`, if there are any."""
    about = "logarithms of the softmax denominators"
    outputs = (
        Output("attn_output", "that of query", f"({tokens}, num_heads, {dim})", "weighted sums of values"),
        Output("lse", "float32", f"({tokens}, num_heads)", about, only_with="return_lse"),
    )
    if keys is None:
        return outputs
    about, shape = "sums of the weights that keys get", f"(B, num_heads, {keys})"
    return (*outputs, Output("key_weights", "float32", shape, about, only_with="return_key_weights"))


def rotated(tokens: str) -> tuple[Output, ...]:
    """Return the outputs of rotary embedding."""
    shape = f"({tokens}, heads, Dh)"
    return (
        Output("query", "that of query", shape, "queries, rotated"),
        Output("key", "that of query", shape, "keys, rotated"),
    )


def mask(tokens: str, about: str) -> tuple[Output, ...]:
    """Return the output of operators that make masks."""
    return (Output("mask", "data_type", f"(num_heads, {tokens} rounded up to a multiple of 16)", about),)
