"""The walk of attention over a context: queries in place, rows found and widened, products of each block."""

import numpy as np
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.attention import online_softmax
from kvkit.cpu.attention.integers import scales_of
from kvkit.cpu.attention.online_softmax import visible
from kvkit.cpu.attention.work_items import WIDE, sequence
from kvkit.cpu.simd import attention
from kvkit.formulas import numeric
from kvkit.formulas.index import page_of, rest_of_page, row_of
from kvkit.runtime.jit import helper

SHRINK = np.float32(2**-40)  # of careful sums: they stay finite if values and weights are
MINUS_INF = numeric.MINUS_INF

get, put = memory.load(types.int64), memory.store(types.int64)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
call_pair_rows, call_pair_values, call_pairs = memory.call(3), memory.call(6), memory.call(7)
call_scores, call_sums, call_rows = memory.call(11), memory.call(12), memory.call(13)
call_queries, call_integer_sums = memory.call(3), memory.call(15)
call_wide_scores, call_unfold = memory.call(5), memory.call(8)


@helper
def place_queries(task, scratch, b, tile, tiles, row, head, by_head):
    """Queries of every tile as float32 times the scale, as products want them: [dim, row] if wide."""
    lines_at, dim = scratch + task.lines, task.padded_dim
    seqlen, _, query_rows = sequence(task, b)
    start = get(task.seqstarts + 8 * b)
    for t in range(tiles):
        target = scratch + task.queries + t * tile * dim * 4
        place = target if task.integers and tile != WIDE else lines_at
        first, kv = (0, head + t) if by_head else (row + t * tile, head)
        scale_at = task.key_scales + b * task.scale_sequence + kv * task.scale_head
        live, r = min(tile, query_rows - first), 0
        if live < tile or task.dim < dim:
            attention.clear(place, tile * dim)
        while r < live:  # rows of a token at a time
            token, member = (first + r) // task.group, (first + r) % task.group
            count = min(task.group - member, live - r)
            source = task.query + b * task.query_sequence
            source += (start + token) * task.query_token + (kv * task.group + member) * task.query_head
            line = place + 4 * r * dim
            call_rows(
                task.query_to_float, line, 4 * dim, 0, source, task.query_head, 0, 0, 0, 0,
                count, 1, 1, task.dim,
            )  # fmt: skip
            if not (tile == WIDE and task.pairs):
                attention.times(line, line, count * dim, scale_at)
            r += count
        if tile == WIDE:
            turn(lines_at, 4 * dim, WIDE, dim, target, 4 * WIDE)
            if task.pairs:  # they are exact, so that scores are scaled instead
                call_pair_rows(task.pair_rows, target, dim, scratch + task.query_pairs + t * tile * dim * 2)
                attention.times(target, target, WIDE * dim, scale_at)
            elif task.integers and seqlen == 1:
                call_queries(task.integer_queries, target, dim, integers_at(task, scratch, t, tile))
        elif task.integers:
            call_queries(get_queries(task, tile), target, dim, integers_at(task, scratch, t, tile))
        else:
            in_panels(place, target, tile, dim, task.orders)


@helper
def in_panels(source, target, tile, dim, orders):
    """Query rows [row, dim] as [dim / LANES, row, LANES], in the order of `orders` if there are such."""
    if not orders:
        attention.panels(source, target, tile, dim)
        return
    order, panel = orders + 8 * tile * dim, 4 * attention.LANES
    for r in range(tile):
        for i in range(dim):
            at = target + (i // attention.LANES * tile + r) * panel + 4 * (i % attention.LANES)
            put_float(at, get_float(source + 4 * (r * dim + get(order + 8 * i))))


@helper
def turn(source, source_row, rows, columns, target, target_row):
    """[rows, columns] to [columns, rows], both multiples of 16."""
    for r in range(0, rows, attention.LANES):
        for c in range(0, columns, attention.LANES):
            attention.transpose(
                source + r * source_row + 4 * c, source_row, target + c * target_row + 4 * r, target_row
            )


@helper
def find_rows(task, table, step, b, begin, end, count, numbers):
    """The rows that hold positions begin..end, then the last one again: in all count + 16, and up to 7 more.

    Neighbours are `step` numbers apart, and pages begin at those that the table has.
    """
    position, number = begin, np.int64(0)
    while position < end:
        page = page_of(position, task.page_size)
        number = get(table + b * task.table_row + 8 * page) + row_of(0, position, task.page_size) * step
        run = min(rest_of_page(position, task.page_size), end - position)
        attention.steps(number, step, run, numbers + 8 * (position - begin))
        position += run
        number += (run - 1) * step
    attention.steps(number, 0, count + 16 - (end - begin), numbers + 8 * (end - begin))


@helper
def find_addresses(base, stride, numbers, count, pieces, piece, addresses):
    """Where the pieces of rows begin, in order; writes up to 7 more."""
    if pieces == 1:
        attention.addresses(base, stride, numbers, count, addresses)
        return
    for i in range(count):
        attention.steps(base + get(numbers + 8 * i) * stride, piece, pieces, addresses + 8 * i * pieces)


@helper
def ask_for_rows(base, stride, size, numbers, count):
    """The first rows, which nobody has asked for."""
    for i in range(count):
        attention.ask_for(base + get(numbers + 8 * i) * stride, size)


@helper
def ask_for_cells(task, keys, values, pieces, numbers, begin, end):
    """Scales of tokens that are next, of one head or all: some at a time keeps the memory busy."""
    for i in range(begin, end):
        offset = get(numbers + 8 * i) * task.cell_row
        attention.ask_for(keys + offset, pieces * task.cell_bytes)
        attention.ask_for(values + offset, pieces * task.cell_bytes)


@helper
def copy_rows(task, source, source_row, numbers, step, count, target, target_row, dim):
    """Rows of the cache as they are, run by run of neighbours."""
    begin = 0
    while begin < count:
        number, end = get(numbers + 8 * begin), begin + 1
        while end < count and get(numbers + 8 * end) == number + (end - begin) * step:
            end += 1
        call_rows(
            task.copy_row, target + begin * target_row, target_row, 0,
            source + number * source_row, step * source_row, 0, 0, 0, 0, end - begin, 1, 1, dim,
        )  # fmt: skip
        begin = end


@helper
def widen_rows(
    task, code, source, source_row, element, cells, cell_row, numbers, step, count, target, target_row, dim
):  # fmt: skip
    """Rows of the cache as float32, run by run of neighbours.

    Elements that lie apart are moved as if each were a head. If the data are coarser than the cache, rows are
    rounded as a load does: as 16-bit floats they wait in the second halves of their places.
    """
    heads, size = (dim, 1) if element else (1, dim)
    begin = 0
    while begin < count:
        number, end = get(numbers + 8 * begin), begin + 1
        while end < count and get(numbers + 8 * end) == number + (end - begin) * step:
            end += 1
        place = target + begin * target_row
        half = place + 2 * dim if task.rounds else place
        call_rows(
            code, half, target_row, 4,
            source + number * source_row, step * source_row, element,
            cells + number * cell_row, step * cell_row, 0, end - begin, heads, 1, size,
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
    seqlen, kvlen, query_rows = sequence(task, b)
    lanes = max(tile, attention.LANES)
    for i in range(0, tiles * lanes * 4, 4):
        put_float(scratch + task.top + i, MINUS_INF)
        put_float(scratch + task.total + i, np.float32(0))
    attention.clear(scratch + task.sums, tiles * tile * task.padded_value_dim)
    wide = tile == WIDE
    pairs = wide and task.pairs and not careful
    integers = task.integers and not careful and (seqlen == 1 or not wide)
    even = True  # the scales of a block's values
    scale_at = task.key_scales + b * task.scale_sequence + head * task.scale_head
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
    lead = 0 if widens else task.lead
    here = value_here = scratch + task.numbers
    wide_keys, wide_values = scratch + task.wide_keys, scratch + task.wide_values
    key_bytes, value_bytes = task.padded_dim * 4, task.padded_value_dim * 4
    panels, panel = wide_values + most * value_bytes // 2, most * 16  # of pairs; bytes of one
    pieces = tiles if by_head else 1
    soon = here + 8 * (most + lead + 24)  # addresses of keys, then of values
    value_soon = soon + 8 * (pieces * most + 8)
    if task.own_places:
        value_here = value_soon + 8 * (pieces * most + 8)
    # Scores ask for the keys that come next, and sums for the values. Where heads take turns scores ask for
    # the values of the turn, and sums for the keys of the next.
    score_soon, sum_soon, beside = soon, soon, task.values - task.keys
    if task.together:
        score_soon, beside = value_soon, 0
    elif task.own_places:
        sum_soon, beside = value_soon, 0
    first_key, first_value = keys + head * task.key_head, values + head * task.value_head
    if not (lead or wide):  # floats of this block, which are there
        attention.steps(keys, 0, pieces * most, soon)
        attention.steps(values, 0, pieces * most, value_soon)
    # Heads read in place are done together: one waits for its softmax while others go on.
    together = tiles if by_head and not (widens or careful) else 1
    block_bytes = -(-4 * tile * most // 64) * 64
    begin = low
    while begin < high:
        count = min(most, high - begin)
        known = min(count + lead, high - begin)
        find_rows(task, task.table, task.key_step, b, begin, begin + known, lead + count, here)
        if task.own_places:
            find_rows(
                task, task.value_table, task.value_step, b, begin, begin + known, lead + count, value_here
            )
        if lead:
            ahead = here + 8 * lead
            find_addresses(first_key, task.key_row, ahead, count, pieces, task.key_head, soon)
            if task.together or task.own_places:
                ahead = value_here + (0 if task.together else 8 * lead)
                find_addresses(first_value, task.value_row, ahead, count, pieces, task.value_head, value_soon)
            if begin == low and pieces == 1:
                ask_for_rows(first_key, task.key_row, task.key_bytes, here, min(lead, count))
                ask_for_rows(first_value, task.value_row, task.value_bytes, value_here, min(lead, count))
        for begun in range(0, tiles, together):
            first = 0 if by_head else row + begun * tile
            live = min(tile, query_rows - first)
            seen = min(count, visible(task, b, seqlen, kvlen, (first + live - 1) // task.group)[1] - begin)
            adjusts = online_softmax.adjusts(task, b, live, first, begin, seen, seqlen, kvlen)
            whole = -(-seen // 8) * 8
            for t in range(begun, begun + together):
                at = head + t if by_head else head
                key, key_row, numbers = keys + at * task.key_head, task.key_row, here
                value, value_row, value_numbers = values + at * task.value_head, task.value_row, value_here
                cell, value_cell = key_cells + at * task.cell_head, value_cells + at * task.cell_head
                if pairs and t == 0:
                    copy_rows(
                        task, key, key_row, here, task.key_step, count, wide_keys, key_bytes // 2, task.dim
                    )  # fmt: skip
                    copy_rows(
                        task, value, value_row, value_here, task.value_step, count,
                        wide_values, value_bytes // 2, task.value_dim,
                    )  # fmt: skip
                    call_pair_values(
                        task.pair_values, wide_values, value_bytes // 2, count, task.padded_value_dim,
                        panels, panel,
                    )  # fmt: skip
                if integers and wide and t == 0:
                    call_unfold(
                        task.integer_keys, key, key_row, cell, task.cell_row, here, -(-count // 8) * 8,
                        task.padded_dim, wide_keys,
                    )  # fmt: skip
                    call_unfold(
                        task.integer_values, value, value_row, value_cell, task.cell_row, value_here, count,
                        task.padded_value_dim, wide_values,
                    )  # fmt: skip
                    even = get_float(scales_of(wide_values, task.padded_value_dim)) >= np.float32(0)
                widened = (by_head or t == 0) and not pairs
                if widened and (widens or (task.integers and careful)) and not integers:
                    widen_rows(
                        task, task.key_to_float, key, key_row, task.key_element, cell, task.cell_row,
                        here, task.key_step, count, wide_keys, key_bytes, task.dim,
                    )  # fmt: skip
                if widened and (widens or careful) and not (integers and even):
                    widen_rows(
                        task, task.value_to_float, value, value_row, task.value_element, value_cell,
                        task.cell_row, value_here, task.value_step, count,
                        wide_values, value_bytes, task.value_dim,
                    )  # fmt: skip
                if task.cell_bytes and task.together and not widens:
                    ask_for_cells(
                        task, key_cells + head * task.cell_head, value_cells + head * task.cell_head, pieces,
                        here + 8 * count, t * (known - count) // tiles, (t + 1) * (known - count) // tiles,
                    )  # fmt: skip
                if seen <= 0:
                    continue
                if widens:
                    key, key_row, numbers = wide_keys, key_bytes, task.counting
                queries = scratch + task.queries + t * tile * key_bytes
                block = scores + (t - begun) * block_bytes
                if pairs:
                    call_pairs(
                        task.pair_scores, scratch + task.query_pairs + t * tile * (key_bytes // 2), key,
                        key_bytes // 2, whole, task.padded_dim, block, scale_at,
                    )  # fmt: skip
                elif task.integers and careful and not wide:
                    online_softmax.careful_scores(
                        queries, wide_keys, key_bytes, seen, task.padded_dim, block, tile
                    )
                elif integers and wide:
                    call_wide_scores(
                        task.integer_scores, integers_at(task, scratch, t, tile), wide_keys, whole,
                        task.padded_dim, block,
                    )  # fmt: skip
                else:
                    if integers:
                        queries = integers_at(task, scratch, t, tile)
                    call_scores(
                        score_code, queries, key, key_row, cell, task.cell_row, numbers,
                        score_soon + 8 * t * count, 0, whole, task.padded_dim, block,
                    )  # fmt: skip
                if adjusts:
                    online_softmax.adjust(task, b, block, tile, live, first, at, begin, seen, seqlen, kvlen)
            if seen <= 0:
                continue
            if not integers or (wide and not even):
                for t in range(begun, begun + together):
                    state = 4 * t * lanes
                    online_softmax.softmax(
                        scores + (t - begun) * block_bytes, tile, seen, scratch + task.top + state,
                        scratch + task.total + state, factor + (t - begun) * 4 * lanes,
                    )  # fmt: skip
            for t in range(begun, begun + together):
                at, state = head + t if by_head else head, 4 * t * lanes
                top, total = scratch + task.top + state, scratch + task.total + state
                value, value_row, value_numbers = values + at * task.value_head, task.value_row, value_here
                value_cell = value_cells + at * task.cell_head
                if widens:
                    value, value_row, value_numbers = wide_values, value_bytes, task.counting
                sums = scratch + task.sums + t * tile * value_bytes
                block, shrink = scores + (t - begun) * block_bytes, factor + (t - begun) * 4 * lanes
                if integers and wide and even:
                    call_unfold(
                        task.integer_sums, block, wide_values, seen, task.padded_value_dim, sums, shrink,
                        top, total,
                    )  # fmt: skip
                elif integers and not wide:
                    online_softmax.fill_vector(block, seen * tile)
                    call_integer_sums(
                        sum_code, block, value, value_row, value_cell, task.cell_row, value_numbers,
                        sum_soon + 8 * t * count, beside, seen, task.padded_value_dim, sums, shrink,
                        top, total, wide_values,
                    )  # fmt: skip
                    if get_float(shrink + 4 * attention.LANES) < 0:
                        widen_rows(
                            task, task.value_to_float, value, value_row, task.value_element, value_cell,
                            task.cell_row, value_numbers, task.value_step, seen,
                            wide_values, value_bytes, task.value_dim,
                        )  # fmt: skip
                        online_softmax.softmax(block, tile, seen, top, total, shrink)
                        online_softmax.careful_sums(
                            block, wide_values, value_bytes, seen, task.padded_value_dim, sums, shrink, tile
                        )
                elif careful:
                    put_float(scratch + task.lines, SHRINK)
                    attention.times(block, block, -(-seen * tile // 16) * 16, scratch + task.lines)
                    online_softmax.careful_sums(
                        block, wide_values, value_bytes, seen, task.padded_value_dim, sums, shrink, tile
                    )
                elif pairs:
                    call_pair_rows(task.pair_rows, block, seen, block)
                    call_pairs(
                        task.pair_sums, block, panels, panel, (seen + 1) // 2, task.padded_value_dim, sums,
                        shrink,
                    )  # fmt: skip
                else:
                    call_sums(
                        sum_code, block, value, value_row, value_cell, task.cell_row, value_numbers,
                        sum_soon + 8 * t * count, beside, seen, task.padded_value_dim, sums, shrink,
                    )  # fmt: skip
        begin += most


@helper
def integers_at(task, scratch, t, tile):
    """The queries of a narrow tile as integers."""
    return scratch + task.query_integers + t * tile * (4 * task.padded_dim + 64)


@helper
def get_queries(task, tile):
    """The machine code that makes integers of the queries of a narrow tile."""
    if tile == 1:
        return task.queries1
    if tile == 2:
        return task.queries2
    return task.queries4 if tile == 4 else task.queries8


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
