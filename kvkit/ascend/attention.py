"""Attention of one query token a sequence over a cache in blocks."""

from dataclasses import replace

import numpy as np

from kvkit import attention, check, cpu
from kvkit.ascend import tensors
from kvkit.check import wrong
from kvkit.formats import BY_DTYPE, FLOATS
from kvkit.steps import Steps


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    *,
    razor_offset=None,
    softmax_scale=None,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    return_lse=False,
    out=None,
):
    """Attention of one new token a sequence to all of its context in a cache in blocks.

    Where each head keeps rows of its own (caches of one head, block tables for each sequence and head), query
    heads of key head h of sequence b read the rows of entry ``b * num_kv_head + h``.

    Parameters
    ----------
    query : ndarray, shape [B, num_head, D]
        float32, float16 or bfloat16.
    key_cache, value_cache : ndarray, shapes [num_blocks, block_size, num_kv_head, D] and [.., Dv]
        Of the type of `query`, of any strides; or [num_blocks, block_size, 1, D], compressed per head.
    block_tables : ndarray of int32 or int64, shape [B, M] or [B * num_kv_head, M]
        The blocks of each context; entries behind its last block are not read.
    context_lens : ndarray of int32 or int64, shape [B] or [B * num_kv_head]
        The rows of each context.
    razor_offset : ndarray of float32, shape [num_blocks, block_size], optional
        Added to the products with keys before they are scaled (with a cap, times the scale to what is
        capped). A row that is the mean of N tokens counts N times with ln(N) / softmax_scale (see `Slots`).
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(D) if None.
    window : tuple of int
        (left, right): of how many rows beside the last one a query sees; -1 for no limit.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0 for no cap.
    sinks : ndarray, shape [num_head], optional
        A score for each query head without a value.
    return_lse : bool
        Return the logarithms of the softmax denominators too.
    out : ndarray or tuple of ndarray, optional
        Arrays for the results; made if not given.

    Returns
    -------
    attn_output : ndarray, shape [B, num_head, Dv]
        Of the dtype of `query`; zeros where a context is empty.
    lse : ndarray of float32, shape [B, num_head]
        With `return_lse`.

    Raises
    ------
    KvkitError
        If an argument is wrong.

    Notes
    -----
    Ascend ATB PagedAttention. Scores and sums are float32.

    Examples
    --------
    >>> import numpy as np, kvkit
    >>> keys, values = np.zeros((2, 2, 1, 1), np.float32), np.array([7, 99, 1, 3], np.float32)
    >>> one_head = np.ones((1, 1, 1), np.float32)
    >>> table, lens = np.array([[1]]), np.array([2])
    >>> kvkit.ascend.paged_attention(one_head, keys, values.reshape(2, 2, 1, 1), table, lens)
    array([[[2.]]], dtype=float32)
    """
    fmt = check.tensor("query", query, FLOATS, 3)
    batch, heads, dim = query.shape
    if min(heads, dim) < 1:
        raise wrong("query", "at least one head and one element a head", f"shape {query.shape}")
    views = []
    for name, array in (("key_cache", key_cache), ("value_cache", value_cache)):
        if tensors.cache(name, array, "ND", written=False)[0] is not fmt:
            raise wrong(name, f"the dtype of query, {fmt}", array.dtype)
        views.append((name, array))
    blocks, block_size = tensors.same_blocks(views)
    kv_heads = key_cache.shape[2]
    if value_cache.shape[2] != kv_heads:
        raise wrong("value_cache", f"{kv_heads} heads, as key_cache", value_cache.shape[2])
    if key_cache.shape[3] != dim:
        raise wrong("key_cache", f"the head size of query, {dim}", key_cache.shape[3])
    lengths = tensors.index("context_lens", context_lens)
    apart = entries_of_a_sequence(len(lengths), batch, heads, kv_heads)
    table = tensors.index("block_tables", block_tables, len(lengths), ndim=2)
    check_table(table, lengths, blocks, block_size)

    mask = cpu.attention.NO_MASK
    weights = attention.weights(heads, dim, False, False, softmax_scale, window, softcap, sinks, mask)
    weights = replace(weights, apart=apart)
    if razor_offset is not None:
        check.tensor("razor_offset", razor_offset, FLOATS[:1], 2)
        if razor_offset.shape != (blocks, block_size):
            raise wrong("razor_offset", f"shape ({blocks}, {block_size})", razor_offset.shape)
        bias = razor_offset.take(table, 0, mode="clip") * np.float32(weights.scale)
        bias = bias.reshape(len(lengths), table.shape[1] * block_size)
        mask = (bias.ctypes.data, cpu.attention.mask_kind("float32"), bias.strides[0], 0, 0, 4, False)
        weights = replace(weights, mask=mask)
    inputs = attention.named(
        query=query, key_cache=key_cache, value_cache=value_cache, razor_offset=razor_offset, sinks=sinks
    )
    shape = (batch, heads, value_cache.shape[3])
    out, lse = attention.outputs(out, shape, fmt, return_lse, inputs)
    attend(query, out, lse, views, table, lengths, apart, weights)
    return out if lse is None else (out, lse)


def entries_of_a_sequence(entries, batch, heads, kv_heads):
    """Key heads that have contexts of their own: 1 unless the cache is compressed per head."""
    if entries == batch:
        if heads % kv_heads:
            raise wrong("query", f"a multiple of the {kv_heads} heads of key_cache", f"{heads} heads")
        return 1
    apart = entries // batch if batch else 0
    if kv_heads != 1 or apart < 1 or entries % batch or heads % apart:
        wanted = f"{batch} entries"
        if kv_heads == 1:
            wanted += f", or one for each key head of a sequence (a divisor of {heads} of them)"
        raise wrong("context_lens", wanted, entries)
    return apart


def check_table(table, lengths, blocks, block_size):
    """Check the blocks that contexts lie in."""
    if len(lengths) and lengths.min() < 0:
        raise wrong("context_lens", "no length below 0", lengths.min())
    need = -(-lengths // block_size)
    if len(need) and need.max() > table.shape[1]:
        i = int(need.argmax())
        raise wrong(
            "block_tables", f"{need[i]} blocks for the {lengths[i]} rows of entry {i}", table.shape[1]
        )
    wrong_ids = ((table < 0) | (table >= blocks)) & (np.arange(table.shape[1]) < need[:, None])
    if wrong_ids.any():
        i, j = np.argwhere(wrong_ids)[0]
        raise wrong(f"block_tables[{i}, {j}]", f"a block from 0 to {blocks - 1}", table[i, j])


def attend(query, out, lse, caches, table, lengths, apart, weights):
    """Each entry is a sequence of one query token over rows in pages of a block."""
    batch, heads, _ = query.shape
    folded = (batch * apart, heads // apart)
    query = check.one_piece(query).reshape(*folded, query.shape[2])
    places = [rows_of(array) for _, array in caches]
    if places[0][2] != places[1][2]:
        places = [rows_of(np.ascontiguousarray(array)) for _, array in caches]
    (key, key_row, step), (value, value_row, _) = places
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    steps = Steps(
        np.arange(len(lengths) + 1), starts, lengths - 1, np.zeros_like(lengths), table.clip(0) * step,
        key.shape[1], len(lengths), int(starts[-1]), 0,
    )  # fmt: skip
    fmt, sides = BY_DTYPE[query.dtype], [(0, key_row), (0, value_row)]
    context = attention.context(fmt, key, value, sides)
    made = out.reshape(*folded, out.shape[2])
    made_lse = None if lse is None else lse.reshape(folded)
    attention.attend(query, made, made_lse, context, steps, len(lengths), weights)
    for array, folded_array in ((out, made), (lse, made_lse)):
        if folded_array is not None and not np.may_share_memory(array, folded_array):  # strides do not fold
            array[...] = folded_array.reshape(array.shape)


def rows_of(cache):
    """(cache, stride of its rows, how many of these one block is from the next).

    The strides of most caches divide so; a few odd ones are copied.
    """
    block, row, _, last = cache.strides
    if len(cache) == 1:
        block = 0
    if cache.shape[1] == 1:
        row = block or cache.itemsize
    if (cache.shape[3] > 1 and last != cache.itemsize) or row == 0 or block % row:
        return rows_of(np.ascontiguousarray(cache))
    return cache, row, block // row
