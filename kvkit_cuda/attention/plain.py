"""Attend for every format, mask and head size: teams of threads read the cache in place.

    s = scale q k^T         [tokens, rows]
    m' = max(m, max s), alpha = e^(m - m'), p = e^(s - m')
    l = alpha l + sum p     [rows]
    o = alpha o + p v       [rows, value dim]

A block takes a work item: the rows of a tile (up to 8 query heads of a token, or of several, that share a key
head) over a split of a context. Its teams take tokens in turn. The threads of a team take the chunks of a row
of the cache, so that a key is read and widened once for all rows of the tile; q, o, m and l stay in
registers. The teams' results are merged in order at the end:

    m = max m_t, l = sum l_t e^(m_t - m), o = sum o_t e^(m_t - m)       for teams t

If key weights are requested, a second kernel computes all scores again and sums the weights of each key:

    w = sum e^(s - lse)         [sequences, query heads, tokens], over query tokens
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.formulas.index import page_of, row_of
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import merge, scores, work_items
from kvkit_cuda.attention.forms import ELEMENTS, form_of
from kvkit_cuda.attention.fragments import Softmax
from kvkit_cuda.attention.params import RECORD
from kvkit_cuda.attention.work_items import Range, Row, StepTables, WorkItem, within_split
from kvkit_cuda.copy import blocks, chunks
from kvkit_cuda.copy.transfer import INDEX1
from kvkit_cuda.device_runtime import device, host

SHRINK = np.float32(2**-40)  # factor of weights in a second attempt, if sums overflow
F32 = types.float32
SIGNATURE = types.void(RECORD, *[INDEX1] * 6)
WEIGHTS_SIGNATURE = types.void(RECORD, *[INDEX1] * 4, types.int64)

weight, load_word = numeric.weight, work_items.load_word
read_float, write_float = chunks.read("float32"), chunks.write("float32")
load_item = work_items.item_loader(narrow=False)


# Facts of a row of a tile: it sees keys LOW .. HIGH - 1. Its position; addresses of mask and query; its
# slope's bits.
LOW, HIGH, POSITION, MASK, QUERY, SLOPE, FACTS = range(7)


class HeadRows(NamedTuple):
    """The keys or the values of a head, as a thread reads them."""

    address: Any  # of row 0
    scales: Any  # of row 0
    scales_at: Any  # offsets in a row of the scales of the thread's chunks [pieces]
    row_ids: Any  # the rows of the cache that hold a block of tokens


@shared
def word_at(address):
    low, _ = load_word(address)
    return np.int64(low)


def attend(form):
    """Return the kernel of a form."""
    pieces, rows, teams, ahead, general = form.pieces, form.rows, form.teams, form.ahead, form.general
    row_span, threads, held_scores = rows * form.span, form.lanes * teams, rows * ahead
    held = pieces * row_span
    load_queries, multiply_keys = query_loader(form), key_multiplier(form)
    multiply_values = value_multiplier(form)
    apply_bias_and_mask, hide, finish = bias_applier(form), tail_hider(form), finisher(form)
    update_softmax, rescale = scores.update_softmax(rows, ahead), scores.rescale(rows, form.span)
    row_ids_of, lanes = row_finder(form), form.lanes

    def attend(params, seqstarts, kvstarts, table, items, slots, slopes):
        if cuda.blockIdx.x >= items[items.shape[0] - 1]:
            return  # a captured launch has as many blocks as a step may need
        step = StepTables(seqstarts, kvstarts, table, items, slots, slopes)
        item = load_item(params, step, cuda.blockIdx.x, rows)
        thread = cuda.threadIdx.y * lanes + cuda.threadIdx.x
        live = min(rows, item.last + 1 - item.first)  # rows that the tile has
        facts = cuda.shared.array((rows, FACTS), types.int64)
        if thread < rows:
            fill_facts(params, step, item, item.first + min(thread, live - 1), facts[thread])
        cuda.syncthreads()
        common = Range(facts[live - 1, LOW], facts[0, HIGH])
        # The keys that any row sees: a row that sees fewer skips the others.
        seen = within_split(step, item, Range(facts[0, LOW], facts[live - 1, HIGH]))

        q, o = cuda.local.array(held, F32), cuda.local.array(held, F32)  # [pieces, rows, span]
        s = cuda.local.array(held_scores, F32)  # [ahead, rows]
        m, l, alpha = cuda.local.array(rows, F32), cuda.local.array(rows, F32), cuda.local.array(rows, F32)
        scales_at = cuda.local.array(pieces, types.int64)
        scale, value_scale = work_items.head_scales(params, item.b, item.head)
        load_queries(params, scale, facts, q, scales_at)  # [rows, dim]
        row_ids = cuda.shared.array(threads, types.int64)
        value_row_ids = cuda.shared.array(threads, types.int64) if general else row_ids
        keys = head_keys(params, item, scales_at, row_ids)
        scale_offset = item.b * params.scale_sequence + item.head * params.scale_head
        address = params.values + item.b * params.value_sequence + item.head * params.value_head
        values = HeadRows(address, params.value_scales + scale_offset, scales_at, value_row_ids)
        shrink = np.float32(1)
        for _ in range(2):  # the second attempt has smaller weights, if sums of the first are not finite
            for i in range(held):
                o[i] = np.float32(0)
            for r in range(rows):
                m[r], l[r] = numeric.MINUS_INF, np.float32(0)
            # The first round only loads row ids. Each round loads those of the next block.
            begin = seen.begin - threads if seen.begin < seen.end else seen.end
            while begin < seen.end:
                row_id, value_row_id = row_ids_of(
                    params, step, item.b, min(begin + threads + thread, seen.end - 1)
                )
                count = min(seen.end - begin, threads) if begin >= seen.begin else 0
                adjusts = needs_bias_or_mask(params) or begin < common.begin or begin + count > common.end
                for block in range(0, count, teams * ahead):
                    multiply_keys(params, keys, block, count, q, s)  # [tokens, rows]
                    if adjusts:
                        apply_bias_and_mask(params, facts, begin + block, s)
                    hide(block, count, s)
                    update_softmax(s, m, l, alpha, shrink)
                    p = 0
                    while p < pieces:
                        rescale(o, p * row_span, alpha)
                        p += 1
                    multiply_values(params, values, block, count, s, o)  # [rows, value dim]
                cuda.syncthreads()
                row_ids[thread] = row_id
                if general:
                    value_row_ids[thread] = value_row_id
                cuda.syncthreads()
                begin += threads
            if finish(params, step, item, Softmax(o, m, l, None, None), live, shrink, value_scale):
                break
            shrink = SHRINK

    return attend


@device.inlined
def fill_facts(params, step, item, number, facts):
    """Write the facts of a row of a tile."""
    row = work_items.row_of(params, item, number)
    seqlen, kvlen = work_items.lengths(step, item.b)
    seen = work_items.visible(params, step, item.b, row.token)
    facts[LOW], facts[HIGH] = seen.begin, seen.end
    facts[POSITION] = kvlen - seqlen + row.token
    facts[MASK] = work_items.mask_address(params, step, row)
    facts[QUERY] = work_items.query_address(params, item, row)
    facts[SLOPE] = step.slopes[item.b * params.slopes_sequence + row.query]


@shared
def needs_bias_or_mask(params):
    return params.cap != 0 or params.alibi != 0 or params.mask != 0 or params.sloped != 0


@device.inlined
def head_keys(params, item, scales_at, row_ids):
    """Return the keys of a work item's head."""
    address = params.keys + item.b * params.key_sequence + item.head * params.key_head
    scale_offset = item.b * params.scale_sequence + item.head * params.scale_head
    return HeadRows(address, params.key_scales + scale_offset, scales_at, row_ids)


def row_finder(form):
    """Return f(params, step, b, position) -> the cache rows of the position's key and value."""
    general = form.general

    @device.inlined
    def row_ids_of(params, step, b, position):
        page = page_of(position, params.page_size)
        at = step.table[b] + page
        key = value = step.table[at]
        rest = row_of(0, position, params.page_size)
        if general:
            if params.value_table:
                value = word_at(params.value_table + at * 8)
            value += rest * params.value_step
            rest *= params.key_step
        return key + rest, value

    return row_ids_of


def query_loader(form):
    """Return f(params, scale, facts, q, scales_at), which loads the thread's chunks of all queries, scaled.

    It also writes the offsets of the scales of the thread's chunks in a cache row.
    """
    span, pieces, rows, lanes = form.span, form.pieces, form.rows, form.lanes
    read, packed_bytes = chunks.read(form.data_dtype), BY_NAME[form.data_dtype].bytes(1)
    scale_bytes, in_blocks = BY_NAME[form.scale_format].bytes(1) if form.scale_format else 0, form.in_blocks

    @device.inlined
    def load_queries(params, scale, facts, q, scales_at):
        for p in range(pieces):
            chunk = p * lanes + cuda.threadIdx.x
            scales_at[p] = chunk * span // params.scale_group * scale_bytes if scale_bytes else 0
            if in_blocks:
                scales_at[p] = chunk * span  # for `blocks.widen`, the chunk's first element
            for r in range(rows):
                at = facts[r, QUERY] + chunk * span * packed_bytes
                for i in range(span):
                    x = np.float32(0)
                    if chunk * span < params.dim:
                        x = read(at + i * packed_bytes) * scale
                    q[(p * rows + r) * span + i] = x

    return load_queries


def chunk_of(form, cache_format):
    """Return (bytes of a chunk, its widening function). For blocks they are 0, and `blocks.widen`."""
    if form.in_blocks:
        return 0, blocks.widen(cache_format, form.span)
    widen = chunks.widen(form.rounded_to, cache_format, form.scale_format, form.chunk_scales, form.span)
    return BY_NAME[cache_format].bytes(form.span), widen


def key_multiplier(form):
    """Return f(params, keys, block, count, q, s), which computes s = q k^T [ahead, rows]."""
    pieces, rows, lanes, teams, ahead = form.pieces, form.rows, form.lanes, form.teams, form.ahead
    span, general = form.span, form.general
    stored_bytes, widen = chunk_of(form, form.cache_format)
    multiply, add_others = scores.multiply(rows, span), device.add_others(rows * ahead)
    rotate = score_rotator(form)

    @device.inlined
    def multiply_keys(params, keys, block, count, q, s):
        k = cuda.local.array(span, F32)
        for i in range(rows * ahead):
            s[i] = np.float32(0)
        for t in range(ahead):
            row = keys.row_ids[min(block + t * teams + cuda.threadIdx.y, count - 1)]
            p = 0
            while p < pieces:
                chunk = p * lanes + cuda.threadIdx.x
                if chunk * span < params.dim:
                    at = keys.address + row * params.key_row
                    at += chunk * (span * params.key_element if general else stored_bytes)
                    widen(at, keys.scales + row * params.scale_row + keys.scales_at[p], k)
                    multiply(k, q, p * rows * span, s, 0)
                p += 1
            rotate(s)
        distance = 1
        while distance < lanes:
            add_others(s, distance)
            distance *= 2

    return multiply_keys


def score_rotator(form):
    """Return f(s), which rotates a team's scores by a token, so that loops read constant registers."""
    rows, last = form.rows, form.ahead - 1

    @device.inlined
    def rotate(s):
        for r in range(rows):
            first = s[r]
            for t in range(last):
                s[t * rows + r] = s[(t + 1) * rows + r]
            s[last * rows + r] = first

    return rotate


def bias_applier(form):
    """Return f(params, facts, first, s), which applies cap, bias and mask, each score by one thread."""
    rows, lanes, teams, held_scores = form.rows, form.lanes, form.teams, form.rows * form.ahead

    @device.inlined
    def apply_bias_and_mask(params, facts, first, s):
        lane, team, cap = cuda.threadIdx.x, cuda.threadIdx.y, numeric.float_of(np.uint32(params.cap))
        board = cuda.shared.array((teams, held_scores), F32)
        if lane == 0:
            for i in range(held_scores):
                board[team, i] = s[i]
        cuda.syncthreads()
        for i in range(lane, held_scores, lanes):
            t = i // rows
            r, key = i - t * rows, first + t * teams + team
            score = scores.apply_softcap(board[team, i], cap)
            if key < facts[r, LOW] or key >= facts[r, HIGH]:
                score = numeric.MINUS_INF
            elif params.alibi or params.sloped:
                distance = key - facts[r, POSITION]
                score = scores.add_alibi(score, facts[r, SLOPE], min(distance, -distance))
            if params.mask and score != numeric.MINUS_INF:
                at = facts[r, MASK] + key * params.mask_column
                score = scores.add_mask(score, params.mask_kind, at)
            board[team, i] = score
        cuda.syncthreads()
        for i in range(held_scores):
            s[i] = board[team, i]
        cuda.syncthreads()

    return apply_bias_and_mask


def tail_hider(form):
    """Return f(block, count, s), which hides the tokens after the last one of a block."""
    rows, teams, ahead = form.rows, form.teams, form.ahead

    @device.inlined
    def hide(block, count, s):
        t = 0
        while t < ahead:
            for r in range(rows):
                if block + t * teams + cuda.threadIdx.y >= count:
                    s[t * rows + r] = numeric.MINUS_INF
            t += 1

    return hide


def value_multiplier(form):
    """Return f(params, values, block, count, p, o), which adds p v of the team's next tokens to o."""
    pieces, rows, lanes, teams, ahead = form.pieces, form.rows, form.lanes, form.teams, form.ahead
    span, general = form.span, form.general
    stored_bytes, widen = chunk_of(form, form.value_format)
    add, rotate = scores.add(rows, span), score_rotator(form)

    @device.inlined
    def multiply_values(params, values, block, count, weights, o):
        v = cuda.local.array(span, F32)
        for t in range(ahead):
            row = values.row_ids[min(block + t * teams + cuda.threadIdx.y, count - 1)]
            p = 0
            while p < pieces:
                chunk = p * lanes + cuda.threadIdx.x
                if chunk * span < params.value_dim:
                    at = values.address + row * params.value_row
                    at += chunk * (span * params.value_element if general else stored_bytes)
                    widen(at, values.scales + row * params.scale_row + values.scales_at[p], v)
                    add(v, o, p * rows * span, weights, 0)
                p += 1
            rotate(weights)

    return multiply_values


def finisher(form):
    """Return f(params, step, item, state, live, shrink, value_scale) -> whether all sums are finite.

    It merges the teams' results and writes them to a slot, or normalized to the output.
    """
    span, pieces, rows, lanes, teams = form.span, form.pieces, form.rows, form.lanes, form.teams
    write = chunks.write(form.data_dtype)
    packed_bytes, held, threads = BY_NAME[form.data_dtype].bytes(1), rows * pieces * span, lanes * teams
    at_once = max(1, ELEMENTS // (rows * span))  # pieces that the board has at a time
    width = min(pieces, at_once) * rows * span  # of the board [threads, pieces, rows, span]
    stride = width + 1  # so that threads use different banks

    @device.inlined
    def finish_row(params, step, item, r, m_teams, l_teams, shrink):
        """Write m and l of a row to its slot, or return the factor of its sums."""
        m, l = numeric.MINUS_INF, np.float32(0)
        for t in range(teams):
            m = max(m, m_teams[t, r])
        for t in range(teams):
            l += l_teams[t, r] * weight(m_teams[t, r], m)
        if item.slot >= 0:
            merge.put_state(params, merge.slot_address(params, item.slot, rows, r), m, l, shrink)
            return np.float32(1)
        row = work_items.row_of(params, item, item.first + r)
        return merge.finish_row(params, step, row, m, l, shrink)

    @device.inlined
    def scale_sums(state, m_teams, value_scale):
        """Multiply the team's sums by e^(m_t - m)."""
        for r in range(rows):
            m = numeric.MINUS_INF
            for t in range(teams):
                m = max(m, m_teams[t, r])
            alpha = weight(state.m[r], m) * value_scale
            p = 0
            while p < pieces:
                for i in range(span):
                    state.o[(p * rows + r) * span + i] *= alpha
                p += 1

    @device.inlined
    def finish(params, step, item, state, live, shrink, value_scale):
        lane, team = cuda.threadIdx.x, cuda.threadIdx.y
        thread = team * lanes + lane
        # One array on each line, because the simulator identifies a shared array by its line.
        m_teams = cuda.shared.array((teams, rows), F32)
        l_teams = cuda.shared.array((teams, rows), F32)
        factors = cuda.shared.array(rows, F32)
        board = cuda.shared.array((threads, stride), F32)
        if lane == 0:
            for r in range(rows):
                m_teams[team, r] = state.m[r]
                l_teams[team, r] = state.l[r]
        cuda.syncthreads()
        if thread < live:
            factors[thread] = finish_row(params, step, item, thread, m_teams, l_teams, shrink)
        scale_sums(state, m_teams, value_scale)
        not_finite = 0
        for piece in range(0, pieces, at_once):
            if piece:  # wait until the last pieces have been read
                cuda.syncthreads()
            for i in range(width):
                if piece * rows * span + i < held:
                    board[thread, i] = state.o[piece * rows * span + i]
            cuda.syncthreads()
            for r in range(live):
                row = work_items.row_of(params, item, item.first + r)
                out = work_items.output_address(params, step, row)
                for i in range(thread, at_once * lanes * span, threads):
                    e = piece * lanes * span + i
                    if e < params.value_dim:
                        p = i // (lanes * span)
                        member = i // span - p * lanes
                        x = np.float32(0)
                        for t in range(teams):
                            x += board[t * lanes + member, (p * rows + r) * span + i % span]
                        if x * np.float32(0) != np.float32(0):
                            not_finite = 1
                        if item.slot >= 0:
                            write_float(merge.slot_address(params, item.slot, rows, r) + 4 * e, x)
                        else:
                            write(out + e * packed_bytes, x * factors[r])
        return cuda.syncthreads_or(not_finite) == 0

    return finish


compiled = device.variants(attend, SIGNATURE)


def suits(record, context, reach, most_rows):
    """Return True: this kernel takes every call."""
    return True


def prepare(record, context, tables, most_rows, stream):
    """Return the launches: of the kernel, and of the merge if contexts are split."""
    form = form_of(record, context, most_rows)
    block = form.lanes, form.teams
    return merge.prepare(compiled(form), record, context.data_dtype, tables, form.rows, block, stream)


def sum_weights(form):
    """Return the kernel that sums the weights of keys; `out` of its record is [B, query heads, tokens].

    A block takes `threads` keys of a query head and all query tokens, in tiles. One thread adds to a sum, in
    the order of the tokens, so that sums do not depend on the device.
    """
    rows, lanes, teams, ahead, pieces = form.rows, form.lanes, form.teams, form.ahead, form.pieces
    threads, held, held_scores = lanes * teams, pieces * rows * form.span, rows * ahead
    load_queries, multiply_keys = query_loader(form), key_multiplier(form)
    apply_bias_and_mask, row_ids_of = bias_applier(form), row_finder(form)

    @device.inlined
    def add_weights(sums, block, count, s, lse, live):
        """Add a tile's weights to the sum of each of the team's keys."""
        t = 0
        while t < ahead:
            total, key = np.float32(0), block + t * teams + cuda.threadIdx.y
            for r in range(rows):
                if r < live:
                    total += weight(s[t * rows + r], lse[r])
            if key < count:
                sums[key] += np.float64(total)
            t += 1

    def sum_weights(params, seqstarts, kvstarts, table, slopes, tokens):
        # Work items and slots are not used: seqstarts take their place.
        step = StepTables(seqstarts, kvstarts, table, seqstarts, seqstarts, slopes)
        blocks, group = (tokens + threads - 1) // threads, params.group
        unit = cuda.blockIdx.x // blocks
        b, first = unit // (params.heads * group), (cuda.blockIdx.x - unit * blocks) * threads
        query = unit - b * params.heads * group
        item = WorkItem(b, table[b], query // group, 0, 0, 0, 1, slot=-1, start=seqstarts[b])
        seqlen, kvlen = work_items.lengths(step, b)
        count = max(min(kvlen - first, threads), 0)
        thread = cuda.threadIdx.y * lanes + cuda.threadIdx.x

        q = cuda.local.array(held, F32)  # [pieces, rows, span]
        s = cuda.local.array(held_scores, F32)  # [ahead, rows]
        scales_at = cuda.local.array(pieces, types.int64)
        facts = cuda.shared.array((rows, FACTS), types.int64)
        lse = cuda.shared.array(rows, F32)
        sums = cuda.shared.array(threads, types.float64)
        row_ids = cuda.shared.array(threads, types.int64)
        sums[thread] = 0.0
        if count > 0:
            row_ids[thread], _ = row_ids_of(params, step, b, min(first + thread, kvlen - 1))
        scale, _ = work_items.head_scales(params, b, item.head)
        keys = head_keys(params, item, scales_at, row_ids)
        token = 0 if count > 0 else seqlen
        while token < seqlen:
            live = min(rows, seqlen - token)
            cuda.syncthreads()  # the last tile has been read
            if thread < rows:
                row = Row(b, token + min(thread, live - 1), query)
                number = row.token * group + query - item.head * group
                fill_facts(params, step, item, number, facts[thread])
                lse[thread] = read_float(work_items.lse_address(params, step, row))
            cuda.syncthreads()
            if facts[0, LOW] < first + count and facts[live - 1, HIGH] > first:
                load_queries(params, scale, facts, q, scales_at)  # [rows, dim]
                hides = facts[live - 1, LOW] > first or facts[0, HIGH] < first + count
                for block in range(0, count, teams * ahead):
                    multiply_keys(params, keys, block, count, q, s)  # [tokens, rows]
                    if hides or needs_bias_or_mask(params):
                        apply_bias_and_mask(params, facts, first + block, s)
                    if cuda.threadIdx.x == 0:
                        add_weights(sums, block, count, s, lse, live)
            token += rows
        cuda.syncthreads()
        if first + thread < tokens:
            at = params.out + b * params.out_sequence + query * params.out_head
            write_float(at + (first + thread) * params.out_token, np.float32(sums[thread]))

    return sum_weights


compiled_weights = device.variants(sum_weights, WEIGHTS_SIGNATURE)


def prepare_weights(record, context, tables, most_tokens, key_weights, stream):
    """Return the launch that writes `key_weights` [B, query heads, tokens]; it must follow that of lse."""
    form = form_of(record, context, max(most_tokens, 1))
    _, key = tables.work(record, form.rows)  # registers the table of slopes
    step = tables.of(("seqstarts", "kvstarts", "table", key.names()[2]), stream)
    at, (sequence, head, token) = key_weights.ctypes.data, key_weights.strides
    record = record._replace(out=at, out_sequence=sequence, out_head=head, out_token=token)
    sequences, heads, tokens = key_weights.shape
    blocks = sequences * heads * -(-tokens // (form.lanes * form.teams))
    block = form.lanes, form.teams
    return host.Launch(compiled_weights(form), (blocks, 1), block, stream, (record, *step, tokens))
