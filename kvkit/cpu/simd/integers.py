"""Products for up to 8 query rows that multiply codes as integers (AVX-512 VNNI); see simd/attention.py.

    S = K Q^T           A query is q = 2^8 high + low + rest / 254, of signed bytes; the largest of a row is
                        127 * 257. The rest keeps bits of small elements beside a large one. A code c becomes
                        an unsigned byte, u = c + bias. Elements that share a scale are added up as integers.
                        The terms with the bias are known before: sums of low bytes, and of the rest, start
                        there.
                            sum q c = 2^8 (sum high u) + (sum low u) - bias (sum 2^8 high + low)
                                      + ((sum rest u) - bias (sum rest)) / 254
    O = O alpha + P V   Weights are fixed point of 16 bits, relative to the largest of the block, and so are
                        scales. Their products are multiplied with codes, two tokens a lane, and added up as
                        integers over the block.

A lane multiplies a word of four neighbouring codes with four bytes of a query. With several query rows, lanes
of a quarter of a vector have the same word, so that a score is the sum of fewer lanes. The first quarter has
words 0..3 (W0 has codes 0..3) for query rows a, b, c, d, the second one has words 4..7, and so on:

    lane           0    1    2    3
    1 row          W0a  W1a  W2a  W3a
    2 rows         W0a  W0b  W1a  W1b     then  W2a  W2b  W3a  W3b
    4 rows         W0a  W0b  W0c  W0d     then  W1a  W1b  W1c  W1d     and so on, 4 steps
    8 rows         as 4 rows, with a second vector for the other four

A block is left to float32 in two cases: one scale is far above the mean, so that the others would have few
bits; or values are far above 1, so that 16 bits are too few for the tolerance of an output near 0. NaN and
infinity in queries or scales give NaN scores and sums that are not finite.
"""

import functools
import itertools
import math
from typing import NamedTuple

from llvmlite import ir

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.attention import LOWEST
from kvkit.cpu.simd.chunks import LINE, bytes_of, element_at, tile_tokens
from kvkit.cpu.simd.lanes import F32, I8, I16, I32, I64, LANES, RAW, Lanes, loop, micro_kernel, read, write
from kvkit.formats.elements import BY_NAME

BYTES = 64  # in a vector
PARTS = 3  # bytes of a query: high, low and the rest
WORDS = ir.VectorType(I32, LANES)
LARGEST_QUERY = 127 * 256 + 127  # of two signed bytes, both 127
RESTS = 254.0  # of a unit of 2^8 high + low, whose rest is at most a half: a signed byte
LARGEST_WEIGHT = 2**15 - 1
MOST_TOKENS = 128  # in a block
UNEVEN = 8.0  # a scale above so many times the mean would leave a block's other scales too few bits
LEAST = 2.0**-100  # smaller numbers count as 0, so that reciprocals are finite
ROUNDER = 1.5 * 2.0**23  # adding it rounds to an integer, which is then in the low bits of the float32
ROUNDER_BITS = 0x4B400000  # of ROUNDER as float32


def dot(sums, codes, bytes_):
    """Return sums + unsigned codes * signed bytes, four products in each lane."""
    values = sums.value, codes.as_bits().value, bytes_.as_bits().value
    return lanes.call_intrinsic(sums.builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, *values)


def dot_pairs(sums, x, y):
    """Return sums + x * y of 16-bit integers, two products in each lane.

    Sums never overflow, so vpdpwssd would do, but LLVM splits that into two instructions. This one saturates.
    """
    values = sums.value, x.as_bits().value, y.as_bits().value
    return lanes.call_intrinsic(sums.builder, "llvm.x86.avx512.vpdpwssds.512", WORDS, *values)


def times(x, y):
    """Return the products of 16-bit fixed point, rounded: x * y / 2^15."""
    x, y = x.as_bits(16), y.as_bits(16)
    name = "llvm.x86.avx512.pmul.hr.sw.512" if x.count == 32 else "llvm.x86.avx2.pmul.hr.sw"
    return lanes.call_intrinsic(x.builder, name, x.type, x.value, y.value).as_bits()


def int_zeros(b):
    return Lanes(b, ir.Constant(WORDS, [0] * LANES))


class CodeVectors:
    """Rows of symmetric codes that are read with their scales, a chunk of `width` elements at a time.

    Codes of 8 bits fill a vector with 64 neighbouring elements. A vector of 4-bit codes gives two: its low
    nibbles, then its high nibbles. Byte 0 has elements 0 and 1, or, in blocks of ggml, 0 and 16.
    """

    def __init__(self, stored, scale_format, group, width):
        self.element = BY_NAME[stored]
        self.block, self.bits, self.width = self.element.block, self.element.bits, width
        self.group = self.block.elements if self.block else group
        self.scale_format = self.block.cell if self.block else scale_format
        self.scales = max(1, width // self.group)  # how many a chunk has
        self.bias = 1 << self.bits - 1
        self.nibbles_apart = bool(self.block and self.block.halves)  # elements 0 and 16 share a byte
        self.stored_unsigned = bool(self.block and self.block.bias)  # codes have the bias in memory

    def group_of(self, element):
        """Return which of the chunk's scales an element has."""
        return element // self.group if self.group < self.width else 0

    def chunk_at(self, b, row, i):
        """Return the address of a row's chunk from element i on."""
        return element_at(b, self.element.name, row, i)

    def bytes(self, b, at, first, size):
        """Read `size` bytes of a chunk's codes, in order, without the scales between blocks."""
        if not self.block:
            return read(b, b.add(at, I64(first)), I8, size)
        of_block = self.block.elements * self.bits // 8
        return lanes.concatenate(
            [
                read(
                    b, b.add(at, I64(byte // of_block * self.block.bytes + self.block.codes_at)), I8, of_block
                )
                for byte in range(first, first + size, of_block)
            ]
        )

    def biased_codes(self, b, at):
        """Return vectors of codes plus `bias`, unsigned bytes, in the order of `elements`."""
        if self.bits == 8:  # flipping the highest bit adds 128
            return [self.bytes(b, at, v, BYTES).apply("xor", 0x80) for v in range(0, self.width, BYTES)]
        codes = self.bytes(b, at, 0, BYTES)
        if not self.stored_unsigned:
            codes = codes.apply("xor", 0x88)
        return [codes & 0x0F, ((codes.as_bits(16) >> 4) & 0x0F0F).as_bits(8)]

    def elements(self):
        """Return the element in each byte of the vectors of `biased_codes`."""
        if self.bits == 8:
            return [range(v, v + BYTES) for v in range(0, self.width, BYTES)]
        return [[self.in_byte(byte, nibble) for byte in range(BYTES)] for nibble in range(2)]

    def in_byte(self, byte, nibble):
        """Return the element of a byte's low nibble (0) or high nibble (1)."""
        if self.nibbles_apart:
            half = self.block.elements // 2
            return byte // half * 2 * half + byte % half + nibble * half
        return 2 * byte + nibble

    def parts(self):
        """Return the element in each lane of the vectors of `token_pairs`: [part][vector][lane].

        A part of a chunk is 32 codes of 8 bits, in two vectors, or half of the 4-bit codes, in four.
        """
        if self.bits == 8:
            return [
                [[first + 8 * (lane // 4) + lane % 4 + half for lane in range(LANES)] for half in (0, 4)]
                for first in range(0, self.width, 32)
            ]
        return [
            [
                [
                    self.in_byte(2 * (8 * (lane // 4) + lane % 4 + half) + n // 2, n % 2)
                    for lane in range(LANES)
                ]
                for half, n in of_part
            ]
            for of_part in self.nibbles_of_parts()
        ]

    def nibbles_of_parts(self):
        """Return for each part its vectors as (half of `side_by_side`, nibble 0..3 of a 16-bit word)."""
        if self.nibbles_apart:
            return [[(half, n) for half in (0, 4) for n in (part, part + 2)] for part in (0, 1)]
        return [[(half, n) for n in range(4)] for half in (0, 4)]

    def token_pairs(self, b, at, chosen):
        """Return the chosen `parts` of a chunk of two tokens, side by side, as 16-bit integers."""
        vectors = []
        if self.bits == 8:
            for part in chosen:
                rows = [self.bytes(b, row, 32 * part, 32).cast("sext", I16) for row in at]
                vectors += [side_by_side(rows, half) for half in (0, 4)]
            return vectors
        rows = [self.bytes(b, row, 0, BYTES) for row in at]
        if self.stored_unsigned:
            rows = [row.apply("xor", 0x88) for row in rows]
        words = {half: side_by_side([row.as_bits(16) for row in rows], half) for half in (0, 4)}
        for part in chosen:
            for half, n in self.nibbles_of_parts()[part]:  # shifts move nibble n up, then down with its sign
                codes = words[half] if n == 3 else words[half] << (12 - 4 * n)
                vectors.append(codes.signed_rshift(12))
        return vectors

    def raw_scales(self, b, at, scale_base, i):
        """Read the stored scales of a chunk."""
        if self.block:
            starts = [b.add(at, I64(k * self.block.bytes)) for k in range(self.scales)]
            return lanes.concatenate([read(b, start, RAW[self.scale_format], 1) for start in starts])
        size = BY_NAME[self.scale_format].bytes(1)
        first = b.add(scale_base, b.mul(b.udiv(i, I64(self.group)), I64(size)))
        return read(b, first, RAW[self.scale_format], self.scales)


def weight_of(x):
    """Return e^x for x <= 0, within 3e-6 relative; e^-55 for x below -55."""
    power = x * math.log2(math.e)
    power = lanes.where(power, "<", -80.0, -80.0, power)
    shifted = power + ROUNDER
    rest = power - (shifted - ROUNDER)
    series = x.full(9.570099413394928e-3)
    for coefficient in (5.591785907745361e-2, 0.240247443318367, 0.6931217908859253, 0.9999992847442627):
        series = series.fma(rest, coefficient)
    return series.as_bits().plus(shifted.as_bits() << 23).cast("bitcast", F32)


def side_by_side(rows, half):
    """Interleave 16-bit words of two rows: of each eight the first four (half 0) or the last four (half 4).

    rows       x0 x1 x2 x3 x4 x5 x6 x7 | x8 ..      y0 y1 y2 y3 y4 y5 y6 y7 | y8 ..
    half 0     x0 y0 x1 y1 x2 y2 x3 y3 | x8 y8 ..   so that a lane has one element of both rows
    half 4     x4 y4 x5 y5 x6 y6 x7 y7 | x12 y12 ..
    """
    words = [8 * (lane // 4) + lane % 4 + half for lane in range(LANES)]
    x, y = rows
    return x.pick((word + 32 * row for word in words for row in (0, 1)), y)


class WordProduct(NamedTuple):
    """A product of a vector of codes, of which `words` are picked, with the bytes of the queries."""

    vector: int  # number in `biased_codes`
    words: list[int]  # the word that each lane picks
    bytes_at: int  # offset in a chunk of queries: a vector of high bytes, one of low bytes, one of the rest


class SharedScales(NamedTuple):
    """Products whose lanes have the same scales, so that they are added up as integers."""

    groups: tuple[int, ...]  # the scale of each lane
    start_at: int  # offset in a chunk of queries: the initial sums of low bytes and of the rest
    products: list[WordProduct]


class Queries:
    """The memory layout of a tile's queries: a vector with a factor for each row, then chunks.

    A chunk has for each of `sums` two initial sums, then the `PARTS` of each product; all of them are
    `vectors` vectors, of which each holds `rows_of_vector` query rows.
    """

    def __init__(self, rows, codes):
        self.rows_of_vector = min(rows, 4)
        self.vectors = rows // self.rows_of_vector
        span = 4 // self.rows_of_vector  # words of a quarter of a vector
        choices = [  # of the words of a vector of codes: the word of each lane
            [4 * (lane // 4) + step * span + lane % 4 // self.rows_of_vector for lane in range(LANES)]
            for step in range(self.rows_of_vector)
        ]
        by_groups: dict = {}
        for vector, elements in enumerate(codes.elements()):
            for words in choices:
                groups = tuple(codes.group_of(elements[4 * word]) for word in words)
                by_groups.setdefault(groups, []).append((vector, words))
        self.sums, self.chunk_bytes, size = [], 0, BYTES * self.vectors
        for groups, chosen in by_groups.items():
            self.sums.append(SharedScales(groups, self.chunk_bytes, []))
            self.chunk_bytes += 2 * size
            for vector, words in chosen:
                self.sums[-1].products.append(WordProduct(vector, words, self.chunk_bytes))
                self.chunk_bytes += PARTS * size

    def chunk_at(self, b, queries, chunk):
        """Return the address of a chunk of queries."""
        return b.add(queries, b.add(I64(BYTES), b.mul(chunk, I64(self.chunk_bytes))))


@functools.cache
def compile_fixed_queries(rows, stored, scale_format, group, width):
    """Return f(queries [row, dim], dim, target, scratch), which writes queries as 16-bit fixed point.

    `Queries` describes the target; scratch is PARTS * rows * width bytes.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    form = Queries(rows, codes)
    elements = codes.elements()
    row_size = PARTS * width  # bytes of a row in scratch: those of each part, in the order of the codes

    @micro_kernel
    def fixed_queries(b, queries, dim, target, scratch):
        row_bytes = b.mul(dim, I64(4))
        reciprocals = []
        for r in range(rows):
            largest = lanes.StackSlots(b, lanes.zeros(b, LANES, 2))
            row = b.add(queries, b.mul(row_bytes, I64(r)))
            with loop(b, dim, LANES) as i:
                query = read(b, b.add(row, b.mul(i, I64(4))), F32, LANES)
                largest[0] = largest[0].max(abs(query))
                largest[1] = query.fma(0.0, largest[1])  # 0, or NaN if one is not finite
            top, zero_or_nan = largest[0], largest[1]
            for distance in (8, 4, 2, 1):
                top = top.max(top.rotate(distance))
                zero_or_nan = zero_or_nan + zero_or_nan.rotate(distance)
            factor = b.extract_element(((top + zero_or_nan) * (1 / LARGEST_QUERY)).value, I32(0))
            for lane in range(r, LANES, rows):
                b.store(factor, b.inttoptr(b.add(target, I64(4 * lane)), F32.as_pointer())).align = 4
            reciprocals.append(float(LARGEST_QUERY) / top.max(LEAST))
        with loop(b, dim, width) as i:
            for r in range(rows):
                at = b.add(queries, b.add(b.mul(row_bytes, I64(r)), b.mul(i, I64(4))))
                query, reciprocal = read(b, at, F32, width), reciprocals[r].pick([0] * width)
                rounded = query.fma(reciprocal, ROUNDER)
                number = rounded.as_bits().plus(-ROUNDER_BITS % 2**32)
                high = number.plus(128).signed_rshift(8)  # the low byte, cut off below, is then -128..127
                rest = query.fma(reciprocal, -(rounded - ROUNDER)).fma(RESTS, ROUNDER).as_bits()
                for k, part in enumerate((high, number, rest)):
                    bytes_ = part.cast("trunc", I8)
                    for v, order in enumerate(elements):
                        at = b.add(scratch, I64(r * row_size + k * width + BYTES * v))
                        write(b, at, bytes_.pick(order))
            to = form.chunk_at(b, target, b.udiv(i, I64(width)))
            one = Lanes(b, ir.Constant(ir.VectorType(I8, BYTES), [1] * BYTES))
            for _, start_at, products in form.sums:
                total = [int_zeros(b) for _ in range(PARTS * form.vectors)]
                for v, words, offset in products:
                    for h in range(form.vectors):
                        for k in range(PARTS):
                            of_rows = lanes.concatenate(
                                [
                                    read(
                                        b,
                                        b.add(scratch, I64(r * row_size + k * width + BYTES * v)),
                                        I32,
                                        LANES,
                                    )
                                    for r in range(h * form.rows_of_vector, (h + 1) * form.rows_of_vector)
                                ]
                            )
                            chosen = of_rows.pick(
                                lane % form.rows_of_vector * LANES + word for lane, word in enumerate(words)
                            )
                            write(b, b.add(to, I64(offset + BYTES * (PARTS * h + k))), chosen)
                            total[PARTS * h + k] = dot(total[PARTS * h + k], one, chosen)
                for h in range(form.vectors):  # sums start at -bias times these
                    high, low, rest = total[PARTS * h : PARTS * (h + 1)]
                    for k, part in enumerate(((high << 8).plus(low), rest)):
                        start = part.apply("mul", -codes.bias % 2**32)
                        write(b, b.add(to, I64(start_at + BYTES * (2 * h + k))), start)

    return fixed_queries


@functools.cache
def compile_scores(rows, near, stored, scale_format, group, width):
    """Return `attention.narrow_scores` for fixed-point queries; `width` divides `dim`."""
    codes = CodeVectors(stored, scale_format, group, width)
    form = Queries(rows, codes)
    tokens = tile_tokens(rows)

    @micro_kernel
    def scores(b, queries, keys, key_row, scale_base, scale_row, row_ids, ahead, shift, count, dim, scores):
        size, factor = bytes_of(b, stored, dim), read(b, queries, F32, LANES).pick(range(tokens * rows))
        with loop(b, count, tokens) as first:
            number = [lanes.row_id_at(b, row_ids, b.add(first, I64(t))) for t in range(tokens)]
            key_at = [b.add(keys, b.mul(n, key_row)) for n in number]
            scale_at = [b.add(scale_base, b.mul(n, scale_row)) for n in number]
            for t in range(tokens):
                later_key = lanes.row_id_at(b, ahead, b.add(first, I64(t)))
                with loop(b, size, LINE) as i:
                    lanes.prefetch(b, b.add(b.add(shift, later_key), i), near)
            sums = lanes.StackSlots(b, lanes.zeros(b, LANES, tokens * form.vectors))  # [token, vector]
            with loop(b, dim, width) as i:
                query = form.chunk_at(b, queries, b.udiv(i, I64(width)))
                at = [codes.chunk_at(b, row, i) for row in key_at]
                code = [codes.biased_codes(b, row) for row in at]
                scale = [
                    lanes.widen(codes.raw_scales(b, *token, i), codes.scale_format)
                    for token in zip(at, scale_at, strict=True)
                ]
                for groups, start_at, products in form.sums:
                    start = [
                        read(b, b.add(query, I64(start_at + BYTES * k)), I32, LANES)
                        for k in range(2 * form.vectors)
                    ]
                    high, low, rest = (
                        [int_zeros(b)] * len(sums.places),
                        start[::2] * tokens,
                        start[1::2] * tokens,
                    )
                    for v, words, offset in products:
                        parts = [  # of the first vector of rows, then of the second
                            read(b, b.add(query, I64(offset + BYTES * k)), I32, LANES)
                            for k in range(PARTS * form.vectors)
                        ]
                        for t in range(tokens):
                            chosen = code[t][v].as_bits().pick(words)
                            for h in range(form.vectors):
                                k = t * form.vectors + h
                                high[k] = dot(high[k], chosen, parts[PARTS * h])
                                low[k] = dot(low[k], chosen, parts[PARTS * h + 1])
                                rest[k] = dot(rest[k], chosen, parts[PARTS * h + 2])
                    for k in range(len(high)):
                        product = (high[k] << 8).plus(low[k]).cast("sitofp", F32)
                        product = rest[k].cast("sitofp", F32).fma(1 / RESTS, product)
                        sums[k] = product.fma(scale[k // form.vectors].pick(groups), sums[k])
            total = lanes.sums_of([sums[k] for k in range(tokens * form.vectors)], form.rows_of_vector)
            total = total * factor
            write(b, b.add(scores, b.mul(first, I64(4 * rows))), total.fma(0.0, total))  # makes infinity NaN

    return scores


@functools.cache
def compile_softmax(rows):
    """Return f(scores, vectors, m_at, l_at, factors), which replaces S [token, row] by P.

    P is [token / 2, row, 2], 16-bit integers relative to the largest weight of the block. m and l are updated
    as in `attention.online_softmax`. `factors` receives alpha of earlier sums, then the block's factor.
    """
    order = [
        token * rows + row
        for first in range(0, LANES // rows, 2)
        for row in range(rows)
        for token in (first, first + 1)
    ]

    @micro_kernel
    def softmax(b, scores, vectors, m_at, l_at, factors):
        largest = lanes.StackSlots(b, [read(b, scores, F32, LANES)])
        with loop(b, vectors) as i:
            largest[0] = largest[0].max(read(b, b.add(scores, b.mul(i, I64(BYTES))), F32, LANES))
        m_block = largest[0]
        for distance in (8, 4, 2, 1):
            if distance >= rows:
                m_block = m_block.max(m_block.rotate(distance))
        m_before = read(b, m_at, F32, LANES)
        m_new, m_block = m_before.max(m_block), m_block.max(LOWEST)
        base = m_new.max(LOWEST)
        alpha, factor = lanes.exp(m_before - base), lanes.exp(m_block - base)
        sums = lanes.StackSlots(b, lanes.zeros(b, LANES))
        with loop(b, vectors) as i:
            weight = weight_of(read(b, b.add(scores, b.mul(i, I64(BYTES))), F32, LANES) - m_block)
            rounded = weight.fma(float(LARGEST_WEIGHT), ROUNDER)
            sums[0] = sums[0] + (rounded - ROUNDER)
            pairs = rounded.as_bits(16).pick(2 * lane for lane in order)
            write(b, b.add(scores, b.mul(i, I64(BYTES // 2))), pairs)
        write(b, m_at, m_new)
        write(b, l_at, read(b, l_at, F32, LANES).fma(alpha, sums[0] * factor * (1 / LARGEST_WEIGHT)))
        write(b, factors, alpha)
        # `times` divides by 2^15; weights and scales are multiples of 1 / LARGEST_WEIGHT.
        write(b, b.add(factors, I64(BYTES)), factor * ((LARGEST_WEIGHT + 1) / LARGEST_WEIGHT**2))

    return softmax


class Scales:
    """The memory layout of a block's scales as fixed point of 16 bits.

        offset 0     the flag, a float32: 0, or -1 if the block is left to float32
        64           64 bytes for each chunk: 16 float32, the largest scale of each of its groups in turn
        64 + dim     for each chunk: int16 [token / 2, group, 2], room for MOST_TOKENS tokens

    A chunk has at least 64 elements and a group at least 8, so 40 * dim + 64 bytes suffice.
    """

    def __init__(self, codes, dim):
        self.dim = dim
        self.chunk = 2 * codes.scales * MOST_TOKENS  # bytes of a chunk's scales

    def largest_at(self, b, at, chunk):
        return b.add(at, b.add(I64(BYTES), b.mul(chunk, I64(BYTES))))

    def pairs_at(self, b, at, chunk):
        first = b.add(b.add(at, I64(BYTES)), self.dim)
        return b.add(first, b.mul(chunk, I64(self.chunk)))


def pair_words(even, odd):
    """Pack the integers of two tokens, or of two elements, into the low and the high half of a word."""
    return (even & 0xFFFF) | (odd << 16)


@functools.cache
def compile_fixed_scales(stored, scale_format, group, width):
    """Return f(values, value_row, scale_base, scale_row, row_ids, count, dim, most, target).

    It writes a block's scales as 16-bit integers, relative to the largest of their group; see `Scales`. The
    float32 at the target is -1 if a scale is too large for that (see `UNEVEN`), or if codes stand for values
    above the integer `most`; else it is 0. Entries after the last token are undefined.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    scales_of_token, size = codes.scales, BY_NAME[codes.scale_format].bytes(1)

    @micro_kernel
    def fixed_scales(b, values, value_row, scale_base, scale_row, row_ids, count, dim, most, target):
        scales = Scales(codes, dim)
        span = LANES // scales_of_token  # tokens of a vector
        vectors = b.udiv(b.add(count, I64(span - 1)), I64(span))
        raw_to, raw_from = lanes.stack_buffer(b, MOST_TOKENS * scales_of_token * size)
        floats_to, floats_from = lanes.stack_buffer(b, MOST_TOKENS * scales_of_token * 4)
        uneven = lanes.StackSlots(
            b, [Lanes(b, ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES))]
        )

        def raw_scales(token, i):
            number = lanes.row_id_at(b, row_ids, token)
            at = codes.chunk_at(b, b.add(values, b.mul(number, value_row)), i)
            return codes.raw_scales(b, at, b.add(scale_base, b.mul(number, scale_row)), i)

        with loop(b, dim, width) as i:
            chunk = b.udiv(i, I64(width))
            if scales_of_token < LANES:  # tokens share a vector: gather their scales, zeros after the last
                last = b.add(raw_to, b.mul(b.sub(vectors, I64(1)), I64(size * LANES)))
                write(b, last, Lanes(b, ir.Constant(ir.VectorType(I8, size * LANES), None)))
                with loop(b, count) as token:
                    to = b.add(raw_to, b.mul(token, I64(size * scales_of_token)))
                    write(b, to, raw_scales(token, i))
            over_tokens = lanes.StackSlots(b, lanes.zeros(b, LANES, 2))  # the largest and the sum of a scale
            with loop(b, vectors) as v:
                if scales_of_token < LANES:
                    at = b.add(raw_from, b.mul(v, I64(size * LANES)))
                    scale = read(b, at, RAW[codes.scale_format], LANES)
                else:
                    scale = raw_scales(v, i)
                scale = lanes.widen(scale, codes.scale_format)
                write(b, b.add(floats_to, b.mul(v, I64(BYTES))), scale)
                over_tokens[0], over_tokens[1] = over_tokens[0].max(abs(scale)), over_tokens[1] + abs(scale)
            largest, total = over_tokens[0], over_tokens[1]
            for distance in (8, 4, 2, 1):
                if distance >= scales_of_token:
                    largest = largest.max(largest.rotate(distance))
                    total = total + total.rotate(distance)
            tokens = lanes.fill(b, b.sitofp(count, F32), LANES)
            above = b.fcmp_ordered(">", (largest * tokens).value, (total * UNEVEN).value)
            too_large = lanes.fill(b, b.sitofp(most, F32), LANES) * (1 / codes.bias)
            above = b.or_(above, b.fcmp_ordered(">", largest.value, too_large.value))
            uneven[0] = uneven[0] | Lanes(b, above)
            write(b, scales.largest_at(b, target, chunk), total.fma(0.0, largest))  # NaN if one is not finite
            reciprocal = float(LARGEST_WEIGHT) / largest.max(LEAST)
            to = scales.pairs_at(b, target, chunk)
            vectors_of_pair = 2 if scales_of_token == LANES else 1
            with loop(b, vectors, vectors_of_pair) as v:
                at = b.add(floats_from, b.mul(v, I64(BYTES)))
                fixed = [
                    read(b, b.add(at, I64(BYTES * k)), F32, LANES).fma(reciprocal, ROUNDER).as_bits()
                    for k in range(vectors_of_pair)
                ]
                if vectors_of_pair == 1:  # even tokens and odd tokens of the vector
                    by_token = [
                        [lane for lane in range(LANES) if lane // scales_of_token % 2 == odd]
                        for odd in (0, 1)
                    ]
                    fixed = [fixed[0].pick(of_token) for of_token in by_token]
                words = pair_words(*fixed)
                write(b, b.add(to, b.mul(v, I64(BYTES // 2))), words)
        any_ = b.icmp_signed("!=", b.bitcast(uneven[0].value, I16), I16(0))
        flag = b.select(any_, ir.Constant(F32, -1.0), ir.Constant(F32, 0.0))
        b.store(flag, b.inttoptr(target, F32.as_pointer())).align = 4

    return fixed_scales


@functools.cache
def compile_sums(rows, near, stored, scale_format, group, width):
    """Return `attention.narrow_sums` for weights and factors of `softmax` and scales of `fixed_scales`.

    Tokens that pad the last vector of weights have weight 0 and valid row ids. A lane has one element: it
    adds up p0 s0 c0 + p1 s1 c1 over pairs of tokens, with weights p, scales s and codes c.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    parts, scales_of_token = codes.parts(), codes.scales
    tokens_of_vector = LANES // rows  # of weights
    # Sums of up to 16 vectors stay in registers: of so many rows, then of so many parts of a chunk.
    most_rows = min(rows, LANES // len(parts[0]))
    most_parts = min(len(parts), max(1, LANES // (most_rows * len(parts[0]))))
    pairs = min(tokens_of_vector // 2, max(1, LANES // scales_of_token))  # of tokens with scales in a vector

    def weigh(b, weights, scales, count, target):
        """Write weights * scales as [token / 2, row, scale, 2]."""
        with loop(b, count, tokens_of_vector) as first:
            weights_at = b.add(weights, b.mul(first, I64(2 * rows)))
            weight = read(b, weights_at, I32, LANES // 2)  # [pair, row]
            scales_at = b.add(scales, b.mul(first, I64(2 * scales_of_token)))
            to = b.add(target, b.mul(first, I64(2 * rows * scales_of_token)))
            for begin in range(0, tokens_of_vector // 2, pairs):
                at = b.add(scales_at, I64(4 * begin * scales_of_token))
                scale = read(b, at, I32, pairs * scales_of_token)
                order = list(itertools.product(range(pairs), range(rows), range(scales_of_token)))
                size = min(LANES, len(order))
                for k in range(0, len(order), size):
                    chosen = order[k : k + size]
                    scale_of_lane = scale.pick(p * scales_of_token + g for p, _, g in chosen)
                    word_of_lane = [(begin + p) * rows + r for p, r, _ in chosen]
                    if len(set(word_of_lane)) == 1:
                        word = lanes.word_at(b, b.add(weights_at, I64(4 * word_of_lane[0])))
                    else:
                        word = weight.pick(word_of_lane)
                    offset = 4 * (begin * rows * scales_of_token + k)
                    write(b, b.add(to, I64(offset)), times(scale_of_lane, word))

    @micro_kernel
    def sums(
        b, weights, values, value_row, row_ids, ahead, shift, count, dim, sums, factors, scales_at, scratch
    ):
        scales = Scales(codes, dim)

        def add_parts(chosen_parts, chosen_rows, i, largest):
            """Add P V to O for these parts of the chunk from element i on, and for these rows."""
            columns = [elements for part in chosen_parts for elements in parts[part]]  # [vector][lane]
            groups = [tuple(codes.group_of(e) for e in elements) for elements in columns]
            totals = lanes.StackSlots(b, [int_zeros(b) for _ in chosen_rows for _ in columns])
            with loop(b, count, 2) as token:
                at, both = [], (token, b.add(token, I64(1)))
                for one in both:
                    row = b.add(values, b.mul(lanes.row_id_at(b, row_ids, one), value_row))
                    at.append(codes.chunk_at(b, row, i))
                if chosen_rows[0] == 0:
                    for one in both:
                        prefetch_parts(one, i, chosen_parts)
                value = codes.token_pairs(b, at, chosen_parts)
                weight_at = b.add(scratch, b.mul(token, I64(2 * rows * scales_of_token)))
                for r, row in enumerate(chosen_rows):
                    row_at = b.add(weight_at, I64(4 * row * scales_of_token))
                    for k, vector in enumerate(value):
                        place = r * len(columns) + k
                        weight = weights_of_groups(row_at, groups[k])
                        totals[place] = dot_pairs(totals[place], vector, weight)
            elements = [element for column in columns for element in column]  # in the order of lanes
            lane_of = sorted(range(len(elements)), key=elements.__getitem__)  # in the order of elements
            for r, row in enumerate(chosen_rows):
                alpha = lanes.broadcast(b, b.add(factors, I64(4 * row)), LANES)
                block_factor = lanes.broadcast(b, b.add(factors, I64(BYTES + 4 * row)), LANES)
                products = []
                for k in range(len(columns)):
                    total = totals[r * len(columns) + k].cast("sitofp", F32)
                    products.append(total * (largest.pick(groups[k]) * block_factor))
                products = lanes.concatenate(products)
                for k in range(0, len(elements), LANES):
                    column = b.add(i, I64(elements[lane_of[k]]))
                    at = b.add(sums, b.mul(b.add(b.mul(dim, I64(row)), column), I64(4)))
                    write(b, at, read(b, at, F32, LANES).fma(alpha, products.pick(lane_of[k : k + LANES])))

        def prefetch_parts(token, i, chosen_parts):
            """Prefetch the lines that begin in these parts; all parts of 4-bit codes have the same bytes."""
            first, last = 0, BYTES
            if codes.bits == 8:
                first, last = 32 * chosen_parts.start, 32 * chosen_parts.stop
            if codes.bits == 8 or chosen_parts.start == 0:
                later = codes.chunk_at(b, b.add(lanes.row_id_at(b, ahead, token), shift), i)
                for line in range(-(-first // LINE) * LINE, last, LINE):
                    lanes.prefetch(b, b.add(later, I64(line)), near)

        def weights_of_groups(at, groups):
            """Read weights times scales of a row and two tokens, for the scale of each lane."""
            if len(set(groups)) == 1:
                return lanes.word_at(b, b.add(at, I64(4 * groups[0])))
            return read(b, at, I32, scales_of_token).pick(groups)

        with loop(b, dim, width) as i:
            chunk = b.udiv(i, I64(width))
            largest = read(b, scales.largest_at(b, scales_at, chunk), F32, LANES)
            weigh(b, weights, scales.pairs_at(b, scales_at, chunk), count, scratch)
            for part in range(0, len(parts), most_parts):
                for row in range(0, rows, most_rows):
                    add_parts(range(part, part + most_parts), range(row, row + most_rows), i, largest)

    return sums
