"""Attend to the page pools of inference engines, and fill and copy their pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from kvkit.calls.pools import append_to_pools, attend_to_pages, copy_blocks
from kvkit.calls.targets import CallTarget, operator, repeated_operator
from kvkit.checks.arguments import PoolAttention, PoolTransfer, Scoring
from kvkit.checks.paged import checked_append, checked_paged_attention, checked_swap
from kvkit.rope import Rope, as_rope
from kvkit.typed import Array, Arrays, Attended


@repeated_operator
def paged_attention(
    on: CallTarget,
    query: Array,
    key_cache: Array,
    value_cache: Array | None,
    block_tables: ArrayLike | tuple[ArrayLike, ArrayLike],
    context_lens: ArrayLike,
    query_starts: ArrayLike | None = None,
    attn_mask: Array | None = None,
    *,
    layout: str = "b n h c",
    key_scale: float | Array | None = None,
    value_scale: float | Array | None = None,
    quant_format: str | None = None,
    is_causal: bool = True,
    alibi_slopes: Array | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
    return_key_weights: bool = False,
    out: Array | Arrays | None = None,
) -> Attended:
    """Attend with packed queries to keys and values in an engine's pools of pages, which are read in place.

    Nothing is appended: the pages must contain all keys, also those of the queries' own tokens. The last
    query of a sequence has the position of its last key.

    Parameters
    ----------
    query : ndarray, shape [tokens, num_heads, Dk]
        float32, float16 or bfloat16; the tokens of all sequences, one after the other. On the CPU also
        float8, which is widened to float32; multiply `softmax_scale` with the scale of such queries.
    key_cache, value_cache : ndarray
        Pools of pages with any strides, whose axes `layout` names: for ``"b n h c"`` [num_blocks, page_size,
        num_kv_heads, Dk] and [.., Dv]. float32, float16 or bfloat16; or codes: int8, or ml_dtypes'
        float8_e4m3fn and float8_e5m2 (``array.view`` turns bytes into these). Keys and values may share
        memory: in MLA a latent row of 576 elements is a key, and its first 512 are the value.
    block_tables : ndarray of int32 or int64, shape [B, M], or a tuple (indptr [B + 1], indices)
        The pages of each sequence: a row of a table, or ``indices[indptr[b]:indptr[b + 1]]``. Entries after
        the last page of a context are ignored.
    context_lens : ndarray of int32 or int64, shape [B]
        The number of keys of each sequence, with those of the new tokens: the last query has the position of
        the last key, and queries before position 0 attend to no key. If an engine has the length n of the
        last page instead, this is ``(pages - 1) * page_size + n``.
    query_starts : ndarray of int32 or int64, shape [B + 1], optional
        Where the queries of each sequence begin in `query`. None: each sequence has one query.
    attn_mask : ndarray, shape [tokens, N] or [num_heads or 1, tokens, N], optional
        Numbers to add to the scores, float32 or of the dtype of `query`; or boolean: True may attend. Column
        j is position j of the token's own sequence; N is at least the longest context, or 1 for all columns.
    layout : str
        The axes of one pool, outermost first: b blocks, n tokens, h heads, c elements of a head. Without h
        there is one head, without n a page has one token. If there is an axis kv, as in ``"b kv n h c"``, one
        pool has keys (0) and values (1): pass it as both arguments, or as one with None for the other; or
        pass views of its halves and leave kv out of `layout`.
    key_scale, value_scale : float or ndarray, optional
        Factors of keys and of values, required for int8: a finite number, or an array [num_kv_heads] or [B,
        num_kv_heads]. For codes also one scale per token and head: an array with the axes of the pool without
        c; or one per group, with an axis of groups in place of c. Give that axis, of size 1, if the shape
        without it could be one of those above. Keys and values then have one dtype, and their scales equal
        strides. Such scales are not checked for NaN.
    quant_format : str, optional
        ``"q8_0"``, ``"q4_0"`` or two of these, as in ``"q8_0/q4_0"``, for keys and values in llama.cpp's
        blocks of ggml: pools of uint8, whose last axis is the bytes of a head.
    alibi_slopes : ndarray, shape [num_heads] or [B, num_heads], optional
        Slopes; each score is reduced by its slope times the distance of query and key.
    is_causal, softmax_scale, window, softcap, sinks, return_lse
        As in `multi_head_attention`.
    return_key_weights : bool
        Whether to return, for each head, the sum of the weights that a key gets from its sequence's queries.
    out : ndarray or tuple of ndarray, optional
        Arrays for the results; allocated if None.

    Returns
    -------
    attn_output : ndarray, shape [tokens, num_heads, Dv]
        The dtype is that of `query`, float32 for float8; 0 for a query that attends to no key.
    lse : ndarray of float32, shape [tokens, num_heads]
        If `return_lse`; -inf for a query that attends to no key.
    key_weights : ndarray of float32, shape [B, num_heads, longest context]
        If `return_key_weights`: the sums of the softmax weights over queries; 0 after a context.

    Raises
    ------
    KvkitError
        If an argument is wrong, or a page that a context needs is not in the pool.

    Notes
    -----
    This does what FlashAttention's ``flash_attn_varlen_func`` with a block table, FlashInfer's paged wrappers
    and vLLM's attention do. Scores and sums are float32; for bfloat16 see the notes of
    `multi_head_attention`.

    Examples
    --------
    Two pages of two tokens, [pages, kv, heads, tokens, elements], as FlashInfer has them:

    >>> import numpy as np, kvkit
    >>> pool = np.zeros((2, 2, 1, 2, 1), np.float32)
    >>> pool[:, 1] = np.array([5, 99, 1, 3]).reshape(2, 1, 2, 1)                      # values
    >>> query, layout = np.ones((3, 1, 1), np.float32), "b kv h n c"
    >>> kvkit.paged_attention(query, pool, pool, [[1, 0]], [3], [0, 3], layout=layout).ravel()
    array([1., 2., 3.], dtype=float32)
    """
    call = PoolAttention(
        query, key_cache, value_cache, block_tables, context_lens, query_starts, layout=layout,
        key_scale=key_scale, value_scale=value_scale, alibi_slopes=alibi_slopes,
        scoring=Scoring(attn_mask, is_causal, False, softmax_scale, window, softcap, sinks),
        return_lse=return_lse, return_key_weights=return_key_weights, quant_format=quant_format,
    )  # fmt: skip
    return on.repeat(checked_paged_attention, attend_to_pages)(call, out)


@operator
def paged_append(
    on: CallTarget,
    key: Array | None,
    value: Array | None,
    key_cache: Array | None,
    value_cache: Array | None,
    slot_mapping: ArrayLike,
    *,
    layout: str = "b n h c",
    key_scale: float | Array | None = None,
    value_scale: float | Array | None = None,
    positions: ArrayLike | None = None,
    rope: Rope | Mapping[str, Any] | str | None = None,
) -> tuple[Array | None, Array | None]:
    """Store packed keys and values in the slots of pools of pages.

    Slot s is token ``s % page_size`` of page ``s // page_size``. A negative slot stores nothing. With `rope`
    keys are rotated on their way.

    Parameters
    ----------
    key, value : ndarray, shapes [tokens, num_kv_heads, Dk] and [tokens, num_kv_heads, Dv]
        float32, float16 or bfloat16, or the dtype of the pool. One may be None; then its pool does not
        change.
    key_cache, value_cache : ndarray
        Pools of pages with the dtype of `key` and `value`, or for codes int8 or ml_dtypes' float8_e4m3fn or
        float8_e5m2. `layout` names their axes; their strides are free, but they may overlap neither the
        tokens nor each other. They change in place; slots that are not in `slot_mapping` keep their bytes.
    slot_mapping : ndarray of int32 or int64, shape [tokens]
        The slot of each token.
    layout : str
        As in `paged_attention`: pass a pool of keys and values as both arguments, or views of its halves.
    key_scale, value_scale : float or ndarray, optional
        Divisors of floats that become codes: a number above 0, or an array [num_kv_heads]; 1 if None, but
        int8 requires it. Or an output array with one scale per token and head (or group), as in
        `paged_attention`: then scales are computed and written there, by the rules of `formats.encode` for
        ``"int8"`` in groups and ``"e4m3"`` by "group".
    positions : ndarray of int32 or int64, shape [tokens], optional
        The position of each token; required with `rope`, else not read.
    rope : Rope or mapping, optional
        How keys are rotated before they are stored: a `kvkit.Rope`, or its arguments by name. None and
        ``"none"`` (a layer without rotation) rotate nothing. `key` itself does not change. Rotate queries
        with `Rope.rotate`.

    Returns
    -------
    key_cache, value_cache : ndarray
        The arrays given.

    Raises
    ------
    KvkitError
        If an argument is wrong, a slot is beyond the cache, or two tokens have one slot. Then nothing has
        been written.

    Notes
    -----
    This does what vLLM's ``reshape_and_cache`` and FlashInfer's ``append_paged_kv_cache`` do. If dtypes are
    equal, bits are copied. Rotated keys are rounded to their own dtype, as `Rope.rotate` does, and then
    stored: one launch writes the bytes that two calls would. Codes are rounded once, half to even, and
    saturate, like ``"ort_int8"``, ``"e4m3"`` and ``"e5m2"`` of `kvkit.formats.encode`.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> keys, values = (np.zeros((2, 1, 3, 1), np.float16) for _ in range(2))
    >>> tokens = np.array([1, 2, 3], np.float16).reshape(3, 1, 1)
    >>> _ = kvkit.paged_append(tokens, -tokens, keys, values, [4, -1, 0], layout="b h n c")
    >>> keys[:, 0, :, 0]
    array([[3., 0., 0.],
           [0., 1., 0.]], dtype=float16)

    A key of position 2 is rotated by 2 radians, its value is not:

    >>> keys, values, key = *np.zeros((2, 1, 1, 1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    >>> _ = kvkit.paged_append(key, key, keys, values, [0], positions=[2], rope={"rotary_dim": 2})
    >>> keys.ravel().round(2), values.ravel()
    (array([-1.33,  0.49], dtype=float32), array([1., 1.], dtype=float32))
    """
    call = PoolTransfer(
        key, value, key_cache, value_cache, slot_mapping, layout=layout, key_scale=key_scale,
        value_scale=value_scale, positions=positions, rope=as_rope(rope),
    )  # fmt: skip
    append_to_pools(on.check(checked_append, call))
    return key_cache, value_cache


@operator
def swap_blocks(on: CallTarget, source: Array, target: Array, pairs: ArrayLike) -> Array:
    """Copy blocks from one cache to another, or within one.

    For each pair (s, d), ``source[s]`` is copied to ``target[d]``.

    Parameters
    ----------
    source, target : ndarray, shape [num_blocks, ...]
        Two caches of any one dtype that share no memory, or one cache passed twice. Their shapes are equal
        but for the first axis; strides are free. `target` changes in place.
    pairs : ndarray of int32 or int64, shape [N, 2]
        Pairs of blocks (s, d). Each d occurs once; within one cache no block is both read and written.

    Returns
    -------
    target : ndarray
        The array given.

    Raises
    ------
    KvkitError
        If an argument is wrong. Nothing is written then.

    Notes
    -----
    This is vLLM's ``swap_blocks`` and ``copy_blocks``. `ascend.block_copy` takes keys and values at once.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> device, host = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.zeros((2, 2), np.float32)
    >>> kvkit.swap_blocks(device, host, [[2, 0]])
    array([[4., 5.],
           [0., 0.]], dtype=float32)
    """
    copy_blocks(on.check(checked_swap, source, target, pairs))
    return target
