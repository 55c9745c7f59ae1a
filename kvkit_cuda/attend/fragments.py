"""What a warp does with the fragments of a tile: products of keys and values, masks, the online softmax.

Scores and sums are registers: those of a thread lie as [row, column], with 2 rows of each strip of 16 and 2
of each 8 columns (see `ptx`). Loops over them have constant bounds, or turn them and look at the first ones.
`form` is the form of the kernel (see `prefill` and `decode`). It says how many rows a thread has, how many
scores (`columns`) and sums (`width`) of each, and their `places`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvkit import numeric
from kvkit.formats import BY_NAME
from kvkit_cuda.attend import tiles
from kvkit_cuda.attend.scores import capped, leaning, masked, visible
from kvkit_cuda.ground import device, ptx

STRIP = 16  # rows that a warp multiplies at once
EVERYONE = 0xFFFFFFFF  # the mask of a warp's threads
LARGEST, LONGEST = 256, 2**31 - 2**10  # head and context
LOWEST = np.float32(numeric.LOWEST)
int32, quotient = device.int32, tiles.quotient


@dataclass(frozen=True, slots=True)
class Places:
    """Which scores of a tile a thread has: rows so far from its first one, tokens likewise."""

    row: Callable
    token: Callable
    first: Callable  # (lane) -> the first token
    distances: tuple[int, ...]  # from a lane to those that have the other scores of its rows


def _places(row, token, first, distances):
    return Places(device.inlined(row), device.inlined(token), device.inlined(first), distances)


# Where a product has rows of queries and columns of tokens, and where it has them the other way round.
BY_ROWS = _places(
    lambda r: (r >> 1) * STRIP + (r & 1) * 8,
    lambda i: (i >> 1) * 8 + (i & 1),
    lambda lane: (lane & 3) * 2,
    (1, 2),
)
BY_TOKENS = _places(lambda r: (r >> 1) * 8 + (r & 1), lambda i: i * 8, lambda lane: lane >> 2, (4, 8, 16))


def suits(record, context, steps, most_rows, alignment):
    """Whether data can be multiplied so: of 16 bits or codes, whole fragments, and rows that are aligned."""
    sizes, group = (context.dim, context.value_dim), context.group
    whole = all(size % STRIP == 0 and size <= LARGEST for size in sizes)
    known = context.packed in ptx.SHORT and (
        context.stored == context.packed
        or (context.cell and group % tiles.CHUNK == 0 and not BY_NAME[context.stored].minifloat)
    )
    short = not record.free and int(np.diff(steps.kvstarts).max(initial=0)) < LONGEST and most_rows < LONGEST
    cached = (record.keys, record.key_sequence, record.key_row, record.key_head,
              record.values, record.value_sequence, record.value_row, record.value_head)  # fmt: skip
    packed = (record.query, record.query_sequence, record.query_token, record.query_head,
              record.out, record.out_sequence, record.out_token, record.out_head)  # fmt: skip
    aligned = not any(n % alignment for n in cached) and not any(n % 16 for n in packed)
    return whole and known and short and aligned


@functools.cache
def multiply(element, strips, columns):
    """(a, b0, b1, c, block): c = a b + c for every strip, in a block of 8 columns of c [row, column]."""
    product, width = ptx.product(element), columns // 4

    def multiply(a, b0, b1, c, block):
        for strip in range(strips):
            i, j = 4 * strip, 2 * strip * width + 2 * block
            k = j + width
            c[j], c[j + 1], c[k], c[k + 1] = product(
                a[i], a[i + 1], a[i + 2], a[i + 3], b0, b1, c[j], c[j + 1], c[k], c[k + 1]
            )

    return device.inlined(multiply)


def multiply_keys(form):
    """(queries, keys, warp, lane, a, scores): scores of a tile of tokens."""
    steps, tokens, strips = form.dim // 16, form.tokens, form.strips
    at, load, add = tiles.place(form.dim), ptx.matrices(False), multiply(form.element, strips, tokens)

    def multiply_keys(queries, keys, warp, lane, a, scores):
        for i in range(strips * tokens // 2):
            scores[i] = np.float32(0)
        for step in range(steps):
            for strip in range(strips):
                row, i = (warp * strips + strip) * STRIP + (lane & 15), 4 * strip
                a[i], a[i + 1], a[i + 2], a[i + 3] = load(queries, at(row, 2 * step + (lane >> 4)))
            for block in range(0, tokens // 8, 2):
                row = 8 * block + (lane >> 4) * 8 + (lane & 7)
                b0, b1, b2, b3 = load(keys, at(row, 2 * step + (lane >> 3 & 1)))
                add(a, b0, b1, scores, block)
                add(a, b2, b3, scores, block + 1)

    return device.part(multiply_keys)


def multiply_values(form):
    """(weights, values, lane, a, sums): weights, rounded to the type of the data, times the tile's values."""
    tokens, dim, strips = form.tokens, form.value_dim, form.strips
    at, load, add = tiles.place(dim), ptx.matrices(True), multiply(form.element, strips, dim)
    packed, width = ptx.packed(form.element), tokens // 4

    def multiply_values(weights, values, lane, a, sums):
        for step in range(tokens // 16):
            for i in range(4 * strips):
                j = (i // 4 * 2 + i % 2) * width + 4 * step + i % 4 // 2 * 2
                a[i] = packed(weights[j], weights[j + 1])
            for block in range(0, dim // 8, 2):
                b0, b1, b2, b3 = load(values, at(16 * step + (lane & 15), block + (lane >> 4)))
                add(a, b0, b1, sums, block)
                add(a, b2, b3, sums, block + 1)

    return device.part(multiply_values)


def multiply_carefully(form):
    """The same in float32, leaving out values without weight: one of 0 hides NaN and infinity."""
    rows, columns, blocks = 2 * form.strips, form.tokens // 4, form.value_dim // 8
    at, exchange, two, turn = (
        tiles.place(form.value_dim),
        device.exchange,
        tiles.two(form.element),
        rotate(form),
    )

    def multiply_carefully(weights, values, lane, a, sums):
        for column in range(columns):
            for other in range(4):
                token = column // 2 * 8 + ((lane ^ other) & 3) * 2 + column % 2
                for row in range(rows):
                    weight = exchange(EVERYONE, weights[row * columns], other)
                    if weight != np.float32(0):
                        for block in range(blocks):
                            low, high = two(values + at(token, block) + (lane & 3) * 4)
                            i = (row * blocks + block) * 2
                            sums[i] += weight * low
                            sums[i + 1] += weight * high
            turn(weights, 1)

    return device.part(multiply_carefully)


def soften(form):
    """(scores, sums, top, total, shift): scores, times log2(e), to weights; sums shrink as a top grows."""
    rows, columns, width, distances = form.thread_rows, form.columns, form.width, form.places.distances
    exchange, power, larger = device.exchange, ptx.power, ptx.larger

    def soften(scores, sums, top, total, shift):
        for row in range(rows):
            peak = top[row]
            for i in range(row * columns, (row + 1) * columns):
                peak = larger(peak, scores[i])
            for distance in distances:
                peak = larger(peak, exchange(EVERYONE, peak, distance))
            base = larger(peak, LOWEST)
            factor = power(top[row] - base)
            top[row] = peak
            base += shift
            added = np.float32(0)
            for i in range(row * columns, (row + 1) * columns):
                scores[i] = power(scores[i] - base)
                added += scores[i]
            total[row] = total[row] * factor + added
            for i in range(row * width, (row + 1) * width):
                sums[i] *= factor

    return device.part(soften)


def rotate(form):
    """(registers, step): the scores of a thread so many places on, so that a loop need not count places."""
    held = form.thread_rows * form.columns

    def rotate(scores, step):
        for _ in range(step):
            first = scores[0]
            for i in range(held - 1):
                scores[i] = scores[i + 1]
            scores[held - 1] = first

    return device.inlined(rotate)


def weigh(form):
    """(task, .., scores): the scores of a thread capped, and what is added to them: ALiBi and masks."""
    rows, columns, turn, places = form.thread_rows, form.columns, rotate(form), form.places
    row_of, token_of, first_of = places.row, places.token, places.first

    def weigh(task, seqstarts, kvstarts, slopes, b, head, row, last, begin, lane, scores):
        cap = numeric.float_of(np.uint32(task.cap))
        seqlen, kvlen = seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        for r in range(rows):
            here = min(row + row_of(r), last)
            token = quotient(here, task.group)
            query = head * task.group + here - token * task.group
            low, high = visible(task, b, seqlen, kvlen, token)
            low, high, position = (
                int32(low - begin),
                int32(high - begin),
                int32(kvlen - seqlen + token - begin),
            )
            mask = task.mask + b * task.mask_sequence + query * task.mask_head + begin * task.mask_column
            mask += token * task.mask_row
            if task.mask_packed:
                mask += seqstarts[b] * task.mask_row
            if task.mask_packed == 1:
                mask += kvstarts[b] * task.mask_column
            for i in range(columns):
                key = int32(token_of(i) + first_of(lane))
                if low <= key < high:
                    score = capped(scores[i], cap)
                    if task.alibi:
                        score = leaning(score, slopes[query], key - position)
                    if task.mask:
                        score = masked(score, task.mask_kind, mask + key * task.mask_column)
                    scores[i] = score
            turn(scores, columns)

    return device.part(weigh)


def hide(form):
    """(task, .., scores): the scores of keys that rows do not see."""
    rows, columns, places = form.thread_rows, form.columns, form.places
    row_of, token_of, first_of = places.row, places.token, places.first

    def hide(task, seqstarts, kvstarts, b, row, last, begin, end, lane, scores):
        seqlen, kvlen = seqstarts[b + 1] - seqstarts[b], kvstarts[b + 1] - kvstarts[b]
        for r in range(rows):
            here = min(row + row_of(r), last)
            low, high = visible(task, b, seqlen, kvlen, quotient(here, task.group))
            low, high = int32(low - begin - first_of(lane)), int32(min(high, end) - begin - first_of(lane))
            for i in range(columns):
                if token_of(i) < low or token_of(i) >= high:
                    scores[r * columns + i] = numeric.MINUS_INF

    return device.part(hide)
