"""Checks of arrays: their type, their shape, and the memory that they share."""

import math

import numpy as np

from kvkit.errors import argument_error, describe
from kvkit.formats import BY_DTYPE, FLOATS, INT8
from kvkit.formats.elements import FLOATS8

FLOAT_NAMES = ", ".join(fmt.name for fmt in FLOATS)
MOST_BYTES = np.iinfo(np.int64).max
REMEDIES = {
    "float64": ": array.astype(np.float32) converts it",
    "uint16": ": array.view(ml_dtypes.bfloat16), if it holds the bits of bfloat16",
}
DATA = (*FLOATS, INT8)  # what keys and values may be
POOLED = (*DATA, *FLOATS8)  # what engines' pools may hold
FORMATS = BY_DTYPE | {fmt.dtype: fmt for fmt in FLOATS8}
FP8_REMEDY = (
    ": array.view(ml_dtypes.float8_e4m3fn) of numpy's, torch.as_tensor(array).view(torch.float8_e4m3fn) of "
    "others, if it holds such codes"
)


def tensor(name, array, legal, ndim):
    """The format of an array that must be one of `legal` and have `ndim` axes."""
    if not isinstance(array, np.ndarray):
        raise argument_error(name, "a numpy array", describe(array))
    fmt = FORMATS.get(array.dtype)
    if fmt is None or fmt not in legal:
        remedy = FP8_REMEDY if legal is POOLED and array.dtype == np.uint8 else ""
        raise argument_error(name, f"dtype {' or '.join(f.name for f in legal)}", said(array.dtype) + remedy)
    if array.ndim != ndim:
        raise argument_error(name, f"{ndim} axes", f"shape {array.shape}")
    return fmt


def float_format(name, dtype):
    """The format of a float dtype."""
    try:
        fmt = BY_DTYPE.get(np.dtype(dtype))
    except TypeError:
        fmt = None
    if fmt not in FLOATS:
        raise argument_error(name, FLOAT_NAMES, describe(dtype))
    return fmt


def said(dtype):
    """A dtype that is none of ours, and how people came by it."""
    return f"{dtype}{REMEDIES.get(dtype.name, '')}"


def filled(name, array):
    """Check that tokens have heads, and heads elements."""
    if min(array.shape[-2:]) < 1:
        raise argument_error(name, "at least one head and one element a head", f"shape {array.shape}")


def current(current_key, current_value, ndim):
    """The new keys and values: one format, one shape, rows in one piece each."""
    fmt = tensor("current_key", current_key, DATA, ndim)
    if tensor("current_value", current_value, DATA, ndim) is not fmt:
        raise argument_error("current_value", f"the dtype of current_key, {fmt}", current_value.dtype)
    if current_value.shape != current_key.shape:
        raise argument_error(
            "current_value", f"the shape of current_key, {current_key.shape}", current_value.shape
        )
    filled("current_key", current_key)
    return fmt, one_piece(current_key), one_piece(current_value)


def packed_tokens(name, array):
    """(name, tokens) of packed new tokens; None if it is no such array, which its own check will say."""
    return (name, len(array)) if isinstance(array, np.ndarray) and array.ndim == 3 else None


def named(**arrays):
    """The arrays that are there, with their names."""
    return [(name, array) for name, array in arrays.items() if isinstance(array, np.ndarray)]


def step(array):
    """How many bytes lie from element to element of the last axis; 0 if they lie side by side."""
    stride = array.strides[-1]
    return 0 if array.shape[-1] == 1 or stride == array.itemsize else stride


def one_piece(array):
    """The array, or a copy whose last axis is contiguous."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def in_one_place(array):
    """Whether the elements of a row are one, as those of `numpy.broadcast_to`: no kernel reads such."""
    return array.shape[-1] > 1 and array.strides[-1] == 0


def in_out(name, array):
    """An array that kernels write: writeable, rows in one piece, no two elements in one place."""
    apart = array.ndim > 0 and array.shape[-1] > 1 and array.strides[-1] != array.itemsize
    if apart and not array.flags.c_contiguous:
        raise argument_error(
            name, "a contiguous last axis", f"strides {array.strides} of {array.itemsize}-byte items"
        )
    written(name, array)


def written(name, array):
    """An array that kernels write: writeable, no two elements in one place."""
    if not array.flags.writeable:
        raise argument_error(name, "a writeable array", "a read-only one")
    if array.flags.c_contiguous:
        return
    span = array.itemsize
    for stride, size in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if size > 1 and stride < span:
            raise argument_error(name, "elements apart", f"shape {array.shape} with strides {array.strides}")
        span += stride * (size - 1)


def apart(name, array, others):
    """An array that kernels write shares no byte with the others."""
    for other_name, other in others:
        if np.may_share_memory(array, other) and _share(array, other):
            raise argument_error(name, f"memory apart from {other_name}", "arrays that overlap")


def _share(a, b):
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def holdable(name, shape, fmt, what="outputs"):
    """Check that an array can have a shape, which `name` decides."""
    if math.prod(filter(None, shape)) * fmt.dtype.itemsize > MOST_BYTES:
        raise argument_error(name, f"{what} that an array can hold", f"shape {shape}")
