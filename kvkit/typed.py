"""The types in the signatures of public functions, for type checkers.

They distinguish arrays from numbers and texts. Calls check dtypes, shapes and ranges. The number of a layout
is an `int`: `kvkit.layouts.pmx` lists the layouts.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

Array = NDArray[Any]
Pair = tuple[Array, Array]
Arrays = Sequence[Array] | Array  # several arrays; one array counts as its parts along the first axis
Attended = Array | Any  # an array, or with `return_lse` a `Pair`; `Any` spares callers a cast
States = Array | Any  # an array, or a view that `numpy.asarray` converts
Values = TypeVar("Values", Array, None)  # values beside keys, or None; a function returns the same type
Method = TypeVar("Method", bound=Callable[..., Any])  # a decorator returns the type of what it decorates
FilePath = str | os.PathLike[str]
