"""The checked call of attention of one query token a sequence over a cache in blocks."""

from typing import NamedTuple

import numpy as np

from kvkit.checks import attention, index_tensors, pools
from kvkit.checks.ascend import tensors
from kvkit.checks.outputs import Results
from kvkit.checks.records import NO_MASK
from kvkit.checks.tensors import filled, named, tensor
from kvkit.errors import argument_error
from kvkit.formats import FLOATS, MASKS, Element


class Call(NamedTuple):
    """A checked call of `paged_attention`, but for its outputs. An entry is a sequence, or a head of one."""

    fmt: Element
    shape: tuple[int, ...]  # of attn_output
    query: np.ndarray
    caches: list[np.ndarray]
    table: np.ndarray  # [entries, blocks]
    lengths: np.ndarray
    apart: int  # entries of a sequence
    weights: attention.Weights
    razor_offset: np.ndarray | None
    inputs: list[tuple[str, np.ndarray]]
    results: Results


def checked(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    *,
    razor_offset,
    sinks,
    return_lse,
    **attributes,
):
    """The checked call."""
    fmt = tensor("query", query, FLOATS, 3)
    batch, heads, dim = query.shape
    filled("query", query)
    views = []
    for name, array in (("key_cache", key_cache), ("value_cache", value_cache)):
        if tensors.cache(name, array, "ND", written=False)[0] is not fmt:
            raise argument_error(name, f"the dtype of query, {fmt}", array.dtype)
        views.append((name, array))
    blocks, block_size = tensors.same_blocks(views)
    kv_heads = key_cache.shape[2]
    if value_cache.shape[2] != kv_heads:
        raise argument_error("value_cache", f"{kv_heads} heads, as key_cache", value_cache.shape[2])
    if key_cache.shape[3] != dim:
        raise argument_error("key_cache", f"the head size of query, {dim}", key_cache.shape[3])
    lengths = index_tensors.index("context_lens", context_lens)
    apart = entries_of_a_sequence(len(lengths), batch, heads, kv_heads)
    table = index_tensors.index("block_tables", block_tables, 2, len(lengths))
    pools.check_table(table, lengths, blocks, block_size)

    weights = attention.weights(query, NO_MASK, is_causal=False, sinks=sinks, **attributes)._replace(
        apart=apart
    )
    if razor_offset is not None:
        tensor("razor_offset", razor_offset, FLOATS[:1], 2)
        if razor_offset.shape != (blocks, block_size):
            raise argument_error("razor_offset", f"shape ({blocks}, {block_size})", razor_offset.shape)
    inputs = named(
        query=query, key_cache=key_cache, value_cache=value_cache, razor_offset=razor_offset, sinks=sinks
    )
    shape = (batch, heads, value_cache.shape[3])
    results = attention.results(shape, fmt, return_lse, inputs)
    caches = [array for _, array in views]
    return Call(fmt, shape, query, caches, table, lengths, apart, weights, razor_offset, inputs, results)


def rows_of_a_context(call):
    """How many rows the blocks of an entry have."""
    return call.table.shape[1] * call.caches[0].shape[1]


def biased(weights, bias):
    """Weights with a bias [entries, rows] of scores."""
    place = bias.ctypes.data, MASKS["float32"], bias.strides[0], 0, 0, bias.itemsize, False
    return weights._replace(mask=place)


def entries_of_a_sequence(entries, batch, heads, kv_heads):
    """Key heads that have contexts of their own: 1 unless the cache is compressed per head."""
    if entries == batch:
        if heads % kv_heads:
            raise argument_error(
                "query", f"a multiple of the {kv_heads} heads of key_cache", f"{heads} heads"
            )
        return 1
    apart = entries // batch if batch else 0
    if kv_heads != 1 or apart < 1 or entries % batch or heads % apart:
        wanted = f"{batch} entries"
        if kv_heads == 1:
            wanted += f", or one for each key head of a sequence (a divisor of {heads} of them)"
        raise argument_error("context_lens", wanted, entries)
    return apart


def folded_shape(call):
    """(entries, query heads of an entry)."""
    batch, heads, _ = call.shape
    return batch * call.apart, heads // call.apart


def steps_of(call, caches):
    """The entries as sequences of one new token."""
    key, value = caches
    table, starts = call.table.clip(0, len(key) - 1), np.arange(len(call.lengths) + 1)
    return pools.steps_of(key, value, table, call.lengths, starts)
