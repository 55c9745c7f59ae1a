"""Apply soft cap, ALiBi and masks to scores. Only calls with one of them compile this code."""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.engines.load import row_run
from kvkit.cpu.attention.online_softmax import visible_in_block
from kvkit.cpu.attention.params import STEP, block_at, params_at, rows_computed, tile_at
from kvkit.cpu.simd import attention
from kvkit.cpu.simd.chunks import LINE
from kvkit.formulas import numeric
from kvkit.runtime.jit import compiled, helper

LANES, WIDE = attention.LANES, attention.WIDE
# `mask_kind` is 1 for float32, 2 for float16, 3 for bfloat16, and 4 for bool.
MINUS_INF = numeric.MINUS_INF

get, get_float, get_bool = memory.load(types.int64), memory.load(types.float32), memory.load(types.int8)
put, put_float, put_bool = memory.store(types.int64), memory.store(types.float32), memory.store(types.int8)
get_half, get_bfloat16 = memory.read("float16"), memory.read("bfloat16")
cap = attention.apply_softcap
add_floats, add_halves = attention.add_mask("float32"), attention.add_mask("float16")
add_bfloat16, add_bools = attention.add_mask("bfloat16"), attention.add_mask("bool")


@compiled(STEP, passes="few")
def add_biases(params_address, block_address, tile_address):
    """Cap the scores of a tile [tokens, rows], then add ALiBi and mask where a query sees the key."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    step = 4 * block.rows
    in_lines = block.wide and params.mask and has_adjacent_tokens(params) and not block.nan_safe
    if params.cap:
        cap(tile.scores, -(-tile.count * block.rows // LANES), params.cap_at)
    if not in_lines or params.alibi or params.slopes:
        for r in range(tile.live):
            token = (tile.first + r) // params.group
            head = tile.head * params.group + (tile.first + r) % params.group
            low, high = visible_in_block(params, block, tile, token)
            at = tile.scores + 4 * r
            if params.alibi or params.slopes:
                if params.slopes:
                    slope = get_float(params.slopes + block.sequence * params.slopes_sequence + 4 * head)
                else:
                    slope = numeric.alibi_slope(head, params.heads * params.group)
                position = block.kvlen - block.seqlen + token
                for t in range(low, high):
                    distance = block.begin + t - position
                    bias = numeric.alibi_bias(slope, min(distance, -distance))
                    put_float(at + t * step, get_float(at + t * step) + bias)
            if params.mask and not in_lines:
                add_mask(params, at, step, mask_of_row(params, block, tile, r), low, high)
    if in_lines:
        add_lines_of_mask(params, block, tile)


@helper
def mask_of_row(params, block, tile, r):
    """Return the address of the first element of a query row's mask for the block."""
    row, column = (tile.first + r) // params.group, block.begin
    head = tile.head * params.group + (tile.first + r) % params.group
    if params.mask_packed:
        row += get(params.seqstarts + 8 * block.sequence)
    if params.mask_packed == 1:  # if 2, columns count within each sequence
        column += get(params.kvstarts + 8 * block.sequence)
    mask = params.mask + block.sequence * params.mask_sequence + head * params.mask_head
    return mask + row * params.mask_row + column * params.mask_column


@helper
def mask_bytes(params):
    """Return the bytes of an element of the mask."""
    return 4 if params.mask_kind == 1 else 1 if params.mask_kind == 4 else 2


@helper
def has_adjacent_tokens(params):
    """Return whether the mask's elements of a query row are adjacent."""
    return params.mask_column == mask_bytes(params)


@helper
def only_adds_mask(params):
    """Return whether a mask in lines is all that is added to wide tiles, so that it comes with the scale."""
    return params.mask and has_adjacent_tokens(params) and not (params.cap or params.alibi or params.slopes)


@helper
def add_lines_of_mask(params, block, tile):
    """Add the mask to all scores of a wide tile, in lines; the last tokens are copied to a line first."""
    rows, size, r = block.workspace + params.workspace.lines, mask_bytes(params), 0
    first, computed = mask_of_row(params, block, tile, 0), rows_computed(params, block, tile)
    whole = tile.count * size // LINE * LINE
    while r < tile.live:
        count, step = row_run(params, tile, r, params.mask_row, params.mask_head)
        attention.write_sequence(mask_of_row(params, block, tile, r), step, count, rows + 8 * r)
        r += count
    attention.write_sequence(first, 0, WIDE - r, rows + 8 * r)
    factor = tile.factor if block.unscaled else block.number
    put_float(block.number, np.float32(1))
    add_lines(params, rows, whole // size, computed, factor, tile.scores)
    rest = tile.count * size - whole
    if rest:
        for r in range(WIDE):
            source, line = get(rows + 8 * r) + whole, rows + 8 * WIDE + LINE * r
            for i in range(rest):
                put_bool(line + i, get_bool(source + i))
            put(rows + 8 * r, line)
        add_lines(params, rows, rest // size, computed, factor, tile.scores + whole // size * 4 * WIDE)


@helper
def add_lines(params, mask_rows, count, rows, factor, scores):
    """Compute S = S factor + mask for `count` tokens of a wide tile."""
    if params.mask_kind == 1:
        add_floats(mask_rows, count, rows, factor, scores)
    elif params.mask_kind == 2:
        add_halves(mask_rows, count, rows, factor, scores)
    elif params.mask_kind == 3:
        add_bfloat16(mask_rows, count, rows, factor, scores)
    else:
        add_bools(mask_rows, count, rows, factor, scores)


@helper
def add_mask(params, scores, step, mask, low, high):
    """Add tokens low..high of a mask's row to the scores of a query row."""
    column = params.mask_column
    if params.mask_kind == 1:
        for t in range(low, high):
            add(scores + t * step, get_float(mask + t * column))
    elif params.mask_kind == 2:
        for t in range(low, high):
            add(scores + t * step, get_half(mask + t * column))
    elif params.mask_kind == 3:
        for t in range(low, high):
            add(scores + t * step, get_bfloat16(mask + t * column))
    else:
        for t in range(low, high):
            if get_bool(mask + t * column) == 0:
                put_float(scores + t * step, MINUS_INF)


@helper
def add(place, bias):
    """Add a bias to the score at an address."""
    put_float(place, numeric.add_bias(get_float(place), bias))
