"""Views of other libraries' arrays as numpy arrays: torch tensors on the CPU, and arrays with DLPack.

torch is not imported here, because a caller with a tensor has imported it.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from kvkit.errors import KvkitError, add_keyword_hint, argument_error, describe
from kvkit.formats.elements import BFLOAT16, FLOATS8
from kvkit.runtime import call_log
from kvkit.typed import Array, Method

CPU = 1  # DLPack's device type of a CPU
INDEX_DTYPES = np.dtype(np.int64), np.dtype(np.int32)
EXTENSION_DTYPES = {fmt.dtype.name: fmt.dtype for fmt in (BFLOAT16, *FLOATS8)}  # ml_dtypes', not numpy's own


def is_foreign(array: object) -> bool:
    """Return whether an argument is an array of another library than numpy, as DLPack shows it."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__")


def integers(name: str, value: Any, ndim: int | None = None, *, as_index: bool = False) -> Array:
    """Return integers as an array of any shape, or of `ndim` axes, without reading elements.

    `as_index` says that the dtype must be int64 or int32, which operators take.
    """
    if as_index and type(value) is np.ndarray and value.ndim == ndim and value.dtype in INDEX_DTYPES:
        return value
    if isinstance(value, np.ma.MaskedArray):
        refuse_masked(name, value)
    axes = "" if ndim is None else f"{ndim} {'axis' if ndim == 1 else 'axes'}"
    wanted = "integers of dtype int64 or int32" if as_index else f"integers of {axes}" if axes else "integers"
    try:
        array = np.asarray(value)
    except ValueError:
        raise argument_error(name, axes if as_index else wanted, "rows of different lengths") from None
    if array.size == 0 and not (as_index and isinstance(value, np.ndarray)):
        array = array.astype(np.int64)  # numpy makes an array of float64 of []
        array = array.reshape((0,) * ndim) if ndim and array.ndim == 1 else array
    if as_index:
        if array.dtype not in INDEX_DTYPES:
            raise argument_error(name, wanted, describe(value) if array.dtype == object else array.dtype)
        if array.ndim != ndim:
            raise argument_error(name, axes, f"shape {array.shape}")
    elif array.dtype.kind not in "iu" or ndim not in (None, array.ndim):
        raise argument_error(name, wanted, describe(array))
    return array


def as_numpy(array: Any, name: str = "array") -> Any:
    """Return a numpy array that shares the memory of another library's array, or any other argument itself.

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
        If the array is on another device, or numpy does not have its dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from kvkit.interop import as_numpy
    >>> numbers = np.zeros(2)
    >>> as_numpy(numbers) is numbers, as_numpy("no array")
    (True, 'no array')
    """
    refuse_masked(name, array)
    if not is_foreign(array):
        return array
    where = array.device.type if is_tensor(array) else device_of(array)
    if where != "cpu":
        raise argument_error(name, "an array on the CPU (others are for kvkit_cuda)", f"one on {where}")
    try:
        return tensor_to_numpy(array.detach()) if is_tensor(array) else np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if hasattr(array, "__array__"):  # for bfloat16, which numpy's DLPack does not read
            return np.asarray(array)
        wanted = "an array that numpy can share"
        raise argument_error(name, wanted, f"{type(array).__name__} ({error})") from None


def refuse_masked(name: str, array: Any) -> None:
    """Raise for a masked array of `numpy.ma`, because kernels would read its masked elements."""
    if isinstance(array, np.ma.MaskedArray):
        raise argument_error(name, "an array without a mask, such as array.filled(0)", "a masked array")


def device_of(array: Any) -> str:
    """Return the device of an array with DLPack, in words."""
    device, number = array.__dlpack_device__()
    return "cpu" if device == CPU else f"device {int(device)}:{number}"


def is_tensor(array: object) -> bool:
    """Return whether an argument is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def extension_dtype(array: object) -> np.dtype[Any] | None:
    """Return the ml_dtypes dtype of bfloat16 and float8 elements; None for numpy's own dtypes."""
    return extension_of(getattr(array, "dtype", None))


@functools.cache  # there are few dtypes, and the text of one takes longer than a call may
def extension_of(dtype: Any) -> np.dtype[Any] | None:
    """Return the ml_dtypes dtype of a dtype of numpy or torch; None if it is numpy's own."""
    return EXTENSION_DTYPES.get(str(dtype).removeprefix("torch."))


def as_integers(tensor: Any) -> Any:
    """Return a tensor, as a view of integers if numpy does not have its dtype."""
    dtype = extension_dtype(tensor)
    if dtype is None:
        return tensor
    torch = sys.modules["torch"]
    return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int8)


def tensor_to_numpy(tensor: Any) -> Array:
    """Return a numpy array that shares the memory of a tensor."""
    dtype = extension_of(tensor.dtype)
    array: Array = (tensor if dtype is None else as_integers(tensor)).numpy()
    return array if dtype is None else array.view(dtype)


def numpy_to_tensor(array: Array) -> Any:
    """Return a torch tensor that shares the memory of an array."""
    torch = sys.modules["torch"]
    if array.dtype.isbuiltin != 1 and extension_of(array.dtype) is not None:
        integers = array.view(np.int16 if array.itemsize == 2 else np.int8)
        return torch.from_numpy(integers).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def in_kind_of(first: Any, result: Any) -> Any:
    """Return a result as torch tensors if the first array in nested lists is one, else as it is."""
    return as_tensors(result) if is_tensor(first_array(first)) else result


def first_array(argument: Any) -> Any:
    """Return the first array in nested lists."""
    while isinstance(argument, (list, tuple)) and argument:
        argument = argument[0]
    return argument


def as_tensors(result: Any) -> Any:
    """Return nested lists of arrays as lists of torch tensors that share their memory."""
    if isinstance(result, (list, tuple)):
        return type(result)(map(as_tensors, result))
    return numpy_to_tensor(result)


def returns_input_kind(operator: Method) -> Method:
    """Decorate an operator on numpy arrays so that it takes arrays of any library.

    Caches that are tensors change in place. An argument that the operator returns is the caller's own object.
    New results are tensors if the first argument is one. A call with numpy arrays only goes straight to the
    operator.
    """
    first = 1 if next(iter(inspect.signature(operator).parameters)) == "self" else 0  # of the arrays

    @functools.wraps(operator)
    def call(*args: Any, **keywords: Any) -> Any:
        if call_log.level:
            try:
                given = inspect.signature(operator).bind(*args, **keywords).arguments
            except TypeError:  # the call refuses what does not fit the signature
                pass
            else:
                path = call_log.operator_path(operator)
                call_log.log_operator(path, given, lambda name, value: as_numpy(value, name))
        if len(args) <= first or type(args[first]) is np.ndarray or not hasattr(args[first], "__dlpack__"):
            try:
                return operator(*args, **keywords)
            except KvkitError:  # nothing has been written, so the call can be repeated with numpy arrays
                if not any(map(holds_foreign, (*args[first:], *keywords.values()))):
                    raise
            except TypeError as error:
                add_keyword_hint(error, operator, keywords)
                raise
        return call_with_numpy(operator, first, args, keywords)

    return cast(Method, call)


def holds_foreign(argument: object) -> bool:
    """Return whether an argument is an array of another library, or a list with one."""
    return any(map(is_foreign, argument)) if isinstance(argument, (list, tuple)) else is_foreign(argument)


def call_with_numpy(
    operator: Callable[..., Any], first: int, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call an operator with numpy arrays; return tensors if the first argument is one."""
    bound = inspect.signature(operator).bind(*args, **keywords)
    owners: dict[int, tuple[Any, Array]] = {}  # by the id of an array: the caller's object, and the array

    def take(name: str, argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return type(argument)(take(f"{name}[{i}]", each) for i, each in enumerate(argument))
        array = as_numpy(argument, name)
        if array is not argument:
            owners[id(array)] = argument, array
        return array

    tensors = is_tensor(first_array(list(bound.arguments.values())[first]))

    def give(result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(give, result))
        if id(result) in owners:
            return owners[id(result)][0]
        return numpy_to_tensor(result) if tensors and isinstance(result, np.ndarray) else result

    for name, argument in list(bound.arguments.items())[first:]:
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: take(key, each) for key, each in argument.items()}
        else:
            bound.arguments[name] = take(name, argument)
    return give(operator(*bound.args, **bound.kwargs))
