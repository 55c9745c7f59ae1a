"""Rotate queries and keys by rotary position embedding.

A worker computes a token's angles once and applies them to every head of its query and key. A pair is two
neighbouring elements, or elements i and i + rotary_dim / 2. For neighbours

    y = x * cos + swap(x) * sin,  cos = (c0, c0, c1, c1, ..),  sin = (-s0, s0, -s1, s1, ..)

where swap exchanges the elements of each pair.
"""

import functools
import math

import numpy as np
from numba import types

from kvkit.checks.values import packed_strides
from kvkit.cpu import memory
from kvkit.cpu.copy.transfer import SMALL_BYTES, STREAM_BYTES, aligned
from kvkit.cpu.launches import WORKER, Launch, Record, Workspace, address, run_in_scratch, threads
from kvkit.cpu.simd import panels
from kvkit.cpu.simd.lanes import LANES, RAW, micro_kernel, narrow, read, widen, write
from kvkit.formats.elements import BY_NAME
from kvkit.formulas import numeric
from kvkit.formulas.index import sequence_among, share
from kvkit.runtime.jit import INDEX, callback, compiled, helper

INT, FLOAT = types.int64, types.float64
HEADS_SIGNATURE = types.void(*[INT] * 9)
PARAMS = Record(
    "heads_code workers starts first batch sides dim rotary_dim halves",
    "table table_bytes scaling longest scratch scratch_bytes",
)
# A query or a key: addresses and byte strides of the source and the target, heads, and rotated elements.
SIDE = Record(
    "source source_sequence source_token source_head target target_sequence target_token target_head",
    "heads rotary_dim",
)
SIDE_BYTES = SIDE.dtype.itemsize
SIDE_OWNERS = {
    i * len(SIDE.names) + SIDE.at[field]: prefix + name
    for i, name in enumerate(("query", "key"))
    for field, prefix in (("source", ""), ("target", "rotated "))
}

rotated = numeric.rotation(numeric.product)
get_double = memory.load(types.float64)
get_float, put_float = memory.load(types.float32), memory.store(types.float32)
record, side_at, integers = memory.record(PARAMS), memory.record(SIDE), memory.integers


@memory.machine_code
def call_heads(code, source, source_head, target, target_head, heads, dim, rotary_dim, cosines, sines):
    """Call the machine code of `heads_of` or `halves_of`."""


@functools.cache
def panel(element, stream):
    """Return a micro-kernel that rotates 16 elements, in pairs of neighbours."""

    @micro_kernel
    def panel(b, source, target, cosines, sines):
        x = widen(read(b, source, RAW[element], LANES), element)
        swapped = x.pick(lane ^ 1 for lane in range(LANES))
        cosine, sine = (read(b, table, RAW["float32"], LANES) for table in (cosines, sines))
        write(b, target, narrow(x * cosine + swapped * sine, element), stream)

    return panel


@functools.cache
def heads_of(element, stream=False, plain=False):
    """Compile the rotation of all heads of one token, in pairs of neighbours; kernels call its `address`.

    `stream` uses non-temporal stores; `plain` uses scalar code only (tests).
    """
    size = BY_NAME[element].bytes(1)
    get, put = memory.read(element), memory.write(element)
    raw_get, raw_put = memory.load(memory.BITS[element]), memory.store(memory.BITS[element])
    rotate, move = panel(element, stream), panels.move(element, element, stream)
    table = memory.read("float32")

    def heads_of(source, source_head, target, target_head, heads, dim, rotary_dim, cosines, sines):
        whole, moved = 0 if plain else rotary_dim // LANES * LANES, rotary_dim
        if not (plain or rotary_dim % LANES):
            moved += (dim - rotary_dim) // LANES * LANES
        for head in range(heads):
            x, y = source + head * source_head, target + head * target_head
            for i in range(0, whole, LANES):
                rotate(x + i * size, y + i * size, cosines + i * 4, sines + i * 4)
            for i in range(whole, rotary_dim, 2):
                even, odd = get(x + i * size), get(x + (i + 1) * size)
                cosine, sine = table(cosines + i * 4), table(sines + (i + 1) * 4)
                even, odd = rotated(even, odd, cosine, sine)
                put(y + i * size, even)
                put(y + (i + 1) * size, odd)
            for i in range(rotary_dim, moved, LANES):
                move(x + i * size, y + i * size)
            for i in range(moved, dim):
                raw_put(y + i * size, raw_get(x + i * size))

    return callback(heads_of, HEADS_SIGNATURE, (element, stream, plain))


@functools.cache
def halves_panel(element, stream):
    """Return a micro-kernel that rotates 16 elements with the 16 elements that lie `half` bytes later."""

    @micro_kernel
    def panels(b, source, target, half, cosines, sines):
        x, y = (widen(read(b, at, RAW[element], LANES), element) for at in (source, b.add(source, half)))
        cosine, sine = (read(b, table, RAW["float32"], LANES) for table in (cosines, sines))
        write(b, target, narrow(x * cosine - y * sine, element), stream)
        write(b, b.add(target, half), narrow(y * cosine + x * sine, element), stream)

    return panels


@functools.cache
def halves_of(element, stream=False, plain=False):
    """Compile the rotation of all heads of one token, in pairs of elements i and i + rotary_dim / 2."""
    size = BY_NAME[element].bytes(1)
    get, put = memory.read(element), memory.write(element)
    raw_get, raw_put = memory.load(memory.BITS[element]), memory.store(memory.BITS[element])
    rotate, table = halves_panel(element, stream), memory.read("float32")

    def halves_of(source, source_head, target, target_head, heads, dim, rotary_dim, cosines, sines):
        half = rotary_dim // 2
        whole = 0 if plain else half // LANES * LANES
        behind, positive = half * size, sines + half * 4  # bytes between the elements of a pair; sines
        for head in range(heads):
            x, y = source + head * source_head, target + head * target_head
            for i in range(0, whole, LANES):
                rotate(x + i * size, y + i * size, behind, cosines + i * 4, positive + i * 4)
            for i in range(whole, half):
                at, to = x + i * size, y + i * size
                one, other = rotated(
                    get(at), get(at + behind), table(cosines + i * 4), table(positive + i * 4)
                )
                put(to, one)
                put(to + behind, other)
            for i in range(rotary_dim, dim):
                raw_put(y + i * size, raw_get(x + i * size))

    return callback(halves_of, HEADS_SIGNATURE, (element, stream, plain))


@helper
def fill(frequencies, pairs, base):
    """Write the frequencies of all pairs for one base."""
    for pair in range(pairs):
        put_float(frequencies + 4 * pair, numeric.rotary_frequency(base, pair, 2 * pairs))


@compiled(types.void(FLOAT, INT, INDEX, INT, INT, FLOAT, INT))
def fill_all(theta, rotary_dim, stops, count, longest, factor, table):
    """Write the frequencies [count, pairs] of sequences that end at `stops`."""
    for row in range(count):
        base = numeric.rotary_theta(theta, rotary_dim, stops[row], longest, factor)
        fill(table + 2 * rotary_dim * row, rotary_dim // 2, base)


def frequencies(theta, rotary_dim, stops, longest, factor):
    """Return the frequencies [stops, pairs] of sequences that end at `stops`."""
    table = np.empty((len(stops), rotary_dim // 2), np.float32)
    fill_all.code.ctypes(theta, rotary_dim, address(stops), len(stops), longest, factor, address(table))
    return table


@helper
def fill_angles(position, divisor, frequencies, pairs, halves, cosines, sines):
    """Write the cosines and signed sines of one token."""
    fastest = max(get_float(frequencies), get_float(frequencies + 4 * (pairs - 1)))
    if abs(numeric.rotary_angle(position, divisor, fastest)) < numeric.MAX_ANGLE:
        for i in range(pairs):
            cosine, sine = numeric.cos_sin(
                numeric.rotary_angle(position, divisor, get_float(frequencies + 4 * i))
            )
            put_pair(i, pairs, halves, cosine, sine, cosines, sines)
    else:  # large angles need the exact reduction of libm
        for i in range(pairs):
            angle = np.float64(numeric.rotary_angle(position, divisor, get_float(frequencies + 4 * i)))
            cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            put_pair(i, pairs, halves, cosine, sine, cosines, sines)


@helper
def put_pair(i, pairs, halves, cosine, sine, cosines, sines):
    """Write the cosine and the signed sines of pair i at the positions of its two elements."""
    one, other = (4 * i, 4 * (i + pairs)) if halves else (8 * i, 8 * i + 4)
    put_float(cosines + one, cosine)
    put_float(cosines + other, cosine)
    put_float(sines + one, -sine)
    put_float(sines + other, sine)


@compiled(WORKER)
def rotate_tokens(worker, params_at):
    """Rotate the packed tokens. Sequence b begins at position `first[b]`.

    `sides` has a `SIDE` for queries and one for keys. `table` is the address of the caller's cosines
    [positions, pairs]; sines follow at + `table_bytes`. If it is 0, both are computed. `scaling` has theta,
    the divisor of positions, and the factor that scales the base for contexts longer than `longest` (dynamic
    NTK).
    """
    params = record(params_at)
    starts, first = integers(params.starts), integers(params.first)
    rotary_dim, pairs = params.rotary_dim, params.rotary_dim // 2
    theta, divisor = get_double(params.scaling), get_double(params.scaling + 8)
    factor, total = get_double(params.scaling + 16), starts[params.batch]
    begin, end = share(total, worker, params.workers), share(total, worker + 1, params.workers)
    cosines = params.scratch + worker * params.scratch_bytes
    sines, frequencies = cosines + 4 * rotary_dim, cosines + 8 * rotary_dim
    sequence, base = sequence_among(starts, params.batch, begin), -1.0
    for token in range(begin, end):
        while starts[sequence + 1] <= token:
            sequence += 1
        position = first[sequence] + token - starts[sequence]
        if params.table:
            for i in range(pairs):
                at = params.table + 4 * (position * pairs + i)
                cosine, sine = get_float(at), get_float(at + params.table_bytes)
                put_pair(i, pairs, params.halves, cosine, sine, cosines, sines)
        else:
            stop = first[sequence] + starts[sequence + 1] - starts[sequence]
            stretched = numeric.rotary_theta(theta, rotary_dim, stop, params.longest, factor)
            if stretched != base:
                base = stretched
                fill(frequencies, pairs, base)
            fill_angles(position, divisor, frequencies, pairs, params.halves, cosines, sines)
        for i in range(2):
            side = side_at(params.sides + SIDE_BYTES * i)
            call_heads(
                params.heads_code,
                source=side.source + sequence * side.source_sequence + token * side.source_token,
                source_head=side.source_head,
                target=side.target + sequence * side.target_sequence + token * side.target_token,
                target_head=side.target_head,
                heads=side.heads, dim=params.dim, rotary_dim=side.rotary_dim, cosines=cosines, sines=sines,
            )  # fmt: skip


def prepare_rotary(element, moves, starts, first, rotary_dim, bypass_key, halves, tables, scaling):
    """Return a launch that rotates checked arrays. `moves` is [(query, output), (key, output)].

    With `halves`, pairs are elements i and i + rotary_dim / 2, else neighbours. `tables` are float32
    [cosines | sines, positions, pairs], or None. `scaling` is (theta, divisor of positions, longest, factor
    of the base for longer contexts).
    """
    sides, moved = [], 0
    for (source, target), dims in zip(moves, (rotary_dim, 0 if bypass_key else rotary_dim), strict=True):
        at, to = address(source), address(target)
        heads = source.shape[-2] if dims or at != to else 0  # 0 if there is nothing to do
        sides.append((at, *packed_strides(source), to, *packed_strides(target), heads, dims))
        moved += target.nbytes
    stream = moved >= STREAM_BYTES and all(aligned(target) for _, target in moves)
    stream = stream and not (halves and rotary_dim // 2 * moves[0][0].itemsize % 16)  # second halves too
    workers = threads() if moved >= SMALL_BYTES else 1
    theta, divisor, longest, factor = scaling
    places, scales = np.array(sides, np.int64), doubles(theta, divisor, factor)
    scratch_bytes = 64 * rotary_dim
    params = PARAMS.filled({
        "heads_code": (halves_of if halves else heads_of)(element, stream).address, "workers": workers,
        "starts": starts, "first": first, "batch": len(first),
        "sides": places, "dim": moves[0][0].shape[-1], "rotary_dim": rotary_dim, "halves": halves,
        "table": tables,
        "table_bytes": 0 if tables is None else tables.strides[0],
        "scaling": scales, "longest": longest,
        "scratch": 0, "scratch_bytes": scratch_bytes,
    })  # fmt: skip
    place = PARAMS.at["scratch"], scratch, scratch_bytes
    run = functools.partial(run_in_scratch, rotate_tokens.code, workers, params, *place)
    return Launch(places.reshape(-1), SIDE_OWNERS, run, alive=(params, moves, starts, first, scales, tables))


scratch = Workspace()  # cosines, sines and frequencies of each worker


@functools.lru_cache(64)
def doubles(*numbers):
    """Return an array of float64, the same one for the same numbers."""
    return np.array(numbers)
