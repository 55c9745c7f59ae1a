"""Apply soft cap, ALiBi and masks to scores. Only calls with one of them compile this code."""

import functools

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.online_softmax import visible_in_block
from kvkit.cpu.attention.params import WIDE_BLOCK, block_at, params_at, rows_computed, step_code, tile_at
from kvkit.cpu.simd import attention
from kvkit.formulas import numeric
from kvkit.runtime.jit import helper

LANES, WIDE = attention.LANES, attention.WIDE
# `mask_kind` is 1 for float32, 2 for float16, 3 for bfloat16, and 4 for bool.
MINUS_INF = numeric.MINUS_INF

get, get_bool = memory.load(types.int64), memory.load(types.int8)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
get_half, get_bfloat16 = memory.read("float16"), memory.read("bfloat16")
cap = attention.apply_softcap
widen_floats, widen_halves, widen_bfloat16 = map(attention.widen_numbers, ("float32", "float16", "bfloat16"))


def add_biases(params_address, block_address, tile_address):
    """Cap the scores of a tile [tokens, rows], then add ALiBi and mask where a query sees the key."""
    params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
    step, line = 4 * block.rows, 4 * WIDE_BLOCK
    lines = block.workspace + params.workspace.lines  # a wide tile's mask, widened           [rows, tokens]
    size = 4 if params.mask_kind == 1 else 2 if params.mask_kind in (2, 3) else 0  # bytes; 0 for bool
    is_widened = block.wide and size and params.mask_column == size
    if is_widened:
        attention.clear(lines, WIDE * WIDE_BLOCK)
    if params.cap:
        cap(tile.scores, -(-tile.count * block.rows // LANES), params.cap_at)
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
        if params.mask:
            mask = mask_of_block(params, block, head, token)
            if is_widened:
                attention.prefetch_bytes(mask + block.size * size, block.size * size)  # of the next block
                widen_mask(params, mask + low * params.mask_column, lines + r * line + 4 * low, high - low)
            else:
                add_mask(params, at, step, mask, low, high)
    if is_widened:
        tokens = -(-tile.count // LANES) * LANES
        attention.add_biases(lines, line, rows_computed(params, block, tile), tokens, tile.scores)


@functools.cache
def biases_code():
    """Compile `add_biases`."""
    return step_code(add_biases, (), control=True)


@helper
def mask_of_block(params, block, head, token):
    """Return the address of the first element of a query row's mask for the block."""
    row, column = token, block.begin
    if params.mask_packed:
        row += get(params.seqstarts + 8 * block.sequence)
    if params.mask_packed == 1:  # if 2, columns count within each sequence
        column += get(params.kvstarts + 8 * block.sequence)
    mask = params.mask + block.sequence * params.mask_sequence + head * params.mask_head
    return mask + row * params.mask_row + column * params.mask_column


@helper
def widen_mask(params, source, target, count):
    """Widen `count` adjacent numbers of a mask to float32."""
    if params.mask_kind == 1:
        widen_floats(source, target, count)
    elif params.mask_kind == 2:
        widen_halves(source, target, count)
    else:
        widen_bfloat16(source, target, count)


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
