"""Attention of one query token a sequence over a cache in blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from kvkit import attention, check, cpu
from kvkit.ascend import tensors
from kvkit.check import wrong
from kvkit.formats import FLOATS, Format
from kvkit.steps import Steps
from kvkit.typed import Array, Attended, Pair


def paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: ArrayLike,
    context_lens: ArrayLike,
    *,
    razor_offset: Array | None = None,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | Pair | None = None,
) -> Attended:
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
    call = checked(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        razor_offset,
        sinks,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
    )
    weights = call.weights
    if razor_offset is not None:
        bias = razor_offset.take(call.table, 0, mode="clip") * np.float32(weights.scale)
        weights = biased(weights, bias.reshape(len(bias), rows_of_a_context(call)))
    out, lse = attention.outputs(out, call.shape, call.fmt, return_lse, call.inputs)
    attend(query, out, lse, call, weights)
    return out if lse is None else (out, lse)


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call of `paged_attention`, but for its outputs. An entry is a sequence, or a head of one."""

    fmt: Format
    shape: tuple[int, ...]  # of attn_output
    caches: list[np.ndarray]
    table: np.ndarray  # [entries, blocks]
    lengths: np.ndarray
    apart: int  # entries of a sequence
    weights: cpu.attention.Weights
    inputs: list[tuple[str, np.ndarray]]


def checked(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    razor_offset,
    sinks,
    *,
    softmax_scale,
    window,
    softcap,
):
    """The checked call."""
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
    inputs = attention.named(
        query=query, key_cache=key_cache, value_cache=value_cache, razor_offset=razor_offset, sinks=sinks
    )
    shape = (batch, heads, value_cache.shape[3])
    return Call(fmt, shape, [array for _, array in views], table, lengths, apart, weights, inputs)


def rows_of_a_context(call):
    """How many rows the blocks of an entry have."""
    return call.table.shape[1] * call.caches[0].shape[1]


def biased(weights, bias):
    """Weights with a bias [entries, rows] of scores."""
    place = bias.ctypes.data, cpu.attention.mask_kind("float32"), bias.strides[0], 0, 0, bias.itemsize, False
    return replace(weights, mask=place)


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


def attend(query, out, lse, call, weights):
    """Each entry is a sequence of one query token over rows in pages of a block."""
    folded = folded_shape(call)
    query = check.one_piece(query).reshape(*folded, query.shape[2])
    caches, places = call.caches, [rows_of(array) for array in call.caches]
    if uneven(places):
        caches = [np.ascontiguousarray(array) for array in caches]
        places = [rows_of(array) for array in caches]
    made = out.reshape(*folded, out.shape[2])
    made_lse = None if lse is None else lse.reshape(folded)
    context = context_of(call, caches, places)
    steps = steps_of(call, places)
    attention.attend(query, made, made_lse, context, steps, len(call.lengths), weights)
    for array, folded_array in ((out, made), (lse, made_lse)):
        if folded_array is not None and not np.may_share_memory(array, folded_array):  # strides do not fold
            array[...] = folded_array.reshape(array.shape)


def uneven(places):
    """Whether caches must be copied to be read as rows; see `rows_of`."""
    return None in places or places[0][1] != places[1][1]


def folded_shape(call):
    """(entries, query heads of an entry)."""
    batch, heads, _ = call.shape
    return batch * call.apart, heads // call.apart


def context_of(call, caches, places):
    """The caches as attention sees them."""
    key, value = caches
    return attention.context(call.fmt, key, value, [(0, row) for row, _ in places])


def steps_of(call, places):
    """The entries as sequences of one new token; see `rows_of`."""
    lengths, step = call.lengths, places[0][1]
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return Steps(
        np.arange(len(lengths) + 1), starts, lengths - 1, np.zeros_like(lengths), call.table.clip(0) * step,
        call.caches[0].shape[1], len(lengths), int(starts[-1]), 0,
    )  # fmt: skip


def rows_of(cache):
    """(stride of the cache's rows, how many of these one block is from the next); None if that is no number.

    The strides of most caches divide so.
    """
    block, row, _, last = cache.strides
    if len(cache) == 1:
        block = 0
    if cache.shape[1] == 1:
        row = block or cache.itemsize
    if (cache.shape[3] > 1 and last != cache.itemsize) or row == 0 or block % row:
        return None
    return row, block // row
