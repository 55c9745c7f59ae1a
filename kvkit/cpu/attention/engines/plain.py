"""Plain loops over single numbers, which the tests compare the narrow and the wide engine with.

S = K Q^T                    [tokens, rows]
O = O alpha + P V            [rows, dim], or [dim, rows] of 32 rows
"""

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention.params import block_at, params_at, step_code, tile_at, whole_tiles
from kvkit.cpu.copy import blocks
from kvkit.cpu.simd.attention import WIDE
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.runtime.jit import helper

get, put, row_id = memory.read("float32"), memory.write("float32"), memory.load(types.int64)


def element_at(stored, scale_format, group, exact):
    """Return a helper (row, scale_base, i) that reads one element of a row as float32."""
    if BY_NAME[stored].block:
        return blocks.element_at(stored)
    if scale_format and BY_NAME[stored].minifloat:
        number, get_scale = memory.read(stored), memory.read(scale_format)
        step = BY_NAME[scale_format].bytes(1)
        return helper(
            lambda row, scale_base, i: (
                number(row + i) * get_scale(scale_base + (i // group * step if group else 0))
            )
        )
    if scale_format is None:
        get_number, size = memory.read(stored), BY_NAME[stored].bytes(1)
        return helper(lambda row, scale_base, i: get_number(row + i * size))
    get_code, get_scale = memory.load(types.int8), memory.read(scale_format)
    bits, scale_size = BY_NAME[stored].bits, BY_NAME[scale_format].bytes(1)
    dequantize = numeric.dequantizing("float32", scale_format if exact else "float32")

    def element(row, scale_base, i):
        code = get_code(row + i * bits // 8)
        if bits == 4:
            code = numeric.high_nibble(code) if i % 2 else numeric.low_nibble(code)
        return dequantize(code, get_scale(scale_base + i // group * scale_size))

    return helper(element)


def scores(rows, stored="float32", scale_format=None, group=0, exact=False):
    """Compile S = K Q^T; queries of a narrow tile are [row, dim]."""
    element, is_wide = element_at(stored, scale_format, group, exact), rows == WIDE

    def scores(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        dim, scale_row = params.keys.padded_dim, params.keys.scale_row
        for token in range(whole_tiles(tile.count)):
            at = token if is_wide else row_id(block.key_ids + 8 * token)
            for row in range(rows):
                total = types.float32(0)
                for i in range(dim):
                    query = get(tile.queries + 4 * (i * rows + row if is_wide else row * dim + i))
                    total += query * element(
                        tile.keys + at * block.key_row, tile.key_scales + at * scale_row, i
                    )
                put(tile.scores + 4 * (token * rows + row), total)

    return step_code(scores, ("plain scores", rows, stored, scale_format, group, exact))


def sums(rows, stored="float32", scale_format=None, group=0, exact=False):
    """Compile O = O alpha + P V."""
    element, is_wide = element_at(stored, scale_format, group, exact), rows == WIDE

    def sums(params_address, block_address, tile_address):
        params, block, tile = params_at(params_address), block_at(block_address), tile_at(tile_address)
        dim, scale_row = params.values.padded_dim, params.values.scale_row
        for row in range(rows):
            for i in range(dim):
                place = tile.o + 4 * (i * rows + row if is_wide else row * dim + i)
                total = get(place) * get(tile.alpha + 4 * row)
                for token in range(tile.count):
                    at = token if is_wide else row_id(block.value_ids + 8 * token)
                    value = element(tile.values + at * block.value_row, tile.value_scales + at * scale_row, i)
                    total += get(tile.scores + 4 * (token * rows + row)) * value
                put(place, total)

    return step_code(sums, ("plain sums", rows, stored, scale_format, group, exact))
