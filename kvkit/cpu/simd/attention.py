"""The micro-kernels of attention, for a block of tokens and a tile of query rows.

    S = K Q^T                    [token, row]
    P = exp(S - m)               m, l: running maximum and sum of each row; alpha rescales earlier sums
    O = O alpha + P V            [row, dim] or [dim, row]

S and P are float32. A row is one query head of one query token; rows are padded to a power of two. There are
two forms of both products:

narrow  up to 8 rows: lanes along the head, keys and values read and widened where they lie in the cache.
wide    32 rows: lanes along the rows, over keys and values that were widened into the workspace.
"""

import functools
import math

from llvmlite import binding
from numba.core import cgutils

from kvkit.cpu.simd import chunks, lanes
from kvkit.cpu.simd.chunks import LINE, bytes_of, chunk_order, for_chunks
from kvkit.cpu.simd.lanes import (
    F16,
    F32,
    I16,
    I32,
    I64,
    LANES,
    RAW,
    StackSlots,
    loop,
    micro_kernel,
    read,
    widen,
    write,
)
from kvkit.formats.elements import BY_NAME

WIDE = 32  # query rows of wide products
LOWEST = -3.4028234663852886e38  # of float32: exp(-inf - LOWEST) is 0, where exp(-inf - -inf) is NaN
# Tokens, or elements, of wide products whose accumulators fit the registers.
TILE = 8 if binding.get_host_cpu_features().get("avx512f") else 2
EARLY = 4  # rows whose addresses are known before they are read
SUMMED = 16  # tokens whose sums over lanes are computed together, for one query row
DECODED = 16  # tokens whose values are decoded and then multiplied: the CPU overlaps two short loops


class EarlyAddresses:
    """Addresses of rows, which are computed `EARLY` rows before they are read.

    A load whose address waits for another load starts late, because that one waits behind loads from memory.
    """

    def __init__(self, b, rows, stride, row_ids, count):
        self.b, self.rows, self.stride, self.row_ids = b, rows, stride, row_ids
        self.last = b.sub(count, I64(1))
        self.places = [cgutils.alloca_once(b, I64) for _ in range(EARLY)]

    def address(self, token):
        """Return the address of a token's row; after the last token, that of the last one."""
        b = self.b
        token = b.select(b.icmp_signed("<", token, self.last), token, self.last)
        return b.add(self.rows, b.mul(lanes.row_id_at(b, self.row_ids, token), self.stride))

    def begin(self, token):
        """Compute the first addresses, from a token on."""
        for k, place in enumerate(self.places):
            self.b.store(self.address(self.b.add(token, I64(k))), place)

    def take(self, token):
        """Return the address of the next token, and compute a later one."""
        address, *later = [self.b.load(place) for place in self.places]
        later.append(self.address(self.b.add(token, I64(EARLY))))
        for place, value in zip(self.places, later, strict=True):
            self.b.store(value, place)
        return address


def with_and_without_list(b, ahead, build):
    """Emit build(True) for calls with a list of addresses to prefetch, and build(False) for those without."""
    with b.if_else(b.icmp_signed("!=", ahead, I64(0))) as (some, none):
        for case, prefetches in ((some, True), (none, False)):
            with case:
                build(prefetches)


@functools.cache
def narrow_scores(rows, stored, scale_format, group, rounds=(), like=None, near=False, in_order=False):
    """Return f(queries, keys, key_row, scale_base, scale_row, row_ids, ahead, shift, count, dim, scores).

    It computes S = K Q^T [token, row]. Queries are [dim / LANES, row, LANES] in `query_order`. `row_ids` has
    the row ids of `count` tokens, a multiple of `tile_tokens`. `ahead` lists addresses of keys that, after
    adding `shift`, are prefetched into L2, or into L1 if `near`. Prefetches are spread between products: 32
    lines at once would fill the buffers that the products' own loads need. With `like` (see `chunk_reader`),
    rows are neighbours, and rows `shift` bytes further on are prefetched. With `in_order`, the rows of a head
    follow each other in memory, and one query row reads floats in that order (see `scores_of_one_row`).
    """
    element = BY_NAME[stored]
    if in_order and rows == 1 and not (like or scale_format or element.minifloat or element.block):
        return scores_of_one_row(stored, near)
    chunk = chunks.chunk_reader(stored, scale_format, group, rounds, like)
    decides_chunks = like or (stored, scale_format, group)
    most, fewest = chunks.chunk_vectors(rows, *decides_chunks), chunks.fewest_vectors(decides_chunks[0])
    tokens, (scale_of_row, constant) = chunks.tile_tokens(rows), chunks.row_scale(stored, scale_format, group)

    @micro_kernel
    def narrow_scores(
        b, queries, keys, key_row, scale_base, scale_row, row_ids, ahead, shift, count, dim, scores
    ):
        size = bytes_of(b, stored, dim)
        with loop(b, count, tokens) as first:
            at = [lanes.row_id_at(b, row_ids, b.add(first, I64(t))) for t in range(tokens)]
            key_at = [b.add(keys, b.mul(number, key_row)) for number in at]
            later = key_at
            if not like:
                later = [lanes.row_id_at(b, ahead, b.add(first, I64(t))) for t in range(tokens)]
            lines = BY_NAME[stored].bytes(most * LANES) // LINE  # of a chunk
            if not lines:  # rows of small codes: products take longer than memory, so the order matters less
                with loop(b, size, LINE) as i:
                    for address in later:
                        lanes.prefetch(b, b.add(b.add(shift, address), i), near)
            scale_at = [b.add(scale_base, b.mul(number, scale_row)) for number in at]
            sums = StackSlots(b, lanes.zeros(b, LANES, tokens * rows))

            def add(i, vectors):
                here = b.add(shift, bytes_of(b, stored, i))
                for line in range(lines):
                    for address in later:
                        lanes.prefetch(b, b.add(b.add(here, address), I64(LINE * line)), near)
                key = [chunk(b, *at, i, vectors, dim) for at in zip(key_at, scale_at, strict=True)]
                for m in range(vectors):
                    at = b.add(queries, b.mul(b.add(i, I64(m * LANES)), I64(4 * rows)))
                    query = [read(b, b.add(at, I64(4 * LANES * r)), F32, LANES) for r in range(rows)]
                    for t in range(tokens):
                        vector = key[t](m)
                        for r in range(rows):
                            sums[t * rows + r] = vector.fma(query[r], sums[t * rows + r])

            for_chunks(b, dim, (most, fewest), add)
            total = lanes.sums_of([sums[i] for i in range(tokens * rows)])
            if scale_of_row:
                scales = lanes.concatenate([read(b, at, RAW[scale_of_row], 1) for at in scale_at])
                total = total * widen(scales, scale_of_row).pick(i // rows for i in range(tokens * rows))
            total = total * constant
            write(b, b.add(scores, b.mul(first, I64(4 * rows))), total)

    return narrow_scores


def scores_of_one_row(stored, near):
    """Return `narrow_scores` of one query row over floats; up to 8 more scores are written.

    It reads keys in the order of memory, each by the same load instructions, so that the processor prefetches
    them by itself. Partial sums of `SUMMED` tokens wait in memory for one tree of sums over lanes.
    """

    @micro_kernel
    def narrow_scores(
        b, queries, keys, key_row, scale_base, scale_row, row_ids, ahead, shift, count, dim, scores
    ):
        sums_to, sums_from = lanes.stack_buffer(b, 4 * LANES * SUMMED)

        def add(first, live, i, vectors):
            """Add the products of `vectors` vectors of each row, from element i on, to the tokens' sums."""
            here, query_at = bytes_of(b, stored, i), b.add(queries, b.mul(i, I64(4)))
            query = [read(b, b.add(query_at, I64(4 * LANES * m)), F32, LANES) for m in range(vectors)]
            offset = b.add(shift, here)
            with b.if_then(b.icmp_signed("!=", dim, I64(vectors * LANES))):  # rows are read in several parts
                rows.begin(first)

            def read_rows(prefetches):
                with loop(b, live) as t:
                    lanes.never_unroll(b)
                    token = b.add(first, t)
                    row = b.add(rows.take(token), here)
                    if prefetches:
                        later = b.add(offset, lanes.row_id_at(b, ahead, token))
                        for line in range(0, BY_NAME[stored].bytes(vectors * LANES), LINE):
                            lanes.prefetch(b, b.add(later, I64(line)), near)
                    sums_at = b.add(sums_to, b.mul(t, I64(4 * LANES)))
                    total = read(b, sums_at, F32, LANES)
                    for m in range(vectors):
                        at = b.add(row, I64(BY_NAME[stored].bytes(m * LANES)))
                        total = widen(read(b, at, RAW[stored], LANES), stored).fma(query[m], total)
                    write(b, sums_at, total)

            with_and_without_list(b, ahead, read_rows)

        rows = EarlyAddresses(b, keys, key_row, row_ids, count)
        rows.begin(I64(0))
        with loop(b, count, SUMMED) as first:
            left = b.sub(count, first)
            live = b.select(b.icmp_signed("<", left, I64(SUMMED)), left, I64(SUMMED))
            for t in range(SUMMED):
                write(b, b.add(sums_to, I64(4 * LANES * t)), lanes.zeros(b, LANES)[0])
            for_chunks(b, dim, (8, 4, 2, 1), lambda i, vectors: add(first, live, i, vectors))
            sums = [read(b, b.add(sums_from, I64(4 * LANES * t)), F32, LANES) for t in range(SUMMED)]
            write(b, b.add(scores, b.mul(first, I64(4))), lanes.sums_of(sums))

    return narrow_scores


@functools.cache
def narrow_sums(rows, stored, scale_format, group, rounds=(), neighbours=False, near=False):
    """Return f(weights, values, value_row, scale_base, scale_row, row_ids, ahead, shift, count, dim, ...).

    It computes O = O alpha + P V: sums are O [row, dim], weights P [token, row], factors alpha. `ahead` and
    `near` are as in `narrow_scores`; `neighbours` is like `like` there.
    """
    chunk = chunks.chunk_reader(stored, scale_format, group, rounds)
    most = chunks.chunk_vectors(rows, stored, scale_format, group)
    widest, fewest = chunks.tile_columns(rows), chunks.fewest_vectors(stored)
    scale_of_row, constant = chunks.row_scale(stored, scale_format, group)
    coded = bool(scale_format or BY_NAME[stored].minifloat or BY_NAME[stored].block)

    @micro_kernel
    def narrow_sums(
        b, weights, values, value_row, scale_base, scale_row, row_ids, ahead, shift, count, dim, sums, factors
    ):
        def add_columns(first, vectors):
            """Add P V to O in `vectors` vectors of each row, from element `first` on, in chunks of `size`."""
            size = min(most, vectors)
            order, read_chunk = chunk_order(stored, scale_format, size), chunk
            if stored == "bfloat16" and scale_format is None and size == 2:
                order, read_chunk = [*range(0, 2 * LANES, 2), *range(1, 2 * LANES, 2)], chunks.even_and_odd
            lane_of = sorted(range(len(order)), key=order.__getitem__)  # the lane of each element
            targets = [
                b.add(sums, b.mul(b.add(b.add(first, I64(c * LANES)), b.mul(dim, I64(r))), I64(4)))
                for r in range(rows)
                for c in range(0, vectors, size)
            ]
            start = []  # O alpha, in the units of the chunks: `constant` is multiplied at the end
            for i, address in enumerate(targets):
                factor = lanes.broadcast(b, b.add(factors, I64(4 * (i * size // vectors))), LANES)
                factor = factor * (1 / constant)
                row = read(b, address, F32, LANES * size)
                start += [row.pick(order[m * LANES : (m + 1) * LANES]) * factor for m in range(size)]
            totals = StackSlots(b, start)
            value_rows = EarlyAddresses(b, values, value_row, row_ids, count)
            value_rows.begin(I64(0))

            def locate(token, prefetches=True):
                """Return the addresses of a token's value and scales; prefetch the value of a later one."""
                row = value_rows.take(token)
                scale_at = b.add(scale_base, b.mul(lanes.row_id_at(b, row_ids, token), scale_row))
                if prefetches:
                    later = row if neighbours else lanes.row_id_at(b, ahead, token)
                    later = b.add(b.add(later, shift), bytes_of(b, stored, first))
                    for offset in range(0, BY_NAME[stored].bytes(vectors * LANES), LINE):
                        lanes.prefetch(b, b.add(later, I64(offset)), near)
                return row, scale_at

            def add(token, value, scale_at):
                weight_at = b.add(weights, b.mul(token, I64(4 * rows)))
                if scale_of_row:
                    scale = widen(read(b, scale_at, RAW[scale_of_row], 1), scale_of_row).pick([0] * LANES)
                for r in range(rows):
                    weight = lanes.broadcast(b, b.add(weight_at, I64(4 * r)), LANES)
                    weight = weight * scale if scale_of_row else weight
                    for c in range(vectors):
                        i = r * vectors + c
                        totals[i] = value[c].fma(weight, totals[i])

            if BY_NAME[stored].minifloat and not group and vectors > 1:
                of_token = 2 * LANES * vectors
                place, _ = lanes.stack_buffer(b, DECODED * of_token)
                with loop(b, count, DECODED) as begin:
                    left = b.sub(count, begin)
                    live = b.select(b.icmp_signed("<", left, I64(DECODED)), left, I64(DECODED))
                    with loop(b, live) as t:
                        row, _ = locate(b.add(begin, t))
                        halves = b.add(place, b.mul(t, I64(of_token)))
                        for c in range(0, vectors, size):
                            codes = b.add(b.add(row, first), I64(c * LANES))
                            chunks.write_halves(b, stored, codes, size, b.add(halves, I64(2 * LANES * c)))
                    with loop(b, live) as t:
                        token, halves = b.add(begin, t), b.add(place, b.mul(t, I64(of_token)))
                        scale_at = b.add(scale_base, b.mul(lanes.row_id_at(b, row_ids, token), scale_row))
                        add(token, [chunks.read_half_vector(b, halves, m) for m in range(vectors)], scale_at)
            else:

                def add_rows(prefetches):
                    with loop(b, count) as token:
                        if rows == 1:
                            lanes.never_unroll(b)
                        row, scale_at = locate(token, prefetches)
                        value = []
                        begin = row if coded else b.add(row, bytes_of(b, stored, first))
                        for c in range(0, vectors, size):
                            i = b.add(first, I64(c * LANES)) if coded else I64(c * LANES)
                            part = read_chunk(b, begin, scale_at, i, size, dim)
                            value += [part(m) for m in range(size)]
                        add(token, value, scale_at)

                if rows == 1 and not (neighbours or coded):
                    with_and_without_list(b, ahead, add_rows)
                else:
                    add_rows(True)
            for i, address in enumerate(targets):
                whole = lanes.concatenate([totals[i * size + m] * constant for m in range(size)])
                write(b, address, whole.pick(lane_of))

        for_chunks(b, dim, (widest, fewest), add_columns)

    return narrow_sums


def wide_products(b, scalars, tile_step, step, vectors, count, start, nan_safe=False):
    """Return start + scalars [TILE, count] times rows [count, WIDE], as TILE * WIDE / 16 vectors.

    `tile_step` and `step` are the byte strides of scalars along the tile and along the sum. With `nan_safe`,
    a 0 in a row adds nothing, even if the scalar is NaN or infinite.
    """
    halves = WIDE // LANES
    sums = StackSlots(b, start)
    with loop(b, count) as k:
        at = b.add(vectors, b.mul(k, I64(4 * WIDE)))
        row = [read(b, b.add(at, I64(4 * LANES * half)), F32, LANES) for half in range(halves)]
        base = b.add(scalars, b.mul(k, step))
        for t in range(TILE):
            scalar = lanes.broadcast(b, b.add(base, b.mul(tile_step, I64(t))), LANES)
            for half in range(halves):
                before = sums[t * halves + half]
                after = row[half].fma(scalar, before)
                if nan_safe:
                    nonzero = b.fcmp_unordered("!=", row[half].value, row[half].of(0.0))
                    after = lanes.Lanes(b, b.select(nonzero, after.value, before.value))
                sums[t * halves + half] = after
    return [sums[i] for i in range(TILE * halves)]


def wide_rows(b, address):
    """Return the addresses of the vectors of TILE rows of WIDE numbers."""
    return [b.add(address, I64(4 * LANES * i)) for i in range(TILE * WIDE // LANES)]


@micro_kernel
def wide_scores(b, queries, keys, key_row, count, dim, scores):
    """Compute S = K Q^T [token, WIDE] from queries [dim, WIDE], for a multiple of 8 tokens."""
    with loop(b, count, TILE) as first:
        start = lanes.zeros(b, LANES, TILE * WIDE // LANES)
        first_key = b.add(keys, b.mul(first, key_row))
        total = wide_products(b, first_key, key_row, I64(4), queries, dim, start)
        rows = wide_rows(b, b.add(scores, b.mul(first, I64(4 * WIDE))))
        for address, vector in zip(rows, total, strict=True):
            write(b, address, vector)


def sums_of_wide_tile(nan_safe):
    """Return a micro-kernel for O = O alpha + P V [dim, WIDE]; if `nan_safe`, of values whose P is not 0."""

    @micro_kernel
    def wide_sums(b, weights, values, value_row, count, dim, sums, factors):
        """`sums` is O, `factors` alpha, `weights` P; 8 divides dim."""
        halves = WIDE // LANES
        factor = [read(b, b.add(factors, I64(4 * LANES * half)), F32, LANES) for half in range(halves)]
        with loop(b, dim, TILE) as first:
            rows = wide_rows(b, b.add(sums, b.mul(first, I64(4 * WIDE))))
            start = [read(b, address, F32, LANES) * factor[i % halves] for i, address in enumerate(rows)]
            first_value = b.add(values, b.mul(first, I64(4)))
            total = wide_products(b, first_value, I64(4), value_row, weights, count, start, nan_safe)
            for address, vector in zip(rows, total, strict=True):
                write(b, address, vector)

    return wide_sums


wide_sums, nan_safe_wide_sums = map(sums_of_wide_tile, (False, True))


@micro_kernel
def online_softmax(b, scores, vectors, step, rows, m_at, l_at, alpha_at):
    """Replace scores S by P = exp(S - m), update m and l of each row, and write alpha.

    Lanes hold rows in turn (with 4 rows lane 5 has row 1 of the next token), or 16 of 32 rows; `step` is the
    byte stride between vectors. A row's l is spread over its lanes.
    """
    before = read(b, m_at, F32, LANES)
    largest = StackSlots(b, [before])
    with loop(b, vectors) as i:
        largest[0] = largest[0].max(read(b, b.add(scores, b.mul(i, step)), F32, LANES))
    new = largest[0]
    for distance in (8, 4, 2, 1):
        over_tokens = new.max(new.rotate(distance))
        fits = b.icmp_signed("<=", rows, I64(distance))  # lanes so far apart have the same row
        new = lanes.Lanes(b, b.select(fits, over_tokens.value, new.value))
    base = new.max(LOWEST)
    alpha = lanes.exp(before - base)
    sums = StackSlots(b, [read(b, l_at, F32, LANES) * alpha])
    with loop(b, vectors) as i:
        at = b.add(scores, b.mul(i, step))
        weight = lanes.exp(read(b, at, F32, LANES) - base)
        write(b, at, weight)
        sums[0] = sums[0] + weight
    write(b, m_at, new)
    write(b, l_at, sums[0])
    write(b, alpha_at, alpha)


@micro_kernel
def apply_softcap(b, scores, vectors, number):
    """Replace scores by c * tanh(score / c) for the float32 c at an address."""
    limit = lanes.broadcast(b, number, LANES)
    with loop(b, vectors) as i:
        at = b.add(scores, b.mul(i, I64(4 * LANES)))
        write(b, at, tanh(read(b, at, F32, LANES) / limit) * limit)


def tanh(x):
    """Return tanh within 3 ulp: an odd polynomial near 0, else 1 - 2 / (exp(2x) + 1)."""
    size = abs(x)
    far = 1.0 - 2.0 / (lanes.exp(size.min(20.0) * 2.0) + 1.0)
    far = far.unless_nan(x, x)
    far = lanes.where(x, "<", 0.0, -far, far)
    square = x * x
    series = x.full(-5.70498872745e-3)
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        series = series.fma(square, coefficient)
    near = (series * square).fma(x, x)
    return lanes.where(size, "<", 0.625, near, far)


@micro_kernel
def transpose(b, source, source_row, target, target_row):
    """Transpose 16 rows of 16 float32; strides are bytes."""
    for r, row in enumerate(transposed(b, source, source_row)):
        write(b, b.add(target, b.mul(target_row, I64(r))), row)


def transposed(b, source, source_row):
    """Read 16 rows of 16 float32 and return their columns."""
    rows = [read(b, b.add(source, b.mul(source_row, I64(r))), F32, LANES) for r in range(LANES)]
    return transposed_vectors(rows)


def transposed_vectors(rows):
    """Return the columns of 16 vectors of 16 lanes."""
    for step in (1, 2, 4, 8):
        upper = [(lane if not lane & step else lane - step + LANES) for lane in range(LANES)]
        lower = [(lane + step if not lane & step else lane + LANES) for lane in range(LANES)]
        mixed = list(rows)
        for r in range(LANES):
            if not r & step:
                mixed[r] = rows[r].pick(upper, rows[r | step])
                mixed[r | step] = rows[r].pick(lower, rows[r | step])
        rows = mixed
    return rows


@functools.cache
def add_mask(element):
    """Return f(mask_rows, count, rows, number, scores), which adds a mask to the scores of a wide tile."""
    each = 4 if element == "bool" else 4 // BY_NAME[element].bytes(1)  # tokens of a word of 32 bits

    def biases(word, part):
        """Return the numbers of a mask in a part of each word; of bool, 0 or -inf."""
        if element == "bool":
            hidden = word.builder.icmp_unsigned("==", (word & 0xFF << 8 * part).value, word.of(0))
            zero = word.cast("bitcast", F32).full(0.0)
            return lanes.Lanes(word.builder, word.builder.select(hidden, zero.of(-math.inf), zero.value))
        if element == "bfloat16":
            word = word & 0xFFFF0000 if part else word << 16
        if element == "float16":
            return widen((word >> 16 * part).cast("trunc", I16).cast("bitcast", F16), element)
        return word.cast("bitcast", F32)

    @micro_kernel
    def add_mask(b, mask_rows, count, rows, number, scores):
        """Compute S = S times the float32 at an address + mask, rounded twice; S is [token, WIDE].

        The mask's rows, of 16 query `rows` or of all, are at the addresses `mask_rows`; they are read in
        lines, so `count` is rounded up to whole lines of tokens. Where the mask is -inf, a score that is not
        finite becomes NaN, and the work item runs again.
        """
        factor = lanes.broadcast(b, number, LANES)
        with loop(b, rows, LANES) as row:
            places = [lanes.row_id_at(b, mask_rows, b.add(row, I64(r))) for r in range(LANES)]
            with loop(b, count, each * LANES) as t:
                words = [read(b, b.add(at, b.mul(t, I64(4 // each))), I32, LANES) for at in places]
                to = b.add(scores, b.add(b.mul(t, I64(4 * WIDE)), b.mul(row, I64(4))))
                for k, word in enumerate(transposed_vectors(words)):
                    for part in range(each):
                        place, bias = b.add(to, I64(4 * WIDE * (each * k + part))), biases(word, part)
                        write(b, place, read(b, place, F32, LANES) * factor + bias)

    return add_mask


@micro_kernel
def to_panels(b, source, target, rows, dim, number):
    """Write [row, dim] times the float32 at an address as [dim / LANES, row, LANES]."""
    factor = lanes.broadcast(b, number, LANES)
    with loop(b, rows) as r:
        line, panel = b.add(source, b.mul(b.mul(r, dim), I64(4))), b.add(target, b.mul(r, I64(LINE)))
        with loop(b, dim, LANES) as i:
            at = b.mul(i, I64(4))
            write(b, b.add(panel, b.mul(at, rows)), read(b, b.add(line, at), F32, LANES) * factor)


@micro_kernel
def scale_by(b, source, target, count, number):
    """Compute target = source * the float32 at an address; 16 divides `count`."""
    factor = lanes.broadcast(b, number, LANES)
    with loop(b, count, LANES) as i:
        offset = b.mul(i, I64(4))
        write(b, b.add(target, offset), read(b, b.add(source, offset), F32, LANES) * factor)


@micro_kernel
def add_scaled(b, source, target, count, number):
    """Compute target += source * the float32 at an address; 16 divides `count`."""
    factor = lanes.broadcast(b, number, LANES)
    with loop(b, count, LANES) as i:
        at, into = (b.add(base, b.mul(i, I64(4))) for base in (source, target))
        write(b, into, read(b, at, F32, LANES).fma(factor, read(b, into, F32, LANES)))


@micro_kernel
def dots(b, row, rows, step, count, size, target, target_step):
    """Write the dot product of one row with each of `count` rows; 16 divides `size`."""
    with loop(b, count) as i:
        sums, other = StackSlots(b, lanes.zeros(b, LANES)), b.add(rows, b.mul(i, step))
        with loop(b, size, LANES) as k:
            at = b.mul(k, I64(4))
            x, y = (read(b, b.add(base, at), F32, LANES) for base in (row, other))
            sums[0] = x.fma(y, sums[0])
        total = lanes.sums_of([sums[0], *lanes.zeros(b, LANES, LANES - 1)])
        store_first(b, total, b.add(target, b.mul(i, target_step)))


@functools.cache
def scaled_panel(element):
    """Return f(source, target, number): write 16 float32 times the float32 at an address in a format."""

    @micro_kernel
    def scaled_panel(b, source, target, number):
        product = read(b, source, F32, LANES) * lanes.broadcast(b, number, LANES)
        write(b, target, lanes.narrow(product, element))

    return scaled_panel


@micro_kernel
def sum_times_zero(b, source, count, target):
    """Write the sum of all numbers times 0: it is 0 unless one is not finite. 16 divides `count`."""
    sums = StackSlots(b, lanes.zeros(b, LANES, 4))
    whole = b.and_(count, I64(-4 * LANES))
    with loop(b, whole, 4 * LANES) as i:
        at = b.add(source, b.mul(i, I64(4)))
        for k in range(4):  # sums that do not wait for each other
            sums[k] = read(b, b.add(at, I64(4 * LANES * k)), F32, LANES).fma(0.0, sums[k])
    rest = b.add(source, b.mul(whole, I64(4)))
    with loop(b, b.sub(count, whole), LANES) as i:
        sums[0] = read(b, b.add(rest, b.mul(i, I64(4))), F32, LANES).fma(0.0, sums[0])
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    store_first(b, lanes.sums_of([total, *lanes.zeros(b, LANES, LANES - 1)]), target)


@micro_kernel
def wide_sums_times_zero(b, sums, l_at, live, dim, target):
    """Write 0 if O [dim, WIDE] and l are finite in the first `live` rows, else NaN."""
    bad = StackSlots(b, lanes.zeros(b, LANES, WIDE // LANES))
    for half in range(WIDE // LANES):
        bad[half] = read(b, b.add(l_at, I64(4 * LANES * half)), F32, LANES) * 0.0
    with loop(b, dim) as i:
        for half in range(WIDE // LANES):
            at = b.add(sums, b.add(b.mul(i, I64(4 * WIDE)), I64(4 * LANES * half)))
            bad[half] = bad[half] + read(b, at, F32, LANES) * 0.0
    total = lanes.zeros(b, LANES)[0]
    for half in range(WIDE // LANES):
        rows = lanes.fill(b, b.trunc(live, I32), LANES).plus(-LANES * half)
        is_live = b.icmp_signed(">", rows.value, rows.of(list(range(LANES))))
        total = total + lanes.Lanes(b, b.select(is_live, bad[half].value, total.of(0.0)))
    store_first(b, lanes.sums_of([total] * 8), target)


@micro_kernel
def merge_wide_sums(b, states, size, splits, dim, factors, target):
    """Add O [dim, WIDE] of states, which are `size` bytes apart, times factors [split, WIDE] of their rows.

    A row whose factor is negative is left out.
    """
    line = I64(4 * WIDE)
    with loop(b, dim) as i:
        at = b.mul(i, line)
        for half in (0, 4 * LANES):
            total, first = StackSlots(b, lanes.zeros(b, LANES)), b.add(b.add(states, at), I64(half))
            with loop(b, splits) as split:
                factor = read(b, b.add(factors, b.add(b.mul(split, line), I64(half))), F32, LANES)
                added = read(b, b.add(first, b.mul(split, size)), F32, LANES).fma(factor, total[0])
                is_out = b.fcmp_ordered("<", factor.value, factor.of(0.0))
                total[0] = lanes.Lanes(b, b.select(is_out, total[0].value, added.value))
            write(b, b.add(b.add(target, at), I64(half)), total[0])


@micro_kernel
def hide_rows(b, scores, ranges, first, count):
    """Set scores [tokens, WIDE] of tokens first..count to -inf where a row does not see the token.

    `ranges` are the first token that each row sees, int32 [WIDE], and the first one behind, [WIDE].
    """
    low, high = (
        [read(b, b.add(ranges, I64(4 * (WIDE * end + LANES * half))), I32, LANES) for half in range(2)]
        for end in range(2)
    )
    with loop(b, b.sub(count, first)) as i:
        t = b.add(first, i)
        token = lanes.fill(b, b.trunc(t, I32), LANES)
        for half in range(WIDE // LANES):
            at = b.add(scores, b.add(b.mul(t, I64(4 * WIDE)), I64(4 * LANES * half)))
            sees = b.and_(
                b.icmp_signed("<=", low[half].value, token.value),
                b.icmp_signed("<", token.value, high[half].value),
            )
            score = read(b, at, F32, LANES)
            write(b, at, lanes.Lanes(b, b.select(sees, score.value, score.of(-math.inf))))


def store_first(b, vector, target):
    number = b.extract_element(vector.value, lanes.I32(0))
    b.store(number, b.inttoptr(target, F32.as_pointer())).align = 4


@micro_kernel
def addresses(b, base, stride, row_ids, count, target):
    """Write base + row id * stride for each row id, in whole vectors of 8."""
    first, step = (lanes.fill(b, number, 8) for number in (base, stride))
    with loop(b, count, 8) as i:
        offset = b.mul(i, I64(8))
        number = read(b, b.add(row_ids, offset), I64, 8)
        write(b, b.add(target, offset), number.apply("mul", step).plus(first))


@micro_kernel
def write_sequence(b, first, step, count, target):
    """Write first, first + step and so on, in whole vectors of 8: up to 7 more than `count`."""
    from_first = lanes.fill(b, step, 8).apply("mul", list(range(8)))
    with loop(b, count, 8) as i:
        begin = lanes.fill(b, b.add(first, b.mul(i, step)), 8)
        write(b, b.add(target, b.mul(i, I64(8))), begin.plus(from_first))


@micro_kernel
def prefetch_bytes(b, address, size):
    """Prefetch `size` bytes."""
    with loop(b, size, LINE) as i:
        lanes.prefetch(b, b.add(address, i))


@micro_kernel
def fill_minus_inf(b, target, count):
    """Write -inf; 16 divides `count`."""
    with loop(b, count, LANES) as i:
        lowest = lanes.Lanes(b, lanes.zeros(b, LANES)[0].of(float("-inf")))
        write(b, b.add(target, b.mul(i, I64(4))), lowest)


@micro_kernel
def clear(b, target, count):
    """Write zeros; 16 divides `count`."""
    with loop(b, count, LANES) as i:
        write(b, b.add(target, b.mul(i, I64(4))), lanes.zeros(b, LANES)[0])
