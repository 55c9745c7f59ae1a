"""Move states on by recorded tokens: S <- decay S + key delta'."""

import functools

from kvkit.cpu.launches import WORKER, Launch, run_in_scratch, threads
from kvkit.cpu.recurrent.rows import load_row, load_state, store_row, store_state
from kvkit.cpu.recurrent.tokens import (
    GROUP,
    LINE,
    PARAMS,
    SMALL_WORK,
    begin_work,
    get_float,
    integers,
    put_float,
    record,
    room_of,
    state_of,
    update_columns,
    work_at,
    workspace,
)
from kvkit.cpu.simd import recurrent as simd
from kvkit.cpu.simd.lanes import LANES, padded, restore_float_control
from kvkit.formats.elements import FLOAT32
from kvkit.formulas.index import share
from kvkit.runtime.jit import compiled, helper


@helper
def load_record(params, work, sequence, row, head):
    """Write decay, k and delta of a recorded token as padded rows."""
    wide = params.channels > 1
    place = params.capsule + 4 * (sequence * params.rows + row) * params.record
    key = place + 4 * (params.heads * params.channels + head * params.k_heads // params.heads * params.dk)
    delta = place + 4 * (params.heads * params.channels + params.k_heads * params.dk + head * params.dv)
    place += 4 * head * params.channels
    for i in range(params.dk):
        put_float(work.decay + 4 * i, get_float(place + (4 * i if wide else 0)))
        put_float(work.k + 4 * i, get_float(key + 4 * i))
    for i in range(params.dv):
        put_float(work.delta + 4 * i, get_float(delta + 4 * i))


@helper
def replay_item(params, work, item, state):
    """Move one float32 state on by its accepted tokens."""
    sequence, head = item // params.heads, item % params.heads
    pitch = 4 * LANES * params.k_vectors
    for row in range(integers(params.ends)[sequence]):
        load_record(params, work, sequence, row, head)
        if params.transposed:
            for i in range(0, params.v_vectors * LANES, GROUP):
                place, delta = state + i * pitch, work.delta + 4 * i
                simd.row_update(place, pitch, params.k_vectors, work.decay, work.k, delta)
        else:
            update_columns(params, work, state, state)


@compiled(WORKER)
def run_replay(worker, params_at):
    """Move all states on."""
    params = record(params_at)
    begin = begin_work(params, worker)
    work = work_at(begin + LINE)
    for i in range((params.k_vectors + 1) * LANES):  # the padding stays 0
        put_float(work.decay + 4 * i, get_float(params.numbers))
        put_float(work.k + 4 * i, get_float(params.numbers))
    for i in range((params.v_vectors + 1) * LANES):
        put_float(work.delta + 4 * i, get_float(params.numbers))
    items = params.sequences * params.heads
    high, wide = (params.dv, params.dk) if params.transposed else (params.dk, params.dv)
    for item in range(share(items, worker, params.workers), share(items, worker + 1, params.workers)):
        state = state_of(params, item)
        if state == 0 or integers(params.ends)[item // params.heads] == 0:
            continue
        if params.staged:
            load_state(params.load_state, state, params.element, (high, wide, False), work.state)
            replay_item(params, work, item, work.state)
            store_state(params.store_state, work.state, state, params.element, (high, wide, False))
        else:
            replay_item(params, work, item, state)
    restore_float_control(begin)


def prepare_replay(call):
    """Return a launch that runs a checked replay."""
    state, fmt = call.state, call.state_format
    (_, heads, dk, dv), channels = call.state.shape, call.channels
    dk, dv = (dv, dk) if call.transposed else (dk, dv)
    fields = dict.fromkeys(PARAMS.names, 0) | {
        "sequences": len(call.slots), "heads": heads, "k_heads": call.keys,
        "dk": dk, "dv": dv, "k_vectors": padded(dk) // LANES, "v_vectors": padded(dv) // LANES,
        "numbers": call.zero, "channels": channels, "rows": call.capsule.shape[1],
        "ends": call.accepted, "writes": call.slots,
        "state": state, "slot_bytes": state.strides[0], "head_bytes": dk * dv * state.itemsize,
        "element": state.itemsize, "transposed": call.transposed,
        "staged": fmt is not FLOAT32 or dk % LANES > 0 or dv % LANES > 0,
        "load_state": load_row(fmt.name).address, "store_state": store_row(fmt.name).address,
        "capsule": call.capsule, "record": call.capsule.shape[2],
    }  # fmt: skip
    items, room = fields["sequences"] * fields["heads"], room_of(fields)
    workers = min(threads(), items) if items * fields["head_bytes"] >= SMALL_WORK else 1
    params = PARAMS.filled(fields | {"workers": workers, "scratch_bytes": room})
    place = PARAMS.at["scratch"], workspace, room
    run = functools.partial(run_in_scratch, run_replay.code, workers, params, *place)
    return Launch(params, {}, run, alive=(call,))
