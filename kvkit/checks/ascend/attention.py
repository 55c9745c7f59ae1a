"""Check a call of attention over a cache in blocks, with one query token per sequence."""

from kvkit.checks import attention, pools
from kvkit.checks.arguments import BlockAttention
from kvkit.checks.ascend import tensors
from kvkit.checks.attention import AttentionCall
from kvkit.checks.contexts import checked_contexts
from kvkit.checks.index_tensors import index_form
from kvkit.checks.paged import attention_to_pages
from kvkit.checks.records import NO_MASK, MaskPlace
from kvkit.checks.values import check_not_empty, checked_format, named_arrays
from kvkit.errors import argument_error
from kvkit.formats import FLOATS, MASKS
from kvkit.typed import Array


def checked_block_attention(call: BlockAttention) -> AttentionCall:
    """Check a call of `ascend.paged_attention`.

    A context is a sequence. In a compressed cache, whose rows have one head, it is one key head of a
    sequence, and attention takes queries and outputs folded to [contexts, heads of a context, dim].
    """
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
    size = tensors.same_blocks(views)  # blocks, rows of a block
    kv_heads = key_cache.shape[2]
    if value_cache.shape[2] != kv_heads:
        raise argument_error("value_cache", f"{kv_heads} heads, as key_cache", value_cache.shape[2])
    if key_cache.shape[3] != dim:
        raise argument_error("key_cache", f"the head size of query, {dim}", key_cache.shape[3])
    entries = len(index_form("context_lens", call.context_lens, 1))
    per_sequence = entries_of_a_sequence(entries, batch, heads, kv_heads)
    table = index_form("block_tables", call.block_tables, 2)
    contexts = checked_contexts(table, call.context_lens, None, *size, None)
    weights = attention.checked_weights(query, NO_MASK, call.scoring)._replace(sink_sequences=per_sequence)
    row_bias = None
    if razor_offset is not None:
        checked_format("razor_offset", razor_offset, FLOATS[:1], 2)
        if razor_offset.shape != size:
            raise argument_error("razor_offset", f"shape {size}", razor_offset.shape)
        contexts = contexts._replace(table=contexts.table.clip(0, size[0] - 1))  # the bias has all entries
        row_bias = razor_offset, contexts.table
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    inputs = named_arrays(query=query, **caches, razor_offset=razor_offset, sinks=call.scoring.sinks)
    results = attention.attention_results((batch, heads, value_cache.shape[3]), fmt, call.return_lse, inputs)
    context = pools.context_of(fmt, key_cache, value_cache)
    checked = attention_to_pages(fmt, query, context, key_cache, contexts, weights, results)
    return checked._replace(row_bias=row_bias)


def with_bias(weights: attention.Weights, bias: Array) -> attention.Weights:
    """Return weights that add a bias [entries, blocks, rows] to the scores, as a mask does."""
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


def folded_shape(call: AttentionCall) -> tuple[int, int]:
    """Return (number of contexts, query heads of a context)."""
    return len(call.steps.start_pos), call.query.shape[1] // call.weights.sink_sequences
