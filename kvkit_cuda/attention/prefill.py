"""Attention of many rows through tensor cores: 16-bit queries over a cache of their type or of codes.

A row is one query head of one query token; rows that share a key head share its keys. A block takes a tile of
rows, its warps 16 or 32 of them each, and walks the context a tile of tokens at a time: while one is
multiplied the next one is copied to shared memory, and a block waits once for both. Queries are there too,
scores and sums stay in registers (see `fragments`).
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from numba import cuda, types

from kvkit.formulas import numeric
from kvkit_cuda.attention import forms, fragments, merge, tiles
from kvkit_cuda.attention.fragments import EVERYONE, LONGEST, STRIP, visible
from kvkit_cuda.attention.task import RECORD
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import INDEX1, INDEX2, WARP, sequence_of
from kvkit_cuda.device_runtime import device, memory, ptx

WARPS = 8  # of a block
PARTS = 512  # into which a call is split, if they are no shorter than `tables.LEAST_PART`
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
        """Of the rows of a warp; outputs take the same place."""
        return self.strips * STRIP * max(tiles.row_bytes(self.dim), tiles.row_bytes(self.value_dim))

    @property
    def key_bytes(self):
        return self.tokens * tiles.row_bytes(self.dim)

    @property
    def stage_bytes(self):
        """Of a tile of keys and one of values."""
        return self.key_bytes + self.tokens * tiles.row_bytes(self.value_dim)

    @property
    def shared_bytes(self):
        """Of a block that is as large as may be."""
        return self.bytes_of(WARPS)

    def bytes_of(self, warps):
        return 2 * self.stage_bytes + warps * self.query_bytes


def form(element, stored, cell, dim, value_dim, weighs):
    """The form of a kernel: as many rows and tokens as registers and shared memory hold."""
    longest, most = max(dim, value_dim), 64 if weighs else (96 if cell else 128)
    strips = 2 if longest <= most else 1
    made = Form(element, stored, cell, dim, value_dim, strips, 32, bool(weighs))
    return made if made.shared_bytes <= device.SHARED_MEMORY else replace(made, tokens=16)


def form_of(record, context):
    """The form of the kernel for a call."""
    sizes = context.dim, context.value_dim
    return form(context.packed, context.stored, context.cell, *sizes, fragments.weighed(record))


def fill(form):
    """(task, stage, number, keys, values, cells, thread): begin to load a tile of keys and values.

    A lane's `number` is the row of the cache that holds its token of the tile, or that of some token; `keys`
    and `values` are where those of row 0 lie, as are `cells`, from the first scale of keys, or of values, on.
    """
    tokens, from_lane, key_bytes = form.tokens, device.from_lane, form.key_bytes
    load_keys, load_values = tiles.copy_row(form.dim), tiles.copy_row(form.value_dim)
    if form.cell:
        codes = form.element, form.stored, form.cell
        load_keys, load_values = tiles.widen_row(form.dim, *codes), tiles.widen_row(form.value_dim, *codes)

    def fill(task, stage, number, keys, values, cells, thread):
        r = int32(thread >> 3)
        while r < tokens:
            row, place = from_lane(number, r), thread & 7
            each = cells + row * task.cell_row
            load_keys(stage, r, keys + row * task.key_row, task.key_cells + each, task.cell_group, place)
            at = values + row * task.value_row
            load_values(stage + key_bytes, r, at, task.value_cells + each, task.cell_group, place)
            r = int32(r + cuda.blockDim.y * (WARP // 8))

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
    key_bytes, stage_bytes, block = form.key_bytes, form.stage_bytes, memory.dynamic(form.shared_bytes)
    fill_queries, fill_tile = tiles.copy_row(form.dim), fill(form)
    key_place, value_place = tiles.place(form.dim), tiles.place(form.value_dim)
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
        low, _ = visible(task, b, seqlen, kvlen, quotient(first, task.group))
        _, high = visible(task, b, seqlen, kvlen, quotient(min(first + rows - 1, last), task.group))
        # What the first row of a warp sees, and the last one.
        own = int32(first + cuda.threadIdx.y * strips * STRIP)
        since, until = visible(task, b, seqlen, kvlen, quotient(min(own, last), task.group))
        end = min(own + strips * STRIP - 1, last)
        all_since, end = visible(task, b, seqlen, kvlen, quotient(end, task.group))
        if parts > 1:
            part_tokens = slots[slots.shape[0] - 1]
            low = min(low + part * part_tokens, high)
            high = min(high, low + part_tokens)
        low, high, since, all_since = int32(low), int32(high), int32(since), int32(all_since)
        until, end = int32(min(until, high)), int32(min(end, high) if own <= last else 0)

        stage = int32(block())
        both, queries = int32(2 * stage + stage_bytes), int32(stage + 2 * stage_bytes)
        r = int32(thread >> 3)
        while r < rows:
            row = min(first + r, last)
            token = quotient(row, task.group)
            at = task.query + b * task.query_sequence + (start + token) * task.query_token
            at += (head * task.group + row - token * task.group) * task.query_head
            fill_queries(queries, r, at, 0, 1, thread & 7)
            r = int32(r + cuda.blockDim.y * (WARP // 8))

        a, scores = cuda.local.array(held_words, U32), cuda.local.array(held_scores, F32)
        sums = cuda.local.array(held_sums, F32)
        top, total = cuda.local.array(held_rows, F32), cuda.local.array(held_rows, F32)
        peaks = cuda.local.array(held_rows, F32)
        scale = numeric.float_of(np.uint32(task.scale))
        keys = task.keys + b * task.key_sequence + head * task.key_head
        values = task.values + b * task.value_sequence + head * task.value_head
        cells = b * task.cell_sequence + head * task.cell_head
        first_key = key_place((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1)
        first_value = int32(key_bytes + value_place(lane & 15, lane >> 4))
        first_query = int32(queries + key_place((thread >> 5) * strips * STRIP + (lane & 15), lane >> 4))
        by, final = tiles.reciprocal(task.page_size), int32(high - 1)
        odd, shrink = np.float32(0), np.float32(1)
        for attempt in range(2):
            for i in range(held_sums):
                sums[i] = np.float32(0)
            for r in range(held_rows):
                top[r], total[r] = numeric.MINUS_INF, np.float32(0)
            number, begin = np.int64(0), low
            if low < high:
                number = number_of(task, by, table, b, min(int32(low + lane), final))
                fill_tile(task, stage, number, keys, values, cells, thread)
                number = number_of(task, by, table, b, min(int32(low + tokens + lane), final))
            while begin < high:
                arrived()
                cuda.syncthreads()
                here, coming, stage = stage, int32(begin + tokens), int32(both - stage)
                if coming < high:
                    fill_tile(task, stage, number, keys, values, cells, thread)
                    number = number_of(task, by, table, b, min(int32(coming + tokens + lane), final))
                if begin < end and coming > since:
                    times_keys(first_query, int32(here + first_key), a, scores)
                    if weighed:
                        for i in range(held_scores):
                            scores[i] *= scale
                        row = row_of_thread(first, anew(thread))
                        weighs(
                            task, seqstarts, kvstarts, slopes, anew(b), anew(head), row, last, begin,
                            anew(lane), scores,
                        )  # fmt: skip
                    if begin < all_since or coming > until:
                        row = row_of_thread(first, anew(thread))
                        hides(task, seqstarts, kvstarts, anew(b), row, last, begin, high, anew(lane), scores)
                    softens(scores, sums, top, total, peaks, LOG2E if weighed else scale * LOG2E)
                    if attempt == 0:
                        times_values(scores, int32(here + first_value), a, sums)
                    else:
                        times_carefully(scores, int32(here + key_bytes), anew(lane), a, sums)
                begin = coming

            odd = np.float32(0)
            for i in range(held_sums):
                odd += sums[i] * np.float32(0)
            arrived()
            if not cuda.syncthreads_or(int32(odd != np.float32(0))):
                break
            shrink = fragments.SMALLER

        start, row = seqstarts[anew(b)], row_of_thread(first, thread)
        for r in range(held_rows):
            whole = total[r] + exchange(EVERYONE, total[r], 1)
            total[r] = whole + exchange(EVERYONE, whole, 2)
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


def suits(record, context, reach, most_rows):
    """Whether tensor cores take a call: 16-bit data, whole fragments, aligned rows, and rows enough."""
    alignment = 16 if context.cell is None else tiles.code_bytes(context.stored)
    return most_rows > forms.ROWS and fragments.suits(record, context, reach, most_rows, alignment)


def prepare(record, context, tables, most_rows, stream):
    """Launches: of the kernel, and of the merge if contexts are split."""
    form = form_of(record, context)
    warps = min(WARPS, 1 << (-(-most_rows // (form.strips * STRIP)) - 1).bit_length())
    rows = warps * form.strips * STRIP
    record = record._replace(page_size=min(record.page_size, LONGEST))  # so that divisions are of 32 bits
    block = WARP, warps
    shared = form.bytes_of(warps)
    return merge.prepare(compiled(form), record, context.packed, tables, rows, block, stream, PARTS, shared)
