"""Check calls on latent caches (MLA). A row of a pool is a key, and its first elements are the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import ArrayLike

from kvkit.checks.arguments import LatentAppend, LatentArguments, Scoring
from kvkit.checks.attention import AttentionCall, attention_results, check_sinks, checked_weights
from kvkit.checks.contexts import Contexts, checked_contexts
from kvkit.checks.index_tensors import index
from kvkit.checks.outputs import Results
from kvkit.checks.paged import attention_to_pages
from kvkit.checks.pools import AXES, context_of, pool_view
from kvkit.checks.records import NO_MASK
from kvkit.checks.values import (
    check_apart,
    check_not_empty,
    check_writeable,
    checked_format,
    flag,
    integer,
    named_arrays,
    one_piece,
    positive_number,
)
from kvkit.errors import KvkitError, argument_error, describe
from kvkit.formats import BY_DTYPE, FLOATS, Element
from kvkit.formats.elements import E4M3
from kvkit.formats.known import Format, named
from kvkit.formats.packing import bytes_of_row, count_elements
from kvkit.interop import refuse_masked
from kvkit.layouts.tables import starts_of
from kvkit.typed import Array

CODED = "ds_mla", "ds_v4"  # formats whose rows are bytes
BYTE_DTYPES = np.dtype(np.uint8), np.dtype(np.int8), E4M3.dtype  # the dtypes that bytes may have
DS_MLA_ROW = 656  # bytes of a token of ds_mla: 512 codes, 4 scales of 4 bytes, 64 rotary elements of 2 bytes
DS_V4_CODES = 448  # codes of a token of ds_v4
DS_V4_BODY = DS_V4_CODES + 128  # its bytes without scales: codes, and 64 rotary elements of 2 bytes
DS_V4_ROW = DS_V4_BODY + 8  # all its bytes: 7 scales of a byte, and a byte of padding
DS_V4 = named("ds_v4")


@dataclass(frozen=True)
class LatentPool:
    """The rows of a latent cache, which may lie in several arrays.

    Attributes
    ----------
    parts : tuple of ndarray, each [blocks, page_size, width] or [blocks, page_size, heads, width]
        A row is the last axes of all parts, one after the other: numbers, or the bytes of a format.
    format : Format or None
        The format of bytes; None for floats.
    dim : int
        The number of elements of a row.
    """

    parts: tuple[Array, ...]
    format: Format | None
    dim: int

    @property
    def rows(self) -> Array:
        """Return the first part, or the only one, as [blocks, page_size, heads, width]."""
        part = self.parts[0]
        return part if part.ndim == 4 else part[:, :, None]

    @property
    def heads(self) -> int:
        """Return the number of heads of a row, each of which is a key and a value."""
        return int(self.rows.shape[2])

    @property
    def page_size(self) -> int:
        """Return the number of tokens of a block."""
        return int(self.parts[0].shape[1])

    @property
    def slots(self) -> int:
        """Return the number of rows of the pool."""
        return len(self.parts[0]) * self.page_size

    def zeros_for(self, shape: tuple[int, ...], line: str) -> str:
        """Return the end of a message that says by which line rows without a rope fit a format."""
        tail = 0 if self.format is None else self.format.tail
        if not tail or shape[-1] != self.dim - tail:
            return ""
        return f" (without a rope: {line.format(f'np.zeros({(*shape[:-1], tail)}')})"


class LatentRows(NamedTuple):
    """Chosen rows of a pool: query i attends to slots[starts[i]:starts[i + 1]]."""

    pool: LatentPool
    slots: Array
    starts: Array


class LatentCall(NamedTuple):
    """A checked call of attention over latent rows: over contexts, or over chosen rows."""

    fmt: Element
    query: Array  # [tokens, heads, dim]
    pool: LatentPool
    contexts: Contexts | None
    chosen: list[LatentRows]
    value_dim: int
    softmax_scale: float
    causal: bool
    sinks: Array | None
    sinks_last: bool  # whether sinks scale the output at the end, because the lse leaves them out
    attention: AttentionCall | None  # reads the rows in place, if it can; without sinks if `sinks_last`
    results: Results


def checked_latent_attention(call: LatentArguments) -> LatentCall:
    """Check a call of `mla_attention`."""
    pool = checked_latent_pool("latent", call.latent, call.rope_cache, call.format)
    query = checked_query(call.query, pool)
    value_dim = integer("value_dim", call.value_dim, 1, pool.dim)
    softmax_scale = positive_number("softmax_scale", call.softmax_scale)
    causal, heads, sinks = flag("is_causal", call.is_causal), query.shape[1], call.sinks
    if sinks is not None:
        check_sinks(sinks, heads)
    sinks_last = not flag("lse_of_sinks", call.lse_of_sinks) and sinks is not None
    fmt = checked_format("query", query, FLOATS, 3)
    queries = {"query": query}
    if query is not call.query:  # it was joined from the caller's pair
        queries = {f"query[{i}]": part for i, part in enumerate(call.query)}
    inputs = named_arrays(**queries, latent=call.latent, rope_cache=call.rope_cache, sinks=sinks)
    results = attention_results((*query.shape[:2], value_dim), fmt, call.return_lse, inputs)
    contexts, chosen = None, chosen_rows(call, pool, len(query))
    if not chosen:
        tables = call.block_tables, call.context_lens, call.query_starts
        contexts = checked_contexts(*tables, len(pool.parts[0]), pool.page_size, len(query))
    checked = LatentCall(
        fmt, query, pool, contexts, chosen, value_dim=value_dim, softmax_scale=softmax_scale,
        causal=causal, sinks=sinks, sinks_last=sinks_last, attention=None, results=results,
    )  # fmt: skip
    if contexts is None or pool.format is not None or len(pool.parts) > 1:
        return checked
    rows = pool_view("latent", pool.rows, AXES, FLOATS)
    return checked._replace(attention=attention_to_rows(checked, query, rows, contexts))


def attention_to_rows(
    call: LatentCall, query: Array, rows: Array, contexts: Contexts, causal: bool | None = None
) -> AttentionCall:
    """Return attention to rows [blocks, page_size, heads, elements] in pages, read in place.

    With `causal`, rows are a part of the contexts. Attention to a part, or for an lse that leaves sinks out,
    has no sinks and returns its lse.
    """
    fmt, (tokens, heads, _) = BY_DTYPE[query.dtype], query.shape
    is_part = causal is not None or call.sinks_last
    value = rows if rows.dtype == E4M3.dtype else rows[..., : call.value_dim]  # coded rows are read whole
    scoring = Scoring(is_causal=call.causal if causal is None else causal, softmax_scale=call.softmax_scale)
    results = call.results
    if is_part:
        results = attention_results((tokens, heads, call.value_dim), fmt, True, ())
    else:
        scoring = scoring._replace(sinks=call.sinks)
    context, query = context_of(fmt, rows, value), one_piece(query)
    weights = checked_weights(query, NO_MASK, scoring)
    return attention_to_pages(fmt, query, context, rows, contexts, weights, results)


def chosen_rows(call: LatentArguments, pool: LatentPool, tokens: int) -> list[LatentRows]:
    """Return the chosen rows of one pool or two; [] if attention is over contexts."""
    if call.indices is None:
        if call.block_tables is None or call.context_lens is None:
            missing = "block_tables" if call.block_tables is None else "context_lens"
            raise argument_error(missing, "an array, or indices instead of contexts", "None")
        for name, given in (("index_lens", call.index_lens), ("extra", call.extra)):
            if given is not None:
                raise argument_error(name, "None, without indices", describe(given))
        return []
    for name in ("block_tables", "context_lens", "query_starts"):
        if getattr(call, name) is not None:
            raise argument_error(name, "None beside indices", describe(getattr(call, name)))
    names = "indices", "index_lens"
    chosen = [LatentRows(pool, *checked_indices(names, call.indices, call.index_lens, tokens, pool.slots))]
    return chosen if call.extra is None else [*chosen, extra_rows(call.extra, pool, tokens)]


def extra_rows(extra: Any, pool: LatentPool, tokens: int) -> LatentRows:
    """Check the second pool of a call; return it with its chosen rows."""
    if not isinstance(extra, (tuple, list)) or len(extra) != 3:
        raise argument_error("extra", "(latent, indices, index_lens)", describe(extra))
    latent, indices, lengths = extra
    second = checked_latent_pool("extra[0]", latent, None, None if pool.format is None else pool.format.name)
    if (second.heads, second.dim) != (pool.heads, pool.dim):
        wanted = f"rows of {pool.heads} x {pool.dim} elements, as latent has"
        raise argument_error("extra[0]", wanted, f"{second.heads} x {second.dim}")
    chosen = checked_indices(("extra[1]", "extra[2]"), indices, lengths, tokens, second.slots)
    return LatentRows(second, *chosen)


def checked_latent_pool(name: str, latent: Any, rope_cache: Any, format: str | None) -> LatentPool:
    """Return the pool of a latent cache: floats, floats with rotary parts in `rope_cache`, or bytes."""
    if format is None:
        parts = [float_part(name, latent)]
        if rope_cache is not None:
            parts.append(float_part("rope_cache", rope_cache))
            if parts[1].shape[:-1] != parts[0].shape[:-1] or parts[1].dtype != parts[0].dtype:
                wanted = f"{parts[0].shape[:-1]} rows of {parts[0].dtype}, as {name}"
                raise argument_error("rope_cache", wanted, describe(rope_cache))
        return LatentPool(tuple(parts), None, sum(part.shape[-1] for part in parts))
    known = named(format)
    if known.name.partition(":")[0] not in CODED:
        raise argument_error("format", f"None, {' or '.join(CODED)}", repr(format))
    if rope_cache is not None:
        raise argument_error("rope_cache", f"None, for {known}, whose rows have it", describe(rope_cache))
    refuse_masked(name, latent)
    is_bytes = isinstance(latent, np.ndarray) and latent.dtype in BYTE_DTYPES and latent.ndim > 1
    if not is_bytes or (latent.size and latent.strides[-1] != 1):
        raise argument_error(name, f"an array of bytes, for {known}", describe(latent))
    rows = latent.view(np.uint8)
    if known.name.partition(":")[0] == "ds_v4":
        return LatentPool(ds_v4_parts(name, whole_blocks(name, rows)), known, DS_V4_CODES + known.tail)
    rows = without_head(name, rows)
    try:
        coded = count_elements(known, rows.shape[2])
    except KvkitError:
        wanted = f"rows of {DS_MLA_ROW} bytes, for {known}"
        raise argument_error(name, wanted, bytes_of_row(rows.shape[2], known)) from None
    return LatentPool((rows,), known, coded + known.tail)


def float_part(name: str, array: Any) -> Array:
    """Return a checked pool of floats [blocks, page_size, width], with several heads [.., heads, width]."""
    has_heads = isinstance(array, np.ndarray) and array.ndim == 4 and array.shape[1] and array.shape[2] > 1
    rows: Array = array if has_heads else without_head(name, array)
    checked_format(name, rows, FLOATS, rows.ndim)
    return rows


def without_head(name: str, array: Any) -> Array:
    """Return a pool as [blocks, page_size, width]; an axis of one head is removed."""
    if isinstance(array, np.ndarray) and array.ndim == 4 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not isinstance(array, np.ndarray) or array.ndim != 3 or not array.shape[1]:
        wanted = "a pool [blocks, page_size, width], perhaps with an axis of one head"
        raise argument_error(name, wanted, describe(array))
    pool: Array = array
    return pool


def whole_blocks(name: str, rows: Array) -> Array:
    """View FlashMLA's [blocks, tokens, 584], perhaps with an axis of one head, as [blocks, bytes].

    Its axes only count bytes: a block has the bodies of all tokens, then their scales. Blocks may be padded.
    """
    if rows.ndim == 2:
        return rows
    rows = without_head(name, rows)
    blocks, tokens, width = rows.shape
    if width != DS_V4_ROW or (tokens > 1 and rows.strides[1] != DS_V4_ROW):
        wanted = f"[blocks, bytes], or tokens of {DS_V4_ROW} bytes one behind the other in each block"
        found = f"{bytes_of_row(width, DS_V4)} in {describe(rows)} with strides {rows.strides}"
        raise argument_error(name, wanted, found)
    strides = rows.strides[0], 1
    return as_strided(rows, (blocks, tokens * width), strides, writeable=rows.flags.writeable)


def ds_v4_parts(name: str, blocks: Array) -> tuple[Array, Array]:
    """Return views of codes [blocks, tokens, 576] and scales [blocks, tokens, 8] in blocks of bytes.

    block    body 0 | body 1 | ... | scales 0 | scales 1 | ... | padding
    body     448 codes, then 64 rotary elements in bfloat16
    """
    page_size = blocks.shape[-1] // DS_V4_ROW
    if blocks.ndim != 2 or not page_size:
        raise argument_error(name, f"[blocks, bytes] of {DS_V4_ROW} bytes a token or more", describe(blocks))
    bodies, scales, _ = np.split(blocks, [DS_V4_BODY * page_size, DS_V4_ROW * page_size], axis=1)
    shape = len(blocks), page_size
    return bodies.reshape(*shape, DS_V4_BODY), scales.reshape(*shape, DS_V4_ROW - DS_V4_BODY)


def ds_v4_blocks(name: str, rows: Array) -> Array:
    """Return rows [blocks, tokens, 584] as blocks [blocks, bytes], padded to a multiple of 576 bytes."""
    if rows.ndim != 3 or rows.shape[2] != DS_V4_ROW or rows.dtype not in BYTE_DTYPES:
        raise argument_error(name, f"rows of {DS_V4_ROW} bytes (format ds_v4)", describe(rows))
    size = -(-rows.shape[1] * DS_V4_ROW // DS_V4_BODY) * DS_V4_BODY
    blocks = np.zeros((len(rows), size), np.uint8)
    bodies, scales = ds_v4_parts(name, blocks)
    bodies[...], scales[...] = np.split(rows.view(np.uint8), [DS_V4_BODY], axis=2)
    return blocks


def checked_query(query: Any, pool: LatentPool) -> Array:
    """Return queries [tokens, heads, dim]; a pair of latent and rotary parts is joined."""
    if isinstance(query, (tuple, list)):
        if len(query) != 2:
            raise argument_error("query", "an array, or a pair (latent part, rotary part)", describe(query))
        for i, part in enumerate(query):
            checked_format(f"query[{i}]", part, FLOATS, 3)
        if query[0].shape[:2] != query[1].shape[:2] or query[0].dtype != query[1].dtype:
            raise argument_error("query[1]", "the tokens, heads and dtype of query[0]", describe(query[1]))
        sizes, wanted = ([part.shape[-1] for part in parts] for parts in (query, pool.parts))
        if pool.format is None and len(pool.parts) == 2 and sizes != wanted:
            raise argument_error("query", f"parts of {wanted} elements, as latent and rope_cache", sizes)
        query = np.concatenate(query, axis=2)
    checked_format("query", query, FLOATS, 3)
    if query.shape[2] != pool.dim:
        line = pool.zeros_for(query.shape, "query=(query, {}, query.dtype))")
        raise argument_error("query", f"rows of {pool.dim} elements, as latent has{line}", query.shape[2])
    if query.shape[1] % pool.heads:
        raise argument_error("query", f"a multiple of {pool.heads} heads, as latent has", query.shape[1])
    check_not_empty("query", query)
    joined: Array = query
    return joined


def checked_indices(
    names: tuple[str, str], indices: ArrayLike, lengths: ArrayLike | None, tokens: int, slots: int
) -> tuple[Array, Array]:
    """Return the slots of chosen rows, and indptr: query i has slots[indptr[i]:indptr[i + 1]].

    Indices below 0 or after the last slot are left out. Only the first `lengths[i]` indices of a query count.
    """
    chosen = index(names[0], indices, 2, tokens)
    valid = (chosen >= 0) & (chosen < slots)
    if lengths is not None:
        counts = index(names[1], lengths, 1, tokens)
        valid &= np.arange(chosen.shape[1]) < counts[:, None]
    return chosen[valid], starts_of(valid.sum(axis=1))


class LatentStore(NamedTuple):
    """A checked call of `mla_append`: rows [tokens, dim] to store, and their slots."""

    pool: LatentPool
    rows: Array
    slots: Array


def checked_latent_append(call: LatentAppend) -> LatentStore:
    """Check a call of `mla_append`."""
    pool = checked_latent_pool("cache", call.cache, call.rope_cache, call.format)
    if pool.heads > 1:
        raise argument_error("cache", "rows of one head", describe(call.cache))
    latent, rope = call.latent, call.rope
    fmt = checked_format("latent", latent, FLOATS, 2)
    if rope is None:
        wanted = f"an array of {fmt}" + pool.zeros_for(latent.shape, "rope={}, latent.dtype)")
        raise argument_error("rope", wanted, "None")
    if checked_format("rope", rope, FLOATS, 2) is not fmt or len(rope) != len(latent):
        raise argument_error("rope", f"{len(latent)} rows of {fmt}, as latent has", describe(rope))
    rows = np.concatenate((latent, rope), axis=1)
    if rows.shape[1] != pool.dim:
        wanted = f"{pool.dim} elements with those of rope, as a row of cache"
        wanted += pool.zeros_for(rows.shape, "rope={}, latent.dtype)")
        raise argument_error("latent", wanted, rows.shape[1])
    if pool.format is None and pool.parts[0].dtype != fmt.dtype:
        raise argument_error("cache", f"the dtype of latent, {fmt}", pool.parts[0].dtype)
    pools = named_arrays(cache=call.cache, rope_cache=call.rope_cache)
    for name, array in pools:
        check_writeable(name, array)
    for i, (name, array) in enumerate(pools):
        check_apart(name, array, [*pools[i + 1 :], ("latent", latent), ("rope", rope)])
    slots = index("slot_mapping", call.slot_mapping, 1, len(rows))
    stored = slots >= 0
    if (slots >= pool.slots).any():
        raise argument_error("slot_mapping", f"slots below {pool.slots}", int(slots.max()))
    if len(np.unique(slots[stored])) < stored.sum():
        used, times = np.unique(slots[stored], return_counts=True)
        raise argument_error("slot_mapping", "each slot once", f"slot {used[times > 1][0]} twice")
    return LatentStore(pool, rows[stored], slots[stored])


class HeadProduct(NamedTuple):
    """A checked product of rows [tokens, heads, n] with a matrix for each head."""

    rows: Array
    weight: Array  # [heads, n, result] or [heads, result, n]
    axis: int  # the axis of `weight` that has n elements, 1 or 2
    results: Results


def checked_product(names: tuple[str, str, str], rows: Array, weight: Array, axis: int) -> HeadProduct:
    """Check a product of each head's rows with its matrix; `names` are those of rows, weights and product."""
    fmt = checked_format(names[0], rows, FLOATS, 3)
    if checked_format(names[1], weight, FLOATS, 3) is not fmt:
        raise argument_error(names[1], f"the dtype of {names[0]}, {fmt}", weight.dtype)
    if (weight.shape[0], weight.shape[axis]) != rows.shape[1:]:
        wanted = "the heads {} and {} elements of {}".format(*rows.shape[1:], names[0])
        raise argument_error(names[1], wanted, f"shape {weight.shape}")
    forms = {names[2]: ((*rows.shape[:2], weight.shape[3 - axis]), fmt.dtype)}
    inputs = list(zip(names[:2], (rows, weight), strict=True))
    return HeadProduct(rows, weight, axis, Results(forms, inputs, alone=True))


def checked_absorb(query: Array, w_uk: Array) -> HeadProduct:
    """Check a call of `mla_absorb`."""
    return checked_product(("query", "w_uk", "latent_query"), query, w_uk, 1)


def checked_expand(latent_output: Array, w_uv: Array) -> HeadProduct:
    """Check a call of `mla_expand`."""
    return checked_product(("latent_output", "w_uv", "head_output"), latent_output, w_uv, 2)
