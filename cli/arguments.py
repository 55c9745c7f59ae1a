"""From the arrays of a file and the settings of a command line to the arguments of an operator."""

import ast

import numpy as np

from kvkit.checks.tensors import dtype_hint
from kvkit.errors import KvkitError, brief
from kvkit.operators import OPERATORS, REQUIRED
from kvkit_cli.show import suggestion

SHOWN = 5  # names in a message
KINDS = {  # type of a value: (in words, as --set takes it)
    int: ("an integer", "NUMBER"),
    float: ("a number", "NUMBER"),
    bool: ("True or False", "True or False"),
    tuple: ("two integers", "NUMBER,NUMBER"),
    str: ("a text", "TEXT"),
}


def find(name):
    """The operator of this name."""
    if name not in OPERATORS:
        known = ", ".join(OPERATORS)
        raise KvkitError(f"no operator {name!r}{suggestion(name, OPERATORS)}; there are {known}")
    return OPERATORS[name]


def is_scalar(array):
    """Whether an input may be a single number."""
    return "()" in array.shapes


def left_over(op, metadata):
    """What a file of results may hold beside what this operator takes: the other arrays of its own one."""
    made = OPERATORS.get(str(metadata.get("operator")))
    return {array.name for array in (*made.inputs, *made.outputs)} - names_of(op) if made else set()


def names_of(op):
    return {thing.name for thing in (*op.inputs, *op.attributes)}


def fits(op, path, forms, metadata, settings):
    """Whether a file can be a call's, from the headers of its arrays: nothing is unpacked in vain."""
    forms = {name: form for name, form in forms.items() if name not in left_over(op, metadata)}
    check_names(op, path, forms, parse(op, settings))
    for array in op.inputs:
        if array.name not in forms:
            continue
        form, axes = forms[array.name], {axes_of(shape) for shape in array.shapes if "(" in shape}
        index = "int64" in array.dtypes and form.dtype.kind in "iu"  # of any width; the operator says more
        if not index and form.dtype.name not in array.dtypes:
            wanted = " or ".join(array.dtypes)
            raise KvkitError(f"{path}: {array.name}: expected dtype {wanted}, got {dtype_hint(form.dtype)}")
        if None not in axes and len(form.shape) not in axes:
            wanted = " or ".join(array.shapes)
            raise KvkitError(f"{path}: {array.name}: expected shape {wanted}, got {form.shape}")
    for attribute in op.attributes:
        shape = (2,) if attribute.kind is tuple else ()
        if attribute.name in forms and forms[attribute.name].shape != shape:
            wanted = "two integers, an array of shape (2,)" if shape else "an attribute, a 0-d array"
            found = forms[attribute.name].shape
            raise KvkitError(f"{path}: {attribute.name} has shape {found}, but is {wanted}")


def axes_of(shape):
    """The number of axes of a shape as the table writes it; None for one with any number."""
    inside = shape[shape.index("(") + 1 : shape.rindex(")")]
    return None if "..." in inside else len(inside.split(",")) if inside else 0


def bind(op, path, arrays, settings):
    """Inputs and attributes of a call, each a dict in the table's order; `settings` win over the file.

    `path` is None if there is no file.
    """
    values = parse(op, settings)
    check_names(op, path, arrays, values)
    inputs = {}
    for array in op.inputs:
        inputs[array.name] = arrays.get(array.name)
        if array.name in values:
            inputs[array.name] = number(array, values[array.name])
    attributes = {attribute.name: value(attribute, path, arrays, values) for attribute in op.attributes}
    return inputs, attributes


def settable(op):
    """What --set may name: the type of each, and the names of its values."""
    numbers = {array.name: (int, []) for array in op.inputs if is_scalar(array)}
    return numbers | {attribute.name: (attribute.kind, attribute.names) for attribute in op.attributes}


def form(kind, names):
    """A value as --set takes it."""
    return "|".join([*names, KINDS[kind][1]])


def parse(op, settings):
    """The values of `name=value` texts, by name."""
    legal, values = settable(op), {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in legal:
            there = f"there are {', '.join(legal)}" if legal else f"{op.name} has nothing to set"
            raise KvkitError(f"--set {setting}: no such name{suggestion(name, legal)}; {there}")
        if name in values:
            raise KvkitError(f"--set {setting}: {name} is set twice")
        try:
            values[name] = literal(text.strip(), *legal[name])
        except (ValueError, SyntaxError):
            raise KvkitError(f"--set {setting}: expected {name}={form(*legal[name])}") from None
    return values


def literal(text, kind, names):
    """The value that a text stands for; texts and names need no quotes, true and false no capitals."""
    if text in names or (kind is str and text[:1] not in ("'", '"')):
        return text
    return ast.literal_eval(text.capitalize() if kind is bool else text)


def check_names(op, path, arrays, values):
    """Every array in the file means something, and every one that must be there is."""
    legal = [thing.name for thing in (*op.inputs, *op.attributes)]
    known = f"{op.name} takes {', '.join(legal)} (see kvkit describe {op.name})"
    extra = [name for name in arrays if name not in legal]
    if extra:
        shown = ", ".join(name + suggestion(name, legal) for name in map(brief, extra[:SHOWN]))
        more = f" and {len(extra) - SHOWN} more" if len(extra) > SHOWN else ""
        raise KvkitError(f"{path}: unknown arrays {shown}{more}; {known}")
    required = [array.name for array in op.inputs if not array.optional]
    required += [attribute.name for attribute in op.attributes if attribute.default is REQUIRED]
    missing = [name for name in required if name not in arrays and name not in values]
    if missing:
        legal = settable(op)
        settings = " ".join(f"--set {name}={form(*legal[name])}" for name in missing if name in legal)
        ways = "add arrays of these names" + (f" or give {settings}" if settings else "")
        raise KvkitError(f"{path or 'no IN.npz'}: missing {', '.join(missing)}: {ways}; {known}")


def number(array, given):
    """An input of shape () from a set value."""
    if given is None and array.optional:
        return None
    info = np.iinfo(array.dtypes[0])
    if type(given) is not int or not info.min <= given <= info.max:
        raise KvkitError(f"--set {array.name}={brief(repr(given))}: expected an integer of {array.dtypes[0]}")
    return np.array(given, array.dtypes[0])


def value(attribute, path, arrays, values):
    """An attribute: set, in the file, or its default."""
    name = attribute.name
    if name in values:
        return fitting(attribute, values[name], "--set")
    if name not in arrays:
        return attribute.default
    return fitting(attribute, arrays[name].tolist(), f"{path}:")


def fitting(attribute, given, origin):
    """A value of the attribute's type; a float may be an integer, a flag 0 or 1, a mode its name."""
    kind = attribute.kind
    if given in attribute.names:
        return attribute.names.index(given)
    if given is None and attribute.default is None:
        return None
    if (kind is float and type(given) is int) or (kind is bool and given in (0, 1)):
        given = kind(given)
    if kind is tuple and isinstance(given, list):
        given = tuple(given)
    if type(given) is not kind:
        wanted = " or ".join([*attribute.names, KINDS[kind][0]])
        wanted += " or None" if attribute.default is None else ""
        raise KvkitError(f"{origin} {attribute.name}={brief(repr(given))}: expected {wanted}")
    return given
