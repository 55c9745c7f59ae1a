"""Pool tokens of compressed caches into rows, and store tokens in the states that later rows need.

row_c = w_c p_c / sqrt(mean of p^2 + eps)      p_c = sum over tokens j of softmax_j(score_jc) kv_jc

A softmax runs over the tokens of a window, for every channel alone. With overlap a window has the tokens of
the window before it too, with the first half of their channels. A worker takes one window, and some channels
at a time. States are written once all rows are computed, because rows read them.
"""

import functools

from kvkit.checks.compressed import BLOCK
from kvkit.cpu import memory
from kvkit.cpu.launches import WORKER, Launch, Record, Workspace, address, run_workers, threads
from kvkit.cpu.recurrent.rows import load_row, move_row, store_row
from kvkit.cpu.simd.lanes import LANES
from kvkit.cpu.simd.pooling import add_vectors, norm_row, pool_columns
from kvkit.formats.elements import BY_NAME
from kvkit.formulas.index import share
from kvkit.runtime.jit import callback

PARAMS = Record(
    "workers windows tokens dim ratio halves ring blocks kv kv_token gate gate_token ape weight numbers",
    "sequences of_window positions of_token starts first slots state slot_bytes rows load load_float",
    "store_float scratch scratch_bytes",
)
ROW = 4 * BLOCK
SMALL_WORK = 2**14  # numbers of tokens below which one thread does it all
record, integers = memory.record(PARAMS), memory.integers
workspace = Workspace()


@functools.cache
def pool_code(element):
    """Compile the pooling of tokens of a format into rows."""
    size = BY_NAME[element].bytes(1)

    def pool(worker, params_at):
        params = record(params_at)
        dim, ratio, ring = params.dim, params.ratio, params.ring
        width, padded = params.halves * dim, params.blocks * BLOCK
        values = params.scratch + worker * params.scratch_bytes
        scores = values + params.halves * ratio * ROW
        row = scores + params.halves * ratio * ROW
        begin = share(params.windows, worker, params.workers)
        for item in range(begin, share(params.windows, worker + 1, params.workers)):
            sequence = integers(params.sequences)[item]
            first, start = integers(params.first)[sequence], integers(params.starts)[sequence]
            state = params.state + integers(params.slots)[sequence] * params.slot_bytes
            end = (integers(params.of_window)[item] + 1) * ratio
            oldest = max(end - params.halves * ratio, 0)
            for block in range(params.blocks):
                channel = block * BLOCK
                count = min(BLOCK, dim - channel)
                vectors = (count + LANES - 1) // LANES
                for p in range(oldest, end):
                    half = params.halves - 1 if p >= end - ratio else 0
                    at, place = half * dim + channel, (p - oldest) * ROW
                    if p < first:
                        source = state + (p % ring) * 8 * width + 4 * at
                        move_row(params.load_float, source, values + place, count)
                        move_row(params.load_float, source + 4 * width, scores + place, count)
                    else:
                        token = start + p - first
                        move_row(
                            params.load, params.kv + token * params.kv_token + at * size, values + place,
                            count,
                        )  # fmt: skip
                        move_row(
                            params.load, params.gate + token * params.gate_token + at * size, scores + place,
                            count,
                        )  # fmt: skip
                        bias = params.ape + 4 * ((p % ratio * params.halves + half) * padded + channel)
                        add_vectors(scores + place, bias, scores + place, vectors)
                pool_columns(values, scores, ROW, end - oldest, row + 4 * channel, vectors)
            norm_row(row, params.weight, params.numbers, (dim + LANES - 1) // LANES)
            move_row(params.store_float, row, params.rows + item * 4 * dim, dim)

    return callback(pool, WORKER, element)


@functools.cache
def remember_code(element):
    """Compile the writing of tokens of a format to the states of their sequences."""
    size = BY_NAME[element].bytes(1)

    def remember(worker, params_at):
        params = record(params_at)
        dim, halves = params.dim, params.halves
        padded, scratch = params.blocks * BLOCK, params.scratch + worker * params.scratch_bytes
        begin = share(params.tokens, worker, params.workers)
        for token in range(begin, share(params.tokens, worker + 1, params.workers)):
            sequence = integers(params.of_token)[token]
            slot, end = integers(params.slots)[sequence], integers(params.starts)[sequence + 1]
            if slot < 0 or token < end - params.ring:
                continue
            p = integers(params.positions)[token]
            target = params.state + slot * params.slot_bytes + p % params.ring * 8 * halves * dim
            for half in range(halves):
                at = half * dim * size
                move_row(params.load, params.kv + token * params.kv_token + at, scratch, dim)
                move_row(params.store_float, scratch, target + 4 * half * dim, dim)
                move_row(params.load, params.gate + token * params.gate_token + at, scratch, dim)
                bias = params.ape + 4 * (p % params.ratio * halves + half) * padded
                add_vectors(scratch, bias, scratch, (dim + LANES - 1) // LANES)
                move_row(params.store_float, scratch, target + 4 * (halves + half) * dim, dim)

    return callback(remember, WORKER, (element, "remember"))


def prepare_pooling(call, rows):
    """Return a launch that writes the rows of a checked call of `compress_tokens`, then its states."""
    (tokens, width), name = call.kv.shape, call.fmt.name
    windows, dim, halves = len(rows), rows.shape[1], width // rows.shape[1]
    blocks = call.ape.shape[2] // BLOCK
    workers = threads() if tokens * width >= SMALL_WORK else 1
    room = ROW * (2 * halves * call.ratio + blocks)
    params = PARAMS.filled({
        "workers": workers, "windows": windows, "tokens": tokens, "dim": dim, "ratio": call.ratio,
        "halves": halves, "ring": call.state.shape[1], "blocks": blocks, "kv": call.kv,
        "kv_token": call.kv.strides[0], "gate": call.gate, "gate_token": call.gate.strides[0],
        "ape": call.ape, "weight": call.weight, "numbers": call.numbers, "sequences": call.sequences,
        "of_window": call.windows, "positions": call.positions, "of_token": call.sequence_of_token,
        "starts": call.starts, "first": call.first, "slots": call.slots, "state": call.state,
        "slot_bytes": call.state.strides[0], "rows": rows, "load": load_row(name).address,
        "load_float": load_row("float32").address, "store_float": store_row("float32").address,
        "scratch": 0, "scratch_bytes": room,
    })  # fmt: skip
    pool, remember = pool_code(name), remember_code(name)

    def run():
        params[PARAMS.at["scratch"]] = workspace.at_least(workers * room)
        if windows:
            run_workers(pool, workers, address(params))
        run_workers(remember, workers, address(params))

    return Launch(params, {}, run, alive=(call, rows))
