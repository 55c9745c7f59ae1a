"""Slower products, over widened rows, in which a weight of 0 hides NaN and infinity.

    O = O alpha + sum of P V over the tokens whose P is not 0       [rows, dim], or [dim, rows] if wide

A work item whose outputs are not finite is computed again with these products. Weights are multiplied with
SHRINK, so that sums of finite weighted values stay finite.
"""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.simd import attention
from kvkit.cpu.simd.attention import WIDE
from kvkit.runtime.jit import helper

SHRINK = np.float32(2**-40)

get_float, put_float = memory.load(types.float32), memory.store(types.float32)
nan_safe_wide_sums = attention.nan_safe_wide_sums


@helper
def nan_safe_scores(params, block, tile, queries):
    """S = K Q^T of a narrow tile, over queries [rows, dim] in natural order and widened keys."""
    dim = params.keys.padded_dim
    for r in range(block.rows):
        query, scores = queries + 4 * r * dim, tile.scores + 4 * r
        attention.dots(query, block.wide_keys, 4 * dim, tile.count, dim, scores, 4 * block.rows)


@helper
def shrink_weights(block, tile):
    """Multiply the weights of a tile with SHRINK."""
    put_float(block.number, SHRINK)
    attention.scale_by(tile.scores, tile.scores, -(-tile.count * block.rows // 16) * 16, block.number)


@helper
def nan_safe_sums(params, block, tile):
    """O = O alpha + P V over the widened values whose weight is not 0."""
    dim = params.values.padded_dim
    weights, values = tile.scores, block.wide_values
    add_seen_values(weights, values, 4 * dim, tile.count, dim, o=tile.o, alpha=tile.alpha, rows=block.rows)


@helper
def add_seen_values(weights, values, value_row, count, dim, o, alpha, rows):
    """O = O alpha + P V over values [tokens, dim] whose weight is not 0; `dim` is a multiple of 16."""
    if rows == WIDE:
        nan_safe_wide_sums(weights, values, value_row, count, dim, o, alpha)
        return
    for r in range(rows):
        row = o + 4 * r * dim
        attention.scale_by(row, row, dim, alpha + 4 * r)
        for t in range(count):
            at = weights + 4 * (t * rows + r)
            if get_float(at) != np.float32(0):
                attention.add_scaled(values + t * value_row, row, dim, at)
