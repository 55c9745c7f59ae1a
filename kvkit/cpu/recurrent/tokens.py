"""Run the gated delta rule token by token: the step of decoding, and short or recorded prompts.

S <- diag(e^g) S      delta = beta (v - S'k)      S <- S + k delta'      o = scale S'q

A worker takes a head of a sequence, so a head's state stays in its L2 cache. Rows of q, k and v are widened
to float32 first. States of other formats or sizes are widened into the worker's memory for all tokens.
"""

import functools

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.launches import WORKER, Launch, Record, Workspace, run_in_scratch, threads
from kvkit.cpu.recurrent.rows import load_row, load_state, move_row, store_row, store_state
from kvkit.cpu.simd import recurrent as simd
from kvkit.cpu.simd.lanes import LANES, padded, restore_float_control, subnormals_as_zero
from kvkit.formats.elements import BY_DTYPE, FLOAT32
from kvkit.formulas.index import share
from kvkit.runtime.jit import compiled, helper

PARAMS = Record(
    "workers sequences heads q_heads k_heads dk dv k_vectors v_vectors load store norm numbers",
    "q q_token q_head k k_token k_head v v_token v_head out out_token out_head",
    "g channels beta",
    "begins ends reads writes state slot_bytes head_bytes element staged transposed load_state store_state",
    "states capsule rows record scratch scratch_bytes",
)
# Addresses in a worker's memory; a vector for each but `state`, and numbers: beta, erase, scale, k . q.
WORK = Record("k q v k_decayed q_decayed decay sk sq delta output gate gates factors state")
WORK_BYTES = 256  # with a line before them, for the control word of float arithmetic
record, work_at, integers = memory.record(PARAMS), memory.record(WORK), memory.integers
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
ONE, ZERO = types.float32(1), types.float32(0)
SMALL_WORK = 2**18  # bytes of states below which one thread does it all
GROUP, LINE = simd.GROUP, simd.LINE
sums8, sums4, sums1 = map(simd.column_sums, (8, 4, 1))
update8, update4, update1 = map(simd.column_update, (8, 4, 1))


@helper
def begin_work(params, worker):
    """Count subnormals as zero and divide a worker's memory; return its address."""
    begin = params.scratch + worker * params.scratch_bytes
    subnormals_as_zero(begin)
    work, at = work_at(begin + LINE), begin + WORK_BYTES
    k_bytes, v_bytes = 4 * LANES * (params.k_vectors + 1), 4 * LANES * (params.v_vectors + 1)
    work.gates = at
    work.factors = at + LINE
    at += 2 * LINE
    work.k, work.q, work.k_decayed = at, at + k_bytes, at + 2 * k_bytes
    work.q_decayed, work.decay, work.gate = at + 3 * k_bytes, at + 4 * k_bytes, at + 5 * k_bytes
    at += 6 * k_bytes
    work.v, work.sk, work.sq = at, at + v_bytes, at + 2 * v_bytes
    work.delta, work.output = at + 3 * v_bytes, at + 4 * v_bytes
    work.state = at + 5 * v_bytes
    return begin


@helper
def load_gates(params, work, token, head):
    """Write decay = e^g of all channels, beta and erase of a token."""
    beta, erase = ONE, ZERO
    if params.beta:
        beta = get_float(params.beta + 4 * (token * params.heads + head))
        erase = beta
    put_float(work.gates, beta)
    put_float(work.gates + 4, erase)
    padded_dk = params.k_vectors * LANES
    place = params.g + 4 * (token * params.heads + head) * params.channels
    if params.g and params.channels > 1:
        for i in range(padded_dk):
            put_float(work.gate + 4 * i, get_float(place + 4 * i) if i < params.dk else ZERO)
        simd.decay_of(work.gate, work.decay, params.k_vectors)
        return
    factor = ONE
    if params.g:
        for i in range(LANES):
            put_float(work.gate + 4 * i, get_float(place))
        simd.decay_of(work.gate, work.decay, 1)
        factor = get_float(work.decay)
    for i in range(padded_dk):
        put_float(work.decay + 4 * i, factor)


@helper
def load_query(params, work, token, head):
    """Write a query, its decayed form, and the factors of its readout: scale and k . q."""
    move_row(params.load, params.q + token * params.q_token + head * params.q_head, work.q, params.dk)
    if params.norm:
        simd.normalize(work.q, params.numbers + 4, params.k_vectors)
    simd.multiply_by_vector(work.q, work.decay, work.q_decayed, params.k_vectors)
    put_float(work.factors, get_float(params.numbers))
    simd.dot(work.k, work.q, work.factors + 4, params.k_vectors)


@helper
def load_key(params, work, token, head):
    """Write a key, its decayed form, and a value."""
    place = params.k + token * params.k_token + head * params.k_heads // params.heads * params.k_head
    move_row(params.load, place, work.k, params.dk)
    if params.norm:
        simd.normalize(work.k, params.numbers + 4, params.k_vectors)
    simd.multiply_by_vector(work.k, work.decay, work.k_decayed, params.k_vectors)
    move_row(params.load, params.v + token * params.v_token + head * params.v_head, work.v, params.dv)


@helper
def sum_columns(params, work, state, ahead):
    """Write sk and sq of a "KV" state, of all columns."""
    pitch, rows, j = 4 * LANES * params.v_vectors, params.k_vectors * LANES, 0
    k, q = work.k_decayed, work.q_decayed
    while j < params.v_vectors:
        at, left = 4 * LANES * j, params.v_vectors - j
        place, sk, sq, soon = state + at, work.sk + at, work.sq + at, ahead + at * rows
        step = 8 if left >= 8 else 4 if left >= 4 else 1
        if step == 8:
            sums8(place, pitch, rows, k, q, sk, sq, ahead=soon)
        elif step == 4:
            sums4(place, pitch, rows, k, q, sk, sq, ahead=soon)
        else:
            sums1(place, pitch, rows, k, q, sk, sq, ahead=soon)
        j += step


@helper
def update_columns(params, work, state, ahead):
    """Write diag(decay) S + k delta' of a "KV" state, all columns."""
    pitch, rows, j = 4 * LANES * params.v_vectors, params.k_vectors * LANES, 0
    k, decay = work.k, work.decay
    while j < params.v_vectors:
        at, left = 4 * LANES * j, params.v_vectors - j
        step = 8 if left >= 8 else 4 if left >= 4 else 1
        place, delta, soon = state + at, work.delta + at, ahead + at * rows + step // 2 * rows * LINE
        if step == 8:
            update8(place, pitch, rows, decay, k, delta, soon)
        elif step == 4:
            update4(place, pitch, rows, decay, k, delta, soon)
        else:
            update1(place, pitch, rows, decay, k, delta, soon)
        j += step


@helper
def read_out(params, work, token, head):
    """Write the output of a query head."""
    simd.readouts(work.sq, work.delta, work.factors, work.output, params.v_vectors)
    target = params.out + token * params.out_token + head * params.out_head
    move_row(params.store, work.output, target, params.dv)


@helper
def run_columns(params, work, token, head, state, ahead):
    """Run a token over a "KV" state."""
    shared_by = max(params.q_heads // params.heads, 1)
    for i in range(shared_by):
        query = head * shared_by + i
        load_query(params, work, token, query if shared_by > 1 else head * params.q_heads // params.heads)
        sum_columns(params, work, state, ahead)
        if i == 0:
            simd.errors(work.v, work.sk, work.gates, work.delta, params.v_vectors)
        read_out(params, work, token, query)
    update_columns(params, work, state, ahead)


@helper
def run_rows(params, work, token, head, state, ahead):
    """Run a token over a "VK" state: eight rows are read, then written while they are in the L1 cache."""
    shared_by, pitch = max(params.q_heads // params.heads, 1), 4 * LANES * params.k_vectors
    rows = params.v_vectors * LANES
    for i in range(shared_by):
        query = head * shared_by + i
        load_query(params, work, token, query if shared_by > 1 else head * params.q_heads // params.heads)
        for row in range(0, rows, GROUP):
            at, place = 4 * row, state + row * pitch
            simd.row_sums(
                place, pitch, params.k_vectors, work.k_decayed, work.q_decayed, sk=work.sk + at,
                sq=work.sq + at, ahead=ahead + row * pitch,
            )  # fmt: skip
            if i == 0:
                simd.errors(work.v + at, work.sk + at, work.gates, work.delta + at, 1)
            if i == shared_by - 1:
                simd.row_update(place, pitch, params.k_vectors, work.decay, work.k, work.delta + at)
        read_out(params, work, token, query)


@helper
def keep_token(params, work, sequence, token, state, head):
    """Write the state after a token, or what its capsule holds: e^g, k and delta of all heads."""
    first = integers(params.begins)[sequence]
    if params.states:
        cells = params.dk * params.dv
        target = params.states + params.element * (token * params.heads + head) * cells
        high, wide = (params.dv, params.dk) if params.transposed else (params.dk, params.dv)
        store_state(params.store_state, state, target, params.element, (high, wide, False))
    if params.capsule:
        place = params.capsule + 4 * (sequence * params.rows + token - first) * params.record
        key = place + 4 * (params.heads * params.channels + head * params.k_heads // params.heads * params.dk)
        delta = place + 4 * (params.heads * params.channels + params.k_heads * params.dk + head * params.dv)
        for i in range(params.channels):
            put_float(place + 4 * (head * params.channels + i), get_float(work.decay + 4 * i))
        for i in range(params.dk):
            put_float(key + 4 * i, get_float(work.k + 4 * i))
        for i in range(params.dv):
            put_float(delta + 4 * i, get_float(work.delta + 4 * i))


@helper
def state_of(params, item):
    """Return the address at which the state of an item lies after the call; 0 if it has none."""
    sequence, head = item // params.heads, item % params.heads
    slot = integers(params.writes)[sequence]
    return 0 if slot < 0 else params.state + slot * params.slot_bytes + head * params.head_bytes


@helper
def clear_outputs(params, work, sequence, head):
    """Write zeros as the outputs of a sequence without a state."""
    shared_by = max(params.q_heads // params.heads, 1)
    for i in range(params.v_vectors * LANES):
        put_float(work.output + 4 * i, ZERO)
    for token in range(integers(params.begins)[sequence], integers(params.ends)[sequence]):
        for i in range(shared_by):
            target = params.out + token * params.out_token + (head * shared_by + i) * params.out_head
            move_row(params.store, work.output, target, params.dv)


@helper
def run_item(params, work, item, state, ahead):
    """Run the tokens of one head of a sequence over the float32 state at an address."""
    sequence, head = item // params.heads, item % params.heads
    begin, end = integers(params.begins)[sequence], integers(params.ends)[sequence]
    for token in range(begin, end):
        load_gates(params, work, token, head)
        load_key(params, work, token, head)
        soon = ahead if token == begin else state
        if params.transposed:
            run_rows(params, work, token, head, state, soon)
        else:
            run_columns(params, work, token, head, state, soon)
        if params.states or params.capsule:
            keep_token(params, work, sequence, token, state, head)


@compiled(WORKER)
def run_tokens(worker, params_at):
    """Run all heads of all sequences."""
    params = record(params_at)
    begin = begin_work(params, worker)
    work, items = work_at(begin + LINE), params.sequences * params.heads
    last = share(items, worker + 1, params.workers)
    high, wide = (params.dv, params.dk) if params.transposed else (params.dk, params.dv)
    for item in range(share(items, worker, params.workers), last):
        sequence, head = item // params.heads, item % params.heads
        state, slot = state_of(params, item), integers(params.reads)[sequence]
        if state == 0:
            clear_outputs(params, work, sequence, head)
            continue
        if integers(params.begins)[sequence] == integers(params.ends)[sequence]:
            if slot != integers(params.writes)[sequence]:
                source = params.state + slot * params.slot_bytes + head * params.head_bytes
                load_state(params.load_state, source, params.element, (high, wide, False), work.state)
                store_state(params.store_state, work.state, state, params.element, (high, wide, False))
            continue
        source = params.state + slot * params.slot_bytes + head * params.head_bytes
        ahead = state_of(params, item + 1) if item + 1 < last else state
        if params.staged:
            load_state(params.load_state, source, params.element, (high, wide, False), work.state)
            run_item(params, work, item, work.state, ahead if ahead else state)
            if not params.capsule:
                store_state(params.store_state, work.state, state, params.element, (high, wide, False))
        else:
            run_item(params, work, item, state, ahead if ahead else state)
    restore_float_control(begin)


workspace = Workspace()


def common_fields(call, out):
    """Return the fields that the records of both forms have: addresses and byte strides of a checked call."""
    q, k, v, state = call.q, call.k, call.v, call.state
    dk, dv = k.shape[-1], v.shape[-1]
    state_format = call.state_format
    return {
        "sequences": len(call.begins), "heads": v.shape[1], "q_heads": q.shape[1], "k_heads": k.shape[1],
        "dk": dk, "dv": dv, "k_vectors": padded(dk) // LANES, "v_vectors": padded(dv) // LANES,
        "load": load_row(call.fmt.name).address, "store": store_row(BY_DTYPE[out.dtype].name).address,
        "norm": call.norm, "numbers": call.numbers,
        "q": q, "q_token": q.strides[0], "q_head": q.strides[1],
        "k": k, "k_token": k.strides[0], "k_head": k.strides[1],
        "v": v, "v_token": v.strides[0], "v_head": v.strides[1],
        "out": out, "out_token": out.strides[0], "out_head": out.strides[1],
        "g": call.g, "channels": dk if call.by_channel else 1, "beta": call.beta,
        "begins": call.begins, "ends": call.ends, "reads": call.reads, "writes": call.writes,
        "state": state, "slot_bytes": state.strides[0], "head_bytes": dk * dv * state.itemsize,
        "element": state.itemsize, "transposed": call.transposed,
        "load_state": load_row(state_format.name).address,
        "store_state": store_row(state_format.name).address,
    }  # fmt: skip


def room_of(fields):
    """Return the bytes of memory that a worker needs, by the fields of `PARAMS`."""
    k_bytes, v_bytes = (4 * LANES * (fields[name] + 1) for name in ("k_vectors", "v_vectors"))
    room = WORK_BYTES + 2 * LINE + 6 * k_bytes + 5 * v_bytes
    if fields["staged"]:  # a state, and a line
        room += (fields["k_vectors"] + 1) * (fields["v_vectors"] + 1) * 4 * LANES * LANES
    return -(-room // 4096) * 4096


def prepare_tokens(call, out, states=None, capsule=None):
    """Return a launch that runs a checked call token by token.

    `states` receives the state after each token. With a `capsule`, states stay as they are.
    """
    fields = common_fields(call, out)
    moves = call.reads is not call.writes
    staged = capsule is not None or moves or call.state_format is not FLOAT32
    staged = staged or fields["dk"] % LANES > 0 or fields["dv"] % LANES > 0
    fields["staged"] = staged
    room = room_of(fields)
    items = fields["sequences"] * fields["heads"]
    workers = min(threads(), items) if items * fields["head_bytes"] >= SMALL_WORK else 1
    params = PARAMS.filled(fields | {
        "workers": workers, "states": states,
        "capsule": capsule, "rows": 0 if capsule is None else capsule.shape[1],
        "record": 0 if capsule is None else capsule.shape[2],
        "scratch": 0, "scratch_bytes": room,
    })  # fmt: skip
    place = PARAMS.at["scratch"], workspace, room
    run = functools.partial(run_in_scratch, run_tokens.code, workers, params, *place)
    return Launch(params, {}, run, alive=(call, out, states, capsule))
