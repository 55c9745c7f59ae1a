"""Build an operator's arguments from the arrays of a file and the settings (--set) of a command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.checks.values import dtype_hint
from kvkit.errors import KvkitError, argument_error, brief, near_names
from kvkit.operators import OPERATORS, REQUIRED, Attribute, Input, Operator
from kvkit_cli.show import suggestion

SOME = 5  # names in a message
SPECIFIED = re.compile(r"[\w.]*(?:[a-z]_[a-z]|[A-Za-z][a-z]+[A-Z])[\w.]*")  # KeyValueCache, swap_blocks
VALUE_KINDS = {  # {type of a value: (its name in errors, its form in --set)}
    int: ("an integer", "NUMBER"),
    float: ("a number", "NUMBER"),
    bool: ("True or False", "True or False"),
    tuple: ("two integers", "NUMBER,NUMBER"),
    str: ("a text", "TEXT"),
    dict: ("a mapping", "{'NAME': VALUE}"),
}


def find_operator(name: str) -> Operator:
    """Return the operator of this name, in its package or in its specification, such as KeyValueCache."""
    if name in OPERATORS:
        return OPERATORS[name]
    words = {op: {*SPECIFIED.findall(op.source), op.name.rpartition(".")[2]} for op in OPERATORS.values()}
    exact = [op for op in words if name in words[op]]
    named = exact or [op for op in words if name.lower() in map(str.lower, words[op])]
    if len(named) == 1:
        return named[0]
    if named:
        several = " or ".join(f"{op.name} ({op.source})" for op in named)
        raise argument_error("OP", several, f"{name}, a name of both" if len(named) == 2 else name)
    raise KvkitError(f"no operator {name!r}{near_names(name, OPERATORS)}: see kvkit list ops")


def is_scalar(array: Input) -> bool:
    """Return whether an input may be a single number."""
    return "()" in array.shapes


def ignored_arrays(op: Operator, metadata: dict[str, Any]) -> set[str]:
    """Return the arrays of a file to ignore: those of the operator that wrote it, unless `op` takes them."""
    source_op = OPERATORS.get(str(metadata.get("operator")))
    arrays = (*source_op.inputs, *source_op.outputs) if source_op else ()
    return {array.name for array in arrays} - argument_names(op)


def argument_names(op: Operator) -> set[str]:
    """Return the names of an operator's inputs and attributes."""
    return {argument.name for argument in (*op.inputs, *op.attributes)}


def check_headers(
    op: Operator,
    path: Path | None,
    headers: dict[str, Any],
    metadata: dict[str, Any],
    settings: Sequence[str],
) -> None:
    """Check that a file fits a call, by the headers of its arrays, before anything is unpacked."""
    headers = {name: header for name, header in headers.items() if name not in ignored_arrays(op, metadata)}
    check_names(op, path, headers, parse_settings(op, settings))
    for array in op.inputs:
        if array.name not in headers:
            continue
        header = headers[array.name]
        is_index = "int64" in array.dtypes and header.dtype.kind in "iu"  # the operator checks the width
        if not is_index and header.dtype.name not in array.dtypes and "any" not in array.dtypes:
            wanted = " or ".join(array.dtypes)
            raise KvkitError(f"{path}: {array.name}: expected dtype {wanted}, got {dtype_hint(header.dtype)}")
        axis_counts = {axis_count(shape) for shape in array.shapes if "(" in shape}  # others are remarks
        if None not in axis_counts and len(header.shape) not in axis_counts:
            wanted = " or ".join(array.shapes)
            raise KvkitError(f"{path}: {array.name}: expected shape {wanted}, got {header.shape}")
    for attribute in op.attributes:
        shape = (2,) if attribute.kind is tuple else ()
        if attribute.name in headers and (found := headers[attribute.name].shape) != shape:
            wanted = "two integers, an array of shape (2,)" if shape else "an attribute, a 0-d array"
            raise KvkitError(f"{path}: {attribute.name} has shape {found}, but is {wanted}")


def axis_count(shape: str) -> int | None:
    """Return the number of axes of a shape in the operator table, such as "(B, H)"; None for any number."""
    inside = shape[shape.index("(") + 1 : shape.rindex(")")]
    if "..." in inside:
        return None
    return len(inside.split(",")) if inside else 0


def bind(
    op: Operator, path: Path | None, arrays: dict[str, np.ndarray], settings: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (inputs, attributes) of a call, dicts in the order of the operator table.

    `settings` take precedence over the file. `path` is None if there is no file.
    """
    values = parse_settings(op, settings)
    check_names(op, path, arrays, values)
    inputs = {}
    for array in op.inputs:
        inputs[array.name] = arrays.get(array.name)
        if array.name in values:
            value, info = values[array.name], np.iinfo(array.dtypes[0])
            if value is None and array.optional:
                inputs[array.name] = None
                continue
            if type(value) is not int or not info.min <= value <= info.max:
                wanted = f"an integer of {array.dtypes[0]}"
                raise KvkitError(f"--set {array.name}={brief(repr(value))}: expected {wanted}")
            inputs[array.name] = np.array(value, array.dtypes[0])
    attributes = {}
    for attribute in op.attributes:
        name = attribute.name
        if name in values:
            attributes[name] = convert_value(attribute, values[name], "--set")
        elif name in arrays:
            attributes[name] = convert_value(attribute, arrays[name].tolist(), f"{path}:")
        else:
            attributes[name] = attribute.default
    return inputs, attributes


def settable(op: Operator) -> dict[str, tuple[type, Sequence[str]]]:
    """Return {name that --set takes: (type, names of its values)}."""
    numbers = {array.name: (int, []) for array in op.inputs if is_scalar(array)}
    return numbers | {attribute.name: (attribute.kind, attribute.names) for attribute in op.attributes}


def setting_form(kind: type, names: Sequence[str]) -> str:
    """Return the form of a value in --set, such as "NUMBER" or "NAME|NAME|NUMBER"."""
    return "|".join([*names, VALUE_KINDS[kind][1]])


def parse_settings(op: Operator, settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of `name=value` texts, by name."""
    legal, values = settable(op), {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in legal:
            options = f"there are {', '.join(legal)}" if legal else f"{op.name} has nothing to set"
            raise KvkitError(f"--set {setting}: no such name{suggestion(name, legal)}; {options}")
        if name in values:
            raise KvkitError(f"--set {setting}: {name} is set twice")
        try:
            kind, names = legal[name]
            values[name] = text.strip()  # texts and names need no quotes, true and false no capitals
            if values[name] not in names and (kind is not str or values[name][:1] in ("'", '"')):
                values[name] = ast.literal_eval(values[name].capitalize() if kind is bool else values[name])
        except (ValueError, SyntaxError):
            raise KvkitError(f"--set {setting}: expected {name}={setting_form(*legal[name])}") from None
    return values


def check_names(
    op: Operator, path: Path | None, arrays: dict[str, np.ndarray], values: dict[str, Any]
) -> None:
    """Refuse arrays that the operator does not know, and calls without a required array."""
    legal = [argument.name for argument in (*op.inputs, *op.attributes)]
    known = f"{op.name} takes {', '.join(legal)} (see kvkit describe {op.name})"
    extra = [name for name in arrays if name not in legal]
    if extra:
        shown = ", ".join(name + suggestion(name, legal) for name in map(brief, extra[:SOME]))
        more = f" and {len(extra) - SOME} more" if len(extra) > SOME else ""
        raise KvkitError(f"{path}: unknown arrays {shown}{more}; {known}")
    required = [array.name for array in op.inputs if not array.optional]
    required += [attribute.name for attribute in op.attributes if attribute.default is REQUIRED]
    missing = [name for name in required if name not in arrays and name not in values]
    if missing:
        legal = settable(op)
        settings = " ".join(f"--set {name}={setting_form(*legal[name])}" for name in missing if name in legal)
        ways = "add arrays of these names" + (f" or give {settings}" if settings else "")
        raise KvkitError(f"{path or 'no IN.npz'}: missing {', '.join(missing)}: {ways}; {known}")


def convert_value(attribute: Attribute, value: Any, origin: str) -> Any:
    """Convert a value to the attribute's type: an integer to a float, 0 or 1 to a flag, a name to a mode."""
    kind = attribute.kind
    if value in attribute.names:
        return attribute.names.index(value)
    if value is None and attribute.default is None:
        return None
    if (kind is float and type(value) is int) or (kind is bool and value in (0, 1)):
        value = kind(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if type(value) is not kind:
        wanted = " or ".join([*attribute.names, VALUE_KINDS[kind][0]])
        wanted += " or None" if attribute.default is None else ""
        raise KvkitError(f"{origin} {attribute.name}={brief(repr(value))}: expected {wanted}")
    return value
