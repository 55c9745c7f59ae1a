"""Wide products of bfloat16 in pairs: two multiplications a lane, added in float32 (AVX-512 BF16).

A lane holds two numbers of one query row. Queries are [dim / 2, row, 2], keys are not rearranged; weights
are [token / 2, row, 2], values panels [dim / 8, token / 2, 8, 2]. The instructions flush subnormals to 0.
"""

from llvmlite import ir
from numba.core import cgutils

from kvkit.cpu.simd.attention import LANES, WIDE
from kvkit.cpu.simd.lanes import (
    F32,
    I16,
    I32,
    I64,
    Lanes,
    StackSlots,
    broadcast,
    loop,
    micro_kernel,
    read,
    write,
    zeros,
)

TILE, HALVES = 8, WIDE // LANES  # tokens, or elements, by vectors of rows
PAIRED = 4 * WIDE  # bytes of a pair for every row


class Bfloat(ir.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, Bfloat)

    __hash__ = ir.Type.__hash__


SUMS, PAIRS = ir.VectorType(F32, LANES), ir.VectorType(Bfloat(), 2 * LANES)


def add_products(sums, x, y):
    """Return sums + x * y, where x and y have two bfloat16 numbers in each lane."""
    b = sums.builder
    signature = ir.FunctionType(SUMS, [SUMS, PAIRS, PAIRS])
    add = cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512")
    return Lanes(b, b.call(add, [sums.value, b.bitcast(x.value, PAIRS), b.bitcast(y.value, PAIRS)]))


def pair_at(b, address):
    """Read the pair at an address into every lane."""
    return Lanes(b, b.bitcast(broadcast(b, address, LANES).value, ir.VectorType(I32, LANES)))


def pair_words(low, high):
    """Round two vectors of float32 to pairs of bfloat16, once."""
    b = low.builder
    signature = ir.FunctionType(PAIRS, [SUMS, SUMS])
    convert = cgutils.get_or_insert_function(b.module, signature, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    both = Lanes(b, b.bitcast(b.call(convert, [high.value, low.value]), ir.VectorType(I16, 2 * LANES)))
    return both.pick(lane // 2 + lane % 2 * LANES for lane in range(2 * LANES))


@micro_kernel(3)
def pair_rows(b, source, rows, target):
    """Convert [rows, WIDE] of float32 to pairs of neighbouring rows; an odd last row pairs with 0."""
    pairs = b.lshr(rows, I64(1))

    def pair(i, alone):
        at, to = b.add(source, b.mul(i, I64(2 * PAIRED))), b.add(target, b.mul(i, I64(PAIRED)))
        low = [read(b, b.add(at, I64(64 * half)), F32, LANES) for half in range(HALVES)]
        high = [read(b, b.add(at, I64(PAIRED + 64 * half)), F32, LANES) for half in range(HALVES)]
        for half in range(HALVES):
            other = zeros(b, LANES)[0] if alone else high[half]
            write(b, b.add(to, I64(64 * half)), pair_words(low[half], other))

    with loop(b, pairs) as i:
        pair(i, False)
    with b.if_then(b.icmp_signed("!=", b.and_(rows, I64(1)), I64(0))):
        pair(pairs, True)


@micro_kernel(6)
def pair_values(b, source, row, tokens, dim, target, panel):
    """Arrange bfloat16 rows in panels of `panel` bytes; an odd last token pairs with 0. 16 divides `dim`.

    Panel by panel, because lines of several panels would push one another out of the nearest cache.
    """
    pairs = b.lshr(tokens, I64(1))
    odd = b.icmp_signed("!=", b.and_(tokens, I64(1)), I64(0))

    def pair(begin, first, t, alone):
        at, to = b.add(begin, b.mul(t, b.mul(row, I64(2)))), b.add(first, b.mul(t, I64(4 * TILE)))
        low = read(b, at, I16, LANES).cast("zext", I32)
        if not alone:
            low = low | (read(b, b.add(at, row), I16, LANES).cast("zext", I32) << 16)
        write(b, to, low.pick(range(TILE)))
        write(b, b.add(to, panel), low.pick(range(TILE, 2 * TILE)))

    with loop(b, dim, LANES) as i:
        begin, first = b.add(source, b.mul(i, I64(2))), b.add(target, b.mul(b.lshr(i, I64(3)), panel))

        with loop(b, pairs) as t:
            pair(begin, first, t, False)
        with b.if_then(odd):
            pair(begin, first, pairs, True)


def products(b, scalars, tile_step, step, vectors, count, start):
    """Do as `wide_products` of simd/attention.py does, over pairs."""
    sums, halves = StackSlots(b, start), len(start) // TILE
    with loop(b, count) as k:
        at = b.add(vectors, b.mul(k, I64(PAIRED)))
        row = [read(b, b.add(at, I64(64 * half)), I32, LANES) for half in range(halves)]
        base = b.add(scalars, b.mul(k, step))
        for t in range(TILE):
            scalar = pair_at(b, b.add(base, b.mul(tile_step, I64(t))))
            for half in range(halves):
                sums[t * halves + half] = add_products(sums[t * halves + half], row[half], scalar)
    return [sums[i] for i in range(TILE * halves)]


def for_rows(b, rows, build):
    """Build a loop over both halves of the query rows, and one over the first for at most 16 rows."""
    with b.if_else(b.icmp_signed("<=", rows, I64(LANES))) as (few, many):
        for case, halves in ((few, 1), (many, HALVES)):
            with case:
                build(halves, [PAIRED * t + 64 * half for t in range(TILE) for half in range(halves)])


@micro_kernel(8)
def scores(b, queries, keys, key_row, count, dim, target, scale, rows):
    """Compute S = scale K Q^T [token, WIDE] for a multiple of 8 tokens; `scale` is an address.

    Of `rows` query rows; if these are at most 16, the others' scores are not written.
    """
    factor = broadcast(b, scale, LANES)

    def build(halves, offsets):
        with loop(b, count, TILE) as first:
            start = zeros(b, LANES, TILE * halves)
            pairs, first_key = b.lshr(dim, I64(1)), b.add(keys, b.mul(first, key_row))
            total = products(b, first_key, key_row, I64(4), queries, pairs, start)
            to = b.add(target, b.mul(first, I64(PAIRED)))
            for offset, vector in zip(offsets, total, strict=True):
                write(b, b.add(to, I64(offset)), vector * factor)

    for_rows(b, rows, build)


@micro_kernel(8)
def sums(b, weights, values, panel, pairs, dim, target, factors, rows):
    """Compute O = O alpha + P V [dim, WIDE]: weights are P, factors alpha; 8 divides dim.

    `rows` are those of `scores`.
    """
    factor = [read(b, b.add(factors, I64(64 * half)), F32, LANES) for half in range(HALVES)]

    def build(halves, offsets):
        with loop(b, dim, TILE) as first:
            to = b.add(target, b.mul(first, I64(PAIRED)))
            places = [b.add(to, I64(offset)) for offset in offsets]
            start = [read(b, address, F32, LANES) * factor[i % halves] for i, address in enumerate(places)]
            first_value = b.add(values, b.mul(b.lshr(first, I64(3)), panel))
            total = products(b, first_value, I64(4), I64(4 * TILE), weights, pairs, start)
            for address, vector in zip(places, total, strict=True):
                write(b, address, vector)

    for_rows(b, rows, build)
