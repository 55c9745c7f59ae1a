"""Check a call of attention over a cache in blocks, with one query token per sequence."""

from typing import NamedTuple

import numpy as np

from kvkit.checks import attention, index_tensors, pools
from kvkit.checks.arguments import BlockAttention
from kvkit.checks.ascend import tensors
from kvkit.checks.outputs import Results
from kvkit.checks.records import NO_MASK, MaskPlace, StepIndex
from kvkit.checks.values import NamedArrays, check_not_empty, checked_format, named_arrays
from kvkit.errors import argument_error
from kvkit.formats import FLOATS, MASKS, Element
from kvkit.typed import Array


class BlockAttentionCall(NamedTuple):
    """A checked call of Ascend's `paged_attention`.

    An entry (of `lengths`, a row of `table`) is a sequence. In a compressed cache, whose rows have one head,
    it is one key head of a sequence, and each sequence has `per_sequence` entries.
    """

    fmt: Element
    shape: tuple[int, ...]  # of attn_output
    query: Array
    caches: tuple[Array, Array]
    table: Array  # [entries, blocks]
    lengths: Array  # [entries]
    per_sequence: int  # entries of a sequence
    weights: attention.Weights
    razor_offset: Array | None  # [blocks, rows], a bias of each row
    inputs: NamedArrays
    results: Results


def checked_block_attention(call: BlockAttention) -> BlockAttentionCall:
    """Check a call of `ascend.paged_attention`."""
    query, key_cache, value_cache = call.query, call.key_cache, call.value_cache
    razor_offset = call.razor_offset
    fmt = checked_format("query", query, FLOATS, 3)
    batch, heads, dim = query.shape
    check_not_empty("query", query)
    views = []
    for name, array in (("key_cache", key_cache), ("value_cache", value_cache)):
        if tensors.cache_in_blocks(name, array, "ND", written=False)[0] is not fmt:
            raise argument_error(name, f"the dtype of query, {fmt}", array.dtype)
        views.append((name, array))
    blocks, block_size = tensors.same_blocks(views)
    kv_heads = key_cache.shape[2]
    if value_cache.shape[2] != kv_heads:
        raise argument_error("value_cache", f"{kv_heads} heads, as key_cache", value_cache.shape[2])
    if key_cache.shape[3] != dim:
        raise argument_error("key_cache", f"the head size of query, {dim}", key_cache.shape[3])
    lengths = index_tensors.index("context_lens", call.context_lens)
    per_sequence = entries_of_a_sequence(len(lengths), batch, heads, kv_heads)
    table = index_tensors.index("block_tables", call.block_tables, 2, len(lengths))
    pools.check_table(table, lengths, blocks, block_size)

    weights = attention.checked_weights(query, NO_MASK, call.scoring)._replace(sink_sequences=per_sequence)
    if razor_offset is not None:
        checked_format("razor_offset", razor_offset, FLOATS[:1], 2)
        if razor_offset.shape != (blocks, block_size):
            raise argument_error("razor_offset", f"shape ({blocks}, {block_size})", razor_offset.shape)
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    inputs = named_arrays(query=query, **caches, razor_offset=razor_offset, sinks=call.scoring.sinks)
    shape = (batch, heads, value_cache.shape[3])
    return BlockAttentionCall(
        fmt, shape, query, (key_cache, value_cache), table, lengths, per_sequence, weights=weights,
        razor_offset=razor_offset, inputs=inputs,
        results=attention.attention_results(shape, fmt, call.return_lse, inputs),
    )  # fmt: skip


def context_rows(call: BlockAttentionCall) -> int:
    """Return how many rows the blocks of one table row have."""
    return int(call.table.shape[1] * call.caches[0].shape[1])


def with_bias(weights: attention.Weights, bias: Array) -> attention.Weights:
    """Return weights that add a bias [entries, rows] to the scores, as a mask does."""
    place = MaskPlace(bias.ctypes.data, MASKS["float32"], bias.strides[0], column=bias.itemsize)
    return weights._replace(mask=place)


def entries_of_a_sequence(entries: int, batch: int, heads: int, kv_heads: int) -> int:
    """Return the number of entries of a sequence: 1 unless the cache is compressed for each head."""
    if entries == batch:
        if heads % kv_heads:
            wanted = f"a multiple of the {kv_heads} heads of key_cache"
            raise argument_error("query", wanted, f"{heads} heads")
        return 1
    per_sequence = entries // batch if batch else 0
    if kv_heads != 1 or per_sequence < 1 or entries % batch or heads % per_sequence:
        wanted = f"{batch} entries"
        if kv_heads == 1:
            wanted += f", or one for each key head of a sequence (a divisor of {heads} of them)"
        raise argument_error("context_lens", wanted, entries)
    return per_sequence


def folded_shape(call: BlockAttentionCall) -> tuple[int, int]:
    """Return (number of entries, query heads of an entry)."""
    batch, heads, _ = call.shape
    return batch * call.per_sequence, heads // call.per_sequence


def entry_steps(call: BlockAttentionCall, caches: tuple[Array, Array] | None = None) -> StepIndex:
    """Return the step in which each entry is a sequence of one new token, over `caches` or the call's."""
    key, value = caches or call.caches
    table, starts = call.table.clip(0, len(key) - 1), np.arange(len(call.lengths) + 1)
    return pools.steps_of(key, value, pools.PageTable(table), call.lengths, starts)
