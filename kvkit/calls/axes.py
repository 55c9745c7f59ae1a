"""Say of a refused call which arrays would fit with two axes exchanged, by the shapes in its docstring."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from kvkit.errors import KvkitError, brief, exchanged
from kvkit.interop import holds_foreign
from kvkit.operators import OPERATORS
from kvkit.operators.operator import IN_PYTHON
from kvkit.runtime.call_log import operator_of, operator_path
from kvkit.typed import Method

DEFAULT = ["b", "n", "h", "c"]  # the layout whose axes docstrings name
# First axes of what holds many sequences. Whether a page or a slot is there tells nothing of their order.
FIRST_AXES = "num_blocks", "blocks", "N or slots", "MaxB", "MaxT", "L"
Axes = dict[str, list[str]]  # the names of arrays' axes, by argument


def explained(function: Method, passes: Callable[[Any, Mapping[str, Any]], bool]) -> Method:
    """Decorate an operator's `def`, or a plan's method, so that its errors name the order of axes.

    `passes(on, arguments)` says whether the checks accept other arguments of a target or a plan; nothing else
    is asked, so that an error promises no more than they do.
    """

    @functools.wraps(function)
    def call(on: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return function(on, *args, **keywords)
        except KvkitError as error:
            given = inspect.signature(function).bind(on, *args, **keywords)
            given.apply_defaults()
            values = dict([*given.arguments.items()][1:])
            text = str(error)
            if type(error) is KvkitError and not any(map(holds_foreign, values.values())):
                error.args = (text + hint(function, values, text, functools.partial(passes, on)),)
            raise

    return cast(Method, call)


def hint(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    text: str,
    passes: Callable[[Mapping[str, Any]], bool],
) -> str:
    """Return what an error with this text should say of the order of axes."""
    axes, name = axes_of(function, values), text.partition(":")[0].partition("[")[0]
    if name in IN_PYTHON:
        return ""
    if wanted := re.fullmatch(rf"{re.escape(name)}: expected (\d) axes, got shape [(][0-9, ]*[)]", text):
        operator = OPERATORS.get(operator_of(operator_path(function)))
        shapes = [each.shapes for each in operator.inputs if each.name == name] if operator else []
        orders = [shape.partition(")")[0].rpartition("(")[2] for shape in itertools.chain(*shapes)]
        legal = [f"[{order}]" for order in orders if len(order.split(", ")) == int(wanted[1])]
        return f"; it is {' or '.join(legal)}" if legal else ""
    if name not in axes:
        axes = {each: names for each, names in axes.items() if names[0] not in FIRST_AXES}
    if passes(values):  # these checks do not see what is wrong, and would not see that it stays
        return ""
    for names, i, j in exchanges(axes, name):
        turned = {each: values[each].swapaxes(i, j) for each in names}
        if all(turned[each].shape == values[each].shape for each in names):
            continue
        # Some checks read elements, and some want memory in one piece: here no array is both.
        whole = {
            each: values[each].reshape(array.shape) if values[each].flags.c_contiguous else array
            for each, array in turned.items()
            if array.dtype not in (np.int32, np.int64)  # checks read all of these
        }
        if passes({**values, **turned}) or passes({**values, **turned, **whole}):
            return exchanged(axes[names[0]], i, j, " and ".join(names))
    return ""


def exchanges(axes: Axes, named: str) -> Iterator[tuple[list[str], int, int]]:
    """Yield arrays and two of their axes to exchange: the array named, any other, all of new tokens."""
    alone = [[each] for each in sorted(axes, key=lambda each: each != named)]
    new = [each for each in axes if axes[each][0] not in FIRST_AXES]
    alike = [each for each in new if len(axes[each]) == len(axes[new[0]])]
    for names in [*alone, alike] if len(alike) > 1 else alone:
        pairs = itertools.combinations(range(len(axes[names[0]])), 2)
        for i, j in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
            yield names, i, j


def axes_of(function: Callable[..., Any], values: Mapping[str, Any]) -> Axes:
    """Return the names of axes of the arrays given, those with two or more that the docstring tells."""
    operator = OPERATORS.get(operator_of(operator_path(function)))
    layout = str(values.get("layout")).split()
    chosen = {value for value in values.values() if isinstance(value, str)}
    chosen.add(brief(values.get("cache_layout")))
    axes: Axes = {}
    for each in operator.inputs if operator else ():
        value = values.get(each.name)
        if not isinstance(value, np.ndarray) or value.ndim < 2:
            continue
        if "layout" in each.shapes[0] and layout != DEFAULT:
            if len(layout) == value.ndim:
                axes[each.name] = layout
            continue
        for shape in each.shapes:
            choice, _, sizes = shape.partition(")")[0].rpartition("(")
            names = sizes.split(", ")
            if "..." in names or ".." in names:  # any number of axes
                at = names.index("..." if "..." in names else "..")
                more = value.ndim - len(names) + 1
                names[at : at + 1] = [f"axis {at + i}" for i in range(more)]
            if len(names) == value.ndim and choice.strip(" :") in {"", *chosen}:
                axes.setdefault(each.name, names)
    return axes
