"""Compute a table with the cosine and sine of every token's angles, for the rotation of queries and keys.

    table[token, i] = cos a, sin a      a = position(token) / divisor * frequency[i]

Angles are reduced and their series summed in float64, as on the CPU. Cosines and sines that the caller gives
are looked up. Frequencies are computed on the CPU; so is the whole table if angles are too large for
`numeric.cos_sin`.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit import cpu
from kvkit.formulas import numeric
from kvkit.runtime.jit import shared
from kvkit_cuda.attention import scores
from kvkit_cuda.attention.params import kind
from kvkit_cuda.copy.transfer import sequence_of
from kvkit_cuda.device_runtime import device, host, memory

THREADS = 128  # of a block
PAIR = 8  # bytes of a cosine and a sine

INT, FLOAT, INDEX1 = types.int64, types.float64, types.Array(types.int64, 1, "C")
SIGNATURE = types.void(INDEX1, INDEX1, INDEX1, types.Array(types.int64, 2, "C"), FLOAT, INT)
SIDE = types.UniTuple(INT, 4)
LOOK_UP = types.void(INDEX1, INDEX1, SIDE, SIDE, INT, INT)

write, read_number = memory.store(PAIR, PAIR), scores.read_number


@shared
def put(target, position, divisor, frequency):
    """Write the cosine and sine of an angle; the frequency is given as bits."""
    angle = numeric.rotary_angle(position, divisor, numeric.float_of(np.uint32(frequency)))
    cosine, sine = numeric.cos_sin(angle)
    put_pair(target, cosine, sine)


@shared
def put_pair(target, cosine, sine):
    """Write a cosine and a sine as one word."""
    word = np.uint64(numeric.bits_of(cosine)) | (np.uint64(numeric.bits_of(sine)) << np.uint64(32))
    write(target, word, np.uint64(0))


def compute_table(starts, first, rows, frequencies, divisor, target):
    """Write [tokens, pairs] cosines and sines; sequence b has the frequencies of row ``rows[b]``."""
    pairs = frequencies.shape[1]
    total = starts[starts.shape[0] - 1] * pairs
    for item in range(cuda.grid(1), total, cuda.gridsize(1)):
        token = item // pairs
        sequence = sequence_of(starts, token)
        position = first[sequence] + token - starts[sequence]
        put(target + item * PAIR, position, divisor, frequencies[rows[sequence], item - token * pairs])


def look_up(starts, first, cosines, sines, pairs, target):
    """Write [tokens, pairs] from tables of every position: address, byte strides, and the type's number."""
    total = starts[starts.shape[0] - 1] * pairs
    for item in range(cuda.grid(1), total, cuda.gridsize(1)):
        token = item // pairs
        sequence, pair = sequence_of(starts, token), item - token * pairs
        position = first[sequence] + token - starts[sequence]
        cosine = read_number(cosines[3], cosines[0] + position * cosines[1] + pair * cosines[2])
        sine = read_number(sines[3], sines[0] + position * sines[1] + pair * sines[2])
        put_pair(target + item * PAIR, cosine, sine)


@functools.cache
def compiled(function):
    return device.kernel(function, SIGNATURE if function is not look_up else LOOK_UP)


def table(call, stream):
    """Return a call's table, the starts of its sequences, both on the device, and a launch that fills it."""
    starts, first, pairs = call.starts, call.first, call.rotated // 2
    tokens = int(starts[-1])
    if call.tables:
        tables = host.tables((starts, first), stream)
        kernel, read = look_up, tuple((each.ctypes.data, *each.strides, kind(each)) for each in call.tables)
        arguments = *tables, *read, pairs
    else:
        theta, divisor, longest, factor = call.scaling
        stops = first + np.diff(starts)
        stops, rows = np.unique(np.where(stops > longest, stops, 0), return_inverse=True)
        found = cpu.positions.rotary.frequencies(theta, call.rotated, stops, longest, factor)
        if not are_small(starts, first, found[rows], divisor):
            # The host computes the table [tokens, 1, 2 * pairs], by rotating (1, 0).
            ones = np.zeros((tokens, 1, call.rotated), np.float32)
            ones[..., ::2] = 1
            turned = np.empty_like(ones)
            moves = (ones, turned), (ones[:, :0], turned[:, :0])
            of_host = "float32", moves, starts, first, call.rotated, True, False, None, call.scaling
            cpu.launches.start(cpu.positions.rotary.prepare_rotary(*of_host))
            return host.upload(turned, stream), *host.tables((starts,), stream), nothing
        tables = host.tables((starts, first, rows, found.view(np.uint32).astype(np.int64)), stream)
        kernel, arguments = compute_table, (*tables, divisor)
    numbers = host.empty(tokens * pairs * PAIR, np.uint8, stream)
    blocks = min(-(-tokens * pairs // THREADS), host.most_blocks())
    arguments = *arguments, host.address(numbers)
    launch = host.Launch(compiled(kernel), (blocks, 1), (THREADS, 1), stream, arguments)
    return numbers, tables[0], launch


def nothing():
    """Launch nothing, because the table is complete."""


def are_small(starts, first, frequencies, divisor):
    """Return whether all angles are small enough for `numeric.cos_sin`."""
    lengths = np.diff(starts)
    farthest = np.maximum(np.abs(first), np.abs(first + lengths - 1))[lengths > 0]
    with np.errstate(over="ignore"):
        angles = farthest.astype(np.float32) / np.float32(divisor) * frequencies[lengths > 0].max(axis=1)
    return bool((angles < numeric.MAX_ANGLE).all())
