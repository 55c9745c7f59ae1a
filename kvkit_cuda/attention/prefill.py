"""Attend with many query rows through tensor cores: 16-bit queries over a cache of their type or of codes.

    s = q k^T               [rows, tokens] = [rows, dim] [dim, tokens]
    m' = max(m, scale max s), alpha = 2^(m - m'), p = 2^(scale s - m')
    l = alpha l + sum p     [rows]
    o = alpha o + p v       [rows, value dim] = [rows, tokens] [tokens, value dim]

A row is one query head of one query token; rows that share a key head share its keys. A block takes a tile of
rows, 16 or 32 for each warp, and loops over the context in tiles of tokens. Shared memory has two stages of
1 or 2 tiles: while the tiles of one stage are multiplied, those of the next one are copied. Warps wait for
each other where a stage begins. Queries are in shared memory, scores and sums in registers (see `fragments`):

    stage 0: tile, tile | stage 1: tile, tile | queries of all warps      tile: keys | values | scales of both

Where a row of codes has one scale, s is multiplied by the scales of keys [tokens], and p, before its product
with v, by those of values.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from kvkit.checks.records import Context
from kvkit.formulas import numeric
from kvkit_cuda.attention import forms, fragments, merge, tiles, work_items
from kvkit_cuda.attention.fragments import EVERYONE, STRIP, Softmax
from kvkit_cuda.attention.params import RECORD, with_short_divisors
from kvkit_cuda.attention.work_items import Range, StepTables, seen_by, within_split
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import INDEX1, WARP
from kvkit_cuda.device_runtime import device, memory, ptx

WARPS = 8  # of a block
MOST_SPLITS = 512  # of a call, each of at least `tables.LEAST_SPLIT` tokens
F32, U32 = types.float32, types.uint32
LOG2E, LN2 = np.float32(1 / math.log(2)), np.float32(math.log(2))
SIGNATURE = types.void(RECORD, *[INDEX1] * 6)

int32, row_id_of, put_float = device.int32, tiles.row_id_of, chunks.write("float32")
load_item = work_items.item_loader()


@dataclass(frozen=True, slots=True)
class PrefillForm:
    """All that decides the machine code of a prefill kernel."""

    element: str
    cache_format: str
    scale_format: str | None
    dim: int
    value_dim: int
    strips: int  # of a warp
    tokens: int  # of a tile
    tiles: int  # of a stage
    has_bias: bool  # whether scores have a cap, bias or mask
    native: bool  # whether the device converts floats of 8 bits
    token_scales: bool = False  # whether a row has one scale, a factor of its scores and weights

    @property
    def thread_rows(self):
        return 2 * self.strips

    @property
    def warp_rows(self):
        return self.strips * STRIP

    @property
    def columns(self):
        return self.tokens // 4

    @property
    def width(self):
        return self.value_dim // 4

    @property
    def fragment(self):
        return fragments.by_rows(self.strips)

    @property
    def query_bytes(self):
        """Return the bytes of the queries of a warp; outputs take the same place."""
        return self.warp_rows * max(tiles.row_bytes(self.dim), tiles.row_bytes(self.value_dim))

    @property
    def key_bytes(self):
        return self.tokens * tiles.row_bytes(self.dim)

    @property
    def lifts(self):
        """Return whether rows find a power of 2 by which float16 holds weights times scales."""
        return self.token_scales and self.element == "float16"

    @property
    def scale_bytes(self):
        """Return the bytes of the scales of a tile of keys, or of values, as float32."""
        return 4 * self.tokens if self.token_scales else 0

    @property
    def scales_begin(self):
        """Return the offset of the scales of keys in a tile; those of values are behind them."""
        return self.key_bytes + self.tokens * tiles.row_bytes(self.value_dim)

    @property
    def tile_bytes(self):
        """Return the bytes of a tile of keys and one of values, with their scales."""
        return self.scales_begin + 2 * self.scale_bytes

    @property
    def shared_bytes(self):
        """Return the bytes of the largest block."""
        return self.bytes_of(WARPS)

    def bytes_of(self, warps):
        return 2 * self.tiles * self.tile_bytes + warps * self.query_bytes


def form(
    element, cache_format, scale_format, dim, value_dim, has_bias, native=True, room=device.SHARED_MEMORY,
    token_scales=False,
):  # fmt: skip
    """Return the form of a kernel with as many rows and tokens as registers and `room` shared bytes hold."""
    group_scales, lifts = scale_format and not token_scales, token_scales and element == "float16"
    # The largest head for which registers hold the sums of two strips.
    most = 64 if has_bias else (96 if group_scales or lifts else 128)
    strips = 2 if max(dim, value_dim) <= most else 1
    sizes = {"dim": dim, "value_dim": value_dim, "strips": strips, "tokens": 32, "tiles": 1}
    kinds = {"has_bias": bool(has_bias), "native": native, "token_scales": token_scales}
    form = PrefillForm(element, cache_format, scale_format, **sizes, **kinds)
    if form.shared_bytes > room:
        form = replace(form, tokens=16)
    longer = replace(form, tiles=2)  # with more, a block waits longer for its first tiles
    return longer if longer.shared_bytes <= room else form


def form_of(record, context):
    """Return the form of the kernel for a call."""
    sizes = context.dim, context.value_dim
    formats = context.data_dtype, context.cache_format, context.scale_format
    has_bias, native = fragments.needs_bias_or_mask(record), ptx.has_minifloats()
    return form(*formats, *sizes, has_bias, native, device.shared_memory(), has_token_scales(context))


def has_token_scales(context: Context) -> bool:
    """Return whether a row of keys, and one of values, has one scale."""
    return bool(context.scale_format) and context.group in (0, max(context.dim, context.value_dim))


class HeadAddresses(NamedTuple):
    """Addresses of a head's row 0 of keys and values, and the offset of its scales from the first ones."""

    keys: Any
    values: Any
    scales: Any


@device.inlined
def head_addresses(params, item):
    return HeadAddresses(
        params.keys + item.b * params.key_sequence + item.head * params.key_head,
        params.values + item.b * params.value_sequence + item.head * params.value_head,
        item.b * params.scale_sequence + item.head * params.scale_head,
    )


def query_loader(form):
    """Return f(params, item, target, thread), which begins to copy a tile's queries, [rows, dim]."""
    copy_row, warp_rows = tiles.copy_row(form.dim), form.warp_rows

    def load_queries(params, item, target, thread):
        r = int32(thread >> 3)
        while r < cuda.blockDim.y * warp_rows:
            row = work_items.row_of_int32(params, item, min(item.first + r, item.last))
            copy_row(target, r, work_items.query_address(params, item, row), 0, 1, thread & 7)
            r = int32(r + cuda.blockDim.y * (WARP // 8))

    return device.force_inlined(load_queries)


def tile_loader(form):
    """Return f(params, place, row_id, head, thread), which begins to load keys and values, [tokens, dim].

    A lane's `row_id` is the cache row of its token in the tile; lanes without a token have any valid row.
    """
    tokens, from_lane, key_bytes = form.tokens, device.from_lane, form.key_bytes
    load_keys, load_values = tiles.copy_row(form.dim), tiles.copy_row(form.value_dim)
    if form.cache_format != form.element:
        codes = form.element, form.cache_format, None if form.token_scales else form.scale_format, form.native
        load_keys, load_values = tiles.widen_row(form.dim, *codes), tiles.widen_row(form.value_dim, *codes)
    scaled, scales_begin, scale_bytes = form.token_scales, form.scales_begin, form.scale_bytes
    read_scale = chunks.read(form.scale_format or "float32")

    def load_tile(params, place, row_id, head, thread):
        r = int32(thread >> 3)
        while r < tokens:
            row, column = from_lane(row_id, r), thread & 7  # eight threads load a row
            scales, at = head.scales + row * params.scale_row, head.keys + row * params.key_row
            load_keys(place, r, at, params.key_scales + scales, params.scale_group, column)
            at = head.values + row * params.value_row
            load_values(place + key_bytes, r, at, params.value_scales + scales, params.scale_group, column)
            if scaled and column == 0:
                at = place + scales_begin + 4 * r
                tiles.put_word(at, numeric.bits_of(read_scale(params.key_scales + scales)))
                tiles.put_word(at + scale_bytes, numeric.bits_of(read_scale(params.value_scales + scales)))
            r = int32(r + cuda.blockDim.y * (WARP // 8))

    return device.force_inlined(load_tile)


def attend(form):
    """Return the kernel of a form."""
    tokens, warp_rows, has_bias = form.tokens, form.warp_rows, form.has_bias
    held_words, held_rows, held_scales = 4 * form.strips, form.thread_rows, form.columns
    held_scores, held_sums = held_rows * form.columns, held_rows * form.width
    key_bytes, tile_bytes, block = form.key_bytes, form.tile_bytes, memory.dynamic(form.shared_bytes)
    stage_tokens, stage_bytes, one_tile = form.tiles * tokens, form.tiles * tile_bytes, form.tiles == 1
    load_queries, load_tile, arrived = query_loader(form), tile_loader(form), ptx.arrived
    key_place, value_place = tiles.place(form.dim), tiles.place(form.value_dim)
    multiply_keys, multiply_values = fragments.multiply_keys(form), fragments.multiply_values(form)
    multiply_nan_safe, scale_tokens = fragments.multiply_nan_safe(form), fragments.scale_tokens(form)
    update_softmax = fragments.update_softmax(form, fragments.scales_loader(form) if form.lifts else None)
    scales_begin, scale_bytes = form.scales_begin, form.scale_bytes
    apply_bias_and_mask, hide = fragments.apply_bias_and_mask(form), fragments.hide(form)
    finish = finisher(form)

    def attend(params, seqstarts, kvstarts, table, items, slots, slopes):
        if cuda.blockIdx.x >= items[items.shape[0] - 1]:
            return  # a captured launch has as many blocks as a step may need
        step = StepTables(seqstarts, kvstarts, table, items, slots, slopes)
        lane = int32(cuda.threadIdx.x)
        thread = int32(cuda.threadIdx.y * WARP + lane)
        rows = cuda.blockDim.y * warp_rows
        item = work_items.refreshed(load_item(params, step, cuda.blockIdx.x, rows))
        seen, _ = seen_by(params, step, item.b, item.first, min(item.first + rows - 1, item.last))
        seen = within_split(step, item, seen)
        low, high = int32(seen.begin), int32(seen.end)
        warp_first = int32(item.first + cuda.threadIdx.y * warp_rows)
        warp_last = min(warp_first + warp_rows - 1, item.last)
        # seen by some rows, and by all
        some, common = seen_by(params, step, item.b, min(warp_first, item.last), warp_last)
        some = Range(int32(some.begin), int32(min(some.end, high) if warp_first <= item.last else 0))
        common = Range(int32(common.begin), int32(min(common.end, high)))

        first = int32(block())
        queries = int32(first + 2 * stage_bytes)
        load_queries(params, item, queries, thread)
        a, s = cuda.local.array(held_words, U32), cuda.local.array(held_scores, F32)
        o, scales = cuda.local.array(held_sums, F32), cuda.local.array(held_scales, F32)
        m, l = cuda.local.array(held_rows, F32), cuda.local.array(held_rows, F32)
        peaks = cuda.local.array(held_rows, F32)
        state = Softmax(o, m, l, peaks, cuda.local.array(held_rows, F32))
        scale, _ = work_items.head_scales(params, item.b, item.head)
        head = head_addresses(params, item)
        first_key = key_place((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1)
        first_value = int32(key_bytes + value_place(lane & 15, lane >> 4))
        first_query = int32(queries + key_place((thread >> 5) * warp_rows + (lane & 15), lane >> 4))
        first_scale, final = int32(scales_begin + (lane & 3) * 8), int32(high - 1)
        shrink = np.float32(1)
        for attempt in range(2):  # the second one is NaN-safe, if sums of the first one are not finite
            fragments.clear(state, np.float32(0))
            row_id, place, begin = np.int64(0), int32(0), int32(low - stage_tokens)
            if low < high:
                row_id = row_id_of(params, table, item.pages, min(int32(low + lane), final))
            while begin < high:  # first, copies of the first stage are begun
                if begin >= low and (one_tile or place in (0, stage_bytes)):
                    arrived()
                    cuda.syncthreads()
                coming, end = int32(begin + stage_tokens), int32(begin + tokens)
                if coming < high:
                    other = first + (place + stage_bytes if place < stage_bytes else place - stage_bytes)
                    load_tile(params, int32(other), row_id, head, thread)  # [tokens, dim]
                    row_id = row_id_of(params, table, item.pages, min(int32(coming + tokens + lane), final))
                here = int32(first + place)
                if begin >= low and begin < some.end and end > some.begin:
                    multiply_keys(first_query, int32(here + first_key), a, s)  # [rows, tokens]
                    scales_at = int32(here + first_scale)
                    scale_tokens(scales_at, s)
                    scales_at = int32(scales_at + scale_bytes)
                    if has_bias:
                        apply_bias_and_mask(params, step, item, thread, begin, s, scale)
                    if begin < common.begin or end > common.end:
                        hide(params, step, item, thread, begin, high, s)
                    update_softmax(s, state, LOG2E if has_bias else scale * LOG2E, (scales, scales_at))
                    if attempt == 0:
                        multiply_values(s, int32(here + first_value), scales_at, a, o)  # [rows, value dim]
                    else:
                        multiply_nan_safe(s, int32(here + key_bytes), scales_at, lane, o)
                begin, place = end, int32(place + tile_bytes)
                place = int32(0 if place == 2 * stage_bytes else place)
            zero = np.float32(0)
            for i in range(held_sums):
                zero += o[i] * np.float32(0)  # NaN if a sum is infinite or NaN
            arrived()
            if not cuda.syncthreads_or(int32(zero != np.float32(0))):
                break
            shrink = fragments.SMALLER
        finish(params, step, item, queries, state, shrink, thread)

    return attend


def finisher(form):
    """Return f(params, step, item, board, state, shrink, thread), which writes the results of a block.

    They go to a slot, or, normalized, to the output, through the board [rows, value dim] in shared memory.
    """
    held_rows, width, warp_rows, fragment = form.thread_rows, form.width, form.warp_rows, form.fragment
    row_of, first_row, exchange = fragment.row, fragment.first_row, device.exchange
    packed = ptx.packed(form.element)
    put, store_row = tiles.put(form.value_dim), tiles.store_row(form.value_dim)

    def finish(params, step, item, board, state, shrink, thread):
        item, (o, m, l, _, _) = work_items.refreshed(item), state
        rows, row, lane = cuda.blockDim.y * warp_rows, item.first + first_row(thread), thread & 31
        for r in range(held_rows):
            two_lanes = l[r] + exchange(EVERYONE, l[r], 1)
            l[r] = two_lanes + exchange(EVERYONE, two_lanes, 2)
        _, value_scale = work_items.head_scales(params, item.b, item.head)
        # A loop this long is not unrolled, so m and l are rotated: row r is at 0. Factors replace l.
        for r in range(held_rows):
            here = int32(row + row_of(r))
            factor, m[0] = value_scale, m[0] * LN2
            if here <= item.last and item.slot >= 0:
                at = merge.slot_address(params, item.slot, rows, here - item.first)
                merge.put_state(params, at, m[0], l[0], shrink)
            elif here <= item.last:
                query = work_items.row_of_int32(params, item, here)
                factor *= merge.finish_row(params, step, query, m[0], l[0], shrink)
            for i in range(held_rows - 1):
                m[i], l[i] = m[i + 1], l[i + 1]
            l[held_rows - 1] = factor
        for r in range(held_rows):
            here = int32(row + row_of(r))
            for i in range(0, width, 2):
                low, high = o[r * width + i], o[r * width + i + 1]
                if item.slot < 0:
                    put(board, here - item.first, i >> 1, lane & 3, packed(low * l[r], high * l[r]))
                elif here <= item.last:
                    at = merge.slot_address(params, item.slot, rows, here - item.first)
                    put_float(at + (i * 4 + (lane & 3) * 2) * 4, low * l[r])
                    put_float(at + (i * 4 + (lane & 3) * 2) * 4 + 4, high * l[r])
        cuda.syncthreads()
        if item.slot < 0:
            for r in range(thread >> 3, rows, cuda.blockDim.y * (WARP // 8)):
                if item.first + r <= item.last:
                    query = work_items.row_of_int32(params, item, item.first + r)
                    store_row(board, r, work_items.output_address(params, step, query), thread & 7)

    return device.force_inlined(finish)


compiled = device.variants(attend, SIGNATURE)


def suits(record, context, reach, most_rows):
    """Return whether prefill takes a call: 16-bit data, whole fragments, aligned rows, and rows enough."""
    alignment = 16 if context.cache_format == context.data_dtype else tiles.code_bytes(context.cache_format)
    has_products = fragments.are_widened(context) or has_token_scales(context)
    fits = fragments.suits(record, context, reach, most_rows, alignment)
    return most_rows > forms.ROWS and has_products and fits


def warps_of(form: PrefillForm, most_rows: int) -> int:
    """Return the warps of a block: a power of 2 that takes all rows, or the most."""
    return min(WARPS, 1 << (-(-most_rows // form.warp_rows) - 1).bit_length())


def prepare(record, context, tables, most_rows, stream):
    """Return the launches: of the kernel, and of the merge if contexts are split."""
    form = form_of(record, context)
    warps = warps_of(form, most_rows)
    rows = warps * form.warp_rows
    record = with_short_divisors(record)
    block, shared = (WARP, warps), form.bytes_of(warps)
    return merge.prepare(
        compiled(form),
        record,
        context.data_dtype,
        tables,
        rows,
        block,
        stream,
        most=MOST_SPLITS,
        shared=shared,
    )
