"""Attention over packed sequences: packed keys and values, or a cache that the new ones are appended to."""

from kvkit import attention, check, steps
from kvkit.dynamic_batching.plan import checked_plan


def multi_head_attention(
    query,
    key,
    value,
    seqstarts,
    kvstarts,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    attn_mask=None,
    *,
    num_heads,
    head_dim,
    is_causal=True,
    is_alibi=False,
    num_kv_heads=0,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
):
    """Attend with every query to the keys and values of its own sequence, sequences packed.

    As `kvkit.multi_head_attention` does for each sequence: with m keys, query i of n is at position
    m - n + i.

    Parameters
    ----------
    query : ndarray, shape [seqstarts[B], num_heads, head_dim]
        float32, float16 or bfloat16.
    key : ndarray, shape [kvstarts[B], num_kv_heads, head_dim]
        Of the dtype of ``query``.
    value : ndarray, shape [kvstarts[B], num_kv_heads, Dv]
        Likewise; its heads may have another size.
    seqstarts, kvstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins in ``query``, and in ``key`` and ``value``; from 0 to the total.
    decoding_batches : int
        How many sequences, from the first on, the causal mask leaves alone.
    max_seqlen, max_kvlen : int or None
        At least the longest sequence of queries, and of keys. They change no result.
    attn_mask : ndarray, optional
        Shape [seqstarts[B], kvstarts[B]], or with num_heads (or 1) in front: added to the scores, of the
        dtype of ``query`` or float32, or boolean (True may attend). Only the blocks on the diagonal, where a
        sequence's queries meet its keys, are read; more columns are ignored.
    num_heads, head_dim, num_kv_heads : int
        Heads of ``query``, their size, and heads of ``key`` (0 for as many).
    is_causal, is_alibi : bool
        Whether a query sees no key after its own position; whether ALiBi biases, which are causal in every
        sequence, are added.
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(head_dim) if None.
    window : tuple of int
        How many keys left and right of its own position a query sees; -1 for no limit.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)`` before masks and biases are added.
    sinks : ndarray, shape [num_heads], optional
        A score for each head that takes part in the softmax and has no value.
    return_lse : bool
        Whether the logarithms of the softmax denominators are returned too.
    out : ndarray or tuple of ndarray, optional
        Array for ``attn_output``, or arrays for both outputs; made if not given.

    Returns
    -------
    attn_output : ndarray, shape [seqstarts[B], num_heads, Dv]
        Of the dtype of ``query``.
    lse : ndarray of float32, shape [seqstarts[B], num_heads]
        With ``return_lse``: logarithms of the softmax denominators.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    PMX operator ``dynamic_batching.MultiHeadAttention``; from ``softmax_scale`` on, beyond it.

    Examples
    --------
    Two sequences, of one query and three keys, and of two and two:

    >>> import numpy as np, kvkit
    >>> query, key = np.zeros((3, 1, 4), np.float32), np.zeros((5, 1, 4), np.float32)
    >>> value = np.arange(5, dtype=np.float32).reshape(5, 1, 1)
    >>> kvkit.dynamic_batching.multi_head_attention(
    ...     query, key, value, [0, 1, 3], [0, 3, 5], 1, None, None, num_heads=1, head_dim=4).ravel()
    array([1. , 3. , 3.5], dtype=float32)
    """
    call = checked_attention(
        query,
        key,
        value,
        seqstarts,
        kvstarts,
        decoding_batches,
        max_seqlen,
        max_kvlen,
        attn_mask,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        is_causal=is_causal,
        is_alibi=is_alibi,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    out, lse = attention.outputs(out, call.shape, call.fmt, return_lse, call.inputs)
    return attention.attend(call.query, out, lse, call.context, call.steps, call.decoding, call.weights)


def checked_attention(
    query,
    key,
    value,
    seqstarts,
    kvstarts,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    attn_mask,
    *,
    num_heads,
    head_dim,
    num_kv_heads,
    sinks,
    **attributes,
):
    """The checked call of `multi_head_attention`."""
    step = steps.packed(seqstarts, kvstarts, max_seqlen, max_kvlen)
    fmt, query, kv_heads = attention.queries(query, 3, num_heads, head_dim, num_kv_heads)
    tokens, num_heads, head_dim = query.shape
    steps.ends_with("seqstarts", step.tokens, ("query", tokens))
    key, value = attention.keys_and_values(fmt, key, value, (None,), kv_heads, query.shape[-1])
    steps.ends_with("kvstarts", step.context, ("key", len(key)))
    decoding = check.integer("decoding_batches", decoding_batches, 0, len(step.start_pos))
    mask = attention.dynamic_mask(fmt, attn_mask, num_heads, step.tokens, step.context)
    weights = attention.weights(num_heads, head_dim, sinks=sinks, mask=mask, **attributes)
    inputs = attention.named(query=query, key=key, value=value, attn_mask=attn_mask, sinks=sinks)
    context = attention.context(fmt, key, value, ((0, key.strides[0]), (0, value.strides[0])))
    shape = (step.tokens, num_heads, value.shape[-1])
    return attention.Call(fmt, shape, query, context, step, decoding, weights, inputs)


def multi_head_cache_attention(
    query,
    current_key,
    current_value,
    seqstarts,
    kvstarts,
    cachestarts,
    start_pos,
    decoding_batches,
    max_seqlen,
    max_kvlen,
    cache,
    scale=None,
    attn_mask=None,
    *,
    num_heads,
    head_dim,
    is_causal=True,
    is_alibi=False,
    num_kv_heads=0,
    num_layer=1,
    layer_idx=0,
    quant_bit=0,
    quant_group=8,
    cache_mode=0,
    cache_layout=0,
    page_size=128,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
):
    """Append packed keys and values to a shared cache and attend to each context, read where it lies.

    The same as `key_value_cache` and then `multi_head_attention` over what it returns, without making it:
    new tokens, too, are attended to as the cache holds them. For many layers, see `plan`.

    Codes are read as `kvkit.multi_head_cache_attention` says: products with their scales, which are not
    rounded to the type of the data.

    Parameters
    ----------
    query : ndarray, shape [seqstarts[B], num_heads, head_dim]
        float32, float16 or bfloat16.
    current_key, current_value : ndarray, shape [seqstarts[B], num_kv_heads, head_dim]
        Keys and values of the new tokens, of the dtype of ``query``.
    seqstarts, kvstarts : ndarray of int64, shape [B + 1]
        Where each sequence begins among the new tokens, and among all contexts; from 0 to the total.
    cachestarts : ndarray of int64, shape [B] or [B, MaxP]
        The first row of each sequence (``cache_mode`` 0) or of each of its pages (1).
    start_pos : ndarray of int64, shape [B]
        Position of each sequence's first new token.
    decoding_batches : int
        How many sequences, from the first on, the causal mask leaves alone.
    max_seqlen, max_kvlen : int or None
        At least the longest sequence of new tokens, and context. They change no result.
    cache : ndarray, changed in place
        By ``cache_layout`` as in `key_value_cache`; H is ``num_kv_heads``, Dh ``head_dim``.
    scale : ndarray, optional, changed in place
        Scales of a quantized cache: its shape with last axis Dh/quant_group.
    attn_mask : ndarray, optional
        Shape [seqstarts[B], kvstarts[B]], or with heads in front; added to the scores, or boolean.
    num_heads, head_dim, num_kv_heads : int
        Heads of ``query``, their size, and heads of the cache (0 for as many).
    is_causal, is_alibi : bool
        Whether a query sees no key after its own position; whether ALiBi biases are added.
    num_layer, layer_idx : int
        Layers in the cache, and the one to use.
    quant_bit, quant_group : int
        0 stores floats, 8 and 4 store codes with one scale for each ``quant_group`` elements of a head.
    cache_mode, page_size : int
        0 for offsets; 1 for a page table with pages of ``page_size`` rows.
    softmax_scale, window, softcap, sinks, return_lse, out
        As in `multi_head_attention`.

    Returns
    -------
    attn_output : ndarray, shape [seqstarts[B], num_heads, head_dim]
        Of the dtype of ``query``.
    lse : ndarray of float32, shape [seqstarts[B], num_heads]
        With ``return_lse``: logarithms of the softmax denominators.

    Raises
    ------
    KvkitError
        If an argument is wrong; then neither ``cache`` nor ``scale`` has changed.

    Notes
    -----
    PMX operator ``dynamic_batching.MultiHeadCacheAttention``; from ``softmax_scale`` on, beyond it.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> cache = np.zeros((16, 1, 2, 2, 8), np.float16)
    >>> new = np.arange(4, dtype=np.float32)[:, None, None] * np.ones((4, 2, 8), np.float32)
    >>> output = kvkit.dynamic_batching.multi_head_cache_attention(
    ...     np.zeros((4, 4, 8), np.float32), new, new, np.array([0, 3, 4]), np.array([0, 3, 4]),
    ...     np.array([[8], [4]]), np.array([0, 0]), 0, None, None, cache,
    ...     num_heads=4, head_dim=8, num_kv_heads=2, cache_mode=1, page_size=4)
    >>> output[:, 0, 0]
    array([0. , 0.5, 1. , 3. ], dtype=float32)
    """
    step = checked_plan(
        check.packed_tokens("query", query),
        seqstarts,
        kvstarts,
        cachestarts,
        start_pos,
        decoding_batches,
        max_seqlen,
        max_kvlen,
        cache_mode,
        page_size,
    )
    return step.multi_head_cache_attention(
        query,
        current_key,
        current_value,
        cache,
        scale,
        attn_mask,
        num_heads=num_heads,
        head_dim=head_dim,
        is_causal=is_causal,
        is_alibi=is_alibi,
        num_kv_heads=num_kv_heads,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
    )
