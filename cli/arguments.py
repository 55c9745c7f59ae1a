"""From the arrays of a file and the settings of a command line to the arguments of an operator."""

import ast

import numpy as np

from kvkit.errors import KvkitError
from kvkit.operators import OPERATORS
from kvkit_cli.show import suggestion


def find(name):
    """The operator of this name."""
    if name not in OPERATORS:
        known = ", ".join(OPERATORS)
        raise KvkitError(f"no operator {name!r}{suggestion(name, OPERATORS)}; there are {known}")
    return OPERATORS[name]


def is_scalar(array):
    """Whether an input may be a single number."""
    return "()" in array.shapes


def bind(op, path, arrays, settings):
    """Inputs and attributes of a call, each a dict in the table's order; `settings` win over the file."""
    values = parse(op, settings)
    check_names(op, path, arrays, values)
    inputs = {}
    for array in op.inputs:
        inputs[array.name] = arrays.get(array.name)
        if array.name in values:
            inputs[array.name] = number(array, values[array.name])
    attributes = {attribute.name: value(attribute, path, arrays, values) for attribute in op.attributes}
    return inputs, attributes


def parse(op, settings):
    """The values of `name=value` texts, by name."""
    legal = [array.name for array in op.inputs if is_scalar(array)]
    legal += [attribute.name for attribute in op.attributes]
    values = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in legal:
            hint = suggestion(name, legal)
            raise KvkitError(f"--set {setting}: no such name{hint}; there are {', '.join(legal)}")
        if name in values:
            raise KvkitError(f"--set {setting}: {name} is set twice")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise KvkitError(f"--set {setting}: expected {name}=NUMBER, True or False") from None
    return values


def check_names(op, path, arrays, values):
    """Every array in the file means something, and every one that must be there is."""
    required = [array.name for array in op.inputs if not array.optional]
    legal = [array.name for array in op.inputs] + [attribute.name for attribute in op.attributes]
    known = f"{op.name} takes {', '.join(legal)} (see kvkit describe {op.name})"
    extra = [name + suggestion(name, legal) for name in arrays if name not in legal]
    if extra:
        raise KvkitError(f"{path}: unknown arrays {', '.join(extra)}; {known}")
    missing = [name for name in required if name not in arrays and name not in values]
    if missing:
        raise KvkitError(f"{path}: missing arrays {', '.join(missing)}; {known}")


def number(array, given):
    """An input of shape () from a set value."""
    info = np.iinfo(array.dtypes[0])
    if type(given) is not int or not info.min <= given <= info.max:
        raise KvkitError(f"--set {array.name}={given!r}: expected an integer of {array.dtypes[0]}")
    return np.array(given, array.dtypes[0])


def value(attribute, path, arrays, values):
    """An attribute: set, in the file, or its default."""
    name = attribute.name
    if name in values:
        return fitting(attribute, values[name], "--set")
    if name not in arrays:
        return attribute.default
    if arrays[name].ndim:
        raise KvkitError(f"{path}: {name} has shape {arrays[name].shape}, an attribute is a 0-d array")
    return fitting(attribute, arrays[name].item(), path)


def fitting(attribute, given, origin):
    """A value of the type of the attribute's default; a float may be given as an integer."""
    kind = type(attribute.default)
    if kind is float and type(given) is int:
        given = float(given)
    if type(given) is not kind:
        raise KvkitError(f"{origin} {attribute.name}={given!r}: expected {kind.__name__}")
    return given
