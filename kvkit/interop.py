"""Arrays that are not numpy's: torch's tensors on the CPU, and whatever speaks DLPack, in the same memory.

torch is not imported here: who has a tensor has imported it.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from kvkit.errors import KvkitError, argument_error
from kvkit.formats.elements import BFLOAT16, FLOATS8
from kvkit.runtime import call_log

Operator = TypeVar("Operator", bound=Callable[..., Any])
CPU = 1  # DLPack's number of it
NUMPYS = {fmt.dtype.name: fmt.dtype for fmt in (BFLOAT16, *FLOATS8)}  # of types that numpy has not


def is_foreign(array):
    """Whether an argument is an array, but not numpy's."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__")


def as_numpy(array, name="array"):
    """An array of numpy's in the memory of another one, or the argument itself, if it is no such array.

    Parameters
    ----------
    array : object
        A torch tensor on the CPU, bfloat16 too; anything with ``__dlpack__``; or anything else.
    name : str
        What an error calls it.

    Returns
    -------
    ndarray or object

    Raises
    ------
    KvkitError
        If it lies on another device, or if numpy has no such type.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.interop import as_numpy
    >>> numbers = np.zeros(2)
    >>> taken(numbers) is numbers, taken("no array")
    (True, 'no array')
    """
    if not is_foreign(array):
        return array
    where = array.device.type if is_tensor(array) else device_of(array)
    if where != "cpu":
        raise argument_error(name, "an array on the CPU (others are for kvkit_cuda)", f"one on {where}")
    try:
        return of_tensor(array.detach()) if is_tensor(array) else np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if hasattr(array, "__array__"):  # as for bfloat16, of which DLPack in numpy knows nothing
            return np.asarray(array)
        raise argument_error(
            name, "an array that numpy can share", f"{type(array).__name__} ({error})"
        ) from None


def device_of(array):
    device, number = array.__dlpack_device__()
    return "cpu" if device == CPU else f"device {int(device)}:{number}"


def is_tensor(array):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def dtype_of(array):
    """The dtype of an array's elements if numpy has none, else None."""
    return NUMPYS.get(str(getattr(array, "dtype", None)).removeprefix("torch."))


def in_integers(tensor):
    """A tensor as what every protocol passes on: integers, where numpy has not its type."""
    dtype = dtype_of(tensor)
    if dtype is None:
        return tensor
    torch = sys.modules["torch"]
    return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int8)


def of_tensor(tensor):
    array, dtype = in_integers(tensor).numpy(), dtype_of(tensor)
    return array if dtype is None else array.view(dtype)


def tensor_of(array):
    """A torch tensor in the memory of an array."""
    torch = sys.modules["torch"]
    if array.dtype in NUMPYS.values():
        integers = array.view(np.int16 if array.itemsize == 2 else np.int8)
        return torch.from_numpy(integers).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def in_kind_of(first, result):
    """A result in the kind of the first array in nested lists: tensors for torch's."""
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return as_tensors(result) if is_tensor(first) else result


def as_tensors(result):
    """Nested lists of arrays as ones of torch's tensors, in their memory."""
    if isinstance(result, (list, tuple)):
        return type(result)(map(as_tensors, result))
    return tensor_of(result)


def returns_input_kind(operator: Operator) -> Operator:
    """An operator on arrays of numpy's as one on any: a decorator.

    Caches that are tensors change in place, and what is given is returned as the object that it is. New
    results are tensors where the first argument is one. A call of numpy's arrays alone is the operator's own.
    """
    first = 1 if next(iter(inspect.signature(operator).parameters)) == "self" else 0

    @functools.wraps(operator)
    def call(*args, **keywords):
        if call_log.level:
            log_call(operator, args, keywords)
        if len(args) <= first or type(args[first]) is np.ndarray or not hasattr(args[first], "__dlpack__"):
            try:
                return operator(*args, **keywords)
            except KvkitError:  # nothing has been written, so that it can be asked again
                given = (*args[first:], *keywords.values())
                if not any(map(holds_foreign, given)):
                    raise
        return call_with_numpy(operator, first, args, keywords)

    return cast(Operator, call)


def log_call(operator, args, keywords):
    """Say that an operator is called; what it cannot be called with, the call itself says."""
    try:
        given = inspect.signature(operator).bind(*args, **keywords).arguments
    except TypeError:
        return
    call_log.log_operator(call_log.operator_path(operator), given, lambda name, value: as_numpy(value, name))


def holds_foreign(argument):
    return any(map(is_foreign, argument)) if isinstance(argument, (list, tuple)) else is_foreign(argument)


def call_with_numpy(operator, first, args, keywords):
    """A call of an operator with the arrays that others lie in, and its results in kind."""
    bound = inspect.signature(operator).bind(*args, **keywords)
    owners: dict = {}  # the objects given, by the id of the arrays that are made of them

    def take(name, argument):
        if isinstance(argument, (list, tuple)):
            return type(argument)(take(f"{name}[{i}]", each) for i, each in enumerate(argument))
        array = as_numpy(argument, name)
        if array is not argument:
            owners[id(array)] = argument, array
        return array

    wants = list(bound.arguments.values())[first]
    while isinstance(wants, (list, tuple)) and wants:
        wants = wants[0]
    tensors = is_tensor(wants)

    def give(result):
        if isinstance(result, tuple):
            return tuple(map(give, result))
        if id(result) in owners:
            return owners[id(result)][0]
        return tensor_of(result) if tensors and isinstance(result, np.ndarray) else result

    for name, argument in list(bound.arguments.items())[first:]:
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: take(key, each) for key, each in argument.items()}
        else:
            bound.arguments[name] = take(name, argument)
    return give(operator(*bound.args, **bound.kwargs))
