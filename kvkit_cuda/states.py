"""Attention over parts of a context, put together on the device."""

import numpy as np

from kvkit.checks.merge import checked


def merge_attention_states(outputs, lses, *, out=None, stream=None):
    """`kvkit.merge_attention_states` on a CUDA device: the same arguments, results and checks.

    Parameters
    ----------
    outputs, lses, out
        As `kvkit.merge_attention_states` has them, each an array of the current device (with the CUDA array
        interface or DLPack; used where it is) or of numpy (copied to the device, and back if it changes).
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    attn_output, lse
        `out`, or new arrays where the first part is: numpy's, torch's, CuPy's or else numba's.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> ones = np.ones((1, 2, 4), np.float32)
    >>> lse = np.log(np.array([[1, 1]], np.float32)), np.log(np.array([[1, 3]], np.float32))
    >>> attn_output, total = kvkit_cuda.merge_attention_states((ones, 5 * ones), lse)
    >>> attn_output[0, :, 0].round(4), np.exp(total[0]).round(4)
    (array([3., 4.], dtype=float32), array([2., 4.], dtype=float32))
    """
    from kvkit_cuda.attend import merge
    from kvkit_cuda.calls import results
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    outputs, of_outputs = parts("outputs", outputs, stream)
    lses, of_lses = parts("lses", lses, stream)
    call = checked(of_outputs, of_lses)
    found, returned = results.outputs(out, call.results, (outputs[0].owner, outputs[0]), stream)
    copies = [result.moved(stream, contents=False) for result in found]
    outputs, lses = ([part.moved(stream) for part in parts] for parts in (outputs, lses))
    operands = *outputs, copies[0], *lses, copies[1]
    merge.prepare_states(call.fmt.name, [operand.seen for operand in operands], stream)()
    for result, copy in zip(found, copies, strict=True):
        result.take(copy, stream)
    return returned


def parts(name, given, stream):
    """The operands of a sequence of arrays or of one along its first axis, and what checks see of them."""
    from kvkit_cuda.calls import arrays

    if isinstance(given, (list, tuple)):
        operands = [arrays.operand(f"{name}[{i}]", array, stream) for i, array in enumerate(given)]
        return operands, [operand.seen for operand in operands]
    whole = arrays.operand(name, given, stream)
    if not isinstance(whole.seen, np.ndarray) or whole.seen.ndim == 0:
        return [], whole.seen
    return [arrays.Operand(part, whole.on_device, whole.owner) for part in whole.seen], whole.seen
