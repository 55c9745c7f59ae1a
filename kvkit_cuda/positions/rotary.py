"""Rotate queries and keys: pairs of elements of each head, by the table of `angles`.

    x', y' = x cos a - y sin a, x sin a + y cos a

Teams of threads share the tokens; a thread takes a chunk of a head. A chunk may be rotated in place:
its thread reads all of it before it writes.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from kvkit.checks.values import packed_strides
from kvkit.formats import BY_NAME
from kvkit.formulas import numeric
from kvkit.formulas.index import share
from kvkit.runtime.jit import shared
from kvkit_cuda.copy import chunks
from kvkit_cuda.copy.transfer import Reader, sequence_of
from kvkit_cuda.device_runtime import device, host, memory
from kvkit_cuda.positions import angles

THREADS = 256  # of a block
WIDEST = 16  # bytes of a chunk
SMALLEST = 2  # elements of a chunk


class Heads(NamedTuple):
    """Addresses and byte strides of queries or keys, and of their targets."""

    source: Any
    source_sequence: Any
    source_token: Any
    source_head: Any
    target: Any
    target_sequence: Any
    target_token: Any
    target_head: Any
    heads: Any
    rotated: Any  # rotated elements of a head


INT, SIDE = types.int64, types.NamedUniTuple(types.int64, len(Heads._fields), Heads)
SIGNATURE = types.void(types.Array(types.int64, 1, "C"), INT, INT, INT, SIDE, SIDE)


def widest(element):
    """Return how many elements 16 bytes hold."""
    return WIDEST * 8 // BY_NAME[element].bits


@functools.cache
def rotate_neighbours(element, span):
    """Return f(source, target, table), which rotates neighbouring pairs of a chunk."""
    form, step = chunks.access(element, span), min(span, 4)  # elements whose angles one access reads
    read, write = memory.load(*form, invariant=False), memory.store(*form)
    pairs = memory.load(step * 4, step * 4)
    (raw, decode), encode, bits = chunks.DECODE[element], chunks.ENCODE[element], BY_NAME[element].bits
    rotate_pair = numeric.rotation(device.product)

    @shared
    def rotate(source, target, table):
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
                even, odd = rotate_pair(even, odd, cosine, sine)
                new_low, new_high = chunks.insert_bits(new_low, new_high, np.uint64(encode(even)), i * bits)
                word = np.uint64(encode(odd))
                new_low, new_high = chunks.insert_bits(new_low, new_high, word, (i + 1) * bits)
        write(target, new_low, new_high)

    return rotate


@functools.cache
def rotate_halves(element, span):
    """Return f(source, target, behind, table), which rotates a chunk with the chunk `behind` bytes later."""
    form, at_once = chunks.access(element, span), min(span, 2)  # pairs that one access to the table reads
    read, write = memory.load(*form, invariant=False), memory.store(*form)
    pairs = memory.load(at_once * 8, at_once * 8)
    (raw, decode), encode, bits = chunks.DECODE[element], chunks.ENCODE[element], BY_NAME[element].bits
    rotate_pair = numeric.rotation(device.product)

    @shared
    def rotate(source, target, behind, table):
        x_low, x_high = read(source)
        y_low, y_high = read(source + behind)
        low, high, late_low, late_high = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        for first in range(0, span, at_once):
            one, other = pairs(table + first * angles.PAIR)
            for i in range(first, first + at_once):
                pair = one if i == first else other
                cosine = numeric.float_of(np.uint32(pair))
                sine = numeric.float_of(np.uint32(pair >> np.uint64(32)))
                x = decode(raw(chunks.field(x_low, x_high, i * bits)))
                y = decode(raw(chunks.field(y_low, y_high, i * bits)))
                x, y = rotate_pair(x, y, cosine, sine)
                low, high = chunks.insert_bits(low, high, np.uint64(encode(x)), i * bits)
                late_low, late_high = chunks.insert_bits(late_low, late_high, np.uint64(encode(y)), i * bits)
        write(target, low, high)
        write(target + behind, late_low, late_high)

    return rotate


class Chunk(NamedTuple):
    """A chunk of a head that is rotated as it is read."""

    address: Any
    element: Any  # its first element in the head
    angles: Any  # the address of the token's [pairs, (cosine, sine)]; 0 leaves the chunk as it is
    begin: Any  # the first element that is rotated
    pairs: Any


@functools.cache
def rotating_reader(element, span, halves):
    """Return the `Reader` of chunks that are rotated; a pair spans both `halves`, or is two neighbours."""
    read, angle = memory.load(*chunks.access(element, span)), memory.load(angles.PAIR, angles.PAIR)
    (raw, decode), encode, bits = chunks.DECODE[element], chunks.ENCODE[element], BY_NAME[element].bits
    rotate_pair, size = numeric.rotation(device.product), BY_NAME[element].bytes(1)

    @shared
    def rotated(x, y, pair, second):
        word, _ = angle(pair)
        cosine, sine = numeric.float_of(np.uint32(word)), numeric.float_of(np.uint32(word >> np.uint64(32)))
        x, y = rotate_pair(x, y, cosine, sine)
        return np.uint64(encode(y if second else x))

    @shared
    def read_apart(at):
        """Rotate a chunk with the chunk of its partners, which lie before it or after it."""
        low, high = read(at.address)
        i = at.element - at.begin
        if at.angles == 0 or i < 0 or i >= 2 * at.pairs:
            return low, high
        second = i >= at.pairs if halves else i % 2 == 1
        away = at.pairs * size if halves else size
        pair = (i - at.pairs if second else i) if halves else i // 2
        other_low, other_high = read(at.address - away if second else at.address + away)
        new_low, new_high = np.uint64(0), np.uint64(0)
        for j in range(span):
            own = decode(raw(chunks.field(low, high, j * bits)))
            other = decode(raw(chunks.field(other_low, other_high, j * bits)))
            x, y = (other, own) if second else (own, other)
            word = rotated(x, y, at.angles + (pair + j) * angles.PAIR, second)
            new_low, new_high = chunks.insert_bits(new_low, new_high, word, j * bits)
        return new_low, new_high

    @shared
    def read_together(at):
        """Rotate the pairs of neighbours in a chunk."""
        low, high = read(at.address)
        i = at.element - at.begin
        if at.angles == 0 or i < 0 or i >= 2 * at.pairs:
            return low, high
        new_low, new_high = np.uint64(0), np.uint64(0)
        for j in range(0, span, 2):
            x = decode(raw(chunks.field(low, high, j * bits)))
            y = decode(raw(chunks.field(low, high, (j + 1) * bits)))
            pair = at.angles + (i + j) // 2 * angles.PAIR
            new_low, new_high = chunks.insert_bits(new_low, new_high, rotated(x, y, pair, False), j * bits)
            word = rotated(x, y, pair, True)
            new_low, new_high = chunks.insert_bits(new_low, new_high, word, (j + 1) * bits)
        return new_low, new_high

    def beside(at, other):
        address, first = at.address + other * (span * size), at.element + other * span
        return Chunk(address, first, at.angles, at.begin, at.pairs)

    read_chunk = read_apart if halves or span == 1 else read_together
    return Reader(read_chunk, device.inlined(beside))


@functools.cache
def copy(element, span):
    """Return f(source, target), which copies a chunk."""
    form = chunks.access(element, span)
    read, write = memory.load(*form, invariant=False), memory.store(*form)

    @shared
    def copy(source, target):
        low, high = read(source)
        write(target, low, high)

    return copy


def rotate_tokens(element, span, halves=False):
    """Return the kernel for a format and a chunk size; pairs are neighbours, or span both `halves`."""
    copy_chunk, copy_one = copy(element, span), copy(element, 1)
    rotate_chunk = rotate_halves(element, span) if halves else rotate_neighbours(element, span)
    size = BY_NAME[element].bytes(1)

    def rotate_tokens(starts, table, pairs, dim, query, key):
        """Rotate all heads of every token by row `token` of the table, [tokens, pairs], and copy the rest."""
        at = query if cuda.blockIdx.y == 0 else key
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        total, in_head = starts[starts.shape[0] - 1], (dim + span - 1) // span
        token, end = share(total, team, teams), share(total, team + 1, teams)
        sequence = sequence_of(starts, token)
        while token < end:
            while token >= starts[sequence + 1]:
                sequence += 1
            for column in range(cuda.threadIdx.x, at.heads * in_head, cuda.blockDim.x):
                head = column // in_head
                i = (column - head * in_head) * span
                source = at.source + sequence * at.source_sequence + token * at.source_token
                source += head * at.source_head + i * size
                target = at.target + sequence * at.target_sequence + token * at.target_token
                target += head * at.target_head + i * size
                if i >= at.rotated:
                    if i + span <= dim:
                        copy_chunk(source, target)
                    else:
                        copy_one(source, target)
                elif not halves:
                    rotate_chunk(source, target, table + (token * pairs + i // 2) * angles.PAIR)
                elif i < at.rotated // 2:
                    pair = table + (token * pairs + i) * angles.PAIR
                    rotate_chunk(source, target, at.rotated // 2 * size, pair)
            token += 1

    return rotate_tokens


compiled = device.variants(rotate_tokens, SIGNATURE)


def prepare(call, targets, table, starts, stream):
    """Return a launch that rotates query and key of a checked call into `targets`; see `angles.table`."""
    element, dim, rotary_dim = call.fmt.name, call.query.shape[-1], call.rotated
    rotated, sides = (rotary_dim, 0 if call.bypass_key else rotary_dim), []
    for source, target, elements in zip((call.query, call.key), targets, rotated, strict=True):
        here, there = ((array.ctypes.data, *packed_strides(array)) for array in (source, target))
        stays = not elements and here[0] == there[0]  # heads that are not rotated, in place
        sides.append(Heads(*here, *there, heads=0 if stays else source.shape[-2], rotated=elements))
    span = span_of(element, dim, rotary_dim, sides, call.halves)
    tokens = int(call.starts[-1])
    columns = max(max(side.heads for side in sides) * -(-dim // span), 1)
    team = min(THREADS, 1 << (columns - 1).bit_length())
    blocks = min(-(-tokens // (THREADS // team)), host.most_blocks())
    arguments = starts, host.address(table), rotary_dim // 2, dim, *sides
    grid, threads = (blocks, len(sides)), (team, THREADS // team)
    return host.Launch(compiled(element, span, call.halves), grid, threads, stream, arguments)


def span_of(element, dim, rotary_dim, sides, halves):
    """Return the elements of a chunk: 16 bytes, or the fewest if rows or addresses do not fit."""
    span, numbers = widest(element), 0
    together = rotary_dim // 2 if halves else rotary_dim
    for side in sides:
        for number in side[:8]:  # addresses and strides
            numbers |= number
    whole = dim % span == 0 and together % span == 0
    return span if whole and numbers % WIDEST == 0 else 1 if halves else SMALLEST
