"""Attend to a part of a context, by positions in the whole context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numba
import numpy as np
from distributed import get_worker

from kvkit.formats.elements import Element
from kvkit.merge import merge_checked
from kvkit.static.attention import multi_head_attention
from kvkit.typed import Array

MASK_BYTES = 2**25  # the most bytes of one mask, with the distances that it is made of
DISTANCE_BYTES = 8  # of an int64


@contextlib.contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """Run kernels on ``count`` threads, or on all if there are fewer."""
    before, count = numba.get_num_threads(), min(count, numba.config.NUMBA_NUM_THREADS)
    if before != count:
        numba.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            numba.set_num_threads(before)


def worker_threads() -> int:
    """Return the number of threads of the Dask worker that runs this; elsewhere, of kernels."""
    try:
        return get_worker().state.nthreads
    except ValueError:
        return numba.get_num_threads()


def position_mask(
    queries: Array, keys: Array, is_causal: bool, window: tuple[int, int], slopes: Array | None
) -> Array | None:
    """Return the mask of causality, window and ALiBi for queries and keys at these positions.

    It is None, bool [q, k], or float32 [heads, q, k] to add to the scores.
    """
    left, right = window
    distance = keys[None] - queries[:, None]  # [q, k]
    visible = np.ones(distance.shape, bool)
    if is_causal or slopes is not None:
        visible &= distance <= 0
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    if slopes is None:
        return None if visible.all() else visible
    return np.where(visible, slopes[:, None, None] * distance.astype(np.float32), np.float32(-np.inf))


def combine_masks(first: Array | None, second: Array | None) -> Array | None:
    """Combine two masks, each None, boolean or additive; axes are right-aligned."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == np.bool_:
        return first & second
    first, second = (
        np.where(mask, np.float32(0), np.float32(-np.inf))
        if mask.dtype == np.bool_
        else mask.astype(np.float32)
        for mask in (first, second)
    )
    return first + second


def attend_part(
    query: Array,
    key: Array,
    value: Array,
    query_start: int,
    key_start: int,
    attn_mask: Array | None = None,
    *,
    is_causal: bool = True,
    slopes: Array | None = None,
    window: tuple[int, int] = (-1, -1),
    sinks: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Attend to a range of keys of a context; return outputs [B, S, Hq, Dv] and lse [B, S, Hq].

    `query_start` and `key_start` are the positions of the first query and of the first key. `attn_mask` is
    the part of the mask for these queries and keys. Causal attention of 6 queries to 3 keys, if `offset`, the
    distance from the first query to the first key, is 2::

        query    0  1  2  3  4  5
        key 0    -  -  x  x  x  x       first = 2: earlier queries see no key
        key 1    -  -  -  x  x  x
        key 2    -  -  -  -  x  x       whole = 4: later queries see all keys, without a causal rule
    """
    batch, tokens, heads, dim = query.shape
    count = key.shape[1]
    out = np.zeros((batch, tokens, heads, value.shape[3]), query.dtype)
    lse = np.full(out.shape[:3], -np.inf, np.float32)
    if sinks is not None:
        lse[...] = sinks
    options |= {"num_heads": heads, "head_dim": dim, "num_kv_heads": key.shape[2], "sinks": sinks}

    def attend_rows(rows: slice, keys: slice, mask: Array | None, is_causal: bool) -> None:
        if rows.start < rows.stop and keys.start < keys.stop:
            own = attn_mask  # whose axis of rows may have size 1
            if attn_mask is not None:
                own = attn_mask[..., rows if attn_mask.shape[-2] > 1 else slice(None), keys]
            out[:, rows], lse[:, rows] = multi_head_attention(
                query[:, rows], key[:, keys], value[:, keys],
                combine_masks(own, mask), is_causal=is_causal, return_lse=True,
                **options,
            )  # fmt: skip

    offset = key_start - query_start
    causal = is_causal or slopes is not None
    first = min(max(offset, 0), tokens) if causal else 0
    if slopes is None and tuple(window) == (-1, -1):
        whole = min(max(offset + count - 1, first), tokens) if causal else 0
        attend_rows(slice(first, whole), slice(0, whole - offset), None, True)
        attend_rows(slice(whole, tokens), slice(0, count), None, False)
        return out, lse
    step = max(1, MASK_BYTES // max(1, DISTANCE_BYTES * count * (1 if slopes is None else heads)))
    left, right = window[0], 0 if causal else window[1]
    for begin in range(first, tokens, step):
        end = min(begin + step, tokens)
        low = max(0, begin - left - offset) if left >= 0 else 0
        high = min(count, end + right - offset) if right >= 0 else count
        if low < high:
            keys = np.arange(low, high) + offset
            mask = position_mask(np.arange(begin, end), keys, is_causal, window, slopes)
            attend_rows(slice(begin, end), slice(low, high), mask, False)
    return out, lse


def merge_parts(parts: Sequence[tuple[Array, Array]], fmt: Element) -> tuple[Array, Array]:
    """Merge the outputs and lse of parts of a context."""
    if len(parts) == 1:
        return parts[0]
    outputs, lses = zip(*parts, strict=True)
    return merge_checked(fmt, outputs, lses)
