"""What attention writes for a query row: of a unit, or its part of that, and the parts of a unit together."""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention import online_softmax
from kvkit.cpu.attention.walk import SHRINK, turn
from kvkit.cpu.attention.work_items import WIDE, sequence, shape_of
from kvkit.cpu.simd import attention
from kvkit.formulas import numeric
from kvkit.runtime.jit import helper

MINUS_INF = numeric.MINUS_INF

get, call_rows = memory.load(types.int64), memory.call(13)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)


@helper
def finish(task, scratch, b, tile, tiles, row, head, by_head, part, slots, careful):
    """Write the query rows of a unit, or its part; False if one is not finite, unless sums are careful."""
    grow = np.float32(1) / SHRINK if careful else np.float32(1)
    _, _, query_rows = sequence(task, b)
    lanes, dim, number = max(tile, attention.LANES), task.padded_value_dim, scratch + task.factor
    for t in range(tiles):
        kv, first = (head + t, 0) if by_head else (head, row + t * tile)
        sums = scratch + task.sums + t * tile * dim * 4
        if tile == WIDE:
            turn(sums, 4 * WIDE, dim, WIDE, scratch + task.lines, 4 * dim)
            sums = scratch + task.lines
        state = 4 * t * lanes
        for r in range(min(tile, query_rows - first)):
            line = sums + 4 * r * dim
            top, total = online_softmax.fold(
                scratch + task.top + state, scratch + task.total + state, r, tile
            )
            if not careful:
                attention.sum_of_nothing(line, dim, number)
                if get_float(number) + total * np.float32(0) != np.float32(0):
                    return False
            if slots:
                target = slots + part * task.part_bytes + (t * tile + r) * 4 * (dim + 3)
                put_float(number, np.float32(1))
                attention.times(line, target, dim, number)
                put_float(target + 4 * dim, top)
                put_float(target + 4 * dim + 4, total)
                put_float(target + 4 * dim + 8, grow)
            else:
                write_row(task, line, number, b, first + r, kv, top, total, grow)
    return True


@helper
def merge(task, scratch, b, unit, parts, slots):
    """The parts of a unit together, in order."""
    tile, tiles, row, head, by_head = shape_of(task, b, unit)
    _, _, query_rows = sequence(task, b)
    dim, line, number = task.padded_value_dim, scratch + task.lines, scratch + task.factor
    for t in range(tiles):
        kv, first = (head + t, 0) if by_head else (head, row + t * tile)
        for r in range(min(tile, query_rows - first)):
            source = slots + (t * tile + r) * 4 * (dim + 3)
            top, total = MINUS_INF, np.float32(0)
            for part in range(parts):
                top = max(top, get_float(source + part * task.part_bytes + 4 * dim))
            for part in range(parts):
                at = source + part * task.part_bytes + 4 * dim
                total = numeric.with_total(total, top, get_float(at + 4), get_float(at))
            attention.clear(line, dim)
            for part in range(parts):
                at = source + part * task.part_bytes
                share = numeric.weight(get_float(at + 4 * dim), top)
                if share != np.float32(0):
                    put_float(number, numeric.share_of(share, total, get_float(at + 4 * dim + 8)))
                    attention.plus_times(at, line, dim, number)
            write_row(task, line, number, b, first + r, kv, top, total, total)


@helper
def write_row(task, line, number, b, row, kv, top, total, grow):
    """A row times `grow`, divided by its total, in the format of the output; the logarithm of its total."""
    token, query = row // task.group, kv * task.group + row % task.group
    place = get(task.seqstarts + 8 * b) + token
    shrink = np.float32(1)
    if task.sinks:
        heads = task.heads * task.group
        sink = get_float(task.sinks + 4 * (b % task.apart * heads + query))
        top, total, shrink = numeric.with_sink(top, total, sink)
    put_float(number, numeric.share_of(shrink, total, grow))
    if task.value_scales:
        scale = get_float(task.value_scales + b * task.scale_sequence + kv * task.scale_head)
        put_float(number, get_float(number) * scale)
    attention.times(line, line, task.padded_value_dim, number)
    target = task.out + b * task.out_sequence + place * task.out_token + query * task.out_head
    call_rows(task.float_to_out, target, 0, 0, line, 0, 0, 0, 0, 0, 1, 1, 1, task.value_dim)
    if task.lse:
        at = task.lse + b * task.lse_sequence + place * task.lse_token + query * task.lse_head
        put_float(at, numeric.log_sum(top, total))
