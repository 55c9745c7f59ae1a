"""Check one argument: a number, a flag, a text, or an array with its type, shape and memory."""

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, FLOATS, INT8, Element
from kvkit.formats.elements import BFLOAT16, FLOATS8
from kvkit.interop import refuse_masked
from kvkit.typed import Array

NamedArrays = Sequence[tuple[str, Array]]

FLOAT_NAMES = ", ".join(fmt.name for fmt in FLOATS)
MOST_BYTES = np.iinfo(np.int64).max
REMEDIES = {  # {unsupported dtype: what to write instead}
    "float64": ": array.astype(np.float32) converts it (tensor.float() of torch)",
    "uint16": ": array.view(ml_dtypes.bfloat16), if it holds the bits of bfloat16",
}
DATA = (*FLOATS, INT8)  # the formats of keys and values
POOLED = (*DATA, *FLOATS8)  # the formats of pools
FORMATS = BY_DTYPE | {fmt.dtype: fmt for fmt in FLOATS8}  # {dtype: format} of all these
FP8_REMEDY = (
    ": if it holds float8 codes, pass array.view(ml_dtypes.float8_e4m3fn) of a numpy array, or "
    "torch.as_tensor(array).view(torch.float8_e4m3fn) of another"
)


def without_float8(array: Any) -> Any:
    """Return floats of 8 bits, or a pair of them, as bfloat16, which holds them; others unchanged."""
    if isinstance(array, (tuple, list)):
        return type(array)(map(without_float8, array))
    is_float8 = isinstance(array, np.ndarray) and array.dtype in [each.dtype for each in FLOATS8]
    return array.astype(BFLOAT16.dtype) if is_float8 else array


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return an argument as an int from `low` to `high`; it may be a numpy integer or an array of one."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu":
        value = value.item()
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise argument_error(name, "an integer", describe(value))
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"an integer from {low} to {high}"
        size = number.bit_length()
        raise argument_error(name, bounds, number if size < 128 else f"a number of {size} bits")
    return number


def choice(name: str, value: Any, legal: Collection[int]) -> int:
    """Return one of the legal integers."""
    chosen = integer(name, value)
    if chosen not in legal:
        raise argument_error(name, " or ".join(map(str, legal)), chosen)
    return chosen


def text(name: str, value: object, legal: Collection[str]) -> str:
    """Return one of the legal texts."""
    if not isinstance(value, str) or value not in legal:
        raise argument_error(name, " or ".join(map(repr, legal)), describe(value))
    return value


def finite_number(name: str, value: Any) -> float:
    """Return a finite number."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not abs(value) < 3e38:  # kernels compute in float32
        raise argument_error(name, "a finite number", describe(value))
    return float(value)


def positive_number(name: str, value: Any) -> float:
    """Return a finite number above 0."""
    checked = finite_number(name, value)
    if checked <= 0:
        raise argument_error(name, "a positive number", checked)
    return checked


def flag(name: str, value: Any) -> bool:
    """Return True or False; 1 and 0 are legal too, as in ONNX."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(choice(name, value, (0, 1)))


def check_array(name: str, array: object) -> None:
    """Check that an argument is a numpy array, and not a masked one."""
    if not isinstance(array, np.ndarray):
        remedy = ": tensor.numpy() shares its memory" if hasattr(array, "numpy") else ""
        raise argument_error(name, "a numpy array", describe(array) + remedy)
    if isinstance(array, np.ma.MaskedArray):
        refuse_masked(name, array)


def checked_format(
    name: str, array: Array, legal: Collection[Element], ndim: int, axes: Sequence[str] = ()
) -> Element:
    """Return the format of an array, which must be one of `legal` and have `ndim` axes, named in errors."""
    if type(array) is not np.ndarray:
        check_array(name, array)
    fmt = FORMATS.get(array.dtype)
    if fmt is None or fmt not in legal:
        # Bytes in a pool may be float8, which numpy has no name for.
        remedy = FP8_REMEDY if legal is POOLED and array.dtype == np.uint8 else ""
        wanted = f"dtype {' or '.join(f.name for f in legal)}"
        raise argument_error(name, wanted, dtype_hint(array.dtype) + remedy)
    if array.ndim != ndim:
        order = f", [{', '.join(axes)}]" if axes else ""
        raise argument_error(name, f"{ndim} axes{order}", f"shape {array.shape}")
    return fmt


def check_bytes(name: str, array: Array, ndim: int) -> None:
    """Check that an array has bytes and `ndim` axes."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != ndim:
        raise argument_error(name, f"bytes (uint8) of {ndim} axes", describe(array))


def float_format(name: str, dtype: DTypeLike) -> Element:
    """Return the format of a float dtype."""
    try:
        fmt = BY_DTYPE.get(np.dtype(dtype))
    except TypeError:
        fmt = None
    if fmt is None or fmt not in FLOATS:
        raise argument_error(name, FLOAT_NAMES, describe(dtype))
    return fmt


def dtype_hint(dtype: np.dtype[Any]) -> str:
    """Return the name of an unsupported dtype, with a hint how to convert such an array."""
    return f"{dtype}{REMEDIES.get(dtype.name, '')}"


def check_not_empty(name: str, array: Array) -> None:
    """Check that tokens [.., heads, dim] have at least one head and one element."""
    if min(array.shape[-2:]) < 1:
        raise argument_error(name, "at least one head and one element a head", f"shape {array.shape}")


def check_new_tokens(
    current_key: Array, current_value: Array, ndim: int, value_dim: int = 0
) -> tuple[Element, Array, Array]:
    """Check new keys and values; return (format, keys, values) with contiguous last axes.

    Both have one shape, or heads of values have `value_dim` elements.
    """
    fmt = checked_format("current_key", current_key, DATA, ndim)
    if checked_format("current_value", current_value, DATA, ndim) is not fmt:
        raise argument_error("current_value", f"the dtype of current_key, {fmt}", current_value.dtype)
    wanted = (*current_key.shape[:-1], value_dim or current_key.shape[-1])
    if current_value.shape != wanted:
        like = f"shape {wanted}" if value_dim else f"the shape of current_key, {wanted}"
        raise argument_error("current_value", like, current_value.shape)
    check_not_empty("current_key", current_key)
    return fmt, one_piece(current_key), one_piece(current_value)


def named_arrays(**arrays: object) -> list[tuple[str, Array]]:
    """Return the arguments that are arrays, with their names."""
    return [(name, array) for name, array in arrays.items() if isinstance(array, np.ndarray)]


def element_step(array: Array) -> int:
    """Return the byte stride of the last axis; 0 if its elements are adjacent."""
    stride = array.strides[-1]
    return 0 if array.shape[-1] == 1 or stride == array.itemsize else stride


def one_piece(array: Array) -> Array:
    """Return the array, or a copy whose last axis is contiguous."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def packed_strides(array: Array) -> tuple[int, int, int]:
    """Return the strides (sequence, token, head) of [tokens, heads, dim] or [batch, tokens, heads, dim].

    Tokens are numbered through all sequences, so the first stride is the batch stride less all token strides.
    """
    if array.ndim == 3:
        return 0, array.strides[0], array.strides[1]
    return array.strides[0] - array.shape[1] * array.strides[1], array.strides[1], array.strides[2]


def is_broadcast(array: Array) -> bool:
    """Return whether the last axis is broadcast (stride 0), which no kernel reads."""
    return array.shape[-1] > 1 and array.strides[-1] == 0


def check_output(name: str, array: Array) -> None:
    """Check that kernels can write an array: writeable, last axis contiguous, no overlapping elements."""
    has_gaps = array.ndim > 0 and array.shape[-1] > 1 and array.strides[-1] != array.itemsize
    if has_gaps and not array.flags.c_contiguous:
        got = f"strides {array.strides} of {array.itemsize}-byte items"
        raise argument_error(name, "a contiguous last axis", got)
    check_writeable(name, array)


def check_writeable(name: str, array: Array) -> None:
    """Check that kernels can write an array: writeable, no overlapping elements."""
    if not array.flags.writeable:
        raise argument_error(name, "a writeable array", "a read-only one")
    if array.flags.c_contiguous:
        return
    span = array.itemsize  # the bytes that elements along the axes of smaller strides cover
    for stride, size in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if size > 1 and stride < span:
            got = f"shape {array.shape} with strides {array.strides}"
            raise argument_error(name, "elements that do not overlap", got)
        span += stride * (size - 1)


def check_apart(name: str, array: Array, others: NamedArrays) -> None:
    """Check that an array that kernels write shares no byte with the others."""
    exactly: Any = {"max_work": 100_000}
    for other_name, other in others:
        try:
            share = np.may_share_memory(array, other) and np.shares_memory(array, other, **exactly)
        except np.exceptions.TooHardError:  # the exact answer would take long
            share = True
        if share:
            raise argument_error(name, f"memory apart from {other_name}", "arrays that overlap")


def check_size(name: str, shape: Sequence[int], fmt: Element, what: str = "outputs") -> None:
    """Check that an array of a shape, which argument `name` determines, is not too large for numpy."""
    if math.prod(filter(None, shape)) * fmt.dtype.itemsize > MOST_BYTES:
        raise argument_error(name, f"{what} that an array can hold", f"shape {shape}")
