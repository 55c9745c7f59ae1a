"""Check calls that load contexts from blocks, and calls that copy blocks."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvkit import checks
from kvkit.checks import pools
from kvkit.checks.arguments import BlockLoad
from kvkit.checks.ascend import tensors
from kvkit.checks.index_tensors import index
from kvkit.checks.outputs import Results
from kvkit.checks.values import DATA, NamedArrays, check_size, check_writeable, checked_format, text
from kvkit.errors import argument_error
from kvkit.formats import Element
from kvkit.typed import Array

RESULTS = "key", "value"


class LoadCall(NamedTuple):
    """A checked call of `paged_cache_load`, but for its outputs."""

    inputs: NamedArrays
    caches: list[Array]  # [blocks, rows, heads or groups, dim]
    formats: list[Element]
    table: Array
    lengths: Array
    columns: Array  # the column of the table that each sequence begins in
    tokens: int  # of all sequences
    results: Results


def checked_load(call: BlockLoad) -> LoadCall:
    """Check a call of `ascend.paged_cache_load`."""
    cache_format = text("cache_format", call.cache_format, tensors.FORMATS)
    given = named_caches(call.key_cache, call.value_cache)
    formats, views = zip(
        *(tensors.cache_in_blocks(name, a, cache_format, written=False) for name, a in given), strict=True
    )
    tensors.same_types(formats, cache_format, [name for name, _ in given])
    _, block_size = tensors.same_blocks([(name, v) for (name, _), v in zip(given, views, strict=True)])
    table = index("block_tables", call.block_tables, 2)
    lengths = context_lengths(call.seq_lens, len(table))
    columns = np.zeros(len(table), np.int64)
    if call.seq_starts is not None:
        starts = index("seq_starts", call.seq_starts, length=len(table))
        if len(starts) and starts.min() < 0:
            raise argument_error("seq_starts", "at least 0", starts.min())
        columns = np.minimum(starts // block_size, table.shape[1])  # a start beyond the table finds no block
    tokens = sum(lengths.tolist())
    shapes = [
        (tokens, v.shape[2] * v.shape[3]) if cache_format == "NZ" else (tokens, *v.shape[2:]) for v in views
    ]
    for shape, fmt in zip(shapes, formats, strict=True):
        check_size("seq_lens", shape, fmt)
    dtypes = [fmt.dtype for fmt in formats]
    forms = zip(shapes, dtypes, strict=True)  # of keys, and of values if there are any
    results = Results(dict(zip(RESULTS, forms, strict=False)), given)
    return LoadCall(given, list(views), list(formats), table, lengths, columns, tokens, results=results)


def named_caches(key_cache: Array, value_cache: Array | None) -> list[tuple[str, Array]]:
    """Return (name, array) of the cache of keys and, if there is one, of the cache of values."""
    keys = [("key_cache", key_cache)]
    return keys if value_cache is None else [*keys, ("value_cache", value_cache)]


def pieces_of(call: LoadCall) -> Array:
    """Return the pieces of a load; tokens whose block does not exist have none."""
    blocks, block_size = call.caches[0].shape[:2]
    return checks.slots.table_pieces(call.table, call.lengths, call.columns, block_size, blocks)


def context_lengths(seq_lens: ArrayLike, batch: int) -> Array:
    """Return the lengths of sequences, given as lengths or as prefix sums."""
    lengths, wanted = index("seq_lens", seq_lens), f"{batch} lengths, or {batch + 1} sums from 0 on"
    if len(lengths) == batch + 1:
        if lengths[0] != 0:
            raise argument_error("seq_lens", wanted, f"{lengths[0]} first")
        lengths = differences("seq_lens", lengths)[1:]
    if len(lengths) != batch:
        raise argument_error("seq_lens", wanted, f"{len(lengths)} entries")
    if batch and lengths.min() < 0:
        raise argument_error("seq_lens", "no length below 0", lengths.min())
    return lengths


def differences(name: str, sums: Array) -> Array:
    """Return the differences of successive sums, the first one from 0."""
    before = np.append(0, sums[:-1])[: len(sums)]
    falls = np.flatnonzero(sums < before)  # comparisons, because a difference may overflow
    if len(falls):
        wanted = f"at least {before[falls[0]]}: sums that never decrease"
        raise argument_error(f"{name}[{falls[0]}]", wanted, sums[falls[0]])
    counts: Array = sums - before
    return counts


def checked_copy(
    key_cache: Array, value_cache: Array | None, src: ArrayLike, dst: ArrayLike, cum_sum: ArrayLike
) -> pools.BlockCopy:
    """Check a call of `ascend.block_copy`."""
    given = named_caches(key_cache, value_cache)
    for name, array in given:
        checked_format(name, array, DATA, max(getattr(array, "ndim", 1), 1))
        check_writeable(name, array)
    tensors.caches_apart(given)
    blocks = len(given[0][1])
    if len(given[-1][1]) != blocks:
        raise argument_error("value_cache", f"{blocks} blocks, as key_cache", len(given[-1][1]))
    sources, targets = index("src", src), index("dst", dst)
    ends = index("cum_sum", cum_sum, length=len(sources))
    counts = differences("cum_sum", ends)
    if (ends[-1] if len(ends) else 0) != len(targets):
        got = ends[-1] if len(ends) else "nothing"
        raise argument_error("cum_sum", f"to end with {len(targets)}, the destinations", got)
    pools.blocks_within("src", sources, blocks)
    pools.blocks_within("dst", targets, blocks)
    pools.copied_once("dst", sources, targets, one_cache=True)
    return pools.BlockCopy([(cache, cache) for _, cache in given], np.repeat(sources, counts), targets)
