"""Run the gated delta rule over prompts in chunks, as products of matrices (the WY form).

For rows i, j of a chunk, c_i = g_0 + .. + g_i and Gamma_ij = e^(c_i - c_j) for j <= i, else 0:

A = beta (K K') Gamma, strictly below the diagonal
(I + A) D = beta (V - e^c K S)                    rows of D are the errors delta
O = scale (e^c Q S + ((Q K') Gamma) D)
S <- e^c_last S + (K e^(c_last - c))' D

With a decay for each channel (KDA), Gamma is inside the products over channels. A block of 16 rows has a row
r as reference, so that both are products of matrices again:

A = beta (K e^(c - c_r)) (K e^(c_r - c))', strictly below the diagonal
P = (Q e^(c - c_r)) (K e^(c_r - c))'

r is the block's middle. If a channel falls too far from there, the block's own pairs are summed one by one.
Transposed keys of earlier blocks follow the reference, and are those of the last row at the end.

A worker takes the value heads that share a key head, for all chunks of a sequence. Sums of g are kept as two
float32 numbers, so that differences are exact before the exponential. Subnormal numbers count as 0, because
processors compute a hundred times slower with them, and strong decays make many.
"""

import functools

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.launches import WORKER, Launch, Record, run_in_scratch, threads
from kvkit.cpu.recurrent.rows import load_row, move_row
from kvkit.cpu.recurrent.tokens import LINE, common_fields, state_of, workspace
from kvkit.cpu.simd import attention, products
from kvkit.cpu.simd import recurrent as simd
from kvkit.cpu.simd.lanes import LANES, padded, restore_float_control, subnormals_as_zero
from kvkit.formulas.index import share
from kvkit.runtime.jit import compiled, helper

PARAMS = Record(
    "workers sequences heads q_heads k_heads dk dv k_vectors v_vectors load store norm numbers",
    "q q_token q_head k k_token k_head v v_token v_head out out_token out_head",
    "g channels beta begins ends reads writes state slot_bytes head_bytes element transposed",
    "load_state store_state load_gate chunk together k_pitch v_pitch c_pitch scratch scratch_bytes",
)
# Matrices in a worker's memory: [chunk, dk], [chunk, dv], [chunk, chunk]; turned is [dk, chunk].
WORK = Record(
    "k q turned k_decayed q_decayed high low v d product output key_gram query_gram system weights",
    "beta decays rests last line zeros ones factors sides limit block states",
)
WORK_BYTES = 512
record, work_at, integers = memory.record(PARAMS), memory.record(WORK), memory.integers
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
ZERO, ONE = types.float32(0), types.float32(1)
ROWS = products.ROWS  # of a product in registers
FORGET = types.float64(products.FORGET)
FALL = types.float32(40)  # of a channel to or from a block's reference: e^80 is a float32
product4, product1 = map(products.product, (4, 1))
weighted4, weighted1 = (products.scaled_sum(vectors, False) for vectors in (4, 1))
errors4, errors1 = (products.scaled_sum(vectors, True) for vectors in (4, 1))
solution4, solution1 = map(products.solution, (4, 1))


@helper
def lay_out(work, params, begin):
    """Divide a worker's memory."""
    rows, at = params.chunk, begin + WORK_BYTES
    tall = params.k_vectors * LANES
    key, value, square = rows * params.k_pitch, rows * params.v_pitch, rows * params.c_pitch
    work.k, work.q, work.k_decayed, work.q_decayed = at, at + key, at + 2 * key, at + 3 * key
    work.high, work.low = at + 4 * key, at + 5 * key
    at += 6 * key
    work.v, work.d, work.product, work.output = at, at + value, at + 2 * value, at + 3 * value
    at += 4 * value
    work.key_gram, work.query_gram, work.system, work.weights = (
        at,
        at + square,
        at + 2 * square,
        at + 3 * square,
    )
    at += 4 * square
    work.turned = at
    at += tall * params.c_pitch
    wide = max(params.k_pitch, params.v_pitch, params.c_pitch)
    work.beta, work.decays, work.rests, work.last = at, at + wide, at + 2 * wide, at + 3 * wide
    work.line, work.zeros, work.ones, work.factors = (
        at + 4 * wide,
        at + 5 * wide,
        at + 6 * wide,
        at + 7 * wide,
    )
    work.sides, work.limit = at + 8 * wide, at + 9 * wide
    at += 10 * wide
    work.block = at
    work.states = at + LANES * params.k_pitch
    put_float(work.limit, FALL)
    for i in range(wide // 4):
        put_float(work.zeros + 4 * i, ZERO)
        put_float(work.ones + 4 * i, ONE)


@helper
def multiply(target, pitch, a, a_pitch, right, right_pitch, size):
    """Write A B; `size` is (rows, vectors of columns, depth)."""
    rows, vectors, depth = size
    j = 0
    while j < vectors:
        at = 4 * LANES * j
        step = 4 if vectors - j >= 4 else 1
        for i in range(0, rows, ROWS):
            to, left = target + i * pitch + at, a + i * a_pitch
            if step == 4:
                product4(to, pitch, left, a_pitch, right + at, right_pitch, depth)
            else:
                product1(to, pitch, left, a_pitch, right + at, right_pitch, depth)
        j += step


@helper
def add_weighted(params, work, rows):
    """Write O <- diag(decays) O + P D, where P is lower triangular."""
    pitch, square, j = params.v_pitch, params.c_pitch, 0
    while j < params.v_vectors:
        at, left = 4 * LANES * j, params.v_vectors - j
        step = 4 if left >= 4 else 1
        for i in range(0, rows, ROWS):
            to, a, factors = work.output + i * pitch + at, work.weights + i * square, work.decays + 4 * i
            if step == 4:
                weighted4(to, pitch, a, square, work.d + at, pitch, i + ROWS, factors=factors)
            else:
                weighted1(to, pitch, a, square, work.d + at, pitch, i + ROWS, factors=factors)
        j += step


@helper
def add_errors(params, work, state, rows):
    """Write S <- diag(last) S + K' D, with K' itself where each channel decays."""
    pitch, j, turned = params.v_pitch, 0, params.channels > 1
    step_of_keys = params.c_pitch if turned else params.k_pitch
    while j < params.v_vectors:
        at, left = 4 * LANES * j, params.v_vectors - j
        step = 4 if left >= 4 else 1
        for i in range(0, params.k_vectors * LANES, ROWS):
            to, factors, errors = state + i * pitch + at, work.last + 4 * i, work.d + at
            a = work.turned + i * step_of_keys if turned else work.k + 4 * i
            if turned and step == 4:
                weighted4(to, pitch, a, step_of_keys, errors, pitch, rows, factors=factors)
            elif turned:
                weighted1(to, pitch, a, step_of_keys, errors, pitch, rows, factors=factors)
            elif step == 4:
                errors4(to, pitch, a, step_of_keys, errors, pitch, rows, factors=factors)
            else:
                errors1(to, pitch, a, step_of_keys, errors, pitch, rows, factors=factors)
        j += step


@helper
def solve(work, params, rows):
    """Solve (I + A) D = R in place of R."""
    j, pitch = 0, params.v_pitch
    while j < params.v_vectors:
        at, left = 4 * LANES * j, params.v_vectors - j
        step = 4 if left >= 4 else 1
        for i in range(0, rows, ROWS):
            solved, target, a = work.d + at, work.d + i * pitch + at, work.system + i * params.c_pitch
            if step == 4:
                solution4(solved, target, pitch, a, params.c_pitch, i)
            else:
                solution1(solved, target, pitch, a, params.c_pitch, i)
        j += step


@helper
def load_rows(load, source, step, counts, size, target, pitch):
    """Widen rows of `size` elements; `counts` is (rows, those with zeros behind them)."""
    for i in range(counts[0]):
        move_row(load, source + i * step, target + i * pitch, size)
    for i in range(counts[0], counts[1]):
        for j in range(pitch // 4):
            put_float(target + i * pitch + 4 * j, ZERO)


@helper
def load_keys(params, work, token, head, count, rows):
    """Write K and its transpose."""
    source = params.k + token * params.k_token + head * params.k_heads // params.heads * params.k_head
    load_rows(params.load, source, params.k_token, (count, rows), params.dk, work.k, params.k_pitch)
    if params.norm:
        for i in range(count):
            simd.normalize(work.k + i * params.k_pitch, params.numbers + 4, params.k_vectors)
    if params.channels == 1:
        turn(work.k, params.k_pitch, rows, params.k_vectors * LANES, work.turned, params.c_pitch)


@helper
def turn(source, pitch, rows, columns, target, target_pitch):
    """Write the transpose of a matrix, whose sizes are multiples of 16."""
    for i in range(0, rows, LANES):
        for j in range(0, columns, LANES):
            place, to = source + i * pitch + 4 * j, target + j * target_pitch + 4 * i
            attention.transpose(place, pitch, to, target_pitch)


@helper
def load_queries(params, work, token, query, count, rows):
    """Write scale Q."""
    source = params.q + token * params.q_token + query * params.q_head
    load_rows(params.load, source, params.q_token, (count, rows), params.dk, work.q, params.k_pitch)
    for i in range(count):
        place = work.q + i * params.k_pitch
        if params.norm:
            simd.normalize(place, params.numbers + 4, params.k_vectors)
        simd.multiply_by_number(place, params.numbers, place, params.k_vectors)


@helper
def gram(params, work, left, target, rows):
    """Write X K' up to the diagonal, in whole vectors."""
    pitch, depth = params.c_pitch, params.k_vectors * LANES
    for first in range(0, rows, LANES):
        vectors = first // LANES + 1
        to, a = target + first * pitch, left + first * params.k_pitch
        multiply(to, pitch, a, params.k_pitch, work.turned, pitch, (LANES, vectors, depth))


@helper
def cut_off(g):
    """Return a logarithm of a decay as float64, at least `FORGET`; NaN stays NaN."""
    return FORGET if g < FORGET else types.float64(g)


@helper
def put_sum(work, at, total):
    """Write a sum as two float32 numbers."""
    high = types.float32(total)
    put_float(work.high + at, high)
    put_float(work.low + at, types.float32(total - types.float64(high)))


@helper
def load_betas(params, work, token, head, count, rows):
    """Write beta of the rows of a chunk; 0 behind the last."""
    for i in range(rows):
        beta = ONE if i < count else ZERO
        if params.beta and i < count:
            beta = get_float(params.beta + 4 * ((token + i) * params.heads + head))
        put_float(work.beta + 4 * i, beta)


@helper
def decay_heads(params, work, token, head, count, rows):
    """Write A, P and the decays of rows, for one g a head."""
    total = types.float64(0)
    for i in range(rows):
        if params.g and i < count:
            total += cut_off(get_float(params.g + 4 * ((token + i) * params.heads + head)))
        put_sum(work, 4 * i, total)
    end = 4 * (rows - 1)
    for i in range(rows):  # as vectors: c_last in all lanes of a line
        put_float(work.line + 4 * i, get_float(work.high + end))
        put_float(work.sides + 4 * i, get_float(work.low + end))
    vectors = rows // LANES
    products.decayed(work.ones, work.high, work.low, work.zeros, work.zeros, work.decays, vectors)
    products.decayed(work.ones, work.line, work.sides, work.high, work.low, work.rests, vectors)
    last = get_float(work.decays + end)
    for i in range(params.k_vectors * LANES):
        put_float(work.last + 4 * i, last)
    for i in range(rows):
        at = i * params.c_pitch
        products.decay_rows(
            i, work.high, work.low, work.beta + 4 * i, keys=work.key_gram + at, queries=work.query_gram + at,
            system=work.system + at, weights=work.weights + at, count=i // LANES + 1,
        )  # fmt: skip


@helper
def sum_channels(params, work, token, head, count, rows):
    """Write the sums of g of all channels, [rows, dk] in two parts."""
    step, pitch = 4 * params.heads * params.dk, params.k_pitch
    place = params.g + token * step + 4 * head * params.dk
    load_rows(params.load_gate, place, step, (count, rows), params.dk, work.k_decayed, pitch)
    products.running_sums(work.k_decayed, work.high, work.low, pitch, rows, params.k_vectors)


@helper
def move_reference(params, work, old, new, columns):
    """Let transposed keys of `columns` rows, decayed to the row `old`, be decayed to a later row."""
    high, low, pitch = work.high, work.low, params.k_pitch
    old, new = old * pitch, new * pitch
    products.decayed(work.ones, high + new, low + new, high + old, low + old, work.line, params.k_vectors)
    for c in range(params.k_vectors * LANES if columns else 0):
        place = work.turned + c * params.c_pitch
        simd.multiply_by_number(place, work.line + 4 * c, place, columns // LANES)


@helper
def turn_block(params, work, first, reference):
    """Write the transposed keys of a block, decayed to a row: K e^(c_r - c)."""
    pitch, r = params.k_pitch, reference * params.k_pitch
    high, low = work.high, work.low
    for i in range(LANES):
        at = (first + i) * pitch
        products.decayed(
            work.k + at, high + r, low + r, high + at, low + at, work.block + i * pitch, params.k_vectors
        )
    columns = params.k_vectors * LANES
    turn(work.block, pitch, LANES, columns, work.turned + 4 * first, params.c_pitch)


@helper
def sum_pairs(params, work, first):
    """Write A and P of a block's own rows, whose channels fall so far that factors would overflow."""
    pitch = params.k_pitch
    for i in range(LANES):
        row = (first + i) * pitch
        for j in range(i + 1):
            other, cell = (first + j) * pitch, (first + i) * params.c_pitch + 4 * (first + j)
            products.pair_sums(
                work.q + row, work.k + row, work.k + other, work.high + row, low=work.low + row,
                other_high=work.high + other, other_low=work.low + other, key_target=work.system + cell,
                query_target=work.weights + cell, count=params.k_vectors,
            )  # fmt: skip


@helper
def decay_block(params, work, first, old):
    """Write A and P of the rows of a block, before beta and the diagonal's zeros, and e^c K and e^c Q.

    Transposed keys of earlier rows are decayed to the row `old`; return the row to which they are now.
    """
    pitch, vectors, high, low = params.k_pitch, params.k_vectors, work.high, work.low
    middle, last = first + LANES // 2, first + LANES - 1
    falls = high + first * pitch, high + middle * pitch, high + last * pitch
    products.count_beyond(*falls, work.limit, work.factors, vectors)
    near = get_float(work.factors) == ZERO
    reference = middle if near else first
    move_reference(params, work, old, reference, first)
    r, block = reference * pitch, first * pitch
    for at in range(block, block + LANES * pitch, pitch):
        products.decayed_pair(
            work.k + at, work.q + at, high + at, low + at, other_high=high + r, other_low=low + r,
            x_target=work.k_decayed + at, y_target=work.q_decayed + at, count=vectors,
        )  # fmt: skip
    if near:
        turn_block(params, work, first, reference)
    known = first // LANES + (1 if near else 0)
    if known:
        size, square, to = (LANES, known, vectors * LANES), params.c_pitch, first * params.c_pitch
        multiply(work.system + to, square, work.k_decayed + block, pitch, work.turned, square, size)
        multiply(work.weights + to, square, work.q_decayed + block, pitch, work.turned, square, size)
    products.decayed(work.ones, high + r, low + r, work.zeros, work.zeros, work.line, vectors)
    for at in range(block, block + LANES * pitch, pitch):
        simd.multiply_by_vector(work.k_decayed + at, work.line, work.k_decayed + at, vectors)
        simd.multiply_by_vector(work.q_decayed + at, work.line, work.q_decayed + at, vectors)
    if near:
        return reference
    sum_pairs(params, work, first)
    move_reference(params, work, first, last, first)
    turn_block(params, work, first, last)
    return last


@helper
def decay_channels(params, work, token, head, count, rows):
    """Write A, P, e^c K, e^c Q and the transposed K e^(c_last - c), for a g of each channel."""
    pitch, vectors, reference = params.k_pitch, params.k_vectors, 0
    sum_channels(params, work, token, head, count, rows)
    for first in range(0, rows, LANES):
        reference = decay_block(params, work, first, reference)
    move_reference(params, work, reference, rows - 1, rows)
    for i in range(rows):
        cell = i * params.c_pitch
        products.triangle_rows(i, work.beta + 4 * i, work.system + cell, work.weights + cell, i // LANES + 1)
        put_float(work.decays + 4 * i, ONE)
    end = (rows - 1) * pitch
    products.decayed(work.ones, work.high + end, work.low + end, work.zeros, work.zeros, work.last, vectors)


@helper
def write_outputs(params, work, token, head, count):
    """Round rows of O to the output."""
    target = params.out + token * params.out_token + head * params.out_head
    for i in range(count):
        move_row(params.store, work.output + i * params.v_pitch, target + i * params.out_token, params.dv)


@helper
def find_errors(params, work, token, head, state, count, rows):
    """Write D: the right sides, then the solution."""
    source = params.v + token * params.v_token + head * params.v_head
    if not params.beta:
        load_rows(params.load, source, params.v_token, (count, rows), params.dv, work.d, params.v_pitch)
        return
    load_rows(params.load, source, params.v_token, (count, rows), params.dv, work.v, params.v_pitch)
    left = work.k_decayed if params.channels > 1 else work.k
    size = rows, params.v_vectors, params.k_vectors * LANES
    multiply(work.product, params.v_pitch, left, params.k_pitch, state, params.v_pitch, size)
    for i in range(rows):
        put_float(work.factors, get_float(work.beta + 4 * i))
        put_float(work.factors + 4, get_float(work.decays + 4 * i))
        at = i * params.v_pitch
        products.right_sides(work.v + at, work.product + at, work.factors, work.d + at, params.v_vectors)
    solve(work, params, rows)


@helper
def update_state(params, work, state, rows):
    """Write S <- e^c_last S + (K e^(c_last - c))' D."""
    for i in range(rows if params.channels == 1 else 0):
        place = work.d + i * params.v_pitch
        simd.multiply_by_number(place, work.rests + 4 * i, place, params.v_vectors)
    add_errors(params, work, state, rows)


@helper
def run_head(params, work, token, head, state, count, rows):
    """Run a chunk of one value head; K, and Q if all heads share it, are in the worker's memory."""
    shared_by = max(params.q_heads // params.heads, 1)
    load_betas(params, work, token, head, count, rows)
    for i in range(shared_by):
        query = head * shared_by + i
        if shared_by > 1:
            load_queries(params, work, token, query, count, rows)
            if params.channels == 1:
                gram(params, work, work.q, work.query_gram, rows)
        if params.channels > 1:
            decay_channels(params, work, token, head, count, rows)
        else:
            decay_heads(params, work, token, head, count, rows)
        if i == 0:
            find_errors(params, work, token, head, state, count, rows)
        left = work.q_decayed if params.channels > 1 else work.q
        size = rows, params.v_vectors, params.k_vectors * LANES
        multiply(work.output, params.v_pitch, left, params.k_pitch, state, params.v_pitch, size)
        add_weighted(params, work, rows)
        write_outputs(params, work, token, query, count)
    update_state(params, work, state, rows)


@helper
def move_state(params, work, there, here, loads):
    """Widen a state to float32 [dk, dv] with padded rows, or write it back."""
    rows, columns = (params.dv, params.dk) if params.transposed else (params.dk, params.dv)
    if loads:
        for i in range(params.k_vectors * LANES * params.v_pitch // 4):
            put_float(here + 4 * i, ZERO)
    for i in range(rows):
        place, row = there + i * columns * params.element, here + i * params.v_pitch
        if not params.transposed:
            if loads:
                move_row(params.load_state, place, row, columns)
            else:
                move_row(params.store_state, row, place, columns)
        elif loads:
            move_row(params.load_state, place, work.line, columns)
            for j in range(columns):
                put_float(here + j * params.v_pitch + 4 * i, get_float(work.line + 4 * j))
        else:
            for j in range(columns):
                put_float(work.line + 4 * j, get_float(here + j * params.v_pitch + 4 * i))
            move_row(params.store_state, work.line, place, columns)


@helper
def run_sequence(params, work, sequence, first):
    """Run all chunks of the value heads from `first` on that one work item has."""
    begin, end = integers(params.begins)[sequence], integers(params.ends)[sequence]
    own = params.k_vectors * LANES * params.v_pitch
    for i in range(params.together):
        place = state_of(params, sequence * params.heads + first + i)
        move_state(params, work, place, work.states + i * own, True)
    token = begin
    while token < end:
        count = min(params.chunk, end - token)
        rows = (count + LANES - 1) // LANES * LANES
        load_keys(params, work, token, first, count, rows)
        if params.channels == 1:
            gram(params, work, work.k, work.key_gram, rows)
        if params.q_heads <= params.heads:
            load_queries(params, work, token, first * params.q_heads // params.heads, count, rows)
            if params.channels == 1:
                gram(params, work, work.q, work.query_gram, rows)
        for i in range(params.together):
            run_head(params, work, token, first + i, work.states + i * own, count, rows)
        token += count
    for i in range(params.together):
        place = state_of(params, sequence * params.heads + first + i)
        move_state(params, work, place, work.states + i * own, False)


@helper
def clear_sequence(params, work, sequence, first):
    """Write zeros as the outputs of a sequence without a state."""
    shared_by = max(params.q_heads // params.heads, 1)
    for token in range(integers(params.begins)[sequence], integers(params.ends)[sequence]):
        for i in range(params.together * shared_by):
            target = params.out + token * params.out_token + (first * shared_by + i) * params.out_head
            move_row(params.store, work.zeros, target, params.dv)


@compiled(WORKER)
def run_chunks(worker, params_at):
    """Run all heads of all sequences."""
    params = record(params_at)
    begin = params.scratch + worker * params.scratch_bytes
    subnormals_as_zero(begin)
    work = work_at(begin + LINE)
    lay_out(work, params, begin)
    groups = params.heads // params.together
    items = params.sequences * groups
    for item in range(share(items, worker, params.workers), share(items, worker + 1, params.workers)):
        sequence, first = item // groups, item % groups * params.together
        if integers(params.writes)[sequence] < 0:
            clear_sequence(params, work, sequence, first)
        elif integers(params.begins)[sequence] < integers(params.ends)[sequence]:
            run_sequence(params, work, sequence, first)
    restore_float_control(begin)


def prepare_chunks(call, out, chunk):
    """Return a launch that runs a checked call in chunks of up to `chunk` tokens. No g may be above 0."""
    fields = common_fields(call, out)
    heads, queries, keys = fields["heads"], fields["q_heads"], fields["k_heads"]
    workers = min(threads(), fields["sequences"] * heads)
    # Value heads that share a key head are run together, if that leaves work for all threads.
    shares = heads // keys if queries <= heads and fields["channels"] == 1 else 1
    together = shares if shares <= 8 and fields["sequences"] * heads // shares >= workers else 1
    rows = padded(chunk)
    # Rows are a vector longer than they need, as rows 512 bytes apart would share few lines of the L1 cache.
    k_pitch, v_pitch = (4 * LANES * (fields[name] + 1) for name in ("k_vectors", "v_vectors"))
    c_pitch, tall = 4 * (rows + LANES), fields["k_vectors"] * LANES
    room = WORK_BYTES + (LANES + 6 * rows) * k_pitch + 4 * rows * (v_pitch + c_pitch) + tall * c_pitch
    room += 11 * max(k_pitch, v_pitch, c_pitch) + together * tall * v_pitch
    room = -(-room // 4096) * 4096
    params = PARAMS.filled(fields | {
        "load_gate": load_row("float32").address, "workers": workers, "chunk": rows, "together": together,
        "k_pitch": k_pitch, "v_pitch": v_pitch, "c_pitch": c_pitch, "scratch": 0, "scratch_bytes": room,
    })  # fmt: skip
    place = PARAMS.at["scratch"], workspace, room
    run = functools.partial(run_in_scratch, run_chunks.code, workers, params, *place)
    return Launch(params, {}, run, alive=(call, out))
