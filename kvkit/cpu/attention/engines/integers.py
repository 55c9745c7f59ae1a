"""The narrow integer engine: up to 8 query rows over int8, int4, q8_0, q4_0 codes (AVX-512 VNNI).

S = K Q^T                          [tokens, rows], queries as fixed point of 16 bits
P = exp(S - m), O = O alpha + P V  [rows, dim], P as fixed point of 16 bits
"""

import functools

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.online_softmax import fill_vector
from kvkit.cpu.attention.params import block_at, params_at, prefetched, step_code, tile_at, whole_tiles
from kvkit.cpu.simd import integers
from kvkit.formats.elements import BY_NAME

WIDTHS = 128, 64  # elements of a row that are multiplied at a time
STORED = {"int8": WIDTHS, "int4": WIDTHS[:1], "q8_0": WIDTHS, "q4_0": WIDTHS[:1]}  # legal widths by format

get_float = memory.load(types.float32)


def width(stored, scale_format, group, dims):
    """Return how many elements integer products multiply at a time; None if they do not fit these codes."""
    in_blocks = stored in STORED and BY_NAME[stored].block is not None  # which contain their scales
    if stored not in STORED or in_blocks != (scale_format is None):
        return None
    group = group or 8  # blocks have no group here, and theirs divides every width
    fit = (
        width
        for width in STORED[stored]
        if not any(dim % width for dim in dims)
        and group % 8 == 0
        and (width % group == 0 or group % width == 0)
    )
    return next(fit, None)


@functools.cache
def queries(rows, *form):
    """Compile the conversion of queries [rows, dim] to fixed point.

    The result has at most (5 * dim + 64) * rows bytes. `form` describes the codes: (stored, scale_format,
    group, width).
    """
    fixed, scratch = (
        integers.compile_fixed_queries(rows, *form),
        memory.scratch(integers.PARTS * rows * form[-1]),
    )

    def queries(params_address, block_address, tile_address):
        params, tile = params_at(params_address), tile_at(tile_address)
        fixed(tile.queries, params.keys.padded_dim, tile.engine_queries, scratch())

    return step_code(queries, ("queries", rows, *form))


@functools.cache
def scores(rows, near, *form):
    """Compile S = K Q^T over fixed-point queries; `near` prefetches into the L1 cache."""
    multiply = integers.compile_scores(rows, near, *form)

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        multiply(
            queries=tile.engine_queries, keys=tile.keys, key_row=block.key_row,
            scale_base=tile.key_scales, scale_row=params.keys.scale_row, row_ids=block.key_ids,
            ahead=prefetched(block.prefetch_in_scores, block, tile), shift=0,
            count=whole_tiles(tile.count), dim=params.keys.padded_dim, scores=tile.scores,
        )  # fmt: skip

    return step_code(scores, ("scores", rows, near, *form))


@functools.cache
def sums(rows, near, *form):
    """Compile the softmax and O = O alpha + P V; scores are overwritten, up to whole vectors.

    If scales are too uneven, or values too large, it changes nothing but `block.uneven`, which it sets. Its
    workspace is the buffer of widened values, which has at least 256 * dim and 32768 bytes.
    """
    fixed_scales, softmax = integers.compile_fixed_scales(*form), integers.compile_softmax(rows)
    multiply = integers.compile_sums(rows, near, *form)

    def sums(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        dim, scales = params.values.padded_dim, block.wide_values
        fill_vector(tile.scores, tile.count * rows)
        fixed_scales(
            values=tile.values, value_row=block.value_row,
            scale_base=tile.value_scales, scale_row=params.values.scale_row, row_ids=block.value_ids,
            count=tile.count, dim=dim, most=params.most_value, target=scales,
        )  # fmt: skip
        if get_float(scales) < 0:
            block.uneven = 1
            return
        softmax(tile.scores, -(-tile.count * rows // integers.LANES), tile.m, tile.l, tile.alpha)
        multiply(
            weights=tile.scores, values=tile.values, value_row=block.value_row, row_ids=block.value_ids,
            ahead=prefetched(block.prefetch_in_sums, block, tile), shift=block.prefetch_shift,
            count=tile.count, dim=dim, sums=tile.o, factors=tile.alpha,
            scales_at=scales, scratch=scales + 64 + 40 * dim,
        )  # fmt: skip

    return step_code(sums, ("sums", rows, near, *form))


def engine(rows, near, stored, form):
    """Return the engine over keys and values; `stored` are their formats."""
    key, value = stored
    return {
        "queries": queries(rows, key, *form).address,
        "scores": scores(rows, near, key, *form).address,
        "sums": sums(rows, near, value, *form).address,
        "softmax": True,
    }
