"""Attend with many query heads to latent rows (MLA) through tensor cores: a row's beginning is its value.

    s = q k^T                        [rows, tokens] = [rows, dim] [dim, tokens]
    m' = max(m, scale max s), alpha = 2^(m - m'), p = 2^(scale s - m')
    l = alpha l + sum p              [rows]
    o = alpha o + p k[:, :value dim] [rows, value dim]

A block takes a tile of up to 64 rows, such as 64 heads of a token, over a split of a context. Queries stay in
shared memory. The cache's rows come there once for both products, a tile of 64 tokens at a time, while the
tile before is multiplied. Warps share the scores by rows and tokens, then the sums by elements of values:

    s           tokens 0-15  16-31  32-47  48-63         o           elements 0-63  64-127  ..  448-511
    rows 0-31   warp   0     2      4      6             rows 0-63   warp     0     1       ..  7
    rows 32-63  warp   1     3      5      7

So p and alpha go from the warps that computed them to all warps, through shared memory.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from kvkit.checks import records
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import forms, fragments, merge, tiles, work_items
from kvkit_cuda.attention.fragments import EVERYONE, LOWEST, STRIP, Softmax
from kvkit_cuda.attention.params import Reach, with_short_divisors
from kvkit_cuda.attention.prefill import LN2, LOG2E, MOST_SPLITS, SIGNATURE
from kvkit_cuda.attention.work_items import StepTables, within_split
from kvkit_cuda.calls.tables import DeviceTables
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import WARP
from kvkit_cuda.device_runtime import device, memory, ptx

WARPS = 8  # of a block
THREADS = WARPS * WARP
LARGEST = 576  # elements of a row: 512 latent and 64 rotary ones
F32, U32 = types.float32, types.uint32

int32, fresh_register, put_float = device.int32, ptx.fresh_register, chunks.write("float32")
load_item = work_items.item_loader()
read_word = memory.load(4, 4, space=memory.SHARED)


@shared
def number_at(address):
    word, _ = read_word(address)
    return numeric.float_of(np.uint32(word))


@device.inlined
def put_number(address, number):
    tiles.put_word(address, numeric.bits_of(number))


@dataclass(frozen=True, slots=True)
class LatentForm:
    """All that decides the machine code of a kernel over latent rows."""

    element: str  # of queries, rows and outputs
    dim: int
    value_dim: int
    rows: int  # of a block
    tile: int  # tokens of a tile

    @property
    def strips(self):
        """Return the strips of 16 rows whose scores a warp has, so that 8 warps share them all."""
        return 2 if self.rows * self.tile == 64 * 64 else 1

    @property
    def tokens(self):
        """Return the tokens whose scores a warp has."""
        return 16

    @property
    def row_warps(self):
        return self.rows // (self.strips * STRIP)

    @property
    def scoring_warps(self):
        return self.row_warps * self.tile // self.tokens

    @property
    def thread_rows(self):
        return 2 * self.strips

    @property
    def columns(self):
        return self.tokens // 4

    @property
    def elements(self):
        """Return the elements of values whose sums a warp has."""
        return self.value_dim // WARPS

    @property
    def width(self):
        return self.elements // 4

    @property
    def fragment(self):
        """Return which scores a thread has."""
        rows, row_warps = self.strips * STRIP, self.row_warps
        return replace(
            fragments.by_rows(self.strips),
            first_row=device.inlined(lambda thread: (thread >> 5) % row_warps * rows + (thread >> 2 & 7)),
            first_token=device.inlined(lambda thread: (thread >> 5) // row_warps * 16 + (thread & 3) * 2),
        )

    @property
    def stage_bytes(self):
        """Return the bytes of a tile of the cache's rows."""
        return self.tile * tiles.row_bytes(self.dim)

    @property
    def query_bytes(self):
        """Return the bytes of the queries; outputs take the same place."""
        return self.rows * tiles.row_bytes(self.dim)

    @property
    def weight_bytes(self):
        return self.rows * tiles.row_bytes(self.tile)

    @property
    def groups(self):
        """Return the groups of tokens whose scores different warps have."""
        return self.tile // self.tokens

    @property
    def shared_bytes(self):
        """Return the bytes of two tiles, the queries, the weights of a tile, and numbers for each row."""
        return 2 * self.stage_bytes + self.query_bytes + self.weight_bytes + 4 * self.rows * (self.groups + 1)


class TilePlaces(NamedTuple):
    """The addresses of a block's arrays in shared memory."""

    queries: Any  # [rows, dim]; in the end, outputs [rows, value dim]
    weights: Any  # p, rounded [rows, tokens]
    maxima: Any  # float32 [groups of 16 tokens, rows]: largest scores; in the end, parts of l
    factors: Any  # float32 [rows]: alpha; in the end, m, then the factor that normalizes


class Positions(NamedTuple):
    """The numbers that give the cache row of a position."""

    table: Any
    pages: Any  # index of the sequence's first page in the table
    final: Any  # the last position; later ones have its row


def form(element: str, dim: int, value_dim: int, most_rows: int, room: int) -> LatentForm | None:
    """Return the form with the most rows, then tokens, that fits in `room` bytes; None if none does."""
    for rows, tile in ((64, 64), (64, 32), (32, 64), (32, 32), (16, 64), (16, 32)):
        form = LatentForm(element, dim, value_dim, rows, tile)
        # No more than half of a tile is empty; `suits` refuses calls of fewer than 9 rows.
        if rows < 2 * max(most_rows, 9) and form.shared_bytes <= room:
            return form
    return None


def tile_loader(form):
    """Return f(params, head, stage, row_ids, thread), which begins to copy a tile of rows, [tokens, dim].

    Eight threads copy a row, and one of `row_ids` is that of a thread's row. `head` is the address of row 0.
    """
    copy_row, count = tiles.copy_row(form.dim), form.tile * 8 // THREADS

    def load_tile(params, head, stage, row_ids, thread):
        for i in range(count):
            row = int32((thread >> 3) + i * (THREADS // 8))
            copy_row(stage, row, head + np.int64(row_ids[i]) * params.key_row, 0, 1, thread & 7)

    return device.force_inlined(load_tile)


def row_finder(form):
    """Return f(params, positions, begin, thread, row_ids): find the rows of a tile that a thread copies."""
    count, row_id_of = form.tile * 8 // THREADS, tiles.row_id_of

    def find_rows(params, positions, begin, thread, row_ids):
        for i in range(count):
            position = min(int32(begin + (thread >> 3) + i * (THREADS // 8)), positions.final)
            row_ids[i] = int32(row_id_of(params, positions.table, positions.pages, position))

    return device.force_inlined(find_rows)


def query_loader(form):
    """Return f(params, item, target, thread), which begins to copy a tile's queries, [rows, dim]."""
    copy_row, rows = tiles.copy_row(form.dim), form.rows

    def load_queries(params, item, target, thread):
        for r in range(thread >> 3, rows, THREADS // 8):
            row = work_items.row_of_int32(params, item, min(item.first + r, item.last))
            copy_row(target, r, work_items.query_address(params, item, row), 0, 1, thread & 7)

    return device.force_inlined(load_queries)


def share_maxima(form):
    """Return f(s, scale, maxima, thread), which writes each row's largest score among a warp's tokens."""
    rows, columns, row_warps, fragment = form.thread_rows, form.columns, form.row_warps, form.fragment
    all_rows = form.rows
    exchange, larger, distances = device.exchange, ptx.larger, fragment.distances
    row_of, first_row = fragment.row, fragment.first_row

    def share_maxima(s, scale, maxima, thread):
        thread = fresh_register(thread)
        for r in range(rows):
            peak = s[r * columns]
            for i in range(r * columns + 1, (r + 1) * columns):
                peak = larger(peak, s[i])
            for distance in distances:
                peak = larger(peak, exchange(EVERYONE, peak, distance))
            if thread & 3 == 0:
                place = (thread >> 5) // row_warps * all_rows + first_row(thread) + row_of(r)
                put_number(maxima + 4 * place, peak * scale)

    return device.force_inlined(share_maxima)


def update_softmax(form):
    """Return f(s, state, scale, places, thread) -> whether a maximum has grown.

    It updates m and l of a warp's rows, and shares alpha and p. A thread adds its own weights to l.
    """
    rows, columns, row_warps, groups = form.thread_rows, form.columns, form.row_warps, form.groups
    row_of, first_row, put = form.fragment.row, form.fragment.first_row, tiles.put(form.tile)
    larger, power, packed, all_rows = ptx.larger, ptx.power, ptx.packed(form.element), form.rows

    def update_softmax(s, state, scale, places, thread):
        _, m, l, _, _ = state
        thread = fresh_register(thread)
        group, grown = (thread >> 5) // row_warps, int32(0)
        for r in range(rows):
            row, m_new = first_row(thread) + row_of(r), m[r]
            other = int32(0)
            while other < groups:  # NVVM unrolls no loop over a range here
                m_new = larger(m_new, number_at(places.maxima + 4 * (other * all_rows + row)))
                other = int32(other + 1)
            if m_new != m[r]:
                grown = int32(1)
            base = larger(m_new, LOWEST)
            alpha = power(m[r] - base)
            if thread >> 5 < row_warps and thread & 3 == 0:
                put_number(places.factors + 4 * row, alpha)
            added, m[r] = base - base, m_new  # NaN for a maximum that is infinite
            for i in range(0, columns, 2):
                low = power(s[r * columns + i] * scale - base)
                high = power(s[r * columns + i + 1] * scale - base)
                added += low + high
                put(places.weights, row, group * 2 + i // 2, thread & 3, packed(low, high))
            l[r] = l[r] * alpha + added
        return grown

    return device.force_inlined(update_softmax)


def scale_sums(form):
    """Return f(o, factors, lane): o = alpha o."""
    rows, width = form.rows // 8, form.width

    def scale_sums(o, factors, lane):
        first = factors + (fresh_register(lane) >> 2) * 4
        for r in range(rows):
            alpha = number_at(first + r * 32)
            for i in range(width):
                o[r * width + i] *= alpha

    return device.force_inlined(scale_sums)


def multiply_values(form):
    """Return f(p, v, a, o): o += p v; `p` and `v` are addresses of the thread's rows in shared memory."""
    tile, row, weight_row = form.tile, tiles.row_bytes(form.dim), tiles.row_bytes(form.tile)
    strips, blocks = form.rows // STRIP, form.elements // 8
    on_weights, on_values = tiles.advance(form.tile), tiles.advance(form.dim)
    load, load_transposed = ptx.matrices(False), ptx.matrices(True)
    multiply = fragments.multiply_strips(form.element, strips, form.width)

    def step(p, v, a, o, k):
        for strip in range(strips):
            i = 4 * strip
            a[i], a[i + 1], a[i + 2], a[i + 3] = load(on_weights(p, k), strip * STRIP * weight_row)
        for block in range(0, blocks, 2):
            at = on_values(v, block // 2)
            b0, b1, b2, b3 = load_transposed(at, 16 * k * row)  # [16 tokens, 16 elements]
            multiply(a, b0, b1, o, block)
            multiply(a, b2, b3, o, block + 1)

    steps = fragments.unrolled(device.force_inlined(step), tile // 16)

    def multiply_values(p, v, a, o):
        steps(p, v, a, o, 0)

    return device.force_inlined(multiply_values)


def multiply_nan_safe(form):
    """Return f(weights, values, o): o += p v in float32, where weights of 0 add nothing.

    That holds for NaN and infinity too. Weights are multiplied with `SMALLER`, so that sums stay finite.
    """
    rows, width, blocks, tile = form.rows // 8, form.width, form.elements // 8, form.tile
    weight_at, value_at, two = tiles.place(tile), tiles.place(form.dim), tiles.two(form.element)

    def add_block(weights, values, token, o, block):
        lane, chunk = fresh_register(int32(cuda.threadIdx.x)), int32(cuda.threadIdx.y * blocks + block)
        one = two(values + value_at(token, chunk) + (lane & 3) * 4)
        other = two(values + value_at(token + 1, chunk) + (lane & 3) * 4)
        for r in range(rows):
            p = two(weights + weight_at(r * 8 + (lane >> 2), token >> 3) + (token & 7) * 2)
            i = r * width + 2 * block
            if p[0] != np.float32(0):
                o[i] += p[0] * fragments.SMALLER * one[0]
                o[i + 1] += p[0] * fragments.SMALLER * one[1]
            if p[1] != np.float32(0):
                o[i] += p[1] * fragments.SMALLER * other[0]
                o[i + 1] += p[1] * fragments.SMALLER * other[1]

    add_blocks = fragments.unrolled(device.force_inlined(add_block), blocks)

    def multiply_nan_safe(weights, values, o):
        for token in range(0, tile, 2):
            add_blocks(weights, values, token, o, 0)

    return device.force_inlined(multiply_nan_safe)


def attend(form):
    """Return the kernel of a form."""
    tile, rows, row_warps, scoring_warps = form.tile, form.rows, form.row_warps, form.scoring_warps
    all_score, warp_rows, warp_tokens = scoring_warps == WARPS, form.strips * STRIP, form.tokens
    held_rows, held_scores, held_words = form.thread_rows, form.thread_rows * form.columns, rows // 4
    elements, held_sums, count = form.elements, rows // 8 * form.width, tile * 8 // THREADS
    block, stage_bytes, query_bytes = memory.dynamic(form.shared_bytes), form.stage_bytes, form.query_bytes
    weight_bytes, maximum_bytes = form.weight_bytes, 4 * rows * form.groups
    load_queries, load_tile, find_rows = query_loader(form), tile_loader(form), row_finder(form)
    place, weight_place, arrived = tiles.place(form.dim), tiles.place(tile), ptx.arrived
    multiply_keys, hide, softmax = fragments.multiply_keys(form), fragments.hide(form), update_softmax(form)
    write_maxima, multiply, multiply_safe = share_maxima(form), multiply_values(form), multiply_nan_safe(form)
    finish, rescale = finisher(form), scale_sums(form)

    def attend(params, seqstarts, kvstarts, table, items, slots, slopes):
        if cuda.blockIdx.x >= items[items.shape[0] - 1]:
            return  # a captured launch has as many blocks as a step may need
        step = StepTables(seqstarts, kvstarts, table, items, slots, slopes)
        lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
        thread = int32(warp * WARP + lane)
        item = load_item(params, step, cuda.blockIdx.x, rows)
        last = min(item.first + rows - 1, item.last)
        seen, common = work_items.seen_by(params, step, item.b, item.first, last)  # by some rows, by all
        seen = within_split(step, item, seen)
        low, high = int32(seen.begin), int32(seen.end)
        since, until = int32(common.begin), int32(min(common.end, seen.end))

        stage = int32(block())
        both = int32(2 * stage + stage_bytes)  # both - stage: the other stage
        queries = int32(stage + 2 * stage_bytes)
        weights = int32(queries + query_bytes)
        maxima = int32(weights + weight_bytes)
        head = params.keys + item.b * params.key_sequence + item.head * params.key_head
        places = TilePlaces(queries, weights, maxima, int32(maxima + maximum_bytes))
        load_queries(params, item, queries, thread)
        a, s = cuda.local.array(held_words, U32), cuda.local.array(held_scores, F32)
        o, m = cuda.local.array(held_sums, F32), cuda.local.array(held_rows, F32)
        l, row_ids = cuda.local.array(held_rows, F32), cuda.local.array(count, types.int32)
        state = Softmax(o, m, l, m, l)  # the last two are not used
        scale, _ = work_items.head_scales(params, item.b, item.head)
        scale *= LOG2E
        first_query = int32(queries + place(warp % row_warps * warp_rows + (lane & 15), lane >> 4))
        first_key = place(warp // row_warps * warp_tokens + (lane >> 4) * 8 + (lane & 7), lane >> 3 & 1)
        first_weight = int32(weights + weight_place(lane & 15, lane >> 4))
        first_value = place(lane & 15, (lane >> 4) + warp * (elements // 8))
        positions = Positions(table, item.pages, int32(high - 1))
        attempt = int32(0)
        while True:  # the second attempt is NaN-safe, if sums of the first one are not finite
            fragments.clear(state, np.float32(0))
            begin = fresh_register(low)
            if low < high:
                find_rows(params, positions, begin, thread, row_ids)
                load_tile(params, head, stage, row_ids, thread)
                find_rows(params, positions, int32(begin + tile), thread, row_ids)
            while begin < high:
                arrived()
                cuda.syncthreads()
                here, coming, stage = stage, int32(begin + tile), int32(both - stage)
                if coming < high:
                    load_tile(params, head, stage, row_ids, thread)  # [tokens, dim]
                    find_rows(params, positions, int32(coming + tile), thread, row_ids)
                if all_score or warp < scoring_warps:
                    multiply_keys(first_query, int32(here + first_key), a, s)  # [rows, tokens]
                    if begin < since or coming > until:
                        hide(params, step, item, thread, begin, high, s)
                    write_maxima(s, scale, places.maxima, thread)
                cuda.syncthreads()
                grown = int32(0)
                if all_score or warp < scoring_warps:
                    grown = softmax(s, state, scale, places, thread)
                if cuda.syncthreads_or(grown):
                    rescale(o, places.factors, lane)
                if attempt == 0:
                    multiply(first_weight, int32(here + first_value), a, o)  # [rows, value dim]
                else:
                    multiply_safe(weights, here, o)
                begin = coming
            zero = np.float32(0)
            for i in range(held_sums):
                zero += o[i] * np.float32(0)  # NaN if a sum is infinite or NaN
            arrived()
            if not cuda.syncthreads_or(int32(zero != np.float32(0))) or attempt == 1:
                break
            attempt = int32(1)
        finish(params, step, item, state, places, fragments.SMALLER if attempt else np.float32(1), thread)

    return attend


def finisher(form):
    """Return f(params, step, item, state, places, shrink, thread), which writes the results of a block.

    They go to a slot, or, normalized, to the output, through shared memory.
    """
    all_rows, width, held_rows, fragment = form.rows, form.width, form.thread_rows, form.fragment
    row_of, first_row, distances = fragment.row, fragment.first_row, fragment.distances
    groups, row_warps, scoring_warps = form.groups, form.row_warps, form.scoring_warps
    elements, packed, exchange = form.elements, ptx.packed(form.element), device.exchange
    put, store_row = tiles.put(form.value_dim), tiles.store_row(form.value_dim)

    def share_state(m, l, places, thread):
        """Share m of each row, and the parts of l that groups of tokens have."""
        for r in range(held_rows):
            row, total = first_row(thread) + row_of(r), l[r]
            for distance in distances:
                total += exchange(EVERYONE, total, distance)
            if thread & 3 == 0:
                put_number(places.maxima + 4 * ((thread >> 5) // row_warps * all_rows + row), total)
                if thread >> 5 < row_warps:
                    put_number(places.factors + 4 * row, m[r])

    def finish_row(params, step, item, places, shrink, row):
        """Write m and l of a row to its slot, or the log-sum-exp; return the factor of its sums."""
        m, l = number_at(places.factors + 4 * row) * LN2, np.float32(0)
        for group in range(groups):
            l += number_at(places.maxima + 4 * (group * all_rows + row))
        _, factor = work_items.head_scales(params, item.b, item.head)
        if item.slot >= 0:
            merge.put_state(params, merge.slot_address(params, item.slot, all_rows, row), m, l, shrink)
            return factor
        query = work_items.row_of_int32(params, item, item.first + row)
        return factor * merge.finish_row(params, step, query, m, l, shrink)

    share_state, finish_row = device.force_inlined(share_state), device.force_inlined(finish_row)

    def finish(params, step, item, state, places, shrink, thread):
        item, thread, o = work_items.refreshed(item), fresh_register(thread), state.o
        lane, warp = thread & 31, thread >> 5
        if warp < scoring_warps:
            share_state(state.m, state.l, places, thread)
        cuda.syncthreads()
        if thread < all_rows and item.first + thread <= item.last:
            factor = finish_row(params, step, item, places, shrink, thread)
            put_number(places.factors + 4 * thread, factor)
        cuda.syncthreads()
        for r in range(all_rows // 8):
            row = int32(r * 8 + (lane >> 2))
            if item.first + row <= item.last:
                factor = number_at(places.factors + 4 * row)
                for i in range(0, width, 2):
                    low, high = o[r * width + i] * factor, o[r * width + i + 1] * factor
                    if item.slot < 0:
                        chunk = warp * (elements // 8) + (i >> 1)
                        put(places.queries, row, chunk, lane & 3, packed(low, high))
                    else:
                        at = merge.slot_address(params, item.slot, all_rows, row)
                        at += (warp * elements + i * 4 + (lane & 3) * 2) * 4
                        put_float(at, low)
                        put_float(at + 4, high)
        cuda.syncthreads()
        if item.slot < 0:
            for r in range(thread >> 3, all_rows, THREADS // 8):
                if item.first + r <= item.last:
                    query = work_items.row_of_int32(params, item, item.first + r)
                    at = work_items.output_address(params, step, query)
                    store_row(places.queries, r, at, thread & 7)

    return device.force_inlined(finish)


compiled = device.variants(attend, SIGNATURE)


def suits(record: Any, context: records.Context, reach: Reach, most_rows: int) -> bool:
    """Return whether the kernel takes a call: rows enough, of 16-bit data, and values that begin the keys."""
    sizes = context.dim, context.value_dim
    whole = context.dim % 64 == 0 and context.value_dim // WARPS in (16, 32, 64)
    whole &= context.value_dim % WARPS == 0 and context.value_dim <= context.dim
    keys = record.keys, record.key_sequence, record.key_row, record.key_head * (record.heads > 1)
    values = record.values, record.value_sequence, record.value_row, record.value_head * (record.heads > 1)
    plain = context.cache_format == context.data_dtype and not fragments.needs_bias_or_mask(record)
    return (
        most_rows > forms.ROWS
        and whole
        and keys == values
        and plain
        and reach.rows < tiles.LONGEST
        and fragments.suits(record, context, reach, most_rows, 16, LARGEST)
        and form(context.data_dtype, *sizes, most_rows, device.shared_memory()) is not None
    )


def prepare(
    record: Any, context: records.Context, tables: DeviceTables, most_rows: int, stream: object
) -> list:
    """Return the launches: of the kernel, and of the merge if contexts are split."""
    kind = form(context.data_dtype, context.dim, context.value_dim, most_rows, device.shared_memory())
    assert kind is not None
    record = with_short_divisors(record)
    return merge.prepare(
        compiled(kind), record, context.data_dtype, tables, kind.rows, (WARP, WARPS), stream,
        most=MOST_SPLITS, shared=kind.shared_bytes,
    )  # fmt: skip
