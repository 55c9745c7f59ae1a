"""The narrow engine: up to 8 query rows, over keys and values read in place in the cache.

    S = K Q^T                    [tokens, rows]
    O = O alpha + P V            [rows, dim]

Each number of rows and each format has its own machine code. Lanes are elements of a head. Rows that are no
whole vectors are widened first.
"""

import functools

import numpy as np

from kvkit.cpu.attention.engines import plain as plain_forms
from kvkit.cpu.attention.params import block_at, params_at, prefetched, step_code, tile_at, whole_tiles
from kvkit.cpu.simd import attention, chunks, panels, quarters
from kvkit.cpu.simd.chunks import NARROW
from kvkit.cpu.simd.lanes import LANES
from kvkit.formats.elements import BY_NAME


def in_place(scale_format, group, dims):
    """Return whether rows can be read in place: they are whole vectors, which groups of scales fit."""
    return all(dim % LANES == 0 for dim in dims) and (not scale_format or panels.lanes_divide(group))


@functools.cache
def orders(stored, scale_format, group, dim):
    """Return a table [rows, dim] of the order of a query's elements that scores of `rows` query rows need.

    Return None if that is always the natural order.
    """
    element = BY_NAME[stored]
    if not (scale_format or element.minifloat or element.block):
        return None
    table = np.zeros((NARROW + 1, dim), np.int64)
    for rows in (1, 2, 4, 8):
        table[rows] = chunks.query_order(rows, stored, scale_format, group, dim)
    return table


@functools.cache
def queries(rows, paired=False):
    """Compile the arrangement of queries that `scores_by_quarters` needs."""
    arrange = quarters.arrange_queries(rows, paired)

    def queries(params_address, block_address, tile_address):
        params, tile = params_at(params_address), tile_at(tile_address)
        arrange(tile.queries, params.keys.padded_dim)

    return step_code(queries, ("queries", rows, paired))


@functools.cache
def scores_by_quarters(rows, near, paired):
    """Compile S = K Q^T for 4 or 8 rows over float32, or if `paired` over bfloat16, and scale the scores."""
    multiply = quarters.scores(rows, near, paired)

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        multiply(
            queries=tile.queries, keys=tile.keys, key_row=block.key_row, row_ids=block.key_ids,
            ahead=prefetched(block.prefetch_in_scores, block, tile), count=whole_tiles(tile.count),
            dim=params.keys.padded_dim, factor=tile.factor, scores=tile.scores,
        )  # fmt: skip

    return step_code(scores, ("scores by quarters", rows, near, paired))


@functools.cache
def scores(
    rows, stored="float32", scale_format=None, group=0, exact=False, near=False, in_order=False, plain=False,
    paired=False,
):  # fmt: skip
    """Compile S = K Q^T for 1, 2, 4 or 8 rows of queries [dim / LANES, row, LANES], ordered (see `orders`).

    Token t is at keys + key_ids[t] * key_row. `near` and `in_order` are hints (see `narrow_scores`). The
    plain form takes queries [row, dim] in natural order. If `quarters.fits`, queries are arranged by
    `queries`.
    """
    if plain:
        return plain_forms.scores(rows, stored, scale_format, group, exact)
    if quarters.fits(rows, stored, paired):
        return scores_by_quarters(rows, near, paired)
    multiply = attention.narrow_scores(
        rows, stored, scale_format, group, (scale_format,) if exact else (), near=near, in_order=in_order
    )

    tokens = chunks.tile_tokens(rows)

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        multiply(
            queries=tile.queries, keys=tile.keys, key_row=block.key_row,
            scale_base=tile.key_scales, scale_row=params.keys.scale_row, row_ids=block.key_ids,
            ahead=prefetched(block.prefetch_in_scores, block, tile), shift=0,
            count=-(-tile.count // tokens) * tokens, dim=params.keys.padded_dim, scores=tile.scores,
        )  # fmt: skip

    return step_code(scores, ("scores", rows, stored, scale_format, group, exact, near, in_order))


@functools.cache
def sums(rows, stored="float32", scale_format=None, group=0, exact=False, near=False, plain=False):
    """Compile O = O alpha + P V for 1, 2, 4 or 8 rows."""
    if plain:
        return plain_forms.sums(rows, stored, scale_format, group, exact)
    multiply = attention.narrow_sums(
        rows, stored, scale_format, group, (scale_format,) if exact else (), near=near
    )

    def sums(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        multiply(
            weights=tile.scores, values=tile.values, value_row=block.value_row,
            scale_base=tile.value_scales, scale_row=params.values.scale_row, row_ids=block.value_ids,
            ahead=prefetched(block.prefetch_in_sums, block, tile), shift=block.prefetch_shift,
            count=tile.count, dim=params.values.padded_dim, sums=tile.o, factors=tile.alpha,
        )  # fmt: skip

    return step_code(sums, ("sums", rows, stored, scale_format, group, exact, near))


def engine(rows, stored, scales, exact, near, in_order, paired=False):
    """Return the engine over keys and values; `stored` are their formats, `scales` is (format, group).

    With `paired`, queries are bfloat16 too, and the processor multiplies pairs.
    """
    (key, value), by_quarters = stored, quarters.fits(rows, stored[0], paired)
    return {
        "queries": queries(rows, paired).address if by_quarters else 0,
        "scores": scores(rows, key, *scales, exact, near, in_order, paired=paired).address,
        "sums": sums(rows, value, *scales, exact, near).address,
        "scales_scores": by_quarters and paired,
    }
