"""Compute the position of every packed token.

out[token] = first[b] + token - starts[b]       for the sequence b of the token
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.runtime.jit import shared
from kvkit_cuda.copy.transfer import sequence_of
from kvkit_cuda.device_runtime import device, host, memory

THREADS = 256  # of a block

INDEX1 = types.Array(types.int64, 1, "C")
SIGNATURE = types.void(INDEX1, INDEX1, types.int64)

write = memory.store(size=8, align=8)


@shared
def put(target, position):
    write(target, np.uint64(position), np.uint64(0))  # the second word is for stores of 16 bytes


def write_positions(starts, first, target):
    """Write the position of every packed token."""
    for token in range(cuda.grid(1), starts[starts.shape[0] - 1], cuda.gridsize(1)):
        sequence = sequence_of(starts, token)
        put(target + token * 8, first[sequence] + token - starts[sequence])


@functools.cache
def compiled():
    return device.kernel(write_positions, SIGNATURE)


def prepare(starts, first, target, stream):
    """Return a launch that writes the position of every packed token to an array of the device."""
    tables, tokens = host.tables((starts, first), stream), int(starts[-1])
    blocks = min(-(-tokens // THREADS), host.most_blocks())
    arguments = *tables, target.ctypes.data
    return host.Launch(compiled(), (blocks, 1), (THREADS, 1), stream, arguments)
