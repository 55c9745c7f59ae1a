"""Wide products over codes by integers (AVX-512 VNNI), with a lane for each of 32 query rows.

S = scale K Q^T      Keys are unpacked to 16-bit integers; a lane multiplies two elements with those of its
                     query. Queries are [dim / 2, row, 2], fixed point of 16 bits in units of a power of 2.
                     Numbers of bfloat16 keep their bits if they are at least 1/128 of the largest of their
                     row, numbers of float16 if at least 1/16. What is lost of others is a second array of
                     queries, whose scores are added if it matters. Products that share a scale are added up
                     as integers.
O = O alpha + P V    Values of two tokens are side by side, [token / 2, dim, 2]; a lane multiplies them with
                     its two weights. Weights are multiplied with the scales first, as in simd/integers.py.
"""

import functools

from llvmlite import ir

from kvkit.cpu.simd import integers, lanes
from kvkit.cpu.simd.attention import LOWEST, WIDE
from kvkit.cpu.simd.integers import BYTES, LARGEST_WEIGHT, ROUNDER, CodeVectors, int_zeros, pair_words
from kvkit.cpu.simd.lanes import F32, I16, I32, I64, LANES, loop, micro_kernel, read, write

HALVES = WIDE // LANES
EXPONENT_BITS = 0x7F800000  # of float32
ROW = 4 * WIDE  # bytes of 32 numbers or pairs, one for each query row
LOST = 2.0**-17  # of the length of a row of queries: what may be lost without a second array
TOKENS = 4  # tokens whose sums of integers and of floats fit the registers


class Eights:
    """The places of eight codes c0..c7 in unpacked rows, in 32-bit words of two 16-bit integers.

    A word has two codes of a key, or a code of each of two tokens' values x and y. `unpack` and
    `side_by_side` leave 4-bit codes that were neighbours one vector (64 bytes) apart, and values two:

        8 bits    keys     c0 c1 | c2 c3 | c4 c5 | c6 c7
                  values   x0 y0 | x1 y1 | x2 y2 | x3 y3      64 bytes later   x4 y4 | x5 y5 | x6 y6 | x7 y7
        4 bits    keys     c0 c4         64 bytes later   c1 c5           then   c2 c6   and   c3 c7
                  values   x0 y0 | x4 y4      128 bytes later   x1 y1 | x5 y5      and so on

    c0..c7 are neighbouring elements, but in q4_0, where a byte has elements 0 and 16: 0, 16, 1, 17, 2, ...
    """

    def __init__(self, codes):
        self.codes = codes
        if codes.bits == 8:
            self.elements = list(range(8))
            self.pairs = [(2 * k, 2 * k + 1) for k in range(4)]  # the elements of a key's words
            self.keys = [4 * k for k in range(4)]  # byte offsets of words
            self.values = [4 * c for c in range(4)] + [BYTES + 4 * c for c in range(4)]
        else:
            in_block = [2 * (c // 4) + c % 4 // 2 + 16 * (c % 2) for c in range(8)]
            self.elements = in_block if codes.nibbles_apart else list(range(8))
            self.pairs = [(self.elements[k], self.elements[k + 4]) for k in range(4)]
            self.keys = [BYTES * k for k in range(4)]
            self.values = [2 * BYTES * (c % 4) + 4 * (c // 4) for c in range(8)]

    def first(self, b, i):
        """Return element c0 of the eight codes that begin at code i, a multiple of 8, in unpacked order."""
        if self.codes.nibbles_apart:
            return b.add(b.and_(i, I64(-32)), b.lshr(b.and_(i, I64(31)), I64(1)))
        return i

    def key(self, b, i):
        """Return the byte offset of the eight codes from i on in an unpacked key."""
        if self.codes.bits == 8:
            return b.mul(i, I64(2))
        width = self.codes.width
        return b.add(b.mul(b.and_(i, I64(-width)), I64(2)), b.lshr(b.and_(i, I64(width - 1)), I64(1)))

    def value(self, b, i):
        """Return the byte offset of the eight codes from i on in the unpacked values of two tokens."""
        if self.codes.bits == 8:
            return b.add(b.mul(b.and_(i, I64(-32)), I64(4)), b.mul(b.and_(i, I64(31)), I64(2)))
        width = self.codes.width
        chunk, j = b.mul(b.and_(i, I64(-width)), I64(4)), b.lshr(b.and_(i, I64(width - 1)), I64(3))
        quarter, half, place = b.lshr(j, I64(2)), b.and_(b.lshr(j, I64(1)), I64(1)), b.and_(j, I64(1))
        offset = b.add(b.mul(quarter, I64(16)), b.add(b.mul(half, I64(BYTES)), b.mul(place, I64(8))))
        return b.add(chunk, offset)

    def unpack(self, b, at):
        """Return the codes of a chunk as 16-bit integers, 32 in a vector."""
        codes = self.codes
        if codes.bits == 8:
            return [codes.bytes(b, at, k, 32).cast("sext", I16) for k in range(0, codes.width, 32)]
        words = codes.bytes(b, at, 0, BYTES)
        if codes.stored_unsigned:
            words = words.apply("xor", 0x88)
        words = words.as_bits(16)  # of four codes; vector n gets nibble n of each, with its sign
        return [(words << 12 - 4 * n if n < 3 else words).signed_rshift(12) for n in range(4)]


def halves(b, address, element=F32):
    """Read numbers or pairs of all 32 query rows, in two vectors."""
    return [read(b, b.add(address, I64(BYTES * half)), element, LANES) for half in range(HALVES)]


@functools.cache
def compile_fixed_queries(stored, scale_format, group, width):
    """Return f(queries [dim, WIDE], dim, target, rest, number), which writes factors, then integers.

    The integers are [dim / 2, WIDE, 2] in the order of `Eights`. The largest of a row becomes less than 2^15:
    queries are 16-bit floats, so it is at least one of their units below the next power of 2. What integers
    do not hold goes to `rest` [dim, WIDE], which may be `queries`. The float32 at `number` becomes 1 if it is
    more than `LOST` of some row, else 0.
    """
    eights = Eights(CodeVectors(stored, scale_format, group, width))

    @micro_kernel
    def fixed_queries(b, queries, dim, target, rest, number):
        largest, zero_or_nan = (lanes.StackSlots(b, lanes.zeros(b, LANES, HALVES)) for _ in range(2))
        with loop(b, dim) as i:
            for half, query in enumerate(halves(b, b.add(queries, b.mul(i, I64(ROW))))):
                largest[half] = largest[half].max(abs(query))
                zero_or_nan[half] = query.fma(0.0, zero_or_nan[half])  # NaN, if one is not finite
        reciprocal, units = [], []
        for half in range(HALVES):
            bits = largest[half].max(integers.LEAST).as_bits() & EXPONENT_BITS  # of the power of 2 below
            power = bits.cast("bitcast", F32)
            write(b, b.add(target, I64(BYTES * half)), (power + zero_or_nan[half]) * 2.0**-14)
            reciprocal.append(2.0**14 / power)
            units.append(power * -(2.0**-14))
        squares, lost = (lanes.StackSlots(b, lanes.zeros(b, LANES, HALVES)) for _ in range(2))
        with loop(b, dim, 8) as i:
            first = b.add(queries, b.mul(eights.first(b, i), I64(ROW)))
            to = b.add(b.add(target, I64(ROW)), b.mul(i, I64(ROW // 2)))
            for k, pair in enumerate(eights.pairs):
                both = [halves(b, b.add(first, I64(ROW * element))) for element in pair]
                for half in range(HALVES):
                    rounded = [x[half].fma(reciprocal[half], ROUNDER) for x in both]
                    words = pair_words(*(x.as_bits() for x in rounded))
                    write(b, b.add(to, I64(ROW * k + BYTES * half)), words)
                    for element, x, near in zip(pair, both, rounded, strict=True):
                        left = (near - ROUNDER).fma(units[half], x[half])
                        offset = b.add(b.mul(eights.first(b, i), I64(ROW)), I64(ROW * element + BYTES * half))
                        write(b, b.add(rest, offset), left)
                        squares[half] = x[half].fma(x[half], squares[half])
                        lost[half] = left.fma(left, lost[half])
        more = [
            b.fcmp_ordered(">", lost[half].value, (squares[half] * LOST**2).value) for half in range(HALVES)
        ]
        any_ = b.icmp_signed("!=", b.bitcast(b.or_(*more), I16), I16(0))
        flag = b.select(any_, ir.Constant(F32, 1.0), ir.Constant(F32, 0.0))
        b.store(flag, b.inttoptr(number, F32.as_pointer())).align = 4

    return fixed_queries


@functools.cache
def unpack_keys(stored, scale_format, group, width):
    """Return f(keys, key_row, scale_base, scale_row, row_ids, count, dim, target), which unpacks keys.

    A row has 4 * dim bytes: integers in the first half, scales as float32 in the second.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    eights = Eights(codes)

    @micro_kernel
    def unpack_keys(b, keys, key_row, scale_base, scale_row, row_ids, count, dim, target):
        with loop(b, count) as token:
            number = lanes.row_id_at(b, row_ids, token)
            row, scale_at = b.add(keys, b.mul(number, key_row)), b.add(scale_base, b.mul(number, scale_row))
            to = b.add(target, b.mul(token, b.mul(dim, I64(4))))
            scales_to = b.add(to, b.mul(dim, I64(2)))
            with loop(b, dim, width) as i:
                at = codes.chunk_at(b, row, i)
                for k, vector in enumerate(eights.unpack(b, at)):
                    write(b, b.add(to, b.mul(b.add(i, I64(32 * k)), I64(2))), vector)
                scale = lanes.widen(codes.raw_scales(b, at, scale_at, i), codes.scale_format)
                write(b, b.add(scales_to, b.mul(b.udiv(i, I64(codes.group)), I64(4))), scale)

    return unpack_keys


@functools.cache
def compile_scores(stored, scale_format, group, width):
    """Return f(queries, keys, count, dim, scores, scale), which computes S [token, WIDE].

    Queries and keys are those of the functions above; 8 divides `count`; `scale` is an address.
    """
    codes = CodeVectors(stored, scale_format, group, width)
    eights, group = Eights(codes), codes.group
    run = min(group, width)

    @micro_kernel
    def scores(b, queries, keys, count, dim, scores, scale):
        factor = [unit * lanes.broadcast(b, scale, LANES) for unit in halves(b, queries)]
        key_row = b.mul(dim, I64(4))
        with loop(b, count, TOKENS) as first:
            row = [b.add(keys, b.mul(b.add(first, I64(t)), key_row)) for t in range(TOKENS)]
            total = lanes.StackSlots(b, lanes.zeros(b, LANES, TOKENS * HALVES))
            with loop(b, dim, run) as i:
                sums = lanes.StackSlots(b, [int_zeros(b)] * (TOKENS * HALVES))
                with loop(b, I64(run), 8) as j:
                    eight = b.add(i, j)
                    query_at = b.add(b.add(queries, I64(ROW)), b.mul(eight, I64(ROW // 2)))
                    offset = eights.key(b, eight)
                    key_at = [b.add(at, offset) for at in row]
                    for k in range(4):
                        query = halves(b, b.add(query_at, I64(ROW * k)), I32)
                        for t in range(TOKENS):
                            key = lanes.word_at(b, b.add(key_at[t], I64(eights.keys[k])))
                            for half in range(HALVES):
                                place = t * HALVES + half
                                sums[place] = integers.dot_pairs(sums[place], query[half], key)
                scale_at = b.add(b.mul(dim, I64(2)), b.mul(b.udiv(i, I64(group)), I64(4)))
                for t in range(TOKENS):
                    scale = lanes.broadcast(b, b.add(row[t], scale_at), LANES)
                    for place in range(t * HALVES, (t + 1) * HALVES):
                        total[place] = sums[place].cast("sitofp", F32).fma(scale, total[place])
            to = b.add(scores, b.mul(first, I64(ROW)))
            for place in range(TOKENS * HALVES):
                scaled = total[place] * factor[place % HALVES]
                write(b, b.add(to, I64(BYTES * place)), scaled.fma(0.0, scaled))  # makes infinity NaN

    return scores


def pair_bytes(b, dim):
    """Return the byte stride of values of two tokens: no power of 2, so that all cache sets are used."""
    return b.add(b.mul(dim, I64(4)), I64(BYTES))


@functools.cache
def unpack_values(stored, scale_format, group, width):
    """Return f(values, value_row, row_ids, count, dim, target), which writes [token / 2, dim, 2]."""
    codes = CodeVectors(stored, scale_format, group, width)
    eights = Eights(codes)

    @micro_kernel
    def unpack_values(b, values, value_row, row_ids, count, dim, target):
        with loop(b, count, 2) as token:
            rows = [
                b.add(values, b.mul(lanes.row_id_at(b, row_ids, b.add(token, I64(t))), value_row))
                for t in (0, 1)
            ]
            to = b.add(target, b.mul(b.lshr(token, I64(1)), pair_bytes(b, dim)))
            with loop(b, dim, width) as i:
                both = (eights.unpack(b, codes.chunk_at(b, row, i)) for row in rows)
                for k, vectors in enumerate(zip(*both, strict=True)):
                    at = b.add(to, b.mul(b.add(i, I64(32 * k)), I64(4)))
                    for half in range(2):
                        write(b, b.add(at, I64(BYTES * half)), integers.side_by_side(vectors, 4 * half))

    return unpack_values


@micro_kernel
def softmax(b, scores, count, m_at, l_at, factors):
    """Replace S [token, WIDE] as `integers.compile_softmax` does; P is [token / 2, row, 2], padded with 0."""
    for half in range(HALVES):
        offset = I64(BYTES * half)
        half_softmax(b, count, *(b.add(at, offset) for at in (scores, m_at, l_at, factors)))


def half_softmax(b, count, scores, m_at, l_at, factors):
    """Compute `softmax` for 16 of the rows."""
    pairs, odd = b.lshr(count, I64(1)), b.and_(count, I64(1))
    m_before = read(b, m_at, F32, LANES)
    largest = lanes.StackSlots(b, [read(b, scores, F32, LANES)])
    with loop(b, count) as i:
        largest[0] = largest[0].max(read(b, b.add(scores, b.mul(i, I64(ROW))), F32, LANES))
    m_new, m_block = m_before.max(largest[0]), largest[0].max(LOWEST)
    base = m_new.max(LOWEST)
    alpha, factor = lanes.exp(m_before - base), lanes.exp(m_block - base)
    sums = lanes.StackSlots(b, lanes.zeros(b, LANES))

    def weight(token):
        score = read(b, b.add(scores, b.mul(token, I64(ROW))), F32, LANES)
        rounded = integers.weight_of(score - m_block).fma(float(LARGEST_WEIGHT), ROUNDER)
        sums[0] = sums[0] + (rounded - ROUNDER)
        return rounded.as_bits()

    with loop(b, pairs) as i:
        token = b.mul(i, I64(2))
        words = pair_words(weight(token), weight(b.add(token, I64(1))))
        write(b, b.add(scores, b.mul(i, I64(ROW))), words)
    with b.if_then(b.icmp_signed("!=", odd, I64(0))):
        words = weight(b.mul(pairs, I64(2))) & 0xFFFF
        write(b, b.add(scores, b.mul(pairs, I64(ROW))), words)
    write(b, m_at, m_new)
    write(b, l_at, read(b, l_at, F32, LANES).fma(alpha, sums[0] * factor * (1 / LARGEST_WEIGHT)))
    write(b, factors, alpha)
    write(b, b.add(factors, I64(ROW)), factor * ((LARGEST_WEIGHT + 1) / LARGEST_WEIGHT**2))


@functools.cache
def compile_sums(stored, scale_format, group, width):
    """Return f(weights, values, scales, count, dim, sums, factors), which computes O [dim, WIDE]."""
    codes = CodeVectors(stored, scale_format, group, width)
    eights, run = Eights(codes), min(codes.group, width)

    @micro_kernel
    def sums(b, weights, values, scales_at, count, dim, sums, factors):
        scales = integers.Scales(codes, dim)
        alpha, block_factor = halves(b, factors), halves(b, b.add(factors, I64(ROW)))
        pairs, step = b.lshr(b.add(count, I64(1)), I64(1)), pair_bytes(b, dim)
        with loop(b, dim, run) as i:
            chunk = b.udiv(i, I64(width))
            of_group = b.mul(b.udiv(b.urem(i, I64(width)), I64(codes.group)), I64(4))
            scale_at = b.add(scales.pairs_at(b, scales_at, chunk), of_group)
            largest = lanes.broadcast(b, b.add(scales.largest_at(b, scales_at, chunk), of_group), LANES)
            unit = [largest * x for x in block_factor]
            with loop(b, I64(run), 8) as j:
                eight = b.add(i, j)
                value_at = b.add(values, eights.value(b, eight))
                totals = lanes.StackSlots(b, [int_zeros(b)] * (8 * HALVES))
                with loop(b, pairs) as pair:
                    scale = lanes.word_at(b, b.add(scale_at, b.mul(pair, I64(4 * codes.scales))))
                    weight = [
                        integers.times(x, scale)
                        for x in halves(b, b.add(weights, b.mul(pair, I64(ROW))), I32)
                    ]
                    at = b.add(value_at, b.mul(pair, step))
                    for c, offset in enumerate(eights.values):
                        value = lanes.word_at(b, b.add(at, I64(offset)))
                        for half in range(HALVES):
                            k = c * HALVES + half
                            totals[k] = integers.dot_pairs(totals[k], weight[half], value)
                first = b.add(sums, b.mul(eights.first(b, eight), I64(ROW)))
                for c, element in enumerate(eights.elements):
                    for half in range(HALVES):
                        into = b.add(first, I64(ROW * element + BYTES * half))
                        product = totals[c * HALVES + half].cast("sitofp", F32) * unit[half]
                        write(b, into, read(b, into, F32, LANES).fma(alpha[half], product))

    return sums
