"""Wide products and softmax by tiles (AMX), for 32 query rows of bfloat16 or of float16.

    S = K Q^T                  [tokens, WIDE]    A: rows of keys as they lie, B: pairs of query elements
    m' = max(m, c max S)       P = 2^(c S - m')  in pairs of tokens, l' = l 2^(m - m') + sum P
    O = O 2^(m - m') + V^T P   [dim, WIDE]       A: values [16 elements, 32 tokens], B: pairs of weights

Here m is in powers of 2, and c is scale * log2(e). An old m stays until a new one is LAZY larger, so that O
is rarely rescaled: weights up to 2^LAZY lose nothing. Of eight tiles, 0 to 3 are sums of 32 tokens (or
elements) by 32 rows, 4 and 5 are A, 6 and 7 are B.

A float16 number is the sum of two terms of bfloat16, exactly: x = x0 + x1, where x0 is x rounded to 8 bits.
So scores have four products for each one, whose sums are those of float32: exp makes the relative error of a
weight from the absolute one of its score, and 2^-18 of a score of 1,000 is more than float16 rounds. Weights
have two terms too, of 16 bits in all; sums leave x1 y1 out, which is below 2^-18 of the whole. Two terms of a
float32, as of a code times its scale, hold 16 bits; queries and weights beside them have one, as over rows of
bfloat16.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.attention import LOWEST, transposed_vectors
from kvkit.cpu.simd.lanes import (
    F32,
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
from kvkit.cpu.simd.pairs import PAIRED, interleave
from kvkit.cpu.simd.tiles import ROW, ROWS, Tiles
from kvkit.formats.elements import BY_NAME

STEP = 2 * ROWS  # tokens, or elements, of a step
LAZY, LOG2E, LN2 = 8.0, 1.4426950408889634, 0.6931471805599453
HIGH = 0xFFFF0000  # of a word: the bits of its second bfloat16
GROUP_BYTES = 16  # of an entry of the list of keys: address and stride of 16 rows


@functools.cache
def state(in_memory, step):
    """Return the micro-kernel that opens or closes the thread's tiles, by the name of the step."""

    @micro_kernel
    def state(b):
        getattr(Tiles(b, in_memory=in_memory), step)()

    return state


class Terms(NamedTuple):
    """The terms of bfloat16 that hold a number: of keys and values, and of queries and weights."""

    rows: int
    queries: int
    element: str  # of keys and values before they are split into terms
    scaled: bool = False  # whether rows have a scale each, in narrow tiles

    def products(self, of_scores: bool) -> list[tuple[int, int]]:
        """Return the terms (of A, of B) that are multiplied: for scores all, for sums not term 1 by term 1.

        Each product has a term of the one before, whose tiles are loaded.
        """
        order = [(1, 0), (0, 0), (0, 1), (1, 1)]
        return order[2 - self.rows : 1 + self.queries + (of_scores and self.rows == self.queries == 2)]


BFLOAT16, FLOAT16 = Terms(1, 1, "bfloat16"), Terms(2, 2, "float16")
CODES = Terms(2, 1, "float32")


def read_terms(b, address, element, terms):
    """Read 32 numbers of an element as bfloat16: a list of their terms."""
    if element == "bfloat16":
        return [read(b, address, I16, 2 * LANES)]
    pairs = pair_terms([read_floats(b, address, element, half) for half in range(2)], terms)
    return [x.as_bits(16).pick(i % LANES * 2 + i // LANES for i in range(2 * LANES)) for x in pairs]


def read_floats(b, address, element, half):
    """Read 16 numbers of an element, the first or the second ones at an address, as float32."""
    at = b.add(address, I64(half * BY_NAME[element].bytes(LANES)))
    return lanes.widen(read(b, at, RAW[element], LANES), element)


def pair_terms(both, terms):
    """Return pairs of bfloat16 for two vectors of float32: term 0 is rounded, ties away from 0, term 1 cut.

    Term 1 of a NaN is NaN.
    """
    first = [(x.as_bits().plus(0x8000) & HIGH).cast("bitcast", F32) for x in both]
    vectors = [first, [x - y for x, y in zip(both, first, strict=True)]][:terms]
    return [(x.as_bits() >> 16) | (y.as_bits() & HIGH) for x, y in vectors]


@functools.cache
def pack_queries(terms):
    """Return the micro-kernel that packs query rows of bfloat16, or of float16 in two terms, as B."""
    element = "float16" if terms.queries == 2 else "bfloat16"

    @micro_kernel
    def pack_queries(b, addresses, live, dim, target):
        """Write `live` rows at `addresses` as pairs [dim / 2, WIDE, 2], and zeros for others; then term 1."""
        last = b.sub(live, I64(1))
        for half in range(2):
            rows, inside = [], []
            for r in range(LANES):
                row = I64(LANES * half + r)
                inside.append(b.icmp_signed("<=", row, last))
                rows.append(lanes.row_id_at(b, addresses, b.select(inside[r], row, last)))
            with loop(b, dim, STEP) as i:
                places = [b.add(row, b.mul(i, I64(2))) for row in rows]
                to = b.add(target, b.add(b.mul(i, I64(PAIRED // 2)), I64(ROW * half)))
                both = zip(*(read_terms(b, at, element, terms.queries) for at in places), strict=True)
                for term, parts in enumerate(both):
                    words = [x.as_bits() for x in parts]
                    words = [Lanes(b, b.select(inside[r], x.value, x.of(0))) for r, x in enumerate(words)]
                    to_term = b.add(to, b.mul(dim, I64(term * PAIRED // 2)))
                    for k, column in enumerate(transposed_vectors(words)):
                        write(b, b.add(to_term, I64(PAIRED * k)), column)

    return pack_queries


@functools.cache
def split_rows(terms):
    """Return the micro-kernel that splits rows into two terms."""
    element_bytes = BY_NAME[terms.element].dtype.itemsize

    @micro_kernel
    def split_rows(b, addresses, count, dim, target, between):
        """Write term 0 of rows [tokens, dim], and `between` bytes further on term 1."""
        with loop(b, count) as t:
            row, to = lanes.row_id_at(b, addresses, t), b.add(target, b.mul(b.mul(t, dim), I64(2)))
            with loop(b, dim, STEP) as i:
                at, offset = b.add(row, b.mul(i, I64(element_bytes))), b.mul(i, I64(2))
                parts = read_terms(b, at, terms.element, terms.rows)
                for part, place in zip(parts, (to, b.add(to, between)), strict=True):
                    write(b, b.add(place, offset), part)

    return split_rows


@functools.cache
def scores(in_memory, terms):
    """Return the micro-kernel of S = K Q^T."""

    @micro_kernel
    def scores(b, queries, groups, key_term, count, dim, target, ahead, each):
        """Compute S [token, WIDE] of `count` tokens, rounded up to 32; 32 divides `dim`.

        `groups` lists (address, stride) of every 16 rows of keys, two entries for each 32 tokens. Term 1 of
        keys lies `key_term` bytes after term 0. Between products, `each` of the rows at the addresses `ahead`
        are prefetched for every 32 tokens, a line of each at a time.
        """
        tiles = Tiles(b, in_memory=in_memory)
        with loop(b, count, STEP) as t:
            add_scores(b, tiles, queries, groups, key_term, t, dim, terms, (ahead, each))
            store_scores(b, tiles, target, t)

    return scores


def add_scores(b, tiles, queries, groups, key_term, t, dim, terms, prefetches, between=None):
    """Compute scores of 32 tokens from t on in tiles 0 to 3.

    `between`(i, number) emits the fourths 0 to 3 of what stands between the products of elements from i on.
    """
    for tile in range(4):
        tiles.zero(tile)
    # (address, stride) of both groups of 16 keys from token t on
    entry = b.add(groups, b.mul(t, I64(GROUP_BYTES // ROWS)))
    keys = [[lanes.row_id_at(b, entry, I64(2 * half + i)) for i in range(2)] for half in range(2)]
    ahead, each = prefetches
    first_row = b.mul(b.sdiv(t, I64(STEP)), each)
    with loop(b, dim, STEP) as i:
        factors = []
        for key, query in terms.products(of_scores=True):
            offset = b.add(b.mul(i, I64(2)), b.mul(key_term, I64(key)))
            to_query = b.mul(b.add(i, b.mul(dim, I64(query))), I64(PAIRED // 2))
            rows = [(b.add(at, offset), row) for at, row in keys]
            factors.append((key, rows, query, (b.add(queries, to_query), PAIRED)))
        multiply_terms(b, tiles, factors, functools.partial(between, i) if between else None)
        with loop(b, each) as k:
            row = lanes.row_id_at(b, ahead, b.add(first_row, k))
            lanes.prefetch(b, b.add(row, b.mul(i, I64(2))))


def store_scores(b, tiles, target, t):
    """Store tiles 0 to 3 as scores of 32 tokens from t on."""
    for tile, place in enumerate(corners(b, b.add(target, b.mul(t, I64(PAIRED))))):
        tiles.store(tile, place, PAIRED)


@functools.cache
def sums(in_memory, terms):
    """Return the micro-kernel of O = O + V^T P."""

    @micro_kernel
    def sums(b, weights, values, tokens, count, dim, target):
        """Add the first `count` of the block's `tokens` to O [dim, WIDE]; 32 divides all three."""
        tiles, size = Tiles(b, in_memory=in_memory), b.mul(tokens, I64(2 * ROWS))
        value_term, row = b.mul(b.mul(tokens, dim), I64(2)), weight_row(terms)
        with loop(b, dim, STEP) as i:
            places = corners(b, b.add(target, b.mul(i, I64(PAIRED))))
            for tile, place in enumerate(places):
                tiles.load(tile, place, PAIRED)
            strip = b.add(values, b.mul(b.lshr(i, I64(4)), size))
            with loop(b, count, STEP) as t:
                factors = []
                for value, weight in terms.products(of_scores=False):
                    at = b.add(b.add(strip, b.mul(value_term, I64(value))), b.mul(t, I64(ROW // 2)))
                    rows = (at, I64(ROW)), (b.add(at, size), I64(ROW))
                    of_weight = b.add(b.add(weights, I64(PAIRED * weight)), b.mul(t, I64(row // 2)))
                    factors.append((value, rows, weight, (of_weight, row)))
                multiply_terms(b, tiles, factors)
            for tile, place in enumerate(places):
                tiles.store(tile, place, PAIRED)

    return sums


def weight_row(terms):
    """Return the bytes of the weights of two tokens."""
    return terms.queries * PAIRED


def multiply_terms(b, tiles, factors, between=None):
    """Add products of two tiles of A and both halves of B, for each of the `factors`.

    These are (term, (address, stride) of both tiles of A; term, (address, stride) of B). A term that the
    products before had is not loaded again. `between`(0 to 3) is emitted after each fourth of the products.
    """
    last, done = (None, None), 0
    for left_term, rows, right_term, (at, row) in factors:
        left = [] if left_term == last[0] else [(4, *rows[0]), (5, *rows[1])]
        right = [] if right_term == last[1] else [(6, at, row), (7, b.add(at, I64(ROW)), row)]
        last = left_term, right_term
        # products of C, A and B, after loads of the tiles that they are the first to have
        steps = [
            (0, 4, 6, left[:1] + right[:1]), (1, 4, 7, right[1:]), (2, 5, 6, left[1:]), (3, 5, 7, [])
        ]  # fmt: skip
        for c, x, y, loads in steps:
            for load in loads:
                tiles.load(*load)
            tiles.multiply(c, x, y)
            done += 1
            if between and done % len(factors) == 0:
                between(done // len(factors) - 1)


def corners(b, at):
    """Return the addresses of tiles 0 to 3 in [32, WIDE] of float32."""
    return [b.add(at, I64(tile // 2 * ROWS * PAIRED + tile % 2 * ROW)) for tile in range(4)]


@functools.cache
def transpose_values(terms):
    """Return the micro-kernel that makes A of values."""
    element_bytes = BY_NAME[terms.element].dtype.itemsize

    @micro_kernel
    def transpose_values(b, addresses, count, tokens, dim, target):
        """Write rows of values as tiles [dim / 16][tokens / 32] of [16 elements, 32 tokens]; then term 1.

        Zeros follow the last of `count` tokens, up to whole tiles; 32 divides `tokens` and `dim`. Rows are at
        `addresses`.
        """
        last, size = b.sub(count, I64(1)), b.mul(tokens, I64(2 * ROWS))
        term_bytes = b.mul(b.mul(tokens, dim), I64(2))
        with loop(b, b.and_(b.add(count, I64(STEP - 1)), I64(-STEP)), STEP) as t:
            left, rows = b.sub(count, t), []
            for k in range(STEP):
                token = b.add(t, I64(k))
                token = b.select(b.icmp_signed("<=", token, last), token, last)
                rows.append(lanes.row_id_at(b, addresses, token))
            left = b.trunc(b.select(b.icmp_signed("<", left, I64(STEP)), left, I64(STEP)), I16)
            numbers = Lanes(b, ir.Constant(ir.VectorType(I16, STEP), [*range(STEP)]))
            seen = b.icmp_signed("<", numbers.value, lanes.fill(b, left, STEP).value)
            seen = Lanes(b, b.sext(seen, numbers.type)).as_bits()
            with loop(b, dim, STEP) as i:
                places = [b.add(row, b.mul(i, I64(element_bytes))) for row in rows]
                to = b.add(target, b.add(b.mul(b.lshr(i, I64(4)), size), b.mul(t, I64(2 * ROWS))))
                for half, term, column, vector in value_columns(b, places, terms):
                    place = b.add(to, I64(ROW * column))
                    place = b.add(place, size) if half else place
                    write(b, b.add(place, term_bytes) if term else place, vector & seen)

    return transpose_values


def value_columns(b, places, terms):
    """Yield 32 columns of 32 values at each of the `places`: (half, term, number in the half, column)."""
    if terms.rows == 1:
        values = [read(b, at, I16, 2 * LANES) for at in places]
        both = [interleave(values[k], values[k + 1]) for k in range(0, STEP, 2)]
        columns = [column for part in zip(*both, strict=True) for column in transposed_vectors(part)]
        for element in range(2 * LANES):
            column = columns[element // 8 * 4 + element % 4 + element % 8 // 4 * LANES]
            yield element // LANES, 0, element % LANES, column
        return
    for half in range(2):
        values = [read_floats(b, at, terms.element, half) for at in places]
        pairs = [pair_terms(values[k : k + 2], terms.rows) for k in range(0, STEP, 2)]
        for term, words in enumerate(zip(*pairs, strict=True)):
            for number, column in enumerate(transposed_vectors(words)):
                yield half, term, number, column


@micro_kernel
def grow_maximum(b, scores, count, m_at, l_at, sums, dim, scale):
    """Update m by scores of `count` tokens; where it grew by much, rescale l and O [dim, WIDE].

    Scores after `count` become -inf, up to a multiple of 32. `scale` is the address of a positive number.
    Where scores are finite and c S is not, m is LOWEST, and l stays 0 (see `natural_maximum`).
    """
    minus_inf = Lanes(b, ir.Constant(ir.VectorType(F32, LANES), [float("-inf")] * LANES))
    whole = b.and_(b.add(count, I64(STEP - 1)), I64(-STEP))
    with loop(b, b.sub(whole, count)) as t:
        for half in range(2):
            write(b, score_at(b, scores, b.add(count, t), half), minus_inf)
    c = lanes.broadcast(b, scale, LANES) * LOG2E
    largest = StackSlots(b, [minus_inf] * 4)
    with loop(b, whole, 4) as t:
        for k in range(8):
            at = score_at(b, scores, b.add(t, I64(k // 2)), k % 2)
            largest[k % 4] = largest[k % 4].max(read(b, at, F32, LANES))
    old, new, grown = [], [], []
    for half in range(2):
        top = largest[half].max(largest[half + 2])
        top = (top * c).max(top.min(LOWEST))
        old.append(read(b, b.add(m_at, I64(ROW * half)), F32, LANES))
        more = b.fcmp_ordered(">", top.value, (old[half] + LAZY).value)
        new.append(Lanes(b, b.select(more, top.value, old[half].value)))
        grown.append(b.bitcast(more, I16))
    with b.if_then(b.icmp_unsigned("!=", b.or_(*grown), I16(0))):
        alpha = [power_of_two(old[half] - new[half].max(LOWEST)) for half in range(2)]
        for half in range(2):
            at = b.add(l_at, I64(ROW * half))
            write(b, at, read(b, at, F32, LANES) * alpha[half])
            write(b, b.add(m_at, I64(ROW * half)), new[half])
        with loop(b, dim, 4) as i:
            for k in range(8):
                at = score_at(b, sums, b.add(i, I64(k // 2)), k % 2)
                write(b, at, read(b, at, F32, LANES) * alpha[k % 2])


@micro_kernel
def natural_maximum(b, m_at, l_at, count):
    """Turn m from powers of 2 to powers of e; 16 divides `count`.

    Where m is finite and l is 0, all scores of a row are so low that c S is -inf, as those of the lowest
    float32 of a mask. Then l becomes NaN, so that the work item runs again, in powers of e.
    """
    with loop(b, b.mul(count, I64(4)), 4 * LANES) as at:
        m, l = (read(b, b.add(place, at), F32, LANES) for place in (m_at, l_at))
        write(b, b.add(m_at, at), m * LN2)
        low = b.and_(b.fcmp_ordered(">", m.value, m.of(-math.inf)), b.fcmp_ordered("==", l.value, l.of(0.0)))
        write(b, b.add(l_at, at), Lanes(b, b.select(low, l.of(math.nan), l.value)))


class TileWeights:
    """Emits P = 2^(c S - m) in pairs of tokens, [tokens / 2, term, WIDE, 2], and l."""

    def __init__(self, b, scores, m_at, l_at, scale, target, terms):
        self.b, self.scores, self.l_at, self.target, self.terms = b, scores, l_at, target, terms
        self.c = lanes.broadcast(b, scale, LANES) * LOG2E
        self.m = [read(b, b.add(m_at, I64(ROW * half)), F32, LANES).max(LOWEST) for half in range(2)]
        self.l = StackSlots(b, [read(b, b.add(l_at, I64(ROW * half)), F32, LANES) for half in range(2)])

    def two_tokens(self, t):
        """Write P of tokens t and t + 1."""
        b, packed = self.b, []
        for half in range(2):
            at = score_at(b, self.scores, t, half)
            pair = [
                power_of_two(read(b, b.add(at, I64(PAIRED * k)), F32, LANES) * self.c - self.m[half])
                for k in range(2)
            ]
            self.l[half] = self.l[half] + (pair[0] + pair[1])
            packed.append(pair_terms(pair, self.terms.queries))
        to = b.add(self.target, b.mul(t, I64(weight_row(self.terms) // 2)))
        for half, terms in enumerate(packed):
            for term, vector in enumerate(terms):
                write(b, b.add(to, I64(PAIRED * term + ROW * half)), vector)

    def write_sums(self):
        """Write l."""
        for half in range(2):
            write(self.b, self.b.add(self.l_at, I64(ROW * half)), self.l[half])


@functools.cache
def weights(terms):
    """Return the micro-kernel of P = 2^(c S - m)."""

    @micro_kernel
    def weights(b, scores, count, m_at, l_at, scale, target):
        """Write P, in pairs of tokens, and update l; 32 divides `count`."""
        p = TileWeights(b, scores, m_at, l_at, scale, target, terms)
        with loop(b, count, 2) as t:
            p.two_tokens(t)
        p.write_sums()

    return weights


@functools.cache
def weights_and_scores(in_memory, terms):
    """Return the micro-kernel of `weights` of a tile and `scores` of the next one, step by step.

    So vectors are computed while the processor multiplies tiles. The next scores take the place of S, whose
    lines are in the L1 cache.
    """

    @micro_kernel
    def weights_and_scores(
        b, scores, count, m_at, l_at, scale, target, queries, groups, key_term, dim, ahead, each
    ):  # fmt: skip
        p = TileWeights(b, scores, m_at, l_at, scale, target, terms)
        tiles = Tiles(b, in_memory=in_memory)
        with loop(b, count, STEP) as t:

            def weigh(i, number, t=t):
                first = b.lshr(i, I64(2))  # of eight tokens, whose weights are computed between four products
                with b.if_then(b.icmp_signed("<", first, I64(STEP))):
                    p.two_tokens(b.add(t, b.add(first, I64(2 * number))))

            add_scores(b, tiles, queries, groups, key_term, t, dim, terms, (ahead, each), weigh)
            begin = b.lshr(dim, I64(2))
            with loop(b, b.sub(I64(STEP), begin), 2) as k:
                p.two_tokens(b.add(t, b.add(begin, k)))
            store_scores(b, tiles, scores, t)
        p.write_sums()

    return weights_and_scores


def score_at(b, scores, token, half):
    """Return the address of half of the rows of a token."""
    return b.add(scores, b.add(b.mul(token, I64(PAIRED)), I64(ROW * half)))


@functools.cache
def power_series(degree):
    """Return coefficients of 2^x on [0, 1), the highest first; relative errors are small everywhere."""
    x = 0.5 + 0.5 * np.cos(np.pi * (np.arange(64) + 0.5) / 64)
    powers = np.vander(x, degree + 1) * 2.0 ** -x[:, None]
    return [float(c) for c in np.linalg.lstsq(powers, np.ones(64), rcond=None)[0]]


def power_of_two(x):
    """Return 2 to the power of lanes below 128 (AVX-512), within 3e-7 of it: -inf gives 0, NaN gives NaN.

    A polynomial of degree 4 errs by 4e-6, which shows in lse.
    """
    b, mask = x.builder, ir.Constant(I16, 0xFFFF)
    reduce, scale = "llvm.x86.avx512.mask.reduce.ps.512", "llvm.x86.avx512.mask.scalef.ps.512"
    first, *others = power_series(5)
    rest = lanes.call_intrinsic(b, reduce, x.type, x.value, I32(1), x.value, mask, I32(4))  # x - floor(x)
    total = x.full(first)
    for coefficient in others:
        total = total.fma(rest, coefficient)
    return lanes.call_intrinsic(b, scale, x.type, total.value, x.value, x.value, mask, I32(4))
