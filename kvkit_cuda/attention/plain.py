"""Attention for every format, mask and head size: teams of threads read the cache in place.

A block takes an item of work: the rows of a tile (up to 8 query heads of a token, or of several, that share a
key head) over a part of a context. Its teams take tokens in turn. The threads of a team take the chunks of a
row of the cache, so that a key is read and widened once for all rows of the tile; queries, sums and the state
of the softmax stay in registers. The teams' results are put together in order at the end.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.formulas.index import page_of, row_of
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import merge, scores
from kvkit_cuda.attention.forms import ELEMENTS, form_of
from kvkit_cuda.attention.task import RECORD
from kvkit_cuda.copy import blocks, chunks
from kvkit_cuda.copy.transfer import INDEX1, INDEX2, sequence_of
from kvkit_cuda.device_runtime import device, memory

SHRINK = np.float32(2**-40)  # of weights where sums overflow
F32 = types.float32
SIGNATURE = types.void(RECORD, INDEX1, INDEX1, INDEX2, INDEX1, INDEX1, INDEX1)

visible, weight = scores.visible, numeric.weight
load_word = memory.load(8, 8)


# What is known of a row of a tile: the keys it sees, its position, its mask and query, the bits of its slope.
LOW, HIGH, POSITION, MASK, QUERY, SLOPE, FACTS = range(7)


@shared
def word_at(address):
    low, _ = load_word(address)
    return np.int64(low)


@shared
def number_at(address):
    """A float32 that comes as its bits."""
    low, _ = load_word(address)
    return numeric.float_of(np.uint32(low))


def attend(form):
    """The kernel of a form."""
    span, pieces, rows, lanes, teams, ahead = (
        form.span, form.pieces, form.rows, form.lanes, form.teams, form.ahead,
    )  # fmt: skip
    held, threads, several = rows * pieces * span, lanes * teams, rows * ahead
    free = form.free
    learn, take_queries, adjust, hide = learning(form), taking(form), adjusting(form), hiding(form)
    times_keys, times_values, end = multiplying(form), adding(form), ending(form)
    soften, shrink_sums = scores.soften(rows, ahead), scores.shrink(rows, span)

    def attend(task, seqstarts, kvstarts, table, items, slots, slopes):
        if cuda.blockIdx.x >= items[items.shape[0] - 1]:
            return  # a captured launch has as many blocks as a step may need
        thread = cuda.threadIdx.y * lanes + cuda.threadIdx.x
        b = sequence_of(items, cuda.blockIdx.x)
        seqlen, kvlen = seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        tiles = (seqlen * task.group + rows - 1) // rows
        parts = (items[b + 1] - items[b]) // (tiles * task.heads)
        item = cuda.blockIdx.x - items[b]  # [heads, tiles, parts]
        unit = item // parts
        head = unit // tiles
        first = (unit - head * tiles) * rows
        live = min(rows, seqlen * task.group - first)
        facts = cuda.shared.array((rows, FACTS), types.int64)
        if thread < rows:
            row = first + min(thread, live - 1)
            learn(task, b, seqstarts[b], kvstarts[b], seqlen, kvlen, head, row, slopes, facts[thread])
        cuda.syncthreads()
        all_from, all_until = facts[live - 1, LOW], facts[0, HIGH]
        low, high = facts[0, LOW], facts[live - 1, HIGH]
        if parts > 1:  # rows that see less may have nothing to do
            part_tokens = slots[slots.shape[0] - 1]
            low = min(low + (item - unit * parts) * part_tokens, high)
            high = min(high, low + part_tokens)

        queries = cuda.local.array(held, F32)  # [pieces, rows, span]
        sums = cuda.local.array(held, F32)  # likewise
        weights = cuda.local.array(several, F32)  # [ahead, rows]: scores at first
        top, total, factor = (
            cuda.local.array(rows, F32),
            cuda.local.array(rows, F32),
            cuda.local.array(rows, F32),
        )
        cells_of = cuda.local.array(pieces, types.int64)
        scale, value_scale = numeric.float_of(np.uint32(task.scale)), np.float32(1)
        if task.key_scales:
            at = b * task.scale_sequence + head * task.scale_head
            scale, value_scale = number_at(task.key_scales + at), number_at(task.value_scales + at)
        take_queries(task, scale, facts, queries, cells_of)
        cap = numeric.float_of(np.uint32(task.cap))

        keys = task.keys + b * task.key_sequence + head * task.key_head
        values = task.values + b * task.value_sequence + head * task.value_head
        key_cells = task.key_cells + b * task.cell_sequence + head * task.cell_head
        value_cells = task.value_cells + b * task.cell_sequence + head * task.cell_head
        found = cuda.shared.array(threads, types.int64)  # the rows of the cache that hold a block of tokens
        found_values = cuda.shared.array(threads, types.int64) if free else found
        shrink = np.float32(1)
        for _ in range(2):
            for i in range(held):
                sums[i] = np.float32(0)
            for r in range(rows):
                top[r] = numeric.MINUS_INF
                total[r] = np.float32(0)
            begin = low - threads if low < high else high
            while begin < high:
                position = min(begin + threads + thread, high - 1)  # of the next block: it is asked for now
                page = page_of(position, task.page_size)
                number = other = table[b, page]
                rest = row_of(0, position, task.page_size)
                if free:
                    if task.value_table:
                        other = word_at(task.value_table + (b * table.shape[1] + page) * 8)
                    other += rest * task.value_step
                    rest *= task.key_step
                number += rest
                count = min(high - begin, threads) if begin >= low else 0
                adjusts = task.cap != 0 or task.alibi != 0 or task.mask != 0 or task.sloped != 0
                adjusts = adjusts or begin < all_from or begin + count > all_until
                for block in range(0, count, teams * ahead):
                    times_keys(task, keys, key_cells, cells_of, found, block, count, queries, weights)
                    if adjusts:
                        adjust(task, facts, begin + block, cap, weights)
                    hide(block, count, weights)
                    soften(weights, top, total, factor, shrink)
                    p = 0
                    while p < pieces:
                        shrink_sums(sums, p * rows * span, factor)
                        p += 1
                    times_values(
                        task, values, value_cells, cells_of, found_values, block, count, weights, sums
                    )
                cuda.syncthreads()
                found[thread] = number
                if free:
                    found_values[thread] = other
                cuda.syncthreads()
                begin += threads
            slot = slots[b] + item if parts > 1 else -1
            if end(task, sums, top, total, shrink, value_scale, b, seqstarts[b], head, first, live, slot):
                break
            shrink = SHRINK

    return attend


def learning(form):
    """What is known of a row of a tile, found by a thread."""

    @device.inlined
    def learn(task, b, start, kvstart, seqlen, kvlen, head, row, slopes, facts):
        token = row // task.group
        query = head * task.group + row - token * task.group
        mask = task.mask + b * task.mask_sequence + query * task.mask_head + token * task.mask_row
        if task.mask_packed:
            mask += start * task.mask_row
        if task.mask_packed == 1:  # 2: columns are a sequence's own
            mask += kvstart * task.mask_column
        query_at = task.query + b * task.query_sequence + (start + token) * task.query_token
        facts[LOW], facts[HIGH] = visible(task, b, seqlen, kvlen, token)
        facts[POSITION] = kvlen - seqlen + token
        facts[MASK] = mask
        facts[QUERY] = query_at + query * task.query_head
        facts[SLOPE] = slopes[b * task.slopes_sequence + query]

    return learn


def taking(form):
    """The thread's chunks of all queries, scaled, and where the scales of its chunks of a row lie."""
    span, pieces, rows, lanes = form.span, form.pieces, form.rows, form.lanes
    read, packed_bytes = chunks.read(form.packed), BY_NAME[form.packed].bytes(1)
    cell_bytes, blocks = BY_NAME[form.cell].bytes(1) if form.cell else 0, form.blocks

    @device.inlined
    def take(task, scale, facts, queries, cells_of):
        for p in range(pieces):
            chunk = p * lanes + cuda.threadIdx.x
            cells_of[p] = chunk * span // task.cell_group * cell_bytes if cell_bytes else 0
            if blocks:
                cells_of[p] = chunk * span  # an element of a row
            for r in range(rows):
                at = facts[r, QUERY] + chunk * span * packed_bytes
                for i in range(span):
                    x = np.float32(0)
                    if chunk * span < task.dim:
                        x = read(at + i * packed_bytes) * scale
                    queries[(p * rows + r) * span + i] = x

    return take


def chunk_of(form, stored):
    """The bytes of a chunk, and what widens it; in rows of blocks that finds it by its first element."""
    if form.blocks:
        return 0, blocks.widen(stored, form.span)
    widen = chunks.widen(form.rounds, stored, form.cell, form.cells, form.span)
    return BY_NAME[stored].bytes(form.span), widen


def multiplying(form):
    """Scores of the team's next tokens: products of keys with queries, added up by its threads."""
    pieces, rows, lanes, teams, ahead = form.pieces, form.rows, form.lanes, form.teams, form.ahead
    span, free = form.span, form.free
    stored_bytes, widen = chunk_of(form, form.stored)
    multiply, add_others = scores.multiply(rows, span), device.add_others(rows * ahead)
    turn = turning(form)

    @device.inlined
    def times_keys(task, keys, cells, cells_of, found, block, count, queries, products):
        elements = cuda.local.array(span, F32)
        for i in range(rows * ahead):
            products[i] = np.float32(0)
        for t in range(ahead):
            row = found[min(block + t * teams + cuda.threadIdx.y, count - 1)]
            p = 0
            while p < pieces:
                chunk = p * lanes + cuda.threadIdx.x
                if chunk * span < task.dim:
                    at = keys + row * task.key_row
                    at += chunk * (span * task.key_element if free else stored_bytes)
                    widen(at, cells + row * task.cell_row + cells_of[p], elements)
                    multiply(elements, queries, p * rows * span, products, 0)
                p += 1
            turn(products)
        distance = 1
        while distance < lanes:
            add_others(products, distance)
            distance *= 2

    return times_keys


def turning(form):
    """The scores of a team, a token on: a loop that counts no tokens need not be unrolled."""
    rows, last = form.rows, form.ahead - 1

    @device.inlined
    def turn(scores):
        for r in range(rows):
            first = scores[r]
            for t in range(last):
                scores[t * rows + r] = scores[(t + 1) * rows + r]
            scores[last * rows + r] = first

    return turn


def adjusting(form):
    """Caps, biases and masks of scores, each of them found by one thread of the team."""
    rows, lanes, teams, several = form.rows, form.lanes, form.teams, form.rows * form.ahead

    @device.inlined
    def adjust(task, facts, first, cap, products):
        lane, team = cuda.threadIdx.x, cuda.threadIdx.y
        board = cuda.shared.array((teams, several), F32)
        if lane == 0:
            for i in range(several):
                board[team, i] = products[i]
        cuda.syncthreads()
        for i in range(lane, several, lanes):
            t = i // rows
            r, key = i - t * rows, first + t * teams + team
            score = scores.capped(board[team, i], cap)
            if key < facts[r, LOW] or key >= facts[r, HIGH]:
                score = numeric.MINUS_INF
            elif task.alibi or task.sloped:
                distance = key - facts[r, POSITION]
                score = scores.leaning(score, facts[r, SLOPE], min(distance, -distance))
            if task.mask and score != numeric.MINUS_INF:
                at = facts[r, MASK] + key * task.mask_column
                score = scores.masked(score, task.mask_kind, at)
            board[team, i] = score
        cuda.syncthreads()
        for i in range(several):
            products[i] = board[team, i]
        cuda.syncthreads()

    return adjust


def hiding(form):
    """Tokens behind the last one of a block count for nothing."""
    rows, teams, ahead = form.rows, form.teams, form.ahead

    @device.inlined
    def hide(block, count, products):
        t = 0
        while t < ahead:
            for r in range(rows):
                if block + t * teams + cuda.threadIdx.y >= count:
                    products[t * rows + r] = numeric.MINUS_INF
            t += 1

    return hide


def adding(form):
    """Values of the team's tokens, times their weights, added to its sums."""
    pieces, rows, lanes, teams, ahead = form.pieces, form.rows, form.lanes, form.teams, form.ahead
    span, free = form.span, form.free
    stored_bytes, widen = chunk_of(form, form.values)
    add, turn = scores.add(rows, span), turning(form)

    @device.inlined
    def times_values(task, values, cells, cells_of, found, block, count, weights, sums):
        elements = cuda.local.array(span, F32)
        for t in range(ahead):
            row = found[min(block + t * teams + cuda.threadIdx.y, count - 1)]
            p = 0
            while p < pieces:
                chunk = p * lanes + cuda.threadIdx.x
                if chunk * span < task.value_dim:
                    at = values + row * task.value_row
                    at += chunk * (span * task.value_element if free else stored_bytes)
                    widen(at, cells + row * task.cell_row + cells_of[p], elements)
                    add(elements, sums, p * rows * span, weights, 0)
                p += 1
            turn(weights)

    return times_values


def ending(form):
    """What the teams have found together: written to a slot, or, finished, to the output."""
    span, pieces, rows, lanes, teams = form.span, form.pieces, form.rows, form.lanes, form.teams
    write, write_float = chunks.write(form.packed), chunks.write("float32")
    packed_bytes, held, threads = BY_NAME[form.packed].bytes(1), rows * pieces * span, lanes * teams
    at_once = max(1, ELEMENTS // (rows * span))  # pieces
    width = min(pieces, at_once) * rows * span
    apart = width + 1  # so that threads use different banks

    @device.inlined
    def end(task, sums, top, total, shrink, value_scale, b, start, head, first, live, slot):
        """Whether all is finite, or cannot be."""
        lane, team = cuda.threadIdx.x, cuda.threadIdx.y
        thread = team * lanes + lane
        tops = cuda.shared.array((teams, rows), F32)
        totals = cuda.shared.array((teams, rows), F32)
        factors = cuda.shared.array(rows, F32)
        together = cuda.shared.array((threads, apart), F32)
        if lane == 0:
            for r in range(rows):
                tops[team, r] = top[r]
                totals[team, r] = total[r]
        cuda.syncthreads()
        if thread < live:
            new, whole = numeric.MINUS_INF, np.float32(0)
            for t in range(teams):
                new = max(new, tops[t, thread])
            for t in range(teams):
                whole += totals[t, thread] * weight(tops[t, thread], new)
            if slot >= 0:
                factors[thread] = np.float32(1)
                at = merge.place(task, slot, rows, thread) + task.value_dim * 4
                write_float(at, new)
                write_float(at + 4, whole)
                write_float(at + 8, shrink)
            else:
                factors[thread] = merge.ended(task, b, start, head, first + thread, new, whole, shrink)
        for r in range(rows):
            new = numeric.MINUS_INF
            for t in range(teams):
                new = max(new, tops[t, r])
            factor = weight(top[r], new) * value_scale
            p = 0
            while p < pieces:
                for i in range(span):
                    at = (p * rows + r) * span + i
                    sums[at] *= factor
                p += 1
        odd = 0
        for piece in range(0, pieces, at_once):
            if piece:  # what the last turn wrote has been read
                cuda.syncthreads()
            for i in range(width):
                if piece * rows * span + i < held:
                    together[thread, i] = sums[piece * rows * span + i]
            cuda.syncthreads()
            for r in range(live):
                out = merge.written_to(task, b, start, head, first + r)
                for i in range(thread, at_once * lanes * span, threads):
                    e = piece * lanes * span + i
                    if e < task.value_dim:
                        p = i // (lanes * span)
                        member = i // span - p * lanes
                        x = np.float32(0)
                        for t in range(teams):
                            x += together[t * lanes + member, (p * rows + r) * span + i % span]
                        if x * np.float32(0) != np.float32(0):
                            odd = 1
                        if slot >= 0:
                            write_float(merge.place(task, slot, rows, r) + 4 * e, x)
                        else:
                            write(out + e * packed_bytes, x * factors[r])
        return cuda.syncthreads_or(odd) == 0

    return end


@functools.cache
def compiled(form):
    return device.kernel(attend(form), SIGNATURE, form)


def suits(record, context, reach, most_rows):
    return True


def prepare(record, context, tables, most_rows, stream):
    """Launches: of the kernel, and of the merge if contexts are split."""
    form = form_of(record, context, most_rows)
    block = form.lanes, form.teams
    return merge.prepare(compiled(form), record, context.packed, tables, form.rows, block, stream)
