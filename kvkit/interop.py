"""Views of other libraries' arrays as numpy arrays: torch tensors on the CPU, and arrays with DLPack.

torch is not imported here, because a caller with a tensor has imported it.
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
from kvkit.typed import Array

Operator = TypeVar("Operator", bound=Callable[..., Any])
CPU = 1  # DLPack's number of it
NUMPYS = {fmt.dtype.name: fmt.dtype for fmt in (BFLOAT16, *FLOATS8)}  # of types that numpy has not


def is_foreign(array: object) -> bool:
    """Return whether an argument is an array, but not numpy's."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__")


def as_numpy(array: Any, name: str = "array") -> Any:
    """Return a numpy array in the memory of another library's, or the argument itself if it is none.

    Parameters
    ----------
    array : object
        A torch tensor on the CPU, bfloat16 too; anything with ``__dlpack__``; or anything else.
    name : str
        The argument's name in error messages.

    Returns
    -------
    ndarray or object

    Raises
    ------
    KvkitError
        If the array is on another device, or numpy has no such dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.interop import as_numpy
    >>> numbers = np.zeros(2)
    >>> as_numpy(numbers) is numbers, as_numpy("no array")
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
        wanted = "an array that numpy can share"
        raise argument_error(name, wanted, f"{type(array).__name__} ({error})") from None


def device_of(array: Any) -> str:
    """Return the device of an array that speaks DLPack, in words."""
    device, number = array.__dlpack_device__()
    return "cpu" if device == CPU else f"device {int(device)}:{number}"


def is_tensor(array: object) -> bool:
    """Return whether an array is torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def dtype_of(array: object) -> np.dtype[Any] | None:
    """Return the dtype of elements that numpy itself has not (bfloat16, float8), else None."""
    return NUMPYS.get(str(getattr(array, "dtype", None)).removeprefix("torch."))


def in_integers(tensor: Any) -> Any:
    """Return a view of a tensor that numpy can take: of integers, where numpy has not its type."""
    dtype = dtype_of(tensor)
    if dtype is None:
        return tensor
    torch = sys.modules["torch"]
    return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int8)


def of_tensor(tensor: Any) -> Array:
    """Return a numpy array in the memory of a tensor."""
    array: Array = in_integers(tensor).numpy()
    dtype = dtype_of(tensor)
    return array if dtype is None else array.view(dtype)


def tensor_of(array: Array) -> Any:
    """Return a torch tensor in the memory of an array."""
    torch = sys.modules["torch"]
    if array.dtype in NUMPYS.values():
        integers = array.view(np.int16 if array.itemsize == 2 else np.int8)
        return torch.from_numpy(integers).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def in_kind_of(first: Any, result: Any) -> Any:
    """Return a result in the kind of the first array in nested lists: tensors for torch's."""
    return as_tensors(result) if is_tensor(first_of(first)) else result


def first_of(argument: Any) -> Any:
    """Return the first array in nested lists."""
    while isinstance(argument, (list, tuple)) and argument:
        argument = argument[0]
    return argument


def as_tensors(result: Any) -> Any:
    """Return nested lists of arrays as lists of torch's tensors, in their memory."""
    if isinstance(result, (list, tuple)):
        return type(result)(map(as_tensors, result))
    return tensor_of(result)


def returns_input_kind(operator: Operator) -> Operator:
    """Decorate an operator on numpy arrays so that it takes arrays of any library.

    Tensors that are caches change in place, and an argument that is returned is the same object. New results
    are tensors if the first argument is one. A call with numpy arrays only goes straight to the operator.
    """
    first = 1 if next(iter(inspect.signature(operator).parameters)) == "self" else 0

    @functools.wraps(operator)
    def call(*args: Any, **keywords: Any) -> Any:
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


def log_call(operator: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Log that an operator is called; the call itself refuses wrong arguments."""
    try:
        given = inspect.signature(operator).bind(*args, **keywords).arguments
    except TypeError:
        return
    call_log.log_operator(call_log.operator_path(operator), given, lambda name, value: as_numpy(value, name))


def holds_foreign(argument: object) -> bool:
    """Return whether an argument is or lists another library's arrays."""
    return any(map(is_foreign, argument)) if isinstance(argument, (list, tuple)) else is_foreign(argument)


def call_with_numpy(
    operator: Callable[..., Any], first: int, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call an operator with numpy's arrays; return its results in the kind of the first argument."""
    bound = inspect.signature(operator).bind(*args, **keywords)
    owners: dict[int, tuple[Any, Array]] = {}  # the objects given, by the id of the arrays in their memory

    def take(name: str, argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return type(argument)(take(f"{name}[{i}]", each) for i, each in enumerate(argument))
        array = as_numpy(argument, name)
        if array is not argument:
            owners[id(array)] = argument, array
        return array

    tensors = is_tensor(first_of(list(bound.arguments.values())[first]))

    def give(result: Any) -> Any:
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
