"""Attention over a part of a context: positions are those in the whole."""

import contextlib

import numba
import numpy as np
from distributed import get_worker

import kvkit
from kvkit.merge import merged

MASK_BYTES = 2**25  # that are made at a time


@contextlib.contextmanager
def threads(count):
    """Kernels run on so many threads; on no more than there are."""
    before, count = numba.get_num_threads(), min(count, numba.config.NUMBA_NUM_THREADS)
    if before != count:
        numba.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            numba.set_num_threads(before)


def threads_of_worker():
    """The threads of the Dask worker that this runs on; elsewhere as many as kernels have anyway."""
    try:
        return get_worker().state.nthreads
    except ValueError:
        return numba.get_num_threads()


def bias(queries, keys, is_causal, window, slopes):
    """What hides or weighs keys: None, bool [q, k], or float32 [heads, q, k], to be added.

    `queries` and `keys` are their positions.
    """
    left, right = window
    apart = keys[None] - queries[:, None]  # [q, k]
    seen = np.ones(apart.shape, bool)
    if is_causal or slopes is not None:
        seen &= apart <= 0
    if left >= 0:
        seen &= apart >= -left
    if right >= 0:
        seen &= apart <= right
    if slopes is None:
        return None if seen.all() else seen
    return np.where(seen, slopes[:, None, None] * apart.astype(np.float32), np.float32(-np.inf))


def rows_masked(keys, heads):
    """How many queries get their masks at a time: for so many keys, of so many heads."""
    return max(1, MASK_BYTES // max(1, 8 * keys * heads))


def both(one, other):
    """Two masks as one, either of which may be None, boolean or added; axes are aligned at the right."""
    if one is None or other is None:
        return other if one is None else one
    if one.dtype == other.dtype == np.bool_:
        return one & other
    one, other = (
        np.where(mask, np.float32(0), np.float32(-np.inf))
        if mask.dtype == np.bool_
        else mask.astype(np.float32)
        for mask in (one, other)
    )
    return one + other


def cut(mask, rows, keys):
    """Some rows and keys of a mask, whose axis of rows may be 1."""
    return None if mask is None else mask[..., rows if mask.shape[-2] > 1 else slice(None), keys]


def partial(
    query,
    key,
    value,
    query_start,
    key_start,
    attn_mask=None,
    *,
    is_causal=True,
    slopes=None,
    window=(-1, -1),
    sinks=None,
    **options,
):
    """Attention to some neighbouring keys of a context: outputs [B, S, Hq, Dv], and lse [B, S, Hq].

    `query_start` and `key_start` are the positions of the first query and key; `attn_mask` has the queries
    and keys that are given.
    """
    batch, tokens, heads, dim = query.shape
    count = key.shape[1]
    out = np.zeros((batch, tokens, heads, value.shape[3]), query.dtype)
    lse = np.full(out.shape[:3], -np.inf, np.float32)
    if sinks is not None:
        lse[...] = sinks
    options |= {"num_heads": heads, "head_dim": dim, "num_kv_heads": key.shape[2], "sinks": sinks}

    def rows(begin, end, keys, mask, is_causal):
        if begin < end and keys.start < keys.stop:
            part = slice(begin, end)
            out[:, part], lse[:, part] = kvkit.multi_head_attention(
                query[:, part],
                key[:, keys],
                value[:, keys],
                both(cut(attn_mask, part, keys), mask),
                is_causal=is_causal,
                return_lse=True,
                **options,
            )

    offset = key_start - query_start  # of the first key, from the first query
    causal = is_causal or slopes is not None
    first = min(max(offset, 0), tokens) if causal else 0  # the queries before see nothing
    if slopes is None and tuple(window) == (-1, -1):
        whole = min(max(offset + count - 1, first), tokens) if causal else 0  # those from here on see all
        rows(first, whole, slice(0, whole - offset), None, True)
        rows(whole, tokens, slice(0, count), None, False)
        return out, lse
    step = rows_masked(count, 1 if slopes is None else heads)
    left, right = window[0], 0 if causal else window[1]
    for begin in range(first, tokens, step):
        end = min(begin + step, tokens)
        low = max(0, begin - left - offset) if left >= 0 else 0
        high = min(count, end + right - offset) if right >= 0 else count
        if low < high:
            mask = bias(np.arange(begin, end), np.arange(low, high) + offset, is_causal, window, slopes)
            rows(begin, end, slice(low, high), mask, False)
    return out, lse


def merge(parts, fmt):
    """Parts of a format put together: outputs, and lse, of each that is not None."""
    found = [part for part in parts if part is not None]
    if len(found) == 1:
        return found[0]
    outputs, lses = zip(*found, strict=True)
    return merged(fmt, outputs, lses)
