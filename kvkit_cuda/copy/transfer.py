"""Append and gather: one walk over tokens and rows, for every layout, mode and format.

Tokens are shared out to teams of threads. A team walks the rows of its tokens as a thread of the CPU does;
its threads take a chunk of a row each.
"""

import functools

import numpy as np
from numba import cuda, types

from kvkit.formats import BY_NAME
from kvkit.formulas.index import page_of, rest_of_page, row_of, sequence_among, share
from kvkit.layouts.places import packed_strides
from kvkit_cuda.copy import blocks, chunks
from kvkit_cuda.device_runtime import device, host

THREADS = 256  # of a block
WARP = 32

INT, INDEX1, INDEX2 = types.int64, types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
SIDE = types.UniTuple(types.int64, 12)
SIGNATURE = types.void(INDEX1, INDEX1, INDEX2, INT, SIDE, SIDE, INT, INT, INT, INT, INT)

sequence_among = device.inlined(sequence_among.py_func)


@device.inlined
def sequence_of(starts, token):
    return sequence_among(starts, starts.shape[0] - 1, token)


def walk(direction, packed, stored, cell, span, given=False):
    """The kernel for a direction ("store" or "load"), formats (`cell` is None: no codes) and a chunk size.

    A cell that is `given` is a whole row's, and a store finds none.
    """
    on_chunk = on_chunk_of(direction, packed, stored, cell, span, given)
    packed_bytes, stored_bytes = BY_NAME[packed].bytes(span), BY_NAME[stored].bytes(span)
    cell_bytes = BY_NAME[cell].bytes(1) if cell else 0

    def walk(starts, first, table, page_size, keys, values, heads, repeat, chunks, group, lanes):
        """Move the packed tokens of every sequence, which take positions from `first` on, to or from rows.

        `keys` and `values` hold address and byte strides: packed (address, sequence, token, head), then cache
        and scale (address, sequence, row, head). A head has `chunks` chunks, a group of codes `group`; the
        `lanes` threads that share a group tell each other of it (0: each looks for itself).
        """
        at = keys if cuda.blockIdx.y == 0 else values
        team = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        teams = cuda.gridDim.x * cuda.blockDim.y
        total = starts[starts.shape[0] - 1]
        token, end = share(total, team, teams), share(total, team + 1, teams)
        sequence = sequence_of(starts, token)
        mates = mates_of(cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x, lanes)
        while token < end:
            while token >= starts[sequence + 1]:
                sequence += 1
            position = first[sequence] + token - starts[sequence]
            row = row_of(table[sequence, page_of(position, page_size)], position, page_size)
            run = min(min(end, starts[sequence + 1]) - token, rest_of_page(position, page_size))
            for column in range(cuda.threadIdx.x, heads * repeat * chunks, cuda.blockDim.x):
                packed_head = column // chunks
                chunk = column - packed_head * chunks
                head, member = packed_head // repeat, chunk % group
                packed = at[0] + sequence * at[1] + token * at[2] + packed_head * at[3] + chunk * packed_bytes
                cache = at[4] + sequence * at[5] + row * at[6] + head * at[7] + chunk * stored_bytes
                scale = at[8] + sequence * at[9] + row * at[10] + head * at[11] + chunk // group * cell_bytes
                for _ in range(run):
                    on_chunk(packed, cache, scale, member, group, lanes, mates)
                    packed += at[2]
                    cache += at[6]
                    scale += at[10]
            token += run

    return walk


def store_floats(packed, stored, cell, span):
    block = BY_NAME[stored].block
    store = blocks.store(packed, stored) if block else chunks.store(packed, stored, span)

    def on_chunk(packed, cache, scale, member, group, lanes, mates):
        store(packed, cache)

    return device.inlined(on_chunk)


def load_floats(packed, stored, cell, span):
    block = BY_NAME[stored].block
    load = blocks.load(packed, stored) if block else chunks.load(packed, stored, span)

    def on_chunk(packed, cache, scale, member, group, lanes, mates):
        load(packed, cache)

    return device.inlined(on_chunk)


def load_codes(packed, stored, cell, span):
    dequantize = chunks.dequantize(packed, stored, cell, span)

    def on_chunk(packed, cache, scale, member, group, lanes, mates):
        dequantize(packed, cache, scale)

    return device.inlined(on_chunk)


def store_codes(packed, stored, cell, span):
    largest, quantize = chunks.largest(packed, span), chunks.quantize(packed, stored, cell, span)
    if BY_NAME[stored].minifloat:
        quantize = chunks.divide(packed, stored, cell, span, given=False)
    exchange, chunk_bytes = device.exchange, BY_NAME[packed].bytes(span)

    def on_chunk(packed, cache, scale, member, group, lanes, mates):
        found = np.int32(0)
        for other in range(0 if lanes else -member, 1 if lanes else group - member):
            found = max(found, np.int32(largest(packed + other * chunk_bytes)))
        distance = 1
        while distance < lanes:
            found = max(found, np.int32(exchange(mates, found, distance)))
            distance *= 2
        quantize(packed, cache, scale, found, member == 0)

    return device.inlined(on_chunk)


def store_quotients(packed, stored, cell, span):
    divide = chunks.divide(packed, stored, cell, span, given=True)

    def on_chunk(packed, cache, scale, member, group, lanes, mates):
        divide(packed, cache, scale, np.int32(0), False)

    return device.inlined(on_chunk)


ON_CHUNK = {
    ("store", "given"): store_quotients,
    ("store", False): store_floats,
    ("load", False): load_floats,
    ("store", True): store_codes,
    ("load", True): load_codes,
}


@device.inlined
def mates_of(thread, lanes):
    """The threads of a warp that share a group with one, as a mask; `lanes` of them, or 0."""
    return ((1 << lanes) - 1) << (thread % WARP & -lanes)


def lanes_of(members, team=WARP):
    """How many threads of a team tell each other of a group of so many chunks; 0 if each looks for itself."""
    return members if members <= min(WARP, team) and members & (members - 1) == 0 else 0


def on_chunk_of(direction, packed, stored, cell, span, given):
    """(packed, cache, scale address, member, group, lanes, mates): what happens to a chunk."""
    kind = "given" if given and direction == "store" else cell is not None
    return ON_CHUNK[direction, kind](packed, stored, cell, span)


# Whose addresses those of keys and of values are.
CACHE = {4: "cache", 8: "scale"}
OWNERS = {
    "store": ({0: "current_key"} | CACHE, {0: "current_value"} | CACHE),
    "load": ({0: "result 0"} | CACHE, {0: "result 1"} | CACHE),
}


@functools.cache
def compiled(*variant):
    return device.kernel(walk(*variant), SIGNATURE, variant)


def store(current_key, current_value, cache, tables, stream):
    """A launch that appends the packed new tokens to their rows."""
    return prepare("store", current_key, current_value, cache, tables, ("seqstarts", "start_pos"), 1, stream)


def load(key, value, cache, tables, repeat, stream):
    """A launch that gathers the rows of every sequence's context into packed outputs."""
    return prepare("load", key, value, cache, tables, ("kvstarts", "zeros"), repeat, stream)


def prepare(direction, key, value, cache, tables, names, repeat, stream):
    """Compile what a transfer needs, or find it, and gather its arguments; the result launches it."""
    steps = tables.steps
    sides = [
        (array.ctypes.data, *packed_strides(array), *place)
        for array, place in zip((key, value), cache.sides, strict=True)
    ]
    span, given = span_of(cache, sides), cache.cell is not None and not cache.group
    kernel = compiled(direction, cache.packed, cache.stored, cache.cell, span, given)
    in_head, group = cache.dim // span, max((cache.dim if given else cache.group) // span, 1)
    tokens, heads = int(getattr(steps, names[0])[-1]), cache.heads
    team = min(THREADS, 1 << (heads * repeat * in_head - 1).bit_length())
    lanes = 0 if given else lanes_of(group, team)
    teams = THREADS // team
    blocks = min(-(-tokens // teams), host.most_blocks())
    copies = tables.of((*names, "table"), stream) if tokens else ()
    arguments = *copies, steps.page_size, *sides, heads, repeat, in_head, group, lanes
    first = len(copies) + 1
    owners = {(first + i, at): name for i, side in enumerate(OWNERS[direction]) for at, name in side.items()}
    return host.Launch(kernel, (blocks, 2), (team, teams), stream, arguments, owners)


def span_of(cache, sides):
    """Elements of a chunk: as many as 16 bytes hold, or the fewest if those are not aligned or not whole."""
    if BY_NAME[cache.stored].block:
        return BY_NAME[cache.stored].block.elements
    span = chunks.widest(cache.packed, cache.stored)
    packed_bytes, stored_bytes = BY_NAME[cache.packed].bytes(span), BY_NAME[cache.stored].bytes(span)
    packed_at = cache_at = 0
    for side in sides:
        for number in side[:4]:
            packed_at |= number
        for number in side[4:8]:
            cache_at |= number
    whole = cache.dim % span == 0 and cache.group % span == 0
    if whole and packed_at % packed_bytes == 0 and cache_at % stored_bytes == 0:
        return span
    return chunks.smallest(cache.stored)
