"""Attend with few 16-bit query rows to long contexts by tensor cores; keys and values are 16-bit or codes.

    s = q k^T               [rows, tokens] = [rows, dim] [dim, tokens]
    m' = max(m, scale max s), alpha = 2^(m - m'), p = 2^(scale s - m')
    l = alpha l + sum p     [rows]
    o = alpha o + p v       [rows, value dim] = [rows, tokens] [tokens, value dim]

A block takes all rows of a sequence that share a key head, up to 16 of them, over a split of a context.
Memory bandwidth is the limit, so copies are always in flight: each warp copies its own tiles of 16 tokens to
a ring in shared memory, and multiplies one while others arrive (see `slices` and, for codes of small groups,
`panels`):

    stage 0 | stage 1 | .. | addresses of keys, values and their scales

A stage is a tile of keys and one of values. A warp waits for no other until the end, when the warps' o, m
and l are merged in order:

    m = max m_w, l = sum l_w 2^(m_w - m), o = sum o_w 2^(m_w - m)      for warps w
"""

import numpy as np
from numba import cuda, types

from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import fragments, merge, panels, slices, stored_tiles, tile_words, tiles, work_items
from kvkit_cuda.attention.decode_forms import form_of, suits
from kvkit_cuda.attention.fragments import EVERYONE, LOWEST, Held, Softmax
from kvkit_cuda.attention.params import with_short_divisors
from kvkit_cuda.attention.prefill import LN2, LOG2E, SIGNATURE
from kvkit_cuda.attention.stored_tiles import TILE_TOKENS
from kvkit_cuda.attention.tiles import put_word, two_floats
from kvkit_cuda.attention.work_items import StepTables, byte_offset
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import WARP
from kvkit_cuda.device_runtime import device, memory, ptx

__all__ = ["prepare", "suits"]
OFFSETS = 4  # offsets in a tile: of keys, of their scales, of values, of theirs
F32, U32 = types.float32, types.uint32

int32, fresh_register = device.int32, ptx.fresh_register
row_id_of, put_float = tiles.row_id_of, chunks.write("float32")
_write_pair, _write_addresses = memory.store(4, 4), memory.store(16, 16, memory.SHARED)


def attend(form):
    """Return the kernel of a form."""
    rows, stages, step_tokens = form.thread_rows, form.stages, form.warps * TILE_TOKENS
    held_queries, held_scores = form.held_queries, rows * form.columns
    held_sums, held_words, held_zeros = rows * form.width, form.held_words, form.held_zeros
    has_bias, held_scales = form.has_bias, 2 * max(form.keys.groups, form.values.groups)
    engine, lift = slices if form.sliced else panels, np.float32(form.lift)
    key_bytes, stage_bytes, ring_bytes = form.keys.bytes, form.stage_bytes, form.ring_bytes
    last_stage, bases = (stages - 1) * stage_bytes, stages * stage_bytes
    place_of_tiles, load_queries = memory.shared(form.shared_bytes), engine.query_loader(form)
    fill_tile, code_mask = stored_tiles.fill(form.keys, form.values), tile_words.code_mask(form.keys)
    multiply_keys, multiply_values = engine.multiply_keys(form), engine.multiply_values(form)
    multiply_nan_safe = engine.multiply_nan_safe(form)
    update_softmax = fragments.update_softmax(form, slices.largest_scales(form) if form.scaled else None)
    apply_bias_and_mask, hide = fragments.apply_bias_and_mask(form), fragments.hide(form)
    finish, put_addresses = finisher(form), address_writer(form)
    sync_warp, from_lane = device.sync_warp, device.from_lane
    end_group, arrived = ptx.end_group, ptx.all_but(stages - 1)

    def attend(params, seqstarts, kvstarts, table, items, slots, slopes):
        item, sees, exists = work_items.load_placed(items, cuda.blockIdx.x)  # with its page row and range
        if not exists:
            return  # a captured launch has as many blocks as a step may need
        step = StepTables(seqstarts, kvstarts, table, items, slots, slopes)
        lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
        # Without an exchange the loop would compute both again for each tile.
        lane, warp = from_lane(lane, lane), from_lane(warp, lane)
        low, high = sees.begin, sees.end

        q, zeros = cuda.local.array(held_queries, U32), cuda.local.array(held_zeros, F32)
        words, sums = cuda.local.array(held_words, U32), cuda.local.array(held_scores, F32)
        scales, places = cuda.local.array(held_scales, F32), cuda.local.array(OFFSETS, types.int32)
        held = Held(q, zeros, words, sums, scales, places)
        score_factor = load_queries(params, item, lane, held)  # [rows, dim]
        board = int32(place_of_tiles())  # the warps' rings; in the end the board of their sums
        ring = fresh_register(int32(board + warp * ring_bytes))
        # threadIdx.z is 0. Without it the mask would be a constant, which is loaded before each use.
        mask = fresh_register(int32(code_mask | cuda.threadIdx.z))
        s, o = cuda.local.array(held_scores, F32), cuda.local.array(held_sums, F32)
        m, l = cuda.local.array(rows, F32), cuda.local.array(rows, F32)
        state = Softmax(o, m, l, cuda.local.array(rows, F32), cuda.local.array(rows, F32))
        scale, _ = work_items.head_scales(params, item.b, item.head)
        scale *= score_factor
        attempt = int32(0)
        while attempt < 2:  # the second one is NaN-safe, if sums of the first one are not finite
            fragments.clear(state, lift)
            if lane == 0:  # shared memory keeps the addresses, because registers are scarce
                put_addresses(params, item, int32(ring + bases))
            sync_warp()
            row_id, place, begin = int32(0), ring, int32(low + warp * TILE_TOKENS - stages * step_tokens)
            if int32(begin + stages * step_tokens) < high:
                position = min(int32(begin + stages * step_tokens + (lane & 15)), int32(high - 1))
                row_id = int32(row_id_of(params, table, item.pages, position))
            while begin < high:  # the first `stages` rounds only begin copies
                coming = int32(begin + stages * step_tokens)
                if begin >= low:
                    arrived()
                    sync_warp()
                    multiply_keys(held, place, lane, mask, s)  # [rows, tokens]
                    if has_bias:
                        apply_bias_and_mask(params, step, item, lane, begin, s, scale)
                    if begin < sees.common_begin or int32(begin + TILE_TOKENS) > sees.common_end:
                        hide(params, step, item, lane, begin, high, s)
                    at = int32(place + key_bytes)
                    update_softmax(s, state, LOG2E if has_bias else scale * LOG2E, (held, at))
                    if attempt == 0:
                        multiply_values(held, s, at, lane, mask, o)  # [rows, value dim]
                    else:
                        multiply_nan_safe(held, s, at, lane, mask, o)
                    sync_warp()
                if coming < high:
                    fill_tile(place, row_id, int32(ring + bases), params, lane)  # [tokens, dim]
                    ahead = int32(coming + step_tokens + (fresh_register(lane) & 15))
                    row_id = int32(row_id_of(params, table, item.pages, min(ahead, int32(high - 1))))
                end_group()
                begin = int32(begin + step_tokens)
                place = int32(ring if place == int32(ring + last_stage) else place + stage_bytes)
            shrink = fragments.SMALLER if attempt else np.float32(1)
            if finish(params, step, item, board, state, shrink):
                break
            attempt = int32(attempt + 1)

    return attend


def finisher(form):
    """Return f(params, step, item, board, state, shrink) -> whether all sums are finite.

    It merges the results of the warps and writes them to a slot, or normalized to the output.
    """
    rows, width, warps, tile = form.thread_rows, form.width, form.warps, form.values
    engine = slices if form.sliced else panels
    sum_factor = engine.sum_factor(tile)
    all_rows, row_bytes, threads = form.rows, 4 * form.values.dim, form.warps * WARP
    row_of, first_row, distances = form.fragment.row, form.fragment.first_row, form.fragment.distances
    exchange, power, larger, packed = device.exchange, ptx.power, ptx.larger, ptx.packed(form.data_dtype)
    pairs, dim, element_of = tile.dim // 2, tile.dim, engine.element_of(tile)

    @device.inlined
    def put_sums(board, item, lane, warp, state, m_warps, value_scale):
        """Put a thread's o 2^(m_w - m), times the scale of values, on the board [warps, rows, value dim]."""
        for r in range(rows):
            m, row = numeric.MINUS_INF, first_row(lane) + row_of(r)
            for w in range(warps):
                m = larger(m, m_warps[w, row])
            alpha = power(state.m[r] - larger(m, LOWEST)) * value_scale
            for i in range(width):
                e = element_of(lane >> 2 & 7, i)
                if row <= item.last and e < dim:
                    at = board + (warp * all_rows + row) * row_bytes + 4 * e
                    put_word(at, numeric.bits_of(state.o[r * width + i] * (alpha * sum_factor(i))))

    @device.inlined
    def finish_row(params, step, item, row, m_warps, l_warps, shrink):
        """Write m and l of a row to its slot, or return the factor of its sums."""
        m, l = numeric.MINUS_INF, np.float32(0)
        for w in range(warps):
            m = larger(m, m_warps[w, row])
        for w in range(warps):
            l += l_warps[w, row] * power(m_warps[w, row] - larger(m, LOWEST))
        m *= LN2
        if item.slot >= 0:
            merge.put_state(params, merge.slot_address(params, item.slot, all_rows, row), m, l, shrink)
            return np.float32(1)
        return merge.finish_row(params, step, work_items.row_of_int32(params, item, row), m, l, shrink)

    def finish(params, step, item, board, state, shrink):
        item = work_items.refreshed(item)
        lane, warp = fresh_register(int32(cuda.threadIdx.x)), fresh_register(int32(cuda.threadIdx.y))
        board, thread = fresh_register(board), warp * WARP + lane
        m_warps = cuda.shared.array((warps, all_rows), F32)
        l_warps = cuda.shared.array((warps, all_rows), F32)
        factors = cuda.shared.array(all_rows, F32)
        for r in range(rows):
            l, row = state.l[r], first_row(lane) + row_of(r)
            for distance in distances:
                l += exchange(EVERYONE, l, distance)
            if lane < 4:
                m_warps[warp, row], l_warps[warp, row] = state.m[r], l
        cuda.syncthreads()
        _, value_scale = work_items.head_scales(params, item.b, item.head)
        put_sums(board, item, lane, warp, state, m_warps, value_scale)
        if thread <= item.last:
            factors[thread] = finish_row(params, step, item, thread, m_warps, l_warps, shrink)
        cuda.syncthreads()
        not_finite = 0
        for r in range(item.last + 1):
            row = work_items.row_of_int32(params, item, r)
            for pair in range(thread, pairs, threads):
                x, y = np.float32(0), np.float32(0)
                for w in range(warps):
                    one, other = two_floats(board + (w * all_rows + r) * row_bytes + 8 * pair)
                    x, y = x + one, y + other
                if x * np.float32(0) != np.float32(0) or y * np.float32(0) != np.float32(0):  # inf or NaN
                    not_finite = 1
                if item.slot >= 0:
                    at = merge.slot_address(params, item.slot, all_rows, r) + 8 * pair
                    put_float(at, x)
                    put_float(at + 4, y)
                else:
                    at = work_items.output_address(params, step, row) + 4 * pair
                    put_pair(at, packed(x * factors[r], y * factors[r]))
        return cuda.syncthreads_or(not_finite) == 0

    return device.force_inlined(finish)


def address_writer(form):
    """Return f(params, item, at), which puts the addresses of a head's keys, values and scales at `at`."""
    has_scales = form.keys.scale_format is not None

    def put_addresses(params, item, at):
        keys = (
            params.keys + byte_offset(item.b, params.key_sequence) + byte_offset(item.head, params.key_head)
        )
        values = (
            params.values
            + byte_offset(item.b, params.value_sequence)
            + byte_offset(item.head, params.value_head)
        )
        put_two_addresses(at, keys, values)
        if has_scales:
            scales = byte_offset(item.b, params.scale_sequence) + byte_offset(item.head, params.scale_head)
            put_two_addresses(int32(at + 16), params.key_scales + scales, params.value_scales + scales)

    return device.inlined(put_addresses)


@shared
def put_two_addresses(at, one, other):
    _write_addresses(at, np.uint64(one), np.uint64(other))


@shared
def put_pair(address, word):
    _write_pair(address, np.uint64(word), np.uint64(0))


compiled = device.variants(attend, SIGNATURE, device.MAX_SHARED)


def prepare(record, context, tables, most_rows, stream):
    """Return the launches: of the kernel, and of the merge if contexts are split."""
    form = form_of(record, context, most_rows)
    record = with_short_divisors(record)
    block, options = (WARP, form.warps), {"most": merge.MOST_SPLITS, "placed": True}
    kernel, packed = compiled(form), context.data_dtype
    return merge.prepare(kernel, record, packed, tables, form.rows, block, stream, **options)
