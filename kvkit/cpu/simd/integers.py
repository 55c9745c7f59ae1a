"""Products for up to 8 query rows that multiply codes as integers (AVX-512 VNNI); see simd/attention.py.

    S = K Q^T                    Queries are fixed point of 16 bits, relative to the largest of their row. A
                                 lane multiplies four neighbouring codes, once with the high bytes of a query
                                 and once with the low bytes, and adds them up as integers while they share a
                                 scale. The four lanes of a quarter of a vector are four words of one query
                                 row, two words of two rows, or a word of each of four rows.
    O = O alpha + P V            Weights are fixed point of 16 bits, relative to the largest of the block, and
                                 so are scales. Their products are multiplied with codes, two tokens a lane,
                                 and added up as integers over the block.

A block is left to float32 in two cases: one scale is far above the mean, so that the others would have few
bits; or values are far above 1, so that 16 bits are too few for the tolerance of an output near 0. NaN and
infinity in queries or scales give NaN scores and sums that are not finite.
"""

import functools
import itertools
import math

from llvmlite import ir
from numba.core import cgutils

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.attention import LANES, LINE, LOWEST, bytes_of, row_id_at, tile_tokens
from kvkit.cpu.simd.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    RAW,
    Lanes,
    StackSlots,
    broadcast,
    concatenate,
    exp,
    fill,
    loop,
    micro_kernel,
    prefetch,
    read,
    sums_of,
    widen,
    write,
    zeros,
)
from kvkit.formats.elements import BY_NAME

BYTES = 64  # in a vector
WORDS = ir.VectorType(I32, LANES)
LARGEST_QUERY = 127 * 256 + 127  # high and low bytes have signs
LARGEST_WEIGHT = 2**15 - 1
MOST_TOKENS = 128  # in a block
UNEVEN = 8.0  # a scale above so many times the mean would leave a block's other scales too few bits
LEAST = 2.0**-100  # smaller numbers count as 0, so that reciprocals are finite
ROUNDER = 1.5 * 2.0**23  # adding it puts an integer into the low bits
ROUNDER_BITS = 0x4B400000


def dot(sums, codes, bytes_):
    """Return sums + unsigned codes * signed bytes, four products in each lane."""
    return call_intrinsic("llvm.x86.avx512.vpdpbusd.512", WORDS, sums, codes.as_bits(), bytes_.as_bits())


def dot_pairs(sums, x, y):
    """Return sums + x * y of 16-bit integers, two products in each lane.

    Sums never overflow, so vpdpwssd would do, but LLVM splits that into two instructions. This one saturates.
    """
    return call_intrinsic("llvm.x86.avx512.vpdpwssds.512", WORDS, sums, x.as_bits(), y.as_bits())


def times(x, y):
    """Return the products of 16-bit fixed point, rounded."""
    x, y = x.as_bits(16), y.as_bits(16)
    name = "llvm.x86.avx512.pmul.hr.sw.512" if x.count == 32 else "llvm.x86.avx2.pmul.hr.sw"
    return call_intrinsic(name, x.type, x, y).as_bits()


def call_intrinsic(name, result, *lanes):
    b = lanes[0].builder
    signature = ir.FunctionType(result, [x.type for x in lanes])
    return Lanes(
        b, b.call(cgutils.get_or_insert_function(b.module, signature, name), [x.value for x in lanes])
    )


def int_zeros(b):
    return Lanes(b, ir.Constant(WORDS, [0] * LANES))


def word_at(b, address):
    """Read the 32 bits at an address into every lane."""
    return broadcast(b, address, LANES).as_bits()


class CodeVectors:
    """Rows of symmetric codes that are read with their scales, a chunk of `width` elements at a time."""

    def __init__(self, stored, scale_format, group, width):
        self.element = BY_NAME[stored]
        self.block, self.bits, self.width = self.element.block, self.element.bits, width
        self.group = self.block.elements if self.block else group
        self.scale_format = self.block.cell if self.block else scale_format
        self.scales = max(1, width // self.group)
        self.bias = 1 << self.bits - 1

    def group_of(self, element):
        return element // self.group if self.group < self.width else 0

    def begin(self, b, row, i):
        """Return the address of a row's chunk from element i on."""
        return b.add(row, bytes_of(b, self.element.name, i))

    def bytes(self, b, at, first, size):
        """Read `size` bytes of a chunk's codes, in order."""
        if not self.block:
            return read(b, b.add(at, I64(first)), I8, size)
        whole = self.block.elements * self.bits // 8
        return concatenate(
            [
                read(b, b.add(at, I64(byte // whole * self.block.bytes + self.block.codes_at)), I8, whole)
                for byte in range(first, first + size, whole)
            ]
        )

    def numbers(self, b, at):
        """Return vectors of codes plus `bias`, unsigned bytes, in the order of `elements`."""
        if self.bits == 8:
            return [self.bytes(b, at, v, BYTES).apply("xor", 0x80) for v in range(0, self.width, BYTES)]
        codes = self.bytes(b, at, 0, BYTES)
        if not (self.block and self.block.less):
            codes = codes.apply("xor", 0x88)
        return [codes & 0x0F, ((codes.as_bits(16) >> 4) & 0x0F0F).as_bits(8)]

    def elements(self):
        """Return the elements in the bytes of `numbers`."""
        if self.bits == 8:
            return [range(v, v + BYTES) for v in range(0, self.width, BYTES)]
        return [[self.in_byte(byte, nibble) for byte in range(BYTES)] for nibble in range(2)]

    def in_byte(self, byte, nibble):
        """Return the element of a byte's low nibble (0) or high nibble (1)."""
        if self.block and self.block.halves:
            half = self.block.elements // 2
            return byte // half * 2 * half + byte % half + nibble * half
        return 2 * byte + nibble

    def parts(self):
        """Return which elements `pairs` reads: [part][vector][lane].

        A part of a chunk is what one load widens: 32 codes of 8 bits, in two vectors of 16 elements each for
        two tokens, or half of the 4-bit codes.
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
            for of_part in self.nibbles()
        ]

    def nibbles(self):
        """Return the (half, nibble) pairs of each part; halves are those of `side_by_side`."""
        if self.block and self.block.halves:
            return [[(half, n) for half in (0, 4) for n in (part, part + 2)] for part in (0, 1)]
        return [[(half, n) for n in range(4)] for half in (0, 4)]

    def pairs(self, b, at, chosen):
        """Return the chosen `parts` of a chunk of two rows, side by side, as 16-bit integers."""
        found = []
        if self.bits == 8:
            for part in chosen:
                rows = [self.bytes(b, row, 32 * part, 32).cast("sext", I16) for row in at]
                found += [side_by_side(rows, half) for half in (0, 4)]
            return found
        rows = [self.bytes(b, row, 0, BYTES) for row in at]
        if self.block and self.block.less:
            rows = [row.apply("xor", 0x88) for row in rows]
        words = {half: side_by_side([row.as_bits(16) for row in rows], half) for half in (0, 4)}
        for part in chosen:
            for half, n in self.nibbles()[part]:
                codes = words[half] if n == 3 else words[half] << (12 - 4 * n)
                found.append(codes.signed_rshift(12))
        return found

    def raw_scales(self, b, at, scale_base, i):
        """Read the stored scales of a chunk."""
        if self.block:
            count = range(self.scales)
            return concatenate(
                [read(b, b.add(at, I64(k * self.block.bytes)), RAW[self.scale_format], 1) for k in count]
            )
        size = BY_NAME[self.scale_format].bytes(1)
        first = b.add(scale_base, b.mul(b.udiv(i, I64(self.group)), I64(size)))
        return read(b, first, RAW[self.scale_format], self.scales)


def weight_of(x):
    """Return e^x for x <= 0, within 3e-6 relative; e^-55 for x below -55."""
    power = x * math.log2(math.e)
    power = Lanes(
        x.builder,
        x.builder.select(x.builder.fcmp_ordered("<", power.value, x.of(-80.0)), x.of(-80.0), power.value),
    )
    shifted = power + ROUNDER
    rest = power - (shifted - ROUNDER)
    series = Lanes(x.builder, x.of(9.570099413394928e-3))
    for coefficient in (5.591785907745361e-2, 0.240247443318367, 0.6931217908859253, 0.9999992847442627):
        series = series.fma(rest, coefficient)
    return series.as_bits().plus(shifted.as_bits() << 23).cast("bitcast", F32)


def side_by_side(rows, half):
    """Interleave words of two rows: the first (half 0) or last (half 4) four of each eight."""
    words = [8 * (lane // 4) + lane % 4 + half for lane in range(LANES)]
    x, y = rows
    return x.pick((word + 32 * row for word in words for row in (0, 1)), y)


class Queries:
    """The memory layout of a tile's queries: a factor for each row, then chunks.

    In a chunk, words of the queries whose codes share scales are together: first the initial sums, then, for
    each such vector of codes, a vector of high bytes and one of low bytes.
    """

    def __init__(self, rows, codes):
        self.rows, self.codes = rows, codes
        self.apart = min(rows, 4)  # rows that a quarter of a vector holds
        self.vectors = rows // self.apart
        span = 4 // self.apart
        self.words = [
            [4 * (lane // 4) + step * span + lane % 4 // self.apart for lane in range(LANES)]
            for step in range(self.apart)
        ]
        self.runs: dict = {}  # groups of the lanes -> [(vector of codes, choice of its words)]
        for v, elements in enumerate(codes.elements()):
            for step, words in enumerate(self.words):
                groups = tuple(codes.group_of(elements[4 * word]) for word in words)
                self.runs.setdefault(groups, []).append((v, step))

    def places(self):
        """Return [(groups, offset of initial sums, steps with offsets of their bytes)] and a chunk's size."""
        at, found = 0, []
        for groups, steps in self.runs.items():
            starts, at = at, at + BYTES * self.vectors
            of_steps = []
            for step in steps:
                of_steps.append((*step, at))
                at += 2 * BYTES * self.vectors
            found.append((groups, starts, of_steps))
        return found, at


@functools.cache
def compile_fixed_queries(rows, stored, scale_format, group, width):
    """Return f(queries [row, dim], dim, target, scratch), which writes queries as 16-bit fixed point.

    `Queries` describes the target; scratch is 2 * rows * width bytes.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    form = Queries(rows, codes)
    places, chunk = form.places()
    elements = codes.elements()
    line = 2 * width  # bytes of a row: high bytes, then low bytes, in the order of the codes

    @micro_kernel(4)
    def fixed_queries(b, queries, dim, target, scratch):
        row_bytes = b.mul(dim, I64(4))
        reciprocals = []
        for r in range(rows):
            largest, row = StackSlots(b, zeros(b, LANES, 2)), b.add(queries, b.mul(row_bytes, I64(r)))
            with loop(b, dim, LANES) as i:
                query = read(b, b.add(row, b.mul(i, I64(4))), F32, LANES)
                largest[0] = largest[0].max(abs(query))
                largest[1] = query.fma(0.0, largest[1])  # NaN, if one is not finite
            top, odd = largest[0], largest[1]
            for distance in (8, 4, 2, 1):
                turned = [(lane + distance) % LANES for lane in range(LANES)]
                top, odd = top.max(top.pick(turned)), odd + odd.pick(turned)
            factor = b.extract_element(((top + odd) * (1 / LARGEST_QUERY)).value, I32(0))
            for lane in range(r, LANES, rows):
                b.store(factor, b.inttoptr(b.add(target, I64(4 * lane)), F32.as_pointer())).align = 4
            reciprocals.append(float(LARGEST_QUERY) / top.max(LEAST))
        with loop(b, dim, width) as i:
            for r in range(rows):
                at = b.add(queries, b.add(b.mul(row_bytes, I64(r)), b.mul(i, I64(4))))
                query = read(b, at, F32, width).fma(reciprocals[r].pick([0] * width), ROUNDER)
                number = query.as_bits().plus(-ROUNDER_BITS % 2**32)
                high = number.plus(128).signed_rshift(8)
                for k, part in enumerate((high, number)):
                    bytes_ = part.cast("trunc", I8)
                    for v, order in enumerate(elements):
                        at = b.add(scratch, I64(r * line + k * width + BYTES * v))
                        write(b, at, bytes_.pick(order))
            to = b.add(target, b.add(I64(BYTES), b.mul(b.udiv(i, I64(width)), I64(chunk))))
            one = Lanes(b, ir.Constant(ir.VectorType(I8, BYTES), [1] * BYTES))
            for _, starts, steps in places:
                total = [int_zeros(b) for _ in range(2 * form.vectors)]
                for v, step, offset in steps:
                    for h in range(form.vectors):
                        for k in range(2):
                            of_rows = concatenate(
                                [
                                    read(b, b.add(scratch, I64(r * line + k * width + BYTES * v)), I32, LANES)
                                    for r in range(h * form.apart, (h + 1) * form.apart)
                                ]
                            )
                            chosen = of_rows.pick(
                                lane % form.apart * LANES + word for lane, word in enumerate(form.words[step])
                            )
                            write(b, b.add(to, I64(offset + BYTES * (2 * h + k))), chosen)
                            total[2 * h + k] = dot(total[2 * h + k], one, chosen)
                for h in range(form.vectors):  # take back the bias that makes codes unsigned
                    start = (total[2 * h] << 8).plus(total[2 * h + 1]).apply("mul", -codes.bias % 2**32)
                    write(b, b.add(to, I64(starts + BYTES * h)), start)

    return fixed_queries


@functools.cache
def compile_scores(rows, near, stored, scale_format, group, width):
    """Return `attention.narrow_scores` for fixed-point queries; `width` divides `dim`."""
    codes = CodeVectors(stored, scale_format, group, width)
    form = Queries(rows, codes)
    places, chunk = form.places()
    tokens = tile_tokens(rows)

    @micro_kernel(11)
    def scores(b, queries, keys, key_row, scale_base, scale_row, row_ids, ahead, shift, count, dim, scores):
        size, factor = bytes_of(b, stored, dim), read(b, queries, F32, LANES).pick(range(tokens * rows))
        with loop(b, count, tokens) as first:
            number = [row_id_at(b, row_ids, b.add(first, I64(t))) for t in range(tokens)]
            key_at = [b.add(keys, b.mul(n, key_row)) for n in number]
            scale_at = [b.add(scale_base, b.mul(n, scale_row)) for n in number]
            for t in range(tokens):
                soon = row_id_at(b, ahead, b.add(first, I64(t)))
                with loop(b, size, LINE) as i:
                    prefetch(b, b.add(b.add(shift, soon), i), near)
            sums = StackSlots(b, zeros(b, LANES, tokens * form.vectors))
            with loop(b, dim, width) as i:
                query = b.add(queries, b.add(I64(BYTES), b.mul(b.udiv(i, I64(width)), I64(chunk))))
                at = [codes.begin(b, row, i) for row in key_at]
                code = [codes.numbers(b, row) for row in at]
                scale = [
                    widen(codes.raw_scales(b, *token, i), codes.scale_format)
                    for token in zip(at, scale_at, strict=True)
                ]
                for groups, starts, steps in places:
                    begin = [
                        read(b, b.add(query, I64(starts + BYTES * h)), I32, LANES)
                        for h in range(form.vectors)
                    ]
                    high, low = [int_zeros(b)] * len(sums.places), begin * tokens
                    for v, step, offset in steps:
                        halves = [
                            read(b, b.add(query, I64(offset + BYTES * k)), I32, LANES)
                            for k in range(2 * form.vectors)
                        ]
                        for t in range(tokens):
                            chosen = code[t][v].as_bits().pick(form.words[step])
                            for h in range(form.vectors):
                                k = t * form.vectors + h
                                high[k] = dot(high[k], chosen, halves[2 * h])
                                low[k] = dot(low[k], chosen, halves[2 * h + 1])
                    for k in range(len(high)):
                        product = (high[k] << 8).plus(low[k]).cast("sitofp", F32)
                        sums[k] = product.fma(scale[k // form.vectors].pick(groups), sums[k])
            total = sums_of([sums[k] for k in range(tokens * form.vectors)], form.apart) * factor
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

    @micro_kernel(5)
    def softmax(b, scores, vectors, m_at, l_at, factors):
        largest = StackSlots(b, [read(b, scores, F32, LANES)])
        with loop(b, vectors) as i:
            largest[0] = largest[0].max(read(b, b.add(scores, b.mul(i, I64(BYTES))), F32, LANES))
        here = largest[0]
        for distance in (8, 4, 2, 1):
            if distance >= rows:
                here = here.max(here.pick((lane + distance) % LANES for lane in range(LANES)))
        before = read(b, m_at, F32, LANES)
        new, here = before.max(here), here.max(LOWEST)
        base = new.max(LOWEST)
        alpha, factor = exp(before - base), exp(here - base)
        sums = StackSlots(b, zeros(b, LANES))
        with loop(b, vectors) as i:
            weight = weight_of(read(b, b.add(scores, b.mul(i, I64(BYTES))), F32, LANES) - here)
            rounded = weight.fma(float(LARGEST_WEIGHT), ROUNDER)
            sums[0] = sums[0] + (rounded - ROUNDER)
            pairs = rounded.as_bits(16).pick(2 * lane for lane in order)
            write(b, b.add(scores, b.mul(i, I64(BYTES // 2))), pairs)
        write(b, m_at, new)
        write(b, l_at, read(b, l_at, F32, LANES).fma(alpha, sums[0] * factor * (1 / LARGEST_WEIGHT)))
        write(b, factors, alpha)
        # `times` divides by 2^15; weights and scales are multiples of 1 / LARGEST_WEIGHT.
        write(b, b.add(factors, I64(BYTES)), factor * ((LARGEST_WEIGHT + 1) / LARGEST_WEIGHT**2))

    return softmax


class Scales:
    """The memory layout of fixed-point scales: a flag, the largest scales of each chunk, scales as integers.

    The flag has 64 bytes. A chunk, of at least 64 elements, has 64 bytes for its largest scales and 256 for
    each group of at least 8 elements, so 40 * dim + 64 bytes suffice.
    """

    def __init__(self, codes, dim):
        self.codes, self.dim = codes, dim
        self.largest = BYTES  # offset; a vector for each chunk: the maxima of its groups, repeated
        self.chunk = 2 * codes.scales * MOST_TOKENS  # bytes of a chunk's scales: [token / 2, group, 2]

    def largest_at(self, b, at, chunk):
        return b.add(at, b.add(I64(self.largest), b.mul(chunk, I64(BYTES))))

    def pairs_at(self, b, at, chunk):
        first = b.add(b.add(at, I64(self.largest)), self.dim)
        return b.add(first, b.mul(chunk, I64(self.chunk)))


def pair_words(even, odd):
    """Pack the integers of two tokens into the halves of a word."""
    return (even & 0xFFFF) | (odd << 16)


@functools.cache
def compile_fixed_scales(stored, scale_format, group, width):
    """Return f(values, value_row, scale_base, scale_row, row_ids, count, dim, most, target).

    It writes a block's scales as 16-bit integers, relative to the largest of their group; see `Scales`. The
    float32 at the target is -1 if a scale is too large for that (see `UNEVEN`), or if codes stand for values
    above the integer `most`; else it is 0. Entries after the last token are undefined.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    count_of, size = codes.scales, BY_NAME[codes.scale_format].bytes(1)

    @micro_kernel(9)
    def fixed_scales(b, values, value_row, scale_base, scale_row, row_ids, count, dim, most, target):
        scales = Scales(codes, dim)
        span = LANES // count_of  # tokens of a vector
        vectors = b.udiv(b.add(count, I64(span - 1)), I64(span))
        here, floats = (lanes.stack_buffer(b, MOST_TOKENS * count_of * n) for n in (size, 4))
        uneven = StackSlots(b, [Lanes(b, ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES))])

        def raw(token, i):
            number = row_id_at(b, row_ids, token)
            at = codes.begin(b, b.add(values, b.mul(number, value_row)), i)
            return codes.raw_scales(b, at, b.add(scale_base, b.mul(number, scale_row)), i)

        with loop(b, dim, width) as i:
            chunk = b.udiv(i, I64(width))
            if count_of < LANES:
                last = b.add(here[0], b.mul(b.sub(vectors, I64(1)), I64(size * LANES)))
                write(b, last, Lanes(b, ir.Constant(ir.VectorType(I8, size * LANES), None)))
                with loop(b, count) as token:
                    write(b, b.add(here[0], b.mul(token, I64(size * count_of))), raw(token, i))
            found = StackSlots(b, zeros(b, LANES, 2))
            with loop(b, vectors) as v:
                if count_of < LANES:
                    scale = read(
                        b, b.add(here[1], b.mul(v, I64(size * LANES))), RAW[codes.scale_format], LANES
                    )
                else:
                    scale = raw(v, i)
                scale = widen(scale, codes.scale_format)
                write(b, b.add(floats[0], b.mul(v, I64(BYTES))), scale)
                found[0], found[1] = found[0].max(abs(scale)), found[1] + abs(scale)
            largest, total = found[0], found[1]
            for distance in (8, 4, 2, 1):
                if distance >= count_of:
                    turned = [(lane + distance) % LANES for lane in range(LANES)]
                    largest, total = largest.max(largest.pick(turned)), total + total.pick(turned)
            many = fill(b, b.sitofp(count, F32), LANES)
            above = b.fcmp_ordered(">", (largest * many).value, (total * UNEVEN).value)
            too_large = fill(b, b.sitofp(most, F32), LANES) * (1 / codes.bias)
            above = b.or_(above, b.fcmp_ordered(">", largest.value, too_large.value))
            uneven[0] = uneven[0] | Lanes(b, above)
            write(b, scales.largest_at(b, target, chunk), total.fma(0.0, largest))
            reciprocal = float(LARGEST_WEIGHT) / largest.max(LEAST)
            to = scales.pairs_at(b, target, chunk)
            at_once = 2 if count_of == LANES else 1  # vectors, that hold pairs of tokens
            with loop(b, vectors, at_once) as v:
                at = b.add(floats[1], b.mul(v, I64(BYTES)))
                numbers_of = [
                    read(b, b.add(at, I64(BYTES * k)), F32, LANES).fma(reciprocal, ROUNDER).as_bits()
                    for k in range(at_once)
                ]
                if at_once == 2:
                    words = pair_words(*numbers_of)
                else:
                    lanes_of = range(LANES)
                    words = pair_words(
                        *(
                            numbers_of[0].pick(lane for lane in lanes_of if lane // count_of % 2 == odd)
                            for odd in range(2)
                        )
                    )
                write(b, b.add(to, b.mul(v, I64(BYTES // 2))), words)
        any_ = b.icmp_signed("!=", b.bitcast(uneven[0].value, I16), I16(0))
        flag = b.select(any_, ir.Constant(F32, -1.0), ir.Constant(F32, 0.0))
        b.store(flag, b.inttoptr(target, F32.as_pointer())).align = 4

    return fixed_scales


@functools.cache
def compile_sums(rows, near, stored, scale_format, group, width):
    """Return `attention.narrow_sums` for weights and factors of `softmax` and scales of `fixed_scales`.

    Tokens that pad the last vector of weights have weight 0 and valid row ids.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    parts, count_of = codes.parts(), codes.scales
    at_once = LANES // rows  # tokens
    most_rows = min(rows, LANES // len(parts[0]))
    most_parts = min(len(parts), max(1, LANES // (most_rows * len(parts[0]))))
    pairs = min(at_once // 2, max(1, LANES // count_of))  # pairs of tokens that share a vector of scales

    def weigh(b, weights, scales, count, target):
        """Write weights * scales as [token / 2, row, scale, 2]."""
        with loop(b, count, at_once) as first:
            weights_at = b.add(weights, b.mul(first, I64(2 * rows)))
            weight = read(b, weights_at, I32, LANES // 2)  # [pair, row]
            scales_at = b.add(scales, b.mul(first, I64(2 * count_of)))
            to = b.add(target, b.mul(first, I64(2 * rows * count_of)))
            for begin in range(0, at_once // 2, pairs):
                scale = read(b, b.add(scales_at, I64(4 * begin * count_of)), I32, pairs * count_of)
                order = list(itertools.product(range(pairs), range(rows), range(count_of)))
                size = min(LANES, len(order))
                for k in range(0, len(order), size):
                    chosen = order[k : k + size]
                    of_scale = scale.pick(p * count_of + g for p, _, g in chosen)
                    of_weight = [(begin + p) * rows + r for p, r, _ in chosen]
                    if len(set(of_weight)) == 1:
                        word = word_at(b, b.add(weights_at, I64(4 * of_weight[0])))
                    else:
                        word = weight.pick(of_weight)
                    write(b, b.add(to, I64(4 * (begin * rows * count_of + k))), times(of_scale, word))

    @micro_kernel(13)
    def sums(
        b, weights, values, value_row, row_ids, ahead, shift, count, dim, sums, factors, scales_at, scratch
    ):
        scales = Scales(codes, dim)

        def of_chunk(chosen, chosen_rows, i, largest):
            columns = [elements for part in chosen for elements in parts[part]]
            groups = [tuple(codes.group_of(e) for e in elements) for elements in columns]
            totals = StackSlots(b, [int_zeros(b) for _ in chosen_rows for _ in columns])
            with loop(b, count, 2) as token:
                at, second = [], b.add(token, I64(1))
                for one in (token, second):
                    row = b.add(values, b.mul(row_id_at(b, row_ids, one), value_row))
                    at.append(codes.begin(b, row, i))
                if chosen_rows[0] == 0:
                    for one in (token, second):
                        prefetch_bytes(one, i, chosen)
                value = codes.pairs(b, at, chosen)
                weight_at = b.add(scratch, b.mul(token, I64(2 * rows * count_of)))
                for r, row in enumerate(chosen_rows):
                    of_row = b.add(weight_at, I64(4 * row * count_of))
                    for k, vector in enumerate(value):
                        weight = of_groups(of_row, groups[k])
                        place = r * len(columns) + k
                        totals[place] = dot_pairs(totals[place], vector, weight)
            order = [element for elements in columns for element in elements]
            back = sorted(range(len(order)), key=order.__getitem__)
            for r, row in enumerate(chosen_rows):
                alpha = broadcast(b, b.add(factors, I64(4 * row)), LANES)
                grow = broadcast(b, b.add(factors, I64(BYTES + 4 * row)), LANES)
                whole = []
                for k in range(len(columns)):
                    total = totals[r * len(columns) + k].cast("sitofp", F32)
                    whole.append(total * (largest.pick(groups[k]) * grow))
                whole = concatenate(whole)
                for k in range(0, len(order), LANES):
                    column = b.add(i, I64(order[back[k]]))
                    at = b.add(sums, b.mul(b.add(b.mul(dim, I64(row)), column), I64(4)))
                    write(b, at, read(b, at, F32, LANES).fma(alpha, whole.pick(back[k : k + LANES])))

        def prefetch_bytes(token, i, chosen):
            """Prefetch the lines that begin in these parts; all parts of nibbles share theirs."""
            first, last = (32 * chosen.start, 32 * chosen.stop) if codes.bits == 8 else (0, BYTES)
            if codes.bits == 8 or chosen.start == 0:
                soon = codes.begin(b, b.add(row_id_at(b, ahead, token), shift), i)
                for line in range(-(-first // LINE) * LINE, last, LINE):
                    prefetch(b, b.add(soon, I64(line)), near)

        def of_groups(at, groups):
            if len(set(groups)) == 1:
                return word_at(b, b.add(at, I64(4 * groups[0])))
            return read(b, at, I32, count_of).pick(groups)

        with loop(b, dim, width) as i:
            chunk = b.udiv(i, I64(width))
            largest = read(b, scales.largest_at(b, scales_at, chunk), F32, LANES)
            weigh(b, weights, scales.pairs_at(b, scales_at, chunk), count, scratch)
            for part in range(0, len(parts), most_parts):
                for row in range(0, rows, most_rows):
                    chosen = range(part, part + most_parts)
                    of_chunk(chosen, range(row, row + most_rows), i, largest)

    return sums
