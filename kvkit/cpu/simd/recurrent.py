"""Vector forms of the gated delta rule, over states of float32 whose rows are multiples of 16 elements.

sk = S'(k e^g)   sq = S'(q e^g)   delta = beta v - erase sk   o = scale (sq + delta (k . q))
S <- diag(e^g) S + k delta'

So a state is read for both sums at once, then written. "KV" states [dk, dv] take two passes, columns side by
side; "VK" states [dv, dk] take one, eight rows at a time. Both prefetch the state that comes next.
"""

import functools

from llvmlite import ir

from kvkit.cpu.simd.lanes import (
    F32,
    I32,
    I64,
    LANES,
    Lanes,
    StackSlots,
    broadcast,
    call_intrinsic,
    exp,
    loop,
    micro_kernel,
    prefetch,
    read,
    sums_of,
    where,
    write,
    zeros,
)

BYTES = 4 * LANES  # of a vector
GROUP = 8  # rows of a "VK" state at a time
LINE = 64  # bytes of a cache line
ZERO_BELOW = -87.0  # e^g is 0 below


def at(b, address, vector):
    """Return the address of a vector, by its number."""
    return b.add(address, I64(vector * BYTES)) if vector else address


def floats(b, address, vector=0):
    """Read a vector of float32."""
    return read(b, at(b, address, vector), F32, LANES)


def offset(b, address, index, size):
    """Return address + index * size."""
    return b.add(address, b.mul(index, I64(size) if isinstance(size, int) else size))


def total(vector):
    """Return the sum of all lanes, in every lane."""
    for distance in (8, 4, 2, 1):
        vector = vector + vector.rotate(distance)
    return vector


def put(b, address, vector):
    """Write the first lane of a vector as a float32."""
    number = b.extract_element(vector.value, I32(0))
    b.store(number, b.inttoptr(address, F32.as_pointer())).align = 4


@micro_kernel
def decay_of(b, source, target, count):
    """Write e^g of `count` vectors; 0 below `ZERO_BELOW`. NaN stays NaN."""
    with loop(b, count) as i:
        x = floats(b, offset(b, source, i, BYTES))
        low = where(x, "<", ZERO_BELOW, ZERO_BELOW, x)
        y = where(x, "<", ZERO_BELOW, 0.0, exp(low))
        nan = b.fcmp_unordered("uno", x.value, x.value)
        write(b, offset(b, target, i, BYTES), Lanes(b, b.select(nan, x.value, y.value)))


@micro_kernel
def multiply_by_vector(b, source, factors, target, count):
    """Write the products of `count` vectors with as many factors."""
    with loop(b, count) as i:
        x = floats(b, offset(b, source, i, BYTES)) * floats(b, offset(b, factors, i, BYTES))
        write(b, offset(b, target, i, BYTES), x)


@micro_kernel
def multiply_by_number(b, source, factor, target, count):
    """Write `count` vectors times the float32 at `factor`."""
    number = broadcast(b, factor, LANES)
    with loop(b, count) as i:
        write(b, offset(b, target, i, BYTES), floats(b, offset(b, source, i, BYTES)) * number)


@micro_kernel
def dot(b, x, y, target, count):
    """Write the dot product of `count` vectors."""
    sums = StackSlots(b, zeros(b, LANES))
    with loop(b, count) as i:
        sums[0] = floats(b, offset(b, x, i, BYTES)).fma(floats(b, offset(b, y, i, BYTES)), sums[0])
    put(b, target, total(sums[0]))


@micro_kernel
def errors(b, v, sums, gates, target, count):
    """Write delta = beta v - erase sk; `gates` are the float32 beta and erase."""
    beta, erase = broadcast(b, gates, LANES), broadcast(b, b.add(gates, I64(4)), LANES)
    with loop(b, count) as i:
        x = floats(b, offset(b, v, i, BYTES)) * beta
        x = (-floats(b, offset(b, sums, i, BYTES))).fma(erase, x)
        write(b, offset(b, target, i, BYTES), x)


@micro_kernel
def readouts(b, sums, delta, factors, target, count):
    """Write o = scale (sq + delta (k . q)); `factors` are the float32 scale and k . q."""
    scale, product = broadcast(b, factors, LANES), broadcast(b, b.add(factors, I64(4)), LANES)
    with loop(b, count) as i:
        x = floats(b, offset(b, delta, i, BYTES)).fma(product, floats(b, offset(b, sums, i, BYTES)))
        write(b, offset(b, target, i, BYTES), x * scale)


@functools.cache
def column_sums(vectors):
    """Return a micro-kernel that writes sk and sq of `vectors` vectors of columns of a "KV" state.

    A row is `pitch` bytes. Each row prefetches the next `vectors` / 2 lines of the memory at `ahead`.
    """

    @micro_kernel
    def column_sums(b, state, pitch, rows, k, q, sk, sq, ahead):
        of_k, of_q = (StackSlots(b, zeros(b, LANES, vectors)) for _ in range(2))
        with loop(b, rows) as i:
            row = offset(b, state, i, pitch)
            key, query = (broadcast(b, offset(b, x, i, 4), LANES) for x in (k, q))
            for j in range(vectors):
                s = floats(b, row, j)
                of_k[j], of_q[j] = s.fma(key, of_k[j]), s.fma(query, of_q[j])
            prefetch_lines(b, ahead, i, vectors // 2)
        for j in range(vectors):
            write(b, at(b, sk, j), of_k[j])
            write(b, at(b, sq, j), of_q[j])

    return column_sums


def prefetch_lines(b, ahead, i, lines):
    """Prefetch the `lines` lines that belong to row i."""
    for line in range(lines):
        prefetch(b, b.add(offset(b, ahead, i, lines * LINE), I64(line * LINE)))


@functools.cache
def column_update(vectors):
    """Return a micro-kernel that writes `vectors` vectors of columns of diag(decay) S + k delta'."""

    @micro_kernel
    def column_update(b, state, pitch, rows, decay, k, delta, ahead):
        deltas = [floats(b, delta, j) for j in range(vectors)]
        with loop(b, rows) as i:
            row = offset(b, state, i, pitch)
            factor, key = (broadcast(b, offset(b, x, i, 4), LANES) for x in (decay, k))
            for j in range(vectors):
                write(b, at(b, row, j), floats(b, row, j).fma(factor, deltas[j] * key))
            prefetch_lines(b, ahead, i, vectors // 2)

    return column_update


@micro_kernel
def row_sums(b, state, pitch, vectors, k, q, sk, sq, ahead):
    """Write sk and sq of eight rows of a "VK" state, and prefetch eight rows at `ahead`."""
    slots = StackSlots(b, zeros(b, LANES, 2 * GROUP))
    with loop(b, vectors) as i:
        key, query = (floats(b, offset(b, x, i, BYTES)) for x in (k, q))
        for row in range(GROUP):
            place = offset(b, b.add(state, b.mul(pitch, I64(row))), i, BYTES)
            s = floats(b, place)
            slots[row], slots[GROUP + row] = s.fma(key, slots[row]), s.fma(query, slots[GROUP + row])
            prefetch(b, offset(b, b.add(ahead, b.mul(pitch, I64(row))), i, BYTES))
    sums = sums_of([slots[i] for i in range(2 * GROUP)])
    write(b, sk, sums.pick(range(GROUP)))
    write(b, sq, sums.pick(range(GROUP, 2 * GROUP)))


@micro_kernel
def row_update(b, state, pitch, vectors, decay, k, delta):
    """Write eight rows of diag(decay) S + k delta', of a "VK" state."""
    deltas = [broadcast(b, b.add(delta, I64(4 * row)), LANES) for row in range(GROUP)]
    with loop(b, vectors) as i:
        factor, key = (floats(b, offset(b, x, i, BYTES)) for x in (decay, k))
        for row in range(GROUP):
            place = offset(b, b.add(state, b.mul(pitch, I64(row))), i, BYTES)
            write(b, place, floats(b, place).fma(factor, key * deltas[row]))


def logistic(x):
    """Return 1 / (1 + e^-x)."""
    small = where(x, "<", -87.0, -87.0, x)
    small = where(small, ">", 87.0, 87.0, small)
    return 1.0 / (exp(-small) + 1.0)


def log1p(y):
    """Return log(1 + y) of lanes from 0 to 1, as 2 artanh(y / (2 + y))."""
    z = y / (y + 2.0)
    square = z * z
    series = square.full(1 / 17)
    for odd in (15, 13, 11, 9, 7, 5, 3, 1):
        series = series.fma(square, 1 / odd)
    return series * z * 2.0


def softplus(x):
    """Return log(1 + e^x)."""
    size = abs(x).min(87.0)
    return x.max(0.0) + log1p(exp(-size))


def keep_nan(x, result):
    """Return the result, but NaN where x is NaN."""
    nan = x.builder.fcmp_unordered("uno", x.value, x.value)
    return Lanes(x.builder, x.builder.select(nan, x.value, result.value))


@micro_kernel
def decay_gates(b, a, rates, biases, target, count, bound):
    """Write g of `count` vectors of a; `rates` are e^A_log. With the address of a bound: bound sigmoid(..).

    `bound` is the address of two float32: the bound, and 1 if it is used.
    """
    limit, bounded = broadcast(b, bound, LANES), broadcast(b, b.add(bound, I64(4)), LANES)
    with loop(b, count) as i:
        x = floats(b, offset(b, a, i, BYTES)) + floats(b, offset(b, biases, i, BYTES))
        rate = floats(b, offset(b, rates, i, BYTES))
        free, below = -rate * softplus(x), limit * logistic(rate * x)
        use = b.fcmp_ordered(">", bounded.value, bounded.of(0.0))
        g = Lanes(b, b.select(use, below.value, free.value))
        write(b, offset(b, target, i, BYTES), keep_nan(x, g))


@micro_kernel
def write_gates(b, x, factor, target, count):
    """Write factor * sigmoid(x) of `count` vectors."""
    number = broadcast(b, factor, LANES)
    with loop(b, count) as i:
        vector = floats(b, offset(b, x, i, BYTES))
        write(b, offset(b, target, i, BYTES), keep_nan(vector, logistic(vector) * number))


@functools.cache
def conv_row(width):
    """Return a micro-kernel that convolves `count` vectors of channels; with `silu` != 0 it applies SiLU.

    The inputs of the token are rows `pitch` bytes apart, the oldest first, and so are the `width` weights.
    """

    @micro_kernel
    def conv_row(b, inputs, pitch, weights, weight_pitch, bias, target, count, silu):
        use = b.icmp_signed("!=", silu, I64(0))
        one = ir.Constant(ir.VectorType(ir.IntType(1), LANES), ir.Undefined)
        first = b.insert_element(one, use, I32(0))
        in_lanes = b.shuffle_vector(first, one, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
        with loop(b, count) as i:
            y = floats(b, offset(b, bias, i, BYTES))
            for j in range(width):
                x = floats(b, offset(b, b.add(inputs, b.mul(pitch, I64(j))), i, BYTES))
                w = floats(b, offset(b, b.add(weights, b.mul(weight_pitch, I64(j))), i, BYTES))
                y = x.fma(w, y)
            active = keep_nan(y, y * logistic(y))
            y = Lanes(b, b.select(in_lanes, active.value, y.value))
            write(b, offset(b, target, i, BYTES), y)

    return conv_row


@micro_kernel
def normalize(b, x, eps, count):
    """Divide `count` vectors by their length sqrt(sum of x^2 + eps), in place."""
    sums = StackSlots(b, zeros(b, LANES))
    with loop(b, count) as i:
        y = floats(b, offset(b, x, i, BYTES))
        sums[0] = y.fma(y, sums[0])
    squares = total(sums[0]) + broadcast(b, eps, LANES)
    factor = 1.0 / call_intrinsic(b, f"llvm.sqrt.v{LANES}f32", squares.type, squares.value)
    with loop(b, count) as i:
        place = offset(b, x, i, BYTES)
        write(b, place, floats(b, place) * factor)
