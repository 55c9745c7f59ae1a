"""Write ALiBi slopes and masks; another mask can be added to an ALiBi mask."""

import functools

import numpy as np
from llvmlite import ir
from numba import types

from kvkit.cpu import memory
from kvkit.cpu.copy.transfer import SMALL_BYTES
from kvkit.cpu.launches import WORKER, Launch, Record, address, run_workers, threads
from kvkit.cpu.simd.lanes import F32, I32, LANES, RAW, Lanes, fill, micro_kernel, narrow, read, widen, write
from kvkit.formats.elements import BY_NAME, mask_bytes
from kvkit.formulas import numeric
from kvkit.formulas.index import sequence_among, share
from kvkit.runtime.jit import callback, compiled, helper

F64 = ir.DoubleType()
ZERO, MINUS_INF = np.float32(0), np.float32(-np.inf)
INT = types.int64
ROW_SIGNATURE = types.void(*[INT] * 9)
PLACES = "target", "target_batch", "target_head", "target_row", "mask", "mask_batch", "mask_head", "mask_row"
PARAMS = Record("row_code workers starts kvstarts sequences batches heads columns padding", " ".join(PLACES))

record, integers = memory.record(PARAMS), memory.integers
put_slope = memory.store(types.float32)


@memory.machine_code
def call_row(code, target, mask, begin, end, diagonal, total, columns, slope, padding):
    """Call the machine code of `row_of_mask`."""


@compiled(types.void(INT, INT))
def slopes(target, num_heads):
    """Write the slopes of all heads to the address `target`."""
    for head in range(num_heads):
        put_slope(target + 4 * head, numeric.alibi_slope(head, num_heads))


@functools.cache
def addend(mask):
    """Return a helper (address) that reads an element of a mask as float32; False is read as -inf."""
    if mask == "bool":
        raw = memory.load(types.int8)
        return helper(lambda address: ZERO if raw(address) else MINUS_INF)
    return memory.read(mask)


@functools.cache
def panel(element, mask):
    """Return a micro-kernel that writes 16 elements of a mask's row, where False hides.

    Slope and offset are bits of floats.
    """

    @micro_kernel
    def panel(b, target, mask_address, slope, distance, offset):
        slope, offset = (fill(b, b.bitcast(b.trunc(bits, I32), F32), LANES) for bits in (slope, offset))
        first = fill(b, b.sitofp(distance, F64), LANES)
        line = (first + [float(lane) for lane in range(LANES)]).cast("fptrunc", F32) * slope + offset
        if mask == "bool":
            raw = read(b, mask_address, RAW["int8"], LANES)
            hides = b.icmp_unsigned("==", raw.value, raw.of(0))
            ends = (ir.Constant(ir.VectorType(F32, LANES), [x] * LANES) for x in (float("-inf"), 0.0))
            line = line + Lanes(b, b.select(hides, *ends))
        elif mask is not None:
            line = line + widen(read(b, mask_address, RAW[mask], LANES), mask)
        write(b, target, narrow(line, element))

    return panel


@functools.cache
def line(element, mask, plain):
    """Return a helper that writes columns first..last-1: slope * (column - diagonal) + offset + mask."""
    put, size, mask_size = memory.write(element), BY_NAME[element].bytes(1), mask_bytes(mask)
    vector = panel(element, mask)
    if mask is None:
        added = helper(lambda x, address: x)
    else:
        get = addend(mask)
        added = helper(lambda x, address: x + get(address))

    def line(target, mask_row, first, last, slope, diagonal, offset):
        whole = first if plain else last - (last - first) % LANES
        slope_bits, offset_bits = np.int64(numeric.bits_of(slope)), np.int64(numeric.bits_of(offset))
        for j in range(first, whole, LANES):
            vector(target + j * size, mask_row + j * mask_size, slope_bits, j - diagonal, offset_bits)
        for j in range(whole, last):
            x = numeric.alibi_bias(slope, j - diagonal) + offset
            put(target + j * size, added(x, mask_row + j * mask_size))

    return helper(line)


@functools.cache
def row_of_mask(element, mask=None, plain=False):
    """Compile the code that writes a row: 0, a sequence's biases in begin..end, 0 up to `total`, padding.

    The other mask, which is added, has `total` columns. `plain` uses scalar code only (tests).
    """
    masked, bare = line(element, mask, plain), line(element, None, plain)

    def row_of_mask(target, mask_row, begin, end, diagonal, total, columns, slope, padding):
        seen = min(max(diagonal + 1, begin), end)  # the end of the columns that the row's query sees
        slope, padding = numeric.float_of(np.uint32(slope)), numeric.float_of(np.uint32(padding))
        masked(target, mask_row, 0, begin, ZERO, 0, ZERO)
        masked(target, mask_row, begin, seen, slope, diagonal, ZERO)
        bare(target, mask_row, seen, end, ZERO, 0, MINUS_INF)
        masked(target, mask_row, end, total, ZERO, 0, ZERO)
        bare(target, mask_row, total, columns, ZERO, 0, padding)

    return callback(row_of_mask, ROW_SIGNATURE, (element, mask, plain))


@compiled(WORKER)
def write_rows(worker, params_at):
    """Write this worker's rows."""
    params = record(params_at)
    starts, kvstarts = integers(params.starts), integers(params.kvstarts)
    rows, total = starts[params.sequences], kvstarts[params.sequences]
    items = params.batches * params.heads * rows
    for item in range(share(items, worker, params.workers), share(items, worker + 1, params.workers)):
        head, row = item // rows, item % rows
        batch, head = head // params.heads, head % params.heads
        sequence = sequence_among(starts, params.sequences, row)
        begin, end = kvstarts[sequence], kvstarts[sequence + 1]
        call_row(
            params.row_code,
            target=params.target + batch * params.target_batch + head * params.target_head
            + row * params.target_row,
            mask=params.mask + batch * params.mask_batch + head * params.mask_head + row * params.mask_row,
            begin=begin, end=end, diagonal=end - starts[sequence + 1] + row, total=total,
            slope=np.int64(numeric.bits_of(numeric.alibi_slope(head, params.heads))),
            columns=params.columns, padding=params.padding,
        )  # fmt: skip


def prepare_alibi(target, element, starts, kvstarts, mask, mask_element, padding):
    """Return a launch that writes an ALiBi mask to `target` [batch, head, row, column].

    Sequences begin at rows `starts` and at columns `kvstarts`; columns after the last one get `padding`.
    `mask` is address and strides (batch, head, row) of another mask that is added, or zeros.
    """
    batches, heads, _, columns = target.shape
    workers = threads() if target.nbytes >= SMALL_BYTES else 1
    params = PARAMS.filled({
        "row_code": row_of_mask(element, mask_element).address, "workers": workers,
        "starts": starts, "kvstarts": kvstarts, "sequences": len(starts) - 1,
        "batches": batches, "heads": heads, "columns": columns,
        "padding": int(np.float32(padding).view(np.uint32)),
        **dict(zip(PLACES, (target, *target.strides[:3], *mask), strict=True)),
    })  # fmt: skip
    run = functools.partial(run_workers, write_rows.code, workers, address(params))
    return Launch(params, {}, run, alive=(target, starts, kvstarts))
