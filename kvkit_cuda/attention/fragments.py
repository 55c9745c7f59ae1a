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

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit_cuda.attention import tiles
from kvkit_cuda.attention.scores import capped, leaning, masked, visible
from kvkit_cuda.device_runtime import device, ptx

STRIP = 16  # rows that a warp multiplies at once
EVERYONE = 0xFFFFFFFF  # the mask of a warp's threads
LARGEST, LONGEST = 256, 2**31 - 2**10  # head and context
LOWEST = np.float32(numeric.LOWEST)
INFINITY = 0x7F800000  # in bits
SHRINK = 40  # binary digits by which careful weights are smaller
SMALLER = np.float32(2.0**-SHRINK)
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


def suits(record, context, reach, most_rows, alignment):
    """Whether data can be multiplied so: of 16 bits or codes, whole fragments, and rows that are aligned."""
    sizes, group = (context.dim, context.value_dim), context.group
    whole = all(size % STRIP == 0 and size <= LARGEST for size in sizes)
    known = context.packed in ptx.SHORT and (
        context.stored == context.packed
        or (context.cell and group % tiles.CHUNK == 0 and not BY_NAME[context.stored].minifloat)
    )
    short = not record.free and max(reach.context, most_rows) < LONGEST
    cached = (record.keys, record.key_sequence, record.key_row, record.key_head,
              record.values, record.value_sequence, record.value_row, record.value_head)  # fmt: skip
    packed = (record.query, record.query_sequence, record.query_token, record.query_head,
              record.out, record.out_sequence, record.out_token, record.out_head)  # fmt: skip
    aligned = not any(n % alignment for n in cached) and not any(n % 16 for n in packed)
    return whole and known and short and aligned


def weighed(record):
    """Whether scores are more than products: capped, biased or masked, or larger for smaller products."""
    positive = 0 < record.scale < INFINITY
    return bool(record.cap or record.alibi or record.mask or not positive)


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


def in_turn(part, count):
    """(.., i): what `part` does for each i below `count`, in turn: compilers unroll no loop as long.

    It takes four arguments before i.
    """
    if count == 1:
        return part
    half = count // 2
    first, second = in_turn(part, half), in_turn(part, count - half)

    def both(a, b, c, d, i):
        first(a, b, c, d, i)
        second(a, b, c, d, i + half)

    return device.part(both)


def multiply_keys(form):
    """(queries, keys, a, scores): scores of a tile of tokens; where the thread's rows of both begin."""
    tokens, strips, row = form.tokens, form.strips, tiles.row_bytes(form.dim)
    on, load, add = tiles.further(form.dim), ptx.matrices(False), multiply(form.element, strips, tokens)

    def step(queries, keys, a, scores, pair):
        queries, keys = on(queries, pair), on(keys, pair)
        for strip in range(strips):
            i = 4 * strip
            a[i], a[i + 1], a[i + 2], a[i + 3] = load(queries, strip * STRIP * row)
        for block in range(0, tokens // 8, 2):
            b0, b1, b2, b3 = load(keys, 8 * block * row)
            add(a, b0, b1, scores, block)
            add(a, b2, b3, scores, block + 1)

    steps = in_turn(device.part(step), form.dim // 16)

    def multiply_keys(queries, keys, a, scores):
        for i in range(strips * tokens // 2):
            scores[i] = np.float32(0)
        steps(queries, keys, a, scores, 0)

    return device.part(multiply_keys)


def multiply_values(form):
    """(weights, values, a, sums): weights, rounded to the type of the data, times the tile's values."""
    tokens, dim, strips, row = form.tokens, form.value_dim, form.strips, tiles.row_bytes(form.value_dim)
    on, load, add = tiles.further(dim), ptx.matrices(True), multiply(form.element, strips, dim)
    packed, width = ptx.packed(form.element), tokens // 4

    def multiply_values(weights, values, a, sums):
        for step in range(tokens // 16):
            for i in range(4 * strips):
                j = (i // 4 * 2 + i % 2) * width + 4 * step + i % 4 // 2 * 2
                a[i] = packed(weights[j], weights[j + 1])
            for block in range(0, dim // 8, 2):
                b0, b1, b2, b3 = load(on(values, block // 2), 16 * step * row)
                add(a, b0, b1, sums, block)
                add(a, b2, b3, sums, block + 1)

    return device.part(multiply_values)


def multiply_carefully(form):
    """(weights, values, lane, a, sums): the same in float32, leaving out values without weight: one of 0
    hides NaN and infinity. Weights are smaller, so that sums stay finite.
    """
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
                    weight = exchange(EVERYONE, weights[row * columns], other) * SMALLER
                    if weight != np.float32(0):
                        for block in range(blocks):
                            low, high = two(values + at(token, block) + (lane & 3) * 4)
                            i = (row * blocks + block) * 2
                            sums[i] += weight * low
                            sums[i + 1] += weight * high
            turn(weights, 1)

    return device.part(multiply_carefully)


def soften(form):
    """(scores, sums, top, total, peaks, scale): scores to weights, sums shrink as a top grows.

    Times `scale`, which is positive, scores are powers of 2, and so are tops. `peaks` are those of the tile.
    """
    rows, columns, width, distances = form.thread_rows, form.columns, form.width, form.places.distances
    exchange, power, larger = device.exchange, ptx.power, ptx.larger

    def soften(scores, sums, top, total, peaks, scale):
        grown = False
        for row in range(rows):
            peak = scores[row * columns]
            for i in range(row * columns + 1, (row + 1) * columns):
                peak = larger(peak, scores[i])
            for distance in distances:
                peak = larger(peak, exchange(EVERYONE, peak, distance))
            peaks[row] = larger(top[row], peak * scale)
            grown |= peaks[row] != top[row]
        if grown:
            for row in range(rows):
                factor = power(top[row] - larger(peaks[row], LOWEST))
                top[row] = peaks[row]
                total[row] *= factor
                for i in range(row * width, (row + 1) * width):
                    sums[i] *= factor
        for row in range(rows):
            base = larger(top[row], LOWEST)
            added = base - base  # NaN for a top that is infinite
            for i in range(row * columns, (row + 1) * columns):
                scores[i] = power(scores[i] * scale - base)
                added += scores[i]
            total[row] += added

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
