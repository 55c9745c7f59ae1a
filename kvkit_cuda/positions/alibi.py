"""Masks with ALiBi biases: every row in chunks, with the row of another mask added.

Slopes are made on the host.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME, mask_bytes
from kvkit.formulas import numeric
from kvkit.formulas.index import share
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import sequence_of
from kvkit_cuda.device_runtime import device, host, memory

THREADS = 256  # of a block
WIDEST = 16  # bytes of a chunk
ZERO, MINUS_INF = np.float32(0), np.float32(-np.inf)

INT, INDEX1 = types.int64, types.Array(types.int64, 1, "C")
PLACE = types.UniTuple(types.int64, 4)
SIGNATURE = types.void(INDEX1, INDEX1, INDEX1, PLACE, PLACE, INT, INT, INT, INT)


@functools.cache
def slopes(num_heads):
    """The slope of every head, float32."""
    return np.array([numeric.alibi_slope(head, num_heads) for head in range(num_heads)], np.float32)


@functools.cache
def slope_bits(num_heads):
    return slopes(num_heads).view(np.uint32).astype(np.int64)


@functools.cache
def addend(mask):
    """(address) -> float32, an element of a mask; False of a boolean one hides. None has no elements."""
    if mask != "bool":
        return chunks.read(mask) if mask else shared(lambda address: ZERO)
    read = memory.load(1, 1)

    @shared
    def addend(address):
        low, _ = read(address)
        return MINUS_INF if low == np.uint64(0) else ZERO

    return addend


@functools.cache
def fill(element, mask, span):
    """(target, mask, first column, begin, end, diagonal, columns of the mask, slope, padding): a chunk."""
    write, encode, bits = (
        memory.store(*chunks.access(element, span)),
        chunks.ENCODE[element],
        BY_NAME[element].bits,
    )
    added, mask_size, product = addend(mask), mask_bytes(mask), device.product

    @shared
    def fill(target, row, first, begin, end, diagonal, total, slope, padding):
        low, high = np.uint64(0), np.uint64(0)
        for i in range(span):
            column = first + i
            if column >= total:
                x = numeric.float_of(np.uint32(padding))
            elif begin <= column < end and column > diagonal:
                x = MINUS_INF
            else:
                x = ZERO
                if begin <= column < end:
                    x = product(numeric.float_of(np.uint32(slope)), np.float32(column - diagonal))
                x += added(row + column * mask_size)
            low, high = chunks.joined(low, high, np.uint64(encode(x)), i * bits)
        write(target, low, high)

    return fill


def walk(element, mask, span):
    """The kernel for the format of the result, that of another mask, or None, and a chunk size."""
    fill_chunk, size = fill(element, mask, span), BY_NAME[element].bytes(1)

    def walk(starts, kvstarts, slopes, target, added, batches, heads, columns, padding):
        """Write every row of [batches, heads, rows, columns]; `target` and `added` are address and byte
        strides (batch, head, row). Slopes and padding come as bits of float32.
        """
        rows, total = starts[starts.shape[0] - 1], kvstarts[kvstarts.shape[0] - 1]
        items = batches * heads * rows
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        for item in range(share(items, team, teams), share(items, team + 1, teams)):
            pair = item // rows
            row, batch = item - pair * rows, pair // heads
            head = pair - batch * heads
            sequence = sequence_of(starts, row)
            begin, end = kvstarts[sequence], kvstarts[sequence + 1]
            diagonal = end - starts[sequence + 1] + row
            place = target[0] + batch * target[1] + head * target[2] + row * target[3]
            other = added[0] + batch * added[1] + head * added[2] + row * added[3]
            for first in range(cuda.threadIdx.x * span, columns, cuda.blockDim.x * span):
                fill_chunk(
                    place + first * size, other, first, begin, end, diagonal, total, slopes[head], padding
                )

    return walk


@functools.cache
def compiled(element, mask, span):
    return device.kernel(walk(element, mask, span), SIGNATURE, (element, mask, span))


def prepare(call, target, stream):
    """A launch that writes a checked call's mask, [batches, heads, rows, columns]."""
    batches, heads, rows, columns = target.shape
    element, place = call.fmt.name, (target.ctypes.data, *target.strides[:3])
    aligned = all(number % WIDEST == 0 for number in place)
    span = WIDEST * 8 // call.fmt.bits if aligned else 1  # columns are a multiple of 16
    team = min(THREADS, 1 << (columns // span - 1).bit_length())
    blocks = min(-(-batches * heads * rows // (THREADS // team)), host.most_blocks())
    tables = host.tables((call.starts, call.kvstarts, slope_bits(heads)), stream)
    padding = int(np.float32(call.padding).view(np.uint32))
    arguments = *tables, place, call.place, batches, heads, columns, padding
    kernel = compiled(element, call.element, span)
    return host.Launch(kernel, (blocks, 1), (team, THREADS // team), stream, arguments)
