"""Merge attention outputs that were computed over parts of a context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkit import cpu
from kvkit.calls.prepared import PreparedCall, PreparedCalls
from kvkit.calls.targets import CallTarget, operator
from kvkit.checks.merge import checked_merge
from kvkit.formats import Element
from kvkit.typed import Array, Arrays, Pair

MAX_PREPARED = 64  # prepared calls that are kept, one for each dtype, shape and number of parts
# A call takes its prepared call out and puts it back at the end, so that no other thread uses it.
merges: PreparedCalls[PreparedCall] = PreparedCalls(MAX_PREPARED)


@operator
def merge_attention_states(on: CallTarget, outputs: Arrays, lses: Arrays, *, out: Pair | None = None) -> Pair:
    """Merge attention over parts of a context, by their log-sum-exps.

    Parts may be caches, shards on several machines, or a shared prefix. Up to float32 rounding, the result
    equals attention over all keys, for any split and order. A part with lse -inf (no key was seen;
    FlashAttention 2 returns +inf) is ignored. If sinks are used, give them to one part only.

    Parameters
    ----------
    outputs : sequence of ndarray, each of shape [..., num_heads, Dv]
        The attn_output of each part: float32, float16 or bfloat16, all of one dtype.
    lses : sequence of ndarray of float32, each of shape [..., num_heads]
        The lse of each part, from ``return_lse=True``.
    out : tuple of ndarray, optional
        Output arrays; allocated if None. They may not overlap the parts.

    Returns
    -------
    attn_output : ndarray, shape [..., num_heads, Dv]
        In the dtype of the parts.
    lse : ndarray of float32, shape [..., num_heads]
        The lse over all parts, for further merges.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    out = sum(exp(lse_i - lse) * out_i), as FlashAttention joins blocks and FlashInfer joins states.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> ones = np.ones((1, 2, 4), np.float32)
    >>> lse = np.log(np.array([[1, 1]], np.float32)), np.log(np.array([[1, 3]], np.float32))
    >>> attn_output, total = kvkit.merge_attention_states((ones, 5 * ones), lse)
    >>> attn_output[0, :, 0].round(4), np.exp(total[0]).round(4)
    (array([3., 4.], dtype=float32), array([2., 4.], dtype=float32))
    """
    call = on.check(checked_merge, outputs, lses)
    out_arrays = None if out is None else call.results.checked(out)
    results = merge_checked(call.fmt, call.outputs, call.lses)
    if out_arrays is None:
        return results
    for array, result in zip(out_arrays, results, strict=True):
        array[...] = result
    return out_arrays[0], out_arrays[1]


def merge_checked(fmt: Element, outputs: Sequence[Array], lses: Sequence[Array]) -> Pair:
    """Merge checked outputs [..., num_heads, Dv] and lses [..., num_heads] of parts; return both merged."""
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
