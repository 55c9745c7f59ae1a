"""Attention over parts of a context, put together."""

from __future__ import annotations

import numpy as np

from kvkit.checks.merge import checked
from kvkit.foreign import in_kind
from kvkit.typed import Arrays, Pair


@in_kind
def merge_attention_states(outputs: Arrays, lses: Arrays, *, out: Pair | None = None) -> Pair:
    """Put attention over parts of a context together: several caches, machines, or a shared prefix.

    Exact: the result is attention over all keys, whatever the parts and their order, up to float32
    rounding. A part in which a query saw no key (lse -inf, or as FlashAttention 2 has it +inf) counts for
    nothing. If sinks are used, give them to one part only.

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
    call = checked(outputs, lses)
    results = None if out is None else call.results.given(out)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        whole, lse = merged(call.outputs, call.lses)
        whole = whole.astype(call.fmt.dtype)
    if results is None:
        return whole, lse
    results[0][...], results[1][...] = whole, lse
    return results


def merged(outputs, lses):
    """The parts in float32, one after the other."""
    shares = np.array(lses)
    shares[shares == np.inf] = -np.inf
    top = np.maximum.reduce(shares)
    base = np.where(top == -np.inf, np.float32(0), top)
    shares -= base
    np.exp(shares, out=shares)
    total = sum(shares, np.zeros_like(top))
    shares /= np.where(total == 0, np.float32(1), total)
    whole = np.zeros(outputs[0].shape, np.float32)
    for output, share in zip(outputs, shares, strict=True):
        part = output.astype(np.float32)
        part *= share[..., None]
        if not share.all():
            part[share == 0] = 0  # whatever it was
        whole += part
    return whole, np.asarray(base + np.log(total))
