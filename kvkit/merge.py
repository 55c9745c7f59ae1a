"""Attention over parts of a context, put together."""

import numpy as np

from kvkit import check
from kvkit.check import describe, wrong
from kvkit.formats import FLOATS


def merge_attention_states(outputs, lses, *, out=None):
    """Put attention over parts of a context together: several caches, machines, or a shared prefix.

    Exact: the result is attention over all keys, whatever the parts and their order, up to float32
    rounding. A part in which a query saw no key (lse -inf) counts for nothing. If sinks are used, give them
    to one part only.

    Parameters
    ----------
    outputs : sequence of ndarray, each of shape [..., num_heads, Dv]
        What an attention operator returned for each part: float32, float16 or bfloat16, all alike.
    lses : sequence of ndarray of float32, each of shape [..., num_heads]
        The lse of each part, from ``return_lse=True``.
    out : tuple of ndarray, optional
        Arrays for both results; made if not given. They may not overlap the parts.

    Returns
    -------
    attn_output : ndarray, shape [..., num_heads, Dv]
        Of the dtype of the parts.
    lse : ndarray of float32, shape [..., num_heads]
        That of the whole, so that it can be merged further.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    The rule by which FlashAttention joins blocks and FlashInfer joins states.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> ones = np.ones((1, 2, 4), np.float32)
    >>> lse = np.log(np.array([[1, 1]], np.float32)), np.log(np.array([[1, 3]], np.float32))
    >>> attn_output, total = kvkit.merge_attention_states((ones, 5 * ones), lse)
    >>> attn_output[0, :, 0].round(4), np.exp(total[0]).round(4)
    (array([3., 4.], dtype=float32), array([2., 4.], dtype=float32))
    """
    fmt, outputs, lses = checked(outputs, lses)
    if out is not None:
        check_given(out, outputs[0].shape, fmt, outputs, lses)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        whole, lse = merged(outputs, lses)
        whole = whole.astype(fmt.dtype)
    if out is None:
        return whole, lse
    out[0][...], out[1][...] = whole, lse
    return tuple(out)


def checked(outputs, lses):
    """(format, outputs, lses) of checked parts."""
    outputs, lses = parts("outputs", outputs), parts("lses", lses)
    if len(lses) != len(outputs):
        raise wrong("lses", f"{len(outputs)} arrays, as many as outputs", len(lses))
    shape = outputs[0].shape
    fmt = check.tensor("outputs[0]", outputs[0], FLOATS, max(len(shape), 1))
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if check.tensor(f"outputs[{i}]", output, FLOATS, max(len(shape), 1)) is not fmt:
            raise wrong(f"outputs[{i}]", f"the dtype of outputs[0], {fmt}", output.dtype)
        if output.shape != shape:
            raise wrong(f"outputs[{i}]", f"the shape of outputs[0], {shape}", output.shape)
        check.tensor(f"lses[{i}]", lse, FLOATS[:1], len(shape) - 1)
        if lse.shape != shape[:-1]:
            raise wrong(f"lses[{i}]", f"shape {shape[:-1]}", lse.shape)
    return fmt, outputs, lses


def merged(outputs, lses):
    """The parts in float32, one after the other."""
    top = lses[0].copy()
    for lse in lses[1:]:
        np.maximum(top, lse, out=top)
    base = np.where(np.isneginf(top), np.float32(0), top)
    total, whole = np.zeros_like(top), np.zeros(outputs[0].shape, np.float32)
    for lse in lses:
        total += np.exp(lse - base)
    divisor = np.where(total == 0, np.float32(1), total)
    for output, lse in zip(outputs, lses, strict=True):
        share = (np.exp(lse - base) / divisor)[..., None]
        whole += np.where(share == 0, 0, output.astype(np.float32) * share)
    return whole, np.asarray(base + np.log(total))


def parts(name, arrays):
    """A list of arrays, of a sequence or along the first axis of one."""
    several = isinstance(arrays, (list, tuple)) or (isinstance(arrays, np.ndarray) and arrays.ndim > 0)
    given = list(arrays) if several else []
    if not given:
        raise wrong(name, "one array or more", describe(arrays))
    for i, array in enumerate(given):
        if not isinstance(array, np.ndarray):
            raise wrong(f"{name}[{i}]", "a numpy array", describe(array))
    return given


def check_given(out, shape, fmt, outputs, lses):
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise wrong("out", "a tuple of 2 arrays (attn_output, lse)", describe(out))
    inputs = [(f"outputs[{i}]", array) for i, array in enumerate(outputs)]
    inputs += [(f"lses[{i}]", array) for i, array in enumerate(lses)]
    for name, array, wanted, kind in (
        ("out (attn_output)", out[0], shape, fmt),
        ("out (lse)", out[1], shape[:-1], FLOATS[0]),
    ):
        check.tensor(name, array, (kind,), len(wanted))
        if array.shape != wanted:
            raise wrong(name, f"shape {wanted}", array.shape)
        check.in_out(name, array)
        check.apart(name, array, inputs)
    check.apart("out (attn_output)", out[0], [("out (lse)", out[1])])
