"""Attention over parts of a context, put together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkit import cpu
from kvkit.calls.prepared import PreparedCall, PreparedCalls
from kvkit.checks.merge import checked_merge
from kvkit.formats import Element
from kvkit.interop import returns_input_kind
from kvkit.typed import Array, Arrays, Pair

FEW = 64  # forms of calls that are remembered
merges: PreparedCalls[PreparedCall] = PreparedCalls(FEW)  # a call takes its own away as long as it lasts


@returns_input_kind
def merge_attention_states(outputs: Arrays, lses: Arrays, *, out: Pair | None = None) -> Pair:
    """Put attention over parts of a context together.

    Parts are several caches, machines, or a shared prefix. Exact: the result is attention over all keys,
    whatever the parts and their order, up to float32 rounding. A part in which a query saw no key (lse
    -inf, or as FlashAttention 2 has it +inf) counts for nothing. If sinks are used, give them to one
    part only.

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
    call = checked_merge(outputs, lses)
    given = None if out is None else call.results.checked(out)
    results = merged(call.fmt, call.outputs, call.lses)
    if given is None:
        return results
    for array, result in zip(given, results, strict=True):
        array[...] = result
    return given[0], given[1]


def merged(fmt: Element, outputs: Sequence[Array], lses: Sequence[Array]) -> Pair:
    """Merge checked parts of a format, and return both results."""
    outputs = [np.ascontiguousarray(each) for each in outputs]
    lses = [np.ascontiguousarray(each) for each in lses]
    out, lse = np.empty(outputs[0].shape, fmt.dtype), np.empty(lses[0].shape, np.float32)
    arrays = {str(i): part for i, part in enumerate((*outputs, *lses))} | {"out": out, "lse": lse}
    form = fmt.name, out.shape, len(outputs)
    prepared = merges.take(form)
    if prepared:
        prepared.run(list(arrays.values()))
    else:
        launch = cpu.attention.merge.prepare_merge(fmt.name, outputs, lses, out, lse)
        cpu.launches.start(launch)
        prepared = PreparedCall([launch], arrays)
    merges.keep(form, prepared)
    return out, lse
