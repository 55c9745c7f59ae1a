"""Rotary position embedding: the angles of a token once, then every head of its query and key.

Elements turn in pairs, of neighbours or of both halves. The table of a token has each cosine twice and each
sine with both signs, where the elements of a pair are, so that a panel of neighbours is x * cosines + (x with
the elements of each pair swapped) * sines.
"""

import functools
import math

import numpy as np
from numba import prange, types

from kvkit import numeric
from kvkit.cpu import memory
from kvkit.cpu.launches import Launch, address, threads
from kvkit.cpu.simd import panels
from kvkit.cpu.simd.lanes import RAW, micro_kernel, narrow, read, widen, write
from kvkit.cpu.transfer import SMALL_BYTES, STREAM_BYTES, aligned
from kvkit.formats import BY_NAME
from kvkit.index import sequence_of, share
from kvkit.jit import callback, helper, kernel
from kvkit.layouts.places import packed_strides

LANES = 16
INT, FLOAT = types.int64, types.float64
HEADS_SIGNATURE = types.void(*[INT] * 9)
INDEX1, INDEX2 = types.Array(INT, 1, "C"), types.Array(INT, 2, "C")
FREQUENCIES_SIGNATURE = types.void(FLOAT, INT, INDEX1, INT, FLOAT, types.Array(types.float32, 2, "C"))
TABLES = types.Array(types.float32, 3, "C")
SIGNATURE = types.void(INT, INT, INDEX1, INDEX1, INDEX2, INT, INT, INT, TABLES, FLOAT, FLOAT, INT, FLOAT)
NO_TABLES = np.empty((2, 0, 0), np.float32)

call_heads, rotated = memory.call(9), numeric.rotation(numeric.product)


@functools.cache
def panel(element, stream):
    """(source, target, cosines, sines): 16 elements turned."""

    @micro_kernel(4)
    def panel(b, source, target, cosines, sines):
        x = widen(read(b, source, RAW[element], LANES), element)
        swapped = x.pick(lane ^ 1 for lane in range(LANES))
        cosine, sine = (read(b, table, RAW["float32"], LANES) for table in (cosines, sines))
        write(b, target, narrow(x * cosine + swapped * sine, element), stream)

    return panel


@functools.cache
def heads_of(element, stream=False, plain=False):
    """Compile what happens to all heads of one token of a query or key; kernels call its `address`.

    `stream` writes around the caches; `plain` leaves the vectors out, for the tests.
    """
    size = BY_NAME[element].bytes(1)
    get, put = memory.read(element), memory.write(element)
    raw_get, raw_put = memory.load(memory.BITS[element]), memory.store(memory.BITS[element])
    turn, move, table = panel(element, stream), panels.move(element, element, stream), memory.read("float32")

    def heads_of(source, source_head, target, target_head, heads, dim, turned, cosines, sines):
        whole = 0 if plain else turned // LANES * LANES
        moved = turned if plain or turned % LANES else turned + (dim - turned) // LANES * LANES
        for head in range(heads):
            x, y = source + head * source_head, target + head * target_head
            for i in range(0, whole, LANES):
                turn(x + i * size, y + i * size, cosines + i * 4, sines + i * 4)
            for i in range(whole, turned, 2):
                even, odd = get(x + i * size), get(x + (i + 1) * size)
                cosine, sine = table(cosines + i * 4), table(sines + (i + 1) * 4)
                even, odd = rotated(even, odd, cosine, sine)
                put(y + i * size, even)
                put(y + (i + 1) * size, odd)
            for i in range(turned, moved, LANES):
                move(x + i * size, y + i * size)
            for i in range(moved, dim):
                raw_put(y + i * size, raw_get(x + i * size))

    return callback(heads_of, HEADS_SIGNATURE, (element, stream, plain))


@functools.cache
def panels_of_halves(element, stream):
    """(source, target, half, cosines, sines): 16 elements and those `half` bytes behind them, turned."""

    @micro_kernel(5)
    def panels(b, source, target, half, cosines, sines):
        x, y = (widen(read(b, at, RAW[element], LANES), element) for at in (source, b.add(source, half)))
        cosine, sine = (read(b, table, RAW["float32"], LANES) for table in (cosines, sines))
        write(b, target, narrow(x * cosine - y * sine, element), stream)
        write(b, b.add(target, half), narrow(y * cosine + x * sine, element), stream)

    return panels


@functools.cache
def halves_of(element, stream=False, plain=False):
    """`heads_of` where an element's pair is half of what turns behind it."""
    size = BY_NAME[element].bytes(1)
    get, put = memory.read(element), memory.write(element)
    raw_get, raw_put = memory.load(memory.BITS[element]), memory.store(memory.BITS[element])
    turn, table = panels_of_halves(element, stream), memory.read("float32")

    def halves_of(source, source_head, target, target_head, heads, dim, turned, cosines, sines):
        half = turned // 2
        whole = 0 if plain else half // LANES * LANES
        behind, positive = half * size, sines + half * 4
        for head in range(heads):
            x, y = source + head * source_head, target + head * target_head
            for i in range(0, whole, LANES):
                turn(x + i * size, y + i * size, behind, cosines + i * 4, positive + i * 4)
            for i in range(whole, half):
                at, to = x + i * size, y + i * size
                one, other = rotated(
                    get(at), get(at + behind), table(cosines + i * 4), table(positive + i * 4)
                )
                put(to, one)
                put(to + behind, other)
            for i in range(turned, dim):
                raw_put(y + i * size, raw_get(x + i * size))

    return callback(halves_of, HEADS_SIGNATURE, (element, stream, plain))


@helper
def fill(frequencies, base):
    """The frequencies of a base."""
    pairs = frequencies.shape[0]
    for pair in range(pairs):
        frequencies[pair] = numeric.rotary_frequency(base, pair, 2 * pairs)


def fill_all(theta, turned, stops, longest, factor, table):
    for row in range(stops.shape[0]):
        fill(table[row], numeric.rotary_theta(theta, turned, stops[row], longest, factor))


@functools.cache
def compiled_frequencies():
    return kernel(fill_all, FREQUENCIES_SIGNATURE)


def frequencies(theta, turned, stops, longest, factor):
    """The frequencies [stops, pairs] of sequences that end at `stops`."""
    table = np.empty((len(stops), turned // 2), np.float32)
    compiled_frequencies()(theta, turned, stops, longest, factor, table)
    return table


@helper
def turns(position, divisor, frequencies, halves, cosines, sines):
    """The table of a token."""
    pairs = frequencies.shape[0]
    fastest = max(frequencies[0], frequencies[pairs - 1])
    if abs(numeric.rotary_angle(position, divisor, fastest)) < numeric.TURNS:
        for i in range(pairs):
            cosine, sine = numeric.cos_sin(numeric.rotary_angle(position, divisor, frequencies[i]))
            put_pair(i, pairs, halves, cosine, sine, cosines, sines)
    else:
        for i in range(pairs):
            angle = np.float64(numeric.rotary_angle(position, divisor, frequencies[i]))
            cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            put_pair(i, pairs, halves, cosine, sine, cosines, sines)


@helper
def put_pair(i, pairs, halves, cosine, sine, cosines, sines):
    """Those of pair i, where its elements are."""
    one, other = (i, i + pairs) if halves else (2 * i, 2 * i + 1)
    cosines[one], cosines[other] = cosine, cosine
    sines[one], sines[other] = -sine, sine


def walk(code, chunks, starts, first, sides, dim, turned, halves, tables, theta, divisor, longest, factor):
    """Turn the packed tokens of every sequence, which take positions from `first` on.

    `sides` [query|key, 10] holds address and byte strides (sequence, token, head) of the source and the
    target, the number of heads and how many elements of each turn: `turned`, or none. If `tables`, [cosines |
    sines, positions, pairs], are not empty they are given, and not computed.
    """
    total = starts[-1]
    for item in prange(chunks):
        chunk = np.int64(item)
        begin, end = share(total, chunk, chunks), share(total, chunk + 1, chunks)
        frequencies = np.empty(turned // 2, np.float32)
        cosines, sines = np.empty(turned, np.float32), np.empty(turned, np.float32)
        sequence, base = sequence_of(starts, begin), -1.0
        for token in range(begin, end):
            while starts[sequence + 1] <= token:
                sequence += 1
            position = first[sequence] + token - starts[sequence]
            if tables.shape[1]:
                for i in range(turned // 2):
                    cosine, sine = tables[0, position, i], tables[1, position, i]
                    put_pair(i, turned // 2, halves, cosine, sine, cosines, sines)
            else:
                stop = first[sequence] + starts[sequence + 1] - starts[sequence]
                stretched = numeric.rotary_theta(theta, turned, stop, longest, factor)
                if stretched != base:
                    base = stretched
                    fill(frequencies, base)
                turns(position, divisor, frequencies, halves, cosines, sines)
            for side in range(2):
                at = sides[side]
                call_heads(
                    code,
                    at[0] + sequence * at[1] + token * at[2], at[3],
                    at[4] + sequence * at[5] + token * at[6], at[7],
                    at[8], dim, at[9], cosines.ctypes.data, sines.ctypes.data,
                )  # fmt: skip


@functools.cache
def compiled(parallel):
    return kernel(walk, SIGNATURE, parallel, parallel=parallel)


def prepare(element, moves, starts, first, turned, bypass_key, halves, tables, scaling, new):
    """A launch that turns `moves`: (query, its output) and (key, its output). Nothing can fail any more.

    `halves` says which elements are pairs; `tables` are float32 [cosines | sines, positions, pairs], or None.
    `scaling` is (theta, divisor of positions, longest, factor of the base beyond); `new` memory is in the
    caches already: the system has just filled it with zeros.
    """
    sides, moved = [], 0
    for (source, target), turning in zip(moves, (turned, 0 if bypass_key else turned), strict=True):
        place = address(target)
        where = address(source), *packed_strides(source), place, *packed_strides(target)
        heads = source.shape[-2] if turning or where[0] != place else 0  # nothing to do in place
        sides.append((*where, heads, turning))
        moved += target.nbytes
    stream = not new and moved >= STREAM_BYTES and all(aligned(target) for _, target in moves)
    stream = stream and not (halves and turned // 2 * moves[0][0].itemsize % 16)
    parallel = moved >= SMALL_BYTES
    chunks = threads() if parallel else 1
    numbers, dim = np.array(sides, np.int64), moves[0][0].shape[-1]
    code = (halves_of if halves else heads_of)(element, stream).address
    tables = NO_TABLES if tables is None else tables
    arguments = code, chunks, starts, first, numbers, dim, turned, halves, tables, *scaling
    return Launch(numbers.reshape(-1), {}, functools.partial(compiled(parallel), *arguments), alive=moves)
