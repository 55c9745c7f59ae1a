"""Products and softmax of 8 or 16 query rows by tiles (AMX), over bfloat16, float16 or numbers of 8 bits.

    S = scale K Q^T            [16 tokens, rows]      A: rows of keys, B: pairs of query elements
    m' = max(m, max S)         P = e^(S - m')         [rows, 32 tokens], transposed in registers
    O = O e^(m - m') + P V     [rows, 16 elements]    A: weights, B: values of two tokens, interleaved

An old m stays until a new one is LAZY larger, in powers of 2, so that O is rarely rescaled. Keys of bfloat16
are read where they lie, and elements of O lie in the order of `pairs.interleave`. Keys and values of float16
are split into two terms of bfloat16 each (see `tile_products`); pairs of keys and queries are the elements j
and j + 16 of 32, and O is in order. Numbers of 8 bits become bfloat16, exactly, in copies; scales of rows are
multiplied with S, and with P before it is rounded. Of eight tiles, 0
has scores, 1 queries, 2 keys or values, 3 weights, 4 to 7 have O; all but tile 2 have a side of `rows`.

Memory is busy all the time only if prefetches are spread over all steps: of 16
later rows scores prefetch 8 keys, softmax the others; `pair_values` 8 values, and sums the others.
"""

import functools
from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.attention import LOWEST, transposed_vectors
from kvkit.cpu.simd.chunks import LINE, for_chunks
from kvkit.cpu.simd.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    RAW,
    Lanes,
    StackSlots,
    loop,
    micro_kernel,
    read,
    write,
)
from kvkit.cpu.simd.pairs import Bfloat, interleave
from kvkit.cpu.simd.tile_products import LAZY, LN2, LOG2E, STEP, pair_terms, power_of_two, read_floats
from kvkit.cpu.simd.tiles import ROW, ROWS, Shape, Tiles
from kvkit.formats.elements import BY_NAME, FLOATS

HALF = ROWS // 2  # of 16 tokens, for a step to prefetch
SCORES, QUERIES, OPERAND, WEIGHTS, SUMS = range(5)  # tiles; SUMS is the first of four
ROUNDED = ir.VectorType(Bfloat(), LANES)


def shape_for(rows):
    """Return the shape of the tiles for a number of query rows."""
    return Shape((ROWS, ROWS, ROWS, *[rows] * 5), (4 * rows, 4 * rows, *[ROW] * 6))


@functools.cache
def kernels(rows, in_memory, terms):
    """Return the micro-kernels for 8 or 16 query rows over numbers of some terms, by name."""
    steps = (
        arrangement(rows, terms), *products(rows, in_memory, terms), softmax(rows, terms),
        interleaving(terms), scale_list(terms), *state(rows, in_memory),
    )  # fmt: skip
    names = "pair_queries", "scores", "sums", "softmax", "pair_values", "read_scales", "open", "close"
    return SimpleNamespace(**dict(zip(names, steps, strict=True)))


def state(rows, in_memory):
    """Return the micro-kernels that open and close the thread's tiles."""

    @micro_kernel
    def open_tiles(b):
        Tiles(b, shape_for(rows), in_memory).open()

    @micro_kernel
    def close_tiles(b):
        Tiles(b, shape_for(rows), in_memory).close()

    return open_tiles, close_tiles


def arrangement(rows, terms):
    """Return the micro-kernel that arranges queries."""

    @micro_kernel
    def pair_queries(b, source, dim, target):
        """Convert queries [dim / 16, row, 16] of float32 to pairs of bfloat16 [term, dim / 2, row, 2]."""
        with loop(b, dim, STEP) as i:
            at, to = (b.add(base, b.mul(i, I64(size * rows))) for base, size in ((source, 4), (target, 2)))
            words = []
            for r in range(rows):
                halves = [read(b, b.add(at, I64(64 * (half * rows + r))), F32, LANES) for half in range(2)]
                if terms.rows == 1:  # pairs of neighbours
                    both = lanes.concatenate(halves)
                    halves = [both.pick(range(odd, STEP, 2)) for odd in range(2)]
                words.append(pair_terms(halves, terms.queries))
            words += [[words[0][0].full(0)] * terms.queries] * (LANES - rows)
            for term, of_rows in enumerate(zip(*words, strict=True)):
                place = b.add(to, b.mul(dim, I64(2 * rows * term)))
                for k, vector in enumerate(transposed_vectors(of_rows)):
                    write(b, b.add(place, I64(4 * rows * k)), vector.pick(range(rows)))

    return pair_queries


def products(rows, in_memory, terms):
    """Return the micro-kernels of S = scale K Q^T and of O = O + P V."""

    @micro_kernel
    def scores(
        b, queries, keys, key_row, step, row_ids, ahead, count, dim, space, scale, factors, target
    ):  # fmt: skip
        """Compute S [token, row] of `count` tokens, up to whole 16.

        16 rows whose ids are `step` apart are read where they lie, others are copied to `space` first, and
        rows of other formats are converted there. Tokens have `factors` if the terms have a scale. `ahead`
        lists addresses of rows, of which the first 8 of each 16 are prefetched.
        """
        tiles, size = Tiles(b, shape_for(rows), in_memory), element_bytes(terms)
        with loop(b, count, ROWS) as t:
            ids, later = b.add(row_ids, b.mul(t, I64(8))), b.add(ahead, b.mul(t, I64(8)))
            stride = b.mul(dim, I64(2))
            at = b.add(space, b.mul(t, b.mul(stride, I64(terms.rows))))
            if terms.element == "bfloat16":
                at, stride = rows_in_place(b, keys, key_row, step, ids, dim, at)
            else:
                copy_keys(b, keys, key_row, ids, dim, at, terms)
            tiles.zero(SCORES)

            def add(first, vectors):
                """Add the products of elements from `first` on: a step takes two vectors."""
                offset, query = b.mul(first, I64(2)), b.add(queries, b.mul(first, I64(2 * rows)))
                steps = vectors // 2

                for i in range(steps):
                    last = None, None
                    for terms_of in terms.products(of_scores=True):
                        of_key = b.mul(dim, I64(2 * ROWS * terms_of[0]))
                        of_query = b.mul(dim, I64(2 * rows * terms_of[1]))
                        if last[0] != terms_of[0]:
                            place = b.add(b.add(at, of_key), b.add(offset, I64(ROW * i)))
                            tiles.load(OPERAND, place, stride)
                        if last[1] != terms_of[1]:
                            place = b.add(b.add(query, of_query), I64(ROW * rows * i))
                            tiles.load(QUERIES, place, 4 * rows)
                        tiles.multiply(SCORES, OPERAND, QUERIES)
                        last = terms_of
                    for k in range(HALF * i // steps, HALF * (i + 1) // steps):
                        line = b.add(lanes.row_id_at(b, later, I64(k)), b.mul(first, I64(size)))
                        for j in range(0, LANES * vectors * size, LINE):
                            lanes.prefetch(b, b.add(line, I64(j)))

            for_chunks(b, dim, (8, 4, 2), add)
            tiles.store(SCORES, b.add(target, b.mul(t, I64(4 * rows))), 4 * rows)
        factor = lanes.broadcast(b, scale, LANES)
        with loop(b, count, ROWS) as t:
            of_lanes = factors_of_lanes(b, factors, t, rows, terms)
            for i in range(rows):
                at = b.add(b.add(target, b.mul(t, I64(4 * rows))), I64(64 * i))
                times = factor * of_lanes(i) if terms.scaled else factor
                write(b, at, read(b, at, F32, LANES) * times)

    @micro_kernel
    def sums(b, weights, count, pairs, dim, target, row, ahead, shift):
        """Compute O += P V of `count` tokens, up to whole 32, in `dim` elements; a row of O has `row` bytes.

        Values are those of `pair_values`. The first 8 of each 16 rows `ahead` are prefetched, as there.
        """
        tiles, size = Tiles(b, shape_for(rows), in_memory), element_bytes(terms)
        term = b.mul(dim, I64(2 * STEP))  # bytes of 32 values
        block, listed = b.mul(term, I64(terms.rows)), b.icmp_signed("!=", ahead, I64(0))

        def add(first, vectors):
            places = [b.add(target, b.add(b.mul(first, I64(4)), I64(64 * c))) for c in range(vectors)]
            for c, place in enumerate(places):
                tiles.load(SUMS + c, place, row)
            with loop(b, count, STEP) as t:
                value = b.add(b.mul(b.lshr(t, I64(5)), block), b.mul(first, I64(2 * STEP)))
                value = b.add(pairs, value)
                weight = b.add(weights, b.mul(t, I64(2 * rows * terms.queries)))
                tiles.load(WEIGHTS, weight, ROW)
                for c in range(vectors):
                    for value_term in reversed(range(terms.rows)):
                        place = b.add(value, b.mul(term, I64(value_term)))
                        tiles.load(OPERAND, b.add(place, I64(1024 * c)), ROW)
                        tiles.multiply(SUMS + c, WEIGHTS, OPERAND)
                    with b.if_then(listed):
                        for k in range(ROWS * c // vectors, ROWS * (c + 1) // vectors):
                            token = b.add(t, I64(k // HALF * ROWS + k % HALF))
                            later = lanes.row_id_at(b, ahead, token)
                            later = b.add(b.add(later, shift), b.mul(first, I64(size)))
                            for line in range(0, size * LANES * vectors, LINE):
                                lanes.prefetch(b, b.add(later, I64(line)))
                if terms.queries > 1:
                    tiles.load(WEIGHTS, b.add(weight, I64(ROW * rows)), ROW)
                    for c in range(vectors):
                        tiles.load(OPERAND, b.add(value, I64(1024 * c)), ROW)
                        tiles.multiply(SUMS + c, WEIGHTS, OPERAND)
            for c, place in enumerate(places):
                tiles.store(SUMS + c, place, row)

        for_chunks(b, dim, (4, 2), add)

    return scores, sums


def element_bytes(terms):
    """Return the bytes of an element of keys and values."""
    return BY_NAME[terms.element].dtype.itemsize


def copy_keys(b, keys, key_row, row_ids, dim, target, terms):
    """Write 16 keys as terms [term, 16, dim]; pairs of float16 are elements j and j + 16 of 32."""
    size, apart = element_bytes(terms), I64(ROW)
    step = LINE // size
    with loop(b, I64(ROWS)) as k:
        source = b.add(keys, b.mul(lanes.row_id_at(b, row_ids, k), key_row))
        to = b.add(target, b.mul(k, b.mul(dim, I64(2))))
        with loop(b, dim, step) as i:
            at, place = b.add(source, b.mul(i, I64(size))), b.add(to, b.mul(i, I64(2)))
            if terms.rows == 1:
                parts = bfloat16_vectors(b, at, terms.element)
            else:
                parts = pair_terms([read_floats(b, at, terms.element, half) for half in range(2)], 2)
                apart = b.mul(dim, I64(2 * ROWS))
            for n, x in enumerate(parts):
                write(b, b.add(place, b.mul(apart, I64(n))), x)


def bfloat16_vectors(b, at, element):
    """Read a line of bfloat16, or of numbers of 8 bits, which bfloat16 holds exactly, as bfloat16."""
    if element == "bfloat16":
        return [read(b, at, I16, STEP)]
    if element == "int8":
        halves = [read_floats(b, at, element, n) for n in range(4)]
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        values = [(halves[n + 1].value, halves[n].value) for n in (0, 2)]
        both = ir.VectorType(Bfloat(), STEP)
        return [lanes.call_intrinsic(b, name, both, *pair).cast("bitcast", I16) for pair in values]
    # Bytes of two vectors are interleaved within 128 bits. Tables of 128 bytes leave out the sign.
    codes = read(b, at, I64, 8).pick([0, 4, 1, 5, 2, 6, 3, 7]).as_bits(8)
    numbers = np.arange(128, dtype=np.uint8).view(BY_NAME[element].dtype).astype(np.float32)
    tables = numbers.view(np.uint32).byteswap().view(np.uint8).reshape(128, 4).astype(int)
    low, high = (looked_up(codes, tables[:, n].tolist()) for n in (1, 0))
    high = high | (codes & 0x80)
    first = [16 * (n // 16) + n % 16 // 2 + n % 2 * LINE for n in range(LINE)]
    return [low.pick([n + shift for n in first], high).as_bits(16) for shift in (0, 8)]


def looked_up(codes, table):
    """Return the entries of a table of 128 bytes for 64 codes; their highest bits do not count."""
    first, second = (ir.Constant(codes.type, table[begin : begin + LINE]) for begin in (0, LINE))
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    return lanes.call_intrinsic(codes.builder, name, codes.type, first, codes.value, second)


def rows_in_place(b, keys, key_row, step, row_ids, dim, copy):
    """Return the address and the stride of 16 rows of keys, after copying them if their ids are irregular."""
    first, regular = lanes.row_id_at(b, row_ids, I64(0)), I8(-1)
    for half in range(2):
        found = read(b, b.add(row_ids, I64(64 * half)), I64, 8)
        steps = lanes.fill(b, step, 8).apply("mul", [8 * half + i for i in range(8)])
        same = b.icmp_signed("==", found.value, lanes.fill(b, first, 8).plus(steps).value)
        regular = b.and_(regular, b.bitcast(same, I8))
    place = cgutils.alloca_once_value(b, b.add(keys, b.mul(first, key_row)))
    stride = cgutils.alloca_once_value(b, b.mul(step, key_row))
    with b.if_then(b.icmp_signed("!=", regular, I8(-1))):
        size = b.mul(dim, I64(2))
        with loop(b, I64(ROWS)) as k:
            source = b.add(keys, b.mul(lanes.row_id_at(b, row_ids, k), key_row))
            to = b.add(copy, b.mul(k, size))
            with loop(b, size, LINE) as i:
                write(b, b.add(to, i), read(b, b.add(source, i), I32, LANES))
        b.store(copy, place)
        b.store(size, stride)
    return b.load(place), b.load(stride)


def softmax(rows, terms):
    """Return the micro-kernel of the softmax."""

    @micro_kernel
    def softmax(b, scores, count, m_at, l_at, sums, dim, target, factors, ahead, shift, size):
        """Write P as [tokens / 32][term, row, 32 tokens] of bfloat16; update m and l, and O if m grew much.

        Scores are [token, row], and become -inf after `count` tokens up to whole 32. A vector has the scores
        of 16 / rows tokens; m and l have 16 lanes. If the terms have a scale, P of a token is multiplied with
        its number of `factors`. The last 8 of each 16 rows at the addresses `ahead` are
        prefetched, `size` bytes from byte `shift` on.
        """
        whole = b.and_(b.add(count, I64(STEP - 1)), I64(-STEP))
        unseen = Lanes(b, ir.Constant(ir.VectorType(F32, rows), [float("-inf")] * rows))
        with loop(b, b.sub(whole, count)) as t:
            write(b, b.add(scores, b.mul(b.add(count, t), I64(4 * rows))), unseen)
        old = read(b, m_at, F32, LANES)
        new, grown = new_maximum(b, scores, whole, old)
        base = new.max(LOWEST)
        with b.if_then(b.icmp_unsigned("!=", b.bitcast(grown, I16), I16(0))):
            alpha = power_of_two((old - base) * LOG2E)
            write(b, m_at, new)
            write(b, l_at, read(b, l_at, F32, LANES) * alpha)
            for r in range(rows):
                line, factor = b.add(sums, b.mul(dim, I64(4 * r))), alpha.pick([r] * LANES)
                with loop(b, b.mul(dim, I64(4)), 64) as i:
                    write(b, b.add(line, i), read(b, b.add(line, i), F32, LANES) * factor)
        total = StackSlots(b, [read(b, l_at, F32, LANES)])
        with loop(b, whole, ROWS) as t:
            at, weights = b.add(scores, b.mul(t, I64(4 * rows))), []
            of_lanes = factors_of_lanes(b, factors, t, rows, terms)
            for i in range(rows):
                x = read(b, b.add(at, I64(64 * i)), F32, LANES)
                weights.append(power_of_two((x - base) * LOG2E))
                total[0] = total[0] + weights[i]
                if terms.scaled:
                    weights[i] = weights[i] * of_lanes(i)
                share = range(HALF * i // rows, HALF * (i + 1) // rows)
                for k in share:
                    row = b.add(lanes.row_id_at(b, ahead, b.add(t, I64(HALF + k))), shift)
                    with loop(b, size, LINE) as j:
                        lanes.prefetch(b, b.add(row, j))
            to = b.add(target, b.mul(b.and_(t, I64(-STEP)), I64(2 * rows * terms.queries)))
            to = b.add(to, b.mul(b.and_(t, I64(ROWS)), I64(2)))
            for r, x in enumerate(by_row(weights)):
                first = rounded(x)
                write(b, b.add(to, I64(ROW * r)), first)
                if terms.queries > 1:
                    rest = x - lanes.widen(first, "bfloat16")
                    write(b, b.add(to, I64(ROW * (rows + r))), rounded(rest))
        write(b, l_at, total[0])

    def new_maximum(b, scores, whole, old):
        """Return m', and where it is larger than m."""
        largest = StackSlots(b, [old.full(float("-inf"))] * 4)
        with loop(b, b.mul(whole, I64(4 * rows)), 256) as at:
            for i in range(4):
                largest[i] = largest[i].max(read(b, b.add(scores, b.add(at, I64(64 * i))), F32, LANES))
        top = largest[0].max(largest[1]).max(largest[2].max(largest[3]))
        distance = HALF
        while distance >= rows:
            top = top.max(top.rotate(distance))
            distance //= 2
        grown = b.fcmp_ordered(">", top.value, (old + LAZY * LN2).value)
        return Lanes(b, b.select(grown, top.value, old.value)), grown

    return softmax


def scale_list(terms):
    """Return the micro-kernel that lists the scales of tokens."""

    @micro_kernel
    def read_scales(b, scales, scale_row, scale_format, row_ids, count, target):
        """Write the scales of `count` tokens as float32, and zeros up to whole 32; NaN for infinity.

        `scale_format` is the index of their format in `FLOATS`.
        """
        if not terms.scaled:
            return
        whole = b.and_(b.add(count, I64(STEP - 1)), I64(-STEP))
        nothing = lanes.zeros(b, LANES, 1)[0]
        with loop(b, whole, LANES) as t:
            write(b, b.add(target, b.mul(t, I64(4))), nothing)
        for i, element in enumerate(FLOATS):
            with b.if_then(b.icmp_signed("==", scale_format, I64(i))), loop(b, count) as t:
                at = b.add(scales, b.mul(lanes.row_id_at(b, row_ids, t), scale_row))
                scale = lanes.widen(read(b, at, RAW[element.name], 1), element.name)
                write(b, b.add(target, b.mul(t, I64(4))), scale.fma(0.0, scale))

    return read_scales


def factors_of_lanes(b, factors, t, rows, terms):
    """Return f(i): the factors of the tokens of vector i of those of 16 tokens from t on."""
    if not terms.scaled:
        return None
    vector = read(b, b.add(factors, b.mul(t, I64(4))), F32, LANES)
    return lambda i: vector.pick([(LANES * i + lane) // rows for lane in range(LANES)])


def interleaving(terms):
    """Return the micro-kernel that interleaves values."""
    size = element_bytes(terms)

    @micro_kernel
    def pair_values(b, values, value_row, row_ids, ahead, shift, count, dim, target):
        """Interleave values of two tokens: [tokens / 32][term, dim / 16][16 pairs of tokens, 16 elements, 2].

        After `count` tokens values are 0, up to whole 32. The last 8 of each 16 rows at the addresses
        `ahead`, after adding `shift`, are prefetched.
        """
        step, term_bytes = LINE // size, b.mul(dim, I64(2 * STEP))
        block = b.mul(term_bytes, I64(terms.rows))

        def pair(k, tokens):
            """Write pair k, which has so many tokens; the others are zeros."""
            first = b.mul(k, I64(2))
            to = b.add(b.mul(b.lshr(k, I64(4)), block), b.mul(b.and_(k, I64(15)), I64(ROW)))
            to, row = b.add(target, to), []
            for token in range(tokens):
                number = lanes.row_id_at(b, row_ids, b.add(first, I64(token)))
                row.append(b.add(values, b.mul(number, value_row)))
            if tokens == 2:
                token = b.add(b.mul(b.lshr(k, I64(3)), I64(ROWS)), b.add(b.and_(k, I64(HALF - 1)), I64(HALF)))
                later = b.add(shift, lanes.row_id_at(b, ahead, token))
                with loop(b, b.mul(dim, I64(size)), LINE) as i:
                    lanes.prefetch(b, b.add(later, i))
            with loop(b, dim, step) as i:
                places, place = (
                    [b.add(at, b.mul(i, I64(size))) for at in row],
                    b.add(to, b.mul(i, I64(2 * STEP))),
                )
                for half, pairs in enumerate(interleaved(b, places)):
                    for term, vector in enumerate(pairs):
                        write(b, b.add(b.add(place, I64(1024 * half)), b.mul(term_bytes, I64(term))), vector)

        pairs, odd = b.lshr(count, I64(1)), b.and_(count, I64(1))
        with loop(b, pairs) as k:
            pair(k, 2)
        with b.if_then(b.icmp_signed("!=", odd, I64(0))):
            pair(pairs, 1)
        done = b.add(pairs, odd)
        with loop(b, b.and_(b.neg(done), I64(ROWS - 1))) as k:
            pair(b.add(done, k), 0)

    def interleaved(b, places):
        """Return pairs of 32 values of up to two tokens at their places, by terms, for each 16 elements."""
        missing = 2 - len(places)
        if terms.rows == 1:
            parts = [bfloat16_vectors(b, at, terms.element) for at in places]
            parts += [[Lanes(b, ir.Constant(ir.VectorType(I16, STEP), [0] * STEP))] * (2 // size)] * missing
            return [[vector] for pair in zip(*parts, strict=True) for vector in interleave(*pair)]
        halves = [[read_floats(b, at, "float16", half) for at in places] for half in range(2)]
        return [pair_terms(x + lanes.zeros(b, LANES, missing), terms.rows) for x in halves]

    return pair_values


def rounded(x):
    """Round 16 float32 to bfloat16."""
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    return lanes.call_intrinsic(x.builder, name, ROUNDED, x.value).cast("bitcast", I16)


def by_row(vectors):
    """Transpose vectors with the rows of 16 tokens to a vector of 16 tokens for each row."""
    rows = size = len(vectors)
    while size > 1:  # take the lanes of even and of odd rows apart
        vectors = [
            vectors[first + 2 * i].pick(range(side, 2 * LANES, 2), vectors[first + 2 * i + 1])
            for first in range(0, rows, size)
            for side in range(2)
            for i in range(size // 2)
        ]
        size //= 2
    bits = rows.bit_length() - 1  # a row is where the bits of its number are reversed
    return [vectors[int(f"{row:0{bits}b}"[::-1], 2)] for row in range(rows)]
