"""Fragments of a tile in a warp's registers: products with keys and values, masks, the online softmax.

    s = q k^T               [rows, tokens]
    m' = max(m, scale max s), alpha = 2^(m - m')            [rows]
    p = 2^(scale s - m')    [rows, tokens]
    l = alpha l + sum p     [rows]
    o = alpha o + p v       [rows, dim]

All of these are registers; each thread has some rows and columns. A tensor core adds the product of two
matrices to a third one, whose fragment in a thread has 2 rows and 2 columns. With g = lane // 4 and
t = lane % 4, threads have these scores of a warp's tile (`ptx` describes the words of a and b):

    prefill, `by_rows`: s = q k^T                    decode, `BY_TOKENS`: s^T = k q^T
                    tokens                                           rows of q
              2t    2t+1    8+2t  8+2t+1                             2t      2t+1
    row g   [ 0,0   0,1  |  0,2   0,3  ...           token g      [  0,0     1,0
    row 8+g [ 1,0   1,1  |  1,2   1,3  ...           token 8+g    [  0,1     1,1

An entry is (row of the thread, column of the thread); registers are [thread rows, columns]. One form is the
other's transpose. Prefill repeats the picture for every strip of 16 rows, decode for every block of 8 rows.
A loop over registers has constant bounds, or it rotates registers and uses the first ones. `form` is the form
of the kernel (see `prefill` and `decode`): the rows of a thread, their scores (`columns`) and sums (`width`),
and which rows and tokens they are (`fragment`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit_cuda.attention import tiles, work_items
from kvkit_cuda.attention.scores import add_alibi, add_mask, apply_softcap
from kvkit_cuda.attention.tiles import LONGEST, quotient_by
from kvkit_cuda.attention.work_items import lengths, visible
from kvkit_cuda.device_runtime import device, ptx

STRIP = 16  # rows that a warp multiplies at once
LARGEST = 256  # elements of the largest head
LOWEST = np.float32(numeric.LOWEST)
INFINITY = 0x7F800000  # bits of float32
SHRINK = 40  # NaN-safe weights are 2^40 times smaller
SMALLER = np.float32(2.0**-SHRINK)
TOP, MOST_LIFT = 7, 60  # a row's first weights times scales are below 2^TOP, its |lift| is at most MOST_LIFT
int32, fresh_register, EVERYONE = device.int32, ptx.fresh_register, device.EVERYONE


class Softmax(NamedTuple):
    """The state of the online softmax: registers of a thread, for its rows."""

    o: Any  # sums of values [rows, width]
    m: Any  # running maxima of scores, as exponents of 2 [rows]
    l: Any  # running sums of weights [rows]
    peak: Any  # largest scores of a tile, as exponents of 2 [rows]
    lift: Any  # maximum - m: a constant of the form, or found for each row (`lift_finder`) [rows]


class Held(NamedTuple):
    """Registers of a thread for the products of decode (see `slices` and `panels`)."""

    q: Any  # words of queries
    zeros: Any  # -q z of each group, where its scores begin: stored codes are z too large (`slices`)
    words: Any  # words of keys, values and weights for a product
    sums: Any  # scores of a group before they are scaled
    scales: Any  # of two tokens [tokens, groups]
    places: Any  # offsets in a tile: of keys, of their scales, of values, of theirs


@device.inlined
def clear(state, lift):
    """Begin the online softmax: m = -inf, l = 0, o = 0."""
    for i in range(state.o.shape[0]):
        state.o[i] = np.float32(0)
    for r in range(state.m.shape[0]):
        state.m[r], state.l[r], state.lift[r] = numeric.MINUS_INF, np.float32(0), lift


@dataclass(frozen=True, slots=True)
class Fragment:
    """The scores of a tile that a thread has: its rows and tokens, relative to its first row and token."""

    transposed: bool  # whether a product has rows of keys and columns of queries
    row: Callable  # (r) -> distance of the thread's row r from its first row
    token: Callable  # (i) -> distance of column i's token from the first token
    first_row: Callable  # (thread) -> its first row; (lane) if all warps have the same rows
    first_token: Callable  # (thread or lane) -> its first token
    distances: tuple[int, ...]  # from a lane to the lanes with the other scores of its rows


@functools.cache
def by_rows(strips):
    """Return the fragment of q k^T for a warp with this many strips of 16 rows."""
    rows = strips * STRIP
    return Fragment(
        transposed=False,
        row=device.inlined(lambda r: (r >> 1) * STRIP + (r & 1) * 8),
        token=device.inlined(lambda i: (i >> 1) * 8 + (i & 1)),
        first_row=device.inlined(lambda thread: (thread >> 5) * rows + (thread >> 2 & 7)),
        first_token=device.inlined(lambda thread: (thread & 3) * 2),
        distances=(1, 2),
    )


# The fragment of k q^T: every warp has all rows.
BY_TOKENS = Fragment(
    transposed=True,
    row=device.inlined(lambda r: (r >> 1) * 8 + (r & 1)),
    token=device.inlined(lambda i: i * 8),
    first_row=device.inlined(lambda lane: (lane & 3) * 2),
    first_token=device.inlined(lambda lane: lane >> 2),
    distances=(4, 8, 16),
)


def are_widened(context):
    """Return whether keys and values may be multiplied after they are widened to the data's type.

    Floats of that type may, and floats of 8 bits without computed scales; codes in groups of whole chunks, if
    a load would round them to the data's type.
    """
    cache_format = context.cache_format
    if context.scale_format:
        whole_chunks = context.group % tiles.CHUNK == 0
        return whole_chunks and not BY_NAME[cache_format].minifloat and context.as_loaded
    return cache_format == context.data_dtype or BY_NAME[cache_format].bits == 8


def suits(record, context, reach, most_rows, alignment, largest=LARGEST):
    """Return whether tensor cores can multiply the data: 16 bits, whole fragments, aligned rows."""
    sizes = context.dim, context.value_dim
    whole = all(size % STRIP == 0 and size <= largest for size in sizes)
    known = context.data_dtype in ptx.SHORT
    # `general` records have strides or scales that no cache has (see `forms`).
    in_32_bits = not record.general and max(reach.context, most_rows) < LONGEST
    cached = (record.keys, record.key_sequence, record.key_row, record.key_head,
              record.values, record.value_sequence, record.value_row, record.value_head)  # fmt: skip
    packed = (record.query, record.query_sequence, record.query_token, record.query_head,
              record.out, record.out_sequence, record.out_token, record.out_head)  # fmt: skip
    aligned = not any(n % alignment for n in cached) and not any(n % 16 for n in packed)
    return whole and known and in_32_bits and aligned


def needs_bias_or_mask(record):
    """Return whether scores need a cap, a bias or a mask, or have a scale that is not positive.

    The softmax multiplies the largest score by a positive scale; another scale is applied before.
    """
    positive = 0 < record.scale < INFINITY  # as bits
    return bool(record.cap or record.alibi or record.sloped or record.mask or not positive)


@functools.cache
def mma(element, width, transposed=False):
    """Return f(a, b, c, row, column): c += a b, for the fragment at (row, column) of c [rows, width].

    With `transposed`, c has the transpose of a b.
    """
    emit = ptx.mma(element)
    right, down = (width, 1) if transposed else (1, width)

    def mma(a, b, c, row, column):
        i = row * width + column
        c[i], c[i + right], c[i + down], c[i + width + 1] = emit(
            a, b, (c[i], c[i + right], c[i + down], c[i + width + 1])
        )

    return device.inlined(mma)


def unrolled(body, count):
    """Return f(a, b, c, d, i), which calls `body` for i, i + 1, ..: no compiler unrolls so long a loop."""
    if count == 1:
        return body
    half = count // 2
    first, second = unrolled(body, half), unrolled(body, count - half)

    def both(a, b, c, d, i):
        first(a, b, c, d, i)
        second(a, b, c, d, i + half)

    return device.force_inlined(both)


@functools.cache
def multiply_strips(element, strips, width):
    """Return f(a, b0, b1, c, block): c += a b for every strip, in a block of 8 columns of c."""
    multiply = mma(element, width)

    def multiply_strips(a, b0, b1, c, block):
        for strip in range(strips):
            i = 4 * strip
            multiply((a[i], a[i + 1], a[i + 2], a[i + 3]), (b0, b1), c, 2 * strip, 2 * block)

    return device.inlined(multiply_strips)


def multiply_keys(form):
    """Return f(q, k, a, s): s = q k^T; q, k are addresses in shared memory, a registers for words of q."""
    tokens, strips, row = form.tokens, form.strips, tiles.row_bytes(form.dim)
    advance, load = tiles.advance(form.dim), ptx.matrices(transposed=False)
    multiply = multiply_strips(form.element, strips, form.columns)

    def step(q, k, a, s, pair):
        q, k = advance(q, pair), advance(k, pair)
        for strip in range(strips):
            i = 4 * strip
            a[i], a[i + 1], a[i + 2], a[i + 3] = load(q, strip * STRIP * row)  # [16 rows, 16 elements]
        for block in range(0, tokens // 8, 2):
            b0, b1, b2, b3 = load(k, 8 * block * row)  # [16 tokens, 16 elements]
            multiply(a, b0, b1, s, block)
            multiply(a, b2, b3, s, block + 1)

    steps = unrolled(device.force_inlined(step), form.dim // 16)

    def multiply_keys(q, k, a, s):
        for i in range(strips * tokens // 2):
            s[i] = np.float32(0)
        steps(q, k, a, s, 0)

    return device.force_inlined(multiply_keys)


def multiply_values(form):
    """Return f(p, v, scales, a, o): o += p v; `v` and `scales` of tokens are addresses in shared memory.

    `a` are registers for words of p, which is multiplied by scales and rounded to the data's type.
    """
    tokens, dim, strips, row = form.tokens, form.value_dim, form.strips, tiles.row_bytes(form.value_dim)
    advance, load, columns = tiles.advance(dim), ptx.matrices(transposed=True), form.columns
    packed = ptx.packed(form.element)
    multiply, scale_weights = multiply_strips(form.element, strips, form.width), scale_tokens(form)

    def multiply_values(p, v, scales, a, o):
        scale_weights(scales, p)
        for step in range(tokens // 16):
            for i in range(4 * strips):  # words a of [16 rows, 16 tokens] (see `ptx`), for each strip
                r, column = i // 4 * 2 + i % 2, 4 * step + i % 4 // 2 * 2
                j = r * columns + column
                a[i] = packed(p[j], p[j + 1])
            for block in range(0, dim // 8, 2):
                b0, b1, b2, b3 = load(advance(v, block // 2), 16 * step * row)  # [16 tokens, 16 elements]
                multiply(a, b0, b1, o, block)
                multiply(a, b2, b3, o, block + 1)

    return device.force_inlined(multiply_values)


def multiply_nan_safe(form):
    """Return f(p, v, scales, lane, o): o += p v in float32; weights of 0 add nothing, even for NaN.

    Weights are multiplied with scales, and with `SMALLER`, so that sums stay finite.
    """
    rows, columns, blocks = form.thread_rows, form.columns, form.value_dim // 8
    at, exchange = tiles.place(form.value_dim), device.exchange
    two, rotate, scale_weights = tiles.two(form.element), score_rotator(form), scale_tokens(form, True)

    def multiply_nan_safe(p, v, scales, lane, o):
        lane = fresh_register(lane)
        scale_weights(scales, p)
        for column in range(columns):
            for other in range(4):  # the 4 threads of a row have the weights of its tokens
                token = column // 2 * 8 + ((lane ^ other) & 3) * 2 + column % 2
                for row in range(rows):
                    weight = exchange(EVERYONE, p[row * columns], other) * SMALLER
                    if weight != np.float32(0):
                        for block in range(blocks):
                            low, high = two(v + at(token, block) + (lane & 3) * 4)
                            i = (row * blocks + block) * 2
                            o[i] += weight * low
                            o[i + 1] += weight * high
            rotate(p, 1)

    return device.force_inlined(multiply_nan_safe)


def scale_tokens(form, nan_safe=False):
    """Return f(at, s), which multiplies scores or weights by the scales of their tokens.

    `at` is the address, in shared memory, of the scale of the thread's first token. If `nan_safe`, weights of
    0 stay 0, even for a scale that is NaN or infinite.
    """
    rows, columns, two_floats = form.thread_rows, form.columns, tiles.two_floats
    if not form.token_scales:
        return device.inlined(lambda at, s: None)

    @device.inlined
    def times(x, scale):
        return x if nan_safe and x == np.float32(0) else x * scale

    def scale_tokens(at, s):
        for i in range(0, columns, 2):
            one, other = two_floats(np.int64(at) + 16 * i)
            j = i
            while j < rows * columns:  # NVVM does not unroll a loop over a range here, and s becomes memory
                s[j], s[j + 1] = times(s[j], one), times(s[j + 1], other)
                j += columns

    return device.force_inlined(scale_tokens)


def scales_loader(form):
    """Return f((scales, at)), which loads the scales of a thread's tokens from address `at`."""
    columns, two_floats = form.columns, tiles.two_floats

    def load_scales(tile):
        scales, at = tile
        for i in range(0, columns, 2):
            scales[i], scales[i + 1] = two_floats(np.int64(at) + 16 * i)
        return scales

    return device.inlined(load_scales)


def lift_finder(form, load_scales):
    """Return f(s, state, tile), which finds the lift of each row whose first weights come now.

    `load_scales`(tile) returns the largest scales of values of the thread's tokens. The largest one that the
    row sees, times 2^lift, is in the middle of what float16 holds: later scales may be 2^8 times larger
    before sums are infinite. Then the NaN-safe attempt sums in float32.
    """
    rows, columns, distances = form.thread_rows, form.columns, form.fragment.distances
    exchange, larger = device.exchange, ptx.larger

    def find_lift(s, state, tile):
        scales = load_scales(tile)
        for r in range(rows):
            top = np.float32(0)  # the largest scale
            for column in range(columns):
                if s[r * columns + column] > numeric.MINUS_INF:
                    top = larger(top, abs(scales[column]))
            for distance in distances:
                top = larger(top, exchange(EVERYONE, top, distance))
            if top > np.float32(0) and state.m[r] == numeric.MINUS_INF:
                exponent = int(numeric.bits_of(top) >> np.uint32(23)) - 127
                state.lift[r] = np.float32(max(min(TOP - 1 - exponent, MOST_LIFT), -MOST_LIFT))

    return device.force_inlined(find_lift)


def update_softmax(form, load_scales=None):
    """Return f(s, state, scale, tile), which updates m, l and o, and replaces s by p = 2^(scale s - m).

    `scale` is positive. m is less than the maximum by `lift`: weights, l and o have 2^lift more. With
    `load_scales` the lift is found before the first weights of a row (see `lift_finder`), by all threads of a
    warp. A thread adds its own weights to l; sums of other threads are added in the end.
    """
    rows, columns, width, distances = form.thread_rows, form.columns, form.width, form.fragment.distances
    exchange, power, larger = device.exchange, ptx.power, ptx.larger
    any_of_warp = device.any_of_warp if load_scales else device.inlined(lambda grown: grown)
    find_lift = device.inlined(lambda s, state, tile: None)
    if load_scales:
        find_lift = lift_finder(form, load_scales)

    def update_softmax(s, state, scale, tile):
        o, m, l, peaks, lift = state
        grown = False
        for row in range(rows):
            peak = s[row * columns]
            for i in range(row * columns + 1, (row + 1) * columns):
                peak = larger(peak, s[i])
            for distance in distances:
                peak = larger(peak, exchange(EVERYONE, peak, distance))
            peaks[row] = peak * scale
            grown |= peaks[row] - lift[row] > m[row]
        if any_of_warp(grown):
            find_lift(s, state, tile)
            for row in range(rows):
                m_new = larger(m[row], peaks[row] - lift[row])
                alpha = power(m[row] - larger(m_new, LOWEST))
                m[row] = m_new
                l[row] *= alpha
                for i in range(row * width, (row + 1) * width):
                    o[i] *= alpha
        for row in range(rows):
            base = larger(m[row], LOWEST)
            added = base - base  # NaN for a maximum that is infinite
            for i in range(row * columns, (row + 1) * columns):
                s[i] = power(s[i] * scale - base)
                added += s[i]
            l[row] += added

    return device.force_inlined(update_softmax)


def score_rotator(form):
    """Return f(s, step), which rotates a thread's scores by `step` places, for loops over the first ones."""
    held = form.thread_rows * form.columns

    def rotate(s, step):
        for _ in range(step):
            first = s[0]
            for i in range(held - 1):
                s[i] = s[i + 1]
            s[held - 1] = first

    return device.inlined(rotate)


def apply_bias_and_mask(form):
    """Return f(params, step, item, thread, begin, s, scale), which applies scale, cap, ALiBi and mask.

    `begin` is the first position of the tile.
    """
    rows, columns, rotate, fragment = form.thread_rows, form.columns, score_rotator(form), form.fragment
    row_of, token_of, held = fragment.row, fragment.token, rows * columns
    first_row, first_token = fragment.first_row, fragment.first_token

    def apply_bias_and_mask(params, step, item, thread, begin, s, scale):
        cap = numeric.float_of(np.uint32(params.cap))
        for i in range(held):
            s[i] *= scale
        thread, item = fresh_register(thread), work_items.refreshed(item)
        seqlen, kvlen = lengths(step, item.b)
        for r in range(rows):
            number = item.first + first_row(thread) + row_of(r)
            row = work_items.row_of_int32(params, item, min(number, item.last))
            seen = visible(params, step, item.b, row.token)
            low, high = int32(seen.begin - begin), int32(seen.end - begin)
            position = int32(kvlen - seqlen + row.token - begin)
            mask = work_items.mask_address(params, step, row) + begin * params.mask_column
            for i in range(columns):
                key = int32(token_of(i) + first_token(thread))
                if low <= key < high:
                    score = apply_softcap(s[i], cap)
                    if params.alibi or params.sloped:
                        slope = step.slopes[item.b * params.slopes_sequence + row.query]
                        score = add_alibi(score, slope, min(key - position, position - key))
                    if params.mask:
                        score = add_mask(score, params.mask_kind, mask + key * params.mask_column)
                    s[i] = score
            rotate(s, columns)

    return device.force_inlined(apply_bias_and_mask)


def hide(form):
    """Return f(params, step, item, thread, begin, end, s), which hides keys that a row does not see.

    Keys from `end` on are hidden too."""
    rows, columns, fragment = form.thread_rows, form.columns, form.fragment
    row_of, token_of = fragment.row, fragment.token
    first_row, first_token = fragment.first_row, fragment.first_token

    def hide(params, step, item, thread, begin, end, s):
        thread, item = fresh_register(thread), work_items.refreshed(item)
        first = begin + first_token(thread)
        for r in range(rows):
            number = min(item.first + first_row(thread) + row_of(r), item.last)
            seen = visible(params, step, item.b, quotient_by(number, params.by_group))
            low, high = int32(seen.begin - first), int32(min(seen.end, end) - first)
            for i in range(columns):
                if token_of(i) < low or token_of(i) >= high:
                    s[r * columns + i] = numeric.MINUS_INF

    return device.force_inlined(hide)
