"""Append tokens of packed sequences to a dynamic cache, and read contexts back."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from numpy.typing import ArrayLike

from kvkit.calls.targets import CallTarget, repeated_operator
from kvkit.checks.arguments import CacheArguments, CacheTransfer, StepArguments
from kvkit.layouts import pmx
from kvkit.typed import Array, Pair


@repeated_operator
@pmx.documented(pmx.DYNAMIC)
def key_value_cache(
    on: CallTarget,
    current_key: Array,
    current_value: Array,
    seqstarts: ArrayLike,
    kvstarts: ArrayLike,
    cachestarts: ArrayLike,
    start_pos: ArrayLike,
    max_seqlen: SupportsIndex | None,
    max_kvlen: SupportsIndex | None,
    cache: Array,
    scale: Array | None = None,
    *,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: Literal[0, 4, 8] = 0,
    quant_group: int = 8,
    quant_format: Literal["e4m3", "e5m2", "q8_0", "q4_0"] | None = None,
    num_repeat: int = 1,
    cache_mode: Literal[0, 1] = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    out: Pair | None = None,
) -> Pair:
    """Append keys and values of packed sequences to a shared cache and read their contexts back.

    Token ``start_pos[b] + i`` of sequence b, packed at ``seqstarts[b] + i``, is stored in the row of its
    position; then all ``kvstarts[b+1] - kvstarts[b]`` tokens of the sequence are read from their rows.
    Position t has row ``cachestarts[b] + t`` in ``cache_mode`` 0, and row
    ``cachestarts[b, t // page_size] + t % page_size`` in ``cache_mode`` 1.

    Parameters
    ----------
    current_key, current_value : ndarray, shape [seqstarts[B], H, Dh]
        Keys and values of the new tokens: float32, float16, bfloat16, or int8 (copied as it is).
    seqstarts, kvstarts : ndarray of int64, shape [B + 1]
        Prefix sums of the sequences' new tokens, and of their context lengths: first 0, last the total.
    cachestarts : ndarray of int64, shape [B] or [B, MaxP]
        The first row of each sequence (``cache_mode`` 0) or of each of its pages (1). Sequences may share
        rows that this call does not write. Entries past the last used page are not read.
    start_pos : ndarray of int64, shape [B]
        Position of each sequence's first new token; its context is start_pos plus its new tokens.
    max_seqlen, max_kvlen : int or None
        Upper bounds of a sequence's new tokens, and of its context. They are checked, and change no result.
    cache : ndarray, changed in place
        Any float dtype; int8 for ``quant_bit`` 8 and for int8 keys; int8 or uint8 with a last axis of Dh/2
        for ``quant_bit`` 4; for ``quant_format`` see there. Strided views are fine if their last axis is
        contiguous. Index 0 of the axis of size 2 holds keys, 1 values. The axes by ``cache_layout``:
        {layouts}
    scale : ndarray, optional, changed in place
        Scales of a quantized cache, float32, float16 or bfloat16, in the shape of ``cache`` with a last axis
        of Dh/quant_group; see ``quant_format`` for float8.
    num_layer, layer_idx, quant_bit, quant_group, quant_format, num_repeat
        As in `kvkit.key_value_cache`.
    cache_mode, page_size : int
        0 for offsets; 1 for a page table with pages of ``page_size`` rows.
    out : tuple of ndarray, optional
        Output arrays for key and value; made if not given.

    Returns
    -------
    key, value : ndarray, shape [kvstarts[B], H * num_repeat, Dh]
        The contexts, packed at ``kvstarts``, in the dtype of ``current_key``.

    Raises
    ------
    KvkitError
        If an argument is wrong; then neither ``cache`` nor ``scale`` has changed.

    Notes
    -----
    PMX operator ``dynamic_batching.KeyValueCache``. All new tokens are written before any is read. No
    row may be written twice, or read by another sequence.

    Examples
    --------
    Two sequences with 3 and 1 new tokens, in pages of four rows:

    >>> import numpy as np, kvkit
    >>> cache = np.zeros((16, 1, 2, 2, 8), np.int8)
    >>> scale = np.zeros((16, 1, 2, 2, 1), np.float16)
    >>> tokens = np.arange(4, dtype=np.float32)[:, None, None] * np.ones((4, 2, 8), np.float32)
    >>> key, value = kvkit.dynamic_batching.key_value_cache(
    ...     tokens, tokens, np.array([0, 3, 4]), np.array([0, 3, 4]), np.array([[8], [4]]), np.array([0, 0]),
    ...     None, None, cache, scale, quant_bit=8, cache_mode=1, page_size=4)
    >>> cache[[8, 9, 10, 4], 0, 0, 0, 0]
    array([  0, 127, 127, 127], dtype=int8)
    """
    index = StepArguments(
        seqstarts, kvstarts, cachestarts, start_pos, max_seqlen=max_seqlen, max_kvlen=max_kvlen,
        cache_mode=cache_mode, page_size=page_size,
    )  # fmt: skip
    place = CacheArguments(num_layer, layer_idx, quant_bit, quant_group, quant_format, cache_layout)
    call = CacheTransfer(current_key, current_value, cache, scale, place, num_repeat)
    key, value = on.run_in_cache(index, call, out)
    return key, value
