"""Attention of few rows over long contexts through tensor cores: 16-bit queries over their type or codes.

A row is one query head of one query token; a block takes the rows that share a key head, up to 16 of them,
over a part of a context. What counts is that bytes of the cache are always on their way: each warp copies
tiles of 16 tokens of its own to shared memory, and multiplies one while others arrive (see `panels`). It
waits for no other warp until the end, when their results are put together in order.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import fragments, merge, panels, stored_tiles, tiles
from kvkit_cuda.attention.decode_forms import form_of, suits
from kvkit_cuda.attention.fragments import EVERYONE, LONGEST, LOWEST, visible
from kvkit_cuda.attention.panels import WORDS
from kvkit_cuda.attention.prefill import LN2, LOG2E, SIGNATURE
from kvkit_cuda.attention.stored_tiles import TOKENS, VALUES
from kvkit_cuda.attention.tiles import CHUNK, put_word
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import WARP, sequence_of
from kvkit_cuda.device_runtime import device, memory, ptx

__all__ = ["prepare", "suits"]
PARTS = 4096  # into which a call is split, if they are no shorter than `tables.LEAST_PART`
F32, U32 = types.float32, types.uint32

int32, quotient, number_of, put_float = device.int32, tiles.quotient, tiles.number_of, chunks.write("float32")
_read_sums, _write_pair = memory.load(8, 8, space=memory.SHARED), memory.store(4, 4)
_write_addresses = memory.store(16, 16, memory.SHARED)


def attend(form):
    """The kernel of a form."""
    rows, blocks, stages = form.thread_rows, form.blocks, form.stages
    held_scores, held_sums = rows * form.columns, rows * form.width
    held_queries = blocks * form.keys.panels * 4
    key_bytes, stage_bytes, step = form.keys.bytes, form.stage_bytes, form.warps * TOKENS
    place_of_tiles, read_queries = memory.shared(form.shared_bytes), panels.query_reader(form.keys)
    fill_tile = stored_tiles.fill(form.keys, form.values)
    times_keys, times_values = panels.multiply_keys(form), panels.multiply_values(form)
    times_carefully, softens = panels.multiply_carefully(form), fragments.soften(form)
    weighs, hides, end = fragments.weigh(form), fragments.hide(form), ending(form)
    weighed, meet, anew = form.weighs, device.meet, ptx.anew
    code_mask, last_place = stored_tiles.code_mask(form.keys), (stages - 1) * stage_bytes
    bases, ring_bytes = stages * stage_bytes, form.ring_bytes
    together, arrived = ptx.together, ptx.all_but(stages - 1)

    def attend(task, seqstarts, kvstarts, table, items, slots, slopes):
        if cuda.blockIdx.x >= items[items.shape[0] - 1]:
            return  # a captured launch has as many blocks as a step may need
        b = int32(sequence_of(items, cuda.blockIdx.x))
        start, seqlen, kvlen = seqstarts[b], seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
        parts = (items[b + 1] - items[b]) // task.heads
        item = cuda.blockIdx.x - items[b]
        head, last = int32(item // parts), int32(seqlen * task.group - 1)
        slot = int32(slots[b] + item if parts > 1 else -1)
        low, until = visible(task, b, seqlen, kvlen, 0)
        since, high = visible(task, b, seqlen, kvlen, seqlen - 1)
        if parts > 1:
            part_tokens = slots[slots.shape[0] - 1]
            low = min(low + (item - head * parts) * part_tokens, high)
            high = min(high, low + part_tokens)
            until = min(until, high)
        low, high, since, until = int32(low), int32(high), int32(since), int32(until)

        words, queries = cuda.local.array(WORDS, U32), cuda.local.array(held_queries, U32)
        for block in range(blocks):
            here = 8 * block + (lane >> 2)
            token = quotient(min(here, last), task.group)
            at = task.query + b * task.query_sequence + (start + token) * task.query_token
            at += (head * task.group + min(here, last) - token * task.group) * task.query_head
            read_queries(at, here <= last, lane, words, queries, block)
        board = int32(place_of_tiles())
        ring = anew(int32(board + warp * ring_bytes))
        row = int32((lane & 3) * 2)
        mask = anew(int32(code_mask | cuda.threadIdx.z))  # 0, but a constant would be moved in for each use
        scores, sums = cuda.local.array(held_scores, F32), cuda.local.array(held_sums, F32)
        top, total = cuda.local.array(rows, F32), cuda.local.array(rows, F32)
        peaks = cuda.local.array(rows, F32)
        scale = numeric.float_of(np.uint32(task.scale))
        by = tiles.reciprocal(task.page_size)
        for attempt in range(2):
            for i in range(held_sums):
                sums[i] = np.float32(0)
            for r in range(rows):
                top[r], total[r] = numeric.MINUS_INF, np.float32(0)
            if lane == 0:  # where all begins; registers are scarce
                cells = b * task.cell_sequence + head * task.cell_head
                put_addresses(
                    int32(ring + bases),
                    task.keys + b * task.key_sequence + head * task.key_head,
                    task.values + b * task.value_sequence + head * task.value_head,
                )
                put_addresses(int32(ring + bases + 16), task.key_cells + cells, task.value_cells + cells)
            meet()
            number, place, begin = int32(0), ring, int32(low + warp * TOKENS - stages * step)
            if begin + stages * step < high:
                position = min(int32(begin + stages * step + (lane & 15)), int32(high - 1))
                number = int32(number_of(task, by, table, b, position))
            while begin < high:  # before the first tile others are asked for
                coming = int32(begin + stages * step)
                if begin >= low:
                    arrived()
                    meet()
                    times_keys(queries, place, anew(lane), mask, words, scores)
                    if weighed:
                        for j in range(held_scores):
                            scores[j] *= scale
                        weighs(
                            task, seqstarts, kvstarts, slopes, anew(b), anew(head), anew(row), anew(last),
                            begin, anew(lane), scores,
                        )  # fmt: skip
                    if begin < since or begin + TOKENS > until:
                        hides(
                            task, seqstarts, kvstarts, anew(b), anew(row), anew(last), begin, high,
                            anew(lane), scores,
                        )  # fmt: skip
                    softens(scores, sums, top, total, peaks, LOG2E if weighed else scale * LOG2E)
                    at = int32(place + key_bytes)
                    if attempt == 0:
                        times_values(scores, at, anew(lane), mask, words, sums)
                    else:
                        times_carefully(scores, at, anew(lane), mask, words, sums)
                    meet()
                if coming < high:
                    fill_tile(place, number, int32(ring + bases), task, anew(lane))
                    position = min(int32(coming + step + (anew(lane) & 15)), int32(high - 1))
                    number = int32(number_of(task, by, table, b, position))
                together()
                begin = int32(begin + step)
                place = int32(ring if place == int32(ring + last_place) else place + stage_bytes)
            shrink = fragments.SMALLER if attempt else np.float32(1)
            if end(
                task, seqstarts, anew(board), sums, top, total, shrink, anew(b), anew(head), anew(last),
                anew(slot), anew(lane), anew(warp),
            ):  # fmt: skip
                break

    return attend


def ending(form):
    """What the warps have found together: written to a slot, or, finished, to the output."""
    rows, width, warps, tile, apart = form.thread_rows, form.width, form.warps, form.values, form.values.apart
    row_of, distances = form.places.row, form.places.distances
    all_rows, row_bytes, threads = form.rows, 4 * form.values.dim, form.warps * WARP
    exchange, power, larger, packed = device.exchange, ptx.power, ptx.larger, ptx.packed(form.element)
    pairs, chunks_of_row, times, pace = tile.dim // 2, tile.chunks, tile.first(1), tile.pace

    def end(task, seqstarts, board, sums, top, total, shrink, b, head, last, slot, lane, warp):
        """Whether all is finite, or cannot be."""
        thread, row, start = warp * WARP + lane, (lane & 3) * 2, seqstarts[b]
        tops = cuda.shared.array((warps, all_rows), F32)
        totals = cuda.shared.array((warps, all_rows), F32)
        factors = cuda.shared.array(all_rows, F32)
        for r in range(rows):
            whole, here = total[r], row + row_of(r)
            for distance in distances:
                whole += exchange(EVERYONE, whole, distance)
            if lane < 4:
                tops[warp, here], totals[warp, here] = top[r], whole
        cuda.syncthreads()
        for r in range(rows):
            new, here = numeric.MINUS_INF, row + row_of(r)
            for w in range(warps):
                new = larger(new, tops[w, here])
            factor = power(top[r] - larger(new, LOWEST))
            for i in range(width):
                chunk, k, half = (lane >> 2) * times + i // VALUES * pace, i % VALUES // 2, i % 2
                e = chunk * CHUNK + k // apart * 2 * apart + k % apart + half * apart
                if here <= last and chunk < chunks_of_row:
                    at = board + (warp * all_rows + here) * row_bytes + 4 * e
                    put_word(at, numeric.bits_of(sums[r * width + i] * factor))
        if thread <= last:
            new, whole = numeric.MINUS_INF, np.float32(0)
            for w in range(warps):
                new = larger(new, tops[w, thread])
            for w in range(warps):
                whole += totals[w, thread] * power(tops[w, thread] - larger(new, LOWEST))
            new *= LN2
            factors[thread] = np.float32(1)
            if slot >= 0:
                at = merge.place(task, slot, all_rows, thread) + 4 * task.value_dim
                put_float(at, new)
                put_float(at + 4, whole)
                put_float(at + 8, shrink)
            else:
                factors[thread] = merge.ended(task, b, start, head, thread, new, whole, shrink)
        cuda.syncthreads()
        odd = 0
        for r in range(last + 1):
            for pair in range(thread, pairs, threads):
                x, y = np.float32(0), np.float32(0)
                for w in range(warps):
                    one, other = two_sums(board + (w * all_rows + r) * row_bytes + 8 * pair)
                    x, y = x + one, y + other
                if x * np.float32(0) != np.float32(0) or y * np.float32(0) != np.float32(0):
                    odd = 1
                if slot >= 0:
                    at = merge.place(task, slot, all_rows, r) + 8 * pair
                    put_float(at, x)
                    put_float(at + 4, y)
                else:
                    at = merge.written_to(task, b, start, head, r) + 4 * pair
                    put_pair(at, packed(x * factors[r], y * factors[r]))
        return cuda.syncthreads_or(odd) == 0

    return device.part(end)


@shared
def two_sums(address):
    both, _ = _read_sums(address)
    return numeric.float_of(np.uint32(both)), numeric.float_of(np.uint32(both >> np.uint64(32)))


@shared
def put_addresses(at, one, other):
    _write_addresses(at, np.uint64(one), np.uint64(other))


@shared
def put_pair(address, word):
    _write_pair(address, np.uint64(word), np.uint64(0))


@functools.cache
def compiled(form):
    return device.kernel(attend(form), SIGNATURE, form, device.CROWDED)


def prepare(record, context, tables, most_rows, stream):
    """Launches: of the kernel, and of the merge if contexts are split."""
    form = form_of(record, context, most_rows)
    record = record._replace(page_size=min(record.page_size, LONGEST))  # so that divisions are of 32 bits
    block = WARP, form.warps
    return merge.prepare(compiled(form), record, context.packed, tables, form.rows, block, stream, PARTS)
