"""The wide integer engine: 32 query rows over codes that are unpacked once per block.

S = scale K Q^T                    [tokens, rows], queries as fixed point of 16 bits
P = exp(S - m), O = O alpha + P V  [dim, rows], P as fixed point of 16 bits
"""

import functools

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.engines.load import rows_of_head
from kvkit.cpu.attention.params import block_at, params_at, step_code, tile_at, whole_tiles
from kvkit.cpu.simd import attention, integers, wide_integers
from kvkit.cpu.simd.attention import WIDE
from kvkit.runtime.jit import helper

get_float, put_float = memory.load(types.float32), memory.store(types.float32)


@helper
def scales_of(values, dim):
    """Return the address of the scales of unpacked values; the first is negative if they are too uneven."""
    return values + (4 * dim + 64) * (integers.MOST_TOKENS // 2)


@functools.cache
def queries(*form):
    """Compile the conversion of queries [dim, WIDE] to fixed point, once or twice 64 * dim + 128 bytes.

    If fixed point loses too much of a row, `tile.rest` is the address of queries that hold what is lost.
    """
    fixed = wide_integers.compile_fixed_queries(*form)

    def queries(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        dim, lost, tile.rest = params.keys.padded_dim, block.workspace + params.workspace.lines, 0
        fixed(tile.queries, dim, tile.engine_queries, lost, block.number)
        if get_float(block.number) > 0:
            tile.rest = tile.engine_queries + 64 * dim + 128
            fixed(lost, dim, tile.rest, lost, block.number)

    return step_code(queries, ("queries", *form))


@functools.cache
def load(key, value, *form):
    """Compile the unpacking of keys and, unless their scales are too uneven, of values.

    Unpacked keys have 4 * dim bytes for each token, values 512 * dim bytes for the block.
    """
    unpack_keys = wide_integers.unpack_keys(key, *form)
    fixed_scales = integers.compile_fixed_scales(value, *form)
    unpack_values = wide_integers.unpack_values(value, *form)

    def load(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        keys, values, dim = params.keys, params.values, params.values.padded_dim
        rows, scales = rows_of_head(keys, block, tile.head)
        unpack_keys(
            keys=rows, key_row=keys.row, scale_base=scales, scale_row=keys.scale_row,
            row_ids=block.key_row_ids, count=whole_tiles(block.count), dim=keys.padded_dim,
            target=block.wide_keys,
        )  # fmt: skip
        rows, scales = rows_of_head(values, block, tile.head)
        target = scales_of(block.wide_values, dim)
        fixed_scales(
            values=rows, value_row=values.row, scale_base=scales, scale_row=values.scale_row,
            row_ids=block.value_row_ids, count=block.count, dim=dim, most=params.most_value, target=target,
        )  # fmt: skip
        block.uneven = get_float(target) < 0
        if not block.uneven:
            unpack_values(rows, values.row, block.value_row_ids, block.count, dim, block.wide_values)

    return step_code(load, ("load", key, value, *form))


@functools.cache
def scores(*form):
    """Compile S = scale K Q^T."""
    multiply = wide_integers.compile_scores(*form)

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        tokens, dim = whole_tiles(tile.count), params.keys.padded_dim
        multiply(tile.engine_queries, block.wide_keys, tokens, dim, tile.scores, tile.factor)
        if tile.rest:
            added = block.workspace + params.workspace.lines
            multiply(tile.rest, block.wide_keys, tokens, dim, added, tile.factor)
            put_float(block.number, np.float32(1))
            attention.add_scaled(added, tile.scores, tokens * WIDE, block.number)

    return step_code(scores, ("scores", *form))


@functools.cache
def sums(*form):
    """Compile the softmax and O = O alpha + P V; scores are overwritten."""
    multiply = wide_integers.compile_sums(*form)

    def sums(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        values, dim = block.wide_values, params.values.padded_dim
        if block.uneven:
            return
        wide_integers.softmax(tile.scores, tile.count, tile.m, tile.l, tile.alpha)
        multiply(tile.scores, values, scales_of(values, dim), tile.count, dim, tile.o, tile.alpha)

    return step_code(sums, ("sums", *form))


def engine(stored, form):
    """Return the engine over keys and values; `stored` are their formats."""
    key, value = stored
    return {
        "queries": queries(key, *form).address, "load": load(key, value, *form).address,
        "scores": scores(key, *form).address, "sums": sums(value, *form).address, "softmax": True,
        "scales_scores": True,
    }  # fmt: skip
