"""Vector forms of products of small float32 matrices that lie in a worker's memory, and what is between them.

A micro-kernel computes four rows of a product, and up to four vectors of columns, in registers.
"""

import functools

from kvkit.cpu.simd.lanes import (
    F32,
    I64,
    LANES,
    StackSlots,
    broadcast,
    exp,
    fill,
    loop,
    micro_kernel,
    where,
    write,
    zeros,
)
from kvkit.cpu.simd.recurrent import BYTES, at, floats, offset, put, total

ROWS = 4  # rows of a product in registers
FORGET = -200.0  # e^-200 is 0 in float32


def rows_of(b, address, pitch):
    """Return the addresses of `ROWS` rows."""
    return [b.add(address, b.mul(pitch, I64(row))) for row in range(ROWS)]


def add_products(b, sums, vectors, a, steps, right, right_pitch, depth, sign=1):
    """Add sign * A B to sums [ROWS * vectors]; A has element (i, k) at a + i steps[0] + k steps[1]."""
    with loop(b, depth) as k:
        line = b.add(right, b.mul(k, right_pitch))
        terms = [floats(b, line, j) for j in range(vectors)]
        for row, place in enumerate(rows_of(b, b.add(a, b.mul(k, steps[1])), steps[0])):
            x = broadcast(b, place, LANES)
            x = -x if sign < 0 else x
            for j in range(vectors):
                sums[row * vectors + j] = x.fma(terms[j], sums[row * vectors + j])


@functools.cache
def product(vectors):
    """Return a micro-kernel that writes four rows of A B."""

    @micro_kernel
    def product(b, target, pitch, a, a_pitch, right, right_pitch, depth):
        sums = StackSlots(b, zeros(b, LANES, ROWS * vectors))
        add_products(b, sums, vectors, a, (a_pitch, I64(4)), right, right_pitch, depth)
        for row, place in enumerate(rows_of(b, target, pitch)):
            for j in range(vectors):
                write(b, at(b, place, j), sums[row * vectors + j])

    return product


@functools.cache
def scaled_sum(vectors, turned):
    """Return a micro-kernel that writes four rows of diag(factors) C + A B over C; `factors` are float32.

    If `turned`, the rows at `a` are columns of A.
    """

    @micro_kernel
    def scaled_sum(b, target, pitch, a, a_pitch, right, right_pitch, depth, factors):
        start, places = [], rows_of(b, target, pitch)
        for row, place in enumerate(places):
            factor = broadcast(b, b.add(factors, I64(4 * row)), LANES)
            start += [floats(b, place, j) * factor for j in range(vectors)]
        sums, steps = StackSlots(b, start), (I64(4), a_pitch) if turned else (a_pitch, I64(4))
        add_products(b, sums, vectors, a, steps, right, right_pitch, depth)
        for row, place in enumerate(places):
            for j in range(vectors):
                write(b, at(b, place, j), sums[row * vectors + j])

    return scaled_sum


@functools.cache
def solution(vectors):
    """Return a micro-kernel that solves four rows of (I + A) D = R, where D lies over R and above is solved.

    A is strictly lower triangular; `a` is the address of the rows, and `depth` the number of rows above.
    """

    @micro_kernel
    def solution(b, solved, target, pitch, a, a_row, depth):
        places = rows_of(b, target, pitch)
        sums = StackSlots(b, [floats(b, place, j) for place in places for j in range(vectors)])
        add_products(b, sums, vectors, a, (a_row, I64(4)), solved, pitch, depth, -1)
        inner = rows_of(b, b.add(a, b.mul(depth, I64(4))), a_row)
        done = [[sums[row * vectors + j] for j in range(vectors)] for row in range(ROWS)]
        for row in range(ROWS):
            for above in range(row):
                x = -broadcast(b, b.add(inner[row], I64(4 * above)), LANES)
                done[row] = [x.fma(done[above][j], done[row][j]) for j in range(vectors)]
            for j in range(vectors):
                write(b, at(b, places[row], j), done[row][j])

    return solution


def decay_between(high, low, other_high, other_low):
    """Return e^(c - c') of two sums of logarithms, each in two float32 parts."""
    return exp((high - other_high) + (low - other_low))


@micro_kernel
def decay_rows(b, row, sums, low, beta, keys, queries, system, weights, count):
    """Write row i of A = beta_i (K K') Gamma below the diagonal, and of P = (Q K') Gamma up to it.

    `sums` and `low` are the two parts of c [chunk]; Gamma_ij = e^(c_i - c_j). `count` vectors are written.
    """
    number = fill(b, b.sitofp(row, F32), LANES)
    place = b.mul(row, I64(4))
    high_i, low_i = (broadcast(b, b.add(x, place), LANES) for x in (sums, low))
    gate = broadcast(b, beta, LANES)
    with loop(b, count) as j:
        column = fill(b, b.sitofp(b.mul(j, I64(LANES)), F32), LANES)
        column = column + [float(lane) for lane in range(LANES)]
        high_j, low_j = (floats(b, offset(b, x, j, BYTES)) for x in (sums, low))
        gamma = decay_between(high_i, low_i, high_j, low_j)
        key, query = (floats(b, offset(b, x, j, BYTES)) * gamma for x in (keys, queries))
        write(b, offset(b, system, j, BYTES), where(column, ">=", number, 0.0, key * gate))
        write(b, offset(b, weights, j, BYTES), where(column, ">", number, 0.0, query))


@micro_kernel
def triangle_rows(b, row, beta, system, weights, count):
    """Keep row i of A below the diagonal, times beta_i, and of P up to it; zeros elsewhere."""
    number, gate = fill(b, b.sitofp(row, F32), LANES), broadcast(b, beta, LANES)
    with loop(b, count) as j:
        column = fill(b, b.sitofp(b.mul(j, I64(LANES)), F32), LANES)
        column = column + [float(lane) for lane in range(LANES)]
        key, query = (floats(b, offset(b, x, j, BYTES)) for x in (system, weights))
        write(b, offset(b, system, j, BYTES), where(column, ">=", number, 0.0, key * gate))
        write(b, offset(b, weights, j, BYTES), where(column, ">", number, 0.0, query))


@micro_kernel
def decayed(b, x, high, low, other_high, other_low, target, count):
    """Write x e^(c - c') of `count` vectors, for two rows of sums of logarithms in two parts."""
    with loop(b, count) as i:
        y, *sums = (floats(b, offset(b, each, i, BYTES)) for each in (x, high, low, other_high, other_low))
        write(b, offset(b, target, i, BYTES), y * decay_between(*sums))


@micro_kernel
def decayed_pair(b, x, y, high, low, other_high, other_low, x_target, y_target, count):
    """Write x e^(c - c') and y e^(c - c') of `count` vectors."""
    with loop(b, count) as i:
        first, second, *sums = (
            floats(b, offset(b, each, i, BYTES)) for each in (x, y, high, low, other_high, other_low)
        )
        factor = decay_between(*sums)
        write(b, offset(b, x_target, i, BYTES), first * factor)
        write(b, offset(b, y_target, i, BYTES), second * factor)


@micro_kernel
def running_sums(b, g, high, low, pitch, rows, count):
    """Write the sums of rows 0 to i of g, [rows, count vectors], each in two float32 parts.

    g is cut off at `FORGET`; NaN stays NaN.
    """
    with loop(b, count) as j:
        slots, column = StackSlots(b, zeros(b, LANES, 2)), b.mul(j, I64(BYTES))
        with loop(b, rows) as i:
            here = b.add(column, b.mul(i, pitch))
            x = floats(b, b.add(g, here))
            x = where(x, "<", FORGET, FORGET, x)
            before = slots[0]
            after = before + x
            added = after - before
            slots[0] = after
            slots[1] = slots[1] + ((before - (after - added)) + (x - added))  # what the sum has lost
            write(b, b.add(high, here), after)
            write(b, b.add(low, here), slots[1])


@micro_kernel
def count_beyond(b, first, middle, last, limit, target, count):
    """Write how many channels fall by more than a limit from c to c', or from c' to c''; NaN counts."""
    most, sums = broadcast(b, limit, LANES), StackSlots(b, zeros(b, LANES))
    with loop(b, count) as i:
        x, y, z = (floats(b, offset(b, each, i, BYTES)) for each in (first, middle, last))
        for fall in (x - y, y - z):
            sums[0] = sums[0] + where(fall, "<=", most, 0.0, fall.full(1.0))
    put(b, target, total(sums[0]))


@micro_kernel
def pair_sums(b, query, key, other, high, low, other_high, other_low, key_target, query_target, count):
    """Write the sums over channels of k_i k_j e^(c_i - c_j) and of q_i k_j e^(c_i - c_j)."""
    slots = StackSlots(b, zeros(b, LANES, 2))
    with loop(b, count) as i:
        rows = query, key, other, high, low, other_high, other_low
        q, k, y, *sums = (floats(b, offset(b, each, i, BYTES)) for each in rows)
        y = y * decay_between(*sums)
        slots[0], slots[1] = k.fma(y, slots[0]), q.fma(y, slots[1])
    put(b, key_target, total(slots[0]))
    put(b, query_target, total(slots[1]))


@micro_kernel
def right_sides(b, v, product, factor, target, count):
    """Write R = beta (v - decay product) of `count` vectors; `factor` are the float32 beta and decay."""
    gate, decay = broadcast(b, factor, LANES), broadcast(b, b.add(factor, I64(4)), LANES)
    with loop(b, count) as i:
        x = floats(b, offset(b, v, i, BYTES))
        y = floats(b, offset(b, product, i, BYTES))
        write(b, offset(b, target, i, BYTES), (x - y * decay) * gate)
