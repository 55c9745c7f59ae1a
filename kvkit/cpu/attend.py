"""Attention over a cache where it lies: units of work, who does them, and the walk over a context.

A unit is one sequence, one key head (or all of them) and up to 256 rows; a row is one query head of one
query token. Up to 8 rows are a narrow tile, which reads the cache in place where vectors fit its rows; more
are wide tiles of 32, which share keys and values widened into scratch. A long context is split into parts
whose length depends on the shapes only; whoever finishes a unit's last part merges all in order. So results
depend on neither threads nor luck.
"""

import functools

import numba
import numpy as np
from numba import carray, prange, types

from kvkit import numeric
from kvkit.cpu import memory, online
from kvkit.cpu.online import visible
from kvkit.cpu.simd import attention
from kvkit.cpu.task import TASK
from kvkit.index import page_of, rest_of_page, row_of
from kvkit.jit import callback, helper, kernel

TILES = 8  # most wide tiles in a unit
SHRINK = np.float32(2**-40)  # of careful sums: they stay finite if values and weights are
NARROW, WIDE = attention.NARROW, attention.WIDE
MINUS_INF = numeric.MINUS_INF

get, put = memory.load(types.int64), memory.store(types.int64)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
count_up = memory.count_up
call_scores, call_sums, call_rows = memory.call(11), memory.call(12), memory.call(13)


@helper
def power_of_two(rows):
    """The rows of the narrow tile that holds so many."""
    return 1 if rows <= 1 else (2 if rows == 2 else (4 if rows <= 4 else 8))


@helper
def sequence(task, b):
    """(new tokens, context, rows for a key head) of a sequence."""
    seqlen = get(task.seqstarts + 8 * b + 8) - get(task.seqstarts + 8 * b)
    kvlen = get(task.kvstarts + 8 * b + 8) - get(task.kvstarts + 8 * b)
    return seqlen, kvlen, seqlen * task.group


@helper
def units_of(task, b):
    """(units, parts of each) of a sequence; units of several wide tiles are not split."""
    seqlen, kvlen, rows = sequence(task, b)
    if rows == 0:
        return 0, 1
    units = 1 if task.together and rows <= NARROW else task.heads
    if rows > NARROW:
        units *= -(-rows // (WIDE * task.unit_tiles))
        if task.unit_tiles > 1:
            return units, 1
    low, _ = visible(task, b, seqlen, kvlen, 0)
    _, high = visible(task, b, seqlen, kvlen, seqlen - 1)
    parts = max(1, -(-(high - low) // task.part_tokens))
    return units, parts


def schedule(worker, pointer):
    """Count units, items, and items of split units; sets them, and which tiles there are, in the task."""
    task = carray(pointer, (1,))[0]
    work = np.int64(0)
    wide = np.int64(0)
    task.tiles = task.products = 0
    for b in range(task.batch):
        _, kvlen, rows = sequence(task, b)
        task.products += rows * kvlen * task.heads
        if rows > NARROW:
            task.tiles |= WIDE
            wide += task.heads * (-(-rows // WIDE))
        elif rows:
            task.tiles |= power_of_two(rows)
    task.unit_tiles = min(max(wide // task.most_parts, 1), TILES)
    task.part_tokens = 2**62
    for b in range(task.batch):
        seqlen, kvlen, rows = sequence(task, b)
        if rows and (rows <= NARROW or task.unit_tiles == 1):
            low, _ = visible(task, b, seqlen, kvlen, 0)
            _, high = visible(task, b, seqlen, kvlen, seqlen - 1)
            work += (high - low) * units_of(task, b)[0]
    even = -(-work // task.most_parts)
    task.part_tokens = max(task.least_part, -(-even // task.block) * task.block)
    task.units = task.items = task.parts = 0
    for b in range(task.batch):
        units, parts = units_of(task, b)
        task.units += units
        task.items += units * parts
        task.parts += units * parts if parts > 1 else 0


def work(worker, pointer):
    """Take items until none is left."""
    task = carray(pointer, (1,))[0]
    scratch = task.scratch + worker * task.scratch_bytes
    b = first_item = first_unit = first_part = np.int64(0)
    units, parts = units_of(task, 0)
    item = count_up(task.counters)
    while item < task.items:
        while item >= first_item + units * parts:
            first_item, first_unit = first_item + units * parts, first_unit + units
            first_part += units * parts if parts > 1 else 0
            b += 1
            units, parts = units_of(task, b)
        unit, part = (item - first_item) // parts, (item - first_item) % parts
        slots = task.partials + (first_part + unit * parts) * task.part_bytes if parts > 1 else 0
        attend(task, scratch, b, unit, part, parts, slots)
        if parts > 1 and count_up(task.counters + 8 * (1 + first_unit + unit)) == parts - 1:
            merge(task, scratch, b, unit, parts, slots)
        item = count_up(task.counters)


@helper
def shape_of(task, b, unit):
    """(rows of a tile, tiles, first row, first key head, whether tiles are heads) of a unit."""
    _, _, rows = sequence(task, b)
    if rows > NARROW:
        most = WIDE * task.unit_tiles
        blocks = -(-rows // most)
        row = (blocks - 1 - unit % blocks) * most  # the rows that see most come first
        return WIDE, min(task.unit_tiles, -(-(rows - row) // WIDE)), row, unit // blocks, False
    tile = power_of_two(rows)
    if task.together:
        return tile, task.heads, 0, 0, True
    return tile, 1, 0, unit, True


@helper
def attend(task, scratch, b, unit, part, parts, slots):
    """One part of a unit: its rows over a range of its context."""
    seqlen, kvlen, rows = sequence(task, b)
    tile, tiles, row, head, by_head = shape_of(task, b, unit)
    low, _ = visible(task, b, seqlen, kvlen, row // task.group)
    last = min(rows, row + (tile if by_head else tile * tiles)) - 1
    _, high = visible(task, b, seqlen, kvlen, last // task.group)
    if parts > 1:
        low = min(low + part * task.part_tokens, high)  # rows that see less may have nothing to do
        high = min(high, low + task.part_tokens)
    place_queries(task, scratch, b, tile, tiles, row, head, by_head)
    walk(task, scratch, b, low, high, tile, tiles, row, head, by_head, False)
    if not finish(task, scratch, b, tile, tiles, row, head, by_head, part, slots, False):
        walk(task, scratch, b, low, high, tile, tiles, row, head, by_head, True)
        finish(task, scratch, b, tile, tiles, row, head, by_head, part, slots, True)


@helper
def place_queries(task, scratch, b, tile, tiles, row, head, by_head):
    """Queries of every tile as float32 times the scale: [row, dim] in order, or [dim, row] if wide."""
    rows_at, dim = scratch + task.rows, task.padded_dim
    _, _, rows = sequence(task, b)
    start = get(task.seqstarts + 8 * b)
    for t in range(tiles):
        target = scratch + task.queries + t * tile * dim * 4
        place = rows_at if tile == WIDE or task.orders else target
        first, kv = (0, head + t) if by_head else (row + t * tile, head)
        attention.clear(place, tile * dim)
        for r in range(min(tile, rows - first)):
            token, query = (first + r) // task.group, kv * task.group + (first + r) % task.group
            source = task.query + b * task.query_sequence
            source += (start + token) * task.query_token + query * task.query_head
            line = place + 4 * r * dim
            call_rows(task.query_to_float, line, 0, 0, source, 0, 0, 0, 0, 0, 1, 1, 1, task.dim)
            attention.times(line, line, dim, task.scale_at)
        if tile == WIDE:
            turn(rows_at, 4 * dim, WIDE, dim, target, 4 * WIDE)
        elif task.orders:
            order = task.orders + 8 * tile * dim
            for r in range(tile):
                for i in range(dim):
                    put_float(
                        target + 4 * (r * dim + i), get_float(place + 4 * (r * dim + get(order + 8 * i)))
                    )


@helper
def turn(source, source_row, rows, columns, target, target_row):
    """[rows, columns] to [columns, rows], both multiples of 16."""
    for r in range(0, rows, attention.LANES):
        for c in range(0, columns, attention.LANES):
            attention.transpose(
                source + r * source_row + 4 * c, source_row, target + c * target_row + 4 * r, target_row
            )


@helper
def find_rows(task, b, begin, end, numbers):
    """The rows of the cache that hold positions begin..end of a sequence, then the last one 16 times more."""
    position, number = begin, np.int64(0)
    while position < end:
        page = page_of(position, task.page_size)
        number = row_of(get(task.table + b * task.table_row + 8 * page), position, task.page_size)
        run = min(rest_of_page(position, task.page_size), end - position)
        for i in range(run):
            put(numbers + 8 * (position - begin + i), number + i)
        position += run
        number += run - 1
    for i in range(end - begin, end - begin + 16):
        put(numbers + 8 * i, number)


@helper
def find_addresses(base, stride, numbers, count, pieces, piece, addresses):
    """Where the pieces of rows begin, in order."""
    at = addresses
    for i in range(count):
        row = base + get(numbers + 8 * i) * stride
        for _ in range(pieces):
            put(at, row)
            row += piece
            at += 8


@helper
def ask_for_cells(task, keys, values, pieces, numbers, begin, end):
    """Scales of tokens that are next, of one head or all: some at a time keeps the memory busy."""
    for i in range(begin, end):
        offset = get(numbers + 8 * i) * task.cell_row
        attention.ask_for(keys + offset, pieces * task.cell_bytes)
        attention.ask_for(values + offset, pieces * task.cell_bytes)


@helper
def widen_rows(task, source, source_row, cells, cell_row, numbers, count, target, target_row, dim):
    """Rows of the cache as float32, run by run of neighbours.

    If the data are coarser than the cache, rows are rounded as a load does: as 16-bit floats they wait in the
    second halves of their places.
    """
    begin = 0
    while begin < count:
        number, end = get(numbers + 8 * begin), begin + 1
        while end < count and get(numbers + 8 * end) == number + end - begin:
            end += 1
        place = target + begin * target_row
        half = place + 2 * dim if task.rounds else place
        call_rows(
            task.to_float, half, target_row, 0,
            source + number * source_row, source_row, 0, cells + number * cell_row, cell_row, 0,
            end - begin, 1, 1, dim,
        )  # fmt: skip
        if task.rounds:
            call_rows(
                task.query_to_float, place, target_row, 0, half, target_row, 0, 0, 0, 0,
                end - begin, 1, 1, dim,
            )  # fmt: skip
        begin = end


@helper
def walk(task, scratch, b, low, high, tile, tiles, row, head, by_head, careful):
    """Scores, softmax and sums over positions low..high, block by block, for every tile.

    `careful` leaves out values whose weight is 0, even where they are not finite.
    """
    seqlen, kvlen, rows = sequence(task, b)
    lanes = max(tile, attention.LANES)
    for i in range(0, tiles * lanes * 4, 4):
        put_float(scratch + task.top + i, MINUS_INF)
        put_float(scratch + task.total + i, np.float32(0))
    attention.clear(scratch + task.sums, tiles * tile * task.padded_value_dim)
    wide = tile == WIDE
    widens, most = wide or task.widens, task.wide_block if wide else task.block
    if widens and (task.dim < task.padded_dim or task.value_dim < task.padded_value_dim):
        attention.clear(scratch + task.wide_keys, most * task.padded_dim)
        attention.clear(scratch + task.wide_values, most * task.padded_value_dim)
    score_code = task.scores32 if wide else get_code(task, tile, True)
    sum_code = task.sums32 if wide else get_code(task, tile, False)
    keys, values = task.keys + b * task.key_sequence, task.values + b * task.value_sequence
    key_cells, value_cells = (
        task.key_cells + b * task.cell_sequence,
        task.value_cells + b * task.cell_sequence,
    )
    scores, factor = scratch + task.scores, scratch + task.factor
    here = scratch + task.numbers
    there = here + 8 * (most + 16)
    wide_keys, wide_values = scratch + task.wide_keys, scratch + task.wide_values
    key_bytes, value_bytes = task.padded_dim * 4, task.padded_value_dim * 4
    pieces = tiles if by_head else 1
    soon = there + 8 * (most + 16)
    for i in range(0, 8 * pieces * most, 8):
        put(soon + i, keys)
    first_key, beside = keys + head * task.key_head, task.values - task.keys
    find_rows(task, b, low, min(low + most, high), here)
    for begin in range(low, high, most):
        count = min(most, high - begin)
        ahead = min(most, high - begin - count)
        if ahead > 0:
            find_rows(task, b, begin + count, begin + count + ahead, there)
            if not widens:
                find_addresses(first_key, task.key_row, there, ahead, pieces, task.key_head, soon)
        for t in range(tiles):
            at, first = (head + t, 0) if by_head else (head, row + t * tile)
            live = min(tile, rows - first)
            end = visible(task, b, seqlen, kvlen, (first + live - 1) // task.group)[1]
            seen = min(count, end - begin)
            state = 4 * t * lanes
            top, total = scratch + task.top + state, scratch + task.total + state
            key, key_row, numbers = keys + at * task.key_head, task.key_row, here
            value, value_row = values + at * task.value_head, task.value_row
            cell, value_cell = key_cells + at * task.cell_head, value_cells + at * task.cell_head
            if widens and (by_head or t == 0):
                widen_rows(
                    task, key, key_row, cell, task.cell_row, here, count, wide_keys, key_bytes, task.dim
                )  # fmt: skip
            if (widens or careful) and (by_head or t == 0):
                widen_rows(
                    task, value, value_row, value_cell, task.cell_row, here, count,
                    wide_values, value_bytes, task.value_dim,
                )  # fmt: skip
            if task.cell_bytes and task.together and not widens:
                ask_for_cells(
                    task, key_cells + head * task.cell_head, value_cells + head * task.cell_head, pieces,
                    there, t * ahead // tiles, (t + 1) * ahead // tiles,
                )  # fmt: skip
            if seen > 0:
                if widens:
                    key, key_row, numbers = wide_keys, key_bytes, task.counting
                    value, value_row = wide_values, value_bytes
                whole = -(-seen // 8) * 8
                queries = scratch + task.queries + t * tile * key_bytes
                call_scores(
                    score_code, queries, key, key_row, cell, task.cell_row, numbers,
                    soon + 8 * t * most, 0, whole, task.padded_dim, scores,
                )  # fmt: skip
                online.adjust(task, b, scores, tile, live, first, at, begin, seen, seqlen, kvlen)
                online.softmax(scores, tile, seen, top, total, factor)
                sums = scratch + task.sums + t * tile * value_bytes
                if careful:
                    put_float(scratch + task.rows, SHRINK)
                    attention.times(scores, scores, -(-seen * tile // 16) * 16, scratch + task.rows)
                    online.careful_sums(
                        scores, wide_values, value_bytes, seen, task.padded_value_dim, sums, factor, tile
                    )
                else:
                    call_sums(
                        sum_code, scores, value, value_row, value_cell, task.cell_row, numbers,
                        soon + 8 * t * most, beside, seen, task.padded_value_dim, sums, factor,
                    )  # fmt: skip
        here, there = there, here


@helper
def get_code(task, tile, scores):
    """The machine code of a narrow tile."""
    if tile == 1:
        return task.scores1 if scores else task.sums1
    if tile == 2:
        return task.scores2 if scores else task.sums2
    if tile == 4:
        return task.scores4 if scores else task.sums4
    return task.scores8 if scores else task.sums8


@helper
def finish(task, scratch, b, tile, tiles, row, head, by_head, part, slots, careful):
    """Write the rows of a unit, or its part of them; False if one is not finite, unless sums are careful."""
    grow = np.float32(1) / SHRINK if careful else np.float32(1)
    _, _, rows = sequence(task, b)
    lanes, dim, number = max(tile, attention.LANES), task.padded_value_dim, scratch + task.factor
    for t in range(tiles):
        kv, first = (head + t, 0) if by_head else (head, row + t * tile)
        sums = scratch + task.sums + t * tile * dim * 4
        if tile == WIDE:
            turn(sums, 4 * WIDE, dim, WIDE, scratch + task.rows, 4 * dim)
            sums = scratch + task.rows
        state = 4 * t * lanes
        for r in range(min(tile, rows - first)):
            line = sums + 4 * r * dim
            top, total = online.fold(scratch + task.top + state, scratch + task.total + state, r, tile)
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
    _, _, rows = sequence(task, b)
    dim, line, number = task.padded_value_dim, scratch + task.rows, scratch + task.factor
    for t in range(tiles):
        kv, first = (head + t, 0) if by_head else (head, row + t * tile)
        for r in range(min(tile, rows - first)):
            source = slots + (t * tile + r) * 4 * (dim + 3)
            top, total = MINUS_INF, np.float32(0)
            for part in range(parts):
                top = max(top, get_float(source + part * task.part_bytes + 4 * dim))
            for part in range(parts):
                at = source + part * task.part_bytes + 4 * dim
                total += get_float(at + 4) * numeric.weight(get_float(at), top)
            attention.clear(line, dim)
            for part in range(parts):
                at = source + part * task.part_bytes
                share = numeric.weight(get_float(at + 4 * dim), top)
                if share != np.float32(0):
                    put_float(number, share / total * get_float(at + 4 * dim + 8))
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
    put_float(number, shrink / total * grow if total != np.float32(0) else np.float32(0))
    attention.times(line, line, task.padded_value_dim, number)
    target = task.out + b * task.out_sequence + place * task.out_token + query * task.out_head
    call_rows(task.float_to_out, target, 0, 0, line, 0, 0, 0, 0, 0, 1, 1, 1, task.value_dim)
    if task.lse:
        at = task.lse + b * task.lse_sequence + place * task.lse_token + query * task.lse_head
        put_float(at, numeric.log_sum(top, total))


def run(code, workers, task):
    """Run machine code (worker, task) once for each worker."""
    for worker in prange(workers):
        call_worker(code, np.int64(worker), task)


call_worker = memory.call(2)
POINTER = types.CPointer(numba.from_dtype(TASK))
INT = types.int64


@functools.cache
def compiled(parallel):
    """The launcher, in many threads or in the caller's."""
    return kernel(run, types.void(INT, INT, INT), parallel, parallel=parallel)


@functools.cache
def code(function):
    """`schedule` or `work` as machine code."""
    return callback({"schedule": schedule, "work": work}[function], types.void(INT, POINTER), function)
