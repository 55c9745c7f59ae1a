"""Attention of many rows through tensor cores: 16-bit queries over a cache of their type or of codes.

A row is one query head of one query token; rows that share a key head share its keys. A block takes a tile of
rows, its warps 16 or 32 of them each, and walks the context a tile of tokens at a time: while keys are
multiplied the tile's values are copied to shared memory, and the next keys while the values are. Queries wait
in shared memory, scores and sums stay in registers (see `fragments`).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numba import cuda, types

from kvkit import numeric
from kvkit_cuda.attend import forms, fragments, merge, tiles
from kvkit_cuda.attend.fragments import EVERYONE, LONGEST, STRIP, visible
from kvkit_cuda.attend.task import RECORD
from kvkit_cuda.ground import device, memory, ptx
from kvkit_cuda.moves import chunks
from kvkit_cuda.moves.transfer import INDEX1, INDEX2, WARP, sequence_of

WARPS = 4  # of a block
PARTS = 512  # into which a call is split, if they are no shorter than `tables.LEAST_PART`
SHRINK = 40  # binary digits by which careful weights are smaller: their sums stay finite
F32, U32 = types.float32, types.uint32
LOG2E, LN2 = np.float32(1 / math.log(2)), np.float32(math.log(2))
SIGNATURE = types.void(RECORD, INDEX1, INDEX1, INDEX2, INDEX1, INDEX1, INDEX1)

int32, quotient, put_float = device.int32, tiles.quotient, chunks.write("float32")
number_of = tiles.number_of


@dataclass(frozen=True, slots=True)
class Form:
    """What decides a kernel's machine code."""

    element: str
    stored: str
    cell: str | None
    dim: int
    value_dim: int
    strips: int  # of a warp
    tokens: int  # of a tile
    weighs: bool  # whether scores are capped, biased or masked

    @property
    def thread_rows(self):
        return 2 * self.strips

    @property
    def columns(self):
        return self.tokens // 4

    @property
    def width(self):
        return self.value_dim // 4

    @property
    def places(self):
        return fragments.BY_ROWS

    @property
    def query_bytes(self):
        """Of the rows of a block; outputs take the same place."""
        rows = WARPS * self.strips * STRIP
        return rows * max(tiles.row_bytes(self.dim), tiles.row_bytes(self.value_dim))

    @property
    def key_bytes(self):
        return self.tokens * tiles.row_bytes(self.dim)

    @property
    def shared_bytes(self):
        return self.query_bytes + self.key_bytes + self.tokens * tiles.row_bytes(self.value_dim)


def form(element, stored, cell, dim, value_dim, weighs):
    """The form of a kernel: as many rows and tokens as registers and shared memory hold."""
    longest, most = max(dim, value_dim), 64 if weighs else (96 if cell else 128)
    strips, tokens = 2 if longest <= most else 1, 32 if longest <= 192 else 16
    return Form(element, stored, cell, dim, value_dim, strips, tokens, bool(weighs))


def form_of(record, context):
    """The form of the kernel for a call."""
    weighs, sizes = record.cap or record.alibi or record.mask, (context.dim, context.value_dim)
    return form(context.packed, context.stored, context.cell, *sizes, weighs)


def fill(form, side):
    """(task, tile, number, b, head, begin, high, thread): begin to load a tile of keys (0) or values (1).

    A lane's `number` is the row of the cache that holds its token of the tile.
    """
    dim, tokens, from_lane = (form.dim, form.value_dim)[side], form.tokens, device.from_lane
    load = tiles.copy_row(dim)
    if form.cell:
        load = tiles.widen_row(dim, form.element, form.stored, form.cell)

    def fill(task, tile, number, b, head, begin, high, thread):
        if side == 0:
            at, step = task.keys + b * task.key_sequence + head * task.key_head, task.key_row
            cells = task.key_cells
        else:
            at, step = task.values + b * task.value_sequence + head * task.value_head, task.value_row
            cells = task.value_cells
        cells += b * task.cell_sequence + head * task.cell_head
        for r in range(thread >> 3, tokens, cuda.blockDim.y * (WARP // 8)):
            row, size = from_lane(number, r), 16 if begin + r < high else 0
            load(tile, r, at + row * step, cells + row * task.cell_row, task.cell_group, size, thread & 7)

    return device.part(fill)


def attend(form):
    """The kernel of a form."""
    strips, tokens, width = form.strips, form.tokens, form.value_dim // 4
    held_words, held_scores, held_rows, held_sums = (
        4 * strips,
        strips * tokens // 2,
        2 * strips,
        2 * strips * width,
    )
    query_bytes, key_bytes, block = form.query_bytes, form.key_bytes, memory.shared(form.shared_bytes)
    fill_queries, fill_keys, fill_values = tiles.copy_row(form.dim), fill(form, 0), fill(form, 1)
    store_row, put, packed = (
        tiles.store_row(form.value_dim),
        tiles.put(form.value_dim),
        ptx.packed(form.element),
    )
    times_keys, times_values = fragments.multiply_keys(form), fragments.multiply_values(form)
    times_carefully, softens = fragments.multiply_carefully(form), fragments.soften(form)
    weighs, hides = fragments.weigh(form), fragments.hide(form)
    weighed, exchange, arrived, anew = form.weighs, device.exchange, ptx.arrived, ptx.anew

    @device.inlined
    def row_of_thread(first, thread):
        return int32(first + (thread >> 5) * strips * STRIP + (thread >> 2 & 7))

    def attend(task, seqstarts, kvstarts, table, items, slots, slopes):
        if cuda.blockIdx.x >= items[items.shape[0] - 1]:
            return  # a captured launch has as many blocks as a step may need
        b = int32(sequence_of(items, cuda.blockIdx.x))
        start, seqlen, kvlen = seqstarts[b], seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        lane = int32(cuda.threadIdx.x)
        thread = int32(cuda.threadIdx.y * WARP + lane)
        rows = cuda.blockDim.y * strips * STRIP
        count = (seqlen * task.group + rows - 1) // rows  # of units for a key head
        parts = (items[b + 1] - items[b]) // (count * task.heads)
        unit = (cuda.blockIdx.x - items[b]) // parts
        part, head = int32(cuda.blockIdx.x - items[b] - unit * parts), int32(unit // count)
        unit = count - 1 - (unit - head * count)  # rows that see most come first
        first, last = int32(unit * rows), int32(seqlen * task.group - 1)
        slot = int32(slots[b] + (head * count + unit) * parts + part if parts > 1 else -1)
        low, until = visible(task, b, seqlen, kvlen, quotient(first, task.group))
        since, high = visible(task, b, seqlen, kvlen, quotient(min(first + rows - 1, last), task.group))
        if parts > 1:
            part_tokens = slots[slots.shape[0] - 1]
            low = min(low + part * part_tokens, high)
            high = min(high, low + part_tokens)
            until = min(until, high)
        low, high, since, until = int32(low), int32(high), int32(since), int32(until)

        queries = block()
        keys, values = queries + query_bytes, queries + query_bytes + key_bytes
        for r in range(thread >> 3, rows, cuda.blockDim.y * (WARP // 8)):
            row = min(first + r, last)
            token = quotient(row, task.group)
            at = task.query + b * task.query_sequence + (start + token) * task.query_token
            at += (head * task.group + row - token * task.group) * task.query_head
            fill_queries(queries, r, at, 0, 1, 16 if first + r <= last else 0, thread & 7)

        a, scores = cuda.local.array(held_words, U32), cuda.local.array(held_scores, F32)
        sums = cuda.local.array(held_sums, F32)
        top, total = cuda.local.array(held_rows, F32), cuda.local.array(held_rows, F32)
        scale = numeric.float_of(np.uint32(task.scale)) * (np.float32(1) if weighed else LOG2E)
        shrink = np.float32(1)
        for attempt in range(2):
            for i in range(held_sums):
                sums[i] = np.float32(0)
            for r in range(held_rows):
                top[r], total[r] = numeric.MINUS_INF, np.float32(0)
            number, begin = np.int64(0), low
            if low < high:
                number = number_of(task, table, b, min(low + lane, high - 1))
                fill_keys(task, keys, number, b, head, low, high, thread)
            while begin < high:
                arrived()
                cuda.syncthreads()
                fill_values(task, values, number, anew(b), anew(head), begin, high, anew(thread))
                number = number_of(task, table, anew(b), min(begin + tokens + lane, high - 1))
                times_keys(queries, keys, thread >> 5, anew(lane), a, scores)
                arrived()
                cuda.syncthreads()
                if begin + tokens < high:
                    fill_keys(task, keys, number, anew(b), anew(head), begin + tokens, high, anew(thread))
                for i in range(held_scores):
                    scores[i] *= scale
                row = row_of_thread(first, anew(thread))
                if weighed:
                    weighs(
                        task,
                        seqstarts,
                        kvstarts,
                        slopes,
                        anew(b),
                        anew(head),
                        row,
                        last,
                        begin,
                        anew(lane),
                        scores,
                    )
                    for i in range(held_scores):
                        scores[i] *= LOG2E
                if begin < since or begin + tokens > until:
                    hides(task, seqstarts, kvstarts, anew(b), row, last, begin, high, anew(lane), scores)
                softens(scores, sums, top, total, np.float32(attempt * SHRINK))
                if attempt == 0:
                    times_values(scores, values, anew(lane), a, sums)
                else:
                    times_carefully(scores, values, anew(lane), a, sums)
                begin = int32(begin + tokens)

            odd = np.float32(0)
            for i in range(held_sums):
                odd += sums[i] * np.float32(0)
            arrived()
            if not cuda.syncthreads_or(int32(odd != np.float32(0))):
                break
            shrink = np.float32(2.0**-SHRINK)

        start, row = seqstarts[anew(b)], row_of_thread(first, thread)
        for r in range(held_rows):
            whole = total[r] + exchange(EVERYONE, total[r], 1)
            total[r] = (whole + exchange(EVERYONE, whole, 2)) * (np.float32(1) / shrink)
        for r in range(held_rows):  # by turns, as a loop this long cannot name registers
            here = row + (r >> 1) * STRIP + (r & 1) * 8
            factor, top[0] = np.float32(0), top[0] * LN2
            if here <= last and slot >= 0:
                at = merge.place(task, slot, rows, here - first) + task.value_dim * 4
                put_float(at, top[0])
                put_float(at + 4, total[0])
                put_float(at + 8, shrink)
            elif here <= last:
                factor = merge.ended(task, b, start, head, here, top[0], total[0], shrink)
            for i in range(held_rows - 1):
                top[i], total[i] = top[i + 1], total[i + 1]
            total[held_rows - 1] = factor
        for r in range(held_rows):
            here = row + (r >> 1) * STRIP + (r & 1) * 8
            for i in range(0, width, 2):
                low_sum, high_sum = sums[r * width + i], sums[r * width + i + 1]
                if slot < 0:
                    word = packed(low_sum * total[r], high_sum * total[r])
                    put(queries, here - first, i >> 1, lane & 3, word)
                elif here <= last:
                    at = merge.place(task, slot, rows, here - first) + (i * 4 + (lane & 3) * 2) * 4
                    put_float(at, low_sum)
                    put_float(at + 4, high_sum)
        cuda.syncthreads()
        if slot < 0:
            for r in range(thread >> 3, rows, cuda.blockDim.y * (WARP // 8)):
                if first + r <= last:
                    store_row(queries, r, merge.written_to(task, b, start, head, first + r), thread & 7)

    return attend


@functools.cache
def compiled(form):
    return device.kernel(attend(form), SIGNATURE, form)


def suits(record, context, steps, most_rows):
    """Whether tensor cores take a call: 16-bit data, whole fragments, aligned rows, and rows enough."""
    alignment = 16 if context.cell is None else tiles.code_bytes(context.stored)
    return most_rows > forms.ROWS and fragments.suits(record, context, steps, most_rows, alignment)


def prepare(record, context, tables, most_rows, stream):
    """Launches: of the kernel, and of the merge if contexts are split."""
    form = form_of(record, context)
    warps = min(WARPS, 1 << (-(-most_rows // (form.strips * STRIP)) - 1).bit_length())
    rows = warps * form.strips * STRIP
    record = record._replace(page_size=min(record.page_size, LONGEST))  # so that divisions are of 32 bits
    block = WARP, warps
    return merge.prepare(compiled(form), record, context.packed, tables, rows, block, stream, PARTS)
