"""Write attention's outputs, O / l for each query row, or the state of a split; merge splits.

    out = sum O_s exp(m_s - m) / sum l_s exp(m_s - m)      over the splits s of a context
    lse = m + log l

The state of a split has dim + 3 floats for each query row: O, m, l and `grow`. `grow` is 1 / SHRINK if the
split was computed by the products of `nan_safe`, else 1. Tiles have them row by row, but wide tiles whose
engine keeps O as [dim, WIDE] sum it up in the state, followed by m [WIDE], l [WIDE] and grow [WIDE].
"""

import functools

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.engines.nan_safe import SHRINK
from kvkit.cpu.attention.online_softmax import fold
from kvkit.cpu.attention.params import block_at, params_at
from kvkit.cpu.attention.walk import tile_of, transpose
from kvkit.cpu.attention.work_items import WIDE, split_bytes, state_stride
from kvkit.cpu.simd import attention, pairs
from kvkit.cpu.simd.lanes import LANES
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import callback, compiled, helper

MINUS_INF = numeric.MINUS_INF

get = memory.load(types.int64)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)


@helper
def finish(params, block, engine, state):
    """Write the outputs of a work item of an engine, or, if its context is split, the state of the split.

    Return False, having finished nothing, at NaN or infinity, which are written with `block.nan_safe`.
    """
    grow = np.float32(1) / SHRINK if block.nan_safe else np.float32(1)
    dim, number, lines = params.values.padded_dim, block.number, block.workspace + params.workspace.lines
    for t in range(block.tiles):
        tile = tile_of(params, block, t)
        o = tile.o
        if engine.interleaves and not block.nan_safe:
            pairs.in_order(o, lines, tile.live, dim)
            o = lines
        elif block.wide:
            if not block.nan_safe:
                attention.wide_sums_times_zero(o, tile.l, tile.live, dim, number)
                if get_float(number) != np.float32(0):
                    return False
            if block.in_states:
                for r in range(WIDE):
                    at = o + 4 * WIDE * dim + 4 * r
                    put_float(at, get_float(tile.m + 4 * r))
                    put_float(at + 4 * WIDE, get_float(tile.l + 4 * r))
                    put_float(at + 8 * WIDE, grow)
                continue
            transpose(o, 4 * WIDE, dim, WIDE, lines, 4 * dim)
            o = lines
        checks = not (block.nan_safe or (block.wide and not engine.interleaves))
        if checks:
            attention.sum_times_zero(o, tile.live * dim, number)
            if get_float(number) != np.float32(0):
                return False
        for r in range(tile.live):
            line = o + 4 * r * dim
            m, l = fold(tile.m, tile.l, r, block.rows)
            if checks and l * np.float32(0) != np.float32(0):
                return False
            if state:
                target = state + (t * block.rows + r) * 4 * (dim + 3)
                put_float(number, np.float32(1))
                attention.scale_by(line, target, dim, number)
                put_float(target + 4 * dim, m)
                put_float(target + 4 * dim + 4, l)
                put_float(target + 4 * dim + 8, grow)
            else:
                write_row(params, block, tile, r, line, m=m, l=l, grow=grow)
    return True


@compiled(types.void(*[types.int64] * 4), passes="few")
def merge_splits(params_address, block_address, splits, states):
    """Write the outputs of a tile group from the states of its splits, which are added in order."""
    params, block = params_at(params_address), block_at(block_address)
    dim, line, number = params.values.padded_dim, block.workspace + params.workspace.lines, block.number
    state_bytes = split_bytes(params)
    for t in range(block.tiles):
        tile = tile_of(params, block, t)
        if block.in_states:
            merge_wide_tile(params, block, tile, splits, states + t * state_stride(params, WIDE))
            continue
        for r in range(tile.live):
            state = states + (t * block.rows + r) * 4 * (dim + 3) + 4 * dim
            m, l = MINUS_INF, np.float32(0)
            for split in range(splits):
                m = max(m, get_float(state + split * state_bytes))
            for split in range(splits):
                at = state + split * state_bytes
                l = numeric.add_split_sum(l, m, get_float(at + 4), get_float(at))
            attention.clear(line, dim)
            for split in range(splits):
                at = state + split * state_bytes
                weight = numeric.weight(get_float(at), m)
                if weight != np.float32(0):
                    put_float(number, numeric.normalizer(weight, l, get_float(at + 8)))
                    attention.add_scaled(at - 4 * dim, line, dim, number)
            write_row(params, block, tile, r, line, m=m, l=l, grow=l)


@helper
def merge_wide_tile(params, block, tile, splits, state):
    """Write the outputs of a wide tile from the states of its splits, of which the first is at `state`."""
    dim, line = params.values.padded_dim, 4 * WIDE
    lines, size, sums = block.workspace + params.workspace.lines, split_bytes(params), state + line * dim
    for r in range(tile.live):
        m, l = MINUS_INF, np.float32(0)
        for split in range(splits):
            m = max(m, get_float(sums + split * size + 4 * r))
        for split in range(splits):
            at = sums + split * size + 4 * r
            l = numeric.add_split_sum(l, m, get_float(at + line), get_float(at))
        for split in range(splits):
            at = sums + split * size + 4 * r
            weight = numeric.weight(get_float(at), m)
            factor = numeric.normalizer(weight, l, get_float(at + 2 * line))
            put_float(lines + split * line + 4 * r, factor if weight != np.float32(0) else np.float32(-1))
        put_float(tile.m + 4 * r, m)
        put_float(tile.l + 4 * r, l)
    o = block.workspace + params.workspace.o
    attention.merge_wide_sums(state, size, splits, dim, lines, o)
    transpose(o, line, dim, WIDE, lines, 4 * dim)
    for r in range(tile.live):
        m, l = get_float(tile.m + 4 * r), get_float(tile.l + 4 * r)
        write_row(params, block, tile, r, lines + 4 * r * dim, m=m, l=l, grow=l)


@memory.machine_code
def call_scaled_row(code, line, target, dim, factor):
    """Call the machine code of `scaled_row`."""


@functools.cache
def scaled_row(element):
    """Compile f(line, target, dim, factor), which writes float32 times a factor in a format of floats."""
    panel, put, size = attention.scaled_panel(element), memory.write(element), BY_NAME[element].bytes(1)

    def scaled_row(line, target, dim, factor):
        whole = dim // LANES * LANES
        for i in range(0, whole, LANES):
            panel(line + 4 * i, target + size * i, factor)
        for i in range(whole, dim):
            put(target + size * i, get_float(line + 4 * i) * get_float(factor))

    return callback(scaled_row, types.void(*[types.int64] * 4), element)


@helper
def write_row(params, block, tile, r, line, m, l, grow):
    """Write O of a query row times `grow` / l in the format of the output, and m + log l."""
    token, member = (tile.first + r) // params.group, (tile.first + r) % params.group
    head, shrink = tile.head * params.group + member, np.float32(1)
    token += get(params.seqstarts + 8 * block.sequence)
    if params.sinks:
        row = block.sequence % params.sink_sequences * params.heads * params.group
        m, l, shrink = numeric.add_sink(m, l, get_float(params.sinks + 4 * (row + head)))
    put_float(block.number, numeric.normalizer(shrink, l, grow))
    if params.value_factors:
        at = params.value_factors + block.sequence * params.factor_sequence + tile.head * params.factor_head
        put_float(block.number, get_float(block.number) * get_float(at))
    target = params.out + block.sequence * params.out_sequence + token * params.out_token
    call_scaled_row(
        params.float_to_out, line, target + head * params.out_head, params.values.dim, block.number
    )
    if params.lse:
        at = params.lse + block.sequence * params.lse_sequence + token * params.lse_token
        put_float(at + head * params.lse_head, numeric.log_sum(m, l))
