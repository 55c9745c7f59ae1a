"""The types in the signatures of public functions, for type checkers.

They tell arrays from numbers and texts; dtypes, shapes and ranges are what a call checks. The number of a
layout is an `int`: which there are, `kvkit.layouts.pmx` says alone.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

Array = NDArray[Any]
Pair = tuple[Array, Array]
Arrays = Sequence[Array] | Array  # of one array, those along its first axis
Attended = Array | Any  # a `Pair` with `return_lse`; `Any` spares a caller telling which it asked for
States = Array | Any  # an array, or a view that `numpy.asarray` makes one of
Values = TypeVar("Values", Array, None)  # given beside keys, or left out and so returned
FilePath = str | os.PathLike[str]
