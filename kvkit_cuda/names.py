"""Find the functions of `kvkit` that this package mirrors, and the names of their arrays."""

import functools

import kvkit
from kvkit.operators import OPERATORS
from kvkit.operators.arrays import INDEX

NOT_READ = ("sequences",)  # index tensors of which only the shape is used; they may be on a device


def origin(path):
    """Return the function of `kvkit` at a path, an operator or a method."""
    return functools.reduce(getattr, path.split("."), kvkit)


@functools.cache
def inputs(path):
    """Return the names of an operator's arrays and of its index tensors."""
    names = OPERATORS[path].inputs
    arrays = [each.name for each in names if each.dtypes is not INDEX or each.name in NOT_READ]
    return arrays, [each.name for each in names if each.name not in arrays]
