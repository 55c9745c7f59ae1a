"""The checked calls of the way back from blocks, and of copies of blocks."""

from typing import NamedTuple

import numpy as np

from kvkit import checks
from kvkit.checks import pools
from kvkit.checks.ascend import tensors
from kvkit.checks.index_tensors import index
from kvkit.checks.outputs import Results
from kvkit.checks.tensors import DATA, holdable, tensor, written
from kvkit.checks.values import text
from kvkit.errors import argument_error
from kvkit.formats import Element

RESULTS = "key", "value"


class Load(NamedTuple):
    """A checked call of `paged_cache_load`, but for its outputs."""

    inputs: list[tuple[str, np.ndarray]]
    caches: list[np.ndarray]  # [blocks, rows, heads or groups, dim]
    formats: list[Element]
    table: np.ndarray
    lengths: np.ndarray
    columns: np.ndarray  # of the table, where sequences begin
    tokens: int
    results: Results


def checked_load(key_cache, value_cache, block_tables, seq_lens, seq_starts, *, cache_format):
    """The checked call."""
    text("cache_format", cache_format, tensors.FORMATS)
    given = named(key_cache, value_cache)
    formats, views = zip(
        *(tensors.cache(name, a, cache_format, written=False) for name, a in given), strict=True
    )
    tensors.same_types(formats, cache_format)
    _, block_size = tensors.same_blocks([(name, v) for (name, _), v in zip(given, views, strict=True)])
    table = index("block_tables", block_tables, 2)
    lengths = context_lengths(seq_lens, len(table))
    columns = np.zeros(len(table), np.int64)
    if seq_starts is not None:
        starts = index("seq_starts", seq_starts, length=len(table))
        if len(starts) and starts.min() < 0:
            raise argument_error("seq_starts", "at least 0", starts.min())
        columns = np.minimum(starts // block_size, table.shape[1])  # what begins behind it stays there
    tokens = sum(lengths.tolist())
    shapes = [
        (tokens, v.shape[2] * v.shape[3]) if cache_format == "NZ" else (tokens, *v.shape[2:]) for v in views
    ]
    for shape, fmt in zip(shapes, formats, strict=True):
        holdable("seq_lens", shape, fmt)
    dtypes = [fmt.dtype for fmt in formats]
    results = Results(dict(zip(RESULTS, zip(shapes, dtypes, strict=True), strict=False)), given)
    return Load(given, list(views), list(formats), table, lengths, columns, tokens, results)


def named(key_cache, value_cache):
    """[(name, cache)] of keys and, if they are there, of values."""
    given = [("key_cache", key_cache), ("value_cache", value_cache)]
    return given if value_cache is not None else given[:1]


def pieces_of(call):
    """The pieces of a load; tokens of blocks that are not there have none."""
    blocks, block_size = call.caches[0].shape[:2]
    return checks.slots.table(call.table, call.lengths, call.columns, block_size, blocks)


def context_lengths(seq_lens, batch):
    """Lengths, from lengths or from their sums."""
    lengths = index("seq_lens", seq_lens)
    if len(lengths) == batch + 1:
        if lengths[0] != 0:
            raise argument_error(
                "seq_lens", f"{batch} lengths, or {batch + 1} sums from 0 on", f"{lengths[0]} first"
            )
        lengths = steps_up("seq_lens", lengths)[1:]
    if len(lengths) != batch:
        raise argument_error(
            "seq_lens", f"{batch} lengths, or {batch + 1} sums from 0 on", f"{len(lengths)} entries"
        )
    if batch and lengths.min() < 0:
        raise argument_error("seq_lens", "no length below 0", lengths.min())
    return lengths


def steps_up(name, sums):
    """How much sums grow, the first from 0 on."""
    before = np.append(0, sums[:-1])[: len(sums)]
    down = np.flatnonzero(sums < before)  # compared, for a difference may wrap
    if len(down):
        raise argument_error(
            f"{name}[{down[0]}]", f"at least {before[down[0]]}: sums that never decrease", sums[down[0]]
        )
    return sums - before


def checked_copy(given, src, dst, cum_sum):
    """(source, destination) of every block that is written."""
    for name, array in given:
        tensor(name, array, DATA, max(getattr(array, "ndim", 1), 1))
        written(name, array)
    tensors.caches_apart(given)
    blocks = len(given[0][1])
    if len(given[-1][1]) != blocks:
        raise argument_error("value_cache", f"{blocks} blocks, as key_cache", len(given[-1][1]))
    src, dst = index("src", src), index("dst", dst)
    ends = index("cum_sum", cum_sum, length=len(src))
    counts = steps_up("cum_sum", ends)
    if (ends[-1] if len(ends) else 0) != len(dst):
        raise argument_error(
            "cum_sum", f"to end with {len(dst)}, the destinations", ends[-1] if len(ends) else "nothing"
        )
    pools.blocks_within("src", src, blocks)
    pools.blocks_within("dst", dst, blocks)
    pools.copied_once("dst", src, dst, within=True)
    return np.repeat(src, counts), dst
