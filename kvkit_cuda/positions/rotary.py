"""Rotary position embedding: neighbouring elements of a head turn in pairs, by a table of `angles`.

Tokens are shared out to teams of threads, which take a chunk of a head each. A chunk may turn where it lies:
its thread reads all of it before it writes.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.formulas.index import share
from kvkit.layouts.places import packed_strides
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import sequence_of
from kvkit_cuda.device_runtime import device, host, memory
from kvkit_cuda.positions import angles

THREADS = 256  # of a block
WIDEST = 16  # bytes of a chunk
SMALLEST = 2  # elements of one

INT, SIDE = types.int64, types.UniTuple(types.int64, 10)
SIGNATURE = types.void(types.Array(types.int64, 1, "C"), INT, INT, INT, SIDE, SIDE)


def widest(element):
    """How many elements 16 bytes hold."""
    return WIDEST * 8 // BY_NAME[element].bits


@functools.cache
def turn(element, span):
    """(source, target, table): a chunk, turned by the cosine and sine of each pair."""
    form, step = (
        chunks.access(element, span),
        min(span, 4),
    )  # elements whose pairs one access to the table has
    read, write = memory.load(*form, invariant=False), memory.store(*form)
    pairs = memory.load(step * 4, step * 4)
    (raw, decode), encode, bits = chunks.DECODE[element], chunks.ENCODE[element], BY_NAME[element].bits
    rotated = numeric.rotation(device.product)

    @shared
    def turn(source, target, table):
        low, high = read(source)
        new_low, new_high = np.uint64(0), np.uint64(0)
        for first in range(0, span, step):
            one, other = pairs(table + first * 4)
            for i in range(first, first + step, 2):
                pair = one if i == first else other
                cosine = numeric.float_of(np.uint32(pair))
                sine = numeric.float_of(np.uint32(pair >> np.uint64(32)))
                even = decode(raw(chunks.field(low, high, i * bits)))
                odd = decode(raw(chunks.field(low, high, (i + 1) * bits)))
                even, odd = rotated(even, odd, cosine, sine)
                new_low, new_high = chunks.joined(new_low, new_high, np.uint64(encode(even)), i * bits)
                new_low, new_high = chunks.joined(new_low, new_high, np.uint64(encode(odd)), (i + 1) * bits)
        write(target, new_low, new_high)

    return turn


@functools.cache
def turn_halves(element, span):
    """(source, target, bytes between the elements of a pair, table): two chunks, turned by each other."""
    form, at_once = chunks.access(element, span), min(span, 2)  # pairs that one access to the table has
    read, write = memory.load(*form, invariant=False), memory.store(*form)
    pairs = memory.load(at_once * 8, at_once * 8)
    (raw, decode), encode, bits = chunks.DECODE[element], chunks.ENCODE[element], BY_NAME[element].bits
    rotated = numeric.rotation(device.product)

    @shared
    def turn(source, target, behind, table):
        x_low, x_high = read(source)
        y_low, y_high = read(source + behind)
        low, high, other_low, other_high = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        for first in range(0, span, at_once):
            one, other = pairs(table + first * angles.PAIR)
            for i in range(first, first + at_once):
                pair = one if i == first else other
                cosine = numeric.float_of(np.uint32(pair))
                sine = numeric.float_of(np.uint32(pair >> np.uint64(32)))
                x = decode(raw(chunks.field(x_low, x_high, i * bits)))
                y = decode(raw(chunks.field(y_low, y_high, i * bits)))
                x, y = rotated(x, y, cosine, sine)
                low, high = chunks.joined(low, high, np.uint64(encode(x)), i * bits)
                other_low, other_high = chunks.joined(other_low, other_high, np.uint64(encode(y)), i * bits)
        write(target, low, high)
        write(target + behind, other_low, other_high)

    return turn


@functools.cache
def copy(element, span):
    """(source, target): a chunk as it is."""
    form = chunks.access(element, span)
    read, write = memory.load(*form, invariant=False), memory.store(*form)

    @shared
    def copy(source, target):
        low, high = read(source)
        write(target, low, high)

    return copy


def walk(element, span, halves=False):
    """The kernel for a format and a chunk size; of neighbours that turn, or of halves."""
    copy_chunk, copy_one = copy(element, span), copy(element, 1)
    turn_chunk = turn_halves(element, span) if halves else turn(element, span)
    size = BY_NAME[element].bytes(1)

    def walk(starts, table, pairs, dim, query, key):
        """Turn all heads of every token by row `token` of the table, [tokens, pairs].

        `query` and `key` hold address and byte strides (sequence, token, head) of source and target, how many
        heads there are, and how many elements of each turn; what else there is of a head is copied.
        """
        at = query if cuda.blockIdx.y == 0 else key
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        total, in_head = starts[starts.shape[0] - 1], (dim + span - 1) // span
        token, end = share(total, team, teams), share(total, team + 1, teams)
        sequence = sequence_of(starts, token)
        while token < end:
            while token >= starts[sequence + 1]:
                sequence += 1
            for column in range(cuda.threadIdx.x, at[8] * in_head, cuda.blockDim.x):
                head = column // in_head
                i = (column - head * in_head) * span
                source = at[0] + sequence * at[1] + token * at[2] + head * at[3] + i * size
                target = at[4] + sequence * at[5] + token * at[6] + head * at[7] + i * size
                if i >= at[9]:
                    if i + span <= dim:
                        copy_chunk(source, target)
                    else:
                        copy_one(source, target)
                elif not halves:
                    turn_chunk(source, target, table + (token * pairs + i // 2) * angles.PAIR)
                elif i < at[9] // 2:
                    turn_chunk(source, target, at[9] // 2 * size, table + (token * pairs + i) * angles.PAIR)
            token += 1

    return walk


@functools.cache
def compiled(*variant):
    return device.kernel(walk(*variant), SIGNATURE, variant)


def prepare(call, targets, table, starts, stream):
    """A launch that turns a checked call's query and key into `targets`, by a table; see `angles.table`."""
    element, dim, turned = call.fmt.name, call.query.shape[-1], call.rotated
    turning, sides = (turned, 0 if call.bypass_key else turned), []
    for source, target, elements in zip((call.query, call.key), targets, turning, strict=True):
        places = [(array.ctypes.data, *packed_strides(array)) for array in (source, target)]
        heads = source.shape[-2] if elements or places[0][0] != places[1][0] else 0  # nothing to do in place
        sides.append((*places[0], *places[1], heads, elements))
    span = span_of(element, dim, turned, sides, call.halves)
    tokens = int(call.starts[-1])
    columns = max(max(side[8] for side in sides) * -(-dim // span), 1)
    team = min(THREADS, 1 << (columns - 1).bit_length())
    blocks = min(-(-tokens // (THREADS // team)), host.most_blocks())
    arguments = starts, host.address(table), turned // 2, dim, *sides
    grid, threads = (blocks, len(sides)), (team, THREADS // team)
    return host.Launch(compiled(element, span, call.halves), grid, threads, stream, arguments)


def span_of(element, dim, turned, sides, halves):
    """Elements of a chunk: as many as 16 bytes hold, or few if those are not aligned or not whole."""
    span, numbers = widest(element), 0
    together = turned // 2 if halves else turned
    for side in sides:
        for number in side[:8]:
            numbers |= number
    whole = dim % span == 0 and together % span == 0
    return span if whole and numbers % WIDEST == 0 else 1 if halves else SMALLEST
