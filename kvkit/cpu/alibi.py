"""ALiBi slopes, and masks: a row of one is straight lines, with the row of another mask added."""

import functools

import numpy as np
from llvmlite import ir
from numba import prange, types

from kvkit import numeric
from kvkit.cpu import memory
from kvkit.cpu.launches import Launch, address, threads
from kvkit.cpu.simd.lanes import F32, I8, I32, RAW, Lanes, fill, micro_kernel, narrow, read, widen, write
from kvkit.cpu.transfer import SMALL_BYTES
from kvkit.formats.elements import BY_NAME, mask_bytes
from kvkit.index import sequence_of, share
from kvkit.jit import callback, helper, kernel

LANES = 16
F64 = ir.DoubleType()
ZERO, MINUS_INF = np.float32(0), np.float32(-np.inf)
INT, INDEX1, INDEX2 = types.int64, types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
ROW_SIGNATURE = types.void(*[INT] * 9)
SIGNATURE = types.void(INT, INT, INDEX1, INDEX1, INT, INT, INT, INT, INDEX2)

call_row = memory.call(9)
put_slope = memory.store(types.float32)


def slopes(target, num_heads):
    for head in range(num_heads):
        put_slope(target + 4 * head, numeric.alibi_slope(head, num_heads))


@functools.cache
def compiled_slopes():
    return kernel(slopes, types.void(INT, INT))


@functools.cache
def addend(mask):
    """(address) -> float32, an element of a mask; False of a boolean one hides."""
    if mask == "bool":
        raw = memory.load(types.int8)
        return helper(lambda address: ZERO if raw(address) else MINUS_INF)
    return memory.read(mask)


def addends(b, address, mask):
    """16 lanes of a mask."""
    if mask != "bool":
        return widen(read(b, address, RAW[mask], LANES), mask)
    raw = read(b, address, I8, LANES)
    hides = b.icmp_unsigned("==", raw.value, raw.of(0))
    zero, hidden = (ir.Constant(ir.VectorType(F32, LANES), [x] * LANES) for x in (0.0, float("-inf")))
    return Lanes(b, b.select(hides, hidden, zero))


@functools.cache
def panel(element, mask):
    """(target, mask, slope, distance, offset): 16 elements of a line; floats come as bits."""

    @micro_kernel(5)
    def panel(b, target, mask_address, slope, distance, offset):
        slope, offset = (fill(b, b.bitcast(b.trunc(bits, I32), F32), LANES) for bits in (slope, offset))
        begin = b.insert_element(
            ir.Constant(ir.VectorType(F64, 1), ir.Undefined), b.sitofp(distance, F64), I32(0)
        )
        steps = ir.Constant(ir.VectorType(F64, LANES), [float(lane) for lane in range(LANES)])
        line = (Lanes(b, begin).pick([0] * LANES) + Lanes(b, steps)).cast("fptrunc", F32) * slope + offset
        if mask is not None:
            line = line + addends(b, mask_address, mask)
        write(b, target, narrow(line, element))

    return panel


@functools.cache
def line(element, mask, plain):
    """Columns first..last-1 of a row: slope * (column - diagonal) + offset, and the mask."""
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
    """Compile a row: zeros, from `begin` to `end` the biases of a sequence, zeros up to `total`, padding.

    The mask covers `total` columns. `plain` leaves the vectors out, for the tests.
    """
    masked, bare = line(element, mask, plain), line(element, None, plain)

    def row_of_mask(target, mask_row, begin, end, diagonal, total, columns, slope, padding):
        seen = min(max(diagonal + 1, begin), end)
        slope, padding = numeric.float_of(np.uint32(slope)), numeric.float_of(np.uint32(padding))
        masked(target, mask_row, 0, begin, ZERO, 0, ZERO)
        masked(target, mask_row, begin, seen, slope, diagonal, ZERO)
        bare(target, mask_row, seen, end, ZERO, 0, MINUS_INF)
        masked(target, mask_row, end, total, ZERO, 0, ZERO)
        bare(target, mask_row, total, columns, ZERO, 0, padding)

    return callback(row_of_mask, ROW_SIGNATURE, (element, mask, plain))


def walk(code, chunks, starts, kvstarts, batches, heads, columns, padding, places):
    """Write every row; `places` [target|mask] are address and byte strides (batch, head, row)."""
    rows, total = starts[-1], kvstarts[-1]
    items = batches * heads * rows
    for part in prange(chunks):
        chunk = np.int64(part)
        for item in range(share(items, chunk, chunks), share(items, chunk + 1, chunks)):
            head, row = item // rows, item % rows
            batch, head = head // heads, head % heads
            sequence = sequence_of(starts, row)
            begin, end = kvstarts[sequence], kvstarts[sequence + 1]
            target, mask = places[0], places[1]
            call_row(
                code,
                target[0] + batch * target[1] + head * target[2] + row * target[3],
                mask[0] + batch * mask[1] + head * mask[2] + row * mask[3],
                begin, end, end - starts[sequence + 1] + row, total, columns,
                np.int64(numeric.bits_of(numeric.alibi_slope(head, heads))), padding,
            )  # fmt: skip


@functools.cache
def compiled(parallel):
    return kernel(walk, SIGNATURE, parallel, parallel=parallel)


def prepare(target, element, starts, kvstarts, mask, mask_element, padding):
    """A launch that fills `target` [batch, head, row, column]; `mask` is where another lies, or zeros.

    Rows and columns are those of sequences that begin at `starts` and `kvstarts`; columns beyond the last
    hold `padding`. Nothing can fail any more.
    """
    batches, heads, _, columns = target.shape
    parallel = target.nbytes >= SMALL_BYTES
    chunks = threads() if parallel else 1
    places = np.array([(address(target), *target.strides[:3]), mask], np.int64)
    bits = int(np.float32(padding).view(np.uint32))
    code = row_of_mask(element, mask_element).address
    arguments = code, chunks, starts, kvstarts, batches, heads, columns, bits, places
    return Launch(places.reshape(-1), {}, functools.partial(compiled(parallel), *arguments), alive=(target,))
