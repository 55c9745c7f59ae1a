"""Write rows that are means of tokens, for compressed caches.

    target[piece.target] = (source[piece.source] + source[piece.source + 1] + ..) / piece.count

Sums are float32, in token order, with one division. The result depends on the order of addition, so one
thread sums one element over all tokens.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.pieces import COUNT, INDEX2, SIDE, SOURCE, TARGET, row_at, side
from kvkit_cuda.device_runtime import device, host

THREADS = 128  # per CUDA block
AHEAD = 16  # tokens per inner loop, which can be unrolled so that many loads are in flight

SIGNATURE = types.void(INDEX2, types.int64, SIDE, SIDE, SIDE, SIDE)


@functools.cache
def mean(element):
    """Compile f(source, row stride, count, target), which writes one element of the mean of `count` rows."""
    read, write = chunks.read(element), chunks.write(element)

    @shared
    def mean(source, row, count, target):
        total = np.float32(0)
        for _ in range(count // AHEAD):
            i = 0
            while i < AHEAD:
                total += read(source + i * row)
                i += 1
            source += AHEAD * row
        for i in range(count % AHEAD):
            total += read(source + i * row)
        write(target, total / np.float32(count))

    return mean


def average_rows(element):
    """Return the kernel that averages rows of a dtype."""
    average = mean(element)

    def average_rows(pieces, dim, from_keys, to_keys, from_values, to_values):
        """Write the mean of every piece's rows into its target row."""
        source = from_keys if cuda.blockIdx.y == 0 else from_values
        target = to_keys if cuda.blockIdx.y == 0 else to_values
        for item in range(cuda.grid(1), pieces.shape[0] * dim, cuda.gridsize(1)):
            piece = item // dim
            place = row_at(source, pieces[piece, SOURCE])
            to_place = row_at(target, pieces[piece, TARGET])
            i = item - piece * dim
            average(place + i * source.step, source.row, pieces[piece, COUNT], to_place + i * target.step)

    return average_rows


compiled = device.variants(average_rows, SIGNATURE)


def prepare(pairs, pieces, element, stream):
    """Return launches that write the means of pieces, for one or two pairs of arrays (source, target)."""
    if not len(pieces):
        return []
    dim, size = pairs[0][0].shape[3], pairs[0][0].itemsize
    alike = [side(array, size) for pair in pairs for array in pair]
    (table,) = host.tables((pieces,), stream)
    blocks = min(-(-len(pieces) * dim // THREADS), host.most_blocks())
    arguments = (table, dim, *alike, *alike)[:6]  # one pair is passed for keys and for values
    grid = blocks, len(pairs)
    return [host.Launch(compiled(element), grid, (THREADS, 1), stream, arguments)]
