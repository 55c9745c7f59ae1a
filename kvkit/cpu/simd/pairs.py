"""Wide products of bfloat16 in pairs: two multiplications a lane, added in float32 (AVX-512 BF16).

A lane adds two products: in scores of two neighbouring elements of a query row, in sums of the weights and
values of two neighbouring tokens. Queries are [dim / 2, row, 2] and weights [token / 2, row, 2]. Keys and
values are not rearranged in memory: sums interleave two rows in registers. The instructions flush subnormals
to 0.
"""

from llvmlite import ir

from kvkit.cpu.simd import lanes
from kvkit.cpu.simd.attention import WIDE
from kvkit.cpu.simd.chunks import for_chunks
from kvkit.cpu.simd.lanes import F32, I16, I32, I64, LANES, loop, micro_kernel, read, write

TILE, HALVES = 8, WIDE // LANES  # tokens, or elements, by vectors of rows
PAIRED = 4 * WIDE  # bytes of a pair for every row


class Bfloat(ir.Type):
    """LLVM's type bfloat, which llvmlite does not have."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, Bfloat)

    __hash__ = ir.Type.__hash__


SUMS, PAIRS = ir.VectorType(F32, LANES), ir.VectorType(Bfloat(), 2 * LANES)


def add_products(sums, x, y):
    """Return sums + x * y, where x and y have two bfloat16 numbers in each lane."""
    b = sums.builder
    pairs = (b.bitcast(vector.value, PAIRS) for vector in (x, y))
    return lanes.call_intrinsic(b, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, sums.value, *pairs)


def bfloat16_pairs(low, high):
    """Round two vectors of float32 to bfloat16, once, and pair their lanes."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    both = lanes.call_intrinsic(low.builder, name, PAIRS, high.value, low.value).cast("bitcast", I16)
    return both.pick(lane // 2 + lane % 2 * LANES for lane in range(2 * LANES))


@micro_kernel
def pair_rows(b, source, rows, target):
    """Convert [rows, WIDE] of float32 to pairs of neighbouring rows; an odd last row pairs with 0."""
    pairs = b.lshr(rows, I64(1))

    def pair(i, alone):
        at, to = b.add(source, b.mul(i, I64(2 * PAIRED))), b.add(target, b.mul(i, I64(PAIRED)))
        low = [read(b, b.add(at, I64(64 * half)), F32, LANES) for half in range(HALVES)]
        high = [read(b, b.add(at, I64(PAIRED + 64 * half)), F32, LANES) for half in range(HALVES)]
        for half in range(HALVES):
            other = lanes.zeros(b, LANES)[0] if alone else high[half]
            write(b, b.add(to, I64(64 * half)), bfloat16_pairs(low[half], other))

    with loop(b, pairs) as i:
        pair(i, False)
    with b.if_then(b.icmp_signed("!=", b.and_(rows, I64(1)), I64(0))):
        pair(pairs, True)


def interleave(x, y):
    """Return the words of two vectors alternately, as one vector of pairs for each 16 words.

    With 32 words the first vector has the first four of each eight, because words move only within 128 bits.
    """
    if x.count == LANES:
        return [x.pick([word // 2 + word % 2 * LANES for word in range(2 * LANES)], y).as_bits()]
    parts = [[8 * (word // 8) + word % 8 // 2 + word % 2 * x.count for word in range(x.count)]]
    parts.append([word + 4 for word in parts[0]])
    return [x.pick(part, y).as_bits() for part in parts]


@micro_kernel
def scores(b, queries, addresses, ahead, count, dim, target, scale, rows):
    """Compute S = scale K Q^T [token, WIDE] of keys at `addresses`, whose number 8 divides.

    `scale` is an address. If there are at most 16 query `rows`, scores of the others are not written. Rows at
    the addresses `ahead`, unless it is 0, are prefetched, a line at a time between products.
    """
    factor = lanes.broadcast(b, scale, LANES)

    def multiply(halves):
        with loop(b, count, TILE) as first:
            keys = [lanes.row_id_at(b, addresses, b.add(first, I64(t))) for t in range(TILE)]
            total = lanes.StackSlots(b, lanes.zeros(b, LANES, TILE * halves))
            with loop(b, b.lshr(dim, I64(1))) as k:
                at = b.add(queries, b.mul(k, I64(PAIRED)))
                query = [read(b, b.add(at, I64(64 * half)), I32, LANES) for half in range(halves)]
                with b.if_then(b.icmp_signed("!=", ahead, I64(0))):
                    token = b.add(first, b.and_(b.lshr(k, I64(1)), I64(TILE - 1)))
                    line = b.shl(b.lshr(k, I64(4)), I64(6))
                    lanes.prefetch(b, b.add(lanes.row_id_at(b, ahead, token), line))
                for t, key in enumerate(keys):
                    pair = lanes.word_at(b, b.add(key, b.mul(k, I64(4))))
                    for half in range(halves):
                        i = t * halves + half
                        total[i] = add_products(total[i], query[half], pair)
            for i in range(TILE * halves):
                to = b.add(target, b.mul(b.add(first, I64(i // halves)), I64(PAIRED)))
                write(b, b.add(to, I64(64 * (i % halves))), total[i] * factor)

    with b.if_else(b.icmp_signed("<=", rows, I64(LANES))) as (few, many):
        with few:
            multiply(1)
        with many:
            multiply(HALVES)


@micro_kernel
def sums(b, weights, addresses, pairs, dim, target, factors, rows):
    """Compute O = O alpha + P V of [rows, dim] from `pairs` of values at `addresses`.

    `factors` are alpha; 8 divides `rows`, and 16 `dim`. `in_order` returns the elements of O to their order.
    """

    def add(first, vectors):
        with loop(b, rows, TILE) as row:
            places, factor = [], []
            for r in range(TILE):
                member = b.add(row, I64(r))
                factor.append(lanes.broadcast(b, b.add(factors, b.mul(member, I64(4))), LANES))
                at = b.add(target, b.mul(b.add(b.mul(member, dim), first), I64(4)))
                places += [b.add(at, I64(64 * i)) for i in range(vectors)]
            start = [read(b, at, F32, LANES) * factor[i // vectors] for i, at in enumerate(places)]
            total, offset = lanes.StackSlots(b, start), b.mul(first, I64(2))
            with loop(b, pairs) as k:
                tokens = [b.add(b.mul(k, I64(2)), I64(t)) for t in range(2)]
                values = [
                    read(b, b.add(lanes.row_id_at(b, addresses, token), offset), I16, vectors * LANES)
                    for token in tokens
                ]
                parts = interleave(*values)
                at = b.add(b.add(weights, b.mul(k, I64(PAIRED))), b.mul(row, I64(4)))
                for r in range(TILE):
                    weight = lanes.word_at(b, b.add(at, I64(4 * r)))
                    for i, part in enumerate(parts):
                        total[r * vectors + i] = add_products(total[r * vectors + i], part, weight)
            for i, at in enumerate(places):
                write(b, at, total[i])

    for_chunks(b, dim, (2, 1), add)


@micro_kernel
def in_order(b, source, target, rows, dim):
    """Copy O [rows, dim] of `sums` with its elements in their order."""
    order = [element // 8 * 4 + element % 4 + element % 8 // 4 * LANES for element in range(2 * LANES)]
    with loop(b, rows) as row:
        line = b.mul(b.mul(row, dim), I64(4))

        def copy(first, vectors):
            at = b.add(line, b.mul(first, I64(4)))
            part = read(b, b.add(source, at), F32, vectors * LANES)
            write(b, b.add(target, at), part.pick(order) if vectors == 2 else part)

        for_chunks(b, dim, (2, 1), copy)
