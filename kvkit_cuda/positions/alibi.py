"""Write masks with ALiBi biases, to which another mask may be added.

    out[h, i, j] = slope[h] (j - diagonal(i)) + mask[h, i, j]       -inf for keys after the diagonal

Slopes are computed on the host.
"""

import functools
from typing import Any, NamedTuple

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
SIGNATURE = types.void(*[INDEX1] * 3, *[PLACE] * 2, *[INT] * 4)


class MaskRow(NamedTuple):
    """A row of a mask: the keys that its query sees, and their biases."""

    begin: Any
    end: Any
    diagonal: Any  # the column of the query itself
    total: Any  # columns of the mask; later columns are `padding`
    slope: Any
    padding: Any
    added: Any  # address of the other mask's row


@functools.cache
def slopes(num_heads):
    """Return the slope of every head, float32."""
    return np.array([numeric.alibi_slope(head, num_heads) for head in range(num_heads)], np.float32)


@functools.cache
def slope_bits(num_heads):
    return slopes(num_heads).view(np.uint32).astype(np.int64)


@functools.cache
def addend(mask):
    """Return f(address) -> an element of a mask as float32; False is -inf. Without a mask it returns 0."""
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
    """Return f(target, first column, row), which writes a chunk of a row."""
    write, encode = memory.store(*chunks.access(element, span)), chunks.ENCODE[element]
    bits = BY_NAME[element].bits
    added, mask_size, product = addend(mask), mask_bytes(mask), device.product

    @shared
    def fill(target, first, row):
        low, high = np.uint64(0), np.uint64(0)
        for i in range(span):
            column = first + i
            if column >= row.total:
                x = numeric.float_of(np.uint32(row.padding))
            elif row.begin <= column < row.end and column > row.diagonal:
                x = MINUS_INF
            else:
                x = ZERO
                if row.begin <= column < row.end:
                    distance = np.float32(column - row.diagonal)
                    x = product(numeric.float_of(np.uint32(row.slope)), distance)
                x += added(row.added + column * mask_size)
            low, high = chunks.insert_bits(low, high, np.uint64(encode(x)), i * bits)
        write(target, low, high)

    return fill


def write_mask(element, mask, span):
    """Return the kernel for formats of the result and of another mask (or None), and a chunk size."""
    fill_chunk, size = fill(element, mask, span), BY_NAME[element].bytes(1)

    def write_mask(starts, kvstarts, slopes, target, added, batches, heads, columns, padding):
        """Write every row of [batches, heads, rows, columns].

        `target` and `added` are address and byte strides (batch, head, row). Slopes and padding are bits of
        float32.
        """
        rows, total = starts[starts.shape[0] - 1], kvstarts[kvstarts.shape[0] - 1]
        items = batches * heads * rows
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        for item in range(share(items, team, teams), share(items, team + 1, teams)):
            pair = item // rows
            token, batch = item - pair * rows, pair // heads
            head = pair - batch * heads
            sequence = sequence_of(starts, token)
            row = MaskRow(
                begin=kvstarts[sequence], end=kvstarts[sequence + 1],
                diagonal=kvstarts[sequence + 1] - starts[sequence + 1] + token,
                total=total, slope=slopes[head], padding=padding,
                added=added[0] + batch * added[1] + head * added[2] + token * added[3],
            )  # fmt: skip
            place = target[0] + batch * target[1] + head * target[2] + token * target[3]
            for first in range(cuda.threadIdx.x * span, columns, cuda.blockDim.x * span):
                fill_chunk(place + first * size, first, row)

    return write_mask


compiled = device.variants(write_mask, SIGNATURE)


def prepare(call, target, stream):
    """Return a launch that writes a checked call's mask, [batches, heads, rows, columns]."""
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
