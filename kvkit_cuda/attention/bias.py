"""Gather Ascend's razor offset, a number for each row of the cache that is added to its scores.

    target[entry, p] = scale * bias[block[entry, p // block_size], p % block_size]
    block[entry, page] = table[entries + entry * columns + page] / step

An entry is a sequence, or one of its key heads. The table has rows where blocks begin: `step` is the distance
of row ids from block to block.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formulas import numeric
from kvkit.formulas.index import page_of
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.device_runtime import device, host

THREADS = 256  # of a block
INT = types.int64
SIGNATURE = types.void(types.Array(INT, 1, "C"), *[INT] * 4, types.UniTuple(INT, 3), INT, INT)

read, write = chunks.read("float32"), chunks.write("float32")


@shared
def put(target, source, scale):
    """Write source * scale in float32; the scale is passed as its bits."""
    write(target, device.product(read(source), numeric.float_of(np.uint32(scale))))


def copy_bias(table, entries, step, blocks, block_size, bias, scale, target):
    """Write the scaled bias [entries, rows]; `bias` is address and byte strides (block, row).

    `table` has the first row of each block, a multiple of `step`, after the entries' first indices.
    """
    columns = table.shape[0] // entries - 1
    width = columns * block_size
    for item in range(cuda.grid(1), entries * width, cuda.gridsize(1)):
        entry = item // width
        position = item - entry * width
        page = page_of(position, block_size)
        block = table[entries + entry * columns + page] // step if step else 0
        block = min(block, blocks - 1)  # the table is arbitrary after a context
        row = position - page * block_size
        put(target + item * 4, bias[0] + block * bias[1] + row * bias[2], scale)


@functools.cache
def compiled():
    return device.kernel(copy_bias, SIGNATURE)


def prepare(table, step, bias, scale, target, stream):
    """Return a launch that writes `target` from `bias` [blocks, rows of a block], both on the device."""
    blocks, block_size = bias.shape
    source = bias.ctypes.data, *bias.strides
    bits = int(np.float32(scale).view(np.uint32))
    arguments = table, len(target), step, blocks, block_size, source, bits, target.ctypes.data
    grid = min(-(-target.size // THREADS), host.most_blocks()), 1
    return host.Launch(compiled(), grid, (THREADS, 1), stream, arguments)
