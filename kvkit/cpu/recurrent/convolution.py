"""Convolve the channels of each sequence with a short causal filter.

y_t = bias + sum over j < K of weight_j x_(t - K + 1 + j)      out = y, or y sigmoid(y)

A worker takes a block of channels of a sequence. Inputs are widened to float32 once, into a window that
begins with the last K - 1 inputs of the token before.
"""

import functools

from numba import types

from kvkit.cpu import memory
from kvkit.cpu.launches import WORKER, Launch, Record, Workspace, run_in_scratch, threads
from kvkit.cpu.recurrent.rows import load_row, move_row, store_row
from kvkit.cpu.simd.lanes import LANES
from kvkit.cpu.simd.recurrent import conv_row
from kvkit.formats.elements import BY_NAME
from kvkit.formulas.index import share
from kvkit.runtime.jit import callback, helper

PARAMS = Record(
    "workers sequences channels blocks load store silu x x_token out out_token weight bias",
    "starts slots state slot_bytes scratch scratch_bytes",
)
BLOCK, TOKENS = 256, 32  # channels and tokens of a window
ROW = 4 * BLOCK  # bytes of a row of a window
SMALL_WORK = 2**16  # inputs below which one thread does it all
record, integers = memory.record(PARAMS), memory.integers
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
ZERO = types.float32(0)


@functools.cache
def conv_code(element, width):
    """Compile the convolution of inputs of a format with filters of a width."""
    size, past = BY_NAME[element].bytes(1), width - 1
    get, put, convolve_row = memory.read(element), memory.write(element), conv_row(width)

    @helper
    def load_block(params, window, first, count):
        """Write weights [width, BLOCK] and the bias of a block behind a window; zeros as padding."""
        weights = window + (past + TOKENS) * ROW
        for j in range(width):
            for c in range(BLOCK):
                place = params.weight + 4 * (j * params.channels + first + c)
                put_float(weights + j * ROW + 4 * c, get_float(place) if c < count else ZERO)
        for c in range(BLOCK):
            bias = get_float(params.bias + 4 * (first + c)) if c < count else ZERO
            put_float(weights + width * ROW + 4 * c, bias)

    def convolve(worker, params_at):
        params = record(params_at)
        window = params.scratch + worker * params.scratch_bytes
        weights = window + (past + TOKENS) * ROW
        output = weights + (width + 1) * ROW
        items = params.sequences * params.blocks
        for item in range(share(items, worker, params.workers), share(items, worker + 1, params.workers)):
            block, sequence = item // params.sequences, item % params.sequences
            first = block * BLOCK
            count = min(BLOCK, params.channels - first)
            vectors = (count + LANES - 1) // LANES
            slot = integers(params.slots)[sequence]
            begin, end = integers(params.starts)[sequence], integers(params.starts)[sequence + 1]
            if begin == end:
                continue
            load_block(params, window, first, count)
            state = params.state + slot * params.slot_bytes + first * past * size
            if slot < 0:
                for c in range(BLOCK):
                    put_float(output + 4 * c, ZERO)
            else:
                for c in range(count):
                    for j in range(past):
                        put_float(window + j * ROW + 4 * c, get(state + (c * past + j) * size))
            for token in range(begin, end):
                target = params.out + token * params.out_token + first * size
                at = window + (past + (token - begin) % TOKENS) * ROW
                if slot >= 0:
                    move_row(params.load, params.x + token * params.x_token + first * size, at, count)
                    convolve_row(
                        at - past * ROW, ROW, weights, ROW, weights + width * ROW, target=output,
                        count=vectors, silu=params.silu,
                    )  # fmt: skip
                move_row(params.store, output, target, count)
                if (token - begin) % TOKENS == TOKENS - 1 or token == end - 1:
                    move_rows(at - (past - 1) * ROW, window, past)
            if slot >= 0:
                for c in range(count):
                    for j in range(past):
                        put(state + (c * past + j) * size, get_float(window + j * ROW + 4 * c))

    return callback(convolve, WORKER, (element, width))


@helper
def move_rows(source, target, rows):
    """Copy rows of a window to its begin; they may overlap."""
    for i in range(rows * BLOCK):
        put_float(target + 4 * i, get_float(source + 4 * i))


workspace = Workspace()


def prepare_convolution(call, out):
    """Return a launch that runs a checked convolution."""
    (tokens, channels), width, name = call.x.shape, len(call.weight), call.fmt.name
    blocks, sequences = -(-channels // BLOCK), len(call.starts) - 1
    workers = min(threads(), max(blocks * sequences, 1)) if tokens * channels >= SMALL_WORK else 1
    room = ROW * (width - 1 + TOKENS + width + 1 + 1)
    params = PARAMS.filled({
        "workers": workers, "sequences": sequences, "channels": channels, "blocks": blocks,
        "load": load_row(name).address, "store": store_row(name).address, "silu": call.silu,
        "x": call.x, "x_token": call.x.strides[0], "out": out, "out_token": out.strides[0],
        "weight": call.weight, "bias": call.bias, "starts": call.starts, "slots": call.slots,
        "state": call.state, "slot_bytes": call.state.strides[0], "scratch": 0, "scratch_bytes": room,
    })  # fmt: skip
    place = PARAMS.at["scratch"], workspace, room
    run = functools.partial(run_in_scratch, conv_code(name, width), workers, params, *place)
    return Launch(params, {}, run, alive=(call, out))
