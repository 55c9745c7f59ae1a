"""Attention over pools of pages as engines have them, and what fills and moves such pages."""

from __future__ import annotations

from numpy.typing import ArrayLike

from kvkit.calls.pools import append_to_pools, copy_blocks
from kvkit.calls.prepared import attend
from kvkit.checks.arguments import PoolAttention, PoolTransfer, Scoring
from kvkit.checks.paged import checked_append, checked_paged_attention, checked_swap
from kvkit.interop import returns_input_kind
from kvkit.typed import Array, Attended, Pair


@returns_input_kind
def paged_attention(
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
    is_causal: bool = True,
    alibi_slopes: Array | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | Pair | None = None,
) -> Attended:
    """Attend with packed queries to keys and values in pages, read where an engine has them.

    Nothing is appended and no context is copied: the pages hold all keys, those of the queries' own tokens
    too. The last query of a sequence has the position of its last key.

    Parameters
    ----------
    query : ndarray, shape [tokens, num_heads, Dk]
        float32, float16 or bfloat16; the tokens of all sequences, one after the other.
    key_cache, value_cache : ndarray
        Pools of pages, of the axes that `layout` names and of any strides: [num_blocks, page_size,
        num_kv_heads, Dk] and [.., Dv] if it is ``"b n h c"``. Floats, of any of the types of `query`; or
        codes: int8, or ml_dtypes' float8_e4m3fn and float8_e5m2 (of bytes ``array.view`` makes those). They
        may share memory: a latent row of 576 elements is a key, and its first 512 are the value.
    block_tables : ndarray of int32 or int64, shape [B, M], or a tuple (indptr [B + 1], indices)
        The pages of each sequence: a row of a table, or ``indices[indptr[b]:indptr[b + 1]]``. Entries behind
        the last page of a context may be anything.
    context_lens : ndarray of int32 or int64, shape [B]
        The keys of each sequence. Where an engine knows the length n of the last page it is
        ``(pages - 1) * page_size + n``.
    query_starts : ndarray of int32 or int64, shape [B + 1], optional
        Where the queries of each sequence begin; if None each has one.
    attn_mask : ndarray, shape [tokens, N] or [num_heads or 1, tokens, N], optional
        Added to the scores, of the dtype of `query` or float32; or boolean: True may attend. Column j is
        position j of the token's own sequence; N is the longest context or more.
    layout : str
        The axes of one pool, outermost first: b pages, n tokens, h heads, c elements of a head. ``"b h n c"``
        has a page's heads apart. ``"b n c"`` has one head, ``"b h c"`` pages of one token. With an axis kv,
        as in ``"b kv n h c"``, one pool holds keys (0) and values (1): give it as both, or once beside None;
        or give views of it, without that axis.
    key_scale, value_scale : float or ndarray, optional
        What keys and values are multiplied by: a number, or one for each head, [num_kv_heads], in each
        sequence, [B, num_kv_heads], all finite; int8 asks for it. Of codes also a float for each token and
        head, of the axes and the order of the pool without c, or with one for groups of its elements (as it
        has to have where its shape were one of those above); of equal strides for both sides, whose codes are
        then of one type; it is not searched for NaN.
    is_causal : bool
        A query sees no key behind its own position.
    alibi_slopes : ndarray, shape [num_heads] or [B, num_heads], optional
        Each score loses its slope times the distance of query and key.
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(Dk) if None.
    window : tuple of int
        (left, right): how many keys beside its own position a query sees; -1 for no limit.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0 for no cap.
    sinks : ndarray, shape [num_heads], optional
        A score for each query head without a value.
    return_lse : bool
        Return the natural logarithms of the softmax denominators too.
    out : ndarray or tuple of ndarray, optional
        Arrays for the results; made if not given.

    Returns
    -------
    attn_output : ndarray, shape [tokens, num_heads, Dv]
        Of the dtype of `query`; zeros where a query sees no key.
    lse : ndarray of float32, shape [tokens, num_heads]
        With `return_lse`; -inf where a query sees no key.

    Raises
    ------
    KvkitError
        If an argument is wrong, a page that a context needs among them.

    Notes
    -----
    The call of FlashAttention (``flash_attn_varlen_func`` with a block table), of FlashInfer's paged wrappers
    and of vLLM. Scores and sums are float32.

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
        return_lse=return_lse,
    )  # fmt: skip
    return attend(checked_paged_attention(call), out)


@returns_input_kind
def paged_append(
    key: Array | None,
    value: Array | None,
    key_cache: Array | None,
    value_cache: Array | None,
    slot_mapping: ArrayLike,
    *,
    layout: str = "b n h c",
    key_scale: float | Array | None = None,
    value_scale: float | Array | None = None,
) -> tuple[Array | None, Array | None]:
    """Store packed keys and values in the slots of pools of pages.

    Slot s is token ``s % page_size`` of page ``s // page_size``. A negative slot stores nothing.

    Parameters
    ----------
    key, value : ndarray, shapes [tokens, num_kv_heads, Dk] and [tokens, num_kv_heads, Dv]
        float32, float16 or bfloat16, or of the type of the pool. One may be None: then its pool is left
        alone.
    key_cache, value_cache : ndarray
        Pools of pages of the types of `key` and `value`, or of codes for floats: int8, float8_e4m3fn or
        float8_e5m2 of ml_dtypes. They have the axes that `layout` names and any strides, apart from the
        tokens and each other. They change in place; what no slot names keeps its bytes.
    slot_mapping : ndarray of int32 or int64, shape [tokens]
        The slot of each token.
    layout : str
        As in `paged_attention`: a pool of keys and values is given as both, or as views.
    key_scale, value_scale : float or ndarray, optional
        Of codes, what floats are divided by: a number above 0, or one for each head, [num_kv_heads]; 1 if
        left out, but int8 asks for it. Or an array for a float for each token and head, as in
        `paged_attention`: then scales are found, as `formats.encode` finds those of ``"int8"`` in groups and
        of ``"e4m3"`` by "group", and written there.

    Returns
    -------
    key_cache, value_cache : ndarray
        The arrays given.

    Raises
    ------
    KvkitError
        If an argument is wrong, a slot lies behind the cache or two tokens share one. Then nothing is
        written.

    Notes
    -----
    vLLM's ``reshape_and_cache``, FlashInfer's ``append_paged_kv_cache``. Of equal types bits are moved as
    they are. Codes are rounded once, half to even, and saturate, as those of ``"ort_int8"``, ``"e4m3"`` and
    ``"e5m2"`` in `kvkit.formats.encode`.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> keys, values = (np.zeros((2, 1, 3, 1), np.float16) for _ in range(2))
    >>> tokens = np.array([1, 2, 3], np.float16).reshape(3, 1, 1)
    >>> _ = kvkit.paged_append(tokens, -tokens, keys, values, [4, -1, 0], layout="b h n c")
    >>> keys[:, 0, :, 0]
    array([[3., 0., 0.],
           [0., 1., 0.]], dtype=float16)
    """
    call = PoolTransfer(
        key, value, key_cache, value_cache, slot_mapping, layout=layout, key_scale=key_scale,
        value_scale=value_scale,
    )  # fmt: skip
    append_to_pools(checked_append(call))
    return key_cache, value_cache


@returns_input_kind
def swap_blocks(source: Array, target: Array, pairs: ArrayLike) -> Array:
    """Copy blocks from one cache to another, or within one.

    For each pair (s, d) ``target[d]`` becomes ``source[s]``.

    Parameters
    ----------
    source, target : ndarray, shape [num_blocks, ...]
        Of one type and equal axes behind the first, of any strides: two caches that share no memory, or one
        cache given twice. `target` changes in place.
    pairs : ndarray of int32 or int64, shape [N, 2]
        Blocks (s, d). Each d once; within one cache no block is both read and written.

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
    vLLM's ``swap_blocks`` and ``copy_blocks``. `ascend.block_copy` says the same of keys and values in one.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> device, host = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.zeros((2, 2), np.float32)
    >>> kvkit.swap_blocks(device, host, [[2, 0]])
    array([[4., 5.],
           [0., 0.]], dtype=float32)
    """
    copy_blocks(source, target, *checked_swap(source, target, pairs))
    return target
