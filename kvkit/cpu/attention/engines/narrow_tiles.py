"""The narrow engine on processors with tiles (AMX): 8 or 16 query rows, over float16 only 16.

    S = scale K Q^T                    [tokens, rows], queries [dim / 2, rows, 2]
    P = exp(S - m), O = O alpha + P V  [rows, dim]

Tiles of keys of bfloat16 are loaded from the cache where the rows of 16 tokens have one stride; others, as of
short pages and at the end of a context, are copied first. Rows of float16 are split into two terms of
bfloat16, and numbers of 8 bits become bfloat16, so all are copied. So no byte is read that is not in a row of
the context. One scale a row of numbers of 8 bits is multiplied into the scores of a key, or into the weights
of a value before they are rounded.
"""

import functools

from kvkit.cpu.attention.engines.load import widen_rows
from kvkit.cpu.attention.engines.nan_safe import nan_safe_scores
from kvkit.cpu.attention.params import WIDE_BLOCK, block_at, params_at, prefetched, step_code, tile_at
from kvkit.cpu.simd import narrow_tiles
from kvkit.cpu.simd.attention import LANES, scale_by
from kvkit.cpu.simd.tile_products import BFLOAT16, FLOAT16, STEP

EIGHT_BITS = "e4m3", "e5m2", "int8"
CHUNK = 4096  # values that are interleaved, then multiplied, at a time: they stay in the L1 cache


def tile_rows(terms):
    """Return the query rows of tiles: pairs read bfloat16 as fast with 4, floats float16 faster with 8."""
    codes = terms.element == "int8" and terms.scaled  # which integers multiply as fast
    return (16,) if terms == FLOAT16 or codes else (8, 16)


@functools.cache
def open_and_pair(rows, in_memory, terms):
    """Compile the conversion of queries to pairs of bfloat16; it opens the thread's tiles."""
    kernels = narrow_tiles.kernels(rows, in_memory, terms)
    open_tiles, pair = kernels.open, kernels.pair_queries

    def queries(params_address, block_address, tile_address):
        params, tile = params_at(params_address), tile_at(tile_address)
        if not tile.index:
            open_tiles()
        pair(tile.queries, params.keys.padded_dim, tile.engine_queries)

    return step_code(queries, ("queries", rows, in_memory, terms), in_memory=in_memory)


@functools.cache
def scores(rows, in_memory, terms):
    """Compile S = scale K Q^T."""
    kernels = narrow_tiles.kernels(rows, in_memory, terms)
    multiply, open_tiles, close_tiles = kernels.scores, kernels.open, kernels.close
    read_scales = kernels.read_scales
    by_floats = terms.queries > 1 or terms.scaled

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        # With a second term, or times a scale, infinity makes NaN, which its score need not be.
        if block.nan_safe and by_floats:
            lines, panel, dim = block.workspace + params.workspace.lines, 4 * LANES, params.keys.padded_dim
            for r in range(rows):
                for i in range(dim // LANES):
                    query = tile.queries + panel * (i * rows + r)
                    scale_by(query, lines + 4 * r * dim + panel * i, LANES, tile.factor)
            widen_rows(params, params.keys, block, tile.head, block.key_row_ids, block.wide_keys)
            nan_safe_scores(params, block, tile, lines)
            return
        if block.nan_safe:  # a work item runs again after its end
            open_tiles()
        factors = block.wide_keys + 2 * WIDE_BLOCK * params.keys.padded_dim  # after the copies of keys
        read_scales(
            scales=tile.key_scales, scale_row=params.keys.scale_row, scale_format=params.scale_format,
            row_ids=block.key_ids, count=tile.count, target=factors,
        )  # fmt: skip
        multiply(
            queries=tile.engine_queries, keys=tile.keys, key_row=block.key_row, step=params.keys.step,
            row_ids=block.key_ids, ahead=prefetched(block.prefetch_in_scores, block, tile),
            count=tile.count, dim=params.keys.padded_dim,
            space=block.wide_keys, scale=tile.factor, factors=factors, target=tile.scores,
        )  # fmt: skip
        if block.nan_safe:
            close_tiles()

    return step_code(scores, ("scores", rows, in_memory, terms), in_memory=in_memory)


@functools.cache
def sums(rows, in_memory, terms):
    """Compile the softmax and O = O alpha + P V."""
    kernels = narrow_tiles.kernels(rows, in_memory, terms)
    softmax, interleave, add = kernels.softmax, kernels.pair_values, kernels.sums
    read_scales = kernels.read_scales
    each = narrow_tiles.element_bytes(terms)

    def sums(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        weights, dim = block.workspace + params.workspace.lines, params.values.padded_dim
        keys, own = prefetched(block.prefetch_in_scores, block, tile), each * dim * block.values_in_keys
        factors = block.wide_keys + 2 * WIDE_BLOCK * params.keys.padded_dim
        read_scales(
            scales=tile.value_scales, scale_row=params.values.scale_row, scale_format=params.scale_format,
            row_ids=block.value_ids, count=tile.count, target=factors,
        )  # fmt: skip
        softmax(
            scores=tile.scores, count=tile.count, m_at=tile.m, l_at=tile.l, sums=tile.o, dim=dim,
            target=weights, factors=factors, ahead=keys, shift=own, size=each * params.keys.padded_dim - own,
        )  # fmt: skip
        values, most = prefetched(block.prefetch_in_sums, block, tile), CHUNK // STEP
        tokens = STEP
        if dim > most:  # long rows: few elements of many tokens, so that O is read and written once
            tokens, most = 2 * STEP, most // 2
        begin = 0
        while begin < tile.count:
            count, first = min(tile.count - begin, tokens), 0
            while first < dim:
                size, shift = min(dim - first, most), block.prefetch_shift + each * first
                interleave(
                    values=tile.values + each * first, value_row=block.value_row,
                    row_ids=block.value_ids + 8 * begin, ahead=values + 8 * begin, shift=shift, count=count,
                    dim=size, target=block.wide_values,
                )  # fmt: skip
                add(
                    weights=weights + 2 * terms.queries * rows * begin, count=count,
                    pairs=block.wide_values, dim=size, target=tile.o + 4 * first, row=4 * dim,
                    ahead=0 if own else values + 8 * begin, shift=shift,
                )  # fmt: skip
                first += size
            begin += tokens

    return step_code(sums, ("sums", rows, in_memory, terms), in_memory=in_memory)


@functools.cache
def finish(rows, in_memory):
    """Compile the end of a work item, where the thread's tiles are released."""
    close_tiles = narrow_tiles.kernels(rows, in_memory, BFLOAT16).close

    def finish(params_address, block_address, _):
        close_tiles()

    return step_code(finish, ("finish", rows, in_memory), in_memory=in_memory)


def engine(rows, in_memory, terms):
    """Return the engine of tiles of 8 or 16 query rows, by the processor's instructions or `in_memory`."""
    query_terms = BFLOAT16._replace(rows=terms.rows, queries=terms.queries)  # whatever the cache's elements
    steps = {
        "queries": open_and_pair(rows, in_memory, query_terms), "scores": scores(rows, in_memory, terms),
        "sums": sums(rows, in_memory, terms), "finish": finish(rows, in_memory),
    }  # fmt: skip
    codes = {name: step.address for name, step in steps.items()}
    return codes | {"softmax": True, "scales_scores": True, "interleaves": terms.rows == 1}
