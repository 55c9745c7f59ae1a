"""Load rows of a block into the workspace as [tokens, dim], with their bits or as float32."""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.copy.rows import call_rows
from kvkit.cpu.simd import attention
from kvkit.formulas.index import page_of, row_of
from kvkit.runtime.jit import helper

get, get_int32 = memory.load(types.int64), memory.load(types.int32)


@helper
def rows_of_head(side, block, head):
    """Return the addresses of row 0 of a key head, and of its scales."""
    rows = side.address + block.sequence * side.sequence + head * side.head
    return rows, side.scales + block.sequence * side.scale_sequence + head * side.scale_head


@helper
def query_at(params, block, tile, row):
    """Return the address of the query of a row of a tile."""
    token, member = (tile.first + row) // params.group, (tile.first + row) % params.group
    token += get(params.seqstarts + 8 * block.sequence)
    head = tile.head * params.group + member
    return (
        params.query
        + block.sequence * params.query_sequence
        + token * params.query_token
        + head * params.query_head
    )


@helper
def row_run(params, tile, row, token_step, head_step):
    """Return (rows, stride) of the rows of a tile, from one on, that are one stride apart in memory.

    They are the heads of a token that share a key head, or all tokens if each head has a key head of its own.
    """
    if params.group == 1:
        return tile.live - row, token_step
    member = (tile.first + row) % params.group
    return min(params.group - member, tile.live - row), head_step


@helper
def row_at(params, block, side, position):
    """Return the row id of a position."""
    place = side.table + block.table_row + params.table_entry * page_of(position, params.page_size)
    page = np.int64(get_int32(place)) if params.table_entry == 4 else get(place)
    return page + row_of(0, position, params.page_size) * side.step


@helper
def find_next_rows(params, block, side, head, addresses):
    """Write the addresses of the next block's keys, or values, which steps of this one prefetch."""
    rows, _ = rows_of_head(side, block, head)
    i, size = np.int64(0), params.page_size
    while i < block.size:  # a run of rows in a page, or, after the last token, its row
        position = min(block.begin + block.size + i, block.end - 1)
        run = size - (position - page_of(position, size) * size)
        run = min(min(run, block.end - position), block.size - i)
        row = rows + row_at(params, block, side, position) * side.row
        attention.write_sequence(row, side.step * side.row, run, addresses + 8 * i)
        i += run


@helper
def run_end(row_ids, begin, count, step):
    """Return the end of the run of neighbouring rows that begins at token `begin` of the block."""
    first, end = get(row_ids + 8 * begin), begin + 1
    while end < count and get(row_ids + 8 * end) == first + (end - begin) * step:
        end += 1
    return end


@helper
def load_rows(code, side, block, head, row_ids, target, target_row, element):
    """Write the block's rows of a head in the format that `code` makes: row t at target + t * target_row.

    An element of the target has `element` bytes. Strided elements are read as if each were a head.
    """
    load_range(code, side, block, head, row_ids, 0, end=block.count,
               target=target, target_row=target_row, element=element)  # fmt: skip


@helper
def load_range(code, side, block, head, row_ids, begin, end, target, target_row, element):
    """Write the rows of tokens begin..end of a block as `load_rows` does, run by run."""
    source, scales = rows_of_head(side, block, head)
    heads, size = (side.dim, 1) if side.element else (1, side.dim)
    last = end
    while begin < last:
        row_id, end = get(row_ids + 8 * begin), run_end(row_ids, begin, last, side.step)
        call_rows(
            code, packed=target + begin * target_row, packed_token=target_row, packed_head=element,
            cache=source + row_id * side.row, cache_token=side.step * side.row, cache_head=side.element,
            scale=scales + row_id * side.scale_row, scale_token=side.step * side.scale_row,
            tokens=end - begin, heads=heads, dim=size,
        )  # fmt: skip
        begin = end


@helper
def widen_rows(params, side, block, head, row_ids, target):
    """Write the block's rows of a head as float32.

    With `params.rounds`, rows are first rounded to the 16-bit format of the data, in the second half of each
    float32 row, and widened from there.
    """
    row, half = 4 * side.padded_dim, target + 2 * side.dim if params.rounds else target
    load_rows(side.to_float, side, block, head, row_ids, target=half, target_row=row, element=4)
    if params.rounds:
        call_rows(
            params.query_to_float, packed=target, packed_token=row, cache=half, cache_token=row,
            tokens=block.count, dim=side.dim,
        )  # fmt: skip
